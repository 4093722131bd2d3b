"""Sliding windows over an image: where they lie, and the mean of their probabilities."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional

from segtrain.inference.settings import InferenceSettings, Size, view_sizes
from segtrain.task.contract import Tile

Logits = Callable[[Tensor], Tensor]
"""A model: normalized images (N, C, H, W) -> logits (N, K, H, W)."""


def window_starts(length: int, window: int, overlap: float) -> list[int]:
    """The first pixel of each window along an axis of `length` pixels.

    Windows have equal size, cover all pixels and repeat at least `overlap` of their neighbour. The
    last window ends at the border. An axis no longer than the window needs one window.

    Windows of 4 pixels that share 2, then at least 1; the last one, 7 to 10, shares 3.

    >>> window_starts(10, 4, 1 / 2), window_starts(11, 4, 1 / 4)
    ([0, 2, 4, 6], [0, 3, 6, 7])
    """
    if length <= window:
        return [0]
    # Rounded first: 10 * (1 - 0.7) is slightly more than 3 and must not become a stride of 4.
    stride = max(1, math.ceil(round(window * (1 - overlap), 6)))
    count = math.ceil((length - window) / stride) + 1
    return [min(i * stride, length - window) for i in range(count)]


def num_windows(size: Sequence[int], settings: InferenceSettings) -> int:
    """How many sliding windows an image of `size`, (height, width), takes over all scales."""
    views = view_sizes(size, settings)
    return sum(math.prod(map(len, _grid(view, settings))) for view in views)


def slide(
    logits: Logits,
    view: Tensor,
    settings: InferenceSettings,
    batch_size: int,
    on_windows: Callable[[int], object],
) -> Iterator[Tile]:
    """The mean probabilities of the windows over `view`, (1, C, H, W), as tiles from the top down.

    A view smaller than a window is padded. A tile is yielded as soon as no later window reaches
    it: sums over the whole view would take 900 MB for 12 million pixels and 19 classes.

    on_windows: called with the number of windows computed since its last call.
    """
    height, width = view.shape[-2:]
    crop_h, crop_w = settings.crop_size
    padded, top, left = _pad(view, settings.crop_size)
    padded_h, padded_w = padded.shape[-2:]
    tops, lefts = _grid((padded_h, padded_w), settings)
    # Windows form a grid: the number of them over a pixel is the product of these two.
    over_rows = _times_covered(padded_h, tops, crop_h, view.device).view(1, -1, 1)
    over_columns = _times_covered(padded_w, lefts, crop_w, view.device).view(1, 1, -1)
    # A generator: windows are cut out of the view batch by batch.
    windows = (padded[:, :, y : y + crop_h, x : x + crop_w] for y in tops for x in lefts)
    probs = _probabilities(logits, windows, batch_size, on_windows, settings)
    sums: Tensor | None = None  # of the rows start .. start + crop_h - 1
    for start, end in zip(tops, [*tops[1:], padded_h], strict=True):
        for x in lefts:
            window = next(probs)
            if sums is None:
                sums = window.new_zeros((window.shape[0], crop_h, padded_w))
            sums[:, :, x : x + crop_w] += window
        # No later window reaches the rows up to `end`. Those of the padding are left out.
        done = end - start
        mean = (sums[:, :done] / over_rows[:, start:end].to(sums)).div_(over_columns.to(sums))
        # The other rows move up; the next windows begin where they do.
        sums = functional.pad(sums[:, done:], (0, 0, 0, done))
        first, last = max(start, top), min(end, top + height)
        if first < last:
            inside = mean[:, first - start : last - start, left : left + width]
            yield slice(first - top, last - top), inside


def _grid(size: Size, settings: InferenceSettings) -> tuple[list[int], list[int]]:
    """The first rows and the first columns of the windows over a view of `size`."""
    (height, width), (crop_h, crop_w) = size, settings.crop_size
    overlap = settings.overlap
    return window_starts(height, crop_h, overlap), window_starts(width, crop_w, overlap)


def _probabilities(
    logits: Logits,
    windows: Iterator[Tensor],
    batch_size: int,
    on_windows: Callable[[int], object],
    settings: InferenceSettings,
) -> Iterator[Tensor]:
    """(K, h, w) of each window; with `flip` the mean of its own and of its mirror image's."""
    while some := list(islice(windows, batch_size)):
        batch = torch.cat(some)
        probs = settings.decoding.probabilities(logits(batch))
        if settings.flip:
            probs += settings.decoding.probabilities(logits(batch.flip(-1))).flip(-1)
            probs /= 2
        # Between batches a caller may leave by an exception, as an evaluation that is stopped.
        on_windows(len(some))
        yield from probs


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
