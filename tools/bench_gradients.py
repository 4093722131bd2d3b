"""What the sum of gradients costs: forward and backward pass, ratios to DistributedDataParallel.

    python tools/bench_gradients.py
    python tools/bench_gradients.py --backbone resnet50 --crop-size 257 --rounds 15

A PSPNet on random images, CPU ranks of one thread each. The contenders take turns, and the slowest
rank counts. A ratio is the median over the rounds of the ratio within each round, with its 95 %
interval. "nothing sent" has wrong gradients: it shows what any sum can save at most.
"""

import argparse
import copy
import inspect
import sys
from collections.abc import Callable

import torch
from rounds import estimate, measure, on_ranks, ratios
from torch import Tensor, nn

from segtrain.config import ModelConfig
from segtrain.models import build_model
from segtrain.norm import SyncBatchNorm2d
from segtrain.training import gradients
from segtrain.training.gradients import GradientSum

BASE = "DistributedDataParallel"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--crop-size", type=int, default=129, help="pixels")
    parser.add_argument("--images", type=int, default=1, help="of each rank")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    times = on_ranks(options.nproc, options.device, step_times, options)
    print(f"{'':24} {'ms':>8}  ratio to {BASE}")
    for name, values in times.items():
        middle = estimate(values).median
        print(f"{name:24} {middle:8.1f}  {estimate(ratios(values, times[BASE]))}")
    return 0


def step_times(device: torch.device, options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of one forward and backward pass in each round (collective)."""
    torch.manual_seed(0)
    config = ModelConfig(backbone=options.backbone)
    model = build_model(config, num_classes=19, norm=SyncBatchNorm2d).train().to(device)
    model.to(memory_format=torch.channels_last)
    size = (options.images, 3, options.crop_size, options.crop_size)
    images = torch.randn(size, device=device).to(memory_format=torch.channels_last)
    # The first bucket of DistributedDataParallel has 1 MB too.
    calls = {BASE: _replicated_step(copy.deepcopy(model), images)}
    for name, first_bytes, bytes_, overlap in (
        ("buckets of 1 and 25 MB", 1 << 20, 25 << 20, True),
        ("first bucket 25 MB", 25 << 20, 25 << 20, True),
        ("buckets of 1 and 5 MB", 1 << 20, 5 << 20, True),
        ("buckets of 1 and 100 MB", 1 << 20, 100 << 20, True),
        ("sent at the end", 1 << 20, 25 << 20, False),
    ):
        gradients.FIRST_BUCKET_BYTES, gradients.BUCKET_BYTES = first_bytes, bytes_
        calls[name] = _summed_step(copy.deepcopy(model), images, overlap=overlap)
    calls["nothing sent"] = lambda: _forward_backward(model, model, images)
    return measure(calls, device=device, rounds=options.rounds)


def _replicated_step(model: nn.Module, images: Tensor) -> Callable[[], None]:
    wrapper = nn.parallel.DistributedDataParallel
    # The new name of the option where torch has it, the old one elsewhere.
    new_name = "forward_sync_buffers" in inspect.signature(wrapper).parameters
    replica = wrapper(
        model,
        device_ids=[images.device.index] if images.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **{"forward_sync_buffers" if new_name else "broadcast_buffers": False},
    )
    return lambda: _forward_backward(model, replica, images)


def _summed_step(model: nn.Module, images: Tensor, *, overlap: bool) -> Callable[[], None]:
    sums = GradientSum(model.named_parameters())

    def step() -> None:
        with sums.summed(overlap=overlap):
            _forward_backward(model, model, images)

    return step


def _forward_backward(model: nn.Module, replica: nn.Module, images: Tensor) -> None:
    model.zero_grad()
    logits = replica(images)
    (logits.out.square().mean() + logits.aux.square().mean()).backward()


if __name__ == "__main__":
    sys.exit(main())
