"""LabelMe's JSON, a file for each image: polygons, masks, rectangles and circles."""

import base64
import io
import math
from pathlib import Path

import numpy as np

from segtrain.data.read.decode import opened
from segtrain.desk.annotations.regions import (
    Annotated,
    Findings,
    Region,
    ellipse,
    image_size,
    read_text,
    rectangle,
)
from segtrain.files import parse_json


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
            elif kind == "rectangle":
                regions.append(Region.of_outlines(shape["label"], rectangle(*shape["points"])))
            elif kind == "circle":
                center, edge = shape["points"]
                radius = math.dist(center, edge)
                outline = ellipse(center, (radius, radius))
                regions.append(Region.of_outlines(shape["label"], outline))
            else:
                findings.no_region(kind, place)
    return [], [Annotated(path, file["imagePath"], size, regions)]
