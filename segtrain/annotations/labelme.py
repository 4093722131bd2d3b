"""LabelMe's JSON, a file for each image: polygons and masks."""

import base64
import binascii
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from segtrain.annotations.regions import (
    Annotated,
    Findings,
    Finite,
    Region,
    Side,
    pack_mask,
    polygon,
    read_json,
)
from segtrain.data.read.decode import opened
from segtrain.errors import DataError


@dataclass(frozen=True, slots=True)
class _Shape:
    label: str
    points: list[tuple[Finite, Finite]]
    shape_type: str = "polygon"
    mask: str | None = None


@dataclass(frozen=True, slots=True)
class _File:
    shapes: list[_Shape]
    imagePath: str  # noqa: N815 - LabelMe's names
    imageHeight: Side | None = None  # noqa: N815
    imageWidth: Side | None = None  # noqa: N815


_FORM = TypeAdapter(_File)


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """No classes, which LabelMe does not declare, and the image of one file.

    Raises:
        DataError: it is no such file. What is wrong with single shapes goes to `findings`.
    """
    file = read_json(path, _FORM, "LabelMe")
    height, width, regions = file.imageHeight, file.imageWidth, []
    size = (height, width) if height and width else None  # old files do not say
    for i, shape in enumerate(file.shapes):
        place = f"{path}: shapes[{i}]"
        if shape.shape_type == "polygon":
            regions.append(Region(shape.label, (polygon(shape.points),)))
        elif shape.shape_type == "mask" and shape.mask and shape.points and size:
            left, top = (round(x) for x in shape.points[0])
            try:
                mask = pack_mask(_decoded(shape.mask, place), size, top, left)
                regions.append(Region(shape.label, mask=mask))
            except (ValueError, DataError) as error:
                findings.refuse(place, f"damaged mask: {error}")
        else:
            findings.no_region(shape.shape_type, place)
    return [], [Annotated(path, file.imagePath, size, regions)]


def _decoded(text: str, place: str) -> np.ndarray:
    """The mask (h, w) of a PNG in base64."""
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError("no base64") from None
    with opened(io.BytesIO(data), place, ("PNG",)) as image:
        return np.array(image.convert("L"))
