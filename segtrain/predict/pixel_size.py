"""How large a pixel is: on the ground, by the georeference of a file, or as the user says."""

import math
from pathlib import Path
from typing import NamedTuple

from segtrain.data.read.georeference import place_of, unit_m
from segtrain.data.read.image_formats import read_info
from segtrain.errors import DataError
from segtrain.text import printable


class PixelGrid(NamedTuple):
    """Where pixels lie.

    unit: of lengths, as `m` or `um`. to_map: as of MapPlace. scale: how many units the unit of the
    map is.
    """

    unit: str
    to_map: tuple[float, float, float, float, float, float]
    scale: float = 1.0

    @property
    def width(self) -> float:
        """Of a pixel, along its row."""
        return math.hypot(self.to_map[0], self.to_map[3]) * self.scale

    @property
    def height(self) -> float:
        """Of a pixel, along its column."""
        return math.hypot(self.to_map[1], self.to_map[4]) * self.scale

    @property
    def area(self) -> float:
        """Of a pixel, in square units."""
        a, b, _, d, e, _ = self.to_map
        return abs(a * e - b * d) * self.scale**2

    def at(self, column: float, row: float) -> tuple[float, float]:
        """Map coordinates of a place; that of the middle of the first pixel is (0.5, 0.5)."""
        a, b, c, d, e, f = self.to_map
        return a * column + b * row + c, d * column + e * row + f


def square(size: float, unit: str) -> PixelGrid:
    """Square pixels of `size` units; the map begins at the upper left corner of the image."""
    return PixelGrid(unit, (size, 0.0, 0.0, 0.0, size, 0.0))


def grid_of(path: Path) -> tuple[PixelGrid | None, str]:
    """Where the pixels of a file lie, in metres; None if it does not say so, and why.

    The reason is empty if the file has no georeference at all.
    """
    try:
        info = read_info(path)
        place = place_of(path, info)
    except DataError:  # it is named when it is read
        return None, ""
    if place is None:
        return None, ""
    metres, why = unit_m(place, info.size)
    if not metres:
        return None, f"{printable(path)}: {why}"
    return PixelGrid("m", place.to_map, metres), ""
