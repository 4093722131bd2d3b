"""Shares: the fixed parts of a batch that `train.shares` asks for.

A microbatch is cut into shares first, and ranks take whole ones. Each share is computed alone, by
one thread, and whatever is added up over shares is added up in their order. So nothing that is
computed depends on the number of ranks, or on which of them has which share.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.distributed.rank_sums import RankSums
from segtrain.distributed.virtual_ranks import VirtualRanks, slot

T = TypeVar("T")


class ShareThreads(VirtualRanks):
    """Threads of shares: sums over all of them do not depend on which process has which.

    counts: how many each process has, in the order of ranks. at_once: how many may run here.
    """

    def __init__(self, counts: Sequence[int], num_slots: int, *, at_once: int = 1) -> None:
        super().__init__(num_slots, at_once=at_once)
        self.counts = tuple(counts)

    def size(self, processes: int) -> int:
        """All shares, whatever the group of processes."""
        return sum(self.counts)

    def number(self, process: int) -> int:
        """The place of this thread's share."""
        return sum(self.counts[:process]) + slot()

    def add_up(self, parts: Sequence[Tensor], over_processes: Any, in_order: Any) -> Tensor:
        """In the order of shares."""
        return in_order(torch.stack(parts), self.counts)

    def gather(self, parts: Sequence[Tensor], of_processes: Any, in_order: Any) -> Tensor:
        """In the order of shares."""
        return in_order(torch.stack(parts), self.counts)


class Shares(RankSums):
    """The shares of a run as this rank sees them.

    counts: how many each rank has, in the order of ranks.
    at_once: how many this process computes at the same time.
    """

    def __init__(self, counts: tuple[int, ...], at_once: int) -> None:
        self.counts, self.at_once = counts, at_once

    @classmethod
    def of_this_rank(cls, counts: tuple[int, ...], device: torch.device) -> "Shares":
        """Of so many on each rank. From here on a thread of Python has one of torch.

        Kernels cut their work by the number of threads and add up the parts, so other numbers of
        threads give other bits. Several shares at a time use the cores instead; on a GPU one is
        enough.
        """
        # Asked before the number becomes 1, and remembered: a process may make several states.
        at_once = 1 if device.type == "cuda" else _threads_at_start()
        torch.set_num_threads(1)
        return cls(counts, at_once)

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """What the functions return, one for each share of this rank (collective).

        Inside, `collectives` count shares instead of ranks.
        """
        group = ShareThreads(self.counts, len(functions), at_once=self.at_once)
        return group.run([functools.partial(_in_one_thread, f) for f in functions])

    def slots(self, found: int) -> int:
        """The shares of this rank."""
        return self.counts[dist.rank()]

    def each(self, function: Callable[[Any], object], batch: Sequence[Any]) -> None:
        """Calls the function with each share's part, `batch` having them, in its thread."""
        self.run([functools.partial(function, part) for part in batch])

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """In the order of shares, of which this rank has `parts` (collective)."""
        return dist.ordered_sum(torch.stack(parts), self.counts)


@functools.cache
def _threads_at_start() -> int:
    """torch's threads before `of_this_rank` set them to 1."""
    return torch.get_num_threads()


def _in_one_thread(function: Callable[[], T]) -> T:
    # A new thread would begin with as many threads as there are cores.
    torch.set_num_threads(1)
    return function()
