"""Comparisons of labels with images and with each other."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from segtrain.data.read import image_formats
from segtrain.data.read.decode import to_stored
from segtrain.desk.survey import contents, image_facts
from segtrain.desk.survey.contents import Color, Kind, spread
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.label_sets import SAMPLE
from segtrain.errors import DataError

_COMPARED = 24
_MOST_NUMBERS, _AREAS = 255, 1.1

Equal = tuple[frozenset[str], dict[int, Color]]


# Comparisons


def equal_sets(folder: Path, sets: Sequence[LabelSet]) -> Iterator[Equal]:
    """Two sets whose labels divide the images alike: ids and the same in colours."""
    for one, other in combinations(sets, 2):
        images = spread(sorted(one.labels.keys() & other.labels.keys()), SAMPLE)
        files = [(folder / one.labels[x][0], folder / other.labels[x][0]) for x in images]
        pairs = [_pairs_of_values(*two) for two in files]
        if not pairs or any(found is None for found in pairs):
            continue
        rows = chain.from_iterable(pairs)
        yield frozenset((one.pattern, other.pattern)), _colors_of_ids(one.kind, other.kind, rows)


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
    """Values that two labels have in the same place, (N, channels of both); None: they divide the
    image into other areas."""
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


@dataclass(frozen=True)
class EdgeScores:
    """What a sample of images says about their labels.

    scores: how much stronger the edges of an image are along the borders of its own label, of its
        neighbours' by name, and of its own when turned, than elsewhere; medians by these words.
    black: of the pixels labelled 0, the part that is black or NaN in the image.
    are_numbered: whether each label has an area of each value from 1 to a number of its own.
    """

    scores: Mapping[str, float]
    black: float
    are_numbered: bool


OWN = "their own"
_TURNS = {"upside down": (-1, 1), "mirrored": (1, -1), "turned by 180 degrees": (-1, -1)}


def compared(folder: Path, images: Sequence[Image], labels: LabelSet) -> EdgeScores:
    """Compares a sample of the images with their labels, with others' and with turned ones."""
    compared = [image for image in images if len(labels.labels.get(image.path, ())) == 1]
    pairs = [
        ([folder / file for file in image.files], folder / labels.labels[image.path][0])
        for image in compared
    ]
    seen: list[_EdgeFacts] = []
    for i in spread(range(len(pairs)), _COMPARED) if len(pairs) > 2 else ():
        with suppress(DataError):
            before, own, after = (
                image_facts.read_bands(pairs[k % len(pairs)][0]) for k in (i - 1, i, i + 1)
            )
            label = contents.read_label_part(pairs[i][1])
            if labels.upright:
                label = to_stored(label, compared[i].orientation)
            scores = _edge_scores(label, own, {"the previous": before, "the next": after})
            numbers = _numbers(label) if labels.kind == "ids" else None
            seen.append(_EdgeFacts(scores, *_black_and_zero(own, label), numbers))
    # Each comparison has its median over all images: a single picture proves little.
    medians = {}
    for words in seen[0].scores if seen else ():
        known = [facts.scores[words] for facts in seen if not np.isnan(facts.scores[words])]
        if known:
            medians[words] = float(np.median(known))
    black, zeros = sum(facts.black for facts in seen), sum(facts.zeros for facts in seen)
    are_numbered = _are_numbered([facts.numbers for facts in seen])
    return EdgeScores(medians, black / zeros if zeros else 0.0, are_numbered)


def compared_turned(folder: Path, images: Sequence[Image], labels: LabelSet) -> tuple[float, float]:
    """How labels lie on unclear images as stored, and as EXIF turns them: medians, or NaN."""
    scores = []
    for image in spread([x for x in images if x.path in labels.unclear], _COMPARED):
        with suppress(DataError):
            own = image_facts.read_bands([folder / file for file in image.files])
            for file in labels.labels[image.path]:
                label = contents.read_label_part(folder / file)
                ways = label, to_stored(label, image.orientation)
                scores.append([contents.alignment(own, way) for way in ways])
    told = [pair for pair in scores if not np.isnan(pair).any()]
    if not told:
        return math.nan, math.nan
    stored, turned = np.median(told, axis=0).tolist()
    return stored, turned


class _EdgeFacts(NamedTuple):
    """What one image says about its label.

    scores: as in `EdgeScores`. zeros, black: pixels labelled 0, and those of them that are black.
    numbers: of `_numbers`; None also in colours.
    """

    scores: Mapping[str, float]
    black: int
    zeros: int
    numbers: tuple[int, int] | None


def _edge_scores(
    label: np.ndarray, own: np.ndarray, others: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """How the label lies on its own image, on others, and on its own when it is turned."""
    scores = {OWN: contents.alignment(own, label)}
    scores |= {words: contents.alignment(image, label) for words, image in others.items()}
    for words, (down, right) in _TURNS.items():
        scores[words] = contents.alignment(own, label[::down, ::right])
    return scores


def _black_and_zero(image: np.ndarray, label: np.ndarray) -> tuple[int, int]:
    """The pixels that are black, or NaN, and labelled 0, and all that are labelled 0."""
    if image.shape[:2] != label.shape[:2]:
        return 0, 0
    is_zero = (label == 0).all(axis=2)
    is_black = ((image == 0) | np.isnan(image)).all(axis=2)
    return int((is_zero & is_black).sum()), int(is_zero.sum())


def _numbers(label: np.ndarray) -> tuple[int, int] | None:
    """k and the number of areas if a label (H, W, C) holds 1 to k, and else 0 alone."""
    channel = np.ascontiguousarray(label[..., 0])
    values = np.setdiff1d(channel, 0)
    if len(values) > _MOST_NUMBERS or (values != np.arange(1, len(values) + 1)).any():
        return None
    parts = (cv2.connectedComponents((channel == value).astype(np.uint8))[0] for value in values)
    return len(values), sum(part - 1 for part in parts)


def _are_numbered(numbers: Sequence[tuple[int, int] | None]) -> bool:
    """Whether labels number objects, nearly all of which are one area; numbers: of `_numbers`."""
    if not numbers or None in numbers:
        return False
    most, areas = zip(*numbers, strict=True)
    # Images show the same classes often, but seldom the same number of objects.
    return len(set(most)) > 1 and max(most) > 2 and sum(areas) <= _AREAS * sum(most)
