"""Run lengths in a table, as sets of Kaggle have them: `ImageId,ClassId,EncodedPixels`, `id,rle`.

A line has pairs of start and length for a class of an image, or for one object of it. Pixels are
numbered down the columns, from 1. Image and class may also share a column: `a.jpg_3`.
"""

import re
from pathlib import Path

import numpy as np

from segtrain.data.read.decode import MAX_PIXELS
from segtrain.desk.annotations.regions import Annotated, Findings, Region, read_text
from segtrain.types import IGNORE_INDEX

_IMAGE, _CLASS = r"image(_?id)?", r"class(_?(id|name))?|label"
_BOTH = f"{_IMAGE}_({_CLASS})"
_KINDS = {"image": _IMAGE, "class": _CLASS, "both": _BOTH, "pixels": "encodedpixels|rle"}
# The last is a table of one class.
_TABLES = ({"image", "class", "pixels"}, {"both", "pixels"}, {"image", "pixels"})


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """The classes and the images of one table; a class that is a number keeps it as its id."""
    lines = _lines(path, findings)
    are_numbers = all(re.fullmatch("[0-9]{1,9}", region.name) for _, region in lines)
    images: dict[str, Annotated] = {}
    most = 0
    for name, region in lines:
        place = f"{region.place}: {name}"
        image = images.setdefault(name, Annotated(path, name, None, [], place=place))
        with findings.refusing(region.place):
            if are_numbers:
                most = max(most, number := _class_number(region))
                region = region._replace(name=f"class_{number}")
            if len(region.runs):
                image.regions.append(region)
    if are_numbers:
        # All of them: a number that no line shows must not move the ids of those behind it.
        return [f"class_{number}" for number in range(1, most + 1)], list(images.values())
    return sorted({region.name for _, region in lines}), list(images.values())


def _lines(path: Path, findings: Findings) -> list[tuple[str, Region]]:
    """Image and region of each line, perhaps without runs; what cannot be read is refused."""
    # Not by `csv`: runs are longer than its limit for a cell.
    header, *rows = (
        [cell.strip(' "\r') for cell in line.split(",")]
        for line in read_text(path).decode("utf-8-sig").split("\n")
    )
    columns: dict[str, int] = {}
    for i, name in enumerate(header):
        for kind, pattern in _KINDS.items():
            if re.fullmatch(pattern, name.lower()) and columns.setdefault(kind, i) != i:
                raise ValueError(f"{header[columns[kind]]} and {name}: keep one of these columns")
    if not {"image", "both"} & columns.keys() and "id" in (words := [x.lower() for x in header]):
        columns["image"] = words.index("id")
    if set(columns) not in _TABLES:
        raise ValueError("expected the columns ImageId,ClassId,EncodedPixels")
    lines = []
    for i, row in enumerate(rows, start=2):
        if row == [""]:
            continue
        with findings.refusing(place := f"{path}:{i}"):
            if len(row) != len(header):
                raise ValueError(f"expected {len(header)} columns, as in its first line")
            cells = {"class": "1"} | {kind: row[column] for kind, column in columns.items()}
            if "both" in cells:
                cells["image"], _, cells["class"] = cells["both"].rpartition("_")
            if not cells["image"] or not cells["class"]:
                raise ValueError("expected an image and a class")
            region = Region(cells["class"], runs=_runs(cells["pixels"]), place=place)
            lines.append((cells["image"], region))
    return lines


def _class_number(region: Region) -> int:
    """The class of a line, 0 where it is the background; ValueError: it cannot be a class."""
    number = int(region.name)
    if number >= IGNORE_INDEX:
        raise ValueError(f"class {number}: at most {IGNORE_INDEX - 1}")
    if number == 0 and len(region.runs):
        raise ValueError(
            "class 0 has pixels, as a first class or as background: number classes from 1, or "
            "write their names"
        )
    return number


def _runs(text: str) -> np.ndarray:
    """(R, 2) int64: the first pixel, from 0, and the length of each run; ValueError: no runs."""
    numbers = np.array(text.split(), np.int64)
    if numbers.size % 2:
        raise ValueError("expected pairs of start and length, not an odd number of numbers")
    if numbers.size and not 1 <= numbers.min() <= numbers.max() <= MAX_PIXELS:
        raise ValueError(f"expected starts and lengths from 1 to {MAX_PIXELS}")
    runs = numbers.reshape(-1, 2) - (1, 0)
    if (runs[1:, 0] < runs[:-1].sum(axis=1)).any():
        raise ValueError("runs overlap or go back: starts must count from the first pixel")
    return runs
