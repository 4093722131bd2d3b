"""What single files hold: whether one looks like a label, and its values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from segtrain.data.read import image_formats
from segtrain.data.read.find import Window
from segtrain.data.read.georeference import MapPlace, place_of
from segtrain.data.read.raster import is_tiff, raster_size, windows
from segtrain.data.read.raw_label import SCALED, marked_value, with_no_data_id
from segtrain.data.read.rims import blended_pixels
from segtrain.data.read.thumbnails import LOSSY
from segtrain.desk.survey.image_facts import middle_window
from segtrain.errors import DataError

T = TypeVar("T")
Color = tuple[int, int, int]
Value = int | Color
"""A value in labels: an id, or a colour."""
Kind = Literal["ids", "colors", "two", "first", "onehot", "annotations", "picture"]
KINDS: dict[Kind, str] = {
    "ids": "one channel of numbers",
    "colors": "colours",
    "two": "two values in a JPEG, or greys that a threshold divides",
    "first": "ids in the first of three 16-bit channels, and numbers of objects in the second",
    "onehot": "a channel for each class",
    "annotations": "ids that were drawn from an annotation file",
    "picture": "too many values",
}
"""What label files hold; a picture is no label."""

# A drawn area is flat: most pixels are as their right neighbour.
_FLAT = 0.7
_MANY_VALUES = 4096
_TOO_MANY = "too many values for labels"
# JPEG blurs the two values of a mask by this much, at most of so many pixels.
_TWO_VALUES_PX, _BLURRED = 32, 0.03
_THRESHOLD = 128


def word(value: Value) -> str:
    """The value as messages and the command line have it: `7`, or `#a01e1e`."""
    return str(value) if isinstance(value, int) else f"#{bytes(value).hex()}"


def spread(items: Sequence[T], number: int) -> list[T]:
    """Up to `number` of the items, evenly spread."""
    at = np.linspace(0, len(items) - 1, min(len(items), number)).round().astype(int)
    return [items[i] for i in at]


class ValueFacts(NamedTuple):
    """How many pixels and files hold a value, and one of these files.

    rim: the pixels that have a neighbour of another value. blended: see `blended_pixels`.
    """

    pixels: int
    rim: int
    files: int
    example: str
    blended: int = 0

    def added(self, other: "ValueFacts") -> "ValueFacts":
        """The facts of both, with the example of this one."""
        numbers = (a + b for a, b in zip(self[:3], other[:3], strict=True))
        return ValueFacts(*numbers, self.example, self.blended + other.blended)


class LabelFacts(NamedTuple):
    """A file as a label: values are counted unless it is a picture.

    palette: the colours of the ids, if the file has a palette. place: on the map.
    is_rgb: whether ids are greys of an RGB file: beside files in colours, they are colours.
    why: a picture is no label. no_data: the value that a TIFF marks as none (GDAL_NODATA).
    has_alpha: whether pixels may be transparent, which training refuses. is_bit: whether ids are
    greys of 1 bit: 1 is white, as 255 in other files.
    """

    kind: Kind
    size: tuple[int, int]
    values: Mapping[Value, ValueFacts]
    palette: tuple[Color, ...] = ()
    is_rgb: bool = False
    why: str = ""
    no_data: float | None = None
    place: MapPlace | None = None
    has_alpha: bool = False
    is_bit: bool = False


def label_facts(folder: Path, file: str, threshold: float | None = None) -> LabelFacts:
    """What a file of the folder is as a label, a raster window by window.

    threshold: of grey levels, from which on they are the class of the file.

    Raises:
        DataError: it cannot be read, or the windows are labels of different kinds.
    """
    path = folder / file
    size = raster_size(path)
    info = image_formats.read_info(path)
    if info.scaling:
        return LabelFacts("picture", info.size, {}, why=SCALED)
    parts = [
        _facts_of(read_label(path, window), path, file, threshold)
        for window in (windows(size) if size else [None])
    ]
    facts = parts[0] if size is None else _joined(parts, path)._replace(size=size)
    # A TIFF may have colours without saying that its numbers are indices of these.
    has_colors = facts.kind == "ids" and (info.palette or is_tiff(path))
    return facts._replace(
        palette=tuple(image_formats.read_palette(path)) if has_colors else (),
        no_data=marked_value(info.no_data),
        place=place_of(path, info),
        has_alpha=info.alpha,
        is_bit=facts.kind == "ids" and info.depth == 1 and not info.palette,
    )


def _joined(parts: Sequence[LabelFacts], path: Path) -> LabelFacts:
    """The facts about the windows of one raster together."""
    kinds = {part.kind for part in parts}
    if "picture" in kinds:
        return next(part for part in parts if part.kind == "picture")
    if len(kinds) > 1:
        raise DataError(f"{path}: ids and colours in one raster; cut it into tiles")
    values: dict[Value, ValueFacts] = {}
    for value, facts in (pair for part in parts for pair in part.values.items()):
        before = values.get(value)
        # Windows are parts of one file, which counts once.
        values[value] = facts if before is None else before.added(facts)._replace(files=1)
    return parts[0]._replace(values=values)


def read_label(path: Path, window: Window | None = None) -> np.ndarray:
    """The pixels of a label or of a window of it, (H, W, C), without a no-data value below 0.

    What is wholly transparent is black, or 0: nothing was drawn there.
    """
    file = image_formats.open_stored(path, window)
    stored = with_no_data_id(file.pixels(), file.info.no_data)
    if file.info.alpha and stored.dtype.kind in "ui":
        # Only where every pixel is wholly drawn, or not at all: half of a value is none.
        alpha = stored[..., -1:]
        if ((alpha == 0) | (alpha == np.iinfo(stored.dtype).max)).all():
            stored = stored[..., :-1] * (alpha > 0)
    return stored


def _facts_of(stored: np.ndarray, path: Path, file: str, threshold: float | None) -> LabelFacts:
    """As `label_facts`, of the pixels (H, W, C) of the file or of a window."""
    size = stored.shape[:2]
    is_divided = threshold is not None and single_channel(stored) is not None
    kind = "two" if is_divided else _kind(stored, path)
    if kind == "picture":
        return LabelFacts(kind, size, {}, why=_why_no_label(stored, path))
    values = label_values(stored, kind, threshold)
    counts = _counted(values, file, stored[..., :3] if kind == "colors" else values)
    if counts is None:
        return LabelFacts("picture", size, {}, why=_TOO_MANY)
    if kind == "colors":
        counts = {(v >> 16, v >> 8 & 255, v & 255): count for v, count in counts.items()}
    return LabelFacts(kind, size, counts, is_rgb=kind == "ids" and stored.shape[2] >= 3)


def read_label_part(path: Path) -> np.ndarray:
    """A label as stored, (H, W, C); of a raster the middle window."""
    return read_label(path, middle_window(path))


def label_values(stored: np.ndarray, kind: Kind, threshold: float | None = None) -> np.ndarray:
    """The values (H, W) int32 of a label of this kind; a colour is 0xRRGGBB.

    stored: (H, W, C), the pixels of the file. threshold: as of `label_facts`.
    """
    if kind == "two":
        return (stored[..., 0] >= (_THRESHOLD if threshold is None else threshold)) * np.int32(255)
    if kind == "onehot":
        return stored.argmax(axis=2).astype(np.int32)
    if kind == "colors":
        return stored[..., :3].astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32)
    return stored[..., 0].astype(np.int32)


def values_of(
    path: Path, kind: Kind, window: Window | None = None, threshold: float | None = None
) -> np.ndarray:
    """As `label_values`, of a file or a window of it; colours also those of a palette."""
    stored = read_label(path, window)
    if kind == "colors" and stored.shape[2] == 1:
        stored = image_formats.palette_colors(stored, path)
    return label_values(stored, kind, threshold)


def packed(value: Value) -> int:
    """The value as `label_values` has it."""
    return value if isinstance(value, int) else int.from_bytes(value)


def nearest_pixels(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The nearest of the pixels (H, W) or (H, W, C) to those of a grid of this size."""
    if pixels.shape[:2] == size:
        return pixels
    rows, columns = (
        ((np.arange(number) + 0.5) * full / number).astype(int)
        for number, full in zip(size, pixels.shape[:2], strict=True)
    )
    return pixels[np.ix_(rows, columns)]


def _kind(stored: np.ndarray, path: Path) -> Kind:
    """What the pixels may be, if areas are flat."""
    channel = single_channel(stored)
    # JPEG blurs values: black and white are told apart still, ids and colours are not.
    if path.suffix.lower() in LOSSY:
        return "two" if channel is not None and _has_two_values(channel) else "picture"
    if channel is not None:
        low, high = channel.min(), channel.max()  # NaN if there is any
        is_whole = channel.dtype.kind != "f" or bool((channel == np.round(channel)).all())
        return "ids" if low >= 0 and high <= 65535 and is_whole else "picture"
    top, is_color = stored.max(), stored.dtype == np.uint8 and without_alpha(stored).shape[2] == 3
    if top > 0 and ((stored == 0) | (stored == top)).all():
        is_red = is_color and top > 1  # or green, or blue: an area of one class
        # One channel of each pixel is not 0: a channel for each class.
        if (np.count_nonzero(stored, axis=2) == 1).all() and not is_red:
            return "onehot"
    # As SYNTHIA's.
    is_first = stored.dtype == np.uint16 and stored.shape[2] == 3 and not stored[..., 2].any()
    return "colors" if is_color else "first" if is_first else "picture"


def _why_no_label(stored: np.ndarray, path: Path) -> str:
    """Why `_kind` takes the pixels for a picture."""
    if path.suffix.lower() in LOSSY:
        return "JPEG has blurred their values: save labels as PNG"
    if single_channel(stored) is not None:
        return "values below 0, above 65535 or between whole numbers"
    if stored.dtype == np.uint16:
        return "16-bit colours: save ids as PNG of one channel"
    if without_alpha(stored).shape[2] in (2, 4):
        return "their transparency varies: save labels without it"
    return _TOO_MANY


def single_channel(stored: np.ndarray) -> np.ndarray | None:
    """The one channel of (H, W, C), also if all three of RGB are equal; None: there are more."""
    colors = without_alpha(stored)
    is_one = colors.shape[2] in (1, 3) and (colors[..., :1] == colors).all()
    return colors[..., 0] if is_one else None


def without_alpha(stored: np.ndarray) -> np.ndarray:
    """(H, W, C) without an alpha channel that is opaque everywhere."""
    is_opaque = stored.shape[2] in (2, 4) and stored.dtype.kind in "ui"
    if is_opaque and (stored[..., -1] == np.iinfo(stored.dtype).max).all():
        return stored[..., :-1]
    return stored


def _has_two_values(channel: np.ndarray) -> bool:
    """Whether a JPEG holds black and white, or one of them, but for the rims that it blurs."""
    dark, white = channel <= _TWO_VALUES_PX, channel >= 255 - _TWO_VALUES_PX
    has_contrast = np.ptp(channel) >= 128 and (dark | white).mean() >= 1 - _BLURRED
    return bool(has_contrast or dark.all() or white.all())


def _counted(label: np.ndarray, file: str, channels: np.ndarray) -> dict[int, ValueFacts] | None:
    """The values of a label (H, W) int32; None: too many, or areas that are not flat.

    channels: the label, (H, W), or its colours, (H, W, 3) uint8.
    """
    # By runs of equal values, of which a label has few: sorting all pixels takes 20 times as long.
    flat = label.reshape(-1)
    starts = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
    values, which = np.unique(flat[starts], return_inverse=True)
    if len(values) > _MANY_VALUES or (len(values) > 2 and len(starts) > (1 - _FLAT) * flat.size):
        return None
    pixels = np.bincount(which, np.diff(starts, append=flat.size)).astype(int)
    across = np.pad(label[:, 1:] != label[:, :-1], ((0, 0), (1, 1)))
    down = np.pad(label[1:] != label[:-1], ((1, 1), (0, 0)))
    edge = across[:, 1:] | across[:, :-1] | down[1:] | down[:-1]
    rim = np.bincount(np.searchsorted(values, label[edge]), minlength=len(values))
    at_blend = label[blended_pixels(channels)]
    blended = np.bincount(np.searchsorted(values, at_blend), minlength=len(values))
    counts = zip(*(x.tolist() for x in (values, pixels, rim, blended)), strict=True)
    return {value: ValueFacts(p, r, 1, file, b) for value, p, r, b in counts}
