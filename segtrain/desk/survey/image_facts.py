"""Facts about an image, whose bands may lie in several files."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from segtrain.data.read.find import Window
from segtrain.data.read.image import read_values
from segtrain.data.read.raster import raster_size, windows
from segtrain.errors import DataError


class ImageFacts(NamedTuple):
    """An image of a sample.

    low, high: smallest and largest value of each channel, NaN left out; mean, std: of each.
    has_nan: whether there are pixels without a value.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    has_nan: bool


def image_facts(paths: Sequence[Path]) -> ImageFacts:
    """Facts about one image, whose bands may lie in several files; DataError: it is unreadable."""
    bands = np.ascontiguousarray(np.moveaxis(read_bands(paths), 2, 0))  # (C, H, W)
    has_nan = False
    if bands.dtype.kind == "f":
        nan = np.isnan(bands)
        has_nan = bool(nan.any())
        if nan.any(axis=0).all():
            raise DataError(f"{paths[0]}: all pixels are NaN")
        bands = [band[~where] for band, where in zip(bands, nan, strict=True)]
    facts = ((x.min(), x.max(), x.mean(dtype=float), x.std(dtype=float)) for x in bands)
    low, high, mean, std = (tuple(map(float, numbers)) for numbers in zip(*facts, strict=True))
    return ImageFacts(low, high, mean, std, has_nan)


def read_bands(paths: Sequence[Path]) -> np.ndarray:
    """(H, W, C) as stored, of a raster the middle window; the channels of several files in turn."""
    parts = [read_values(path, middle_window(path)) for path in paths]
    if len({part.shape[:2] for part in parts}) > 1:
        raise DataError(f"{paths[0]}: its bands have different sizes")
    return np.concatenate(parts, axis=2)


def middle_window(path: Path) -> Window | None:
    """The window of a raster that stands for it; None: the file is read at once."""
    size = raster_size(path)
    return None if size is None else (parts := windows(size))[len(parts) // 2]
