"""Label Studio's JSON export: polygons in percent of the image, and brush strokes."""

from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from segtrain.data.read.find import IMAGE_SUFFIXES
from segtrain.desk.annotations.regions import (
    Annotated,
    Findings,
    Region,
    check_pixels,
    image_size,
    read_text,
)
from segtrain.files import parse_json

_CHANNELS = 4  # a brush stroke is an RGBA image; its alpha is the mask


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """No classes, which the export does not declare, and the images of one file."""
    images = []
    for task in parse_json(read_text(path)):
        with findings.refusing(place := f"{path}: task {task['id']}"):
            # Of several annotators the one that is marked as ground truth counts.
            done = [entry for entry in task["annotations"] if not entry.get("was_cancelled")]
            done = [entry for entry in done if entry.get("ground_truth")] or done
            if len(done) > 1:
                raise ValueError("several annotations; mark one as ground truth, or keep one")
            if done:
                images.append(_image(path, task["data"], done[0]["result"], place, findings))
            else:
                findings.note(place, "left out, because it has no annotation")
    return [], images


def _image(
    path: Path, data: dict[str, Any], results: list[dict], place: str, findings: Findings
) -> Annotated:
    """The image of a task; ValueError: it is not clear."""
    name = _file_name(data)
    sizes = {image_size(result, "original_height", "original_width") for result in results} - {None}
    if len(sizes) > 1 or any(result.get("image_rotation") for result in results):
        raise ValueError("regions of several images, or of one that was rotated")
    size, regions = next(iter(sizes), None), []
    for result in results:
        kind = result.get("type", "")
        with findings.refusing(place):
            if kind in ("polygonlabels", "brushlabels"):
                regions.append(_region(kind, result["value"], size))
            elif kind.endswith("labels"):  # else a relation, or a choice for the whole image
                findings.no_region(kind, place)
    return Annotated(path, name, size, regions)


def _file_name(data: dict[str, Any]) -> str:
    """The one image in the data of a task: the end of a path, of a URL, or of `?d=path`."""
    names = []
    for url in (urlsplit(value) for value in data.values() if isinstance(value, str)):
        for name in (*parse_qs(url.query).get("d", ()), unquote(url.path)):
            if name.lower().endswith(IMAGE_SUFFIXES):
                # Uploaded files lie in folders of the server's own.
                names.append(name.rpartition("/")[2] if "/upload/" in name else name)
    if len(names) != 1:
        raise ValueError("its data names no image, or several")
    return names[0]


def _region(kind: str, value: dict[str, Any], size: tuple[int, int] | None) -> Region:
    labels = value[kind]
    if size is None or len(labels) != 1:
        raise ValueError("expected one class, original_width and original_height")
    if kind == "polygonlabels":
        region = Region.of_outlines(labels[0], value["points"])
        return region._replace(polygons=(region.polygons[0] * size[::-1] / 100,))
    return Region.of_mask(labels[0], _unpacked(bytes(value["rle"]), size), size)


def _unpacked(packed: bytes, size: tuple[int, int]) -> np.ndarray:
    """The alpha (H, W) uint8 of a brush stroke, an RGBA image packed by @thi.ng/rle-pack.

    First the number of values (32 bits), the bits of a value less 1 (5), and four widths less 1 (4
    each). Then runs: whether one value is repeated (1), which width the length has (2), the length
    less 1, and the value or the values.

    Raises:
        ValueError: the runs do not fill `size` exactly.
    """
    # First of all: a few bytes of runs may ask for any number of values.
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
