"""Sums over the ranks: their bits, and their time by size, eager and in a CUDA graph."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bits import sha256
from rounds import measure
from torch import Tensor

from segtrain.distributed import collectives as dist

_IN_GRAPH = 20
_LARGEST_KB = {"cuda": 1 << 16, "cpu": 1 << 8}

Found = tuple[dict[str, Any], list[str]]


def items(device: torch.device, options: dict[str, Any]) -> dict[str, Callable[[], Found]]:
    """A row of sizes for each type."""
    sizes = [4**i for i in range(9) if 4**i <= _LARGEST_KB[device.type]]
    return {
        f"{name}, {kb} KB": partial(one_size, kb << 10, getattr(torch, name), device)
        for name in ("float64", "float32")
        for kb in sizes
    }


def one_size(num_bytes: int, dtype: torch.dtype, device: torch.device) -> Found:
    """µs of a sum on the slowest rank, and whether all ways and ranks have the right bits."""
    generator = torch.Generator().manual_seed(dist.rank())
    values = torch.randn(num_bytes // dtype.itemsize, generator=generator, dtype=dtype).to(device)
    eager = dist.all_reduce_sum(values.clone())
    held = values.clone()
    graph = recorded(lambda: dist.all_reduce_sum(held))
    held.copy_(values)
    graph.replay()
    zeros = torch.zeros_like(values)  # which no number of sums makes infinite
    many = recorded(lambda: [dist.all_reduce_sum(zeros) for _ in range(_IN_GRAPH)])
    calls = {"eager": lambda: dist.all_reduce_sum(zeros), "graph": many.replay}
    on_device = {"rounds": 6, "block_ms": 10} if device.type == "cuda" else {"rounds": 2}
    times = measure(calls, device=device, **on_device)
    micros = {name: 1e3 * statistics.median(found) for name, found in times.items()}
    micros["graph"] /= _IN_GRAPH
    return {f"{name}, us": time for name, time in micros.items()}, _wrong(values, eager, held)


def recorded(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `call`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph


def _wrong(values: Tensor, eager: Tensor, replayed: Tensor) -> list[str]:
    problems = []
    if not torch.equal(eager, replayed):
        problems.append(f"a replay has other bits: {(eager - replayed).abs().max().item():.1e}")
    if len(set(dist.all_gather_object(sha256(replayed.cpu())))) > 1:
        problems.append("the ranks have other bits")
    # Each rank's rounding, of numbers of which none is far beyond 6.
    most = dist.world_size() ** 2 * 6 * torch.finfo(values.dtype).eps
    error = (eager - dist.all_gather(values).sum(0)).abs().max().item()
    return problems if error <= most else [*problems, f"the sum is wrong by {error:.1e}"]
