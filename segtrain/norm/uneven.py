"""Ranks with different numbers of batches."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from segtrain.distributed import collectives as dist
from segtrain.distributed.collectives import ProcessGroup

T = TypeVar("T")


def until_all_end(
    batches: Iterable[T],
    empty: T,
    *,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[T]:
    """Yields this rank's `batches`, then `empty` until those of all ranks have ended (collective).

    A rank that simply stopped would leave the others waiting in the next batch norm. A batch of no
    images takes part without a trace: it adds zeros to the statistics. Losses must be sums divided
    by a count over all ranks; the mean over no pixels is not a number.

    Args:
        empty: a batch with N = 0, such as images of shape (0, 3, H, W).
        device: where the flags are exchanged; the process group's own, so a GPU for NCCL.
    """
    iterator, end = iter(batches), object()
    while True:
        batch = next(iterator, end)
        if not dist.all_reduce_sum(torch.tensor(float(batch is not end), device=device), group):
            return
        yield empty if batch is end else batch
