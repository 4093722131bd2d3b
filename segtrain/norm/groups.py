"""Which images share statistics, and what their layers send for it.

The positions of a microbatch are numbered through all ranks. A rank, or each of its virtual ranks
or shares, has a stretch of them: its part. With groups of n images, positions 0 to n - 1 are the
first group, wherever they lie. Only the first and the last group of a part can have images in
other parts, so that is all that is sent, among ranks that such groups chain together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.distributed import virtual_ranks
from segtrain.distributed.passes import current, passing

Parts = tuple[tuple[int, ...], ...]


class Groups(NamedTuple):
    """The groups of images in one part of a microbatch.

    sizes: the images of each here, in their order.
    first: the number of the first of them, among all of the microbatch.
    led: those whose first image is here, by their place in `sizes`; of a group, one part has it.
    rows: for each the row in what is added up over parts; None: it has no image elsewhere.
    num_rows: of all parts on `ranks`.
    ranks: that have parts of the same groups, directly or through others; contiguous.
    count: the number of groups in the microbatch.
    """

    sizes: tuple[int, ...]
    first: int
    led: tuple[int, ...]
    rows: tuple[int | None, ...]
    num_rows: int
    ranks: tuple[int, ...]
    count: int


@cache
def groups_of(images: int, parts: Parts, rank: int, slot: int) -> Groups:
    """The groups of `images` in part `slot` of `rank`.

    parts: the number of images in each part of each rank, in the order of positions.

    Groups of 4 in a microbatch of 8, with 3, 3 and 2 images on three ranks:

                 rank 0   rank 1   rank 2
        group 0  0 1 2    3
        group 1           4 5      6 7

    Rank 1 has 1 image of the first group and 2 of the second, which begins there. Both have images
    elsewhere, so each has a row in the sum.

    >>> here = groups_of(4, ((3,), (3,), (2,)), rank=1, slot=0)
    >>> here.sizes, here.led, here.rows
    ((1, 2), (1,), (0, 1))

    Raises:
        ValueError: the microbatch cannot be divided into such groups.
    """
    total = sum(map(sum, parts))
    if total % images:
        raise ValueError(f"{total} images cannot be divided into groups of {images}")
    ends = list(accumulate(map(sum, parts)))  # of each rank
    starts = [0, *ends[:-1]]
    # While a border between ranks cuts a group, the rank beyond it belongs to these too.
    low, high = rank, rank
    while starts[low] % images:
        low -= 1
    while ends[high] % images:
        high += 1
    # The groups that some border between parts cuts: each is a row in the sum.
    inside = accumulate((n for sizes in parts[low : high + 1] for n in sizes), initial=starts[low])
    shared = sorted({end // images for end in inside if end % images})

    start = starts[rank] + sum(parts[rank][:slot])
    stop = start + parts[rank][slot]
    first, last = start // images, -(-stop // images)
    numbers = range(first, max(last, first + 1))  # a part without images has one of size 0
    cuts = [min(max(number * images, start), stop) for number in (*numbers, numbers.stop)]
    return Groups(
        sizes=tuple(b - a for a, b in pairwise(cuts)),
        first=first,
        led=tuple(i for i, n in enumerate(numbers) if start <= n * images < stop),
        rows=tuple(shared.index(n) if n in shared and stop > start else None for n in numbers),
        num_rows=len(shared),
        ranks=tuple(range(low, high + 1)),
        count=total // images,
    )


@contextmanager
def placed(parts: Sequence[int] | Sequence[Sequence[int]]) -> Iterator[None]:
    """Inside, layers whose statistics are over `images` know where those of the microbatch lie.

    Put it around forward and backward pass: a layer that is computed again, by activation
    checkpointing, looks again, perhaps in another thread.

    parts: the number of images of each rank; or of each of its virtual ranks or shares.
    """
    with passing(parts=tuple((p,) if isinstance(p, int) else tuple(p) for p in parts)):
        yield


def most_images(here: int) -> int:
    """The most that any part of the microbatch has, by `placed`; else `here`, as all have then."""
    parts = current().parts
    return here if parts is None else max(n for sizes in parts for n in sizes)


def groups_here(images: int, num_images: int | None = None) -> Groups:
    """The groups of `images` that this thread has part in; by `placed`, or one process alone.

    num_images: of the input; None: not known yet.

    Raises:
        RuntimeError: there are several ranks, and `placed` does not tell what each has.
        ValueError: the input does not have the images that `placed` says, or cannot be divided.
    """
    parts, rank, slot = current().parts, dist.rank(), virtual_ranks.slot()
    if parts is None and dist.group_size() > 1:
        raise RuntimeError(
            f"batch norm over groups of {images} images has to know where they are: put "
            "`with segtrain.norm.placed(images_of_each_rank):` around forward and backward pass"
        )
    if parts is None:
        return groups_of(images, ((num_images or images,),), 0, 0)
    if num_images not in (None, parts[rank][slot]):
        raise ValueError(
            f"expected the {parts[rank][slot]} images that placed() gives this rank, got "
            f"{num_images}"
        )
    # A compiler warns of a cache, which it would not use.
    find = groups_of.__wrapped__ if torch.compiler.is_compiling() else groups_of
    return find(images, parts, rank, slot)


class Sharing(NamedTuple):
    """Whose values the statistics of layers are made of.

    process_group: of the ranks that share; None: all. groups: of images, if not all of a batch
        share.
    """

    process_group: dist.Group | None = None
    groups: Groups | None = None

    def cut(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The images of each tensor (N, ...) by groups: all of the first one first."""
        if self.groups is None or len(self.groups.sizes) == 1:
            return list(tensors)
        pieces = [t.split(self.groups.sizes) for t in tensors]
        return [piece for group in zip(*pieces, strict=True) for piece in group]

    def sum(self, vectors: Tensor) -> Tensor:
        """The sums over all parts of what `cut` has made vectors of, (G * n,) (collective)."""
        if self.groups is None:
            return dist.all_reduce_sum(vectors, self.process_group)
        _, _, _, rows, num_rows, *_ = self.groups
        # The same number on all of `groups.ranks`, so none waits for one that returns here.
        if num_rows == 0:
            return vectors
        mine = vectors.view(len(rows), -1)
        sent = mine.new_zeros(num_rows, mine.shape[1])
        for vector, row in zip(mine, rows, strict=True):
            if row is not None:
                sent[row] = vector
        # With 0 added, the sign of a zero does not tell how many parts there were.
        total = dist.all_reduce_sum(sent, self.process_group) + 0.0
        sums = [v if row is None else total[row] for v, row in zip(mine, rows, strict=True)]
        return torch.stack(sums).flatten()
