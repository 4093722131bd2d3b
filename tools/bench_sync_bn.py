"""What synchronized batch norm costs: layer by layer, and in a training step.

    python tools/bench_sync_bn.py             # every way of communicating beside local batch norm
    python tools/bench_sync_bn.py step        # a training step with other statistics beside

Contenders take turns, in an order that rotates and reverses from round to round: a busy machine
troubles all of them alike, so read the ratios. All ranks meet before each timed block, which takes
as long as on the slowest of them. A ratio is the median over the rounds of the ratio within each
round; the interval in brackets, between two order statistics, holds it with at least 95 %
probability. On a CPU freed memory is kept for reuse, as in training, for all contenders.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rounds import estimate, measure, on_ranks, ratios
from stepping import config_of, state_of, steps_of
from sync_bn_schemes import SCHEMES, SchemeBatchNorm2d
from torch import Tensor, nn
from torch.distributed import group
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction

from segtrain.config import NormConfig
from segtrain.distributed import collectives as dist
from segtrain.models.norms import make_norm
from segtrain.norm import SyncBatchNorm2d
from segtrain.norm.sync import synchronized

LOCAL = "local"
SEGTRAIN = "segtrain"
TORCH = "torch.nn.SyncBatchNorm"
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

# Of PSPNet-R50 on crops of 720x960: the stem's half, the body, and two grids of the pyramid.
TABLE_SHAPES = (
    (2, 64, 90, 120),
    (2, 256, 90, 120),
    (2, 512, 45, 60),
    (2, 2048, 45, 60),
    (2, 512, 1, 1),
    (2, 256, 6, 6),
)

Shape = tuple[int, ...]

_WARMUP = 5


@dataclass
class Case:
    """A shape of the benchmark and its times.

    times: milliseconds of each contender in each round.
    """

    shape: Shape
    layout: str
    times: dict[str, list[float]] = field(default_factory=dict)


class LocalBatchNorm2d(nn.BatchNorm2d):
    """F.batch_norm in training and nothing else."""

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            True,
            self.momentum,
            self.eps,
        )


class UnsharedBatchNorm2d(SyncBatchNorm2d):
    """segtrain's layer with all its arithmetic, in a single process: it sends nothing."""

    def forward(self, input: Tensor) -> Tensor:
        return synchronized([(input, self)])[0]


class TorchSyncBatchNorm2d(nn.BatchNorm2d):
    """torch.nn.SyncBatchNorm's own function, which the module leaves out for a single rank."""

    def forward(self, input: Tensor) -> Tensor:
        return TorchFunction.apply(
            input,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.eps,
            self.momentum,
            group.WORLD,
            dist.world_size(),
        )


def layers_of(device: torch.device, *, shared: bool) -> dict[str, Callable[[int], nn.Module]]:
    """The contenders, by what makes them for a number of channels."""
    layers: dict[str, Callable[[int], nn.Module]] = {LOCAL: LocalBatchNorm2d}
    if not shared:
        return layers | {SEGTRAIN: UnsharedBatchNorm2d}
    # A rank that is alone in its group would skip the collectives; the schemes do not.
    alone = dist.world_size() == 1
    if not alone:
        layers[SEGTRAIN] = SyncBatchNorm2d
    if device.type == "cuda":
        layers[TORCH] = TorchSyncBatchNorm2d if alone else nn.SyncBatchNorm
    for name, scheme in SCHEMES.items():
        layers[name] = lambda channels, scheme=scheme: SchemeBatchNorm2d(channels, scheme)
    return layers


def time_layers(
    device: torch.device, cases: list[Case], rounds: int, block_ms: float, shared: bool
) -> list[Case]:
    """`cases` with the times of their contenders, forward and backward (collective)."""
    makers = layers_of(device, shared=shared)
    for case in cases:
        torch.manual_seed(dist.rank())
        x, grad = (
            torch.randn(case.shape, device=device).to(memory_format=LAYOUTS[case.layout])
            for _ in range(2)
        )
        x.requires_grad_()

        calls = {
            name: partial(_both_ways, make(case.shape[1]).to(device).train(), x, grad)
            for name, make in makers.items()
        }
        case.times = measure(calls, device=device, rounds=rounds, block_ms=block_ms, warmup=_WARMUP)
        if dist.is_main():
            print(f"{_name(case.shape)} {case.layout}: done", file=sys.stderr)
    return cases


def _both_ways(layer: nn.Module, x: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), grad)


def layers(options: argparse.Namespace) -> dict[str, Any]:
    """Prints the tables of single layers and returns what they were made from."""
    cases = [Case(shape, layout) for layout in LAYOUTS for shape in options.shapes]
    common = (cases, options.rounds or 15, options.block_ms)
    alone = on_ranks(1, options.device, time_layers, *common, False, group=False)
    _print_contenders()
    print("## Compute alone: one process of one thread, nothing sent\n")
    _print_layers(alone)
    together = on_ranks(options.nproc, options.device, time_layers, *common, True)
    print(f"## Together: {options.nproc} rank(s) of one thread\n")
    _print_layers(together)
    return {"alone": [vars(case) for case in alone], "together": [vars(case) for case in together]}


def _print_contenders() -> None:
    print(
        f"torch {torch.__version__}; one thread a rank. A call is forward and backward through\n"
        "autograd, with gradients of x, weight and bias and the update of the running statistics.\n"
    )
    print(f"- {LOCAL}: F.batch_norm of each rank's own values")
    print(f"- {SEGTRAIN}: segtrain.norm.SyncBatchNorm2d")
    print(f"- {TORCH}: its own code; on CUDA only, it refuses CPU tensors")
    print("- segtrain's arithmetic with the collectives of others, forward + backward of a layer:")
    for name, scheme in SCHEMES.items():
        print(f"  {name}: {scheme.used_by}")
    print()


def _print_layers(cases: list[Case]) -> None:
    names = [name for name in cases[0].times if name != LOCAL]
    for layout in dict.fromkeys(case.layout for case in cases):
        rows = [case for case in cases if case.layout == layout]
        print(f"### {layout}: forward and backward, ms (ratio to local)\n")
        _print_row("shape", LOCAL, *names)
        _print_row(*["---"] * (2 + len(names)))
        for case in rows:
            _print_row(_name(case.shape), *_cells(case.times))
        middles = [estimate(median_ratios(rows, name)) for name in names]
        _print_row("median ratio", "", *(f"{one.median:.2f}" for one in middles))
        _print_row("95 % interval", "", *(f"{one.low:.2f} to {one.high:.2f}" for one in middles))
        print()


def _cells(times: dict[str, list[float]]) -> list[str]:
    """Local milliseconds, and milliseconds with the ratio of every other contender."""
    return [
        f"{statistics.median(values):.2f}"
        + ("" if name == LOCAL else f" ({estimate(ratios(values, times[LOCAL])).median:.2f})")
        for name, values in times.items()
    ]


def _print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


def median_ratios(cases: list[Case], name: str) -> list[float]:
    """For each round, the median over the shapes of the ratio to local."""
    by_case = [ratios(case.times[name], case.times[LOCAL]) for case in cases]
    return [statistics.median(values) for values in zip(*by_case, strict=True)]


def _name(shape: Shape) -> str:
    return "x".join(map(str, shape))


def step(options: argparse.Namespace) -> dict[str, Any]:
    """Prints the table of training steps and returns the times it was made from."""
    arguments = (options.backbone, options.images, tuple(options.size), options.rounds or 30)
    times = on_ranks(options.nproc, options.device, time_steps, *arguments)
    height, width = options.size
    print(
        f"## Training step: PSPNet on {options.backbone}, {options.images} images of "
        f"{height}x{width} a rank, {options.nproc} ranks of one thread\n"
    )
    print("| batch norm | ms | synchronized / this |\n|---|---|---|")
    for name, values in times.items():
        ratio = estimate(ratios(times["sync"], values))
        cell = "" if name == "sync" else f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        print(f"| {name} | {statistics.median(values):.1f} | {cell} |")
    return times


def time_steps(
    device: torch.device, backbone: str, images: int, size: tuple[int, int], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of a training step with each kind of batch norm (collective).

    images: over those of each rank, as groups of so many.
    """
    config = config_of(size, images * dist.world_size(), model={"backbone": backbone})
    norms = {
        "sync": make_norm(config.norm),
        "images": make_norm(NormConfig(images=images)),
        "nn.BatchNorm2d": nn.BatchNorm2d,
    }
    calls = {
        name: partial(next, steps_of(state_of(config, device, norm), config, device))
        for name, norm in norms.items()
    }
    return measure(calls, device=device, rounds=rounds, warmup=3)


def shape_of(text: str) -> Shape:
    """(2, 64, 90, 120) of 2x64x90x120."""
    return tuple(map(int, text.split("x")))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("command", nargs="?", choices=("layers", "step"), default="layers")
    add("--nproc", type=int, default=2, help="ranks, of one thread each")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--rounds", type=int, help="default: 15 of layers, 30 of steps")
    add("--json", type=Path, help="also write every time measured to this file")
    add("--shapes", nargs="+", type=shape_of, default=TABLE_SHAPES, metavar="NxCxHxW")
    add("--block-ms", type=float, default=30, help="layers: shortest block to time")
    add("--backbone", default="resnet18", help="step: of PSPNet")
    add("--size", nargs=2, type=int, default=(256, 256), help="step: height and width")
    add("--images", type=int, default=2, help="step: images a rank")
    options = parser.parse_args()
    result = layers(options) if options.command == "layers" else step(options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
