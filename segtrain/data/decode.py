"""Pixels from files: 8-bit RGB images through OpenCV, class ids through Pillow.

The rules, the same for training, evaluation, checking and prediction:

- PNG and JPEG only, and at most `MAX_PIXELS`, which is read from the header before any allocation.
- Pixels count as they are stored: the EXIF orientation is ignored, because a PNG label has none and
  rotating the image alone would tear the two apart.
- Grey and palette images become RGB, 16 bits become 8 (the high byte, as the PNG standard says),
  alpha is dropped; CMYK is refused, since its colours depend on a printer. The high byte of a
  camera's 12 bits is nearly black: `segtrain.data.brightness` finds such data sets.
- A file that ends early or fails its checksums is refused. A JPEG has none: a flipped bit in it
  goes unnoticed.
- Labels are PNG. Ids are the stored numbers: palette indices, never palette colours, and grey
  levels at their own bit depth. Colours are used only where the config says so.
"""

import io
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

from segtrain.data.classes import ClassFile, Color
from segtrain.data.labels import colors_to_train_ids, ids_to_train_ids
from segtrain.errors import DataError
from segtrain.files import open_regular
from segtrain.text import printable

# Pillow's own limit; one image of this size takes 270 MB.
MAX_PIXELS = 89_478_485

_PNG = b"\x89PNG\r\n\x1a\n"
# Of the chunk IHDR, behind width (16) and height (20).
_PNG_DEPTH_AT = 24
_EXIF_ORIENTATION = 0x0112
# Pillow's names for the chunk eXIf, and for the text in which ImageMagick writes EXIF.
_PNG_EXIF = {"exif", "Raw profile type exif"}
# Pillow spreads grey levels of 2 and 4 bits over 0..255; the ids are the levels.
_GREY_STEP = {2: 85, 4: 17}
_ID_MODES = ("1", "L", "P", "I;16", "I;16B", "I")
_COLOR_MODES = ("L", "P", "RGB", "RGBA", "LA")


class Header(NamedTuple):
    """What a file says before its pixels: (height, width), Pillow's mode, and EXIF orientation.

    The orientation is 1 where the pixels are stored upright or the file does not say.
    depth: bits of a sample: 1 to 16 in a PNG, 8 in a JPEG.
    """

    size: tuple[int, int]
    mode: str
    orientation: int
    depth: int = 8


def read_image(path: str | Path) -> np.ndarray:
    """The image, (H, W, 3) uint8 RGB.

    Raises:
        DataError: missing, unreadable, damaged, too large, or of a kind that is refused.
    """
    return decode_image(read_bytes(path), path)


def read_label(path: str | Path, class_file: ClassFile, label_format: str = "ids") -> np.ndarray:
    """The label, (H, W) uint8: train ids, 255 where the class file ignores a pixel.

    label_format: "ids" (one channel of raw ids) or "colors" (the classes' exact colours).

    Raises:
        DataError: as `read_image`; or ids or colours that the class file does not know, all of
            them with their number of pixels.
    """
    return decode_label(read_bytes(path), path, class_file, label_format)


def read_raw_label(path: str | Path) -> np.ndarray:
    """The ids as stored, (H, W) uint8, or uint16 from a 16-bit PNG.

    Raises:
        DataError: as `read_image`; or the file holds colours.
    """
    return decode_raw_label(read_bytes(path), path)


def read_header(path: str | Path) -> Header:
    """Size and mode of a PNG or JPEG, from its first bytes.

    Raises:
        DataError: missing, neither PNG nor JPEG, or more than `MAX_PIXELS`.
    """
    try:
        with open_regular(path) as file:
            return _header(file, path)
    except OSError as error:
        raise _unreadable(path, error) from error


def read_bytes(path: str | Path) -> bytes:
    """The whole file.

    Raises:
        DataError: missing, a folder, not permitted, or empty.
    """
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not data:
        raise DataError(f"{printable(path)}: the file is empty")
    return data


def decode_header(data: bytes, path: str | Path) -> Header:
    """`read_header` of bytes already read; `path` is for messages."""
    return _header(io.BytesIO(data), path)


def decode_image(data: bytes, path: str | Path) -> np.ndarray:
    """`read_image` of bytes already read; `path` is for messages."""
    header = decode_header(data, path)
    if header.mode in ("CMYK", "YCCK"):
        raise DataError(f"{printable(path)}: the image is CMYK; convert it to RGB")
    if data.startswith(_PNG):
        # OpenCV takes as much memory as a chunk claims: 4 GB for 160 bytes.
        _check_png(data, path)
    elif data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda"):
        raise DataError(f"{printable(path)}: the JPEG is cut off: its end marker is missing")
    try:
        # imread returns half an image for a damaged JPEG; imdecode returns None.
        flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:
        raise DataError(f"{printable(path)}: damaged image: {error.err}") from error
    if image is None or image.shape[:2] != header.size:
        raise DataError(f"{printable(path)}: damaged image: the pixels cannot be decoded")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)


def decode_label(
    data: bytes, path: str | Path, class_file: ClassFile, label_format: str
) -> np.ndarray:
    """`read_label` of bytes already read; `path` is for messages."""
    if label_format == "colors":
        return colors_to_train_ids(decode_colors(data, path), path, class_file)
    return ids_to_train_ids(decode_raw_label(data, path), path, class_file)


def decode_raw_label(data: bytes, path: str | Path) -> np.ndarray:
    """`read_raw_label` of bytes already read; `path` is for messages."""
    depth, image = _open_label(data, path)
    if image.mode not in _ID_MODES:
        pixels = _pixels(image, path)
        grey = image.mode == "LA" or bool((pixels[..., :1] == pixels[..., :3]).all())
        raise DataError(f"{printable(path)}: {label_mode_problem(image.mode, 'ids', grey=grey)}")
    raw = _pixels(image, path)
    if image.mode == "L" and depth in _GREY_STEP:
        return raw // np.uint8(_GREY_STEP[depth])
    return raw.astype(np.uint8 if depth <= 8 else np.uint16, copy=False)


def decode_palette(data: bytes, path: str | Path) -> list[Color]:
    """The colours of a label's indices, RGB 0..255; empty where the label has no palette.

    Raises:
        DataError: as `read_label`.
    """
    _, image = _open_label(data, path)
    values = (image.getpalette() or []) if image.mode == "P" else []
    return list(zip(values[::3], values[1::3], values[2::3], strict=True))


def decode_colors(data: bytes, path: str | Path) -> np.ndarray:
    """The colours of a label, (H, W, 3) uint8 RGB; a pixel that is not opaque is an error."""
    depth, image = _open_label(data, path)
    if image.mode not in _COLOR_MODES or depth > 8:
        mode = image.mode if depth == 8 else f"{depth}-bit {image.mode}"
        raise DataError(f"{printable(path)}: the label is {mode}; expected 8-bit RGB colours")
    if image.mode in ("RGBA", "LA") or "transparency" in image.info:
        pixels = _pixels(image, path, mode="RGBA")
        clear = int(np.count_nonzero(pixels[..., 3] != 255))
        if clear:
            raise DataError(
                f"{printable(path)}: {clear} pixels are transparent; "
                "give every pixel of a label an opaque colour"
            )
        return pixels[..., :3]
    return _pixels(image, path, mode="RGB")


def exif_orientation(image: Image.Image) -> int:
    """The EXIF orientation of an opened image, 2 to 8, or 1 if it is upright or says nothing.

    Nothing is decoded, so EXIF that stands behind the pixels of a PNG is not seen.
    """
    if image.format == "PNG" and not _PNG_EXIF & image.info.keys():
        return 1  # getexif would decode the pixels to look behind them
    try:
        orientation = int(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # damaged EXIF: Pillow raises a dozen kinds, and the pixels may be good
        return 1
    return orientation if 1 <= orientation <= 8 else 1


def label_mode_problem(mode: str, label_format: str, *, grey: bool = False) -> str:
    """Why a label of Pillow's `mode` cannot be read in this format; empty if it can.

    grey: the colour channels are known to be equal.
    """
    if label_format == "colors":
        return "" if mode in _COLOR_MODES else f"the label is {mode}; expected 8-bit RGB colours"
    if mode in _ID_MODES:
        return ""
    if grey:
        return f"the label is {mode} but grey, expected ids; save it with one channel"
    return (
        f"the label is {mode}, expected one channel of class ids; for labels in colours give each "
        "class its `color` in the class file and set data.label_format: colors"
    )


def _header(file: io.BufferedIOBase, path: str | Path) -> Header:
    try:
        with Image.open(file, formats=("PNG", "JPEG")) as image:
            orientation = exif_orientation(image)
            depth = 8
            if image.format == "PNG":
                file.seek(_PNG_DEPTH_AT)
                depth = file.read(1)[0]
            header = Header((image.height, image.width), image.mode, orientation, depth)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(path) from error
    except UnidentifiedImageError as error:  # whose text names an object of Python
        raise DataError(f"{printable(path)}: neither a PNG nor a JPEG") from error
    except Exception as error:  # Pillow's parsers raise a dozen kinds on damaged bytes
        raise DataError(f"{printable(path)}: neither a PNG nor a JPEG ({error})") from error
    # Pillow itself only warns up to twice its limit.
    if header.size[0] * header.size[1] > MAX_PIXELS:
        raise _too_large(path)
    return header


def _too_large(path: str | Path) -> DataError:
    return DataError(f"{printable(path)}: more than {MAX_PIXELS:,} pixels; cut it into tiles")


def _open_label(data: bytes, path: str | Path) -> tuple[int, Image.Image]:
    """Bit depth and the opened, not yet decoded PNG, whose bytes are intact."""
    if not data.startswith(_PNG):
        raise DataError(
            f"{printable(path)}: the label is not a PNG file; other formats may change its ids"
        )
    _check_png(data, path)
    decode_header(data, path)
    return data[_PNG_DEPTH_AT], Image.open(io.BytesIO(data), formats=("PNG",))


def _check_png(data: bytes, path: str | Path) -> None:
    """Refuses a PNG of which a chunk is not whole.

    Pillow does not look at the checksums of pixel data: a flipped bit would become another label.

    Raises:
        DataError: what is wrong with it.
    """
    start = len(_PNG)
    while start + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, start)
        end = start + 8 + length
        if end + 4 > len(data):
            break
        if zlib.crc32(memoryview(data)[start + 4 : end]) != struct.unpack_from(">I", data, end)[0]:
            name = repr(kind.decode("latin-1"))
            raise DataError(f"{printable(path)}: damaged PNG: checksum of a chunk {name} is wrong")
        if kind == b"IEND":
            return
        start = end + 4
    raise DataError(f"{printable(path)}: damaged PNG: the file ends early, after {len(data)} bytes")


def _pixels(image: Image.Image, path: str | Path, mode: str = "") -> np.ndarray:
    try:
        return np.array(image.convert(mode) if mode and mode != image.mode else image)
    except Exception as error:  # as in _header
        raise DataError(f"{printable(path)}: damaged PNG: {error}") from error


def _unreadable(path: str | Path, error: OSError) -> DataError:
    return DataError(f"{printable(path)}: {(error.strerror or str(error)).lower()}")
