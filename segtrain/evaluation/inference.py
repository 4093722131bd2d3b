"""From images to class scores: whole or by windows, at several scales, with its mirror image.

What is averaged, for comparison with published numbers:

- `whole`, one scale, no flip: nothing. The logits are resized to the label's size, and the largest
  logit wins. mmsegmentation evaluates its 512x1024 Cityscapes models like this.
- `whole` with several scales or flip: each view's logits are resized to the label's size, softmax
  turns them into probabilities, and these are averaged with equal weight (mmsegmentation's
  test-time augmentation).
- `slide`: the softmax of each window (with flip: its mean with the mirrored window's) is added into
  a map of the view's size and divided by the number of windows over the pixel. The map is then
  resized to the label's size; maps of several scales are averaged (semseg). mmsegmentation averages
  the logits of windows instead, so its 769x769 models score slightly differently here.
- semseg's published single-scale numbers include the mirror image: `slide` with `flip: true`.

Every view is resized from the stored image in one step: bilinear, half-pixel centres, no
antialiasing, like cv2.INTER_LINEAR. A view smaller than the window gets a border of the mean colour
on both sides, which is cut off the result.

Views of equal size, and windows of any images, go through the network in batches. Each sum is taken
image by image in the same order, so a batch changes a result only if the network's own kernels do.
Nothing here waits for the device.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from segtrain.evaluation.settings import BatchLimits, InferenceSettings, Size, view_sizes
from segtrain.evaluation.windows import Tile, WindowedView, resized_tiles, slide
from segtrain.models.blocks import normalize
from segtrain.models.precision import autocast


class LabelMap(NamedTuple):
    """A prediction, on the device of its image.

    label: (h, w) uint8, the most probable class of every pixel.
    is_finite: () bool, whether the highest scores are finite numbers; else `label` means nothing.
    """

    label: Tensor
    is_finite: Tensor


def _ignore(count: int) -> None:
    """The default of `on_windows`."""


@torch.no_grad()  # not inference_mode: a tensor that a model caches here must still train later
def predict_labels(
    model: nn.Module,
    images: Sequence[Tensor],
    settings: InferenceSettings,
    out_sizes: Sequence[Size],
    limits: BatchLimits,
    *,
    on_windows: Callable[[int], object] = _ignore,
) -> list[LabelMap]:
    """The predictions for a group of images, in their order.

    model: in evaluation mode; returns SegLogits at the size of its input.
    images: (1, 3, H, W) uint8 RGB each, on the model's device, of any sizes.
    out_sizes: (h, w) of each result, usually the size of the label.
    limits: of a batch. Batches do not go beyond the group.
    on_windows: called with the number of sliding windows computed since its last call; the calls
        add up to the sum of `num_windows`.

    The scores at `out_sizes` are made and dropped some rows at a time. So single whole views need
    memory for their own logits only, and sliding windows over an image of its out_size for one
    window's height of rows; several scales, or another size, need a map of the view.
    """
    rows: list[list[Tensor]] = [[] for _ in images]
    finite: list[list[Tensor]] = [[] for _ in images]
    for index, (_, tile) in _score_tiles(model, images, settings, out_sizes, limits, on_windows):
        highest = tile.max(0)
        rows[index].append(highest.indices.to(torch.uint8))
        finite[index].append(highest.values.isfinite().all())
    return [
        LabelMap(torch.cat(parts), torch.stack(flags).all())
        for parts, flags in zip(rows, finite, strict=True)
    ]


def predict_label(
    model: nn.Module, image: Tensor, settings: InferenceSettings, out_size: Size
) -> Tensor:
    """The most probable class of every pixel of one image, (h, w) uint8 on its device."""
    limits = BatchLimits(1, settings.batch_size or 1)
    return predict_labels(model, [image], settings, [out_size], limits)[0].label


@torch.no_grad()
def predict_probabilities(
    model: nn.Module, image: Tensor, settings: InferenceSettings, out_size: Size
) -> Tensor:
    """The class probabilities of every pixel, (1, K, h, w) float32 or float64, summing to 1.

    Arguments as in `predict_label`, which is the argmax of this.
    """
    limits = BatchLimits(1, settings.batch_size or 1)
    found = _score_tiles(model, [image], settings, [out_size], limits, _ignore)
    scores = torch.cat([tile for _, (_, tile) in found], 1).unsqueeze(0)
    gives_logits = settings.mode == "whole" and settings.num_views == 1
    return scores.softmax(1) if gives_logits else scores


def _score_tiles(
    model: nn.Module,
    images: Sequence[Tensor],
    settings: InferenceSettings,
    out_sizes: Sequence[Size],
    limits: BatchLimits,
    on_windows: Callable[[int], object],
) -> Iterator[tuple[int, Tile]]:
    """The scores of all images at their out_size: the index of the image, and some of its rows.

    Those of one image are not between those of another, and come from the top down. Logits of a
    single whole view, probabilities otherwise.
    """
    for image in images:
        if image.ndim != 4 or image.shape[:2] != (1, 3):
            raise ValueError(f"image: expected (1, 3, H, W), got {tuple(image.shape)}")
    means = [_ViewMean(out_size, settings) for out_size in out_sizes]
    if settings.mode == "whole":
        return _whole(model, images, settings, means, limits)
    return _slide(model, images, settings, means, limits, on_windows)


def _whole(
    model: nn.Module,
    images: Sequence[Tensor],
    settings: InferenceSettings,
    means: Sequence["_ViewMean"],
    limits: BatchLimits,
) -> Iterator[tuple[int, Tile]]:
    for size in dict.fromkeys(image.shape[-2:] for image in images):
        sizes = view_sizes(size, settings)
        equal = [i for i, image in enumerate(images) if image.shape[-2:] == size]
        most = min(map(limits.of, sizes))
        for start in range(0, len(equal), most):
            chosen = equal[start : start + most]
            batch = torch.cat([images[i] for i in chosen])
            for scores in _whole_views(model, batch, settings, sizes):
                for i, one in zip(chosen, scores, strict=True):
                    for tile in means[i].add(one):
                        yield i, tile
                del scores, one  # before the next view is computed


def _whole_views(
    model: nn.Module, images: Tensor, settings: InferenceSettings, sizes: Sequence[Size]
) -> Iterator[Tensor]:
    """The logits (N, K, height, width) of each view, and of its mirror image mirrored back."""
    for size in sizes:
        view = _normalized_view(model, images, size, settings)
        yield _logits(model, settings, view)
        if settings.flip:
            yield _logits(model, settings, view.flip(-1)).flip(-1)


def _slide(
    model: nn.Module,
    images: Sequence[Tensor],
    settings: InferenceSettings,
    means: Sequence["_ViewMean"],
    limits: BatchLimits,
    on_windows: Callable[[int], object],
) -> Iterator[tuple[int, Tile]]:
    views = (
        WindowedView(_normalized_view(model, image, size, settings), settings, index=i)
        for i, image in enumerate(images)
        for size in view_sizes(image.shape[-2:], settings)
    )
    most, logits = limits.of(settings.crop_size), partial(_logits, model, settings)
    for view, rows in slide(logits, views, most, flip=settings.flip, on_windows=on_windows):
        for tile in means[view.index].add_rows(rows, view.size):
            yield view.index, tile


class _ViewMean:
    """The mean of the views of an image at `out_size`, given as soon as it is known.

    The views come one after another. A single view gives its scores themselves.
    """

    def __init__(self, out_size: Size, settings: InferenceSettings) -> None:
        self._out_size, self._settings = out_size, settings
        self._view: Tensor | None = None  # the rows so far
        self._total: Tensor | None = None  # probabilities, summed over views
        self._num_added = 0

    def add(self, scores: Tensor) -> Iterator[Tile]:
        """Adds the scores of a view, (K, height, width) at its own size."""
        if self._settings.num_views == 1:
            yield from self._resized(scores)
            return
        if self._total is None:
            self._total = scores.new_zeros((scores.shape[0], *self._out_size))
        for rows, tile in self._resized(scores):
            self._total[:, rows] += tile.softmax(0) if self._settings.mode == "whole" else tile
        self._num_added += 1
        if self._num_added == self._settings.num_views:
            total, self._total = self._total, None
            yield from self._resized(total.div_(self._settings.num_views))

    def add_rows(self, tile: Tile, size: Size) -> Iterator[Tile]:
        """Adds the next rows of a view of `size`."""
        if self._settings.num_views == 1 and size == self._out_size:
            yield tile
            return
        rows, scores = tile
        if self._view is None:
            self._view = scores.new_empty((scores.shape[0], *size))
        self._view[:, rows] = scores
        if rows.stop == size[0]:
            view, self._view = self._view, None
            yield from self.add(view)

    def _resized(self, scores: Tensor) -> Iterator[Tile]:
        return resized_tiles(scores, self._out_size, align_corners=self._settings.align_corners)


def _normalized_view(
    model: nn.Module, images: Tensor, size: Size, settings: InferenceSettings
) -> Tensor:
    """The normalized images at `size`, (N, 3, height, width), in the dtype of the model."""
    parameter = next(model.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    view = normalize(images, settings.mean, settings.std, dtype=dtype)
    if size == images.shape[-2:]:
        return view
    return functional.interpolate(view, size=size, mode="bilinear", align_corners=False)


def _logits(model: nn.Module, settings: InferenceSettings, images: Tensor) -> Tensor:
    """(N, K, H, W) in float32, or float64 if the model is."""
    with autocast(settings.autocast, images.device):
        logits = model(images).out
    return logits if logits.dtype == torch.float64 else logits.float()
