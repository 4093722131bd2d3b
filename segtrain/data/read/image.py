"""Images in the form of their data set: as many channels as the config says, in one dtype.

- uint8 and uint16 stay what they are; all other numbers become float32, and need
  `data.value_range`. All images of a set have one dtype, and their values one scale.
- Three channels are RGB: grey and palette files become RGB, alpha is dropped. Four channels may be
  RGB and alpha. Grey with alpha is read as grey. Nothing else is added or left out.
- Grey levels of 1, 2 and 4 bits are spread over 0..255.
- Pixels without a value are NaN: what is NaN, infinite or a TIFF's number for no data in a set of
  floats; in a set of whole numbers, pixels where all bands are that number, as GDAL's dataset mask
  has it (0 may be a value of one band). An image of whole numbers that has such pixels is read as
  float32, and `ignore_missing` makes it whole again.

Every function raises DataError, with the name of the file.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from segtrain.config import DataConfig
from segtrain.data.read import decode, image_formats
from segtrain.data.read.decode import MAX_PIXELS, Scaling
from segtrain.data.read.find import Pair, Window
from segtrain.data.read.georeference import is_on_map
from segtrain.data.read.image_formats import Info
from segtrain.errors import DataError
from segtrain.text import first_of, printable
from segtrain.types import IGNORE_INDEX, ignored

ValueRange = tuple[float, float]
Mean = tuple[float, ...]

_UINT8 = np.dtype(np.uint8)


class ImageForm(NamedTuple):
    """What the images of a set have in common.

    dtype: uint8, uint16 or float32. value_range, clip: what the data section says. mean: likewise,
    in units of 0..255. bands: names of the channels; (): not known. scaling: as of Info, of the
    first image; stored values are taken as they are.
    """

    channels: int = 3
    dtype: np.dtype = _UINT8
    value_range: ValueRange | None = None
    mean: Mean = (0.0, 0.0, 0.0)
    clip: bool = False
    bands: tuple[str, ...] = ()
    scaling: Scaling = ()

    @property
    def limits(self) -> ValueRange:
        """The stored values that stand for 0 and 255."""
        if self.value_range is not None:
            return self.value_range
        return (0.0, float(np.iinfo(self.dtype).max)) if self.dtype.kind == "u" else (0.0, 255.0)

    @property
    def fill(self) -> tuple[float, ...]:
        """The stored values, in the dtype, of a pixel that is zero after normalization."""
        low, high = self.limits
        # The mean is in units of 0..255 and the pixel in stored ones.
        values = (low + value * ((high - low) / 255) for value in self.mean)
        if self.dtype.kind == "f":
            return tuple(values)
        top = np.iinfo(self.dtype).max
        return tuple(min(max(round(value), 0), top) for value in values)

    def check(self) -> None:
        """Raises DataError if nobody knows which values are dark and bright, or they do not fit."""
        top = np.iinfo(self.dtype).max if self.dtype.kind == "u" else None
        if top is None and self.value_range is None:
            raise DataError(
                "data.value_range: images of floats, or of integers other than uint8 and uint16, "
                "need [low, high], the values that become 0 and 255 in all of them; segtrain data "
                "stats prints what they hold"
            )
        if top is not None and self.limits[1] > top:
            found = f"{list(self.limits)} does not fit images of {self.dtype}"
            raise DataError(f"data.value_range: {found}, which end at {top}")


RGB = ImageForm()


def form_of(data: DataConfig, pairs: Sequence[Pair] = ()) -> ImageForm:
    """The form of the images of `pairs`; the first whose header can be read tells dtype and bands.

    Without any it is uint8.
    """
    form = ImageForm(data.channels, _UINT8, data.value_range, data.mean, data.clip)
    for pair in pairs:
        # What cannot be read is named by the checks, or when it is to be used.
        with suppress(DataError):
            info = image_formats.read_info(pair.image)
            bands = info.bands[: data.channels] if not pair.bands else ()
            return form._replace(dtype=set_dtype(info.dtype), bands=bands, scaling=info.scaling)
    return form


def set_dtype(stored: np.dtype) -> np.dtype:
    """The dtype in which images with such numbers are kept."""
    return stored if stored in (np.uint8, np.uint16) else np.dtype(np.float32)


def read_image(
    paths: Sequence[Path],
    form: ImageForm,
    window: Window | None = None,
    *,
    contents: Sequence[bytes] | None = None,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """The image that is stored in these files, (H, W, C) in the form's dtype.

    With pixels without a value it is float32, in any form.

    window: the part to read of a raster; None: the whole image.
    contents: of the files; None: they are to be read.

    Raises:
        DataError: a file cannot be read, or it does not have the form.
    """
    files = [
        image_formats.open_stored(path, window, content=content, max_pixels=max_pixels)
        for path, content in zip(paths, contents or [None] * len(paths), strict=True)
    ]
    if problem := other_sizes([file.info for file in files]):
        raise DataError(f"{printable(paths[0])}: {problem}")
    # The names of bands are not compared where an image is spread over several files.
    if problem := other_bands(files[0].info.bands, form.bands if len(paths) == 1 else ()):
        raise DataError(f"{printable(paths[0])}: {problem}; gdal_translate -b orders them")
    # Of several files none becomes RGB by itself.
    wanted = form.channels if len(paths) == 1 else None
    bands, missing = zip(*(_values(file, form.dtype, wanted) for file in files), strict=True)
    image = bands[0] if len(bands) == 1 else np.concatenate(bands, axis=2)
    if image.shape[2] != form.channels:
        raise DataError(_other_channels(paths, image.shape[2], form.channels))
    # Without a value are pixels of which all files say so: in one band the number may be a value.
    if form.dtype.kind == "u" and all(part is not None for part in missing):
        nowhere = np.logical_and.reduce(missing)
        image = np.where(nowhere, np.float32(np.nan), image) if nowhere.any() else image
    return np.ascontiguousarray(image)


def ignore_missing(
    image: np.ndarray, label: np.ndarray, form: ImageForm
) -> tuple[np.ndarray, np.ndarray]:
    """Image and label where pixels without a value, NaN, are the mean and ignored.

    image: (H, W, C) as `read_image` gives it; in the form's dtype afterwards. label: (H, W) or
    (H, W, K). Neither is changed.
    """
    if image.dtype.kind == "f" and (missing := np.isnan(image)).any():
        image = np.where(missing, np.array(form.fill, np.float32), image)
        nowhere = missing.any(axis=2)
        nowhere = nowhere if label.ndim == 2 else nowhere[..., None]
        label = np.where(nowhere, label.dtype.type(ignored(label)), label)
    if image.dtype.kind == form.dtype.kind:
        return image, label
    # Whole numbers, read as floats because of missing pixels.
    return np.rint(image).astype(form.dtype), label


def ignored_where(missing: np.ndarray, label: np.ndarray) -> np.ndarray:
    """The label, (H, W) or (H, W, K), ignored where `missing`, (H, W), is IGNORE_INDEX."""
    nowhere = missing == IGNORE_INDEX
    nowhere = nowhere if label.ndim == 2 else nowhere[..., None]
    return np.where(nowhere, label.dtype.type(ignored(label)), label)


def shows(label: np.ndarray, train_id: int) -> np.ndarray:
    """Where a label, (H, W) or (H, W, K) uint8, shows a class, (H, W) bool."""
    return label == train_id if label.ndim == 2 else label[..., train_id] == 1


def other_sizes(infos: Sequence[Info]) -> str:
    """What is wrong with the sizes of the files of one image; empty if they are equal."""
    sizes = ["x".join(map(str, info.size)) for info in infos]
    return f"the files of this image have sizes {first_of(sizes)}" if len({*sizes}) > 1 else ""


def other_bands(found: Sequence[str], wanted: Sequence[str]) -> str:
    """How bands with these names are not the wanted ones; empty if they are, or nobody knows.

    Names of which none is equal may be other words for the same bands.

    >>> other_bands(["nir", "red"], ["red", "nir"])
    'bands nir, red, and those of the others, or of the training, are red, nir'
    """
    ours, theirs = ([name.casefold() for name in names] for names in (found, wanted))
    if ours[: len(theirs)] == theirs or not {*ours} & {*theirs}:
        return ""
    others = "those of the others, or of the training, are"
    return f"bands {first_of(found, 16)}, and {others} {first_of(wanted, 16)}"


def drops_alpha(info: Info, channels: int | None) -> bool:
    """Whether an image with this header loses its last channel where `channels` are wanted."""
    return info.alpha and info.channels in (2, 4) and info.channels != channels


def num_channels(info: Info, wanted: int) -> int:
    """How many channels an image in one file with this header has where `wanted` are wanted."""
    count = 3 if info.palette else info.channels - drops_alpha(info, wanted)
    # Grey becomes RGB where three channels are wanted.
    return 3 if (count, wanted) == (1, 3) else count


def _values(
    file: image_formats.StoredFile, dtype: np.dtype, channels: int | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """The pixels of one file, (H, W, n) in `dtype`; `channels`: how many are wanted.

    Also where whole numbers say that there is no data, (H, W, 1) bool; None: nowhere. Floats are
    NaN there.
    """
    info, path = file.info, file.path
    if set_dtype(info.dtype) != dtype:
        raise DataError(
            f"{printable(path)}: the image is {info.dtype}, and others of the data set, or of the "
            f"training, are {dtype}; convert all to one type"
        )
    # The common case: OpenCV itself makes RGB of grey and palette files and drops alpha.
    if channels == 3 and info.depth <= 8 and image_formats.is_png_or_jpeg(path):
        rgb = decode.decode_by_opencv(file.content, path, cv2.IMREAD_COLOR_RGB)
        return decode.checked_pixels(rgb, info._replace(channels=3), path), None
    with np.errstate(over="ignore"):  # float64 beyond float32 is infinite
        pixels = file.pixels().astype(dtype, copy=False)
    # Before anything is spread or dropped: the number for no data is one of the stored numbers.
    missing = _missing(pixels, file)
    if dtype.kind == "f" and missing is not None:
        pixels[missing] = np.nan
    pixels = _levels(pixels, info, path)
    if info.palette:
        return pixels, missing
    if drops_alpha(info, channels):
        pixels = pixels[..., :-1]
    if channels == 3 and pixels.shape[2] == 1:
        pixels = np.repeat(pixels, 3, axis=2)
    return pixels, missing


def _levels(pixels: np.ndarray, info: Info, path: Path) -> np.ndarray:
    """The colours of a palette file; grey levels of few bits over 0..255; else `pixels`."""
    if info.palette:
        return image_formats.palette_colors(pixels, path)
    if info.depth in (1, 2, 4):
        return pixels * np.uint8(255 // (2**info.depth - 1))
    return pixels


def _missing(pixels: np.ndarray, file: image_formats.StoredFile) -> np.ndarray | None:
    """Where stored pixels have no value: of each sample of floats, or of all bands, (H, W, 1) bool.

    None: nowhere.
    """
    info = file.info
    if set_dtype(info.dtype).kind == "f":
        missing = ~np.isfinite(pixels)
        if info.no_data is not None:
            with np.errstate(over="ignore"):
                missing |= pixels == pixels.dtype.type(info.no_data)
    elif info.no_data is not None:
        # Alpha is no band that could hold the number.
        bands = pixels[..., : info.channels - info.alpha]
        missing = (bands == bands.dtype.type(info.no_data)).all(axis=2, keepdims=True)
    elif info.alpha and is_on_map(file.path, info):  # as GDAL writes where a raster has no value
        missing = pixels[..., -1:] == 0
    else:
        return None
    return missing if missing.any() else None


def read_values(path: Path, window: Window | None = None) -> np.ndarray:
    """The pixels (H, W, C) of a file, or of this window of a raster, in their own type.

    Colours of a palette, and grey levels of few bits, are those that training sees. As floats with
    NaN where some have no value.
    """
    file = image_formats.open_stored(path, window)
    pixels = file.pixels()
    missing = _missing(pixels, file)
    pixels = _levels(pixels, file.info, path)
    return pixels if missing is None else np.where(missing, np.float32(np.nan), pixels)


def _other_channels(paths: Sequence[Path], found: int, wanted: int) -> str:
    where = printable(paths[0]) + (f" and {len(paths) - 1} more" if paths[1:] else "")
    repair = (
        f"set data.channels: {found}" if found <= image_formats.MAX_CHANNELS else "leave some out"
    )
    return f"{where}: {found} channels, data.channels is {wanted}; {repair}, or convert the files"
