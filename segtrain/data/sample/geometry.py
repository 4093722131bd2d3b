"""Where a training crop lies in its image, and the one resampling that reads it.

Published pipelines resize (and rotate) the whole image and drop most of it in the crop. Here scale,
rotation, crop, flip and quarter turns are numbers in a Placement, and only the source pixels under
the crop are read, once. Down-scaling is bilinear without antialiasing, as in semseg and
mmsegmentation.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cv2
import numpy as np

from segtrain.types import IGNORE_INDEX, ignored

# Points along the short side of a crop at which class shares are measured.
_MEASURED_POINTS = 64


class Span(NamedTuple):
    """One axis of a crop, in pixels.

    size: the source image's. scaled: after scaling. crop: the crop's.
    start: first source pixel of the crop; 0 if the scaled image is smaller than the crop.
    pad: crop pixels before the image; 0 if it is larger than the crop.

    The crop starts on a whole source pixel, not on a whole scaled pixel: then cv2.resize can make
    it from the source rectangle, several times faster than warpAffine can from any position.

    100 pixels become 50. A crop of 20 from source pixel 10 on shows 40 source pixels. A crop of 80
    shows all 100, in 50 of its own, with 5 pixels before them and 25 behind.

    >>> Span(100, 50, 20, start=10).source
    slice(10, 50, None)
    >>> small = Span(100, 50, 80, pad=5)
    >>> small.source, small.inside
    (slice(0, 100, None), slice(5, 55, None))
    """

    size: int
    scaled: int
    crop: int
    start: int = 0
    pad: int = 0

    @property
    def factor(self) -> float:
        """Scaled pixels per source pixel."""
        return self.scaled / self.size

    @property
    def content(self) -> int:
        """Crop pixels that show the image."""
        return min(self.scaled, self.crop)

    @property
    def inside(self) -> slice:
        """Where the content lies in the crop."""
        return slice(self.pad, self.pad + self.content)

    @property
    def source(self) -> slice:
        """Source pixels that the content covers, the last one perhaps in part."""
        return slice(self.start, self.start - (-self.content * self.size // self.scaled))

    @property
    def largest_start(self) -> int:
        """The last whole source pixel from which the crop fits into the image."""
        return max(0, self.scaled - self.crop) * self.size // self.scaled

    def nearest(self) -> np.ndarray:
        """Index of the source pixel under the centre of each content pixel, (content,) int64."""
        twice_centre = 2 * np.arange(self.content, dtype=np.int64) + 1
        return self.start + twice_centre * self.size // (2 * self.scaled)

    def moved(self, rng: np.random.Generator, point: float | None = None) -> "Span":
        """The same span elsewhere: uniform inside the image, or the whole image in the crop.

        point: what it must show, in source pixels from the edge. One in the last source pixel can
            lie behind the last crop: then that crop is taken.
        """
        first, last = 0, self.largest_start
        if point is not None:
            last = min(math.floor(point), last)
            # The first start from which the content still reaches the point.
            behind = math.floor(point - self.content * self.size / self.scaled) + 1
            first = max(0, min(behind, last))
        start = int(rng.integers(first, last + 1))
        pad = int(rng.integers(self.crop - self.content + 1))
        return self._replace(start=start, pad=pad)


class Placement(NamedTuple):
    """A window of an image that is scaled, then rotated; cut out, mirrored and turned: the crop.

    rows, columns: of the window. After an odd number of quarter turns they are the crop's columns
        and rows.
    angle_deg: counter-clockwise rotation of the scaled image about its centre.
    flip: mirrored left to right.
    turns: counter-clockwise quarter turns of the mirrored window, 0 to 3, without resampling. A
        crop mirrored top to bottom is one mirrored left to right with two turns.
    """

    rows: Span
    columns: Span
    angle_deg: float = 0.0
    flip: bool = False
    turns: int = 0

    @property
    def window_size(self) -> tuple[int, int]:
        """(height, width) of the crop before its quarter turns."""
        return self.rows.crop, self.columns.crop

    @property
    def padded(self) -> bool:
        """Whether the window is larger than the scaled image, in either direction."""
        return self.rows.content < self.rows.crop or self.columns.content < self.columns.crop

    def moved(
        self, rng: np.random.Generator, point: tuple[float, float] | None = None
    ) -> "Placement":
        """The same crop at another random position.

        point: what it must show, from `turned`; None: anything.
        """
        y, x = (None, None) if point is None else point
        return self._replace(rows=self.rows.moved(rng, y), columns=self.columns.moved(rng, x))

    def turned(self, pixel: tuple[int, int]) -> tuple[float, float] | None:
        """Where the rotation brings the centre of a source pixel (row, column); None: outside.

        In source pixels from the upper and the left edge of the image, which keeps its size.
        """
        rows, columns = self.rows, self.columns
        # From the centre of the image, in scaled pixels: the rotation follows the scaling.
        y = (pixel[0] + 0.5 - rows.size / 2) * rows.factor
        x = (pixel[1] + 0.5 - columns.size / 2) * columns.factor
        angle = math.radians(self.angle_deg)
        sine, cosine = math.sin(angle), math.cos(angle)
        # y points down.
        turned_y, turned_x = cosine * y - sine * x, cosine * x + sine * y
        row = turned_y / rows.factor + rows.size / 2
        column = turned_x / columns.factor + columns.size / 2
        return (row, column) if 0 <= row < rows.size and 0 <= column < columns.size else None


def resample_image(image: np.ndarray, placement: Placement, *, fill: Sequence[float]) -> np.ndarray:
    """The crop of the image by bilinear interpolation, (h, w, C), `fill` beyond the image.

    Image and crop are uint8, uint16 or float32. A pixel that is made of a NaN is NaN.
    """
    if placement.angle_deg:
        return _turned(_warp(image, placement, cv2.INTER_LINEAR, fill), placement)
    rows, columns = placement.rows, placement.columns
    # The scale is given as a factor: a ratio of rounded sizes would drift across the crop. Where a
    # single source pixel covers the content, it is not enlarged beyond: it could fill the memory.
    fx, fy = (min(span.factor, span.content) for span in (columns, rows))
    content = by_bands(
        lambda source: cv2.resize(source, None, fx=fx, fy=fy, interpolation=cv2.INTER_LINEAR),
        image[rows.source, columns.source],
    )[: rows.content, : columns.content]
    return _laid_out(content, placement, fill)


def by_bands(
    function: Callable[..., np.ndarray], image: np.ndarray, *more: Sequence[float]
) -> np.ndarray:
    """`function(image, *more)` of OpenCV, which has one for (H, W, C) of 1, 3 and 4 channels.

    With other numbers some functions fail and some are less exact: these get each channel alone.

    image: (H, W) or (H, W, C). more: a number for each channel.
    """
    num_bands = 1 if image.ndim == 2 else image.shape[2]
    if num_bands in (1, 3, 4):
        # OpenCV drops the axis of a single channel.
        result = function(image, *more)
        return result[..., np.newaxis] if result.ndim < image.ndim else result
    bands = (np.ascontiguousarray(image[..., i]) for i in range(num_bands))
    return np.stack([function(x, *([v[i]] for v in more)) for i, x in enumerate(bands)], axis=2)


def resample_label(label: np.ndarray, placement: Placement, *, stride: int = 1) -> np.ndarray:
    """The crop of the label by nearest pixel centre, (h, w); no value is invented.

    label: (H, W) uint8 or float32; or (H, W, K), as the crop is then.
    stride: n > 1 gives every n-th row and column of the content only, without padding, flip or
        quarter turns, in ceil(content / n) rows and columns (with rotation: of the window).
    """
    if placement.angle_deg:
        crop = _warp(label, placement, cv2.INTER_NEAREST, _ignored(label), stride=stride)
        return crop if stride > 1 else _turned(crop, placement)
    rows, columns = placement.rows.nearest()[::stride], placement.columns.nearest()[::stride]
    # The slice first: `take` would copy all of a label whose rows lie apart, as in a pack.
    content = label[rows, columns[0] : columns[-1] + 1].take(columns - columns[0], axis=1)
    return content if stride > 1 else _laid_out(content, placement, _ignored(label))


def _ignored(label: np.ndarray) -> tuple[float, ...]:
    """What a pixel beyond a label, (H, W) or (H, W, K), holds."""
    return (ignored(label),) * (1 if label.ndim == 2 else label.shape[2])


def largest_class_share(label: np.ndarray, placement: Placement) -> float:
    """The part of the crop's valid pixels that have its most frequent class; 1 without any.

    Measured on a grid with at least 64 points a side, so exact for crops below 128 pixels.
    """
    stride = max(1, min(placement.window_size) // _MEASURED_POINTS)
    counts = np.bincount(resample_label(label, placement, stride=stride).ravel(), minlength=256)
    valid = np.delete(counts, IGNORE_INDEX)
    return float(valid.max() / valid.sum()) if valid.any() else 1.0


def paint_padding(crop: np.ndarray, placement: Placement, fill: Sequence[float]) -> np.ndarray:
    """The crop with its padding set to `fill` again, after its colours were changed.

    The empty corners of a rotation stay: they are part of the changed image.
    """
    if placement.angle_deg or not placement.padded:
        return crop
    crop = np.rot90(crop, -placement.turns)
    if placement.flip:
        crop = crop[:, ::-1]
    return _laid_out(crop[placement.rows.inside, placement.columns.inside], placement, fill)


def _laid_out(content: np.ndarray, placement: Placement, fill: Sequence[float]) -> np.ndarray:
    """`content` with its padding, mirrored and turned as the placement is, contiguous."""
    if placement.padded:
        rows, columns = placement.rows, placement.columns
        below = rows.crop - rows.content - rows.pad
        right = columns.crop - columns.content - columns.pad
        border = (rows.pad, below, columns.pad, right, cv2.BORDER_CONSTANT)
        content = by_bands(
            lambda band, value: cv2.copyMakeBorder(band, *border, value=value), content, fill
        )
    if placement.flip:
        content = by_bands(lambda band: cv2.flip(band, 1), content)
    return _turned(content, placement)


def _turned(window: np.ndarray, placement: Placement) -> np.ndarray:
    """The mirrored `window` after the placement's quarter turns, contiguous."""
    return np.ascontiguousarray(np.rot90(window, placement.turns))


def _warp(
    source: np.ndarray,
    placement: Placement,
    interpolation: int,
    fill: Sequence[float],
    *,
    stride: int = 1,
) -> np.ndarray:
    matrix = _source_of_crop(placement)
    height, width = placement.window_size
    x, y = width - 1, height - 1
    corners = matrix @ np.array([[0, x, 0, x], [0, 0, y, y], [1, 1, 1, 1]])  # (2, 4)
    limit = np.array(source.shape[1::-1])  # (width, height), as cv2 orders them
    # The region under the crop, and a pixel or two around it for the interpolation.
    first = np.clip(np.floor(corners.min(axis=1)).astype(int) - 1, 0, limit - 1)
    last = np.clip(np.ceil(corners.max(axis=1)).astype(int) + 2, first + 1, limit)
    # warpAffine may use fixed point: passing only the region keeps coordinates small.
    matrix[:, 2] -= first
    matrix[:, :2] *= stride
    return by_bands(
        lambda band, value: cv2.warpAffine(
            band,
            matrix,
            (-(-width // stride), -(-height // stride)),
            flags=interpolation | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_CONSTANT,
            borderValue=value,
        ),
        source[first[1] : last[1], first[0] : last[0]],
        fill,
    )


def _source_of_crop(placement: Placement) -> np.ndarray:
    """(2, 3) float64: the matrix from (x, y, 1) of a crop pixel to (x, y) of the source image.

    Both are pixel indices, so centres are whole numbers and an image spans [-0.5, size - 0.5].
    """
    rows, columns = placement.rows, placement.columns
    # From the right: crop index -> crop -> unmirrored -> scaled image about its centre ->
    # unrotated -> source image -> source index.
    corner = [columns.start * columns.factor - columns.pad, rows.start * rows.factor - rows.pad]
    centre = _affine(1, 1, -columns.scaled / 2, -rows.scaled / 2)
    mirror = _affine(-1, 1, columns.crop, 0) if placement.flip else np.eye(3)
    angle = np.deg2rad(placement.angle_deg)
    turn = np.eye(3)
    # y points down, so this rotates clockwise, which undoes the rotation.
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    source = _affine(1 / columns.factor, 1 / rows.factor, columns.size / 2, rows.size / 2)
    to_crop, to_index = _affine(1, 1, 0.5, 0.5), _affine(1, 1, -0.5, -0.5)
    return (to_index @ source @ turn @ centre @ _affine(1, 1, *corner) @ mirror @ to_crop)[:2]


def _affine(scale_x: float, scale_y: float, move_x: float, move_y: float) -> np.ndarray:
    return np.array([[scale_x, 0, move_x], [0, scale_y, move_y], [0, 0, 1]], dtype=np.float64)
