"""Sliding windows over images: where they lie, and the mean of their probabilities."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional

from segtrain.evaluation.settings import InferenceSettings, Size, view_sizes

Logits = Callable[[Tensor], Tensor]
"""A model: normalized images (N, 3, H, W) -> logits (N, K, H, W)."""

Tile = tuple[slice, Tensor]
"""Some rows of a map of scores: (rows, (K, number of rows, width))."""

Place = tuple[slice, slice]
"""The rows and columns of a window."""


def window_starts(length: int, window: int, overlap: float) -> list[int]:
    """The first pixel of each window along an axis of `length` pixels.

    Windows have equal size, cover all pixels and repeat at least `overlap` of their neighbour. The
    last window ends at the border. An axis no longer than the window needs one window.
    """
    if length <= window:
        return [0]
    # Rounded first: 10 * (1 - 0.7) is slightly more than 3 and must not become a stride of 4.
    stride = max(1, math.ceil(round(window * (1 - overlap), 6)))
    count = math.ceil((length - window) / stride) + 1
    return [min(i * stride, length - window) for i in range(count)]


def num_windows(size: Sequence[int], settings: InferenceSettings) -> int:
    """How many sliding windows an image of `size`, (height, width), takes over all scales."""
    total = 0
    for view in view_sizes(size, settings):
        rows, columns = (
            len(window_starts(length, window, settings.overlap))
            for length, window in zip(view, settings.crop_size, strict=True)
        )
        total += rows * columns
    return total


class WindowedView:
    """One view of an image, and the mean probabilities of its windows as far as they are known.

    view: (1, 3, H, W), normalized. It is padded if it is smaller than a window.
    index: of the image, for the caller. size: (height, width). places: of its windows, from the
        top down.
    """

    def __init__(self, view: Tensor, settings: InferenceSettings, *, index: int = 0) -> None:
        self.index = index
        self.size: Size = tuple(view.shape[-2:])
        self._crop_h, crop_w = settings.crop_size
        self._padded, self._top, self._left = _pad(view, settings.crop_size)
        height, width = self._padded.shape[-2:]
        tops = window_starts(height, self._crop_h, settings.overlap)
        lefts = window_starts(width, crop_w, settings.overlap)
        self.places = [
            (slice(top, top + self._crop_h), slice(left, left + crop_w))
            for top in tops
            for left in lefts
        ]
        device = view.device
        self._over_rows = _times_covered(height, tops, self._crop_h, device).view(1, -1, 1)
        self._over_columns = _times_covered(width, lefts, crop_w, device).view(1, 1, -1)
        # The sums of the rows start .. start + crop_h - 1. A map of the whole view would take
        # 900 MB for 12 million pixels and 19 classes.
        self._strip: Tensor | None = None
        self._start = self._num_added = 0

    def window(self, place: Place) -> Tensor:
        """The pixels of one window, (1, 3, h, w)."""
        rows, columns = place
        return self._padded[:, :, rows, columns]

    def add(self, place: Place, probs: Tensor) -> Iterator[Tile]:
        """Adds `probs`, (K, h, w), of the next of `places`; yields rows that no later one reaches.

        Use up the iterator before the next call.
        """
        rows, columns = place
        if self._strip is None:
            self._strip = probs.new_zeros((probs.shape[0], self._crop_h, self._padded.shape[-1]))
        if rows.start > self._start:
            done = rows.start - self._start
            yield from self._mean(self._strip[:, :done])
            self._strip = functional.pad(self._strip[:, done:], (0, 0, 0, done))
            self._start = rows.start
        self._strip[:, :, columns] += probs
        self._num_added += 1
        if self._num_added == len(self.places):
            yield from self._mean(self._strip)
            self._strip = None

    def _mean(self, sums: Tensor) -> Iterator[Tile]:
        """The mean of rows that are complete, without those of the padding."""
        rows = slice(self._start, self._start + sums.shape[1])
        mean = (sums / self._over_rows[:, rows].to(sums)).div_(self._over_columns.to(sums))
        first, end = max(rows.start, self._top), min(rows.stop, self._top + self.size[0])
        if first < end:
            inside = slice(first - rows.start, end - rows.start)
            columns = slice(self._left, self._left + self.size[1])
            yield slice(first - self._top, end - self._top), mean[:, inside, columns]


def slide(
    logits: Logits,
    views: Iterable[WindowedView],
    batch_size: int,
    *,
    flip: bool,
    on_windows: Callable[[int], object],
) -> Iterator[tuple[WindowedView, Tile]]:
    """The mean probabilities of each of `views`, in order, as tiles from the top down.

    Windows of several views go through the network together. A view is taken when its first window
    is due. A tile is yielded as soon as no later window reaches it.

    on_windows: called with the number of windows computed since its last call.
    """
    places = ((view, place) for view in views for place in view.places)
    while batch := list(islice(places, batch_size)):
        windows = torch.cat([view.window(place) for view, place in batch])
        probs = _probabilities(logits, windows, flip=flip)
        for (view, place), window in zip(batch, probs, strict=True):
            for tile in view.add(place, window):
                yield view, tile
        on_windows(len(batch))


def _probabilities(logits: Logits, windows: Tensor, *, flip: bool) -> Tensor:
    """(N, K, H, W); with `flip` the mean of each window's and of its mirror image's."""
    probs = logits(windows).softmax(1)
    if flip:
        probs += logits(windows.flip(-1)).softmax(1).flip(-1)
        probs /= 2
    return probs


def _times_covered(length: int, starts: list[int], window: int, device: torch.device) -> Tensor:
    """How many windows lie over each row or column, (length,)."""
    times = torch.zeros(length, device=device)
    for start in starts:
        times[start : start + window] += 1
    return times


def _pad(view: Tensor, crop_size: Size) -> tuple[Tensor, int, int]:
    """`view` padded to at least the window's size; the rows above it and the columns left of it.

    Zero is the mean colour of a normalized image.
    """
    down = max(0, crop_size[0] - view.shape[-2])
    across = max(0, crop_size[1] - view.shape[-1])
    if not down and not across:
        return view, 0, 0  # functional.pad would copy it
    top, left = down // 2, across // 2
    return functional.pad(view, (left, across - left, top, down - top)), top, left


# Numbers of a tile, (K, rows, W): 64 MiB in float32.
TILE_ELEMENTS = 2**24


def resized_tiles(scores: Tensor, out_size: Size, *, align_corners: bool) -> Iterator[Tile]:
    """`functional.interpolate(scores, out_size)` of (K, H, W), as tiles from the top down.

    A tile holds at most TILE_ELEMENTS numbers: K * h * w of many classes would not fit into memory.
    """
    num_classes, height, width = scores.shape
    low, high, weight = _source_rows(height, out_size[0], scores, align_corners=align_corners)
    num_rows = max(1, TILE_ELEMENTS // (num_classes * max(width, out_size[1])))
    for start in range(0, out_size[0], num_rows):
        rows = slice(start, min(start + num_rows, out_size[0]))
        if height == out_size[0]:
            tile = scores[:, rows]
        else:
            tile = torch.lerp(scores[:, low[rows]], scores[:, high[rows]], weight[:, rows])
        if width != out_size[1]:
            # The number of rows stays, so this only resizes along the columns.
            size = (tile.shape[1], out_size[1])
            tile = functional.interpolate(
                tile.unsqueeze(0), size=size, mode="bilinear", align_corners=align_corners
            ).squeeze(0)
        yield rows, tile


def _source_rows(
    height: int, out_height: int, like: Tensor, *, align_corners: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The two source rows of each output row, (h,) each, and the weight of the second, (1, h, 1).

    The rule is that of functional.interpolate.
    """
    position = torch.arange(out_height, dtype=torch.float64, device=like.device)
    if align_corners:
        position *= (height - 1) / max(out_height - 1, 1)
    else:
        position = ((position + 0.5) * (height / out_height) - 0.5).clamp(min=0)
    low = position.floor().clamp(max=height - 1)
    weight = (position - low).to(like.dtype).view(1, -1, 1)
    high = (low + 1).clamp(max=height - 1)
    return low.long(), high.long(), weight
