"""CVAT for images 1.1, an XML file: polygons and masks; a higher z_order covers a lower one."""

from pathlib import Path
from xml.etree import ElementTree

from segtrain.desk.annotations.regions import Annotated, Findings, Region, mask_of_runs, read_text


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """The classes and the images of one file."""
    try:
        root = ElementTree.fromstring(read_text(path))  # expat itself stops entities that grow
    except ElementTree.ParseError as error:
        raise ValueError(f"no XML file: {error}") from None
    if root.find("track") is not None:
        raise ValueError("tracks of a video; export as 'CVAT for images'")
    images = []
    for image in root.iterfind("image"):
        with findings.refusing(place := f"{path}: {image.get('name')}"):
            size, regions = (int(image.attrib["height"]), int(image.attrib["width"])), []
            # Shapes of one z_order keep the order of the file.
            for shape in sorted(image, key=lambda shape: int(shape.get("z_order", 0))):
                if shape.tag in ("polygon", "mask"):
                    regions.append(_region(shape, size))
                else:
                    findings.no_region(shape.tag, place)
            images.append(Annotated(path, image.attrib["name"], size, regions))
    return [label.findtext("name") or "" for label in root.iterfind("meta//label")], images


def _region(shape: ElementTree.Element, size: tuple[int, int]) -> Region:
    name = shape.attrib["label"]
    if shape.tag == "polygon":
        return Region.of_outlines(name, shape.attrib["points"].replace(";", ",").split(","))
    top, left, *within = (int(shape.attrib[key]) for key in ("top", "left", "height", "width"))
    # Run lengths fill the box of the mask, not the image.
    mask = mask_of_runs([int(run) for run in shape.attrib["rle"].split(",")], tuple(within))
    return Region.of_mask(name, mask, size, top, left)
