"""Of what parts sums over all ranks are made: here one of each rank; `Shares` has smaller ones."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from segtrain.distributed import collectives as dist


class RankSums:
    """Parts are added up on each rank first, so another number of ranks gives other last bits."""

    def slots(self, found: int) -> int:
        """How many parts this rank adds; `found`: threads that have something."""
        return found

    def each(self, function: Callable[[Any], object], batch: Any) -> None:
        """Calls the function with the parts of a batch of this rank (collective): here with all."""
        function(batch)

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of all parts of all ranks, of which this one has `parts` (collective)."""
        return dist.all_reduce_sum(sum(parts))


RANKS = RankSums()
