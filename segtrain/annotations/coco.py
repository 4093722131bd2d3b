"""COCO's JSON of instances: polygons, run lengths and crowds; also as Roboflow exports it.

The polygons of one annotation are joined: only run lengths have holes. A crowd is drawn as its
class, as in COCO-Stuff.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from segtrain.annotations.regions import (
    Annotated,
    Findings,
    Finite,
    Region,
    Side,
    check_packed,
    pack_runs,
    polygon,
    read_json,
)
from segtrain.errors import DataError
from segtrain.text import printable

_Id = int | str


@dataclass(frozen=True, slots=True)
class _Image:
    id: _Id
    file_name: str
    width: Side | None = None
    height: Side | None = None

    @property
    def size(self) -> tuple[int, int] | None:
        return (self.height, self.width) if self.height and self.width else None


@dataclass(frozen=True, slots=True)
class _Runs:
    size: tuple[Side, Side]
    counts: str | list[int]


@dataclass(frozen=True, slots=True)
class _Annotation:
    image_id: _Id
    category_id: _Id = ""
    segmentation: list[list[Finite]] | _Runs | None = None
    iscrowd: int = 0
    segments_info: Any = None


@dataclass(frozen=True, slots=True)
class _Category:
    id: _Id
    name: str
    supercategory: str | None = None


@dataclass(frozen=True, slots=True)
class _File:
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


_FORM = TypeAdapter(_File)


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """The classes and the images of one file.

    Raises:
        DataError: it is no such file. What is wrong with single annotations goes to `findings`.
    """
    file = read_json(path, _FORM, "COCO instances")
    if any(annotation.segments_info is not None for annotation in file.annotations):
        raise DataError(f"{printable(path)}: panoptic: its labels are PNG files, not this file")
    names = {category.id: category.name for category in file.categories}
    images = {image.id: Annotated(path, image.file_name, image.size, []) for image in file.images}
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
            findings.refuse(place, str(error))
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
        return Region(name, tuple(polygon(numbers) for numbers in found or ()))
    if found.size != size:
        raise ValueError("the size of its run lengths is not height and width of the image")
    pack = check_packed if isinstance(found.counts, str) else pack_runs
    return Region(name, mask=pack(found.counts, found.size))
