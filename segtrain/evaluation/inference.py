"""From one image to class scores: whole or by windows, at several scales, with its mirror image.

What is averaged, so that numbers can be compared with published ones:

- `whole`, one scale, no flip: nothing. The logits are resized to the label's size, and the largest
  one wins. This is how mmsegmentation evaluates its 512x1024 Cityscapes models.
- `whole` with several scales or flip: each view's logits are resized to the label's size and turned
  into probabilities by softmax; the probabilities are averaged, every view weighing the same
  (mmsegmentation's test-time augmentation).
- `slide`: each window's softmax, or the mean of those of the window and its mirror image, is added
  into a map of the view's size and divided by the number of windows over the pixel; the map is then
  resized to the label's size, and the maps of several scales are averaged (semseg). mmsegmentation
  averages the logits of windows instead, so its 769x769 models score a little differently here.
- semseg's published single-scale numbers include the mirror image: `slide` with `flip: true`.

Every view is resized from the stored image in one step, bilinear, with half-pixel centres and
without antialiasing, like cv2.INTER_LINEAR. A view smaller than the window gets a border of the
mean colour, half on either side, which is cut off the result.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from segtrain.config import Config
from segtrain.models.normalize import Color, normalize

Size = tuple[int, int]

# Windows that go through the network together: enough to fill a device, little memory.
WINDOW_BATCH = 4
# Elements of (K, rows, W) that are resized at a time: 64 MiB in float32.
TILE_ELEMENTS = 2**24

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class InferenceSettings:
    """How an image becomes a prediction.

    crop_size: (height, width) of the sliding window; unused in mode `whole`.
    overlap: the share of a window that its neighbour repeats, in [0, 1).
    scales: sizes of the views relative to the image after `short_side_px`.
    short_side_px: the image is resized to this short side first; None: it is taken as stored.
    align_corners: how score maps are resized, as inside the model.
    mean, std: the normalization, in units of 0..255.
    autocast: dtype of mixed precision; None: the model's own.
    """

    mode: Literal["whole", "slide"] = "whole"
    crop_size: Size = (512, 512)
    overlap: float = 1 / 3
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    short_side_px: int | None = None
    align_corners: bool = False
    mean: Color
    std: Color
    autocast: torch.dtype | None = None
    window_batch: int = WINDOW_BATCH

    @property
    def num_views(self) -> int:
        """How many score maps are averaged; sliding windows average the mirror image by window."""
        return len(self.scales) * (2 if self.flip and self.mode == "whole" else 1)

    @classmethod
    def from_config(cls, config: Config) -> "InferenceSettings":
        """The settings of an experiment; the window is the training crop where none is given."""
        return cls(
            mode=config.eval.mode,
            crop_size=config.eval.crop_size or config.augment.crop_size,
            overlap=config.eval.overlap,
            scales=config.eval.scales,
            flip=config.eval.flip,
            short_side_px=config.data.short_side_px,
            align_corners=config.model.align_corners,
            mean=config.data.mean,
            std=config.data.std,
            autocast=_AUTOCAST.get(config.train.precision),
        )

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON can hold them: `autocast` is the name of its dtype, or None."""
        autocast = None if self.autocast is None else str(self.autocast).removeprefix("torch.")
        return {**asdict(self), "autocast": autocast}

    def describe(self) -> str:
        """One line for people: `sliding window 713x713, overlap 0.33; scale 1; with flip`."""
        how = "whole image"
        if self.mode == "slide":
            height, width = self.crop_size
            how = f"sliding window {height}x{width}, overlap {self.overlap:.2f}"
        parts = [how]
        if self.short_side_px is not None:
            parts.append(f"short side {self.short_side_px} px")
        parts.append("scale " + " ".join(f"{s:g}" for s in self.scales))
        parts.append("with flip" if self.flip else "no flip")
        if self.autocast is not None:
            parts.append(str(self.autocast).removeprefix("torch.") + " autocast")
        return "; ".join(parts)


def _ignore(count: int) -> None:
    """What `on_windows` is where nobody asks."""


@torch.no_grad()  # not inference_mode: a tensor that a model caches here must still train later
def predict_label(
    model: nn.Module,
    image: Tensor,
    settings: InferenceSettings,
    out_size: Size,
    *,
    on_windows: Callable[[int], object] = _ignore,
) -> Tensor:
    """The most probable class of every pixel, (h, w) uint8 on the image's device.

    model: in evaluation mode; returns SegLogits at the size of its input.
    image: (1, 3, H, W) uint8 RGB, on the model's device.
    out_size: (h, w) of the result, as a rule the size of the label.
    on_windows: called with the number of sliding windows that were computed since the last call;
        all calls together count `num_windows`.

    The scores at `out_size` are made and dropped some rows at a time, so for one whole view only
    the logits of the view itself are held. Sliding windows over an image of `out_size` hold a
    window's height of rows; with several scales, or another size, they hold a map of the view.
    """
    if settings.mode == "slide" and view_sizes(image.shape[-2:], settings) == [out_size]:
        scale = settings.scales[0]
        tiles = _slide_rows(model, _checked(image), settings, scale, on_windows)
    else:
        scores, _ = _scores(model, image, settings, out_size, on_windows)
        tiles = _resized_tiles(scores, out_size, settings.align_corners)
    return torch.cat([tile.max(0).indices.to(torch.uint8) for _, tile in tiles])


@torch.no_grad()
def predict_probabilities(
    model: nn.Module, image: Tensor, settings: InferenceSettings, out_size: Size
) -> Tensor:
    """The class probabilities of every pixel, (1, K, h, w) float32 or float64, summing to 1.

    Arguments as in `predict_label`, which is the argmax of this.
    """
    scores, are_logits = _scores(model, image, settings, out_size, _ignore)
    result = scores.new_empty((scores.shape[0], *out_size))
    for rows, tile in _resized_tiles(scores, out_size, settings.align_corners):
        result[:, rows] = tile.softmax(0) if are_logits else tile
    return result.unsqueeze(0)


def window_starts(length: int, window: int, overlap: float) -> list[int]:
    """Where windows begin so that they cover `length` pixels, neighbours sharing `overlap` or more.

    All windows have the same size, and the last one ends at the border. A `length` that is not
    larger than the window needs a single one.
    """
    if length <= window:
        return [0]
    # Rounded first: 10 * (1 - 0.7) is 3 and a little, and must not become a stride of 4.
    stride = max(1, math.ceil(round(window * (1 - overlap), 6)))
    count = math.ceil((length - window) / stride) + 1
    return [min(i * stride, length - window) for i in range(count)]


def view_size(size: Size, short_side_px: int | None, scale: float) -> Size:
    """The (height, width) of a view of an image of `size`; sides are rounded, and at least 1."""
    base = 1.0 if short_side_px is None else short_side_px / min(size)
    height, width = (max(1, math.floor(side * base * scale + 0.5)) for side in size)
    return height, width


def view_sizes(size: Sequence[int], settings: InferenceSettings) -> list[Size]:
    """The size of the view at each of the scales, for an image of `size`, a (height, width)."""
    height, width = size
    return [view_size((height, width), settings.short_side_px, s) for s in settings.scales]


def num_windows(size: Sequence[int], settings: InferenceSettings) -> int:
    """How many sliding windows an image of `size`, a (height, width), takes over all scales."""
    counts = [
        [
            len(window_starts(length, window, settings.overlap))
            for length, window in zip(view, settings.crop_size, strict=True)
        ]
        for view in view_sizes(size, settings)
    ]
    return sum(rows * columns for rows, columns in counts)


def _checked(image: Tensor) -> Tensor:
    if image.ndim != 4 or image.shape[:2] != (1, 3):
        raise ValueError(f"image: expected (1, 3, H, W), got {tuple(image.shape)}")
    return image


def _scores(
    model: nn.Module,
    image: Tensor,
    settings: InferenceSettings,
    out_size: Size,
    on_windows: Callable[[int], object],
) -> tuple[Tensor, bool]:
    """One map of scores (K, height, width), and whether these are logits or else probabilities.

    A single view keeps its own size; several are averaged at `out_size`.
    """
    _checked(image)
    are_logits = settings.mode == "whole"
    views = (
        _whole_views(model, image, settings)
        if are_logits
        else _slide_views(model, image, settings, on_windows)
    )
    if settings.num_views == 1:
        return next(views), are_logits
    total = None
    for scores in views:
        if total is None:
            total = scores.new_zeros((scores.shape[0], *out_size))
        for rows, tile in _resized_tiles(scores, out_size, settings.align_corners):
            total[:, rows] += tile.softmax(0) if are_logits else tile
        del scores  # before the next view is computed
    assert total is not None, "there is at least one view"
    return total.div_(settings.num_views), False


def _whole_views(model: nn.Module, image: Tensor, settings: InferenceSettings) -> Iterator[Tensor]:
    """The logits (K, height, width) of each scale, and of its mirror image turned back."""
    for scale in settings.scales:
        view = _view(model, image, settings, scale)
        yield _logits(model, view, settings)[0]
        if settings.flip:
            yield _logits(model, view.flip(-1), settings)[0].flip(-1)


def _slide_views(
    model: nn.Module,
    image: Tensor,
    settings: InferenceSettings,
    on_windows: Callable[[int], object],
) -> Iterator[Tensor]:
    """The probabilities (K, height, width) of each scale, averaged over its windows."""
    sizes = view_sizes(image.shape[-2:], settings)
    for scale, size in zip(settings.scales, sizes, strict=True):
        total = None
        for rows, tile in _slide_rows(model, image, settings, scale, on_windows):
            if total is None:
                total = tile.new_empty((tile.shape[0], *size))
            total[:, rows] = tile
        assert total is not None, "there is at least one window"
        yield total


def _slide_rows(
    model: nn.Module,
    image: Tensor,
    settings: InferenceSettings,
    scale: float,
    on_windows: Callable[[int], object],
) -> Iterator[tuple[slice, Tensor]]:
    """The probabilities of one scale as (rows, (K, number of rows, width)) from top to bottom."""
    view = _view(model, image, settings, scale)
    height, width = view.shape[-2:]
    padded, top, left = _pad(view, settings.crop_size)
    del view  # where it was padded, only the larger one is needed
    for rows, tile in _slide(model, padded, settings, on_windows):
        first, end = max(rows.start, top), min(rows.stop, top + height)
        if first < end:
            inside = slice(first - rows.start, end - rows.start)
            yield slice(first - top, end - top), tile[:, inside, left : left + width]


def _slide(
    model: nn.Module,
    view: Tensor,
    settings: InferenceSettings,
    on_windows: Callable[[int], object],
) -> Iterator[tuple[slice, Tensor]]:
    """The mean probabilities over the windows of `view`, which is no smaller than a window.

    They come as (rows, (K, number of rows, width)) from top to bottom, each as soon as no later
    window reaches it: the map of an image of 12 million pixels and 19 classes would take 900 MB.
    """
    (height, width), (crop_h, crop_w) = view.shape[-2:], settings.crop_size
    tops = window_starts(height, crop_h, settings.overlap)
    lefts = window_starts(width, crop_w, settings.overlap)
    over_rows = _times_covered(height, tops, crop_h).view(1, -1, 1)
    over_columns = _times_covered(width, lefts, crop_w).view(1, 1, -1)
    places = [(slice(t, t + crop_h), slice(x, x + crop_w)) for t in tops for x in lefts]
    strip, start = None, 0  # sums over the windows that begin at row `start` or reach below it

    def mean(sums: Tensor) -> Tensor:
        times = over_rows[:, start : start + sums.shape[1]].to(sums)
        return (sums / times).div_(over_columns.to(sums))

    for i in range(0, len(places), settings.window_batch):
        some = places[i : i + settings.window_batch]
        probs = _window_probs(model, view, some, settings)
        if strip is None:
            strip = probs.new_zeros((probs.shape[1], crop_h, width))
        for (rows, columns), window in zip(some, probs, strict=True):
            if rows.start > start:
                done = rows.start - start
                yield slice(start, rows.start), mean(strip[:, :done])
                strip = functional.pad(strip[:, done:], (0, 0, 0, done))
                start = rows.start
            strip[:, :, columns] += window
        on_windows(len(some))
    assert strip is not None, "there is at least one window"
    yield slice(start, height), mean(strip)


def _window_probs(
    model: nn.Module, view: Tensor, places: list[tuple[slice, slice]], settings: InferenceSettings
) -> Tensor:
    """The probabilities (windows, K, crop_h, crop_w) of the windows at `places`: rows, columns."""
    windows = torch.cat([view[:, :, rows, columns] for rows, columns in places])
    probs = _logits(model, windows, settings).softmax(1)
    if settings.flip:
        probs += _logits(model, windows.flip(-1), settings).softmax(1).flip(-1)
        probs /= 2
    return probs


def _times_covered(length: int, starts: list[int], window: int) -> Tensor:
    """How many windows lie over each row or column, (length,)."""
    times = torch.zeros(length)
    for start in starts:
        times[start : start + window] += 1
    return times


def _pad(view: Tensor, crop_size: Size) -> tuple[Tensor, int, int]:
    """`view` made as large as the window at least, and the rows above and columns left of it.

    Zero is the mean colour of a normalized image.
    """
    down = max(0, crop_size[0] - view.shape[-2])
    across = max(0, crop_size[1] - view.shape[-1])
    top, left = down // 2, across // 2
    return functional.pad(view, (left, across - left, top, down - top)), top, left


def _view(model: nn.Module, image: Tensor, settings: InferenceSettings, scale: float) -> Tensor:
    """The normalized image at `scale`, (1, 3, height, width)."""
    parameter = next(model.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    view = normalize(image, settings.mean, settings.std, dtype=dtype)
    size = view_size((image.shape[2], image.shape[3]), settings.short_side_px, scale)
    if size == image.shape[-2:]:
        return view
    return functional.interpolate(view, size=size, mode="bilinear", align_corners=False)


def _logits(model: nn.Module, images: Tensor, settings: InferenceSettings) -> Tensor:
    """(N, K, H, W) in float32, or float64 if the model is."""
    precision: AbstractContextManager[None] = nullcontext()
    if settings.autocast is not None:
        precision = torch.autocast(images.device.type, dtype=settings.autocast)
    with precision:
        logits = model(images).out
    return logits if logits.dtype == torch.float64 else logits.float()


def _resized_tiles(
    scores: Tensor, out_size: Size, align_corners: bool
) -> Iterator[tuple[slice, Tensor]]:
    """`scores` (K, H, W) resized bilinearly, as (rows, (K, number of rows, w)) from top to bottom.

    Together the tiles are `functional.interpolate(scores, out_size)`, of which no more than
    TILE_ELEMENTS numbers are held at a time: K * h * w of many classes would not fit.
    """
    num_classes, height, width = scores.shape
    low, high, weight = _source_rows(height, out_size[0], align_corners, scores)
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
    height: int, out_height: int, align_corners: bool, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """For each output row the two rows it lies between, (h,) each, and the weight of the second,
    (1, h, 1); the rule of functional.interpolate."""
    position = torch.arange(out_height, dtype=torch.float64)
    if align_corners:
        position *= (height - 1) / max(out_height - 1, 1)
    else:
        position = ((position + 0.5) * (height / out_height) - 0.5).clamp(min=0)
    low = position.floor().clamp(max=height - 1)
    weight = (position - low).to(like.dtype).view(1, -1, 1)
    high = (low + 1).clamp(max=height - 1)
    return low.long().to(like.device), high.long().to(like.device), weight.to(like.device)
