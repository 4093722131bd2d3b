"""Label maps to outlines on the map: a GeoJSON FeatureCollection by class (RFC 7946)."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from segtrain.data.read.classes import ClassFile
from segtrain.data.read.find import LABEL_SUFFIXES, files_by_name, one_name
from segtrain.data.read.georeference import (
    DEGREES,
    EQUAL_AREA,
    MOST_OFF,
    geo_library,
    is_on_map,
    opened_raster,
)
from segtrain.data.read.image import shows
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.label_formats import label_format_of
from segtrain.data.read.raster import raster_size, windows
from segtrain.data.read.raw_label import marked_value
from segtrain.desk.annotations.degrees import in_degrees, moved
from segtrain.desk.annotations.reading import BACKGROUND
from segtrain.errors import DataError, ExecutionError
from segtrain.files import os_errors_as, temporary
from segtrain.text import printable
from segtrain.types import IGNORE_INDEX

# A degree of latitude on average, and of longitude at the equator.
_LATITUDE_M, _LONGITUDE_M = 111_132.0, 111_320.0
_UNPLACED = "no georeference; predict images that have one, or name label maps that have"


def find_label_maps(inputs: Sequence[Path]) -> list[Path]:
    """The files among `inputs`, and those below its folders that may be label maps, once each.

    Of several files of one name, as `predict` writes PNG and TIFF, the one that lies on the map.

    Raises:
        DataError: a folder has none, or several of one name lie on the map.
    """
    maps: list[Path] = []
    for given in inputs:
        if not given.is_dir():
            maps.append(given)
            continue
        named = files_by_name(given, LABEL_SUFFIXES)
        if not named:
            raise DataError(f"{printable(given)}: no label maps *{'|'.join(LABEL_SUFFIXES)}")
        for files in named.values():
            placed = [file for file in files if is_on_map(file, read_info(file))]
            if problem := one_name(placed):
                raise DataError(problem)
            # Where none lies on the map, `write_polygons` refuses the first.
            maps += placed or files[:1]
    # A file with two names, as by a link, would be written twice.
    return [*{os.path.realpath(file): file for file in maps}.values()]


def write_polygons(
    labels: Sequence[Path],
    classes: ClassFile,
    output: Path,
    *,
    label_format: str | None = None,
    simplify_m: float = 0.0,
) -> dict[str, tuple[int, float]]:
    """Writes the areas of all classes but the background in these label maps, atomically.

    Pixels that touch by an edge are one area. Coordinates are longitude and latitude. What the
    class file ignores, and what a file marks as no data, has no outline.

    label_format: as data.label_format; None: ids, and files of several bands are asked about.
    simplify_m: how far an outline may move on the ground, in metres; 0: it follows the pixels.
        Neighbours are simplified one by one, so that gaps between them may open.

    Areas are those on the ground, or of a projection whose areas are off by less than 1 %, as UTM's
    are, those of the map. Returns number and area (m²) by class.

    Raises:
        DataError: a file has no georeference, or is no label map of these classes.
        ExecutionError: `output` cannot be written.
    """
    number, area_m2 = Counter(), Counter()
    with os_errors_as(ExecutionError, output, "cannot be written"), temporary(output) as draft:
        with draft.open("w", encoding="utf-8") as file:
            file.write('{"type": "FeatureCollection", "features": [')
            # Feature by feature: no more than one outline is in memory.
            for path in labels:
                for feature in _features(path, classes, label_format, simplify_m):
                    name = feature["properties"]["class"]
                    file.write(",\n" if number else "\n")
                    file.write(json.dumps(feature, ensure_ascii=False))
                    number[name] += 1
                    area_m2[name] += feature["properties"]["area_m2"]
            file.write("\n]}\n")
        draft.replace(output)
    return {name: (number[name], area_m2[name]) for name in number}


def _features(
    path: Path, classes: ClassFile, label_format: str | None, simplify_m: float
) -> Iterator[dict[str, Any]]:
    import shapely

    rasterio = geo_library(path)
    is_placed = is_on_map(path, read_info(path))
    if is_placed:
        with opened_raster(path) as raster:
            crs, transform = raster.crs, raster.transform
    if not is_placed or transform.is_identity:
        raise DataError(f"{printable(path)}: {_UNPLACED}")
    if crs is None or not (crs.is_geographic or crs.is_projected):
        lacks = "its georeference has no coordinate system of the Earth"
        raise DataError(f"{printable(path)}: {lacks}; gdal_edit.py -a_srs adds it")
    label = _read_label(path, classes, label_format)
    named = dict(enumerate(classes.names))
    shown = [i for i, name in named.items() if name.casefold().strip("_") != BACKGROUND]
    # Classes that overlap have a band each, and are gone through one by one.
    for ids in [label] if label.ndim == 2 else (_ids_of(label, i) for i in shown):
        options = {"mask": np.isin(ids, shown), "connectivity": 4, "transform": transform}
        for geometry, train_id in rasterio.features.shapes(ids, **options):
            on_map = shapely.geometry.shape(geometry)
            if simplify_m:
                # In metres, since a degree of longitude is shorter than one of latitude.
                metres = _metres(on_map, crs)
                on_ground = shapely.transform(on_map, lambda xy, by=metres: xy * by)
                on_ground = shapely.simplify(on_ground, simplify_m)
                on_map = shapely.transform(on_ground, lambda xy, by=metres: xy / by)
            there = in_degrees(on_map, crs, path)
            area_m2 = _area_m2(on_map, there, crs)
            yield {
                "type": "Feature",
                "properties": {
                    "class": named[int(train_id)],
                    "area_m2": round(area_m2, 3),
                    "raster": printable(path),
                },
                "geometry": shapely.geometry.mapping(there),
            }


def _read_label(path: Path, classes: ClassFile, label_format: str | None) -> np.ndarray:
    """The label of a raster of any size; pixels without data are ignored."""
    info = read_info(path)
    if label_format is None and info.channels - info.alpha > 1:
        raise DataError(
            f"{printable(path)}: {info.channels} channels; --label-format bands, colors or ids "
            "says what they mean"
        )
    labels = label_format_of(label_format or "ids")
    labels, classes = labels.ignoring(marked_value(info.no_data), classes)
    size = raster_size(path)
    if size is None:
        return labels.read(path, classes)
    label = labels.ignored(size, classes)
    for window in windows(size):
        rows = slice(window.top, window.top + window.height)
        columns = slice(window.left, window.left + window.width)
        label[rows, columns] = labels.read(path, classes, window)
    return label


def _ids_of(label: np.ndarray, train_id: int) -> np.ndarray:
    """`train_id` where a label of overlapping classes shows it, else IGNORE_INDEX."""
    return np.where(shows(label, train_id), np.uint8(train_id), np.uint8(IGNORE_INDEX))


def _area_m2(on_map: Any, there: Any, crs: Any) -> float:
    """The area of an outline, in units of its coordinate system and in degrees."""
    ground_m2 = moved(there, DEGREES, EQUAL_AREA).area
    if crs.is_geographic:
        return ground_m2
    map_m2 = on_map.area * crs.linear_units_factor[1] ** 2
    return map_m2 if abs(map_m2 - ground_m2) <= MOST_OFF * ground_m2 else ground_m2


def _metres(on_map: Any, crs: Any) -> np.ndarray:
    """How many metres on the ground a unit of the system is in x and y, amid an outline."""
    x, y = on_map.centroid.coords[0]
    # A small step in x and one in y, measured on the ground.
    step = 1e-5 if crs.is_geographic else 1.0
    there = geo_library("outlines").warp.transform(crs, DEGREES, [x, x + step, x], [y, y, y + step])
    (lon, *lons), (lat, *lats) = there
    right = (np.subtract(lons, lon) + 180) % 360 - 180
    east_m = right * _LONGITUDE_M * np.cos(np.radians(np.add(lats, lat) / 2))
    return np.hypot(east_m, np.subtract(lats, lat) * _LATITUDE_M) / step
