"""TIFF by tifffile, which decodes by imagecodecs: headers, pixels, and parts of large files."""

import io
import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from operator import add
from pathlib import Path
from typing import IO, Any

import numpy as np

from segtrain.data.read.decode import (
    Info,
    Palette,
    Scaling,
    checked_pixels,
    damage_named,
    number_dtype,
)
from segtrain.data.read.find import Window
from segtrain.errors import DataError
from segtrain.files import open_regular, os_errors_as
from segtrain.text import MAX_NAME, printable

_BAND_AXES = {"S", "C", "Q", "I"}  # samples, channels, and pages without a meaning of their own
_OME_SIZE = re.compile(r'\bSize([ZT])="0*([1-9]\d*)"')
_OME_FILE = re.compile(r'\bFileName="([^"]*)"')
_REDUCED, _MASK = 1, 4  # bits of NewSubfileType
_MINISWHITE, _MINISBLACK, _RGB, _PALETTE, _YCBCR = 0, 1, 2, 3, 6
_ALPHA_SAMPLES = {1, 2}  # values of ExtraSamples
# None, CCITT, LZW, deflate, PackBits, LZMA and zstd: what keeps every number.
_LOSSLESS = {1, 2, 3, 4, 5, 8, 32773, 32946, 34925, 50000}
# ModelTiepoint, ModelTransformation and GeoKeyDirectory (OGC 19-008r4).
_GEO_TAGS = (33922, 34264, 34735)
_JPEG = {6, 7, 33007}  # whose decoder makes RGB of YCbCr
# It logs what it also raises, what `check_pages` raises, and oddities that do not matter.
logging.getLogger("tifffile").setLevel(logging.CRITICAL)


@contextmanager
def opened_tiff(file: IO[bytes], path: str | Path) -> Iterator[Any]:
    """The only picture of a TIFF as tifffile's TiffPageSeries, whose `keyframe` is its first page.

    Pictures that are smaller copies of it, and masks, do not count.
    """
    import tifffile

    file.seek(0)
    with damage_named(path, "TIFF"), tifffile.TiffFile(file, is_ome=False) as tiff:
        check_pages(tiff, path)
        pictures = [s for s in tiff.series if not s.keyframe.subfiletype & (_REDUCED | _MASK)]
        page = pictures[0].keyframe
        # An axis of length 1 makes no further picture.
        axes = "".join(a for a, n in zip(pictures[0].axes, pictures[0].shape, strict=True) if n > 1)
        others = set(axes) - {"Y", "X"}
        # The pages of OME would be taken for bands: its axes are not read here.
        slices = {
            a for a, n in _OME_SIZE.findall(page.description if page.is_ome else "") if int(n) > 1
        }
        problem = ""
        if slices | others & {"Z", "T"}:
            which = " and ".join(sorted(slices | others & {"Z", "T"}))
            problem = f"a stack of slices ({which}); segtrain data import FILE makes images of them"
        elif len(pictures) > 1 or len(others) > 1 or others - _BAND_AXES:
            shape = "x".join(map(str, pictures[0].shape))
            shown = f"{len(pictures)}" if len(pictures) > 1 else f"{shape} ({pictures[0].axes})"
            problem = f"the TIFF has several pictures: {shown}; store each in a file of its own"
        elif page.photometric not in (_MINISWHITE, _MINISBLACK, _RGB, _PALETTE) and not (
            page.photometric == _YCBCR and page.compression in _JPEG
        ):
            problem = f"the TIFF has colours {page.photometric.name}; convert it to RGB"
        elif page.dtype is None or page.dtype.kind not in "buif":
            problem = "expected whole numbers or floats of one type in all channels"
        if problem:
            raise DataError(f"{printable(path)}: {problem}")
        yield pictures[0]


def check_pages(tiff: Any, path: str | Path) -> None:
    """DataError: pages are missing at the end of a file that tifffile has opened.

    tifffile only logs that, and what is left looks like a picture of fewer channels or slices.
    """
    pages, size = tiff.pages, tiff.tiff.offsetsize
    tiff.filehandle.seek(pages.next_page_offset)  # found by going through all pages
    if tiff.filehandle.read(size) != bytes(size):  # 0 says that no page follows
        problem = "a page that is to follow is not there; copy it again"
    elif (said := _num_said(tiff)) > len(pages):
        found = f"its description says {said} pages, and it has {len(pages)}"
        problem = f"{found}; copy it again, or write it without that description"
    else:
        return
    raise DataError(f"{printable(path)}: the TIFF is cut off: {problem}")


def _num_said(tiff: Any) -> int:
    """How many pages ImageJ or OME says that a file has, at least; 0: neither does."""
    page = tiff.pages.first
    if page.is_imagej:
        # ImageJ may store all behind the first page: tifffile then sees whether they are there.
        is_there = tiff.series[0].kind == "imagej" and page.is_final
        said = 0 if is_there else (tiff.imagej_metadata or {}).get("images", 0)
    # A set of files of OME has the same text in each.
    elif not page.is_ome or len({*_OME_FILE.findall(page.description)}) > 1:
        said = 0
    else:
        pixels = re.search(r"<(?:\w+:)?Pixels\b[^>]*>", page.description)
        said = math.prod(map(int, re.findall(r'\bSize[CZT]="(\d+)"', pixels[0] if pixels else "")))
    # Both may count the samples of a page as channels.
    return said // page.samplesperpixel


# An item of GDAL_METADATA: <Item name="SCALE" sample="0" role="scale">0.5</Item>
_NAME = re.compile(r'sample="(\d+)" role="description">([^<]+)<', re.IGNORECASE)
_SCALING = re.compile(
    r'(?:sample="(\d+)"[^>]*)?role="(scale|offset)">\s*([-+\d.]+(?:e[-+]?\d+)?)\s*<', re.IGNORECASE
)


def read_header(file: IO[bytes], path: str | Path) -> Info:
    """As `image_formats.read_info`."""
    with opened_tiff(file, path) as picture:
        page, end = picture.keyframe, file.seek(0, io.SEEK_END)
        for starts, counts in ((x.dataoffsets, x.databytecounts) for x in picture.pages):
            # tifffile would fill the rest with zeros.
            if len(starts) != len(counts) or max(map(add, starts, counts), default=0) > end:
                raise DataError(f"{printable(path)}: the TIFF is cut off: pixels are missing")
        sizes = dict(zip(picture.axes, picture.shape, strict=True))
        # `opened_tiff` has refused other axes than those of bands.
        channels = math.prod(sizes.values()) // (sizes["Y"] * sizes["X"])
        orientation = page.tags.valueof("Orientation", 1)
        return Info(
            (sizes["Y"], sizes["X"]),
            channels,
            number_dtype(page.dtype),
            page.photometric == _PALETTE,
            bool(page.extrasamples) and page.extrasamples[-1] in _ALPHA_SAMPLES,
            page.bitspersample,
            orientation if orientation in range(1, 9) else 1,
            page.compression in _LOSSLESS,
            _no_data(page),
            any(code in page.tags for code in _GEO_TAGS),
            any(series.keyframe.subfiletype & _MASK for series in page.parent.series),
            _scaling(page),
            _band_names(page, channels),
        )


def _scaling(page: Any) -> Scaling:
    """The `Info.scaling`."""
    matches = _SCALING.findall(str(page.tags.valueof("GDAL_METADATA")))
    items = [(role.lower(), float(number), int(band or 0)) for band, role, number in matches]
    # True is 1 and False is 0: a scale of 1 and an offset of 0 change nothing, and are left out.
    return tuple(item for item in items if item[1] != (item[0] == "scale"))


def _band_names(page: Any, channels: int) -> tuple[str, ...]:
    """The `Info.bands`."""
    matches = _NAME.findall(str(page.tags.valueof("GDAL_METADATA")))
    names = {int(i): printable(unescape(name).strip(), MAX_NAME) for i, name in matches}
    return tuple(names.values()) if [*names] == [*range(channels)] else ()


def _no_data(page: Any) -> float | None:
    """The number that marks pixels without a value, as `channels_last` gives it; None: no number.

    Also None of one that the type of the pixels does not have.
    """
    try:
        number = float(page.tags.valueof("GDAL_NODATA"))
    except (TypeError, ValueError):
        return None
    if page.dtype.kind == "f":
        return number
    limits = np.iinfo(number_dtype(page.dtype))
    if not (limits.min <= number <= limits.max and number.is_integer()):
        return None
    return _white_high(page, number)


def _white_high(page: Any, values: Any) -> Any:
    # White is stored as 0. Pillow and OpenCV invert such files, too.
    is_inverted = page.photometric == _MINISWHITE and page.dtype.kind in "bu"
    return (1 << page.bitspersample) - 1 - values if is_inverted else values


def read_pixels(file: IO[bytes], path: str | Path, _: Info) -> np.ndarray:
    """As `image_formats.read_stored`."""
    with opened_tiff(file, path) as picture:
        # One thread: callers read several files at a time already.
        return channels_last(picture.asarray(maxworkers=1), picture)


def channels_last(pixels: np.ndarray, picture: Any, axes: str = "") -> np.ndarray:
    """Pixels of a TIFF with rows and columns first, white high, in native byte order.

    axes: of `pixels`, in tifffile's letters; empty: those of the picture.
    """
    axes = axes or picture.axes
    others = [i for i, axis in enumerate(axes) if axis not in "YX"]
    pixels = pixels.transpose([axes.index("Y"), axes.index("X"), *others])
    pixels = pixels.astype(number_dtype(pixels.dtype), copy=False)
    return _white_high(picture.keyframe, pixels)


def read_colors(file: IO[bytes], path: str | Path) -> Palette:
    """As `image_formats.read_palette`."""
    with opened_tiff(file, path) as picture:
        colors = picture.keyframe.colormap  # (3, 2^bits) uint16
        return [] if colors is None else [tuple(c) for c in (colors >> 8).T.tolist()]


def read_stored_window(path: str | Path, window: Window, info: Info) -> np.ndarray:
    """As `read_stored`, of this part of a TIFF with this header: (height, width, C).

    Reads no more than it must.
    """
    with os_errors_as(DataError, path), open_regular(path) as file:
        rows = slice(window.top, window.top + window.height)
        columns = slice(window.left, window.left + window.width)
        with opened_tiff(file, path) as picture:
            # Set where the pixels lie together and uncompressed: a map of the file reads the window
            # alone. Else the tiles or strips are decoded that the window touches.
            if picture.dataoffset is not None:
                order = picture.keyframe.parent.byteorder
                dtype = np.dtype(picture.dtype).newbyteorder(order)
                stored = np.memmap(file, dtype, "r", picture.dataoffset, picture.shape)
                place = {"Y": rows, "X": columns}
                part = stored[tuple(place.get(axis, slice(None)) for axis in picture.axes)]
                pixels = channels_last(np.array(part), picture)
            else:
                parts = [_page_window(page, file, rows, columns) for page in picture.pages]
                pixels = channels_last(np.concatenate(parts, axis=2), picture, axes="YXS")
        part_info = info._replace(size=(window.height, window.width))
        return checked_pixels(pixels, part_info, path)


def _page_window(page: Any, file: Any, rows: slice, columns: slice) -> np.ndarray:
    """The part (h, w, samples) of a page, from the tiles or strips that it touches."""
    key = page.keyframe
    size = (rows.stop - rows.start, columns.stop - columns.start)
    # A sparse file lacks tiles, whose pixels are these.
    pixels = np.full((*size, key.samplesperpixel), key.nodata, key.dtype)
    tables = {}
    if page.jpegtables is not None or key.jpegheader is not None:
        # Tiles in JPEG share tables that stand once in the page.
        tables = {"jpegtables": page.jpegtables, "jpegheader": key.jpegheader}
    for index in _segments(key, rows, columns):
        offset, count = page.dataoffsets[index], page.databytecounts[index]
        if not count:  # a sparse file: nothing was written here
            continue
        file.seek(offset)
        data = file.read(count)
        if len(data) < count:
            raise DataError(f"{printable(file.name)}: the TIFF is cut off")
        segment, (plane, _, top, left, _), (_, height, width, samples) = key.decode(
            data, index, **tables
        )
        y, end = max(top, rows.start), min(top + height, rows.stop)
        x, right = max(left, columns.start), min(left + width, columns.stop)
        pixels[
            y - rows.start : end - rows.start,
            x - columns.start : right - columns.start,
            plane : plane + samples,
        ] = segment[0, y - top : end - top, x - left : right - left]
    return pixels


def _segments(page: Any, rows: slice, columns: slice) -> Iterator[int]:
    """The indices of the tiles or strips of a page that these rows and columns touch."""
    height, width = page.imagelength, page.imagewidth
    tile = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, width)
    down, across = math.ceil(height / tile[0]), math.ceil(width / tile[1])
    planes = page.samplesperpixel if page.planarconfig == 2 else 1
    for plane in range(planes):
        for y in range(rows.start // tile[0], (rows.stop - 1) // tile[0] + 1):
            for x in range(columns.start // tile[1], (columns.stop - 1) // tile[1] + 1):
                # Tiles are numbered row by row, and one plane after the other.
                yield (plane * down + y) * across + x
