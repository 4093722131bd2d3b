"""JSON of VGG Image Annotator (VIA) 1 and 2: polygons, rectangles, circles and ellipses.

VIA has no classes but attributes of regions, any of which may name the class.
"""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from segtrain.desk.annotations.regions import (
    Annotated,
    Findings,
    Region,
    ellipse,
    entries,
    read_text,
    rectangle,
)
from segtrain.errors import ConfigError
from segtrain.files import parse_json
from segtrain.text import first_of, printable

_ONLY_CLASS = "object"


def read(
    path: Path, findings: Findings, *, attribute: str | None = None
) -> tuple[list[str], list[Annotated]]:
    """The values that the file lists for the attribute of the class, and its images.

    attribute: names the class; None: the only one that holds anything.

    Raises:
        ConfigError: several hold something, and none was chosen.
    """
    file = parse_json(read_text(path))
    metadata = file.get("_via_img_metadata", file)  # of a project, or exported alone
    regions = [region for image in metadata.values() for _, region in entries(image["regions"])]
    attribute = attribute or _only_attribute(path, regions)
    if regions and attribute is None:
        findings.note(path, f"no attribute names a class, so all regions are {_ONLY_CLASS!r}")
    images = []
    for image in metadata.values():
        drawn = []
        for i, region in entries(image["regions"]):
            with findings.refusing(place := f"{path}: {image['filename']}: regions[{i}]"):
                outline = _outline(region["shape_attributes"])
                if outline is None:
                    findings.no_region(region["shape_attributes"]["name"], place)
                else:
                    drawn.append(Region.of_outlines(_class_of(region, attribute), outline))
        images.append(Annotated(path, image["filename"], None, drawn))
    # Only a project declares its attributes; the options of one are classes, in its order.
    known = file.get("_via_attributes", {}).get("region", {}).get(attribute, {})
    return list(known.get("options", ())), images


def _only_attribute(path: Path, regions: Iterable[Mapping[str, Any]]) -> str | None:
    """The attribute that holds anything; None: none does."""
    attributes = (region.get("region_attributes", {}).items() for region in regions)
    held = sorted({name for items in attributes for name, value in items if value})
    if len(held) > 1:
        ways = first_of((f"--attribute {shlex.quote(name)}" for name in held), separator=" or ")
        raise ConfigError(f"{printable(path)}: several attributes may name the class: {ways}")
    return held[0] if held else None


def _class_of(region: Mapping[str, Any], attribute: str | None) -> str:
    """What the attribute says: a text, or the one box that is checked."""
    if attribute is None:
        return _ONLY_CLASS
    value = region["region_attributes"].get(attribute)
    if isinstance(value, dict):
        checked = [name for name, is_checked in value.items() if is_checked]
        value = checked[0] if len(checked) == 1 else None
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"its attribute {attribute!r} does not name one class")
    return value


def _outline(shape: Mapping[str, Any]) -> np.ndarray | None:
    """(P, 2), x and y; None: a shape of another kind."""
    match shape["name"]:
        case "polygon":
            points = zip(shape["all_points_x"], shape["all_points_y"], strict=True)
            return np.array(list(points), np.float64)
        case "rect":
            x, y, width, height = (float(shape[key]) for key in ("x", "y", "width", "height"))
            return rectangle((x, y), (x + width, y + height))
        case "circle":
            x, y, radius = (float(shape[key]) for key in ("cx", "cy", "r"))
            return ellipse((x, y), (radius, radius))
        case "ellipse":
            x, y, *radii = (float(shape[key]) for key in ("cx", "cy", "rx", "ry"))
            return ellipse((x, y), (radii[0], radii[1]), float(shape.get("theta", 0)))
    return None
