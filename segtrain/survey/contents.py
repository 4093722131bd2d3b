"""What single files hold: whether one looks like a label, its values, and facts about an image."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import cv2
import numpy as np

from segtrain.data.read import formats
from segtrain.data.read.image import read_values
from segtrain.errors import DataError

Value = int | tuple[int, int, int]
"""A value in labels: an id, or a colour."""
Kind = Literal["ids", "colors", "two", "onehot", "annotations", "picture"]
"""ids: one channel of numbers. colors: RGB. two: a JPEG of two values. onehot: a channel a class.
annotations: ids, drawn from an annotation file. picture: no label."""

LOSSY = (".jpg", ".jpeg", ".jfif")
# A drawn area is flat: most pixels are as their right neighbour.
_FLAT = 0.7
_MANY_VALUES = 4096
# JPEG blurs the two values of a mask by this much, at most of so many pixels.
TWO_VALUES_PX, _BLURRED = 32, 0.03
THRESHOLD = 128
THUMB = 16
ALIKE = 0.985
"""Two images whose thumbnails correlate so much are nearly the same."""


class Count(NamedTuple):
    """How often a value occurs.

    edge: of its pixels, how many have a neighbour of another value.
    """

    pixels: int
    edge: int


class LabelFacts(NamedTuple):
    """A file as a label: values are counted unless it is a picture.

    palette: the colours of the ids, if the file has a palette.
    is_rgb: whether ids are greys of an RGB file: beside files in colours, they are colours.
    """

    kind: Kind
    size: tuple[int, int]
    values: Mapping[Value, Count]
    palette: tuple[tuple[int, int, int], ...] = ()
    is_rgb: bool = False


def label_facts(path: Path) -> LabelFacts:
    """What the file is as a label; DataError: it cannot be read."""
    stored = formats.read_stored(path)
    size = stored.shape[:2]
    is_lossy = path.suffix.lower() in LOSSY
    channel = single(stored)
    if is_lossy:
        return _two_values(channel, size)
    if channel is not None:
        if channel.dtype.kind == "f":
            if not np.isfinite(channel).all() or (channel != np.round(channel)).any():
                return LabelFacts("picture", size, {})
            channel = channel.astype(np.int64)
        if channel.min(initial=0) < 0 or channel.max(initial=0) > 65535:
            return LabelFacts("picture", size, {})
        info = formats.read_info(path)
        palette = tuple(formats.read_palette(path)) if info.palette else ()
        counted = _counted("ids", channel.astype(np.int32), size, palette)
        return counted._replace(is_rgb=stored.shape[2] >= 3)
    if _is_one_hot(stored):
        return _counted("onehot", stored.argmax(axis=2).astype(np.int32), size)
    if stored.shape[2] in (3, 4) and stored.dtype == np.uint8 and _is_opaque(stored):
        packed = stored[..., :3].astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32)
        return _counted("colors", packed, size)
    return LabelFacts("picture", size, {})


def single(stored: np.ndarray) -> np.ndarray | None:
    """The one channel of (H, W, C), also if all three of RGB are equal; None: there are more.

    An alpha channel that is opaque everywhere does not count.
    """
    if stored.shape[2] in (2, 4) and _is_opaque(stored):
        stored = stored[..., :-1]
    if stored.shape[2] == 1:
        return stored[..., 0]
    same = stored.shape[2] == 3 and (stored[..., :1] == stored[..., 1:]).all()
    return stored[..., 0] if same else None


def _is_opaque(stored: np.ndarray) -> bool:
    """Whether the last channel is constant at its largest value, or there is no alpha channel."""
    if stored.shape[2] == 3:
        return True
    return stored.dtype.kind in "ui" and bool((stored[..., -1] == np.iinfo(stored.dtype).max).all())


def _is_one_hot(stored: np.ndarray) -> bool:
    """Whether exactly one of the channels is set at each pixel, and the others are 0."""
    if not 2 <= stored.shape[2] <= 255:
        return False
    top = stored.max()
    return top > 0 and bool(
        ((stored == 0) | (stored == top)).all() and (stored.astype(bool).sum(2) == 1).all()
    )


def _two_values(single: np.ndarray | None, size: tuple[int, int]) -> LabelFacts:
    if single is None or single.dtype != np.uint8:
        return LabelFacts("picture", size, {})
    blurred = ((single > TWO_VALUES_PX) & (single < 255 - TWO_VALUES_PX)).mean()
    if blurred > _BLURRED or np.ptp(single) < 128:
        constant = single.max() <= TWO_VALUES_PX or single.min() >= 255 - TWO_VALUES_PX
        if not constant:
            return LabelFacts("picture", size, {})
    return _counted("two", (single >= THRESHOLD).astype(np.int32) * 255, size)


def _counted(
    kind: Kind, label: np.ndarray, size: tuple[int, int], palette: tuple = ()
) -> LabelFacts:
    """Counts the values of `label`, (H, W) int32; many, or areas that are not flat: a picture."""
    # By runs of equal values, of which a label has few: sorting all pixels takes 20 times as long.
    flat = label.reshape(-1)
    starts = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
    values, which = np.unique(flat[starts], return_inverse=True)
    if len(values) > _MANY_VALUES or (len(values) > 2 and len(starts) > (1 - _FLAT) * flat.size):
        return LabelFacts("picture", size, {})
    pixels = np.bincount(which, np.diff(starts, append=flat.size)).astype(int)
    edge = np.zeros(label.shape, bool)
    for axis, at in ((0, (slice(1, None), ...)), (1, (..., slice(1, None)))):
        differs = np.diff(label, axis=axis) != 0
        before = (slice(None, -1), ...) if axis == 0 else (..., slice(None, -1))
        edge[at] |= differs
        edge[before] |= differs
    rim = np.bincount(np.searchsorted(values, label[edge]), minlength=len(values))
    found = {}
    for value, count, edges in zip(values.tolist(), pixels.tolist(), rim.tolist(), strict=True):
        key = value if kind != "colors" else (value >> 16, value >> 8 & 255, value & 255)
        found[key] = Count(count, edges)
    return LabelFacts(kind, size, found, palette)


class ImageFacts(NamedTuple):
    """An image of a sample.

    low, high: smallest and largest value of each channel, NaN left out; mean, std: of each.
    at_top: the part of the pixels at the top of the integer type. nan: the part that is NaN.
    thumb: (16, 16) float32 grey, mean 0 and length 1, for the comparison with other images.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    at_top: float
    nan: float
    thumb: np.ndarray


def image_facts(paths: tuple[Path, ...]) -> ImageFacts:
    """Facts about one image, whose bands may lie in several files; DataError: it is unreadable."""
    stored = read_bands(paths)
    pixels = stored.reshape(-1, stored.shape[2]).astype(np.float64)
    nan = np.isnan(pixels).any(axis=1).mean()
    if nan == 1:
        raise DataError(f"{paths[0]}: all pixels are NaN")
    top = np.iinfo(stored.dtype).max if stored.dtype.kind in "ui" else np.inf
    return ImageFacts(
        *(tuple(f(pixels, axis=0).tolist()) for f in (np.nanmin, np.nanmax, np.nanmean, np.nanstd)),
        at_top=float((pixels >= top).all(axis=1).mean()),
        nan=float(nan),
        thumb=thumbnail(stored),
    )


def read_bands(paths: tuple[Path, ...]) -> np.ndarray:
    """(H, W, C) as stored; the channels of several files one after another."""
    parts = [read_values(path) for path in paths]
    if len({part.shape[:2] for part in parts}) > 1:
        raise DataError(f"{paths[0]}: its bands have different sizes")
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)


def thumbnail(stored: np.ndarray) -> np.ndarray:
    """(16, 16) float32: the image in grey, small, with mean 0 and length 1."""
    grey = np.nan_to_num(stored[..., :3].astype(np.float32)).mean(axis=2)
    small = cv2.resize(grey, (THUMB, THUMB), interpolation=cv2.INTER_AREA)
    small = small - small.mean()
    return small / max(float(np.linalg.norm(small)), 1e-6)


def black_pixels(paths: tuple[Path, ...], label_path: Path) -> tuple[int, int]:
    """How many pixels labelled 0 are black or NaN in the image, and how many are labelled 0."""
    stored, label = read_bands(paths), formats.read_stored(label_path)
    if stored.shape[:2] != label.shape[:2]:
        return 0, 0
    zero = (label == 0).all(axis=2)
    empty = ((stored == 0) | np.isnan(stored)).all(axis=2)
    return int((zero & empty).sum()), int(zero.sum())


def small_thumbnail(path: Path) -> np.ndarray:
    """`thumbnail` of a file; a JPEG is decoded at an eighth of its size, which is much faster."""
    if path.suffix.lower() in LOSSY:
        data = np.frombuffer(formats.read_bytes(path), np.uint8)
        grey = cv2.imdecode(data, cv2.IMREAD_REDUCED_GRAYSCALE_8)
        if grey is not None and min(grey.shape) >= THUMB:
            return thumbnail(grey[..., None])
    return thumbnail(formats.read_stored(path))


TURNS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "upside down": lambda label: label[::-1],
    "mirrored": lambda label: label[:, ::-1],
    "turned by 180 degrees": lambda label: label[::-1, ::-1],
}


def alignment(
    paths: tuple[Path, ...],
    label_path: Path,
    turn: Callable[[np.ndarray], np.ndarray] = lambda label: label,
) -> float:
    """How much stronger the edges of an image are along the borders of a label than elsewhere.

    About 1 if the label belongs to another image; NaN if sizes differ or there is no border.
    """
    image = np.nan_to_num(read_bands(paths)[..., :3].astype(np.float32)).mean(axis=2)
    label = turn(formats.read_stored(label_path)).astype(np.float32)
    if image.shape != label.shape[:2]:
        return float("nan")
    slope = np.abs(cv2.Sobel(image, cv2.CV_32F, 1, 0)) + np.abs(cv2.Sobel(image, cv2.CV_32F, 0, 1))
    border = np.zeros(image.shape, bool)
    border[:-1] |= (np.diff(label, axis=0) != 0).any(axis=2)
    border[:, :-1] |= (np.diff(label, axis=1) != 0).any(axis=2)
    if not border.any() or border.all() or slope.mean() == 0:
        return float("nan")
    return float(slope[border].mean() / slope.mean())


def spread(total: int, number: int) -> list[int]:
    """Up to `number` of `total` indices, evenly spread."""
    return sorted({int(i) for i in np.linspace(0, total - 1, min(total, number)).round()})
