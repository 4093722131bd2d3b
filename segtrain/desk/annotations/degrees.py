"""Outlines in degrees, cut at the antimeridian as RFC 7946, 3.1.9, has it, and closed at a pole."""

from typing import Any

import numpy as np

from segtrain.data.read.georeference import DEGREES, geo_library
from segtrain.errors import DataError
from segtrain.text import printable

# A straight edge becomes a curve in another projection: by some centimetres where it is cut so, and
# near a pole, where longitudes turn, by less.
EDGE_M, _EDGE_TURN_DEGREES, _LEAST_M = 1000.0, 0.25, 1e-3
_QUARTER, _GRID_DEGREES = 90.0, 1e-9


def in_degrees(shape: Any, crs: Any, place: object) -> Any:
    """A shapely polygon of a coordinate system in longitude and latitude, a MultiPolygon if cut.

    place: for errors.

    Raises:
        DataError: the system does not hold there.
    """
    import shapely

    rings = [shapely.Polygon(shape.exterior), *map(shapely.Polygon, shape.interiors)]
    outer, *holes = (_unrolled(shapely.orient_polygons(ring), crs, place) for ring in rings)
    # Each ring is unrolled by itself: a hole may lie a whole turn beside its outline.
    turns = [shapely.affinity.translate(hole, x) for hole in holes for x in (-360, 0, 360)]
    unrolled = shapely.difference(outer, shapely.union_all(turns)) if holes else outer
    left, _, right, _ = unrolled.bounds
    parts = []
    for turn in range(int((left + 180) // 360), int((right + 180) // 360) + 1):
        around = shapely.box(-180 + 360 * turn, -90, 180 + 360 * turn, 90)
        inside = shapely.get_parts(shapely.intersection(unrolled, around))
        parts += [shapely.affinity.translate(part, -360 * turn) for part in inside if part.area]
    # Of a ring around a pole the ends meet but for rounding.
    whole = parts[0] if len(parts) == 1 else shapely.union_all(parts, grid_size=_GRID_DEGREES)
    return shapely.orient_polygons(whole)


def _unrolled(ring: Any, crs: Any, place: object) -> Any:
    """A polygon without holes in degrees; its longitudes go on beyond 180."""
    import shapely

    points = shapely.get_coordinates(ring)
    unit = 1.0 if crs.is_geographic else crs.linear_units_factor[1]
    while True:
        lon, lat = map(np.array, geo_library(place).warp.transform(crs, DEGREES, *points.T))
        if not (np.isfinite(lon) & np.isfinite(lat)).all():
            raise DataError(f"{printable(place)}: reaches out of what its projection maps")
        # The shorter way round, which is right for short edges.
        turn = (np.diff(lon) + 180) % 360 - 180
        length = np.hypot(*np.diff(points, axis=0).T) * unit
        if crs.is_geographic:
            long = length > _QUARTER
        else:
            long = (length > EDGE_M) | ((np.abs(turn) > _EDGE_TURN_DEGREES) & (length > _LEAST_M))
        if not long.any():
            break
        # Halved until all are short: a straight edge there is a curve in degrees.
        middles = (points[:-1] + points[1:])[long] / 2
        points = np.insert(points, np.flatnonzero(long) + 1, middles, axis=0)
    lon = lon[0] + np.concatenate([[0.0], turn.cumsum()])
    way = np.stack([lon, lat], axis=1)
    if round((lon[-1] - lon[0]) / 360):  # counter-clockwise, it has the pole to its left
        pole = np.copysign(90.0, lon[-1] - lon[0])
        way = np.concatenate([way, [(lon[-1], pole), (lon[0], pole)]])
    return shapely.make_valid(shapely.Polygon(way), method="structure", keep_collapsed=False)
