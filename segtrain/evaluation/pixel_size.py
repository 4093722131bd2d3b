"""How large a pixel is: on the ground, by the georeference of a TIFF, or as the user says."""

import math
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from segtrain.errors import DataError
from segtrain.evaluation.georaster import geo_tags
from segtrain.text import printable

_SCALE, _TIE_POINT, _TRANSFORMATION, _KEYS = 33550, 33922, 34264, 34735
# GeoKeys (OGC 19-008r4), and their values.
_MODEL, _RASTER, _CRS, _LINEAR_UNIT = 1024, 1025, 3072, 3076
_PROJECTED, _GEOGRAPHIC, _PIXEL_IS_POINT = 1, 2, 2
_METRES = {9001: 1.0, 9002: 0.3048, 9003: 1200 / 3937}
# Codes of EPSG. UTM on WGS 84, WGS 72, ETRS89 and NAD83 is in metres. Those of Mercator grow with
# the latitude: at 60 degrees an area seems four times as large.
_UTM = (
    range(32601, 32661),
    range(32701, 32761),
    range(32201, 32261),
    range(25828, 25839),
    range(26901, 26924),
)
_MERCATOR = (3857, 3785, 900913, 3395, 54004, 3832, 3994, 4087, 32662)  # and plate carree
# By how much areas on a map may differ from those on the ground, as UTM's do.
_OFF = 0.01


class PixelGrid(NamedTuple):
    """Where pixels lie.

    unit: of lengths, as `m` or `um`. rows: map coordinates x and y of the corner (column, row), as
    (a, b, c) each: a * column + b * row + c. scale: how many units the unit of the map is.
    """

    unit: str
    rows: tuple[tuple[float, float, float], tuple[float, float, float]]
    scale: float = 1.0

    @property
    def width(self) -> float:
        """Of a pixel, along its row."""
        return math.hypot(self.rows[0][0], self.rows[1][0]) * self.scale

    @property
    def height(self) -> float:
        """Of a pixel, along its column."""
        return math.hypot(self.rows[0][1], self.rows[1][1]) * self.scale

    @property
    def area(self) -> float:
        """Of a pixel, in square units."""
        (a, b, _), (d, e, _) = self.rows
        return abs(a * e - b * d) * self.scale**2

    def at(self, column: float, row: float) -> tuple[float, float]:
        """Map coordinates of a place; that of the middle of the first pixel is (0.5, 0.5)."""
        x, y = (a * column + b * row + c for a, b, c in self.rows)
        return x, y


def square(size: float, unit: str) -> PixelGrid:
    """Square pixels of `size` units; the map begins at the upper left corner of the image."""
    return PixelGrid(unit, ((size, 0.0, 0.0), (0.0, size, 0.0)))


def grid_of(path: Path) -> tuple[PixelGrid | None, str]:
    """Where the pixels of a file lie, in metres; None if it does not say so, and why.

    The reason is empty if the file has no georeference at all.
    """
    tags = {}
    with suppress(DataError):  # it is named when it is read
        tags = {code: value for code, _, _, value, _ in geo_tags(path)}
    if not tags:
        return None, ""
    keys = _geo_keys(tags.get(_KEYS, ()))
    model, crs = keys.get(_MODEL), keys.get(_CRS)
    metres = _METRES.get(keys.get(_LINEAR_UNIT, 9001 if any(crs in x for x in _UTM) else None))
    if model == _GEOGRAPHIC:
        return None, f"{printable(path)}: its coordinates are degrees"
    if model != _PROJECTED:
        return None, f"{printable(path)}: it names no projection"
    if crs in _MERCATOR:
        return None, f"{printable(path)}: metres of EPSG {crs} are not those on Earth"
    if metres is None:
        return None, f"{printable(path)}: the unit of its projection is not given, or unknown"
    rows = _rows(tags)
    if rows is None:
        return None, f"{printable(path)}: its georeference gives no size of a pixel"
    if keys.get(_RASTER) == _PIXEL_IS_POINT:  # then places are those of the middle of a pixel
        (a, b, c), (d, e, f) = rows
        rows = (a, b, c - (a + b) / 2), (d, e, f - (d + e) / 2)
    grid = PixelGrid("m", rows, metres)
    if (off := _times_the_ground(path, grid)) is not None and abs(off - 1) > _OFF:
        what = f"areas of its projection are {off:.3g} times those on Earth there"
        return None, f"{printable(path)}: {what}"
    return grid, ""


def _times_the_ground(path: Path, grid: PixelGrid) -> float | None:
    """How many times the area on Earth a part of the map seems; None: rasterio is not installed."""
    try:
        import rasterio
        from rasterio.warp import transform
    except ImportError:
        return None
    try:
        with rasterio.open(path) as raster:
            x, y = grid.at(raster.width / 2, raster.height / 2)
            side = 100 / grid.scale  # 100 m
            xs, ys = (x, x + side, x + side, x), (y, y, y + side, y + side)
            xs, ys = transform(raster.crs, "EPSG:6933", xs, ys)  # of equal areas
    except (rasterio.errors.RasterioError, rasterio.errors.CRSError):
        return None
    ends = zip(xs, ys, (*xs[1:], xs[0]), (*ys[1:], ys[0]), strict=True)
    ground = abs(sum(a * d - b * c for a, b, c, d in ends)) / 2
    return 100.0**2 / ground if ground else None


def _geo_keys(values: object) -> dict[int, int]:
    """The keys whose value stands in the directory itself."""
    numbers = list(values) if isinstance(values, tuple) else []
    entries = (numbers[i : i + 4] for i in range(4, len(numbers) - 3, 4))
    return {key: value for key, location, _, value in entries if location == 0}


def _rows(tags: dict[int, object]) -> tuple[tuple[float, float, float], ...] | None:
    matrix, scale, tie = (tags.get(code, ()) for code in (_TRANSFORMATION, _SCALE, _TIE_POINT))
    if len(matrix) == 16:
        return tuple((matrix[i], matrix[i + 1], matrix[i + 3]) for i in (0, 4))
    if len(scale) == 3 and len(tie) == 6 and min(scale[:2]) > 0:
        column, row, _, x, y, _ = tie
        return (scale[0], 0.0, x - column * scale[0]), (0.0, -scale[1], y + row * scale[1])
    return None
