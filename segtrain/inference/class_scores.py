"""From images to class scores: whole or by windows, at several scales, mirrored.

What is averaged, for comparison with published numbers:

- `whole`, one scale, no flip: nothing. The logits are resized to the label's size, and the largest
  logit wins. mmsegmentation evaluates its 512x1024 Cityscapes models like this.
- `whole` with several scales or flip: each view's logits are resized to the label's size,
  softmax makes them probabilities, and these are averaged with equal weight (mmsegmentation's
  test-time augmentation).
- `slide`: the softmax of each window (with flip: its mean with the mirrored window's) is added into
  a map of the view's size and divided by the number of windows over the pixel. The map is then
  resized to the label's size; maps of several scales are averaged (semseg).
  mmsegmentation averages the logits of windows instead, so its 769x769 models score slightly
  differently here.
- semseg's published single-scale numbers include the mirror image: `slide` with `flip: true`.

Every view is resized from the stored image in one step: bilinear, half-pixel centres, no
antialiasing, like cv2.INTER_LINEAR of floats. It is not rounded to whole grey levels, as views of
mmcv and Pillow and the crops of training are. A view smaller than the window gets a border of the
mean colour on both sides, which is cut off the result.

Views of equal size, and the windows of a view, go through the network in batches. Each sum is taken
image by image in the same order, so a batch changes a result only if the network's own kernels do.
Nothing here waits for the device.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from segtrain import kernels
from segtrain.inference.forward import Forward
from segtrain.inference.settings import (
    BatchLimits,
    InferenceSettings,
    Size,
    view_sizes,
)
from segtrain.inference.windows import resized_tiles, slide
from segtrain.models import SegModel
from segtrain.models.blocks import normalize
from segtrain.models.enlarged import enlarged
from segtrain.task.contract import Tile, Wanted
from segtrain.task.decision_rule import DecisionRule
from segtrain.task.prediction import LabelMap


def _ignore(count: int) -> None:
    """The default of `on_windows`."""


@torch.no_grad()  # not inference_mode: a tensor that a model caches here must still train later
def predict_labels(
    model: nn.Module | Forward,
    images: Sequence[Tensor],
    settings: InferenceSettings,
    out_sizes: Sequence[Size],
    limits: BatchLimits,
    *,
    probabilities: Wanted = "none",
    rule: DecisionRule | None = None,
    on_windows: Callable[[int], object] = _ignore,
) -> list[LabelMap]:
    """The predictions for a group of images, in their order.

    model: in evaluation mode; returns SegLogits at the size of its input. A Forward that is kept
        from call to call may replay it.
    images: (1, C, H, W) as stored, on the model's device, of any sizes and one dtype.
    out_sizes: (h, w) of each result, usually the size of the label.
    rule: None: the highest probability decides.
    limits: of a batch. Batches do not go beyond the group, those of windows not beyond a view.
    on_windows: called with the number of sliding windows computed since its last call; the calls
        add up to the sum of `num_windows`.

    The scores at `out_sizes` are made and dropped some rows at a time. So single whole views need
    memory for their own logits only, and sliding windows over an image of its out_size for one
    window's height of rows; several scales or another size need a map of the view.
    """
    forward = model if isinstance(model, Forward) else Forward(model)
    # The kernels of the short way give labels and the highest probability, no others.
    needs_all = probabilities == "all" or rule is not None
    if not needs_all and _need_no_full_logits(forward.model, images, settings, out_sizes):
        return _labels_of_small(forward, images, settings, limits)
    maps: dict[int, LabelMap] = {}
    for index, tiles in score_tiles(forward, images, settings, out_sizes, limits, on_windows):
        maps[index] = settings.decoding.label_map(
            tiles, probabilities, rule, is_logits=settings.gives_logits
        )
    return [maps[i] for i in range(len(images))]


def _need_no_full_logits(
    model: nn.Module,
    images: Sequence[Tensor],
    settings: InferenceSettings,
    out_sizes: Sequence[Size],
) -> bool:
    """Whether a kernel finds the labels of `images` from the logits of the head."""
    # A subclass or a hook may want logits at full size.
    if type(model) is not SegModel or model._forward_hooks or model._forward_pre_hooks:
        return False
    if model.head.stride is None or not settings.gives_logits or not images:
        return False
    if not settings.decoding.takes_highest:
        return False
    sizes = [image.shape[-2:] for image in images]
    views = [view_sizes(size, settings) for size in sizes]
    # A single view, of the size of image and label, so that nothing is resized.
    as_they_are = views == [[size] for size in out_sizes] == [[size] for size in sizes]
    return as_they_are and kernels.takes(next(model.parameters()))


def _labels_of_small(
    forward: Forward, images: Sequence[Tensor], settings: InferenceSettings, limits: BatchLimits
) -> list[LabelMap]:
    """The predictions for whole images, each as large as its label, with probabilities."""
    maps: dict[int, LabelMap] = {}
    for chosen, batch in _batches(images, settings, limits):
        size = batch.shape[-2:]
        view = _normalized_view(forward, batch, size, settings)
        small = forward.small_logits(view, settings.autocast)
        logits = enlarged(small, size, forward.model.head.stride, align_corners=False)
        assert logits is not None  # heads of a known stride have one that kernels take
        for i, label, probability in zip(chosen, *logits.labels(), strict=True):
            maps[i] = LabelMap(label, probability.isfinite().all(), probability)
    return [maps[i] for i in range(len(images))]


def predict_label(
    model: nn.Module, image: Tensor, settings: InferenceSettings, out_size: Size
) -> Tensor:
    """The most probable class of every pixel of one image, (h, w) uint8 on its device."""
    limits = BatchLimits(1, settings.batch_size or 1)
    return predict_labels(model, [image], settings, [out_size], limits)[0].label


def score_tiles(
    forward: Forward,
    images: Sequence[Tensor],
    settings: InferenceSettings,
    out_sizes: Sequence[Size],
    limits: BatchLimits,
    on_windows: Callable[[int], object] = _ignore,
) -> Iterator[tuple[int, Iterator[Tile]]]:
    """For each image its index and its scores at its out_size, as tiles from the top down.

    Logits of a single whole view, probabilities otherwise. The arguments are those of
    `predict_labels`. Use up the tiles of an image before the next image.
    """
    for image in images:
        if image.ndim != 4 or image.shape[:2] != (1, len(settings.mean)):
            expected = f"(1, {len(settings.mean)}, H, W)"
            raise ValueError(f"image: expected {expected}, got {tuple(image.shape)}")
    if settings.mode == "slide":
        for i, (image, out_size) in enumerate(zip(images, out_sizes, strict=True)):
            yield i, _slide(forward, image, settings, out_size, limits, on_windows)
        return
    for chosen, batch in _batches(images, settings, limits):
        views = _whole_views(forward, batch, settings, view_sizes(batch.shape[-2:], settings))
        means = _mean_of_views(views, settings, [out_sizes[i] for i in chosen])
        yield from zip(chosen, means, strict=True)


def _batches(
    images: Sequence[Tensor], settings: InferenceSettings, limits: BatchLimits
) -> Iterator[tuple[list[int], Tensor]]:
    """Images of one size, by their indices, and together, (N, C, H, W)."""
    for size in dict.fromkeys(image.shape[-2:] for image in images):
        # Not only neighbours: the indices bring the results back into their order.
        equal = [i for i, image in enumerate(images) if image.shape[-2:] == size]
        # Each view of a batch has all of its images, so the largest one decides.
        most = min(map(limits.of, view_sizes(size, settings)))
        for start in range(0, len(equal), most):
            chosen = equal[start : start + most]
            yield chosen, torch.cat([images[i] for i in chosen])


def _whole_views(
    forward: Forward, images: Tensor, settings: InferenceSettings, sizes: Sequence[Size]
) -> Iterator[Tensor]:
    """The logits (N, K, height, width) of each view, mirrored back where it was so."""
    for size in sizes:
        view = _normalized_view(forward, images, size, settings)
        yield forward.logits(view, settings.autocast)
        if settings.flip:
            yield forward.logits(view.flip(-1), settings.autocast).flip(-1)


def _slide(
    forward: Forward,
    image: Tensor,
    settings: InferenceSettings,
    out_size: Size,
    limits: BatchLimits,
    on_windows: Callable[[int], object],
) -> Iterator[Tile]:
    """The mean probabilities of the windows of all scales."""
    logits, most = partial(forward.logits, dtype=settings.autocast), limits.of(settings.crop_size)
    sizes = view_sizes(image.shape[-2:], settings)

    def tiles(size: Size) -> Iterator[Tile]:
        view = _normalized_view(forward, image, size, settings)
        return slide(logits, view, settings, most, on_windows)

    # A single view at the size of the result: each tile leaves at once, and no map of the view is
    # kept.
    if settings.num_views == 1 and sizes == [out_size]:
        yield from tiles(out_size)
        return
    views = (_whole_map(tiles(size), size) for size in sizes)
    for mean in _mean_of_views(views, settings, [out_size]):
        yield from mean


def _whole_map(tiles: Iterator[Tile], size: Size) -> Tensor:
    """(1, K, height, width) of all `tiles` of a view of `size`."""
    scores: Tensor | None = None
    for rows, tile in tiles:
        if scores is None:
            scores = tile.new_empty((1, tile.shape[0], *size))
        scores[0, :, rows] = tile
    return scores


def _mean_of_views(
    views: Iterator[Tensor], settings: InferenceSettings, out_sizes: Sequence[Size]
) -> Iterator[Iterator[Tile]]:
    """The mean of the views of each image of a batch at its out_size, as tiles from the top down.

    views: (N, K, height, width) each. A single view gives its scores themselves.
    """
    resized = partial(resized_tiles, align_corners=settings.align_corners)
    if settings.num_views == 1:
        yield from map(resized, next(views), out_sizes)
        return
    totals: list[Tensor] = []
    for scores in views:
        # Views come one after another, and each is added up before the next is computed.
        totals = totals or [scores.new_zeros((scores.shape[1], *size)) for size in out_sizes]
        for total, score_map, size in zip(totals, scores, out_sizes, strict=True):
            for rows, tile in resized(score_map, size):
                is_logits = settings.mode == "whole"
                total[:, rows] += settings.decoding.probabilities(tile, 0) if is_logits else tile
        del scores, score_map  # before the next view is computed
    for total, size in zip(totals, out_sizes, strict=True):
        yield resized(total.div_(settings.num_views), size)


def _normalized_view(
    forward: Forward, images: Tensor, size: Size, settings: InferenceSettings
) -> Tensor:
    """The normalized images at `size`, (N, C, height, width), in the dtype of the model."""
    parameter = next(forward.model.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    how = {"value_range": settings.value_range, "clip": settings.clip, "dtype": dtype}
    view = normalize(images, settings.mean, settings.std, **how)
    if size == images.shape[-2:]:
        return view
    return functional.interpolate(view, size=size, mode="bilinear", align_corners=False)
