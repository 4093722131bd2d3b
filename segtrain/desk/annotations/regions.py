"""The common form of all annotation files: images, and the regions of classes in them.

Files come from strangers: numbers are checked before they are used, and nothing is allocated before
its size is known to be that of an image.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self

import numpy as np

from segtrain.data.read.decode import MAX_PIXELS
from segtrain.errors import ConfigError, DataError
from segtrain.files import os_errors_as, read_bytes
from segtrain.text import first_of, install_line, printable

# LabelMe's name for pixels that count for nothing.
IGNORED = "__ignore__"

WITHOUT_AREA = (
    *("line", "linestrip", "point", "points", "polyline", "tag"),
    *("keypointlabels", "vectorlabels"),
)
_BOXES = ("box", "rectangle", "rectanglelabels")
_CORNERS = 72
_MAX_BYTES = 4 << 30  # COCO's own training set has 470 MB


class Region(NamedTuple):
    """The pixels of one object: all inside its polygons but its holes, a mask, or runs of pixels.

    name: of the class.
    polygons: each (P, 2) float64, x and y in pixels; (0, 0) is the corner of the first pixel.
    mask: of the whole image, as COCO's compressed run lengths; empty: there are polygons.
    runs: (R, 2) int64, first pixel and length, down the columns from 0, in order, where the
        annotation does not say the size of the image; `with_mask` makes the mask of them.
    place: where the runs stand, for messages.
    holes: outlines as polygons are.
    """

    name: str
    polygons: tuple[np.ndarray, ...] = ()
    mask: bytes = b""
    runs: np.ndarray | None = None
    place: str = ""
    holes: tuple[np.ndarray, ...] = ()

    @classmethod
    def of_outlines(cls, name: str, *outlines: Iterable) -> Self:
        """Outlines are pairs of x and y, or these numbers in turn; ValueError: an x without y."""
        polygons = [np.array(points, np.float64) for points in outlines]
        if any(points.size % 2 or points.shape[1:] not in ((), (2,)) for points in polygons):
            raise ValueError("expected pairs of x and y")
        return cls(name, tuple(points.reshape(-1, 2) for points in polygons))

    @classmethod
    def of_mask(
        cls, name: str, mask: np.ndarray, size: tuple[int, int], top: int = 0, left: int = 0
    ) -> Self:
        """`mask` (h, w), not 0 inside, lies at (top, left) of `size`; ValueError: not inside."""
        check_pixels(size)
        height, width = mask.shape
        if min(top, left) < 0 or top + height > size[0] or left + width > size[1]:
            raise ValueError(f"{height}x{width} px at {left}, {top} do not lie in the image")
        # pycocotools takes masks column by column.
        whole = np.zeros(size, np.uint8, order="F")
        whole[top : top + height, left : left + width] = mask != 0
        return cls(name, mask=mask_library().encode(whole)["counts"])

    def with_mask(self, size: tuple[int, int]) -> Self:
        """The region of runs as a mask; ValueError: a run leaves the image."""
        assert self.runs is not None
        check_pixels(size)
        total, ends = size[0] * size[1], self.runs.cumsum(axis=1)  # (R, 2): begin and end
        if ends[-1, 1] > total:
            raise ValueError(f"a run ends at pixel {ends[-1, 1]}, but the image has {total}")
        # Lengths outside and inside in turn, as COCO has them.
        counts = np.diff(ends.ravel(), prepend=0, append=total).tolist()
        packed = mask_library().frPyObjects({"size": list(size), "counts": counts}, *size)
        return self._replace(mask=packed["counts"], runs=None)


class Annotated(NamedTuple):
    """An image and its regions, in the order in which the file lists them.

    source: the annotation file.
    name: as the annotation file names the image; once found, its path relative to the images.
    size: (H, W) in which the regions were drawn; None: the file does not say.
    are_fractions: polygons are fractions of width and height, not pixels.
    path: the image file, once found.
    orientation: of EXIF, if the regions were drawn on the turned image; else 1.
    place: where the annotation file names the image, for messages; empty: the name is enough.
    """

    source: Path
    name: str
    size: tuple[int, int] | None
    regions: Sequence[Region]
    are_fractions: bool = False
    path: Path = Path()
    orientation: int = 1
    place: str = ""


class Findings:
    """What is wrong with annotations, and what the user has to know: places by what is said."""

    def __init__(self) -> None:
        self.problems: dict[str, list[object]] = defaultdict(list)
        self.notes: dict[str, list[object]] = defaultdict(list)

    def refuse(self, place: object, problem: object) -> None:
        """The annotations cannot be used."""
        self.problems[str(problem)].append(place)

    def note(self, place: object, what: str) -> None:
        """They can, but the user has to know."""
        self.notes[what].append(place)

    @contextmanager
    def refusing(self, place: object) -> Iterator[None]:
        """Refuses what cannot be read inside, and goes on behind it."""
        try:
            yield
        except (ValueError, DataError) as error:
            self.refuse(place, error)
        # A KeyError is a LookupError, too, but its text is the key alone.
        except KeyError as error:
            self.refuse(place, f"has no {error}")
        # Another form than expected.
        except (LookupError, ArithmeticError, TypeError, AttributeError) as error:
            self.refuse(place, f"damaged: {error}")

    def no_region(self, kind: str, place: object) -> None:
        """Refuses or notes a shape that is no polygon and no mask."""
        # An object with a box alone would be missing in the label; a line has no area anyway.
        if kind in _BOXES:
            self.refuse(
                place, "boxes are no masks: segtrain trains on outlines; outline the objects"
            )
        elif kind in WITHOUT_AREA:
            self.note(place, f"{kind}: left out, because it has no area")
        else:
            self.refuse(place, f"{kind or 'a shape'}: only polygons and masks are read")


def lines(found: dict[str, list[object]]) -> list[str]:
    """A line for each finding: its first places, how many more, and what is said."""
    return [f"{first_of(places, 3)}: {printable(what)}" for what, places in found.items()]


def read_text(path: Path) -> bytes:
    """The bytes of an annotation file."""
    with os_errors_as(DataError, path):
        return read_bytes(path, _MAX_BYTES)


def entries(found: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and values of a mapping, or positions and items of a list."""
    return found.items() if isinstance(found, dict) else enumerate(found)


def image_size(image: dict[str, Any], height: str, width: str) -> tuple[int, int] | None:
    """(H, W) as stated under these keys; None: the file does not say."""
    size = image.get(height), image.get(width)
    return size if all(size) else None


def rectangle(corner: Sequence[float], across: Sequence[float]) -> np.ndarray:
    """The outline (4, 2) of two corners that lie across from each other."""
    (left, top), (right, bottom) = corner, across
    return np.array([(left, top), (right, top), (right, bottom), (left, bottom)], np.float64)


def ellipse(center: Sequence[float], radii: Sequence[float], turn: float = 0) -> np.ndarray:
    """An outline (72, 2) that is off by a thousandth of the radius.

    turn: of the radii against the axes, in radians from x to y, which is clockwise on a screen.
    """
    angles = np.linspace(0, 2 * np.pi, _CORNERS, endpoint=False)
    x, y = radii[0] * np.cos(angles), radii[1] * np.sin(angles)
    turned = x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)
    return np.column_stack(turned) + center


def mask_library() -> ModuleType:
    """pycocotools.mask, which draws outlines and packs masks."""
    try:
        from pycocotools import mask
    except ImportError:
        raise ConfigError(
            "outlines of annotation files are drawn by pycocotools, which is not installed; "
            + install_line("annotations")
        ) from None
    return mask


def mask_of_runs(runs: Sequence[int], size: tuple[int, int]) -> np.ndarray:
    """The mask (H, W) of run lengths, row by row, the first outside; ValueError: no fit."""
    check_pixels(size)
    if min(runs, default=-1) < 0 or sum(runs) != size[0] * size[1]:
        raise ValueError(f"run lengths that do not fill {size[0] * size[1]} px")
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(size)


def check_pixels(size: tuple[int, int]) -> None:
    """ValueError: no image of this size is read."""
    if min(size) < 1 or size[0] * size[1] > MAX_PIXELS:
        raise ValueError(f"{size[0]}x{size[1]} px; at most {MAX_PIXELS:,} are read")
