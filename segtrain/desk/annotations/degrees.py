"""Outlines in degrees, cut at the antimeridian as RFC 7946, 3.1.9, has it, and closed at a pole."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from segtrain.data.read.decode import damage_named
from segtrain.data.read.georeference import DEGREES, geo_library
from segtrain.errors import DataError
from segtrain.text import printable

TWO_WAYS = (
    "an edge of more than 180 degrees of longitude: an outline that crosses the antimeridian is to "
    "be cut there (RFC 7946), or to go on beyond 180; a wider one needs points in between"
)
# A straight edge becomes a curve in another projection: by some centimetres where it is cut so, and
# near a pole, where longitudes turn, by less.
_EDGE_M, _EDGE_DEGREES, _EDGE_TURN_DEGREES, _LEAST_M = 1000.0, 0.01, 0.25, 1e-3
_QUARTER, _GRID_DEGREES = 90.0, 1e-9


def moved(shape: Any, system: Any, other: Any) -> Any:
    """A shapely geometry in another system, its edges as in the first; DataError: not mapped."""
    import shapely

    rasterio = geo_library("outlines")
    source, target = (rasterio.crs.CRS.from_user_input(given) for given in (system, other))
    if source == target:
        return shape
    edge = _EDGE_DEGREES if source.is_geographic else _EDGE_M / source.linear_units_factor[1]
    # With more points first, since an edge that is straight here is a curve there.
    parts = shapely.segmentize(shape, edge)
    with damage_named(f"coordinates of {system}", "outline"):
        return shapely.geometry.shape(rasterio.warp.transform_geom(source, target, parts))


def have_two_ways(polygons: Iterable[Sequence[np.ndarray]], *, is_moved: bool) -> bool:
    """Whether an edge in degrees goes more than half round the Earth, as where tools write -179 and
    179 side by side. The whole way round, -180 to 180, is a mistake only where is_moved: after a
    move from another system, which also cuts edges short that were drawn so.
    """
    rings = (ring[:, 0] for ring in chain.from_iterable(polygons))
    edges = (np.abs(np.diff(lon)) for lon in rings if np.abs(lon).max() <= 360)  # else no degrees
    return any(((x > 180) & ((x < 360) | is_moved)).any() for x in edges)


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
            long = (length > _EDGE_M) | ((np.abs(turn) > _EDGE_TURN_DEGREES) & (length > _LEAST_M))
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
