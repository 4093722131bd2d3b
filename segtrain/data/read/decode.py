"""Pixels from files: 8-bit RGB images through OpenCV, class ids through Pillow.

The same rules hold for training, evaluation, checking and prediction:

- PNG and JPEG only, with at most `MAX_PIXELS`, checked in the header before any allocation.
- Pixels count as they are stored. The EXIF orientation is ignored: a PNG label has none, and
  rotating only the image would misalign the two.
- Grey and palette images become RGB. 16 bits become 8: the high byte, as the PNG standard says.
  The high byte of a camera's 12 bits is nearly black; `data.check.dark_images` finds such data.
  Alpha is dropped. CMYK is refused: its colours depend on a printer.
- A file that ends early or fails its checksums is refused. JPEG has no checksums, so a flipped bit
  in a JPEG goes unnoticed.
- Labels are PNG. Ids are the stored numbers: palette indices, not palette colours, and grey levels
  at their own bit depth. Colours are used only if the config says so.

Every function raises DataError, with the name of the file, if the file is missing, damaged, too
large, or of a refused kind. `decode_…` take bytes that are already read; their `path` is for
messages.
"""

import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

from segtrain.errors import DataError
from segtrain.files import open_regular, os_errors_as
from segtrain.text import printable

# Pillow warns above this; one image of this size takes 270 MB.
MAX_PIXELS = 89_478_485
# Pillow refuses more. Satellite images, such as a tile of Sentinel-2 with 10980 x 10980, have less.
MAX_PHOTO_PIXELS = 2 * MAX_PIXELS

EXIF_ORIENTATION = 0x0112
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNK_FRAME = 12  # bytes around the content of a chunk: length, kind and checksum
# The offset of the bit depth in a PNG; width is at 16, height at 20.
PNG_DEPTH_AT = 24
# Pillow's names for the chunk eXIf, and for the text in which ImageMagick writes EXIF.
_PNG_EXIF = {"exif", "Raw profile type exif"}
# Pillow spreads grey levels of 2 and 4 bits over 0..255.
_GREY_STEP = {2: 85, 4: 17}
_ID_MODES = ("1", "L", "P", "I;16", "I;16B", "I")
_COLOR_MODES = ("L", "P", "RGB", "RGBA", "LA")


class Header(NamedTuple):
    """What a file says before its pixels.

    size: (height, width). mode: Pillow's name.
    orientation: of EXIF; 1 if the pixels are stored upright or the file does not say.
    depth: bits of a sample: 1 to 16 in a PNG, 8 in a JPEG.
    """

    size: tuple[int, int]
    mode: str
    orientation: int
    depth: int = 8


def read_image(path: str | Path) -> np.ndarray:
    """The image, (H, W, 3) uint8 RGB."""
    return decode_image(read_bytes(path), path)


def read_raw_label(path: str | Path) -> np.ndarray:
    """The ids as stored, (H, W) uint8, or uint16 from a 16-bit PNG."""
    return decode_raw_label(read_bytes(path), path)


def read_header(path: str | Path) -> Header:
    """The header, without reading the pixels."""
    with os_errors_as(DataError, path), open_regular(path) as file:
        return _header(file, path)


def read_bytes(path: str | Path) -> bytes:
    """The whole file; an empty file is refused."""
    with os_errors_as(DataError, path), open_regular(path) as file:
        data = file.read()
    if not data:
        raise DataError(f"{printable(path)}: the file is empty")
    return data


def decode_header(data: bytes, path: str | Path, *, max_pixels: int = MAX_PIXELS) -> Header:
    """`read_header` of `data`."""
    return _header(io.BytesIO(data), path, max_pixels)


def decode_image(data: bytes, path: str | Path, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """`read_image` of `data`."""
    header = decode_header(data, path, max_pixels=max_pixels)
    if header.mode in ("CMYK", "YCCK"):
        raise DataError(f"{printable(path)}: the image is CMYK; convert it to RGB")
    image = decode_by_opencv(data, path, cv2.IMREAD_COLOR_RGB)
    if image.shape[:2] != header.size:
        raise DataError(f"{printable(path)}: damaged image: its header promises other pixels")
    return image


def decode_by_opencv(data: bytes, path: str | Path, flags: int) -> np.ndarray:
    """The pixels of a PNG or JPEG as `flags` of cv2.imdecode ask; a damaged file is refused."""
    if data.startswith(_PNG):
        _check_png(data, path)
    elif data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda"):
        raise DataError(f"{printable(path)}: the JPEG is cut off: its end marker is missing")
    try:
        # imread returns half an image for a damaged JPEG; imdecode returns None.
        flags |= cv2.IMREAD_IGNORE_ORIENTATION
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:
        raise DataError(f"{printable(path)}: damaged image: {error.err}") from error
    if image is None:
        raise DataError(f"{printable(path)}: damaged image: the pixels cannot be decoded")
    return image


def decode_raw_label(data: bytes, path: str | Path) -> np.ndarray:
    """`read_raw_label` of `data`."""
    with _opened_label(data, path) as (image, depth):
        raw = np.array(image)
    if problem := label_mode_problem(image.mode, "ids"):
        raise DataError(f"{printable(path)}: {problem}")
    if image.mode == "L" and depth in _GREY_STEP:
        return raw // np.uint8(_GREY_STEP[depth])
    return raw.astype(np.uint8 if depth <= 8 else np.uint16, copy=False)


def decode_palette(data: bytes, path: str | Path) -> list[tuple[int, int, int]]:
    """The colours of a label's indices, RGB 0..255; empty if the label has no palette."""
    with _opened_label(data, path) as (image, _):
        return palette_of(image)


def palette_of(image: Image.Image) -> list[tuple[int, int, int]]:
    """The colours of the indices of an opened image, RGB 0..255; empty without a palette."""
    values = (image.getpalette() or []) if image.mode == "P" else []
    return list(zip(values[::3], values[1::3], values[2::3], strict=True))


def decode_colors(data: bytes, path: str | Path) -> np.ndarray:
    """The colours of a label, (H, W, 3) uint8 RGB; a pixel that is not opaque is an error."""
    with _opened_label(data, path) as (image, depth):
        if image.mode not in _COLOR_MODES or depth > 8:
            found = f"{depth}-bit {image.mode}"
            raise DataError(f"{printable(path)}: the label is {found}; expected 8-bit RGB colours")
        if image.mode not in ("RGBA", "LA") and "transparency" not in image.info:
            return np.array(image.convert("RGB"))
        pixels = np.array(image.convert("RGBA"))
    clear = int(np.count_nonzero(pixels[..., 3] != 255))
    if clear:
        raise DataError(
            f"{printable(path)}: {clear} pixels are transparent; "
            "give every pixel of a label an opaque colour"
        )
    return pixels[..., :3]


@contextmanager
def opened(
    file: IO[bytes],
    path: str | Path,
    formats: Sequence[str] = ("PNG", "JPEG"),
    max_pixels: int = MAX_PIXELS,
) -> Iterator[Image.Image]:
    """The image in `file`, not yet decoded; what Pillow raises in the body becomes a DataError."""
    try:
        with Image.open(file, formats=formats) as image:
            # Pillow only warns up to twice its limit.
            if image.width * image.height > max_pixels:
                raise _too_large(path, max_pixels)
            yield image
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(path, max_pixels) from error
    except UnidentifiedImageError as error:  # its text names a Python object
        raise DataError(f"{printable(path)}: not a {' or '.join(formats)} image") from error
    except Exception as error:  # Pillow's parsers raise a dozen kinds on damaged bytes
        raise DataError(f"{printable(path)}: damaged image: {error}") from error


def exif_orientation(image: Image.Image) -> int:
    """The EXIF orientation of an opened image, 1 to 8; 1 if it is upright or says nothing.

    Pixels are not decoded, so EXIF behind the pixels of a PNG is not seen.
    """
    if image.format == "PNG" and not _PNG_EXIF & image.info.keys():
        return 1  # getexif would decode the pixels
    try:
        orientation = int(image.getexif().get(EXIF_ORIENTATION, 1))
    except Exception:  # Pillow raises a dozen kinds for damaged EXIF; the pixels may be good
        return 1
    return orientation if 1 <= orientation <= 8 else 1


def label_mode_problem(mode: str, label_format: str) -> str:
    """Why a label of Pillow's `mode` cannot be read in this format; empty if it can."""
    if label_format == "colors":
        return "" if mode in _COLOR_MODES else f"the label is {mode}; expected 8-bit RGB colours"
    if mode in _ID_MODES:
        return ""
    return (
        f"the label is {mode}, expected one channel of class ids; for labels in colours give each "
        "class its `color` in the class file and set data.label_format: colors"
    )


def _header(file: IO[bytes], path: str | Path, max_pixels: int = MAX_PIXELS) -> Header:
    with opened(file, path, max_pixels=max_pixels) as image:
        orientation = exif_orientation(image)
        depth = 8
        if image.format == "PNG":
            file.seek(PNG_DEPTH_AT)
            depth = file.read(1)[0]
        return Header((image.height, image.width), image.mode, orientation, depth)


def _too_large(path: str | Path, max_pixels: int) -> DataError:
    return DataError(f"{printable(path)}: more than {max_pixels:,} pixels; cut it into tiles")


@contextmanager
def _opened_label(data: bytes, path: str | Path) -> Iterator[tuple[Image.Image, int]]:
    """A PNG whose bytes are intact, not yet decoded, and its bit depth."""
    if not data.startswith(_PNG):
        raise DataError(
            f"{printable(path)}: the label is not a PNG file; other formats may change its ids"
        )
    _check_png(data, path)
    with opened(io.BytesIO(data), path) as image:
        yield image, data[PNG_DEPTH_AT]


def _check_png(data: bytes, path: str | Path) -> None:
    """Refuses a PNG that is cut off or fails a checksum, which decoders do not notice.

    Pillow decodes pixels without their checksums, so a flipped bit would become another label.
    OpenCV allocates as much memory as a chunk claims: 4 GB for a file of 160 bytes.
    """
    view, start, kind = memoryview(data), len(_PNG), b""
    while kind != b"IEND":
        if start + _PNG_CHUNK_FRAME > len(data):
            raise DataError(f"{printable(path)}: damaged image: the end of the file is missing")
        length, kind = struct.unpack_from(">I4s", data, start)
        end = start + _PNG_CHUNK_FRAME + length
        if end > len(data):
            raise DataError(f"{printable(path)}: damaged image: it ends within a chunk {kind!r}")
        # Of kind and content.
        if zlib.crc32(view[start + 4 : end - 4]) != int.from_bytes(view[end - 4 : end]):
            raise DataError(f"{printable(path)}: damaged image: wrong checksum in chunk {kind!r}")
        start = end
