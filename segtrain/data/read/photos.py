"""The images that a user names for prediction: which they are, and their pixels."""

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from segtrain.data.read.decode import (
    MAX_PHOTO_PIXELS,
    decode_header,
    decode_image,
    exif_orientation,
    opened,
    read_bytes,
)
from segtrain.data.read.find import IMAGE_SUFFIXES, OTHER_IMAGES, first_lines
from segtrain.errors import DataError
from segtrain.files import os_errors_as, walk
from segtrain.text import counted, printable

MORE_SUFFIXES = (".bmp", ".tif", ".tiff", ".webp")

_FORMATS = ("BMP", "TIFF", "WEBP")
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "RGBX")
_BITS_PER_SAMPLE = 258  # a tag of TIFF
# The inverse of what ImageOps.exif_transpose does for each orientation.
_TURN_BACK = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


class Photo(NamedTuple):
    """An image as stored, (H, W, 3) uint8 RGB, its bits per sample and its EXIF orientation."""

    image: np.ndarray
    depth: int
    orientation: int


def read_photo(path: Path) -> Photo:
    """Reads an image of any of these formats; of several pages the first.

    Raises:
        DataError: missing, unreadable, damaged, too large, or of a refused kind.
    """
    data = read_bytes(path)
    if path.suffix.lower() not in MORE_SUFFIXES:
        header = decode_header(data, path, max_pixels=MAX_PHOTO_PIXELS)
        image = decode_image(data, path, max_pixels=MAX_PHOTO_PIXELS)
        return Photo(image, header.depth, header.orientation)
    with opened(io.BytesIO(data), path, _FORMATS, MAX_PHOTO_PIXELS) as image:
        if image.mode not in _MODES:
            raise DataError(
                f"{printable(path)}: the image is {image.mode}; convert it to 8-bit RGB"
            )
        is_tiff = image.format == "TIFF"
        depth = int(np.max(image.tag_v2.get(_BITS_PER_SAMPLE, 8))) if is_tiff else 8
        orientation = exif_orientation(image)
        image.load()
        if orientation != 1 and exif_orientation(image) == 1:
            # Loading a TIFF makes Pillow turn it as EXIF says and drop the note.
            image = image.transpose(_TURN_BACK[orientation])
        return Photo(np.array(image.convert("RGB")), depth, orientation)


SUFFIXES = (*IMAGE_SUFFIXES, *MORE_SUFFIXES)
_MAX_SHOWN = 10


class Source(NamedTuple):
    """An image and the unique name of its prediction: a relative path without suffix."""

    path: Path
    name: str


def find_images(inputs: Sequence[str | Path], output: Path) -> list[Source]:
    """The images among `inputs`, files or folders searched to any depth, each image once.

    Names are relative to the given folder. If another image already has the name, in upper or lower
    case, the file's suffix is appended, then a number. Files in `output` are left out, so that a
    second run does not predict the pictures of the first.

    Raises:
        DataError: an input is missing, of another format, or a folder without images.
    """
    found: list[Source] = []
    problems = []
    for given in map(Path, inputs):
        if not given.is_dir():
            problems += _file_problem(given)
            found.append(Source(given, given.stem))
        elif _is_below(given, output):
            problems.append(
                f"{printable(given)}: lies in --output, where predictions are no input; choose "
                "another directory for them"
            )
        else:
            inside = list(_images_below(given, output))
            found += inside
            if not inside:
                problems.append(f"{printable(given)}: no images ({' '.join(SUFFIXES)}) in it")
    if problems:
        raise DataError(first_lines("input", problems))
    return _with_unique_names(found)


def skipped_files(inputs: Sequence[str | Path], output: Path) -> list[str]:
    """What in the folders among `inputs` is not predicted: a line for images, a line for others."""
    counts: Counter[str] = Counter()
    for folder in {given.resolve() for given in map(Path, inputs) if given.is_dir()}:
        for here, files in walk(folder, hidden=True):
            if not _is_below(here, output):
                counts.update(Path(name).suffix.lower() for name in files if name[0] != ".")
    images = Counter({end: n for end, n in counts.items() if end in _UNREAD})
    others = Counter({end: n for end, n in counts.items() if end not in (*_UNREAD, *SUFFIXES)})
    image_words = "image of a format that is not read", "images of formats that are not read"
    other_words = "file that is no image", "files that are no images"
    kinds = ((images, image_words, "; convert to PNG or JPEG"), (others, other_words, ""))
    return [
        f"skipped {counted(found.total(), *words)}: {_by_suffix(found)}{repair}"
        for found, words, repair in kinds
        if found
    ]


_UNREAD = tuple(suffix for suffix in OTHER_IMAGES if suffix not in SUFFIXES)


def _by_suffix(counts: Counter[str]) -> str:
    shown = sorted(counts.most_common(_MAX_SHOWN), key=lambda pair: (-pair[1], not pair[0], pair))
    named = [
        f"{count} {printable(suffix, _MAX_SHOWN) or 'without suffix'}" for suffix, count in shown
    ]
    return ", ".join(named) + (", others" if len(counts) > _MAX_SHOWN else "")


def _file_problem(path: Path) -> list[str]:
    suffix = path.suffix.lower()
    if not path.exists():
        return [f"{printable(path)}: no such file or folder"]
    if suffix in _UNREAD:
        return [f"{printable(path)}: images of this format are not read; convert it to PNG or JPEG"]
    if suffix not in SUFFIXES:
        return [f"{printable(path)}: not an image ({' '.join(SUFFIXES)})"]
    return []


def _images_below(folder: Path, output: Path) -> Iterator[Source]:
    with os_errors_as(DataError):
        for here, files in walk(folder, hidden=True):
            for path in (here / name for name in files):
                if path.suffix.lower() in SUFFIXES and not _is_below(path, output):
                    yield Source(path, path.relative_to(folder).with_suffix("").as_posix())


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _with_unique_names(found: Iterable[Source]) -> list[Source]:
    sources: dict[Path, Source] = {}
    taken: set[str] = set()
    for path, name in found:
        if path.resolve() in sources:
            continue
        unique, number = name, 2
        while unique.casefold() in taken:
            # x, x_png, x_3, x_4, ...
            unique = f"{name}_{number if number > 2 else path.suffix[1:].lower()}"
            number += 1
        taken.add(unique.casefold())
        sources[path.resolve()] = Source(path, unique)
    return list(sources.values())
