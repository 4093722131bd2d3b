"""The decision for one large picture: windows to train on, and a strip of it to evaluate on.

Windows do not overlap, and a gap lies on both sides of the strip: neighbouring pixels are alike,
and a score on pixels beside those trained on would be too good.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from segtrain.data.read.find import Window
from segtrain.data.read.georeference import unit_m
from segtrain.data.read.raster import is_tiff, windows
from segtrain.desk.survey.class_table import Classes
from segtrain.desk.survey.groupings import DEFAULT_VAL
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.questions import Answers
from segtrain.desk.survey.splits import Splits
from segtrain.desk.survey.survey import Survey
from segtrain.errors import DataError, refuse_unused
from segtrain.text import counted, first_of
from segtrain.types import IGNORE_INDEX

SIDE_PX = 1024
# Steps of strips along a side; a gap is one of them.
_CELLS, _LEAST_PX = 40, 400

ClassIds = Callable[[Window], np.ndarray]
"""The train ids (h, w) of a window of the label, IGNORE_INDEX where there is no class."""
Span = tuple[int, int]
"""The first row or column, and the one behind the last."""


def is_one_picture(survey: Survey, labels: LabelSet, answers: Answers) -> bool:
    """Whether a single image has a label, so that it has to be divided itself."""
    labelled = [image for image in survey.images if image.path in labels.labels]
    if len(labelled) != 1 or min(labelled[0].size) < _LEAST_PX:
        return False
    image, files = labelled[0], labels.labels[labelled[0].path]
    if not is_tiff(Path(image.path)):
        repair = "store it as TIFF (gdal_translate a.png a.tif), of which windows can be read"
        raise DataError(f"{survey.root / image.path}: the only image with a label; {repair}")
    # Windows are read of one file, as its pixels are stored.
    if labels.classes or not files or labels.upright or labels.resized:
        what = "the only image with a label, which windows need in one file, upright, of its size"
        raise DataError(f"{survey.root / image.path}: {what}")
    what = "the only image with a label; --val 0.2 divides it"
    unused = " val" if isinstance(answers.val, str) else ""  # --val with a list of images
    refuse_unused(vars(answers), f"group like{unused}", what)
    return True


def choose_windows(
    survey: Survey, path: str, classes: Classes, answers: Answers, class_ids: ClassIds
) -> Splits:
    """Windows of the image at `path`, those without any class left out.

    DataError: nothing is left to train or to evaluate on.
    """
    image = next(image for image in survey.images if image.path == path)
    share = answers.val if isinstance(answers.val, float) else DEFAULT_VAL
    # 1. A grid over the picture: the strip to evaluate on begins and ends at its lines.
    edges = [[round(i * side / _CELLS) for i in range(_CELLS + 1)] for side in image.size]
    counts = _counts(edges, class_ids, len(classes.classes))
    strip = _choose_strip(edges, counts, share)

    # 2. Windows without any class teach nothing, and cannot be scored.
    def labelled(*spans: Span) -> list[Window]:
        every = (window for span in spans for window in _windows(span, strip.axis, image.size))
        return [window for window in every if (class_ids(window) != IGNORE_INDEX).any()]

    train, val = labelled(strip.before, strip.after), labelled(strip.inside)
    if not (train and val):
        raise DataError(f"{survey.root / path}: too little of its label has a class")
    # 3. What there is to say of them.
    warnings = tuple(
        f"no window to {side} on shows {first_of(classes.classes[i].name for i in absent)}"
        for side, absent in (("train", strip.not_trained), ("evaluate", strip.not_evaluated))
        if absent
    )
    images = ([replace(image, window=x, size=x[2:]) for x in part] for part in (train, val))
    return Splits(*map(tuple, images), _reason(strip, train, len(val), image), warnings)


class _Strip(NamedTuple):
    """The part of a picture to evaluate on: rows (axis 0) or columns, from side to side.

    before, after: the spans to train on, a cell away. not_trained, not_evaluated: numbers of
    classes that the picture shows, and that side does not.
    """

    axis: int
    before: Span
    inside: Span
    after: Span
    not_trained: tuple[int, ...]
    not_evaluated: tuple[int, ...]


def _choose_strip(edges: list[list[int]], counts: np.ndarray, share: float) -> _Strip:
    """The strip of rows or of columns, whichever costs less (`best_span`).

    edges: the lines of the grid along both axes. counts: as of `_counts`.
    """
    width = max(1, round(share * _CELLS))
    along = [counts.sum(1 - axis) for axis in (0, 1)]
    costs = [best_span(counts_along, width, 1, no_strips=True) for counts_along in along]
    axis = int(costs[1] < costs[0])
    lines, first = edges[axis], costs[axis][1]
    last = first + width
    whole, parts = counts.sum((0, 1)), sides(along[axis], first, width, 1)
    return _Strip(
        axis,
        (0, lines[max(0, first - 1)]),
        (lines[first], lines[last]),
        (lines[min(_CELLS, last + 1)], lines[-1]),
        *(tuple(np.flatnonzero((whole > 0) & (part == 0)).tolist()) for part in parts),
    )


def _reason(strip: _Strip, train: Sequence[Window], num_val: int, image: Image) -> str:
    """How the picture is divided, and how far apart the two sides are, for people."""
    start, end = strip.inside
    # A window's place and its size stand in the order of the axes.
    ranges = ((x[strip.axis], x[strip.axis] + x[strip.axis + 2]) for x in train)
    gap = min(max(start - stop, begin - end) for begin, stop in ranges)
    which = f"a strip of {'rows' if strip.axis == 0 else 'columns'} {start} to {end - 1}"
    apart = f"{gap} px{_in_metres(gap, strip.axis, image)} from the nearest window to train on"
    return f"{counted(num_val, 'window', 'windows')}, {which}, {apart} (--val)"


def _windows(span: Span, axis: int, size: tuple[int, int]) -> Iterator[Window]:
    """Windows that cover rows (axis 0) or columns of this span."""
    start, end = span
    if start == end:
        return
    area = (end - start, size[1]) if axis == 0 else (size[0], end - start)
    for window in windows(area, SIDE_PX):
        place = {"top": window.top + start} if axis == 0 else {"left": window.left + start}
        yield window._replace(**place)


def _counts(edges: list[list[int]], class_ids: ClassIds, num_classes: int) -> np.ndarray:
    """How many pixels of each cell show each class, (cells, cells, K)."""
    counts = np.zeros((_CELLS, _CELLS, num_classes), np.int64)
    for y, (top, bottom) in enumerate(pairwise(edges[0])):
        row = class_ids(Window(top, 0, bottom - top, edges[1][-1]))
        for x, (left, right) in enumerate(pairwise(edges[1])):
            ids = row[:, left:right].ravel()
            counts[y, x] = np.bincount(ids, minlength=256)[:num_classes]
    return counts


def best_span(
    counts: np.ndarray, width: int, gap: int, *, no_strips: bool = False
) -> tuple[tuple[float, ...], int]:
    """Where to evaluate: the first of `width` neighbours, with its cost.

    No class is lost to the training, then all are evaluated, then no side is a thin strip (where
    windows are cut), then the span is most like the whole.

    counts: pixels of each class along an axis, (N, K). gap: what is left out on both sides.
    """
    every = counts.sum(0)

    def cost(first: int) -> tuple[float, ...]:
        # A tuple, so that a class lost to training outweighs all else.
        trained, evaluated = sides(counts, first, width, gap)
        # Windows are drawn equally often: strips narrower than a crop would get too large a part.
        rest = first - gap, len(counts) - first - width - gap
        thin = sum(0 < cells < max(2, width // 2) for cells in rest) if no_strips else 0
        lost, unseen = (int(((every > 0) & (x == 0)).sum()) for x in (trained, evaluated))
        unlike = evaluated / max(1, every.sum()) - every / max(1, every.sum()) * width / len(counts)
        return lost, unseen, thin, float(np.abs(unlike).sum())

    return min((cost(first), first) for first in range(len(counts) - width + 1))


def sides(counts: np.ndarray, first: int, width: int, gap: int) -> tuple[np.ndarray, np.ndarray]:
    """How many pixels of each class are trained and evaluated on, (K,) both."""
    last = first + width
    others = [*range(first - gap), *range(last + gap, len(counts))]
    return counts[others].sum(0), counts[first:last].sum(0)


def _in_metres(pixels: int, axis: int, image: Image) -> str:
    """Such as " (12.5 m)", of rows (axis 0) or columns; empty: nobody knows."""
    if image.map_place is None:
        return ""
    metres, _ = unit_m(image.map_place, image.size)
    step = np.array(image.map_place.to_map).reshape(2, 3)[:, 1 - axis]
    return f" ({pixels * metres * np.hypot(*step):.4g} m)" if metres else ""
