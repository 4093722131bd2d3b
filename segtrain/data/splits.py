"""Splits that are put together from others, and images that are left out."""

from collections.abc import Sequence
from pathlib import Path

from segtrain.config import DataConfig
from segtrain.config.suggest import did_you_mean
from segtrain.data.listing import Listing
from segtrain.errors import DataError
from segtrain.text import printable


def join_listings(parts: Sequence[str], listings: Sequence[Listing]) -> Listing:
    """One listing of several splits; names begin with the split's, so they stay unique."""
    pairs = [
        pair._replace(name=f"{part}/{pair.name}")
        for part, listing in zip(parts, listings, strict=True)
        for pair in listing.pairs
    ]
    first: dict[Path, str] = {}
    problems = [problem for listing in listings for problem in listing.problems]
    for pair in pairs:
        if pair.image in first:
            both = f"{printable(first[pair.image])} and {printable(pair.name)}"
            problems.append(f"{both} are one image; name each split once")
        first.setdefault(pair.image, pair.name)
    rest = zip(*(listing[2:] for listing in listings), strict=True)
    return Listing(pairs, problems, *([one for part in kind for one in part] for kind in rest))


def without_excluded(listing: Listing, data: DataConfig) -> Listing:
    """`listing`, of the training split, without the images of `data.train_exclude`.

    Raises:
        DataError: a name is not in it, or no image is left.
    """
    if not data.train_exclude:
        return listing
    excluded = set(data.train_exclude)
    names = {pair.name for pair in listing.pairs}
    if unknown := sorted(excluded - names):
        known = {name.rpartition("/")[2]: name for name in names}
        hint = did_you_mean(unknown[0].rpartition("/")[2], known) or (
            f"; names look like {printable(min(names))}" if names else ""
        )
        raise DataError(
            f"data.train_exclude: no image {printable(unknown[0])} in split "
            f"{data.train_split!r}{hint}"
        )
    pairs = [pair for pair in listing.pairs if pair.name not in excluded]
    if listing.pairs and not pairs:
        raise DataError(f"data.train_exclude: leaves no image in split {data.train_split!r}")
    return listing._replace(pairs=pairs)
