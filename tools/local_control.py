"""Trains a network that sees at most 31 pixels on the images of an experiment, and scores it.

The control of the demo: what can be said about the synthetic scenes from local texture alone. It
takes the steps, batches, augmentation, optimizer and learning rate of CONFIG, and about as many
parameters as its PSPNet, but every output pixel depends on a 31x31 window of the image only.

    python tools/local_control.py configs/demo.yaml --set data.root=PATH
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from segtrain.config import Config, load_config
from segtrain.data import open_dataset
from segtrain.data.sample.loader import TrainStream
from segtrain.data.sample.transforms import TrainTransform
from segtrain.errors import UserError
from segtrain.metrics import ConfusionMatrix, Scores
from segtrain.models.blocks import Normalize
from segtrain.seed import seed_everything
from segtrain.training.optim import build_optimizer, learning_rate, set_learning_rate
from segtrain.types import IGNORE_INDEX, SegLogits

MAX_RECEPTIVE_FIELD_PX = 31
# 9.1 million parameters with these, beside 12.8 million of the demo's PSPNet in training.
_WIDTH = 512
_NUM_BLOCKS = 4


class LocalNet(nn.Module):
    """A residual network whose receptive field is 31 pixels, upsampling included.

    The field grows as 7 (7x7, stride 2), 11 (3x3), 15 (3x3, stride 2) and 23 (3x3, stride 2); all
    that follows is 1x1. At stride 8, bilinear upsampling mixes neighbouring cells: 23 + 8 = 31.
    """

    def __init__(
        self, num_classes: int, *, width: int = _WIDTH, num_blocks: int = _NUM_BLOCKS
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_conv(3, 64, 7, 2),
            *_conv(64, 64, 3, 1),
            *_conv(64, 128, 3, 2),
            *_conv(128, width, 3, 2),
        )
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(num_blocks)))
        self.classifier = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> SegLogits:
        """Normalized images (N, 3, H, W) to logits of the same size."""
        logits = self.classifier(self.blocks(self.stem(images)))
        size = images.shape[-2:]
        return SegLogits(F.interpolate(logits, size, mode="bilinear", align_corners=False))


class _Block(nn.Module):
    """Two 1x1 convolutions, four times as wide between them, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_conv(width, 4 * width, 1, 1), *_conv(4 * width, width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]


def receptive_field(net: nn.Module, size: int = 96) -> tuple[int, int]:
    """Height and width in pixels of the largest window that any one output pixel depends on.

    Measured: the footprint of the gradient of single output pixels with respect to the input, over
    all phases of the stride.
    """
    net = net.eval()
    largest = (0, 0)
    for offset in range(8):
        image = torch.randn(1, 3, size, size, requires_grad=True)
        place = size // 2 + offset
        (gradient,) = torch.autograd.grad(net(image).out[0, :, place, place].sum(), image)
        rows, columns = gradient[0].abs().amax(0).nonzero().unbind(1)
        extent = (int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1)
        largest = (max(largest[0], extent[0]), max(largest[1], extent[1]))
    return largest


def train(net: nn.Module, config: Config) -> None:
    """The training of `config` in one process."""
    settings = config.train
    stream = TrainStream(
        open_dataset(config.data, config.data.train_split),
        TrainTransform(
            config.augment, mean=config.data.mean, short_side_px=config.data.short_side_px
        ),
        stream_seed=config.seed,
        batch_size=settings.batch_size,
    )
    normalize = Normalize(config.data.mean, config.data.std)
    optimizer = build_optimizer(net, settings)
    net.train()
    for step in (bar := tqdm(range(settings.steps), desc="local control", unit="step")):
        samples = [stream[step, i] for i in range(settings.batch_size)]
        images = torch.stack([sample[0] for sample in samples])
        labels = torch.stack([sample[1] for sample in samples]).long()
        logits = net(normalize(images).contiguous(memory_format=torch.channels_last)).out
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
        set_learning_rate(optimizer, learning_rate(settings, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")


@torch.inference_mode()
def evaluate(net: nn.Module, config: Config) -> tuple[Scores, tuple[str, ...]]:
    """Scores over the evaluation split, whole images, and the names of the classes."""
    dataset = open_dataset(config.data, config.data.eval_split)
    normalize = Normalize(config.data.mean, config.data.std)
    matrix = ConfusionMatrix(dataset.classes.num_classes)
    net.eval()
    for image, label in dataset:
        batch = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]
        pred = net(normalize(batch)).out.argmax(1)[0]
        matrix.update(pred, torch.from_numpy(label))
    return matrix.scores(), tuple(dataset.classes.names)


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, metavar="CONFIG")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--threads", type=int, default=None, help="default: torch's own choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        config = load_config(args.config, tuple(args.set))
        seed_everything(config.seed)
        classes = open_dataset(config.data, config.data.eval_split).classes
        net = LocalNet(classes.num_classes).to(memory_format=torch.channels_last)
        field = receptive_field(net)
        assert max(field) <= MAX_RECEPTIVE_FIELD_PX, f"receptive field {field}"
        millions = sum(p.numel() for p in net.parameters()) / 1e6
        print(f"receptive field {field[0]}x{field[1]} pixels, {millions:.1f} million parameters")
        train(net, config)
        scores, names = evaluate(net, config)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for name, iou in zip(names, scores.iou, strict=True):
        if iou == iou:
            print(f"{name:<16} IoU {iou:.3f}")
    print(f"mIoU {scores.mean_iou:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
