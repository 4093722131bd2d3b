"""How ranks share a batch. Without torch, so that what cannot be shared is told at once."""

from segtrain.config import Config


def partition(total: int, parts: int, index: int) -> range:
    """The positions of `range(total)` that part `index` of `parts` takes: contiguous, and the first
    `total % parts` parts hold one more."""
    small, extra = divmod(total, parts)
    start = index * small + min(index, extra)
    return range(start, start + small + (index < extra))


def smallest_batch(config: Config, ranks: int, ranks_here: int) -> int:
    """The fewest images whose pixels make the statistics of one pass.

    Args:
        ranks: of all machines.
        ranks_here: of this one.
    """
    train, norm = config.train, config.norm
    images = train.batch_size // train.accumulate_steps
    extents = {"world": ranks, "node": ranks_here}
    extent = 1 if norm.kind == "local" else extents.get(norm.extent, norm.extent)
    shares = [len(partition(images, ranks, rank)) for rank in range(ranks)]
    return min(sum(shares[first : first + extent]) for first in range(0, ranks, extent))


def batch_findings(config: Config, ranks: int, ranks_here: int) -> list[str]:
    """What is wrong with the batch for so many ranks; `smallest_batch` has the arguments."""
    train = config.train
    smallest_pass = train.batch_size // train.accumulate_steps
    shares = ranks * train.virtual_ranks
    if smallest_pass < shares:
        per_pass = "" if train.accumulate_steps == 1 else f" in {train.accumulate_steps} passes"
        virtual = "" if train.virtual_ranks == 1 else f" x {train.virtual_ranks} virtual"
        return [
            f"train.batch_size: {train.batch_size} images{per_pass} leave some of {ranks}{virtual} "
            f"ranks without one; use at least {shares * train.accumulate_steps}"
        ]
    if config.norm.kind in ("sync", "local") and smallest_batch(config, ranks, ranks_here) == 1:
        return [
            "train.batch_size: the globally pooled branch has one value a channel for an image, "
            "and batch norm needs two; let at least 2 images share statistics (norm.kind: "
            f"{config.norm.kind}, {ranks} ranks)"
        ]
    return []
