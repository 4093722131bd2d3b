"""Pixels for predictions from any camera or scanner: BMP, TIFF and WebP beside PNG and JPEG."""

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from segtrain.data.decode import (
    MAX_PHOTO_PIXELS,
    decode_header,
    decode_image,
    exif_orientation,
    opened,
    read_bytes,
)
from segtrain.errors import DataError
from segtrain.text import printable

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
