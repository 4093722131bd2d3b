"""QuPath's GeoJSON, a file for each image, called as the image: polygons with holes, in pixels.

x goes to the right and y down from the corner of the first pixel. Up to version 0.2 the file is a
list of features. Keys are those of QuPath's `QuPathTypeAdapters` and `ROITypeAdapters`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from segtrain.data.read.find import IMAGE_SUFFIXES, visible_files
from segtrain.data.read.georeference import place_of
from segtrain.data.read.image_formats import read_info
from segtrain.desk.annotations.regions import Annotated, Findings, Region, read_text
from segtrain.errors import DataError
from segtrain.files import parse_json

# Its classification has a name and a colour; a map may have a text of this key.
_KEYS = re.compile(rb'"(crs|objectType)"\s*:|"(classification)"\s*:\s*\{')


def are_in_pixels(files: Sequence[Path], folder: Path) -> bool:
    """Whether these GeoJSON files are QuPath's, and images of their names, else all, on no map."""
    found = {x[x.lastindex] for file in files for x in _KEYS.finditer(read_text(file))}
    if not found or b"crs" in found:
        return False
    images = [folder / x for x in visible_files(folder) if x.lower().endswith(IMAGE_SUFFIXES)]
    names = {file.stem for file in files}
    named = [image for image in images if {image.name, image.stem} & names]
    for image in named or images:
        with suppress(DataError):  # it is named when it is read as an image
            if place_of(image, read_info(image)) is not None:
                return False
    return True


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """No classes, which the file does not declare, and the image of its name."""
    regions = []
    for place, feature in _with_children(features_of(parse_json(read_text(path))), str(path)):
        with findings.refusing(place):
            regions += _regions(feature, place, findings)
    return [], [Annotated(path, path.stem, None, regions, place=str(path))]


def features_of(found: Any) -> list[dict[str, Any]]:
    """The features of a file: a collection, a single one, or a list as QuPath 0.2 has it."""
    if isinstance(found, list):
        return found
    return found["features"] if found["type"] == "FeatureCollection" else [found]


def class_of(found: Any) -> str | None:
    """The class that a property says: a text, a number, or QuPath's `{"name": ...}`; None: none."""
    if isinstance(found, dict):
        # Of a derived class, as Tumor: Positive, all `names`, or up to 0.3 the class above it.
        names = found.get("names") or [class_of(found.get("parentClass")), found.get("name")]
        return ": ".join(filter(None, names)) or None
    return str(found) if isinstance(found, str | int) else None


def _with_children(features: Iterable[Any], place: str) -> Iterator[tuple[str, Any]]:
    """Each feature and those below it in the hierarchy, and where it stands."""
    for i, feature in enumerate(features):
        yield (here := f"{place}: feature {i}"), feature
        children = (feature.get("properties") or {}).get("childObjects", ())
        yield from _with_children(children, f"{here}: childObjects")


def _regions(feature: dict[str, Any], place: str, findings: Findings) -> list[Region]:
    """A region for each polygon: one may lie in a hole of another."""
    geometry = feature["geometry"]
    kind, name = geometry["type"], class_of((feature.get("properties") or {}).get("classification"))
    if kind not in ("Polygon", "MultiPolygon"):
        findings.no_region(kind.lower().removeprefix("multi"), place)
        return []
    if name is None:
        raise ValueError("no class (classification.name): set one in QuPath, or delete it there")
    if any(geometry.get("plane", {}).get(axis) for axis in "zt"):
        raise ValueError("lies in another plane than the first; only single images are read")
    found = geometry["coordinates"] if kind == "MultiPolygon" else [geometry["coordinates"]]
    outlines = (Region.of_outlines(name, *rings).polygons for rings in found)
    return [Region(name, x[:1], holes=x[1:], place=place) for x in outlines]
