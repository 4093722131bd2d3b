"""Milliseconds of a step, eager and replayed, and what of it NCCL's kernels take."""

import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rounds import measure
from stepping import config_of, state_of, steps_of
from torch.profiler import ProfilerActivity, profile

from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.models.precision import float32_products
from segtrain.training.graph import EAGER_STEPS
from segtrain.training.measure import synchronize

EAGER, GRAPH = "eager", "graph"
_WARMUP = EAGER_STEPS + 2
# Model, images of each rank and size.
V3PLUS = {"backbone": "resnet18", "arch": "deeplabv3plus", "output_stride": 16}
CASES = {
    "V3+ R18, 8 x 288x384 a rank": (V3PLUS, 8, (288, 384)),
    "PSPNet-R50, 2 x 713x713 a rank": ({"backbone": "resnet50"}, 2, (713, 713)),
}
# What a CPU can do in the time.
TINY = {"backbone": "resnet18", "num_stages": 2, "output_stride": 8, "head_channels": 16}
TINY_CASES = {"half a PSPNet-R18, 2 x 33x41 a rank": (TINY | {"aux_channels": 16}, 2, (33, 41))}

Found = tuple[dict[str, Any], list[str]]


def items(device: torch.device, options: dict[str, Any]) -> dict[str, Callable[[], Found]]:
    """The first `cases` of the options; with `profile`, the last of all by kernel."""
    is_cuda = device.type == "cuda"
    precision = "bfloat16" if is_cuda else "float32"
    configs = {
        name: config_of(size, images * dist.world_size(), model=model, precision=precision)
        for name, (model, images, size) in (CASES if is_cuda else TINY_CASES).items()
    }
    chosen = list(configs)[: options["cases"]]
    found = {name: partial(step_times, configs[name], device) for name in chosen}
    if options["profile"]:
        last = list(configs)[-1]
        found[f"a step of {last} by kernel"] = partial(by_kernel, configs[last], device)
    return found


def step_times(config: Config, device: torch.device) -> Found:
    """ms of a step on the slowest rank, both ways in turn."""
    ways = {way: _steps(config, device, replayed=way == GRAPH) for way in (EAGER, GRAPH)}
    for step in ways.values():
        for _ in range(_WARMUP):
            step()
    rounds = {"rounds": 6, "block_ms": 300} if device.type == "cuda" else {"rounds": 1}
    times = measure(ways, device=device, **rounds)
    found = {f"{way}, ms": statistics.median(times[way]) for way in ways}
    return found | {"ratio": found[f"{EAGER}, ms"] / found[f"{GRAPH}, ms"]}, []


def by_kernel(config: Config, device: torch.device) -> Found:
    """Count and µs of what sends in a replayed step of rank 0, and of all kernels together."""
    step = _steps(config, device, replayed=True)
    for _ in range(_WARMUP):
        step()
    synchronize(device)
    dist.barrier()
    is_cuda = device.type == "cuda"
    more = [ProfilerActivity.CUDA] if is_cuda else []
    with profile(activities=[ProfilerActivity.CPU, *more]) as profiler:
        step()
        synchronize(device)
    return sending(profiler.events(), is_cuda=is_cuda), []


def sending(events: Any, *, is_cuda: bool) -> dict[str, Any]:
    """Of the events of a profiler: NCCL's kernels on a device, gloo's functions on a CPU."""
    kind = torch.autograd.DeviceType.CUDA if is_cuda else torch.autograd.DeviceType.CPU
    events = [e for e in events if e.device_type == kind and not e.is_user_annotation]
    found: defaultdict[str, list[float]] = defaultdict(list)
    for event in events:
        if any(word in event.name.lower() for word in ("nccl", "gloo", "allreduce_")):
            found[event.name[:100]].append(event.time_range.elapsed_us())
    rows = {name: f"{len(us)} x {statistics.median(us):.1f} us" for name, us in found.items()}
    return rows | {"all kernels, ms": sum(e.time_range.elapsed_us() for e in events) / 1e3}


def _steps(config: Config, device: torch.device, *, replayed: bool) -> Callable[[], object]:
    steps = steps_of(state_of(config, device), config, device, replayed=replayed)

    def step() -> None:
        with float32_products(config.train):
            next(steps)

    return step
