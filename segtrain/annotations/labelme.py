"""LabelMe's JSON, a file for each image: polygons and masks."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Base64Bytes, FiniteFloat, PositiveInt, TypeAdapter

from segtrain.annotations.regions import Annotated, Findings, Region, read_json
from segtrain.data.read.decode import opened
from segtrain.errors import DataError


@dataclass(slots=True)
class _Shape:
    label: str
    points: list[tuple[FiniteFloat, FiniteFloat]]
    shape_type: str = "polygon"
    mask: Base64Bytes | None = None


@dataclass(slots=True)
class _File:
    shapes: list[_Shape]
    imagePath: str  # noqa: N815 - LabelMe's names
    imageHeight: PositiveInt | None = None  # noqa: N815
    imageWidth: PositiveInt | None = None  # noqa: N815


_FORM = TypeAdapter(_File)


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """No classes, which LabelMe does not declare, and the image of one file."""
    file = read_json(path, _FORM, "LabelMe")
    height, width, regions = file.imageHeight, file.imageWidth, []
    size = (height, width) if height and width else None  # old files do not say
    for i, shape in enumerate(file.shapes):
        place = f"{path}: shapes[{i}]"
        if shape.shape_type == "polygon":
            regions.append(Region.of_outlines(shape.label, shape.points))
        elif shape.shape_type == "mask" and shape.mask and shape.points and size:
            left, top = (round(x) for x in shape.points[0])
            try:
                with opened(io.BytesIO(shape.mask), place, ("PNG",)) as image:
                    mask = np.array(image.convert("L"))
                regions.append(Region.of_mask(shape.label, mask, size, top, left))
            except (ValueError, DataError) as error:
                findings.refuse(place, f"damaged mask: {error}")
        else:
            findings.no_region(shape.shape_type, place)
    return [], [Annotated(path, file.imagePath, size, regions)]
