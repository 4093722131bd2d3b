"""Where images lie on the map: the georeference in a file, or in files beside it, as GDAL has it.

rasterio is imported only for files that have one.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from segtrain.data.read.decode import Info, damage_named
from segtrain.errors import ConfigError, DataError
from segtrain.files import read_bytes
from segtrain.text import install_line, printable

SAME_EXTENT = "cut both to the same extent and pixels, as gdalwarp -te and -tr do"
DEGREES = "OGC:CRS84"  # longitude, then latitude
# Equal areas of the whole Earth; and by how much areas on a map may differ from those, as UTM's do.
EQUAL_AREA, MOST_OFF = "EPSG:6933", 0.01
_DRIVERS = {".png": "PNG", ".webp": "WEBP", ".bmp": "BMP", ".gif": "GIF", ".jp2": "JP2OpenJPEG"}
_DRIVERS |= dict.fromkeys((".tif", ".tiff"), "GTiff") | dict.fromkeys((".pgm", ".ppm"), "PNM")
_DRIVERS |= dict.fromkeys((".jpg", ".jpeg", ".jfif"), "JPEG")
# QGIS writes such a file for statistics alone, too.
_PLACE_IN_AUX = b"<GeoTransform", b"<GCPList", b"<GeodataXform"
# Pixels as points or as areas differ by half of one.
_NEAR_PX, _SAME_SCALE = 0.75, 1e-3
_SQUARE_M = 100.0


class MapPlace(NamedTuple):
    """Map coordinates of the corner (column, row) of pixels: a * column + b * row + c, and d, e, f.

    crs: rasterio's; None: the file does not say.
    """

    to_map: tuple[float, float, float, float, float, float]
    crs: Any = None


def geo_library(place: object) -> ModuleType:
    """rasterio, which reads georeferences; shapely comes with it. place: what needs it.

    ConfigError: one of them is not installed.
    """
    try:
        import rasterio
        import rasterio.features
        import rasterio.warp
        import shapely  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{printable(place)}: its place on the map is read by rasterio and shapely, which are "
            f"not installed; {install_line('geo')}"
        ) from None
    # A TIFF that is to get a georeference has none when it is opened.
    warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
    return rasterio


def is_on_map(path: str | Path, info: Info) -> bool:
    """Whether a file with this header has a georeference: tags, or a file beside it."""
    # As text: a folder may have 100,000 files, and ten names are asked for beside each.
    stem, suffix = os.path.splitext(path)
    suffix = suffix.lower()
    if info.geo_tags or suffix not in _DRIVERS:
        return info.geo_tags
    ends = f"{suffix[:2]}{suffix[-1]}w", f"{suffix}w", ".wld", ".tab"  # .tfw, .tifw; of MapInfo
    if any(os.path.exists(stem + x) for end in ends for x in (end, end.upper())):
        return True
    try:
        content = read_bytes(f"{path}.aux.xml")
    except OSError:
        return False
    return any(word in content for word in _PLACE_IN_AUX)


@contextmanager
def opened_raster(path: Path) -> Iterator[Any]:
    """A file as rasterio's dataset; DataError: it is damaged, or not of the format of its suffix.

    GDAL would also open what has other files, or addresses, opened by its content, such as a VRT.
    """
    rasterio, driver = geo_library(path), _DRIVERS.get(path.suffix.lower(), "GTiff")
    file = os.path.abspath(path)  # or rasterio takes a first folder such as `s3:` for an address
    with damage_named(path, "raster"), rasterio.open(file, driver=driver) as raster:
        yield raster


def place_of(path: Path, info: Info) -> MapPlace | None:
    """The place of a file with this header; None: it has none, or control points alone.

    Raises:
        ConfigError: it has a georeference, and rasterio is not installed.
        DataError: the file is damaged.
    """
    if not is_on_map(path, info):
        return None
    with opened_raster(path) as raster:
        # rasterio gives the identity for a file that states no transform.
        has_place = not raster.transform.is_identity
        return MapPlace(tuple(raster.transform)[:6], raster.crs) if has_place else None


def copy_place(source: Path, target: Path) -> None:
    """Gives the TIFF at `target` the georeference of the image at `source`, which has one."""
    rasterio = geo_library(source)
    with opened_raster(source) as given:
        (points, their_crs), crs, transform = given.gcps, given.crs, given.transform
    with rasterio.open(os.path.abspath(target), "r+", driver="GTiff") as written:
        if points:
            written.gcps = points, their_crs or rasterio.CRS()
        if crs is not None:
            written.crs = crs
        if not transform.is_identity:
            written.transform = transform


def other_place(image: MapPlace | None, label: MapPlace | None) -> str:
    """How a label lies elsewhere than its image, in words; empty: it does not, or nothing is known.

    >>> image = MapPlace((2.0, 0.0, 500.0, 0.0, -2.0, 80.0))
    >>> other_place(image, MapPlace((2.0, 0.0, 516.0, 0.0, -2.0, 80.0)))
    '8 pixels to the right and 0 down'
    """
    if image is None or label is None:
        return ""
    ours, theirs = (map_place.crs and map_place.crs.to_epsg() for map_place in (image, label))
    if ours and theirs and ours != theirs:
        return f"coordinate system EPSG:{theirs} instead of EPSG:{ours}"
    to_map, other = (np.array(map_place.to_map).reshape(2, 3) for map_place in (image, label))
    steps = to_map[:, :2]
    if (np.abs(other[:, :2] - steps) > _SAME_SCALE * np.abs(steps).max()).any():
        return "pixels of another size or direction"
    # Pixels without an area are no unit for an offset.
    if np.linalg.det(steps) == 0:
        return ""
    offset = np.linalg.solve(steps, other[:, 2] - to_map[:, 2])
    if np.abs(offset).max() <= _NEAR_PX:
        return ""
    right, down = offset.round(2) + 0.0  # no -0
    return f"{right:g} pixels to the right and {down:g} down"


def unit_m(place: MapPlace, size: tuple[int, int]) -> tuple[float, str]:
    """How many metres on the ground a unit of the map is, or 0 and why that is not one number.

    size: (height, width) of the image, at whose corners and middle squares are measured.
    """
    crs = place.crs
    if crs is None or not crs.is_projected:
        is_geographic = crs is not None and crs.is_geographic
        return 0.0, "its coordinates are degrees" if is_geographic else "it names no projection"
    metres = crs.linear_units_factor[1]
    (height, width), to_map = size, np.array(place.to_map).reshape(2, 3)
    ends = [(0, 0), (width, 0), (0, height), (width, height), (width / 2, height / 2)]
    starts = np.array(ends) @ to_map[:, :2].T + to_map[:, 2]
    # A square at each place goes to a projection of equal areas, whose area shows how true the map
    # is there.
    square = np.array([(0, 0), (1, 0), (1, 1), (0, 1)]) * _SQUARE_M / metres
    corners = (starts[:, None] + square).reshape(-1, 2)  # (5 * 4, 2)
    try:
        with damage_named("areas", "projection"):
            projected = geo_library("areas").warp.transform(crs, EQUAL_AREA, *corners.T)
    except DataError:
        return 0.0, "its projection has no areas on Earth"
    x, y = np.array(projected).reshape(2, -1, 4)
    with np.errstate(invalid="ignore"):  # infinite where the projection does not hold
        ground = np.abs((x * np.roll(y, -1, 1) - np.roll(x, -1, 1) * y).sum(1)) / 2
    times = ground / _SQUARE_M**2
    worst = times[np.argmax(np.abs(times - 1))]
    # Written this way round, NaN is too far off as well.
    if not abs(worst - 1) <= MOST_OFF:
        return 0.0, f"areas on Earth are {worst:.3g} times those of its projection there"
    return metres, ""
