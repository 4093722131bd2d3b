"""Rasters: TIFFs that are too large to be read at once, by windows.

A pair of such files becomes many pairs, each a window of both. So a raster counts by its area, and
no part of segtrain has more of it in memory than a window. Crops do not cross the edges of windows.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from segtrain.config import DataConfig
from segtrain.data.read.concurrent import IO_THREADS, prefetch
from segtrain.data.read.decode import MAX_PIXELS
from segtrain.data.read.find import Pair, Window
from segtrain.data.read.image_formats import read_info
from segtrain.errors import DataError
from segtrain.files import os_errors_as
from segtrain.text import printable

WINDOW_PX = 2048
_SUFFIXES = (".tif", ".tiff")
# Smaller files hold no raster, unless it is empty: that is refused when it is read.
_MIN_BYTES = 1 << 16


def windows(size: tuple[int, int], side: int = WINDOW_PX) -> list[Window]:
    """Windows of about equal size, at most `side` high and wide, that cover (height, width)."""
    edges = []
    for length in size:
        # Windows of equal size: otherwise the last one could be a strip narrower than any crop.
        count = math.ceil(length / side)
        edges.append([round(i * length / count) for i in range(count + 1)])
    rows, columns = (list(pairwise(positions)) for positions in edges)
    return [Window(y, x, end - y, right - x) for y, end in rows for x, right in columns]


def split_rasters(pairs: Sequence[Pair], data: DataConfig, *, labelled: bool = True) -> list[Pair]:
    """`pairs`, with many in the place of each raster: its windows, named by their first pixels.

    Pairs that are windows already stay what they are.

    Raises:
        DataError: the label of a raster is no TIFF of its size, a window lies outside of its
            image or is too large, or `data.short_side_px` is set.
    """
    sizes = prefetch(_size_to_split, pairs, IO_THREADS)
    split_pairs: list[Pair] = []
    for pair, size in zip(pairs, sizes, strict=True):
        if size is None:
            split_pairs.append(pair)
            continue
        refuse_short_side(pair.image, data.short_side_px)
        if pair.window is not None:
            _check_window(pair.window, size, pair.image)
        # Windows are cut from both, so the label must have windows that can be read, too.
        label = read_info(pair.label) if labelled else None
        if label is not None and (label.size != size or not is_tiff(pair.label)):
            what = f"the label of a raster of {size[0]}x{size[1]} must be a TIFF of that size"
            raise DataError(f"{printable(pair.label)}: {what}")
        split_pairs += (
            [pair]
            if pair.window is not None
            else [pair._replace(name=pair.name + box.ending, window=box) for box in windows(size)]
        )
    return split_pairs


def _size_to_split(pair: Pair) -> tuple[int, int] | None:
    """The size of a raster, or of the image that a pair is a window of; else None."""
    return raster_size(pair.image) if pair.window is None else read_info(pair.image).size


def _check_window(window: Window, size: tuple[int, int], path: Path) -> None:
    bottom, right = window.top + window.height, window.left + window.width
    place = f"{printable(path)}{window.fragment}"
    if bottom > size[0] or right > size[1] or not window.height * window.width:
        what = f"the image has {size[1]} columns and {size[0]} rows"
        raise DataError(f"{place}: no window of it: {what}")
    if window.height * window.width > MAX_PIXELS:
        raise DataError(f"{place}: more than {MAX_PIXELS:,} pixels; list smaller windows")
    if not is_tiff(path):
        raise DataError(f"{place}: windows are read of TIFFs only")


def raster_size(path: Path, most: int = MAX_PIXELS) -> tuple[int, int] | None:
    """The size of an image of more than `most` pixels, if windows of it can be read; else None."""
    with os_errors_as(DataError):
        if not is_tiff(path) or path.stat().st_size < _MIN_BYTES:
            return None
    try:
        size = read_info(path).size
    except DataError:  # it is named when it is read
        return None
    return size if math.prod(size) > most else None


def refuse_short_side(path: Path, short_side_px: int | None) -> None:
    """DataError: the raster at `path` would be scaled by the sizes of its windows."""
    if short_side_px is not None:
        what = "a raster is read by windows, which have no short side of their own"
        raise DataError(f"{printable(path)}: {what}; set data.short_side_px: null")


def is_tiff(path: Path) -> bool:
    """Whether the name of the file says so."""
    return path.suffix.lower() in _SUFFIXES
