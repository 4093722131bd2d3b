"""Label rasters to outlines on the map: a GeoJSON FeatureCollection by class (RFC 7946)."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from segtrain.annotations.geojson import moved
from segtrain.annotations.reading import BACKGROUND
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.georeference import (
    DEGREES,
    EQUAL_AREA,
    MOST_OFF,
    geo_library,
    opened_raster,
)
from segtrain.errors import DataError, ExecutionError
from segtrain.files import os_errors_as, temporary
from segtrain.text import printable

# A degree of latitude on average, and of longitude at the equator.
_LATITUDE_M, _LONGITUDE_M = 111_132.0, 111_320.0


def write_polygons(
    labels: Sequence[Path], classes: ClassFile, output: Path, *, simplify_m: float = 0.0
) -> dict[str, tuple[int, float]]:
    """Writes the areas of all classes but the background in these label rasters, atomically.

    Pixels that touch by an edge are one area. Coordinates are longitude and latitude. simplify_m:
    how far an outline may move, in metres; 0: it follows the pixels. Neighbours are simplified one
    by one, so that gaps between them may open. Areas are those of the map, or, where these are off
    by more than 1 %, as in Mercator, those on the ground. Returns number and area (m²) by class.

    Raises:
        DataError: a raster has no georeference, or a value that no class has.
        ExecutionError: `output` cannot be written.
    """
    number, area_m2 = Counter(), Counter()
    with os_errors_as(ExecutionError, output, "cannot be written"), temporary(output) as draft:
        with draft.open("w", encoding="utf-8") as file:
            file.write('{"type": "FeatureCollection", "features": [')
            for path in labels:
                for feature in _features(path, classes, simplify_m):
                    name = feature["properties"]["class"]
                    file.write(",\n" if number else "\n")
                    file.write(json.dumps(feature, ensure_ascii=False))
                    number[name] += 1
                    area_m2[name] += feature["properties"]["area_m2"]
            file.write("\n]}\n")
        draft.replace(output)
    return {name: (number[name], area_m2[name]) for name in number}


def _features(path: Path, classes: ClassFile, simplify_m: float) -> Iterator[dict[str, Any]]:
    import shapely

    rasterio = geo_library(path)
    names = {raw: classes.names[i] for i, raw in enumerate(classes.write_ids)}
    with opened_raster(path) as raster:
        if raster.crs is None or raster.transform.is_identity:
            raise DataError(f"{printable(path)}: no georeference; predict GeoTIFFs, or name those")
        center = raster.crs.is_geographic and (raster.bounds.bottom + raster.bounds.top) / 2
        metres = _metres(raster.crs, center)  # (x, y) of a unit
        band = rasterio.band(raster, 1)
        shapes = rasterio.features.shapes(band, transform=raster.transform, connectivity=4)
        for geometry, value in shapes:
            if value == raster.nodata:
                continue
            name = names.get(int(value))
            if name is None:
                what = f"value {value:g}, which no class has; is --classes of these labels?"
                raise DataError(f"{printable(path)}: {what}")
            if name.casefold().strip("_") == BACKGROUND:
                continue
            area = shapely.transform(shapely.geometry.shape(geometry), lambda xy: xy * metres)
            area = shapely.simplify(area, simplify_m) if simplify_m else area
            on_map = shapely.transform(area, lambda xy: xy / metres)
            there = shapely.orient_polygons(moved(on_map, raster.crs, DEGREES))
            ground_m2 = moved(on_map, raster.crs, EQUAL_AREA).area
            is_off = abs(area.area - ground_m2) > MOST_OFF * ground_m2
            area_m2 = ground_m2 if is_off else area.area
            yield {
                "type": "Feature",
                "properties": {"class": name, "area_m2": round(area_m2, 3)},
                "geometry": shapely.geometry.mapping(there),
            }


def _metres(crs: Any, latitude: float) -> np.ndarray:
    """How many metres a unit of the system is in x and y; of degrees at this latitude."""
    if crs.is_geographic:
        return np.array([_LONGITUDE_M * np.cos(np.radians(latitude)), _LATITUDE_M])
    return np.full(2, crs.linear_units_factor[1])
