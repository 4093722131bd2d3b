"""Times of several contenders that take turns, on one or more ranks, and what they say.

A busy machine troubles contenders alike that alternate, so their ratio within a round is steadier
than their times.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from segtrain.distributed import collectives as dist


class Estimate(NamedTuple):
    """A median, and the interval that holds the true one with at least 95 % probability."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """The median of `values` with the interval between two of their order statistics.

    The number of values below the true median is binomial (n, 1/2) whatever their distribution, so
    the k-th smallest and k-th largest enclose it with probability 1 - 2 P(B < k); k is the largest
    that leaves at least 0.95. Fewer than six values cannot reach that: theirs is the whole range.
    """
    ordered = sorted(values)
    n, k, below = len(ordered), 0, 0.5 ** len(ordered)
    while below <= 0.025:
        k += 1
        below += math.comb(n, k) * 0.5**n
    k = max(k, 1)
    return Estimate(statistics.median(ordered), ordered[k - 1], ordered[n - k])


def ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """The ratio within each round."""
    return [time / other for time, other in zip(times, base, strict=True)]


def turn(names: Sequence[str], index: int) -> list[str]:
    """The order of round `index`: turned by one every other round, and reversed in between.

    Of two contenders A and B: AB BA BA AB, which cancels a drift of the machine.
    """
    shift = index // 2 % len(names)
    order = [*names[shift:], *names[:shift]]
    return order if index % 2 == 0 else order[::-1]


def measure(
    contenders: dict[str, Callable[[], object]],
    *,
    device: torch.device,
    rounds: int,
    block_ms: float = 0.0,
    warmup: int = 2,
) -> dict[str, list[float]]:
    """Milliseconds of one call of each contender in each round, on the slowest rank (collective).

    Args:
        block_ms: calls are repeated until a timed block lasts about this long.
        warmup: calls before the first round; the last one sets the number of repetitions.
    """
    repeats = {}
    for name, call in contenders.items():
        for _ in range(warmup):
            took = _block_ms(call, 1, device)
        repeats[name] = math.ceil(block_ms / max(dist.all_gather_object(took))) or 1
    mine: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds):
        for name in turn(list(contenders), index):
            mine[name].append(_block_ms(contenders[name], repeats[name], device))
    ranks = dist.all_gather_object(mine)
    return {
        name: [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in contenders
    }


def _block_ms(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Milliseconds of one of `repeats` calls, after all ranks have come here."""
    _finish(device)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    _finish(device)
    return (time.perf_counter() - began) / repeats * 1e3


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
