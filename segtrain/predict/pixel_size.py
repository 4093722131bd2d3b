"""How large a pixel is: by the georeference of a file, its microscope, or as the user says."""

import math
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from segtrain.data.read.decode import damage_named
from segtrain.data.read.georeference import place_of, unit_m
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.volumes import MM, tiff_spacing
from segtrain.errors import DataError
from segtrain.text import printable

# The unit of microscopes, and by how much a size that the user gives may differ from theirs.
UM, _SAME = "um", 0.01


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


def contradicts(grid: PixelGrid, size: tuple[float, str]) -> bool:
    """Whether pixels of a microscope differ from a number and a unit, where that is known."""
    um = size[0] * MM.get(size[1], math.nan) * 1000
    return max(abs(um / side - 1) for side in (grid.width, grid.height)) > _SAME


def grid_of(path: Path) -> tuple[PixelGrid | None, str]:
    """Where the pixels of a file lie, in metres or UM; None if it does not say so, and why.

    The reason is empty if the file has no georeference at all.
    """
    try:
        info = read_info(path)
        place = place_of(path, info)
    except DataError:  # it is named when it is read
        return None, ""
    if place is None:
        return _microscope(path), ""
    metres, why = unit_m(place, info.size)
    if not metres:
        return None, f"{printable(path)}: {why}"
    return PixelGrid("m", place.to_map, metres), ""


def _microscope(path: Path) -> PixelGrid | None:
    """In UM, as ImageJ or OME says in a TIFF; None: neither does."""
    if path.suffix.lower() not in (".tif", ".tiff"):
        return None
    import tifffile

    with suppress(DataError), damage_named(path), tifffile.TiffFile(path) as tiff:
        sides, unit = tiff_spacing(tiff, "YX")
        if sides and unit in MM:
            height, width = (side * MM[unit] * 1000 for side in sides)
            if min(height, width) > 0 and max(height, width) < math.inf:
                return PixelGrid(UM, (width, 0.0, 0.0, 0.0, height, 0.0))
    return None
