"""GeoJSON: outlines on the map, and label maps of the rasters that lie there.

Coordinates are longitude and latitude (RFC 7946), or those of the member `crs` that older files
have. Outlines name no image: each raster with a georeference gets those that lie on it. A pixel is
inside an outline if its centre is, as `rasterio.features.rasterize` has it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from segtrain.data.read.find import IMAGE_SUFFIXES, visible_files
from segtrain.data.read.georeference import DEGREES, geo_library, opened_raster
from segtrain.desk.annotations.degrees import TWO_WAYS, have_two_ways, moved
from segtrain.desk.annotations.draw import Overlap
from segtrain.desk.annotations.qupath import class_of, features_of
from segtrain.desk.annotations.regions import IGNORED, Annotated, Findings, Region, read_text
from segtrain.errors import DataError
from segtrain.files import parse_json
from segtrain.text import first_of
from segtrain.types import IGNORE_INDEX

_CLASS_WORDS = ("class", "classname", "class_name", "label", "category", "classification")
_SYSTEMS = "EPSG:", "ESRI:", "OGC:", "urn:", "http://www.opengis.net/def/crs/"
_NONE = "none"
_NO_DEGREES = (
    "coordinates are no degrees, and no member crs says what they are; pixels are read of QuPath "
    "alone (classification.name), where images of the same names have no georeference"
)
_SWAPPED = (
    "outlines would lie on this image with x and y swapped; write longitude before latitude (RFC "
    "7946), or x before y of the system that crs names"
)
_MARGIN = 0.1
_STRIP_PX = 1 << 26


class _Raster(NamedTuple):
    """An image on the map.

    size: (height, width). system: of coordinates. to_map: (2, 3), from pixels (x, y) to these.
    around: a box in degrees that is a little larger.
    """

    size: tuple[int, int]
    system: Any
    to_map: np.ndarray
    around: Any


def read(
    path: Path, findings: Findings, *, attribute: str | None = None, swapped: bool = False
) -> tuple[list[str], list[Annotated]]:
    """As `AnnotationFormat.read`: no classes, and one Annotated with all regions of the file.

    attribute: the property that names the class; None: the only one that may. swapped: y is first.
    """
    geo_library(path)
    import shapely

    content = parse_json(read_text(path))
    features = features_of(content)
    names = _class_names(path, [entry.get("properties") or {} for entry in features], attribute)
    system = _system(content)
    is_geographic = geo_library(path).crs.CRS.from_user_input(system).is_geographic
    regions = []
    for i, (feature, name) in enumerate(zip(features, names, strict=True)):
        place, geometry = f"{path}: feature {i}", feature["geometry"]
        if geometry is None:
            findings.note(place, "no geometry: left out")
            continue
        if name is None:
            findings.refuse(place, "its class is missing")
            continue
        try:
            shape = shapely.force_2d(shapely.geometry.shape(geometry))
            shape = shapely.transform(shape, lambda xy: xy[:, ::-1]) if swapped else shape
        except shapely.errors.ShapelyError as error:
            findings.refuse(place, error)
            continue
        # Edges as they stand in the file: what follows may cut a long one into short ones.
        drawn = list(_polygons(shape)) if is_geographic else []
        if not shape.is_valid:
            findings.note(place, "an outline crosses itself: inside is what it goes round once")
            shape = shapely.make_valid(shape)
        polygons = list(_polygons(moved(shape, system, DEGREES)))
        if have_two_ways(drawn or polygons, is_moved=not is_geographic):
            findings.refuse(place, TWO_WAYS)
            continue
        if not polygons:
            findings.note(place, f"{geometry['type']}: left out, because it has no area")
        for outer, *holes in polygons:
            regions.append(Region(name, (outer,), holes=tuple(holes), place=place))
    return [], [Annotated(path, path.name, None, regions)]


def _are_degrees(regions: Sequence[Region]) -> bool:
    return all((np.abs(region.polygons[0]) <= (360, 90)).all() for region in regions)


def _class_names(
    path: Path, properties: Sequence[dict[str, Any]], attribute: str | None
) -> list[str | None]:
    """The class of each feature; None: it has none. Without properties it is the file's name.

    ValueError: several properties may name the class.
    """
    seen: dict[str, list[str]] = {}
    for key, value in chain.from_iterable(of_feature.items() for of_feature in properties):
        if (said := class_of(value)) is not None:
            seen.setdefault(key, []).append(said)
    called = [key for key in seen if key.casefold() in _CLASS_WORDS]
    key = attribute or (called[0] if len(called) == 1 else None)
    # A property whose values repeat is a class; one that differs everywhere may be an id.
    if key is None and len(seen) == 1 and len(values := next(iter(seen.values()))) > len({*values}):
        (key,) = seen
    # --attribute none, where no property has that name; or no feature has any.
    if key == _NONE not in seen or not (seen or key):
        return [path.stem.partition(".")[0]] * len(properties)
    if key not in seen:
        ways = "; ".join(f"{key} ({first_of(dict.fromkeys(x), 3)})" for key, x in seen.items())
        wrong = f"no property {attribute}: " if attribute else ""
        raise ValueError(
            f"{wrong}which property names the class? {ways or 'there is none'}; choose by "
            f"--attribute, or --attribute {_NONE}: all are one class"
        )
    return [class_of(of_feature.get(key)) for of_feature in properties]


def _system(found: Any) -> str:
    """The coordinate system that the file says; ValueError: one that GDAL would fetch."""
    crs = found.get("crs") if isinstance(found, dict) else None
    name = str(crs["properties"]["name"]) if crs else DEGREES
    # GDAL would open a URL or a file that is named here: only codes are passed on.
    if not name.startswith(_SYSTEMS):
        raise ValueError(f"crs {name}: expected a code such as EPSG:32633")
    return name


def _polygons(shape: Any) -> Iterator[list[np.ndarray]]:
    """Outline and holes, each (P, 2), of each polygon in a shapely geometry."""
    if shape.geom_type == "Polygon" and not shape.is_empty:
        rings = (shape.exterior, *shape.interiors)
        yield [np.array(ring.coords, np.float64) for ring in rings]
    for part in getattr(shape, "geoms", ()):
        yield from _polygons(part)


def place_on_map(
    read: Sequence[Annotated], folder: Path, findings: Findings
) -> tuple[list[Annotated], int]:
    """The rasters below `folder` that regions lie on, with these in their pixels.

    Also returns how many other images there are. Findings: no raster, or no region lies on one.
    """
    import shapely

    strange = [file.source for file in read if not _are_degrees(file.regions)]
    regions = [region for file in read if file.source not in strange for region in file.regions]
    # A tree, since most outlines lie far from most rasters.
    tree = shapely.STRtree([shapely.Polygon(x.polygons[0], x.holes) for x in regions])
    files = [file for file in visible_files(folder) if file.lower().endswith(IMAGE_SUFFIXES)]
    rasters = {file: found for file in files if (found := _raster(folder / file)) is not None}
    placed, used = [], set()
    for file, raster in rasters.items():
        drawn = []
        for i, near in _nearby(tree, raster.around):
            shape = _in_pixels(moved(near, DEGREES, raster.system), raster.to_map)
            # `around` is larger than the raster: what lies beside it only is left out.
            if shape.intersection(shapely.box(0, 0, *raster.size[::-1])).area > 0:
                used.add(i)
                for outer, *holes in _polygons(shape):
                    drawn.append(regions[i]._replace(polygons=(outer,), holes=tuple(holes)))
        if drawn:
            placed.append(Annotated(Path(), file, raster.size, drawn, path=folder / file))
    # Of files that could not be read, that is the only cause.
    nowhere = not placed and not strange and (regions or not findings.problems)
    if (nowhere or strange) and (swapped := _swapped([x.source for x in read], rasters)):
        findings.refuse(folder / swapped, _SWAPPED)
    elif nowhere:
        found = f"{len(rasters)} of {len(files)} images have one"
        what = "no outline lies on an image with a georeference"
        findings.refuse(folder, f"{what} ({found}); --images names their folder")
    else:
        for source in strange:
            findings.refuse(source, _NO_DEGREES)
    for i, region in enumerate(regions):
        if i not in used:
            findings.note(region.place, "lies on no image: left out")
    return placed, len(files) - len(placed)


def _swapped(files: Iterable[Path], rasters: Mapping[str, _Raster]) -> str:
    """The first raster that outlines lie on once x and y are swapped; empty: none."""
    import shapely

    found: list[Region] = []
    for file in files:
        with suppress(DataError):  # the projection does not reach there
            regions = read(file, Findings(), attribute=_NONE, swapped=True)[1][0].regions
            found += regions if _are_degrees(regions) else ()
    tree = shapely.STRtree([shapely.Polygon(region.polygons[0]) for region in found])
    hits = (x for x in rasters if len(tree.query(rasters[x].around, predicate="intersects")))
    return next(hits, "")


def _nearby(tree: Any, around: Any) -> Iterator[tuple[int, Any]]:
    """Each geometry of the tree that meets this box in degrees: its index, and the part in there.

    Longitudes of the box may go on beyond 180. Far away a projection may wrap round the Earth.
    """
    import shapely

    turned = {turn: shapely.affinity.translate(around, -turn) for turn in (-360, 0, 360)}
    hits = {turn: tree.query(box, predicate="intersects") for turn, box in turned.items()}
    for i, turn in sorted((i, turn) for turn, all_ in hits.items() for i in all_.tolist()):
        near = shapely.intersection(tree.geometries[i], turned[turn])
        yield i, shapely.affinity.translate(near, turn)


def _in_pixels(shape: Any, to_map: np.ndarray) -> Any:
    import shapely

    inverse = np.linalg.inv(to_map[:, :2])
    return shapely.transform(shape, lambda points: (points - to_map[:, 2]) @ inverse.T)


def _raster(path: Path) -> _Raster | None:
    """None: the file does not say where it lies."""
    import shapely

    rasterio = geo_library(path)
    try:
        with opened_raster(path) as file:
            if file.crs is None or file.transform.is_identity:
                return None
            size, crs, transform = file.shape, file.crs, file.transform
    except DataError:  # it is named when it is read as an image
        return None
    bounds = rasterio.transform.array_bounds(*size, transform)
    left, bottom, right, top = rasterio.warp.transform_bounds(crs, DEGREES, *bounds)
    right += 360 * (left > right)  # it crosses the antimeridian
    margin = _MARGIN * max(right - left, top - bottom)
    left, right = left - margin, right + margin
    left, right = (left, right) if right - left < 360 else (-180, 180)
    box = shapely.box(left, bottom - margin, right, top + margin)
    return _Raster(size, crs, np.array(transform).reshape(3, 3)[:2], box)


def write_label(
    image: Annotated, path: Path, classes: Sequence[str], overlap: Overlap
) -> np.ndarray:
    """Draws the label of a raster as a TIFF with its georeference, strip by strip.

    255 is marked as no data. Returns how many pixels show each id, (256,) int64.
    """
    import shapely

    rasterio = geo_library(path)
    ids = {name: i for i, name in enumerate(classes)} | {IGNORED: IGNORE_INDEX}
    shapes = [(shapely.Polygon(x.polygons[0], x.holes), ids[x.name]) for x in image.regions]
    if overlap != "order":
        # The later covers the earlier: by area the smaller, or by class the later.
        shapes.sort(key=lambda pair: -pair[0].area if overlap == "area" else pair[1])
    assert image.size is not None  # place_on_map has filled it in
    height, width = image.size
    rows = max(1, _STRIP_PX // width)
    counts = np.zeros(256, np.int64)
    with opened_raster(image.path) as source:
        profile = {"crs": source.crs, "transform": source.transform, "nodata": IGNORE_INDEX}
    profile |= {"driver": "GTiff", "count": 1, "dtype": "uint8", "height": height, "width": width}
    profile |= {"compress": "deflate", "tiled": True, "BIGTIFF": "IF_SAFER"}
    path.parent.mkdir(parents=True, exist_ok=True)
    with rasterio.open(path, "w", **profile) as file:
        # A raster may be larger than the memory.
        for top in range(0, height, rows):
            size = (min(rows, height - top), width)
            strip = rasterio.features.rasterize(
                shapes, size, transform=rasterio.Affine.translation(0, top), dtype="uint8"
            )
            file.write(strip, 1, window=rasterio.windows.Window(0, top, width, size[0]))
            counts += np.bincount(strip.ravel(), minlength=256)
    return counts
