"""Objects of a label map: pixels of one class that touch each other, also at corners.

An image may come in blocks, as a raster does. Parts of an object in neighbouring blocks are joined
at the end, so that blocks change no number.
"""

from typing import NamedTuple

import cv2
import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from segtrain.data.read.image import shows
from segtrain.types import IGNORE_INDEX

# Columns of a table of objects. Sums are of the columns and rows of all pixels.
PIXELS, SUM_X, SUM_Y, LEFT, TOP, RIGHT, BOTTOM = range(7)
_NONE = -1


class ImageObjects(NamedTuple):
    """What is in an image. No class has `no_value` pixels, whose image has no value there.

    size: (height, width). pixels: (K,) int64. num_ignored: pixels of no class, without a value or
    for another reason. objects: of each class an (n, 7) int64 array, a row an object, from the top
    down; RIGHT and BOTTOM are the last column and row.
    """

    size: tuple[int, int]
    pixels: np.ndarray
    num_ignored: int
    no_value: int
    objects: list[np.ndarray]


class ObjectCounter:
    """Counts an image that is `width` pixels wide, block by block: from left to right, then down.

    Blocks beside each other are equally high.

    >>> counter = ObjectCounter(2, width=4)
    >>> for block in ([[0, 1]], [[1, 0]], [[1, 1, 0, 0]]):
    ...     counter.add(np.array(block, np.uint8), np.zeros((1, len(block[0])), np.uint8))
    >>> [table[:, PIXELS].tolist() for table in counter.finish().objects]
    [[1, 3], [4]]
    """

    def __init__(self, num_classes: int, width: int) -> None:
        self._classes = [_ClassParts(width) for _ in range(num_classes)]
        self._width, self._left, self._top = width, 0, 0
        self._num_ignored = self._no_value = 0

    def add(self, label: np.ndarray, missing: np.ndarray) -> None:
        """Adds the next block.

        label: (h, w) uint8 train ids or IGNORE_INDEX; where classes overlap (h, w, K). missing:
            (h, w), not 0 where the image has no value.
        """
        for k, one in enumerate(self._classes):
            one.add(shows(label, k), self._left, self._top)
        ignored = label == IGNORE_INDEX
        self._num_ignored += int((ignored if label.ndim == 2 else ignored.all(2)).sum())
        self._no_value += int(np.count_nonzero(missing))
        self._left += label.shape[1]
        if self._left == self._width:
            self._left, self._top = 0, self._top + label.shape[0]
            for one in self._classes:
                one.end_row()

    def finish(self) -> ImageObjects:
        """What is in the image, all of which has come."""
        objects = [one.joined() for one in self._classes]
        pixels = np.array([table[:, PIXELS].sum() for table in objects], np.int64)
        size = self._top, self._width
        return ImageObjects(size, pixels, self._num_ignored, self._no_value, objects)


class _ClassParts:
    """The parts of the objects of one class in each block, and which parts touch."""

    def __init__(self, width: int) -> None:
        self._parts: list[np.ndarray] = [np.empty((0, 7), np.int64)]
        self._links: list[np.ndarray] = [np.empty((0, 2), np.int64)]
        self._number = 0
        # Parts in the last row of the blocks above and of those beside, with a column at each end.
        self._above, self._below = (np.full(width + 2, _NONE) for _ in range(2))
        self._beside = np.empty(0, np.int64)

    def end_row(self) -> None:
        """The next block is the first of the blocks below."""
        self._above, self._below = self._below, self._above

    def add(self, mask: np.ndarray, left: int, top: int) -> None:
        """Adds the block whose first pixel is at (left, top)."""
        mask = mask.view(np.uint8)
        height, width = mask.shape
        lines = [np.full(side, _NONE) for side in (height, height, width, width)]
        x, y, w, h = cv2.boundingRect(mask)
        if w:
            inside = mask[y : y + h, x : x + w]
            _, ids, stats, centres = cv2.connectedComponentsWithStats(inside, connectivity=8)
            # The sides of the block that the box of the class touches: left, right, upper, lower.
            sides = ids[:, 0], ids[:, -1], ids[0], ids[-1]
            touches = x == 0, x + w == width, y == 0, y + h == height
            spans = *(2 * [slice(y, y + h)]), *(2 * [slice(x, x + w)])
            for line, side, touched, span in zip(lines, sides, touches, spans, strict=True):
                if touched:
                    line[span] = np.where(side, side + (self._number - 1), _NONE)
            self._add_parts(stats[1:].astype(np.int64), centres[1:], left + x, top + y)
        first, last, upper, lower = lines
        beside = np.pad(self._beside, 1, constant_values=_NONE)
        for shift in range(3):
            self._link(self._above[left + shift : left + shift + width], upper)
            if left:
                self._link(beside[shift : shift + height], first)
        self._below[left + 1 : left + 1 + width] = lower
        self._beside = last

    def joined(self) -> np.ndarray:
        """The objects of the image, (n, 7), from the top down."""
        parts, links = np.concatenate(self._parts), np.concatenate(self._links)
        graph = coo_matrix((np.ones(len(links), bool), links.T), (len(parts), len(parts)))
        number, group = connected_components(graph, directed=False)
        found = np.zeros((number, 7), np.int64)
        found[:, [LEFT, TOP]] = np.iinfo(np.int64).max
        for columns, join in (
            ([PIXELS, SUM_X, SUM_Y], np.add),
            ([LEFT, TOP], np.minimum),
            ([RIGHT, BOTTOM], np.maximum),
        ):
            for column in columns:
                join.at(found[:, column], group, parts[:, column])
        return found[np.lexsort([found[:, i] for i in (SUM_Y, SUM_X, PIXELS, LEFT, TOP)])]

    def _add_parts(self, stats: np.ndarray, centres: np.ndarray, left: int, top: int) -> None:
        pixels = stats[:, cv2.CC_STAT_AREA]
        # OpenCV divides sums of whole numbers, and their product is one again.
        sums = np.rint(centres * pixels[:, None]).astype(np.int64)
        first_x, first_y = left + stats[:, cv2.CC_STAT_LEFT], top + stats[:, cv2.CC_STAT_TOP]
        columns = {
            PIXELS: pixels,
            SUM_X: sums[:, 0] + left * pixels,
            SUM_Y: sums[:, 1] + top * pixels,
            LEFT: first_x,
            TOP: first_y,
            RIGHT: first_x + stats[:, cv2.CC_STAT_WIDTH] - 1,
            BOTTOM: first_y + stats[:, cv2.CC_STAT_HEIGHT] - 1,
        }
        self._parts.append(np.stack([columns[i] for i in range(7)], axis=1))
        self._number += len(pixels)

    def _link(self, ones: np.ndarray, others: np.ndarray) -> None:
        """Notes that parts touch where both arrays have one."""
        both = (ones != _NONE) & (others != _NONE)
        if both.any():
            pairs = np.stack([ones[both], others[both]], axis=1)
            self._links.append(np.unique(pairs, axis=0))
