"""LabelMe's JSON, a file for each image: polygons, masks, rectangles and circles."""

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from segtrain.annotations.regions import Annotated, Findings, Region, image_size, read_text
from segtrain.data.read.decode import opened
from segtrain.files import parse_json


def _rectangle(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """The corners, of two that lie across from each other."""
    (left, top), (right, bottom) = points
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _circle(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """An outline that is off by a thousandth of the radius; of the center and a point on it."""
    (x, y), (edge_x, edge_y) = points
    radius = math.hypot(edge_x - x, edge_y - y)
    angles = np.linspace(0, 2 * math.pi, _CORNERS, endpoint=False)
    return [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles]


_CORNERS = 72
_OUTLINES = {"rectangle": _rectangle, "circle": _circle}


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """No classes, which LabelMe does not declare, and the image of one file."""
    file, regions = parse_json(read_text(path)), []
    size = image_size(file, "imageHeight", "imageWidth")
    for i, shape in enumerate(file["shapes"]):
        with findings.refusing(place := f"{path}: shapes[{i}]"):
            kind = shape.get("shape_type", "polygon")
            if kind == "polygon":
                regions.append(Region.of_outlines(shape["label"], shape["points"]))
            elif kind == "mask":
                left, top = (round(x) for x in shape["points"][0])
                png = io.BytesIO(base64.b64decode(shape["mask"]))
                with opened(png, "its mask", ("PNG",)) as image:
                    mask = np.array(image.convert("L"))
                regions.append(Region.of_mask(shape["label"], mask, size, top, left))
            elif kind in _OUTLINES:
                regions.append(Region.of_outlines(shape["label"], _OUTLINES[kind](shape["points"])))
            else:
                findings.no_region(kind, place)
    return [], [Annotated(path, file["imagePath"], size, regions)]
