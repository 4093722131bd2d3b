"""Which images are tiles of one larger picture, and where they lie in it.

Georeferences tell, or names: `tile_r0_c3` counts rows and columns, `mosaic_512_1024` counts pixels,
`mosaic_0_0_80_64` is a box. Which number is which, the pixels of neighbours tell.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from segtrain.data.read.concurrent import IO_THREADS, prefetch
from segtrain.data.read.find import Pair
from segtrain.data.read.georeference import MapPlace, place_of
from segtrain.data.read.image import read_values
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.thumbnails import grey_of
from segtrain.data.read.tiles import TileBox, overlapping
from segtrain.errors import DataError

_N, _REST = r"(\d{1,7})", r"(?P<rest>\D*)"
_BETWEEN, _MAYBE_BETWEEN = r"[-_. ,]+", r"[-_. ,]*"
_MOSAIC = r"(?:(?P<mosaic>.*?)[-_. ,/(])??"
_MARKED = r"(?P<mosaic>.*?)[-_. ,(]*"
_DOWN_FIRST, _EITHER = ((0, 1),), ((0, 1), (1, 0))
# What names may look like, and which numbers of them are, in which orders, those of top, left and,
# of four, bottom and right, or height and width.
_FORMS = [
    (re.compile(pattern, re.IGNORECASE), orders)
    for pattern, orders in (
        (rf"{_MARKED}r(?:ow)?[-_]?{_N}{_MAYBE_BETWEEN}c(?:ol)?[-_]?{_N}{_REST}", _DOWN_FIRST),
        (rf"{_MARKED}y[-_]?{_N}{_MAYBE_BETWEEN}x[-_]?{_N}{_REST}", _DOWN_FIRST),
        (rf"{_MARKED}x[-_]?{_N}{_MAYBE_BETWEEN}y[-_]?{_N}{_REST}", ((1, 0),)),
        (rf"{_MOSAIC}(?:\d+[-_])?{_N}[-_ ]?by[-_ ]?{_N}(?P<rest>(?:\D.*)?)", _EITHER),
        (
            rf"{_MOSAIC}{_N}{_BETWEEN}{_N}{_BETWEEN}{_N}{_BETWEEN}{_N}{_REST}",
            ((1, 0, 3, 2), (0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 3, 1)),
        ),
        (rf"{_MOSAIC}{_N}{_BETWEEN}{_N}{_REST}", _EITHER),
    )
]
# Dates and times, or numbers of scenes and frames, fill no grid.
_FILLED, _LEAST_TILES = 0.6, 6
_TIFF = (".tif", ".tiff")
# Of the standard deviation: JPEG adds noise, which depends on the place in the tile.
_NOISE = 0.25
# Frames of a camera that moves slowly overlap by more than tiles.
_LEAST_OVERLAP_PX, _MOST_OVERLAP, _EQUAL, _SAMPLES = 4, 0.9, 10.0, 3


class _Named(NamedTuple):
    """Image `i`, and what its name says in one of the forms."""

    i: int
    mosaic: str
    numbers: tuple[int, ...]


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
    # Georeferences first: they state places, at which names only hint.
    boxes: list[TileBox | None] = [_on_the_map(header) for header in headers]
    for pattern, orders in _FORMS:
        alike: dict[str, list[_Named]] = defaultdict(list)  # pictures whose names differ in numbers
        for i, header in enumerate(headers):
            # What a georeference, or a form before this one, has told stands.
            match = None if boxes[i] else pattern.fullmatch(header.name)
            if match is not None:
                mosaic, rest = (match["mosaic"] or ""), match["rest"].rstrip(")")
                numbers = tuple(int(x) for x in match.groups()[1:-1])
                alike[re.sub(r"\d+", "0", mosaic)].append(_Named(i, mosaic + rest, numbers))
        for named in alike.values():
            for i, box in _placed(named, orders, headers, pixels).items():
                boxes[i] = box
    return boxes


def boxes_of(pairs: Sequence[Pair]) -> list[TileBox | None]:
    """`tile_boxes` of the images of `pairs`; None too for those that cannot be read.

    Headers are read only where a name or a TIFF may tell a place.
    """
    boxes = [pair.window and _box_of_window(pair) for pair in pairs]
    of_tiff = (pair.image.suffix.lower() in _TIFF and pair.window is None for pair in pairs)
    if not (any(of_tiff) or any(_may_be_tile(pair.name) for pair in pairs)):
        return boxes
    headers = list(prefetch(_header_or_none, pairs, IO_THREADS))
    known = [i for i, header in enumerate(headers) if header is not None]
    of_known = tile_boxes(
        [headers[i].name for i in known],
        [headers[i].size for i in known],
        [headers[i].place for i in known],
        lambda k: read_values(pairs[known[k]].image),
    )
    for i, box in zip(known, of_known, strict=True):
        boxes[i] = box
    return boxes


def _box_of_window(pair: Pair) -> TileBox:
    top, left, height, width = pair.window
    return TileBox(str(pair.image), top, left, top + height, left + width)


def _header_or_none(pair: Pair) -> _Header | None:
    if pair.window:
        return None
    try:
        info = read_info(pair.image)
        return _Header(pair.name, info.size, place_of(pair.image, info))
    except DataError:
        return None  # which is said elsewhere


def _on_the_map(header: _Header) -> TileBox | None:
    """The box of a georeferenced image whose rows go straight down, in pixels of its own size."""
    if header.place is None:
        return None
    (a, b, x, d, e, y), crs = header.place
    # A picture that is rotated or sheared on the map has no box along its axes.
    if b or d or not (a and e):
        return None
    top, left = y / e, x / a
    # Images of one coordinate system and one pixel size are parts of one picture.
    mosaic = f"map {crs.to_string() if crs else ''} {a:.6g} {e:.6g}"
    height, width = header.size
    return TileBox(mosaic, top, left, top + height, left + width)


def _may_be_tile(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern, _ in _FORMS)


def _placed(
    named: Sequence[_Named],
    orders: Sequence[tuple[int, ...]],
    headers: Sequence[_Header],
    pixels: Callable[[int], np.ndarray],
) -> dict[int, TileBox]:
    """The boxes of images, by their indices, in the order that pixels confirm best.

    Empty: they are no tiles, or have no pixels in common.
    """
    numbers = np.array([tile.numbers for tile in named])
    sizes = np.array([headers[tile.i].size for tile in named])
    # Counts of rows and columns differ by 1, places in pixels by the distance of tiles.
    counts = [_least_gap(named, axis) == 1 for axis in (0, 1)]
    if len(orders[0]) == 2 and any(counts):  # rows, but columns in pixels: clips and frames
        return _counted(named, orders, headers, pixels) if all(counts) else {}
    best_boxes, best = {}, 1.0
    for order in orders:
        starts, ends = numbers[:, order[:2]], numbers[:, order[2:]]
        # Names may say the last pixel, or the size.
        over = [{*(end - sizes).ravel()} for end in (ends - starts, ends)] if ends.size else [{0}]
        if {0} not in over and {-1} not in over:
            continue
        boxes = [
            TileBox(tile.mosaic, top, left, top + height, left + width)
            for tile, (top, left), (height, width) in zip(
                named, starts.tolist(), sizes.tolist(), strict=True
            )
        ]
        # In the right order, the parts where two tiles overlap show the same pixels.
        moved, still, scale = _differences(boxes, lambda k: grey_of(pixels(named[k].i)))
        # Two numbers say less than a box of the image's size.
        most = min(_NOISE * scale, still / 3) if not ends.size else still
        if moved < most and moved / still < best:
            best, best_boxes = moved / still, {x.i: y for x, y in zip(named, boxes, strict=True)}
    return best_boxes


def _least_gap(named: Sequence[_Named], axis: int) -> int:
    """The least difference of the numbers at `axis` within a picture; 0: there is none."""
    of: dict[str, set[int]] = defaultdict(set)
    for tile in named:
        of[tile.mosaic].add(tile.numbers[axis])
    return min((b - a for numbers in of.values() for a, b in pairwise(sorted(numbers))), default=0)


def _differences(
    boxes: Sequence[TileBox], grey: Callable[[int], np.ndarray]
) -> tuple[float, float, float]:
    """How much tiles that overlap differ, of a sample: where both show the same, by `boxes`; at
    the same places in both, where frames of a camera are more alike; and what both would be by
    chance, the standard deviation.
    """
    pairs = [
        (i, j)
        for i, j in overlapping(boxes)
        if boxes[i] != boxes[j] and min(_common(boxes[i], boxes[j])) >= _LEAST_OVERLAP_PX
    ]
    moved = still = scale = 0.0
    for i, j in pairs[:: max(1, len(pairs) // (3 * _SAMPLES))]:
        down, right = (int(b - a) for a, b in zip(boxes[i][1:3], boxes[j][1:3], strict=True))
        height, width = _common(boxes[i], boxes[j])
        with suppress(DataError):
            a, b = grey(i), grey(j)
            ours = a[max(down, 0) :, max(right, 0) :][:height, :width]
            theirs = b[max(-down, 0) :, max(-right, 0) :][:height, :width]
            moved += float(np.abs(ours - theirs).mean())
            still += float(np.abs(a[:height, :width] - b[:height, :width]).mean())
            scale += float(a.std())
    return moved, still, scale


def _common(tile: TileBox, other: TileBox) -> tuple[int, int]:
    """The height and width of what two tiles show both."""
    return (
        int(min(tile.bottom, other.bottom) - max(tile.top, other.top)),
        int(min(tile.right, other.right) - max(tile.left, other.left)),
    )


def _counted(
    named: Sequence[_Named],
    orders: Sequence[tuple[int, ...]],
    headers: Sequence[_Header],
    pixels: Callable[[int], np.ndarray],
) -> dict[int, TileBox]:
    """As `_placed`, of names that count rows and columns, which do not tell how far tiles overlap.

    Pictures with a grid that is nearly full; of the orders the one by which more rows and columns
    begin with the end of the one before.
    """
    by_mosaic: dict[str, list[_Named]] = defaultdict(list)
    for tile in named:
        by_mosaic[tile.mosaic].append(tile)
    boxes = {}
    for mosaic, tiles in by_mosaic.items():
        rows, columns = ({tile.numbers[axis] for tile in tiles} for axis in (0, 1))
        grid = len(rows) * len(columns)
        if min(len(rows), len(columns)) < 2 or len(tiles) < max(_LEAST_TILES, _FILLED * grid):
            continue
        best = -1
        for order in orders:
            at = {(tile.numbers[order[0]], tile.numbers[order[1]]): tile.i for tile in tiles}
            shared = [_shared_by_neighbours(at, axis, headers, pixels) for axis in (0, 1)]
            if (overlaps := sum(x > 0 for x in shared)) <= best:
                continue
            best = overlaps
            # Tiles at the edge may be smaller, so the largest one tells the distance.
            steps = [
                max(headers[i].size[axis] for i in at.values()) - shared[axis] for axis in (0, 1)
            ]
            for (row, column), i in at.items():
                top, left = row * steps[0], column * steps[1]
                height, width = headers[i].size
                boxes[i] = TileBox(mosaic, top, left, top + height, left + width)
    return boxes


def _shared_by_neighbours(
    at: dict[tuple[int, int], int],
    axis: int,
    headers: Sequence[_Header],
    pixels: Callable[[int], np.ndarray],
) -> float:
    """How many rows (axis 0) or columns tiles have in common with the next one, of a few pairs."""
    beside = ((i, at.get((row + 1 - axis, column + axis))) for (row, column), i in at.items())
    pairs = [(i, j) for i, j in beside if j is not None]
    shared = []
    for i, j in pairs[:: max(1, len(pairs) // _SAMPLES)][:_SAMPLES]:
        with suppress(DataError):
            shared.append(_shared_px(pixels(i), pixels(j), axis))
    return median(shared) if shared else 0.0


def _shared_px(tile: np.ndarray, other: np.ndarray, axis: int) -> int:
    """How many rows (axis 0) or columns at the end of a tile begin the next one; 0: none."""
    # The axis to be searched comes first; across it every fourth pixel is enough.
    a, b = (np.moveaxis(grey_of(x).astype(np.float32), axis, 0)[:, ::4] for x in (tile, other))
    if a.shape[1] != b.shape[1]:
        return 0
    # A tile of one grey level has no deviation to divide by.
    scale = max(float(np.std(a)), 1e-6)
    best, shared = np.inf, 0
    for number in range(_LEAST_OVERLAP_PX, int(_MOST_OVERLAP * min(len(a), len(b)))):
        difference = float(np.abs(a[-number:] - b[:number]).mean()) / scale
        if difference < best:
            best, shared = difference, number
    return shared if _EQUAL * best < 1 else 0
