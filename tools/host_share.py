"""The host's share of a training step: Python, autograd and torch's calls, without arithmetic.

    python tools/host_share.py

It is the time of the same step with a 64th of all channels, on crops of 8x8: as many calls, hardly
any numbers. So it is an upper bound. On two ranks the waits of collectives are in it.
"""

import argparse
import time

import torch
from rounds import estimate, measure, on_ranks, ratios
from stepping import NUM_CLASSES, config_of, steps_of
from torch import nn

from segtrain.distributed import collectives as dist
from segtrain.models import build_model
from segtrain.models.norms import make_norm
from segtrain.training.measure import PartClock
from segtrain.training.state import make_state

THIN, SIZES = (8, 8), ((64, 64), (128, 256))
_CALLS = 20


def main() -> None:
    """Prints steps on one and on two ranks, of one thread each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--images", type=int, default=2, help="of each rank")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    for ranks in (1, 2):
        times, parts = on_ranks(ranks, "cpu", _measure, args.backbone, args.images, args.rounds)
        host = times.pop(str(THIN))
        seconds = sum(parts.values())
        shares = ", ".join(f"{name} {value / seconds:.0%}" for name, value in parts.items())
        print(f"{ranks} ranks: host {estimate(host)} ms ({shares})")
        for size, step in times.items():
            share = estimate([100 * one for one in ratios(host, step)])
            print(f"  {size}: step {estimate(step)} ms, host {share} %")


def _measure(
    device: torch.device, backbone: str, images: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds of steps by crop size, and seconds of the parts of thin ones (collective)."""
    model = {"arch": "pspnet", "backbone": backbone, "output_stride": 8, "dropout": 0.0}
    steps = {}
    for size in (THIN, *SIZES):
        config = config_of(size, images * dist.world_size(), model=model)
        torch.manual_seed(0)
        made = build_model(config.model, num_classes=NUM_CLASSES, norm=make_norm(config.norm))
        if size == THIN:
            _make_thin(made)
        steps[str(size)] = steps_of(make_state(made, config, device), config, device)
    calls = {size: lambda one=one: next(one) for size, one in steps.items()}
    times = measure(calls, device=device, rounds=rounds, block_ms=100)
    clock, began = PartClock(device), time.perf_counter()
    with clock.running():
        for _ in range(_CALLS):
            next(steps[str(THIN)])
    rest = time.perf_counter() - began - sum(clock.seconds.values())
    return times, clock.seconds | {"rest": rest}


def _make_thin(model: nn.Module) -> None:
    """Leaves a 64th of the channels of all layers but of images and classes."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            for name in ("in_channels", "out_channels"):
                setattr(layer, name, _thin(getattr(layer, name)))
            shape = layer.out_channels, layer.in_channels, *layer.kernel_size
            layer.weight = nn.Parameter(0.1 * torch.randn(shape))
        elif hasattr(layer, "running_mean"):
            layer.num_features = _thin(layer.num_features)
            for values in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                values.data = values.data[: layer.num_features].clone()


def _thin(channels: int) -> int:
    return channels // 64 if channels % 64 == 0 else channels


if __name__ == "__main__":
    main()
