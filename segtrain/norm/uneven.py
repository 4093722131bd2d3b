"""Ranks of which one has more batches than another."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from segtrain.distributed import collectives as dist

T = TypeVar("T")


def until_all_end(
    batches: Iterable[T], empty: T, *, device: torch.device | str = "cpu"
) -> Iterator[T]:
    """Yields this rank's `batches`, then `empty` until all ranks have no more (collective).

    If a rank just stopped, the others would wait for it in the next batch norm. An empty batch adds
    zeros to the statistics. Divide a sum of losses by a count over all ranks: the mean over no
    pixels is NaN.

    Args:
        empty: a batch with N = 0, such as images of shape (0, 3, H, W).
        device: that of the process group, so a GPU for NCCL.
    """
    iterator, end = iter(batches), object()
    while True:
        batch = next(iterator, end)
        # How many ranks have a batch; all read the same number, and so end together.
        if not dist.all_reduce_sum(torch.tensor(float(batch is not end), device=device)):
            return
        yield empty if batch is end else batch
