"""What synchronized batch norm costs: layer by layer, in a training step, and on many GPUs.

    python tools/bench_sync_bn.py layers      # every way of communicating beside local batch norm
    python tools/bench_sync_bn.py step        # a training step with synchronized and local ones
    python tools/bench_sync_bn.py model       # the latency of NCCL on 8 to 1,024 GPUs: computed

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
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import repeat
from pathlib import Path
from typing import Any

import nccl_model
import torch
import torch.nn.functional as F
from rounds import estimate, measure, on_ranks, ratios
from sync_bn_schemes import SCHEMES, SchemeBatchNorm2d
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import group
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction

from segtrain.config import Config, DataConfig, ModelConfig, NormConfig, TrainConfig
from segtrain.data.sample.loader import indices_of_rank
from segtrain.distributed import collectives as dist
from segtrain.models import build_model
from segtrain.norm import NormFactory, SyncBatchNorm2d, make_norm, sync_batch_norm
from segtrain.training.engine import train_steps
from segtrain.training.state import make_state
from segtrain.training.step_sync import StepSync
from segtrain.types import Batch

LOCAL = "local"
SEGTRAIN = "segtrain"
TORCH = "torch.nn.SyncBatchNorm"
FAIRSCALE = "fairscale"
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

# TorchScript, which fairscale uses, rewrites its code during the first calls.
_WARMUP = 5


@dataclass
class Case:
    """A shape of the benchmark and its times.

    layers: how many layers of the network have this shape.
    times: milliseconds of each contender in each round.
    """

    shape: Shape
    layout: str
    layers: int = 1
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
        y, moments = sync_batch_norm(input, self.weight, self.bias, eps=self.eps)
        self._track(input, moments, None)
        return y


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


def pspnet_r50_shapes(num_images: int, crop: Sequence[int]) -> Counter[Shape]:
    """What the batch norms of PSPNet-R50, with the deep stem of semseg, normalize in training."""
    shapes: Counter[Shape] = Counter()
    config = ModelConfig(backbone="resnet50", stem="64-64-128")
    # Shapes alone, nothing is computed.
    with FakeTensorMode():
        model = build_model(config, num_classes=19).train()
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.register_forward_pre_hook(
                    lambda _, inputs: shapes.update([tuple(inputs[0].shape)])
                )
        model(torch.empty(num_images, 3, *crop))
    return shapes


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
    fairscale = _fairscale()
    if fairscale is not None:
        layers[FAIRSCALE] = fairscale
    for name, scheme in SCHEMES.items():
        layers[name] = lambda channels, scheme=scheme: SchemeBatchNorm2d(channels, scheme)
    return layers


def _fairscale() -> type[nn.Module] | None:
    """fairscale's own layer as it is, where it is installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fairscale.experimental.nn import SyncBatchNorm
    except ImportError:
        return None
    # It uses old names of torch, when it is imported and when it runs.
    warnings.filterwarnings("ignore", module="fairscale")
    return SyncBatchNorm


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
    """`layers`: prints its tables and returns what they were made from."""
    if options.shapes == "table":
        shapes = Counter(TABLE_SHAPES)
    elif options.shapes == "pspnet_r50":
        shapes = pspnet_r50_shapes(options.images, options.crop)
    else:
        shapes = Counter(tuple(map(int, one.split("x"))) for one in options.shapes.split(","))
    cases = [
        Case(shape, layout, count) for layout in options.layouts for shape, count in shapes.items()
    ]
    common = (cases, options.rounds, options.block_ms)
    alone = on_ranks(1, options.device, time_layers, *common, False, group=False)
    _print_contenders()
    print("## Compute alone: one process of one thread, nothing sent\n")
    _print_layers(alone, weighted=options.shapes == "pspnet_r50")
    together = on_ranks(options.nproc, options.device, time_layers, *common, True)
    print(f"## Together: {options.nproc} rank(s) of one thread\n")
    _print_layers(together, weighted=options.shapes == "pspnet_r50")
    return {"alone": [vars(case) for case in alone], "together": [vars(case) for case in together]}


def _print_contenders() -> None:
    lines = [
        f"torch {torch.__version__}; one thread a rank. A call is forward and backward through",
        "autograd, with gradients of x, weight and bias and the update of the running statistics.",
        "",
        f"- {LOCAL}: F.batch_norm of each rank's own values",
        f"- {SEGTRAIN}: segtrain.norm.SyncBatchNorm2d",
    ]
    own_code = "its own code, unmodified"
    if _fairscale() is None:
        lines.append(f"- {FAIRSCALE}: not installed, left out")
    else:
        lines.append(f"- {FAIRSCALE} {version(FAIRSCALE)}, fairscale.experimental.nn: {own_code}")
    lines += [
        f"- {TORCH}: {own_code}; on CUDA only, it refuses CPU tensors",
        "",
        "segtrain's arithmetic with the collectives of others, forward + backward of a layer:",
        "",
        *(f"- {name}: {scheme.used_by}" for name, scheme in SCHEMES.items()),
        "",
    ]
    print("\n".join(lines))


def _print_layers(cases: list[Case], *, weighted: bool) -> None:
    names = [name for name in cases[0].times if name != LOCAL]
    for layout in dict.fromkeys(case.layout for case in cases):
        rows = [case for case in cases if case.layout == layout]
        print(f"### {layout}: forward and backward, ms (ratio to local)\n")
        _print_row("layers", "shape", LOCAL, *names)
        _print_row(*["---"] * (3 + len(names)))
        for case in rows:
            _print_row(case.layers, _name(case.shape), *_cells(case.times))
        if weighted:
            totals = {name: step_times(rows, name) for name in (LOCAL, *names)}
            _print_row(sum(case.layers for case in rows), "all of a step", *_cells(totals))
        middles = [estimate(median_ratios(rows, name)) for name in names]
        _print_row("", "median ratio", "", *(f"{one.median:.2f}" for one in middles))
        _print_row(
            "", "95 % interval", "", *(f"{one.low:.2f} to {one.high:.2f}" for one in middles)
        )
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


def step_times(cases: list[Case], name: str) -> list[float]:
    """For each round, the time of all layers of the network, one after the other."""
    by_case = [[case.layers * time for time in case.times[name]] for case in cases]
    return [sum(values) for values in zip(*by_case, strict=True)]


def _name(shape: Shape) -> str:
    return "x".join(map(str, shape))


def step(options: argparse.Namespace) -> dict[str, Any]:
    """`step`: prints its table and returns the times it was made from."""
    arguments = (options.backbone, options.images, options.size, options.channels_last)
    times = on_ranks(
        options.nproc, options.device, time_steps, *arguments, options.pairs, options.warmup
    )
    height, width = options.size
    print(
        f"## Training step: PSPNet on {options.backbone}, {options.images} images of "
        f"{height}x{width} a rank, {options.nproc} ranks of one thread, "
        f"{'channels_last' if options.channels_last else 'contiguous'}, {options.pairs} rounds\n"
    )
    print("| batch norm | ms | synchronized / this |\n|---|---|---|")
    for name, values in times.items():
        ratio = estimate(ratios(times["sync"], values))
        cell = "" if name == "sync" else f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        print(f"| {name} | {statistics.median(values):.1f} | {cell} |")
    return times


def time_steps(
    device: torch.device,
    backbone: str,
    num_images: int,
    size: Sequence[int],
    channels_last: bool,
    rounds: int,
    warmup: int,
) -> dict[str, list[float]]:
    """Milliseconds of a training step with each kind of batch norm (collective)."""
    config = Config(
        data=DataConfig(layout="folders", root="unused", classes="unused"),
        model=ModelConfig(backbone=backbone),
        train=TrainConfig(batch_size=num_images * dist.world_size(), channels_last=channels_last),
    )
    norms = {
        "sync": make_norm(config.norm),
        "local": make_norm(NormConfig(kind="local")),
        "nn.BatchNorm2d": nn.BatchNorm2d,
    }
    steps = {
        name: _training(config, norm, num_images, size, device) for name, norm in norms.items()
    }
    calls = {name: lambda one=one: next(one) for name, one in steps.items()}
    return measure(calls, device=device, rounds=rounds, warmup=warmup)


def _training(
    config: Config,
    norm: NormFactory,
    num_images: int,
    size: Sequence[int],
    device: torch.device,
) -> Iterator[object]:
    """The engine's steps of a model from the same seed, on one random batch over and over."""
    torch.manual_seed(0)
    state = make_state(build_model(config.model, num_classes=19, norm=norm), config, device)
    generator = torch.Generator().manual_seed(dist.rank())
    images = torch.randint(
        256, (num_images, 3, *size), dtype=torch.uint8, generator=generator
    ).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(19, (num_images, *size), dtype=torch.uint8, generator=generator)
    batch = Batch(images, labels, [str(i) for i in range(num_images)])
    return train_steps(
        state,
        repeat(batch),
        config,
        device=device,
        indices=indices_of_rank(config.train.batch_size, 1, dist.rank(), dist.world_size()),
        step_sync=StepSync(lambda: False),
    )


def model(options: argparse.Namespace) -> dict[str, Any]:
    """`model`: prints its table and returns its rows."""
    rows = {gpus: nccl_model.iteration_cost(gpus) for gpus in MODEL_GPUS}
    print(
        "## A model, not measured: NCCL's latency for the statistics of PSPNet-R50\n\n"
        "Constants of NVIDIA/nccl 5067397c, src/graph/tuning.cc; nodes of 8 GPUs with NVLink. No\n"
        "launches, no waiting for ranks that come late. Milliseconds an iteration for\n"
        f"{nccl_model.NUM_LAYERS} layers: an all_gather forward and an all_reduce backward, as in\n"
        "torch.nn.SyncBatchNorm; one all_reduce each way; as segtrain, where layers side by side\n"
        f"share it, {nccl_model.NUM_SHARED} each way; one all_reduce each way among 8 GPUs.\n"
    )
    _print_row(
        "GPUs",
        "all_reduce us",
        "all_gather us",
        "gather + reduce",
        "all_reduce",
        f"{nccl_model.NUM_SHARED} each way",
        "groups of 8",
        "MB gathered a rank",
    )
    _print_row(*["---"] * 8)
    for gpus, cost in rows.items():
        _print_row(
            gpus,
            f"{nccl_model.all_reduce_us(gpus):.0f}",
            f"{nccl_model.all_gather_us(gpus):.0f}",
            *(f"{value:.3g}" for value in cost),
        )
    return {str(gpus): cost._asdict() for gpus, cost in rows.items()}


MODEL_GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
COMMANDS = {"layers": layers, "step": step, "model": model}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--nproc", type=int, default=2, help="ranks, of one thread each")
    common.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    common.add_argument("--json", type=Path, help="also write every time measured to this file")
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("layers", parents=[common], help="the default")
    command.add_argument(
        "--shapes", default="table", help="table, pspnet_r50, or a list such as 2x64x90x120,2x8x1x1"
    )
    command.add_argument(
        "--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="memory formats"
    )
    command.add_argument("--rounds", type=int, default=15)
    command.add_argument("--block-ms", type=float, default=30, help="shortest block to time")
    command.add_argument("--crop", nargs=2, type=int, default=[713, 713], help="pspnet_r50")
    command.add_argument("--images", type=int, default=2, help="pspnet_r50: images a rank")

    command = commands.add_parser("step", parents=[common], help="a training step of PSPNet")
    command.add_argument("--backbone", default="resnet18")
    command.add_argument("--size", nargs=2, type=int, default=[256, 256], help="height and width")
    command.add_argument("--images", type=int, default=2, help="images a rank")
    command.add_argument("--pairs", type=int, default=30, help="rounds")
    command.add_argument("--warmup", type=int, default=3, help="steps before the first round")
    command.add_argument(
        "--channels-last", action=argparse.BooleanOptionalAction, default=True, help="memory format"
    )

    command = commands.add_parser("model", help="computed, not measured")
    command.add_argument("--json", type=Path, help="also write the table to this file")

    names_command = bool(arguments) and (
        arguments[0] in COMMANDS or arguments[0] in ("-h", "--help")
    )
    return parser.parse_args(arguments if names_command else ["layers", *arguments])


def main(arguments: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    result = COMMANDS[options.command](options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
