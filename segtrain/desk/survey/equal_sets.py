"""Which sets of labels say the same in other words: ids, and their areas in colours."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from segtrain.data.read import image_formats
from segtrain.desk.survey import contents
from segtrain.desk.survey.contents import Color, Kind, spread
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.label_sets import SAMPLE
from segtrain.errors import DataError

_MOST_COMPARED = 200

Equal = tuple[frozenset[str], dict[int, Color]]
"""Patterns of two sets that divide the images alike, and the colours of ids if one has colours."""


def equal_sets(folder: Path, sets: Sequence[LabelSet]) -> Iterator[Equal]:
    """Two sets whose labels divide the images alike: ids and the same in colours."""
    for one, other in combinations(sets, 2):
        common = sorted(one.labels.keys() & other.labels.keys())
        # A few tell most that differ; whether all are equal, only many do.
        for images in (spread(common, SAMPLE), spread(common, _MOST_COMPARED)):
            rows = _equal_values(folder, one, other, images)
            if rows is None:
                break
        else:
            colors = _colors_of_ids(one.kind, other.kind, rows)
            yield frozenset((one.pattern, other.pattern)), colors


def _equal_values(
    folder: Path, one: LabelSet, other: LabelSet, images: Sequence[str]
) -> np.ndarray | None:
    """The values that lie on each other in all of these images, (N, channels); None: not equal."""
    rows = []
    for image in images:
        pairs = _pairs_of_values(folder / one.labels[image][0], folder / other.labels[image][0])
        if pairs is None:
            return None
        rows.append(pairs)
    if not rows or len({found.shape[1] for found in rows}) > 1:
        return None
    both = np.unique(np.concatenate(rows), axis=0)
    if one.kind == other.kind == "ids":
        # Two ids that are exchanged are a mistake in one of the sets.
        are_same = (both[:, 0] == both[:, -1]).all()
        return both if are_same or _is_renumbered(one) or _is_renumbered(other) else None
    # One colour for each id, in all images.
    ids = both[:, :1] if one.kind == "ids" else both[:, -1:]
    has_one_each = len(np.unique(ids)) == len(both)
    return both if has_one_each or "ids" not in (one.kind, other.kind) else None


def _is_renumbered(labels: LabelSet) -> bool:
    """Whether the name says other numbers of the same classes: `*_labelTrainIds.png`."""
    return "trainid" in labels.pattern.lower()


def _colors_of_ids(kind: Kind, other: Kind, rows: Iterable[np.ndarray]) -> dict[int, Color]:
    """The colour beside each id; empty unless one kind is ids and the other colours.

    rows: values of the first kind and of the other in the same place.
    """
    if (kind, other) == ("ids", "colors"):
        return {int(row[0]): tuple(row[-3:].tolist()) for row in rows}
    if (kind, other) == ("colors", "ids"):
        return {int(row[-1]): tuple(row[:3].tolist()) for row in rows}
    return {}


def _pairs_of_values(*paths: Path) -> np.ndarray | None:
    """Values that two labels have in the same place, (N, channels of both).

    None: they divide the image into other areas, or cannot be read.
    """
    try:
        stored = [image_formats.read_stored(path) for path in paths]
    except DataError:
        return None
    if stored[0].shape[:2] != stored[1].shape[:2]:
        return None
    stored = [contents.without_alpha(pixels) for pixels in stored]
    numbers = [len(_pixel_values(pixels)) for pixels in stored]
    both = _pixel_values(np.dstack(stored))
    # More pairs than values in either label: their areas differ, and not only the values.
    if max(numbers) < len(both):
        return None
    if min(numbers) == len(both):
        return both
    # In a picture in colours, several ids without a class may be black together.
    channels = stored[numbers.index(min(numbers))].shape[2]
    fewer = both[:, :channels] if numbers[0] < numbers[1] else both[:, -channels:]
    distinct, count = np.unique(fewer, axis=0, return_counts=True)
    are_black = channels > 1 and not distinct[count > 1].any()
    return both if are_black else None


def _pixel_values(stored: np.ndarray) -> np.ndarray:
    """The different pixels of (H, W, C), (N, C)."""
    return np.unique(stored.reshape(-1, stored.shape[2]), axis=0)
