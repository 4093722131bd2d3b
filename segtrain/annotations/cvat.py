"""CVAT for images 1.1, an XML file: polygons and masks; a higher z_order covers a lower one."""

from pathlib import Path
from xml.etree import ElementTree
from xml.parsers import expat

import numpy as np

from segtrain.annotations.regions import (
    Annotated,
    Findings,
    Region,
    check_runs,
    pack_mask,
    polygon,
    read_text,
)
from segtrain.errors import DataError
from segtrain.text import printable


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """The classes and the images of one file.

    Raises:
        DataError: it is no such file. What is wrong with single shapes goes to `findings`.
    """
    root = _parsed(path)
    if root.find("track") is not None:
        raise DataError(f"{printable(path)}: tracks of a video; export as 'CVAT for images'")
    images = []
    for image in root.iterfind("image"):
        name, regions = image.get("name", ""), []
        try:
            size = int(image.attrib["height"]), int(image.attrib["width"])
            # Shapes of one z_order keep the order of the file.
            for shape in sorted(image, key=lambda shape: int(shape.get("z_order", 0))):
                if shape.tag in ("polygon", "mask"):
                    regions.append(_region(shape, size))
                else:
                    findings.no_region(shape.tag, f"{path}: {name}")
            images.append(Annotated(path, name, size, regions))
        except (KeyError, ValueError) as error:
            findings.refuse(f"{path}: {name}", f"damaged: {error}")
    return [label.findtext("name") or "" for label in root.iterfind("meta//label")], images


def _parsed(path: Path) -> ElementTree.Element:
    """The root of the file; one that declares entities could grow without bounds."""

    def refuse(*_: object) -> None:
        raise DataError(f"{printable(path)}: holds a DOCTYPE, which no CVAT file does; remove it")

    text = read_text(path)
    guard = expat.ParserCreate()
    guard.StartDoctypeDeclHandler = refuse
    try:
        guard.Parse(text, True)
        return ElementTree.fromstring(text)
    except (expat.ExpatError, ElementTree.ParseError) as error:
        raise DataError(f"{printable(path)}: no XML file: {error}") from None


def _region(shape: ElementTree.Element, size: tuple[int, int]) -> Region:
    """Raises KeyError or ValueError if the shape is damaged."""
    name = shape.attrib["label"]
    if shape.tag == "polygon":
        pairs = (point.split(",") for point in shape.attrib["points"].split(";"))
        return Region(name, (polygon([(float(x), float(y)) for x, y in pairs]),))
    box = {key: int(shape.attrib[key]) for key in ("top", "left", "height", "width")}
    # Row by row within the box, the first run outside of the mask.
    within = box["height"], box["width"]
    runs = [int(run) for run in shape.attrib["rle"].split(",")]
    check_runs(runs, within)
    mask = np.repeat(np.arange(len(runs)) % 2, runs).reshape(within)
    return Region(name, mask=pack_mask(mask, size, box["top"], box["left"]))
