"""How ranks divide a batch. Imports no torch, so that a wrong batch size is refused at once."""

from segtrain.config import Config, TrainConfig

Split = tuple[int, ...]
"""How ranks divide a microbatch: a weight for each. Equal ones divide it as evenly as possible."""


def even(ranks: int) -> Split:
    """The split that gives all ranks equally much."""
    return (1,) * ranks


def split_of(train: TrainConfig, ranks: int) -> Split:
    """That of train.split; even if it has to be measured, or is for another number of ranks."""
    split = train.split
    return split if isinstance(split, tuple) and len(split) == ranks else even(ranks)


def divide(total: int, split: Split, least: int = 0) -> list[int]:
    """How many of `total` each rank gets: in proportion, the largest remainders rounded up.

    least: what each rank gets at least, if there is enough.
    """
    whole = sum(split)
    counts = [total * weight // whole for weight in split]
    by_remainder = sorted(range(len(split)), key=lambda rank: -(total * split[rank] % whole))
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    while min(counts) < least <= total // len(counts):
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(min(counts))] += 1
    return counts


def partition(total: int, parts: int, index: int) -> range:
    """The positions in part `index`: contiguous, the first `total % parts` parts longer by 1."""
    small, extra = divmod(total, parts)
    start = index * small + min(index, extra)
    return range(start, start + small + (index < extra))


def parts_of_rank(total: int, rank: int, split: Split, shares: int | None) -> list[range]:
    """The positions that `rank` computes, by the parts that are computed apart.

    shares: the number of such parts over all ranks, as even as possible, of which each rank takes
        whole ones, contiguous; None: one part a rank.
    """
    counts = divide(total, split) if shares is None else shares_of_ranks(shares, split)
    start = sum(counts[:rank])
    mine = range(start, start + counts[rank])
    return [mine] if shares is None else [partition(total, shares, share) for share in mine]


def shares_of_ranks(shares: int, split: Split) -> list[int]:
    """How many shares each rank has: at least one, without which it could not wait for others."""
    return divide(shares, split, least=1)


def microbatch_parts(train: TrainConfig, split: Split) -> list[list[int]]:
    """For each rank, the images in each of its parts of a microbatch that are computed apart.

    Of the first microbatch, if they differ.
    """
    images = len(partition(train.batch_size, train.accumulate_steps, 0))
    if train.shares is not None:
        cut = (parts_of_rank(images, rank, split, train.shares) for rank in range(len(split)))
        return [[len(part) for part in parts] for parts in cut]
    virtual = train.virtual_ranks
    return [
        [len(partition(size, virtual, i)) for i in range(virtual)] for size in divide(images, split)
    ]


def images_together(config: Config, ranks: int) -> int:
    """The fewest images over which batch norm takes its statistics in a microbatch."""
    if config.norm.images != "all":
        return config.norm.images
    images = config.train.batch_size // config.train.accumulate_steps
    return images // ranks if config.train.parallel == "hogwild" else images


def batch_findings(config: Config, ranks: int) -> list[str]:
    """What is wrong with the batch size for so many ranks."""
    train = config.train
    hogwild = train.parallel == "hogwild"
    if train.shares is not None and ranks > train.shares:
        return [
            f"train.shares: {train.shares} shares leave some of {ranks} ranks without one; start "
            f"at most {train.shares} ranks, or raise it before training begins: the number of "
            "shares is part of the result"
        ]
    at = f"train.batch_size: {train.batch_size}"
    if hogwild and train.batch_size % ranks:
        return [
            f"{at} images are not alike many for {ranks} processes, so some would count more than "
            f"others (train.parallel: hogwild); use a multiple of {ranks}"
        ]
    if hogwild and config.norm.kind == "sync" and images_together(config, ranks) == 1:
        return [
            "train.batch_size: the globally pooled branch has one value a channel for an image, "
            f"and batch norm needs two; use at least {2 * ranks} (train.parallel: hogwild, {ranks} "
            "processes)"
        ]
    return []
