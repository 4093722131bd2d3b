"""Supervisely's JSON, a file for each image: polygons with holes, bitmaps and rectangles.

A project holds `meta.json`, and in each data set `ann/a.jpg.json` for `img/a.jpg`. Whole numbers
name pixels, so a vertex lies in the middle of its pixel, and a rectangle includes its last row and
column; other numbers are distances (developer.supervisely.com, "Coordinate system").
"""

import base64
import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from segtrain.data.read.decode import opened
from segtrain.desk.annotations.regions import (
    WITHOUT_AREA,
    Annotated,
    Findings,
    Region,
    check_pixels,
    image_size,
    read_text,
    rectangle,
)
from segtrain.files import parse_json

# Of a pixel of a PNG with four channels of 16 bits; and what a PNG has besides pixels.
_PNG_PIXEL_BYTES, _PNG_BYTES = 8, 1 << 16


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """The classes of the project, if its meta.json is there, and the image of one file."""
    file, regions = parse_json(read_text(path)), []
    size = image_size(file["size"], "height", "width")
    if size is None:
        raise ValueError("expected height and width of the image")
    check_pixels(size)
    for i, shape in enumerate(file["objects"]):
        with findings.refusing(place := f"{path}: objects[{i}]"):
            kind, name = shape["geometryType"], shape["classTitle"]
            if kind == "polygon":
                regions.append(_polygon(name, shape["points"]))
            elif kind == "rectangle":
                regions.append(Region.of_outlines(name, _rectangle(shape["points"]["exterior"])))
            elif kind == "bitmap":
                left, top = shape["bitmap"]["origin"]
                mask = _mask(shape["bitmap"]["data"], size)
                regions.append(Region.of_mask(name, mask, size, top, left))
            else:
                findings.no_region(kind, place)
    image = path.name.removesuffix(".json")
    if path.parent.name == "ann":
        image = f"{path.parent.parent.name}/img/{image}"
    return _classes(path), [Annotated(path, image, size, regions)]


def _classes(path: Path) -> list[str]:
    """The classes that have an area, from the meta.json above the folder of the file."""
    for folder in path.parents[1:3]:
        if (folder / "meta.json").is_file():
            classes = parse_json(read_text(folder / "meta.json"))["classes"]
            return [entry["title"] for entry in classes if entry.get("shape") not in WITHOUT_AREA]
    return []


def _polygon(name: str, points: dict[str, Any]) -> Region:
    outlines = Region.of_outlines(name, points["exterior"], *points.get("interior", ())).polygons
    if all(map(_are_pixels, outlines)):
        outlines = tuple(outline + 0.5 for outline in outlines)
    return Region(name, outlines[:1], holes=outlines[1:])


def _rectangle(corners: list[Any]) -> np.ndarray:
    points = np.array(corners, np.float64).reshape(2, 2)
    low, high = points.min(axis=0), points.max(axis=0)
    return rectangle(low, high + 1 if _are_pixels(points) else high)


def _are_pixels(points: np.ndarray) -> bool:
    return bool((points == points.round()).all())


def _mask(text: str, size: tuple[int, int]) -> np.ndarray:
    """The mask (h, w) of a packed PNG: its alpha, or its one channel; ValueError: damaged."""
    unpacking = zlib.decompressobj()
    try:
        # A short text may unpack to gigabytes: no more is unpacked than a PNG of the image can
        # have.
        most = size[0] * size[1] * _PNG_PIXEL_BYTES + _PNG_BYTES
        png = unpacking.decompress(base64.b64decode(text), most)
    except zlib.error as error:
        raise ValueError(f"a damaged bitmap: {error}") from None
    if not unpacking.eof:
        raise ValueError("a bitmap that is cut off, or larger than the image")
    with opened(io.BytesIO(png), "its bitmap", ("PNG",)) as image:
        if image.height > size[0] or image.width > size[1]:
            raise ValueError(f"a bitmap of {image.height}x{image.width} px, larger than the image")
        if image.has_transparency_data:
            return np.array(image.convert("RGBA"))[..., 3]
        if image.mode == "P" or len(image.getbands()) > 1:
            raise ValueError("expected a bitmap with alpha, or of one channel")
        return np.array(image)
