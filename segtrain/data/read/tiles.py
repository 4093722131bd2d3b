"""Images that are tiles of one larger picture, where they lie in it, and which ones overlap.

Georeferences tell, or names: `tile_r0_c3` counts rows and columns, `mosaic_512_1024` counts pixels.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from segtrain.data.read.concurrent import IO_THREADS, prefetch
from segtrain.data.read.decode import Info
from segtrain.data.read.find import Pair
from segtrain.data.read.image import read_values
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.places import MapPlace
from segtrain.data.read.thumbnails import grey_of
from segtrain.errors import DataError

_NAMES = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<mosaic>.*?)[-_. ]?r(?:ow)?[-_]?(?P<row>\d+)[-_. ]?c(?:ol)?[-_]?(?P<column>\d+)",
        r"(?P<mosaic>.*?)[-_. ]?y[-_]?(?P<row>\d+)[-_. ]?x[-_]?(?P<column>\d+)",
        r"(?P<mosaic>.*?)[-_. ]?x[-_]?(?P<column>\d+)[-_. ]?y[-_]?(?P<row>\d+)",
        r"(?P<mosaic>.*?)[-_. ](?P<row>\d+)[-_](?P<column>\d+)",
    )
]
# Dates and times, or numbers of scenes and frames, fill no grid.
_FILLED, _LEAST_TILES = 0.6, 6
_TIFF = (".tif", ".tiff")
_LEAST_OVERLAP_PX, _SAME_PX, _EQUAL, _SAMPLES = 4, 2, 10.0, 3


class TileBox(NamedTuple):
    """What a tile shows of a picture, in its pixels; bottom and right are outside."""

    mosaic: str
    top: float
    left: float
    bottom: float
    right: float

    def overlaps(self, other: "TileBox") -> bool:
        """Whether both show more of the picture than a rim of half a pixel.

        >>> TileBox("a", 0, 0, 64, 64).overlaps(TileBox("a", 0, 48, 64, 112))
        True
        """
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        right = min(self.right, other.right) - max(self.left, other.left)
        return self.mosaic == other.mosaic and min(down, right) > 0.5


class _Header(NamedTuple):
    """What is known of an image before its pixels: its name, (height, width), and place."""

    name: str
    size: tuple[int, int]
    place: MapPlace | None


def tile_boxes(
    names: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    places: Sequence[MapPlace | None],
    pixels: Callable[[int], np.ndarray],
) -> list[TileBox | None]:
    """Where each image lies in a picture that others are of, too; None: it is no tile.

    sizes: (height, width). pixels: reads an image, (H, W, C); a few are compared where names count
        rows and columns, which do not tell how far tiles overlap.
    """
    headers = [_Header(*each) for each in zip(names, sizes, places, strict=True)]
    found: list[TileBox | None] = [_on_the_map(one) for one in headers]
    by_mosaic: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
    for i, one in enumerate(headers):
        match = None if found[i] else matched(one.name)
        if match is not None:
            by_mosaic[match["mosaic"]][int(match["row"]), int(match["column"])] = i
    for mosaic, at in by_mosaic.items():
        rows, columns = ({place[axis] for place in at} for axis in (0, 1))
        grid = len(rows) * len(columns)
        if min(len(rows), len(columns)) < 2 or len(at) < max(_LEAST_TILES, _FILLED * grid):
            continue
        steps = _steps(at, headers, pixels)
        if steps is None:
            continue
        for (row, column), i in at.items():
            top, left = row * steps[0], column * steps[1]
            height, width = headers[i].size
            found[i] = TileBox(mosaic, top, left, top + height, left + width)
    return found


def boxes_of(pairs: Sequence[Pair]) -> list[TileBox | None]:
    """`tile_boxes` of the images of `pairs`; None too for those that cannot be read.

    Headers are read only where a name or a TIFF may tell a place. Windows of images have none.
    """
    found: list[TileBox | None] = [None] * len(pairs)
    of_tiff = (pair.image.suffix.lower() in _TIFF and pair.window is None for pair in pairs)
    if not (any(of_tiff) or any(matched(pair.name) for pair in pairs)):
        return found
    infos = list(prefetch(_info_or_none, pairs, IO_THREADS))
    known = [i for i, info in enumerate(infos) if info is not None]
    boxes = tile_boxes(
        [pairs[i].name for i in known],
        [infos[i].size for i in known],
        [infos[i].place for i in known],
        lambda k: read_values(pairs[known[k]].image),
    )
    for i, box in zip(known, boxes, strict=True):
        found[i] = box
    return found


def _info_or_none(pair: Pair) -> Info | None:
    try:
        return None if pair.window else read_info(pair.image)
    except DataError:
        return None  # which is said elsewhere


def strips(boxes: Sequence[TileBox | None], number: int) -> list[str | None]:
    """The strip of its picture that each tile is in, of `number` with about equally many tiles.

    Strips follow each other from the top or, in a wide picture, from the left, so that few tiles
    overlap those of another strip.

    >>> strips([TileBox("a", 0, x, 64, x + 64) for x in (0, 48, 96, 144)] + [None], 2)
    ['a 0', 'a 0', 'a 1', 'a 1', None]
    """
    found: list[str | None] = [None] * len(boxes)
    by_mosaic: dict[str, list[int]] = defaultdict(list)
    for i, box in enumerate(boxes):
        if box is not None:
            by_mosaic[box.mosaic].append(i)
    for mosaic, tiles in by_mosaic.items():
        height, width = (
            max(boxes[i][end] for i in tiles) - min(boxes[i][start] for i in tiles)
            for start, end in ((1, 3), (2, 4))
        )
        side = 1 if height >= width else 2
        places = sorted({boxes[i][side] for i in tiles})
        for i in tiles:
            # Tiles that begin at one place are in one strip.
            found[i] = f"{mosaic} {places.index(boxes[i][side]) * number // len(places)}"
    return found


def overlapping(boxes: Sequence[TileBox | None]) -> Iterator[tuple[int, int]]:
    """The pairs of tiles that overlap, by their indices, the smaller one first."""
    sides = [max(b.bottom - b.top, b.right - b.left) for b in boxes if b is not None]
    side = max(sides, default=1.0)
    cells: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for i, box in enumerate(boxes):
        if box is None:
            continue
        row, column = int(box.top // side), int(box.left // side)
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                for other in cells.get((box.mosaic, row + down, column + right), ()):
                    if box.overlaps(boxes[other]):
                        yield other, i
        cells[box.mosaic, row, column].append(i)


def _on_the_map(header: _Header) -> TileBox | None:
    """The box of a georeferenced image whose rows go straight down, in pixels of its own size."""
    place = header.place
    if place is None or place.right[1] or place.down[0] or not (place.right[0] and place.down[1]):
        return None
    top, left = place.y / place.down[1], place.x / place.right[0]
    mosaic = f"map {place.system} {place.right[0]:.6g} {place.down[1]:.6g}"
    height, width = header.size
    return TileBox(mosaic, top, left, top + height, left + width)


def matched(name: str) -> re.Match[str] | None:
    """The parts of a name that may be of a tile: mosaic, row and column."""
    return next(filter(None, (pattern.fullmatch(name) for pattern in _NAMES)), None)


def _steps(
    at: dict[tuple[int, int], int],
    headers: Sequence[_Header],
    pixels: Callable[[int], np.ndarray],
) -> tuple[float, float] | None:
    """The pixels from one row of tiles to the next, and from one column to the next.

    1 where names count pixels; then the pixels of neighbours must agree. None: they do not, or
    names count rows, but columns in pixels: clips and frames, perhaps.
    """
    least = [
        min(b - a for a, b in pairwise(sorted({place[axis] for place in at}))) for axis in (0, 1)
    ]
    if (least[0] > 1) != (least[1] > 1):
        return None
    steps = []
    for axis, gap in enumerate(least):
        side = max(headers[i].size[axis] for i in at.values())
        shared = _shared_by_neighbours(at, axis, gap, headers, pixels)
        if gap == 1:
            steps.append(float(side - shared))
        elif side - gap >= _LEAST_OVERLAP_PX and abs(side - gap - shared) > _SAME_PX:
            return None
        else:
            steps.append(1.0)
    return steps[0], steps[1]


def _shared_by_neighbours(
    at: dict[tuple[int, int], int],
    axis: int,
    gap: int,
    headers: Sequence[_Header],
    pixels: Callable[[int], np.ndarray],
) -> float:
    """How many rows (axis 0) or columns tiles have in common with the next one, of a few pairs."""
    beside = (
        (i, at.get((row + gap * (1 - axis), column + gap * axis)))
        for (row, column), i in at.items()
    )
    pairs = [(i, j) for i, j in beside if j is not None]
    shared = []
    for i, j in pairs[:: max(1, len(pairs) // _SAMPLES)][:_SAMPLES]:
        with suppress(DataError):
            shared.append(_shared_px(pixels(i), pixels(j), axis))
    return median(shared) if shared else 0.0


def _shared_px(one: np.ndarray, other: np.ndarray, axis: int) -> int:
    """How many rows (axis 0) or columns at the end of a tile begin the next one; 0: none."""
    a, b = (np.moveaxis(grey_of(x).astype(np.float32), axis, 0)[:, ::4] for x in (one, other))
    if a.shape[1] != b.shape[1]:
        return 0
    scale = max(float(np.std(a)), 1e-6)
    best, shared = np.inf, 0
    for number in range(_LEAST_OVERLAP_PX, min(len(a), len(b))):
        difference = float(np.abs(a[-number:] - b[:number]).mean()) / scale
        if difference < best:
            best, shared = difference, number
    return shared if _EQUAL * best < 1 else 0
