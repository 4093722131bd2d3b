"""The common form of all annotation files: images, and the regions of classes in them.

Files come from strangers: numbers are checked before they are used, and nothing is allocated before
its size is known to be that of an image.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated as Checked
from typing import NamedTuple, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from segtrain.data.read.decode import MAX_PIXELS
from segtrain.errors import ConfigError, DataError
from segtrain.files import os_errors_as, read_bytes
from segtrain.text import first_of, printable

T = TypeVar("T")
Finite = Checked[float, Field(allow_inf_nan=False)]
Side = Checked[int, Field(gt=0)]

# LabelMe's name for pixels that count for nothing.
IGNORED = "__ignore__"

_BOXES = ("box", "rectangle", "rectanglelabels")
_WITHOUT_AREA = (
    *("line", "linestrip", "point", "points", "polyline", "tag"),
    *("keypointlabels", "vectorlabels"),
)
_MAX_BYTES = 4 << 30  # COCO's own training set has 470 MB
_SHOWN = 3


class Region(NamedTuple):
    """The pixels of one object: the union of its polygons, or a mask.

    name: of the class.
    polygons: each (P, 2) float64, x and y in pixels; (0, 0) is the corner of the first pixel.
    mask: COCO's compressed run lengths of the whole image, checked; empty: there are polygons.
    """

    name: str
    polygons: tuple[np.ndarray, ...] = ()
    mask: bytes = b""


class Annotated(NamedTuple):
    """An image and its regions, in the order in which the file lists them.

    source: the annotation file.
    name: as the annotation file names the image; once found, its path relative to the images.
    size: (H, W) in which the regions were drawn; None: the file does not say.
    are_fractions: polygons are fractions of width and height, not pixels.
    path: the image file, once found.
    orientation: of EXIF, if the regions were drawn on the turned image; else 1.
    """

    source: Path
    name: str
    size: tuple[int, int] | None
    regions: Sequence[Region]
    are_fractions: bool = False
    path: Path = Path()
    orientation: int = 1


class Findings:
    """What is wrong with annotations, and what the user has to know; equal ones on one line."""

    def __init__(self) -> None:
        self._problems: dict[str, list[str]] = {}
        self._notes: dict[str, list[str]] = {}

    def refuse(self, place: object, problem: str) -> None:
        """The annotations cannot be used."""
        self._problems.setdefault(problem, []).append(str(place))

    def note(self, place: object, what: str) -> None:
        """They can, but the user has to know."""
        self._notes.setdefault(what, []).append(str(place))

    def no_region(self, kind: str, place: object) -> None:
        """Refuses or notes a shape that is no polygon and no mask."""
        if kind in _BOXES:
            self.refuse(place, "a box, no outline: segtrain trains on outlines")
        elif kind in _WITHOUT_AREA:
            self.note(place, f"{kind}: left out, because it has no area")
        else:
            self.refuse(place, f"{kind or 'a shape'}: only polygons and masks are read")

    @property
    def problems(self) -> list[str]:
        """A line for each kind of problem: its first places, how many more, and what is wrong."""
        return _lines(self._problems)

    @property
    def notes(self) -> list[str]:
        """A line for each kind of note."""
        return _lines(self._notes)


def _lines(found: dict[str, list[str]]) -> list[str]:
    return [f"{first_of(places, _SHOWN)}: {printable(what)}" for what, places in found.items()]


def read_text(path: Path) -> bytes:
    """The bytes of an annotation file."""
    with os_errors_as(DataError, path):
        return read_bytes(path, _MAX_BYTES)


def read_json(path: Path, form: TypeAdapter[T], title: str) -> T:
    """The content of a JSON file.

    Raises:
        DataError: it cannot be read, or has not the `form` of a file of `title`; names the first
            place.
    """
    try:
        return form.validate_json(read_text(path))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        reason = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise DataError(f"{printable(path)}: no file of {title}: {printable(reason)}") from None


def polygon(points: Iterable) -> np.ndarray:
    """(P, 2) float64 of pairs of x and y, or of numbers in turn; ValueError: an x without y."""
    return np.array(points, np.float64).reshape(-1, 2)


def mask_library() -> ModuleType:
    """pycocotools.mask, which draws outlines and packs masks."""
    try:
        from pycocotools import mask
    except ImportError:
        raise ConfigError(
            "outlines of annotation files are drawn by pycocotools, which is not installed; in "
            "the checkout of segtrain: pip install '.[annotations]'"
        ) from None
    return mask


def pack_mask(mask: np.ndarray, size: tuple[int, int], top: int = 0, left: int = 0) -> bytes:
    """`Region.mask` of a mask (h, w), not 0 inside, with its corner at (top, left) of `size`.

    Raises:
        ValueError: it does not lie inside.
    """
    check_pixels(size)
    height, width = mask.shape
    if min(top, left) < 0 or top + height > size[0] or left + width > size[1]:
        raise ValueError(f"{height}x{width} px at {left}, {top} do not lie in the image")
    whole = np.zeros(size, np.uint8, order="F")
    whole[top : top + height, left : left + width] = mask != 0
    return mask_library().encode(whole)["counts"]


def pack_runs(runs: Sequence[int], size: tuple[int, int]) -> bytes:
    """`Region.mask` of run lengths, column by column, the first outside.

    Raises:
        ValueError: they do not fill `size` exactly.
    """
    check_runs(runs, size)
    unpacked = {"counts": list(runs), "size": list(size)}
    return mask_library().frPyObjects(unpacked, *size)["counts"]


def check_packed(text: str, size: tuple[int, int]) -> bytes:
    """`Region.mask` of COCO's compressed run lengths.

    pycocotools reads past the end of a text that is cut off, so it is decoded here first, as by
    `rleFrString` in its maskApi.c.

    Raises:
        ValueError: the text is damaged, or its runs do not fill `size` exactly.
    """
    packed = text.encode()
    units = np.frombuffer(packed, np.uint8).astype(np.int64) - 48
    if not units.size or units.min() < 0 or units.max() > 63 or units[-1] & 32:
        raise ValueError("damaged run lengths")
    ends = np.flatnonzero(units & 32 == 0)
    starts = np.append(0, ends[:-1] + 1)
    digit = np.arange(units.size) - np.repeat(starts, ends - starts + 1)
    if digit.max() > 6:  # a run of more than 2 ** 34 pixels
        raise ValueError("damaged run lengths")
    runs = np.add.reduceat((units & 31) << (5 * digit), starts)
    runs -= np.where(units[ends] & 16, 1 << 5 * (digit[ends] + 1), 0)
    # From the fourth on, a run is stored as its difference from the last but one.
    runs[1::2], runs[2::2] = runs[1::2].cumsum(), runs[2::2].cumsum()
    check_runs(runs.tolist(), size)
    return packed


def check_runs(runs: Sequence[int], size: tuple[int, int]) -> None:
    """ValueError: the run lengths do not fill `size` exactly, or it is too large."""
    check_pixels(size)
    if min(runs, default=-1) < 0 or sum(runs) != size[0] * size[1]:
        raise ValueError(f"run lengths that do not fill {size[0]}x{size[1]} px")


def check_pixels(size: tuple[int, int]) -> None:
    """ValueError: no image of this size is read."""
    if min(size) < 1 or size[0] * size[1] > MAX_PIXELS:
        raise ValueError(f"{size[0]}x{size[1]} px; at most {MAX_PIXELS:,} are read")
