"""COCO's JSON of instances: polygons, run lengths and crowds; also as Roboflow exports it.

The polygons of one annotation are joined: only run lengths have holes. A crowd is drawn as its
class, as in COCO-Stuff.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, PositiveInt, TypeAdapter

from segtrain.annotations.regions import Annotated, Findings, Region, mask_of_runs, read_json
from segtrain.errors import DataError
from segtrain.text import printable

_Id = int | str


@dataclass(slots=True)
class _Image:
    id: _Id
    file_name: str
    width: PositiveInt | None = None
    height: PositiveInt | None = None


@dataclass(slots=True)
class _Runs:
    size: tuple[PositiveInt, PositiveInt]
    counts: str | list[int]


@dataclass(slots=True)
class _Annotation:
    image_id: _Id
    category_id: _Id = ""
    segmentation: list[list[FiniteFloat]] | _Runs | None = None
    iscrowd: int = 0
    segments_info: Any = None


@dataclass(slots=True)
class _Category:
    id: _Id
    name: str
    supercategory: str | None = None


@dataclass(slots=True)
class _File:
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


_FORM = TypeAdapter(_File)


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """The classes and the images of one file."""
    file = read_json(path, _FORM, "COCO instances")
    if any(annotation.segments_info is not None for annotation in file.annotations):
        raise DataError(f"{printable(path)}: panoptic: its labels are PNG files, not this file")
    names = {category.id: category.name for category in file.categories}
    images = {}
    for image in file.images:
        size = (image.height, image.width) if image.height and image.width else None
        images[image.id] = Annotated(path, image.file_name, size, [])
    if len(images) < len(file.images) or len(names) < len(file.categories):
        raise DataError(f"{printable(path)}: two images or two categories have one id")
    used = set()
    for i, annotation in enumerate(file.annotations):
        place = f"{path}: annotations[{i}]"
        if annotation.image_id not in images or annotation.category_id not in names:
            findings.refuse(place, "its image_id or category_id is not in the file")
            continue
        image, name = images[annotation.image_id], names[annotation.category_id]
        try:
            image.regions.append(_region(name, annotation.segmentation, image.size))
            used.add(name)
        except ValueError as error:
            findings.refuse(place, error)
        if not annotation.segmentation:
            findings.no_region("box", place)
        if annotation.iscrowd:
            findings.note(place, "a crowd, drawn as its class")
    # Roboflow adds the group of all classes as one more category, which nothing has.
    groups = {c.supercategory for c in file.categories if c.supercategory != c.name} - used
    return [name for name in names.values() if name not in groups], list(images.values())


def _region(
    name: str, found: list[list[float]] | _Runs | None, size: tuple[int, int] | None
) -> Region:
    if not isinstance(found, _Runs):
        return Region.of_outlines(name, *(found or ()))
    if found.size != size:
        raise ValueError("the size of its run lengths is not height and width of the image")
    runs = unpacked(found.counts) if isinstance(found.counts, str) else found.counts
    return Region.of_mask(name, mask_of_runs(runs, size[::-1]).T, size)  # runs go by columns


def unpacked(text: str) -> list[int]:
    """The run lengths in COCO's compressed text, by the rule of `rleFrString` in its maskApi.c.

    pycocotools itself reads past the end of a text that is cut off.

    Raises:
        ValueError: the text is damaged.
    """
    runs, value, bits = [], 0, 0
    for digit in (ord(character) - 48 for character in text):
        if not 0 <= digit < 64 or bits > 30:  # a run of more than 2 ** 34 pixels
            raise ValueError("damaged run lengths")
        value |= (digit & 31) << bits
        bits += 5
        if digit & 32:
            continue
        signed = value - (1 << bits) if digit & 16 else value
        # From the fourth on, a run is stored as its difference from the last but one.
        runs.append(signed + runs[-2] if len(runs) > 2 else signed)
        value = bits = 0
    if bits:
        raise ValueError("damaged run lengths")
    return runs
