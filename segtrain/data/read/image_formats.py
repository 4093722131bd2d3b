"""The table of readers: which files segtrain opens, and what is stored in them.

Nothing is converted here: the pixels are those of the file, in its dtype, all channels in its
order. `read.image` makes images of them, `read.raw_label` class ids.

- A file holds one picture. An animation, and a TIFF with several pictures, are refused. Pages of a
  TIFF that differ in nothing but their pixels are the bands of one picture.
- NPY and NPZ hold one array (H, W) or (H, W, C). (C, H, W) is understood where only the first axis
  can be the channels: at most `MAX_CHANNELS` there, and more in the last.
- Grey levels of 1, 2 and 4 bits are the stored numbers, 0 .. 2^bits - 1, not spread over 0..255.
- The EXIF orientation is not applied.
- TIFFs that store white as 0 are inverted, as Pillow, OpenCV and viewers do.

Every function raises DataError, with the name of the file, if the file is missing, damaged, cut off
or of a refused kind. Sizes come from the header, before any allocation.
"""

import io
import math
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import cv2
import numpy as np

from segtrain.data.read import decode, tiff
from segtrain.data.read.decode import (
    MAX_PHOTO_PIXELS,
    Info,
    Palette,
    checked_pixels,
    damage_named,
    number_dtype,
    opened,
    read_bytes,
    too_large,
)
from segtrain.data.read.find import Window
from segtrain.errors import DataError
from segtrain.files import open_regular, os_errors_as
from segtrain.text import printable

MAX_CHANNELS = 16


class Reader(NamedTuple):
    """Functions of (open file, path for messages); `palette` of formats that have some."""

    info: Callable[[IO[bytes], str | Path], Info]
    stored: Callable[[IO[bytes], str | Path, Info], np.ndarray]
    palette: Callable[[IO[bytes], str | Path], Palette] = lambda *_: []


def read_info(path: str | Path) -> Info:
    """The header of the file, without reading its pixels."""
    with os_errors_as(DataError, path), open_regular(path) as file:
        return reader_of(path).info(file, path)


class StoredFile(NamedTuple):
    """A file, or a window of a raster, of which the header is read.

    content: the bytes; None: of a window, which reads no more than it must.
    """

    path: str | Path
    info: Info
    content: bytes | None
    window: Window | None

    def pixels(self) -> np.ndarray:
        """The pixels as stored, (H, W, C) with C >= 1; indices of a palette file."""
        if self.content is None:
            return tiff.read_stored_window(self.path, self.window, self.info)
        pixels = reader_of(self.path).stored(io.BytesIO(self.content), self.path, self.info)
        return checked_pixels(pixels, self.info, self.path)


def open_stored(
    path: str | Path,
    window: Window | None = None,
    *,
    content: bytes | None = None,
    max_pixels: int = MAX_PHOTO_PIXELS,
    max_channels: int = MAX_CHANNELS,
) -> StoredFile:
    """The file at `path`, of which more than `max_pixels` are refused; or this window of a TIFF.

    content: the bytes of the file; None: they are to be read.
    """
    if window is None:
        content = read_bytes(path) if content is None else content
        info = reader_of(path).info(io.BytesIO(content), path)
    else:
        content, info = None, read_info(path)
    if info.masked:  # its pixels would be trained as what they are not
        raise DataError(
            f"{printable(path)}: a mask in the TIFF says where it has values, and is not read; "
            "write such pixels as GDAL_NODATA, as gdalwarp -dstnodata does"
        )
    if window is not None:
        return StoredFile(path, info, None, window)
    if math.prod(info.size) > max_pixels:
        raise too_large(path, max_pixels)
    # Labels of overlapping classes may have more bands than images have channels.
    if info.channels > max(MAX_CHANNELS, max_channels):
        what = f"{info.channels} channels; at most {max_channels} are read"
        raise DataError(f"{printable(path)}: {what}")
    return StoredFile(path, info, content, None)


def read_stored(path: str | Path) -> np.ndarray:
    """All pixels as stored, (H, W, C) with C >= 1; indices of a palette file."""
    return open_stored(path).pixels()


def read_palette(path: str | Path) -> Palette:
    """The colours of the indices, RGB 0..255; empty if the file has no palette."""
    with os_errors_as(DataError, path), open_regular(path) as file:
        return reader_of(path).palette(file, path)


def palette_colors(indices: np.ndarray, path: str | Path) -> np.ndarray:
    """The colours (H, W, 3) uint8 of the palette file at `path` with these indices (H, W, 1)."""
    palette = read_palette(path)
    if (highest := int(indices.max())) >= len(palette):
        raise DataError(f"{printable(path)}: damaged image: index {highest} has no colour")
    return np.array(palette, np.uint8)[indices[..., 0]]


def is_png_or_jpeg(path: str | Path) -> bool:
    """Whether the file is read by `segtrain.data.read.decode`."""
    return reader_of(path) is _PNG_OR_JPEG


def reader_of(path: str | Path) -> Reader:
    """The reader for the suffix of `path`; DataError: there is none."""
    reader = READERS.get(os.path.splitext(path)[1].lower())
    if reader is None:
        raise DataError(f"{printable(path)}: expected a file {' '.join(SUFFIXES)}")
    return reader


# Formats that Pillow reads. What OpenCV reads better is taken from it: JPEG with the bits that
# training has always had, and 16-bit colours, which Pillow cuts to 8 bits.

_PNG_JPEG = ("PNG", "JPEG")
_STORED_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "RGBX", "I;16", "I;16B", "I")


def _png_or_jpeg(file: IO[bytes], path: str | Path, info: Info) -> np.ndarray:
    data = file.read()
    if info.channels == 3:
        depth = cv2.IMREAD_ANYDEPTH if info.depth == 16 else 0
        return decode.decode_by_opencv(data, path, depth | cv2.IMREAD_COLOR_RGB)
    # A grey JPEG.
    if not info.lossless:
        return decode.decode_by_opencv(data, path, cv2.IMREAD_GRAYSCALE)
    # Grey and palette files. OpenCV would give the colours of a palette instead of its indices.
    if info.channels == 1:
        return decode.decode_png_ids(data, path)
    bgra = decode.decode_by_opencv(data, path, cv2.IMREAD_UNCHANGED)
    # Of grey with alpha OpenCV makes four channels too, and the three colours are equal.
    return bgra[..., [2, 1, 0, 3] if info.channels == 4 else [0, 3]]


@contextmanager
def _picture(file: IO[bytes], path: str | Path, formats: tuple[str, ...]) -> Iterator[Any]:
    """The only picture of a file that Pillow opens as one of `formats`, not yet decoded.

    Of an animated PNG, and of a JPEG with further pictures, it is the first.
    """
    with opened(file, path, formats) as image:
        frames = 1 if formats == _PNG_JPEG else getattr(image, "n_frames", 1)
        problem = ""
        if frames > 1:
            problem = f"an animation of {frames} pictures; store each in a file of its own"
        elif image.format == "PPM" and image.tile[0][0] != "raw":
            # Pillow would stretch other ranges over the whole type, and with them class ids.
            problem = "expected binary PGM or PPM whose largest value is 255 or 65535"
        elif image.mode not in _STORED_MODES:
            problem = f"the image is {image.mode}; convert it to 8-bit RGB"
        if problem:
            raise DataError(f"{printable(path)}: {problem}")
        yield image


def _pillow_reader(
    *formats: str, stored: Callable[[IO[bytes], str | Path, Info], np.ndarray] | None = None
) -> Reader:
    """The reader of formats that Pillow opens. stored: gives the pixels; None: Pillow does."""

    def info(file: IO[bytes], path: str | Path) -> Info:
        with _picture(file, path, formats) as image:
            mode = "RGB" if image.mode == "RGBX" else image.mode
            size, orientation = (image.height, image.width), decode.exif_orientation(image)
            lossless = image.format in ("PNG", "BMP", "GIF", "PPM")
            depth = 16 if mode[0] == "I" else 1 if mode == "1" else 8
            # Pillow's mode is the same for 2, 4 and 8 bits.
            if image.format == "PNG":
                file.seek(decode.PNG_DEPTH_AT)
                depth = file.read(1)[0]
            elif image.format == "WEBP":
                lossless = _is_lossless_webp(file)
        # A letter for each channel in L, LA, RGB and RGBA; the other modes have one channel.
        channels = len(mode) if mode[0] in "LR" else 1
        dtype = np.dtype(np.uint16 if depth == 16 else np.uint8)
        alpha = mode in ("LA", "RGBA")
        return Info(size, channels, dtype, mode == "P", alpha, depth, orientation, lossless)

    def pixels(file: IO[bytes], path: str | Path, info: Info) -> np.ndarray:
        with _picture(file, path, formats) as image:
            array = np.array(image.convert("RGB") if image.mode == "RGBX" else image)
            return array.astype(info.dtype, copy=False)

    def palette(file: IO[bytes], path: str | Path) -> Palette:
        with _picture(file, path, formats) as image:
            values = (image.getpalette() or []) if image.mode == "P" else []
        return list(zip(values[::3], values[1::3], values[2::3], strict=True))

    return Reader(info, stored or pixels, palette)


def _is_lossless_webp(file: IO[bytes]) -> bool:
    """Whether the pixels are a chunk VP8L; chunks before it are skipped."""
    file.seek(12)
    while len(head := file.read(8)) == 8:
        if head[:3] == b"VP8" and head[:4] != b"VP8X":
            return head[:4] == b"VP8L"
        # RIFF pads a chunk to an even number of bytes, which its size does not count.
        size = int.from_bytes(head[4:], "little")
        file.seek(size + size % 2, io.SEEK_CUR)
    return False


_JPEG2000_START = b"\xff\x4f\xff\x51"  # the markers SOC and SIZ
_JPEG2000_HEADER_BYTES = 1 << 16


def _jpeg2000_info(file: IO[bytes], path: str | Path) -> Info:
    """From the marker SIZ (ISO 15444-1, A.5.1): Pillow does not tell the depth of colours."""
    with opened(file, path, ["JPEG2000"]) as image:
        size, alpha = (image.height, image.width), image.mode in ("LA", "PA", "RGBA")
    file.seek(0)
    head = file.read(_JPEG2000_HEADER_BYTES)
    siz = head[head.find(_JPEG2000_START) + len(_JPEG2000_START) :]
    channels = int.from_bytes(siz[36:38])
    # A byte for each channel: its bits minus 1, and 0x80 where numbers are signed.
    components = siz[38 : 38 + 3 * channels : 3]
    if not components or len(set(components)) != 1 or components[0] >= 16:
        what = "expected channels of one type, unsigned and of at most 16 bits"
        raise DataError(f"{printable(path)}: {what}")
    depth = components[0] + 1
    dtype = np.dtype(np.uint8 if depth <= 8 else np.uint16)
    return Info(size, channels, dtype, alpha=alpha, depth=depth, lossless=False)


def _jpeg2000(file: IO[bytes], path: str | Path, _: Info) -> np.ndarray:
    import imagecodecs

    with damage_named(path):
        return imagecodecs.jpeg2k_decode(file.read())


# NPY and NPZ.


def _npy_info(file: IO[bytes], path: str | Path) -> Info:
    with damage_named(path):
        # Another version is a KeyError, which `damage_named` reports.
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[np.lib.format.read_magic(file)]
        stored, _, dtype = read(file)
    shape = (*stored, 1) if len(stored) == 2 else stored
    if len(shape) != 3 or 0 in shape or dtype.kind not in "buif":
        what = f"expected numbers of shape (H, W) or (H, W, C), found shape {stored}, {dtype}"
        raise DataError(f"{printable(path)}: {what}")
    height, width, channels = (*shape[1:], shape[0]) if _is_channels_first(shape) else shape
    depth = 1 if dtype.kind == "b" else 8 * dtype.itemsize
    return Info((height, width), channels, number_dtype(dtype), depth=depth)


def _is_channels_first(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] <= MAX_CHANNELS < shape[2]


def _npy(file: IO[bytes], path: str | Path, _: Info) -> np.ndarray:
    with damage_named(path):
        pixels = np.lib.format.read_array(file)
    if _is_channels_first(pixels.shape):
        pixels = np.moveaxis(pixels, 0, -1)
    return pixels.astype(number_dtype(pixels.dtype))


@contextmanager
def _only_member(file: IO[bytes], path: str | Path) -> Iterator[IO[bytes]]:
    with damage_named(path), zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        if len(names) != 1:
            shown = ", ".join(printable(name) for name in names[:5])
            what = f"expected one array, found {len(names)}: {shown}; save each as .npy"
            raise DataError(f"{printable(path)}: {what}")
        with archive.open(names[0]) as member:
            yield member


def _npz_info(file: IO[bytes], path: str | Path) -> Info:
    with _only_member(file, path) as member:
        return _npy_info(member, path)


def _npz(file: IO[bytes], path: str | Path, info: Info) -> np.ndarray:
    with _only_member(file, path) as member:
        return _npy(member, path, info)


_PNG_OR_JPEG = _pillow_reader(*_PNG_JPEG, stored=_png_or_jpeg)
_TIFF = Reader(tiff.read_header, tiff.read_pixels, tiff.read_colors)
_PNM = _pillow_reader("PPM")

READERS: dict[str, Reader] = {
    ".png": _PNG_OR_JPEG,
    ".jpg": _PNG_OR_JPEG,
    ".jpeg": _PNG_OR_JPEG,
    ".jfif": _PNG_OR_JPEG,
    ".tif": _TIFF,
    ".tiff": _TIFF,
    ".webp": _pillow_reader("WEBP"),
    ".bmp": _pillow_reader("BMP"),
    ".gif": _pillow_reader("GIF"),
    ".jp2": Reader(_jpeg2000_info, _jpeg2000),
    ".npy": Reader(_npy_info, _npy),
    ".npz": Reader(_npz_info, _npz),
    ".pgm": _PNM,
    ".ppm": _PNM,
}
SUFFIXES = tuple(READERS)
