"""How ranks divide a batch. Imports no torch, so that a wrong batch size is refused at once."""

from segtrain.config import Config, TrainConfig


def partition(total: int, parts: int, index: int) -> range:
    """The positions in part `index`: contiguous, the first `total % parts` parts longer by 1."""
    small, extra = divmod(total, parts)
    start = index * small + min(index, extra)
    return range(start, start + small + (index < extra))


def parts_of_rank(total: int, rank: int, ranks: int, shares: int | None) -> list[range]:
    """The positions that `rank` computes, by the parts that are computed apart.

    shares: the number of such parts over all ranks, each of which takes whole ones, contiguous and
        as even as possible; None: one part a rank.
    """
    if shares is None:
        return [partition(total, ranks, rank)]
    return [partition(total, shares, share) for share in partition(shares, ranks, rank)]


def shares_of_ranks(shares: int, ranks: int) -> list[int]:
    """How many shares each rank has."""
    return [len(partition(shares, ranks, rank)) for rank in range(ranks)]


def microbatch_parts(train: TrainConfig, ranks: int) -> list[list[int]]:
    """For each rank, the images in each of its parts of a microbatch that are computed apart.

    Of the first microbatch, if they differ.
    """
    images = len(partition(train.batch_size, train.accumulate_steps, 0))
    if train.shares is not None:
        cut = (parts_of_rank(images, rank, ranks, train.shares) for rank in range(ranks))
        return [[len(part) for part in parts] for parts in cut]
    of_ranks = (len(partition(images, ranks, rank)) for rank in range(ranks))
    virtual = train.virtual_ranks
    return [[len(partition(size, virtual, i)) for i in range(virtual)] for size in of_ranks]


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
