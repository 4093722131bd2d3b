"""PNG and JPEG, decoded with care: the formats in which most data sets come. And what the readers
of all formats share: the header that they give, and how damage is named.

- Sizes are checked in the header before any allocation: at most `MAX_PIXELS`.
- Pixels count as they are stored. The EXIF orientation is ignored: a PNG label has none, and
  rotating only the image would misalign the two.
- A file that ends early or fails its checksums is refused. JPEG has no checksums, so a flipped bit
  in a JPEG goes unnoticed, unless libjpeg prints a line about it: `data check` says of what.

Images are decoded by OpenCV, class ids by Pillow. Every function raises DataError, with the name of
the file, if the file is missing, damaged, too large, or of a refused kind. `decode_…` take bytes
that are already read; their `path` is for messages.
"""

import io
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Literal, NamedTuple

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


Palette = list[tuple[int, int, int]]


Scaling = tuple[tuple[Literal["scale", "offset"], float, int], ...]  # of a band, from 0
_printing = Lock()


class Info(NamedTuple):
    """What a file says before its pixels.

    size: (height, width). channels: with alpha; 1 for a palette file, whose pixels are indices.
    dtype: of a stored sample, in native byte order. alpha: whether the last channel is marked so.
    depth: bits of a sample, such as 12 in a TIFF of uint16. orientation: of EXIF, 1 is upright.
    lossless: whether the format keeps every number, as class ids need. no_data: the number by which
    a TIFF marks pixels without a value (GDAL_NODATA). geo_tags: whether tags of a TIFF say
    where on the map it lies. masked: whether a TIFF says by a mask of its own where it has values.
    scaling: the scales other than 1 and offsets other than 0 by which a TIFF says that its numbers
    count, as GDAL writes them. bands: the names that a TIFF gives its channels, as GDAL writes
    them; (): it does not name all.
    """

    size: tuple[int, int]
    channels: int
    dtype: np.dtype
    palette: bool = False
    alpha: bool = False
    depth: int = 8
    orientation: int = 1
    lossless: bool = True
    no_data: float | None = None
    geo_tags: bool = False
    masked: bool = False
    scaling: Scaling = ()
    bands: tuple[str, ...] = ()


@contextmanager
def printed_lines(begin: str | tuple[str, ...] = "") -> Iterator[list[str]]:
    """At the end it holds the lines that libraries have printed to standard error meanwhile.

    One thread at a time, because the whole process prints there. begin: how such lines begin; all
    others, of other threads, go where they were meant to go.
    """
    lines: list[str] = []
    with _printing, TemporaryFile() as file:
        # The descriptor, not sys.stderr: libraries in C write to it.
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        for line in file.read().decode(errors="replace").splitlines(keepends=True):
            # The progress bar of another thread ends without a newline.
            if line.endswith("\n") and line.startswith(begin):
                lines.append(line.removesuffix("\n"))
            else:
                os.write(2, line.encode())


def read_bytes(path: str | Path) -> bytes:
    """The whole file; an empty file is refused."""
    with os_errors_as(DataError, path), open_regular(path) as file:
        data = file.read()
    if not data:
        raise DataError(f"{printable(path)}: the file is empty")
    return data


def decode_by_opencv(data: bytes, path: str | Path, flags: int) -> np.ndarray:
    """The pixels of a PNG or JPEG as `flags` of cv2.imdecode ask; a damaged file is refused."""
    if data.startswith(_PNG):
        _check_png(data, path)
    # The last end of an image must stand behind the last start of a scan.
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


def decode_png_ids(data: bytes, path: str | Path) -> np.ndarray:
    """What a PNG of one channel stores, (H, W) uint8, or uint16 of 16 bits.

    Palette indices, not palette colours, and grey levels at their own bit depth.
    """
    with _opened_png(data, path) as (image, depth):
        raw = np.array(image)
    if image.mode == "L" and depth in _GREY_STEP:
        return raw // np.uint8(_GREY_STEP[depth])
    return raw.astype(np.uint8 if depth <= 8 else np.uint16, copy=False)


def decode_png_colors(data: bytes, path: str | Path) -> np.ndarray:
    """The colours of an 8-bit PNG, (H, W, 3) uint8 RGB; a pixel that is not opaque is an error."""
    with _opened_png(data, path) as (image, _):
        if image.mode not in ("RGBA", "LA") and "transparency" not in image.info:
            return np.array(image.convert("RGB"))
        pixels = np.array(image.convert("RGBA"))
    return opaque(pixels, path)


def opaque(pixels: np.ndarray, path: str | Path) -> np.ndarray:
    """Pixels (H, W, C) without their last channel, alpha; DataError: one is not opaque."""
    clear = int(np.count_nonzero(pixels[..., -1] != np.iinfo(pixels.dtype).max))
    if clear:
        raise DataError(
            f"{printable(path)}: {clear} pixels are transparent; "
            "give every pixel of a label an opaque colour"
        )
    return pixels[..., :-1]


def checked_pixels(pixels: np.ndarray, info: Info, path: str | Path) -> np.ndarray:
    """What a decoder gave, as (H, W, C); DataError: the header promises something else.

    A decoder that expands a palette would make other numbers of it.
    """
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    if (pixels.shape, pixels.dtype) != ((*info.size, info.channels), info.dtype):
        raise DataError(f"{printable(path)}: damaged image: its header promises other pixels")
    return pixels


def number_dtype(dtype: np.dtype) -> np.dtype:
    """`dtype` in native byte order; truth values are bytes."""
    return np.dtype(np.uint8) if dtype.kind == "b" else dtype.newbyteorder("=")


# What decoders raise with a text for people; other texts are those of Python, such as "list index
# out of range".
_SAYING = OSError, RuntimeError, ValueError, SyntaxError, MemoryError


@contextmanager
def damage_named(path: str | Path, what: str = "image") -> Iterator[None]:
    """Raises what a decoder raises inside as a DataError of one line that names the file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # decoders raise a dozen kinds on damaged bytes
        says = isinstance(error, _SAYING) or type(error).__module__ != "builtins"
        reason = printable(str(error).partition("\n")[0]) if says else ""
        reason = reason or "it ends early, or its header contradicts itself"
        raise DataError(f"{printable(path)}: damaged {what}: {reason}") from error


@contextmanager
def opened(file: IO[bytes], path: str | Path, formats: Sequence[str]) -> Iterator[Image.Image]:
    """The image in `file`, not yet decoded, of at most MAX_PHOTO_PIXELS.

    What Pillow raises in the body becomes a DataError.
    """
    with damage_named(path):
        try:
            with Image.open(file, formats=formats) as image:
                # Pillow only warns up to twice its limit.
                if image.width * image.height > MAX_PHOTO_PIXELS:
                    raise too_large(path, MAX_PHOTO_PIXELS)
                yield image
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise too_large(path, MAX_PHOTO_PIXELS) from error
        except UnidentifiedImageError as error:  # its text names a Python object
            raise DataError(f"{printable(path)}: not a {' or '.join(formats)} image") from error


def exchanges_sides(orientation: int) -> bool:
    """Whether EXIF's orientation turns the picture by a quarter."""
    return orientation in (5, 6, 7, 8)


def to_stored(upright: np.ndarray, orientation: int) -> np.ndarray:
    """The pixels (H, W, ...) as stored of a picture that EXIF's orientation has made `upright`.

    >>> to_stored(np.array([[1, 2, 3]]), 6).tolist()  # shown turned by a quarter to the right
    [[3], [2], [1]]
    """
    if orientation in (2, 4):
        return np.flip(upright, 1 if orientation == 2 else 0)
    if orientation in (5, 7):
        upright = np.rot90(upright, 2) if orientation == 7 else upright
        return np.swapaxes(upright, 0, 1)
    return np.rot90(upright, {3: 2, 6: 1, 8: -1}.get(orientation, 0))


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


def too_large(path: str | Path, max_pixels: int) -> DataError:
    """The error of an image of more pixels."""
    return DataError(f"{printable(path)}: more than {max_pixels:,} pixels; cut it into tiles")


@contextmanager
def _opened_png(data: bytes, path: str | Path) -> Iterator[tuple[Image.Image, int]]:
    """A PNG whose bytes are intact, not yet decoded, and its bit depth."""
    _check_png(data, path)
    with opened(io.BytesIO(data), path, ["PNG"]) as image:
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
