"""Who computes which image. Imports no torch, so that a wrong batch size is refused at once."""

from itertools import accumulate, pairwise

from segtrain.config import Config, TrainConfig

Split = tuple[int, ...]
"""How ranks divide a microbatch: a weight for each. Equal ones divide it as evenly as possible."""


def even(ranks: int) -> Split:
    """The split that gives all ranks equally much."""
    return (1,) * ranks


def split_of(train: TrainConfig, ranks: int) -> Split:
    """That of train.split; even if it is for another number of ranks."""
    if isinstance(train.split, tuple) and len(train.split) == ranks:
        return train.split
    return (0,) * train.num_servers + even(ranks - train.num_servers)


def divide(total: int, split: Split, least: int = 0) -> list[int]:
    """How many of `total` each rank gets: in proportion, the largest remainders rounded up.

    least: what each rank gets at least, if there is enough.

    Of 7 images, weights of 5, 2 and 1 give 4.375, 1.75 and 0.875. Rounded down, that is 4, 1 and 0;
    the 2 images that are left go to the last two ranks, whose remainders are the largest.

    >>> divide(7, (1, 1, 1)), divide(7, (5, 2, 1))
    ([3, 2, 2], [4, 2, 1])
    >>> divide(7, (9, 1, 0)), divide(7, (9, 1, 0), least=1)  # the first rank gives one away
    ([6, 1, 0], [5, 1, 1])
    """
    whole = sum(split)
    counts = [total * weight // whole for weight in split]
    # Integers only: rounding could give another number of images on another machine.
    by_remainder = sorted(range(len(split)), key=lambda rank: -(total * split[rank] % whole))
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    # From the rank that has most to the one that has least, as long as there is enough for all.
    while min(counts) < least <= total // len(counts):
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(min(counts))] += 1
    return counts


def partition(total: int, parts: int, index: int) -> range:
    """The positions in part `index`: contiguous, the first `total % parts` parts longer by 1."""
    small, extra = divmod(total, parts)
    start = index * small + min(index, extra)
    return range(start, start + small + (index < extra))


class Layout:
    """Who computes which image of a step: a table, made once and only read then.

    A batch is first cut into microbatches, then each into `shares` if there are any, then among
    ranks by `split`: always contiguous, as evenly as that allows. So a microbatch holds the same
    images, and a share too, on any number of ranks. Of 7 images in 2 microbatches on 3 ranks, with
    `split` (1, 1, 1), the positions are

                        rank 0   rank 1   rank 2
        microbatch 0    0 1      2        3
        microbatch 1    4        5        6

    and with two virtual ranks, rank 0 computes 0 and 1 apart, in two parts.

    >>> layout = Layout(7, 2, even(3))
    >>> [list(part) for part in layout.positions(0)]  # of rank 0, by microbatch
    [[0, 1], [4]]
    >>> layout.images  # of the first microbatch, by rank
    (2, 1, 1)
    >>> Layout(7, 1, even(3), shares=4).everywhere  # images of each share, by rank
    [[2, 2], [2], [1]]

    parts: [microbatch][rank][part], positions in the batch. A rank may have parts without an image.
    everywhere: for each rank the `sizes` in the first microbatch, which is the largest.
    """

    def __init__(
        self,
        batch_size: int,
        microbatches: int,
        split: Split,
        *,
        shares: int | None = None,
        virtual_ranks: int = 1,
    ) -> None:
        self.split, ranks = split, range(len(split))
        self.parts: list[list[list[range]]] = []
        for i in range(microbatches):
            whole = partition(batch_size, microbatches, i)
            if shares is None:
                cut = _cut(whole, divide(len(whole), split))
                rows = [_cut(mine, _evenly(len(mine), virtual_ranks)) for mine in cut]
            else:
                # The cut comes first and knows nothing of ranks; they only take whole shares.
                cut, held = _cut(whole, _evenly(len(whole), shares)), shares_of_ranks(shares, split)
                rows = [cut[sum(held[:rank]) : sum(held[: rank + 1])] for rank in ranks]
            self.parts.append(rows)
        self.everywhere = [self.sizes(0, rank) for rank in ranks]

    @classmethod
    def of(cls, train: TrainConfig, split: Split) -> "Layout":
        """That of a config."""
        options = {"shares": train.shares, "virtual_ranks": train.virtual_ranks}
        return cls(train.batch_size, train.accumulate_steps, split, **options)

    def positions(self, rank: int) -> list[range]:
        """For each microbatch, the positions in the batch that `rank` trains on."""
        mine = [rows[rank] for rows in self.parts]
        return [range(parts[0].start, parts[-1].stop) for parts in mine]

    def sizes(self, microbatch: int, rank: int) -> list[int]:
        """The images in each part that `rank` computes apart."""
        return [len(part) for part in self.parts[microbatch][rank]]

    @property
    def shares(self) -> tuple[int, ...]:
        """How many parts each rank has."""
        return tuple(map(len, self.parts[0]))

    @property
    def images(self) -> tuple[int, ...]:
        """How many images of the first microbatch each rank has."""
        return tuple(map(sum, self.everywhere))


def shares_of_ranks(shares: int, split: Split) -> list[int]:
    """How many shares each rank has: at least one, without which it could not wait for others."""
    return divide(shares, split, least=1)


def _evenly(total: int, parts: int) -> list[int]:
    return [len(partition(total, parts, i)) for i in range(parts)]


def _cut(whole: range, sizes: list[int]) -> list[range]:
    """`whole` in contiguous ranges of these sizes."""
    ends = list(accumulate(sizes, initial=0))
    return [whole[a:b] for a, b in pairwise(ends)]


def processes_with_images(train: TrainConfig, ranks: int) -> int:
    """Into how many parts the ranks divide a batch: a server has none."""
    return ranks - train.num_servers


def images_together(config: Config, ranks: int) -> int:
    """The fewest images over which batch norm takes its statistics in a microbatch."""
    if config.norm.images != "all":
        return config.norm.images
    train, images = config.train, config.train.batch_size // config.train.accumulate_steps
    return images // processes_with_images(train, ranks) if train.is_asynchronous else images


def batch_findings(config: Config, ranks: int) -> list[str]:
    """What is wrong with the batch size for so many ranks."""
    train = config.train
    if train.shares is not None and ranks > train.shares:
        return [
            f"train.shares: {train.shares} shares leave some of {ranks} ranks without one; start "
            f"at most {train.shares} ranks, or raise it before training begins: the number of "
            "shares is part of the result"
        ]
    if not train.is_asynchronous:
        return []
    parts, way = processes_with_images(train, ranks), f"train.parallel: {train.parallel}"
    if parts == 0:
        return [f"{way}: the first process computes no gradients; start at least 2 (--nproc)"]
    at = f"train.batch_size: {train.batch_size}"
    if train.batch_size % parts:
        return [
            f"{at} images are not alike many for {parts} processes, so some would count more than "
            f"others ({way}); use a multiple of {parts}"
        ]
    if config.norm.kind == "sync" and images_together(config, ranks) == 1:
        return [
            "train.batch_size: the globally pooled branch has one value a channel for an image, "
            f"and batch norm needs two; use at least {2 * parts} ({way}, {parts} processes)"
        ]
    if 0 < train.staleness < parts - 1:
        return [
            f"train.staleness: {train.staleness} would let some of {parts} workers always wait, "
            f"because the others make {parts - 1} updates meanwhile; use 0 or at least {parts - 1}"
        ]
    return []
