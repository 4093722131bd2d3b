"""Label Studio's JSON export: polygons in percent of the image, and brush strokes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
from pydantic import FiniteFloat, PositiveInt, TypeAdapter

from segtrain.annotations.regions import Annotated, Findings, Region, check_pixels, read_json
from segtrain.data.read.find import IMAGE_SUFFIXES

_CHANNELS = 4  # a brush stroke is an RGBA image; its alpha is the mask


@dataclass(slots=True)
class _Value:
    points: list[tuple[FiniteFloat, FiniteFloat]] = ()
    rle: list[int] = ()
    polygonlabels: list[str] = ()
    brushlabels: list[str] = ()


@dataclass(slots=True)
class _Result:
    type: str = ""
    value: _Value | None = None
    original_width: PositiveInt | None = None
    original_height: PositiveInt | None = None
    image_rotation: float = 0


@dataclass(slots=True)
class _Annotation:
    result: list[_Result]
    was_cancelled: bool = False
    ground_truth: bool = False


@dataclass(slots=True)
class _Task:
    data: dict[str, Any]
    annotations: list[_Annotation]
    id: int | str = ""


_FORM = TypeAdapter(list[_Task])


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """No classes, which the export does not declare, and the images of one file."""
    images = []
    for task in read_json(path, _FORM, "Label Studio's export as JSON"):
        place, name = f"{path}: task {task.id}", _file_name(task.data)
        done = [annotation for annotation in task.annotations if not annotation.was_cancelled]
        done = [annotation for annotation in done if annotation.ground_truth] or done
        results = done[0].result if len(done) == 1 else []
        sizes = {(r.original_height, r.original_width) for r in results if r.original_width}
        if not name:
            findings.refuse(place, "its data names no image, or several")
        elif not done:
            findings.note(place, "left out, because it has no annotation")
        elif len(done) > 1:
            findings.refuse(place, "several annotations; mark one as ground truth, or keep one")
        elif len(sizes) > 1 or any(result.image_rotation for result in results):
            findings.refuse(place, "regions of several images, or of one that was rotated")
        else:
            size, regions = next(iter(sizes), None), []
            for result in results:
                try:
                    regions += _regions(result, size, place, findings)
                except ValueError as error:
                    findings.refuse(place, f"damaged {result.type}: {error}")
            images.append(Annotated(path, name, size, regions))
    return [], images


def _file_name(data: dict[str, Any]) -> str:
    """The one image in the data of a task: the end of a path, of a URL, or of `?d=path`."""
    names = []
    for url in (urlsplit(value) for value in data.values() if isinstance(value, str)):
        for name in (*parse_qs(url.query).get("d", ()), unquote(url.path)):
            if name.lower().endswith(IMAGE_SUFFIXES):
                # Uploaded files lie in folders of the server's own.
                names.append(name.rpartition("/")[2] if "/upload/" in name else name)
    return names[0] if len(names) == 1 else ""


def _regions(
    result: _Result, size: tuple[int, int] | None, place: str, findings: Findings
) -> list[Region]:
    """The region of a result, if it has one; ValueError: it is damaged."""
    if not result.type.endswith("labels"):
        return []  # a relation, or a choice for the whole image
    if result.type not in ("polygonlabels", "brushlabels"):
        findings.no_region(result.type, place)
        return []
    value = result.value or _Value()
    labels = [*value.polygonlabels, *value.brushlabels]
    if size is None or len(labels) != 1:
        raise ValueError("expected one class, original_width and original_height")
    if result.type == "polygonlabels":
        return [Region.of_outlines(labels[0], np.array(value.points) * size[::-1] / 100)]
    return [Region.of_mask(labels[0], _unpacked(bytes(value.rle), size), size)]


def _unpacked(packed: bytes, size: tuple[int, int]) -> np.ndarray:
    """The alpha (H, W) uint8 of a brush stroke, an RGBA image packed by @thi.ng/rle-pack.

    First the number of values (32 bits), the bits of a value less 1 (5), and four widths less 1 (4
    each). Then runs: whether one value is repeated (1), which width the length has (2), the length
    less 1, and the value or the values.

    Raises:
        ValueError: the runs do not fill `size` exactly.
    """
    check_pixels(size)
    bits, at = "".join(f"{byte:08b}" for byte in packed), 0

    def number(width: int) -> int:
        nonlocal at
        at += width
        if at > len(bits):
            raise ValueError("it ends early")
        return int(bits[at - width : at], 2)

    total, width = number(32), number(5) + 1
    widths = [number(4) + 1 for _ in range(4)]
    if total != size[0] * size[1] * _CHANNELS or width != 8:
        raise ValueError(f"{total} values of {width} bits for {size[0]}x{size[1]} px")
    values = bytearray()
    while len(values) < total:
        is_repeated, length = number(1), number(widths[number(2)]) + 1
        if is_repeated:
            values += bytes([number(width)]) * length
        else:
            values += bytes(number(width) for _ in range(length))
    if len(values) != total:
        raise ValueError("its runs do not fill the image")
    return np.frombuffer(values, np.uint8).reshape(*size, _CHANNELS)[..., 3]
