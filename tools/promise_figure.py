"""Draws the promise: the loss on 1, 2 and 3 ranks, by segtrain and by the usual way.

    python tools/promise_figure.py runs/promise --output tools/invariance.png

The usual way is plain torch: DistributedDataParallel, a mean loss over each rank's own pixels, and
batch norm with each rank's own statistics. segtrain trains with train.shares and without. All ways
start from the same weights, see the same crops in the same order and take the same optimizer; on
one rank they are the same training up to rounding, which the script checks. The curve is the mean
loss over the valid pixels of all ranks.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from commands import draw_scenes, logged, segtrain
from PIL import Image, ImageDraw
from rounds import on_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from segtrain.config import Config, load_config
from segtrain.data import open_dataset
from segtrain.data.sample.stream import TrainStream
from segtrain.data.sample.transforms import TrainTransform
from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import Layout, even
from segtrain.models import build_model
from segtrain.models.blocks import Normalize
from segtrain.run.pictures import text_mask
from segtrain.seed import seed_everything
from segtrain.types import IGNORE_INDEX

RANKS = (1, 2, 3)
SCENE_PX = (64, 128)
# Three ranks take 3, 2 and 2 images. Scenes that shrink leave much of their crop empty, which is
# ignored: so the ranks differ in their numbers of valid pixels.
EXPERIMENT = """\
data: {{layout: cityscapes, root: {data}, classes: cityscapes, num_workers: 0}}
augment: {{crop_size: [64, 96], scale_range: [0.3, 1.3]}}
model:
  arch: pspnet
  backbone: resnet18
  output_stride: 16
  head_channels: 32
  aux_head: false
  dropout: 0.0
train: {{steps: {steps}, batch_size: 7, precision: float32, shares: {shares}}}
optim: {{lr: 0.005}}
log: {{every_steps: 1}}
eval: {{every_steps: null}}
"""

USUAL = "DistributedDataParallel, all per rank"
OURS = "segtrain"
WITH_SHARES = "segtrain, train.shares: 7"
BEGINNING = 3  # steps in which training has not amplified rounding yet

Curves = dict[int, list[float]]
"""The loss of every step, by the number of ranks."""


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where data and runs are written")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the PNG")
    parser.add_argument("--steps", type=int, default=80, metavar="N")
    args = parser.parse_args()
    data = draw_scenes(args.directory / "data", 40, 2, SCENE_PX)
    configs = {}
    for shares in ("null", 7):
        configs[shares] = args.directory / f"shares_{shares}.yaml"
        configs[shares].write_text(EXPERIMENT.format(data=data, steps=args.steps, shares=shares))
    plain = load_config(configs["null"])
    ways = {USUAL: {n: on_ranks(n, "cpu", usual_losses, plain) for n in RANKS}}
    for title, shares in ((OURS, "null"), (WITH_SHARES, 7)):
        runs = {n: args.directory / f"shares_{shares}_{n}" for n in RANKS}
        ways[title] = {n: segtrain_losses(runs[n], configs[shares], n) for n in RANKS}
    for step in range(args.steps):
        row = [curve[step] for curves in ways.values() for curve in curves.values()]
        print(f"{step + 1:4}  " + "".join(f"{loss:9.4f}" for loss in row))
    for title, curves in ways.items():
        first_step = apart({ranks: curve[:1] for ranks, curve in curves.items()})
        print(f"{title}: differs from 1 rank by {first_step:.1e} in the first step, ", end="")
        print(f"by at most {apart(curves):.1e}")
    # Nothing but the ways differs if they agree on one rank where training begins.
    first = {i: curves[1][:BEGINNING] for i, curves in enumerate(ways.values())}
    if apart(first) > 1e-4:
        print("on one rank the ways differ: they are not the same experiment", file=sys.stderr)
        return 1
    # Few colours: a third of the bytes.
    Image.fromarray(figure(ways)).quantize(64).save(args.output, optimize=True)
    return 0


def segtrain_losses(run: Path, config: Path, ranks: int) -> list[float]:
    """The loss of every step of `segtrain train`."""
    segtrain("train", config, "--nproc", ranks, "--device", "cpu", "--output", run)
    return logged(run, "train/loss")


def usual_losses(device: torch.device, config: Config) -> list[float]:
    """The loss of every step of DistributedDataParallel with local batch norm and local means."""
    optim = config.optim
    dtype = torch.float32
    seed_everything(config.seed)
    dataset = open_dataset(config.data, config.data.train_split)
    model = build_model(config.model, num_classes=dataset.classes.num_classes)  # nn.BatchNorm2d
    model = DistributedDataParallel(model.to(device, dtype).train())
    optimizer = torch.optim.SGD(
        model.parameters(), optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay
    )
    schedule = torch.optim.lr_scheduler.PolynomialLR(
        optimizer, config.train.steps, config.schedule.poly_power
    )
    normalize = Normalize(config.data.mean, config.data.std).to(dtype)
    curve = []
    for images, labels in _batches(config, dist.rank(), dist.world_size()):
        logits = model(normalize(images)).out
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)  # this rank's pixels
        optimizer.zero_grad()
        loss.backward()  # DistributedDataParallel takes the mean over the ranks
        optimizer.step()
        schedule.step()
        curve.append(_loss_of_all_pixels(loss.detach(), labels))
    return curve


def _batches(config: Config, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The crops that this rank gets from segtrain, too: every way sees the same."""
    data = config.data
    train_set = open_dataset(data, data.train_split)
    stream = TrainStream(
        train_set,
        TrainTransform(config.augment, form=train_set.form, short_side_px=data.short_side_px),
        stream_seed=config.seed,
        batch_size=config.train.batch_size,
    )
    (positions,) = Layout.of(config.train, even(ranks)).positions(rank)
    for step in range(config.train.steps):
        images, labels, *_ = zip(*(stream[step, i] for i in positions), strict=True)
        yield torch.stack(images), torch.stack(labels).long()


def _loss_of_all_pixels(mean: Tensor, labels: Tensor) -> float:
    """What is drawn: each rank's mean, weighed by its pixels, so that only training differs."""
    pixels = (labels != IGNORE_INDEX).sum()
    sums = dist.all_reduce_sum(torch.stack([mean.double() * pixels, pixels.double()]))
    return float(sums[0] / sums[1])


def apart(curves: Curves) -> float:
    """The largest relative difference of any curve to the first one."""
    first, *others = (np.array(curve) for curve in curves.values())
    return max(float(np.abs(other / first - 1).max()) for other in others)


# The picture.

Rgb = tuple[int, int, int]
SIZE = (1200, 450)
SMALLEST = -9  # log10 of the difference at the bottom of the lower charts
PAPER, INK, FAINT = (255, 255, 255), (32, 32, 32), (225, 225, 225)
# Wide below narrow: curves that lie on each other stay visible, all three.
PENS: dict[int, tuple[Rgb, int]] = {
    1: ((250, 190, 90), 6),
    2: ((60, 130, 200), 3),
    3: ((20, 20, 20), 1),
}
# Drawn at twice the size and shrunk: Pillow's lines have jagged edges.
ZOOM = 2


class Chart(NamedTuple):
    """The place of one chart in the picture, and its scale."""

    picture: Image.Image
    left: int
    top: int
    height: int
    steps: int
    lowest: float
    highest: float
    width: int = 320

    def place(self, step: float, value: float) -> tuple[float, float]:
        """Where a value stands, in units of the final picture."""
        share = (value - self.lowest) / (self.highest - self.lowest)
        x = self.left + self.width * (step - 1) / (self.steps - 1)
        return x, self.top + self.height * (1 - share)


def figure(ways: dict[str, Curves]) -> np.ndarray:
    """Loss above difference to one rank, for all ways with the same scales, (450, 1200, 3)."""
    picture = Image.new("RGB", (ZOOM * SIZE[0], ZOOM * SIZE[1]), PAPER)
    values = [loss for curves in ways.values() for curve in curves.values() for loss in curve]
    low, high = np.floor(2 * min(values)) / 2, np.ceil(2 * max(values)) / 2
    for column, (title, curves) in enumerate(ways.items()):
        left = 60 + 400 * column
        _write(picture, (left, 8), title, size=17)
        steps = len(curves[1])
        chart = Chart(picture, left, 45, 205, steps, low, high)
        _axes(chart, "loss", list(np.arange(low, high + 0.1, 0.5)), "{:.1f}")
        for ranks, curve in curves.items():
            _curve(chart, curve, ranks)
            _key(chart, ranks)
        chart = Chart(picture, left, 295, 100, steps, SMALLEST, 0)
        most = f"at most {apart(curves):.0e}" if apart(curves) else "none, in any bit"
        _axes(chart, f"difference to 1 rank: {most}", [-8, -6, -4, -2, 0], "1e{:.0f}")
        for ranks, curve in curves.items():
            gaps = np.abs(np.array(curve) / np.array(curves[1]) - 1)
            _curve(chart, list(np.log10(np.maximum(gaps, 10.0**SMALLEST))), ranks)
        for step in (1, *range(20, steps + 1, 20)):
            x, y = chart.place(step, SMALLEST)
            _write(picture, (x - 4 * len(str(step)), y + 4), str(step))
        _write(picture, (left + chart.width // 2 - 15, 424), "step")
    return np.array(picture.resize(SIZE, Image.Resampling.LANCZOS))


def _axes(chart: Chart, title: str, ticks: list[float], form: str) -> None:
    for tick in ticks:
        _line(chart.picture, [chart.place(1, tick), chart.place(chart.steps, tick)], FAINT, 1)
        x, y = chart.place(1, tick)
        text = form.format(tick).replace("1e0", "1")
        _write(chart.picture, (x - 9 * len(text) - 6, y - 10), text)
    corners = (chart.lowest, 1), (chart.lowest, chart.steps)
    places = [chart.place(1, chart.highest), *(chart.place(step, low) for low, step in corners)]
    _line(chart.picture, places, INK, 1)
    _write(chart.picture, (chart.left + 8, chart.top - 17), title)


def _curve(chart: Chart, values: list[float], ranks: int) -> None:
    places = [chart.place(step, value) for step, value in enumerate(values, start=1)]
    _line(chart.picture, places, *PENS[ranks])


def _key(chart: Chart, ranks: int) -> None:
    x, y = chart.left + chart.width - 115, chart.top - 5 + 20 * ranks
    _line(chart.picture, [(x, y), (x + 40, y)], *PENS[ranks])
    _write(chart.picture, (x + 50, y - 10), f"{ranks} rank{'s' if ranks > 1 else ''}")


def _line(picture: Image.Image, places: list[tuple[float, float]], color: Rgb, width: int) -> None:
    points = [(ZOOM * x, ZOOM * y) for x, y in places]
    ImageDraw.Draw(picture).line(points, fill=color, width=ZOOM * width, joint="curve")


def _write(picture: Image.Image, place: tuple[float, float], text: str, size: int = 14) -> None:
    mask = Image.fromarray(text_mask(text, ZOOM * size))
    corner = (round(ZOOM * place[0]), round(ZOOM * place[1]))
    ImageDraw.Draw(picture).bitmap(corner, mask, fill=INK)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
