"""Sliding windows over an image: where they lie, and the mean of their probabilities."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from segtrain.evaluation.settings import InferenceSettings, Size, view_sizes

Logits = Callable[[Tensor], Tensor]
"""A model: normalized images (N, 3, H, W) -> logits (N, K, H, W)."""

Tile = tuple[slice, Tensor]
"""Some rows of a map of scores: (rows, (K, number of rows, width))."""


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


def slide(
    logits: Logits, view: Tensor, settings: InferenceSettings, on_windows: Callable[[int], object]
) -> Iterator[Tile]:
    """The mean probabilities over the windows of `view`, (1, 3, H, W), as tiles from the top down.

    on_windows: called with the number of windows computed since its last call.
    """
    height, width = view.shape[-2:]
    padded, top, left = _pad(view, settings.crop_size)
    del view  # if it was padded, only the padded view is needed
    for rows, tile in _mean_probabilities(logits, padded, settings, on_windows):
        first, end = max(rows.start, top), min(rows.stop, top + height)
        if first < end:
            inside = slice(first - rows.start, end - rows.start)
            yield slice(first - top, end - top), tile[:, inside, left : left + width]


def spread_windows(view: Tensor, settings: InferenceSettings) -> Tensor:
    """At most `window_batch` windows, spread over `view`, (1, 3, H, W), as (n, 3, h, w)."""
    padded, _, _ = _pad(view, settings.crop_size)
    places = _places(padded, settings)
    num = min(settings.window_batch, len(places))
    step = (len(places) - 1) / max(1, num - 1)
    chosen = [places[round(i * step)] for i in range(num)]
    return torch.cat([padded[:, :, rows, columns] for rows, columns in chosen])


def _places(view: Tensor, settings: InferenceSettings) -> list[tuple[slice, slice]]:
    """Rows and columns of every window, from the top down."""
    (height, width), (crop_h, crop_w) = view.shape[-2:], settings.crop_size
    tops = window_starts(height, crop_h, settings.overlap)
    lefts = window_starts(width, crop_w, settings.overlap)
    return [(slice(t, t + crop_h), slice(x, x + crop_w)) for t in tops for x in lefts]


def _mean_probabilities(
    logits: Logits, view: Tensor, settings: InferenceSettings, on_windows: Callable[[int], object]
) -> Iterator[Tile]:
    """`slide` for a view no smaller than a window.

    A tile is yielded as soon as no later window reaches it: the map of an image of 12 million
    pixels and 19 classes would take 900 MB.
    """
    (height, width), (crop_h, crop_w) = view.shape[-2:], settings.crop_size
    tops = window_starts(height, crop_h, settings.overlap)
    lefts = window_starts(width, crop_w, settings.overlap)
    over_rows = _times_covered(height, tops, crop_h).view(1, -1, 1)
    over_columns = _times_covered(width, lefts, crop_w).view(1, 1, -1)
    places = _places(view, settings)
    strip, start = None, 0  # the sums of rows start .. start + crop_h - 1

    def mean(sums: Tensor) -> Tensor:
        times = over_rows[:, start : start + sums.shape[1]].to(sums)
        return (sums / times).div_(over_columns.to(sums))

    for i in range(0, len(places), settings.window_batch):
        batch = places[i : i + settings.window_batch]
        windows = torch.cat([view[:, :, rows, columns] for rows, columns in batch])
        probs = _probabilities(logits, windows, flip=settings.flip)
        if strip is None:
            strip = probs.new_zeros((probs.shape[1], crop_h, width))
        for (rows, columns), window in zip(batch, probs, strict=True):
            if rows.start > start:
                done = rows.start - start
                yield slice(start, rows.start), mean(strip[:, :done])
                strip = functional.pad(strip[:, done:], (0, 0, 0, done))
                start = rows.start
            strip[:, :, columns] += window
        on_windows(len(batch))
    assert strip is not None, "there is at least one window"
    yield slice(start, height), mean(strip)


def _probabilities(logits: Logits, windows: Tensor, *, flip: bool) -> Tensor:
    """(N, K, H, W); with `flip` the mean of each window's and of its mirror image's."""
    probs = logits(windows).softmax(1)
    if flip:
        probs += logits(windows.flip(-1)).softmax(1).flip(-1)
        probs /= 2
    return probs


def _times_covered(length: int, starts: list[int], window: int) -> Tensor:
    """How many windows lie over each row or column, (length,)."""
    times = torch.zeros(length)
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
