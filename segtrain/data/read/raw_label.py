"""What label files hold before a class file gives it a meaning: ids or colours.

Labels are of any format that keeps every number. Ids are the stored numbers: palette indices, not
palette colours, and grey levels at their own bit depth. Colours are used only if the config says
so. A grey file that was saved as RGB, with three equal channels, is a file of ids.

Every function raises DataError, with the name of the file.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from segtrain.data.read import decode, image_formats
from segtrain.data.read.decode import MAX_PIXELS
from segtrain.data.read.find import Window
from segtrain.data.read.image_formats import Info
from segtrain.errors import DataError
from segtrain.text import printable

_MAX_ID = 65535
_COLOR_WORDS = (
    "for labels in colours give each class its `color` in the class file and set "
    "data.label_format: colors"
)


def read_raw_label(
    path: str | Path, window: Window | None = None, *, content: bytes | None = None
) -> np.ndarray:
    """The ids as stored, (H, W) uint8, or uint16 if the file has room for more.

    window: the part to read of a raster; None: the whole label.
    content: the bytes of the file; None: they are to be read.
    """
    file = _opened(path, problem_of_ids, window, content)
    pixels, info = with_no_data_id(file.pixels(), file.info.no_data), file.info
    raw = np.ascontiguousarray(pixels[..., 0])
    # A grey label that was saved as RGB has three equal channels, and its ids are intact.
    if (pixels[..., 1 : info.channels - info.alpha] != pixels[..., :1]).any():
        what = f"the label is RGB, expected one channel of class ids; {_COLOR_WORDS}"
        raise DataError(f"{printable(path)}: {what}")
    if info.alpha:
        # For its error alone: the ids are in the first channel.
        decode.opaque(pixels, path)
    if raw.dtype in (np.uint8, np.uint16):
        return raw
    low, high = raw.min(), raw.max()
    if not (low >= 0 and high <= _MAX_ID and (raw == np.trunc(raw)).all()):  # also of NaN
        what = f"{raw.dtype} from {low} to {high}, expected whole numbers of 0..{_MAX_ID}"
        repair = "give pixels to ignore an id, and list it under ignore_ids in the class file"
        raise DataError(f"{printable(path)}: the label holds {what}; {repair}")
    # The smaller type where it is enough: ids of 8 bits are looked up faster.
    return raw.astype(np.uint8 if high <= 255 else np.uint16)


def marked_value(no_data: float | None) -> float | None:
    """The value by which a label has the pixels that GDAL_NODATA marks; None: it marks none."""
    if no_data is None or (0 <= no_data <= _MAX_ID and no_data == int(no_data)):
        return no_data
    return _MAX_ID


def with_no_data_id(stored: np.ndarray, no_data: float | None) -> np.ndarray:
    """The pixels of a label with 65535 where they are marked by a number that can be no id.

    GDAL_NODATA is -1 or -9999 in many labels of signed numbers or floats, or not a number.
    """
    if marked_value(no_data) == no_data:
        return stored
    # NaN equals nothing, not even itself.
    missing = np.isnan(stored) if np.isnan(no_data) else stored == stored.dtype.type(no_data)
    # 65535 has no place in int16, which such labels often are.
    wide = np.float64 if stored.dtype.kind == "f" else np.int64
    return np.where(missing, wide(_MAX_ID), stored)


def read_bands(
    path: str | Path, num_bands: int, window: Window | None = None, *, content: bytes | None = None
) -> np.ndarray:
    """The numbers of a label of overlapping classes, (H, W, K) of whole numbers."""
    file = image_formats.open_stored(
        path, window, content=content, max_pixels=MAX_PIXELS, max_channels=num_bands
    )
    if problem := problem_of_bands(file.info, num_bands):
        raise DataError(f"{printable(path)}: {problem}")
    return with_no_data_id(file.pixels(), file.info.no_data)


def read_numbers(
    path: str | Path, num_bands: int, window: Window | None = None, *, content: bytes | None = None
) -> np.ndarray:
    """The numbers of a label without classes, (H, W, num_bands) float32; NaN is no value.

    What GDAL_NODATA marks is NaN, too. Infinite numbers are an error.
    """
    file = image_formats.open_stored(
        path, window, content=content, max_pixels=MAX_PIXELS, max_channels=num_bands
    )
    stored, info = file.pixels(), file.info
    if info.channels != num_bands or info.palette or info.scaling:
        what = SCALED if info.scaling else f"{info.channels} channels, expected {num_bands}"
        raise DataError(f"{printable(path)}: the label has {what}")
    numbers = stored.astype(np.float32)
    if info.no_data is not None:
        # Compared as stored: in float32 another number may round to the same.
        numbers[stored == info.no_data] = np.nan
    if np.isinf(numbers).any():
        raise DataError(
            f"{printable(path)}: the label has infinite numbers; write NaN for no value"
        )
    return numbers


def read_colors(
    path: str | Path, window: Window | None = None, *, content: bytes | None = None
) -> np.ndarray:
    """The colours of a label, (H, W, 3) uint8 RGB; a pixel that is not opaque is an error."""
    file = _opened(path, problem_of_colors, window, content)
    # A PNG may mark colours as transparent without an alpha channel, which this decoder sees.
    if Path(path).suffix.lower() == ".png":
        return decode.decode_png_colors(file.content, path)
    pixels = file.pixels()
    if file.info.palette:
        return image_formats.palette_colors(pixels, path)
    if file.info.alpha:
        pixels = decode.opaque(pixels, path)
    return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels


SCALED = "GDAL's scale or offset makes other numbers of the label's ids; write these numbers"


def problem_of_ids(info: Info) -> str:
    """Why the ids of a label with this header cannot be read; empty if they can."""
    if problem := _problem_of_any(info):
        return problem
    channels = info.channels - info.alpha
    if channels in (1, 3) and not (info.alpha and info.dtype.kind == "f"):
        return ""
    return f"the label has {channels} channels, expected one of class ids"


def problem_of_colors(info: Info) -> str:
    """Why the colours of a label with this header cannot be read; empty if they can."""
    if problem := _problem_of_any(info):
        return problem
    channels = info.channels - info.alpha
    if channels in (1, 3) and info.dtype == np.uint8:
        return ""
    return f"the label has {channels} channels of {info.dtype}; expected 8-bit RGB colours"


def problem_of_bands(info: Info, num_classes: int) -> str:
    """Why a label with this header has no band for each class; empty if it has."""
    if problem := _problem_of_any(info):
        return problem
    if info.channels == num_classes and not info.palette and info.dtype.kind in "bu":
        return ""
    what = "a palette" if info.palette else f"{info.channels} channels of {info.dtype}"
    return f"the label has {what}; expected a band of 8 bits for each of {num_classes} classes"


def _problem_of_any(info: Info) -> str:
    if not info.lossless:
        return "the label is compressed with loss, as JPEG does it, which changes its ids"
    return SCALED if info.scaling else ""


def _opened(
    path: str | Path,
    problem_of: Callable[[Info], str],
    window: Window | None,
    content: bytes | None,
) -> image_formats.StoredFile:
    file = image_formats.open_stored(path, window, content=content, max_pixels=MAX_PIXELS)
    if problem := problem_of(file.info):
        raise DataError(f"{printable(path)}: {problem}")
    return file
