"""Shares: the fixed parts of a batch that `train.shares` asks for.

A microbatch is cut into shares first, and ranks take whole ones. Each share is computed alone, by
one thread, and whatever is added up over shares is added up in their order. So nothing that is
computed depends on the number of ranks, or on which of them has which share.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.distributed.virtual_ranks import VirtualRanks

T = TypeVar("T")


class Shares(NamedTuple):
    """The shares of a run as this rank sees them.

    counts: how many each rank has, in the order of ranks.
    at_once: how many this process computes at the same time.
    """

    counts: tuple[int, ...]
    at_once: int

    @classmethod
    def of_this_rank(cls, counts: tuple[int, ...], device: torch.device) -> "Shares":
        """Of so many on each rank. From here on a thread of Python has one of torch.

        Kernels cut their work by the number of threads and add up the parts, so other numbers of
        threads give other bits. Several shares at a time use the cores instead; on a GPU one is
        enough.
        """
        at_once = 1 if device.type == "cuda" else _threads_at_start()
        torch.set_num_threads(1)
        return cls(counts, at_once)

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """What the functions return, one for each share of this rank (collective).

        Inside, `collectives` count shares instead of ranks.
        """
        group = VirtualRanks(len(functions), at_once=self.at_once, shares=self.counts)
        return group.run([functools.partial(_in_one_thread, f) for f in functions])

    def sum(self, parts: Tensor) -> Tensor:
        """The sum over all shares of `parts`, (n, ...) for the n of this rank (collective)."""
        return dist.ordered_sum(parts, self.counts)


@functools.cache
def _threads_at_start() -> int:
    """torch's threads before `of_this_rank` set them to 1."""
    return torch.get_num_threads()


def _in_one_thread(function: Callable[[], T]) -> T:
    # A new thread would begin with as many threads as there are cores.
    torch.set_num_threads(1)
    return function()
