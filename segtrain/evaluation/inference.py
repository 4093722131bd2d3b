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

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from segtrain.evaluation.settings import BatchLimits, InferenceSettings, Size, view_sizes
from segtrain.evaluation.windows import Logits, Tile, WindowedView, resized_tiles, slide
from segtrain.models.blocks import normalize
from segtrain.models.precision import autocast


class LabelMap(NamedTuple):
    """A prediction, on the device of its image.

    label: (h, w) uint8, the most probable class of every pixel.
    is_finite: () bool, whether the highest scores are finite numbers; else `label` means nothing.
    """

    label: Tensor
    is_finite: Tensor


class _Scores(NamedTuple):
    """Some rows of the scores of an image at its out_size; its tiles come from the top down.

    index: of the image in its group. are_logits: or else probabilities.
    """

    index: int
    tile: Tile
    are_logits: bool


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
    for index, (_, tile), _ in _score_tiles(model, images, settings, out_sizes, limits, on_windows):
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
    scores = _score_tiles(model, [image], settings, [out_size], limits, _ignore)
    probs = [tile.softmax(0) if are_logits else tile for _, (_, tile), are_logits in scores]
    return torch.cat(probs, 1).unsqueeze(0)


def _score_tiles(
    model: nn.Module,
    images: Sequence[Tensor],
    settings: InferenceSettings,
    out_sizes: Sequence[Size],
    limits: BatchLimits,
    on_windows: Callable[[int], object],
) -> Iterator[_Scores]:
    """The scores of all images; those of one image are not between those of another."""
    for image in images:
        if image.ndim != 4 or image.shape[:2] != (1, 3):
            raise ValueError(f"image: expected (1, 3, H, W), got {tuple(image.shape)}")
    logits = partial(_logits, model, settings)
    view_of = partial(normalized_view, model, settings=settings)
    if settings.mode == "slide":
        yield from _slide(logits, view_of, images, settings, out_sizes, limits, on_windows)
        return
    for size in dict.fromkeys(image.shape[-2:] for image in images):
        equal = [i for i, image in enumerate(images) if image.shape[-2:] == size]
        most = min(limits.of(view) for view in view_sizes(size, settings))
        for start in range(0, len(equal), most):
            chosen = equal[start : start + most]
            batch = torch.cat([images[i] for i in chosen])
            sizes = [out_sizes[i] for i in chosen]
            for scores in _whole(logits, partial(view_of, batch), size, settings, sizes):
                yield scores._replace(index=chosen[scores.index])


def _whole(
    logits: Logits,
    view_of: Callable[[Size], Tensor],
    size: Size,
    settings: InferenceSettings,
    out_sizes: Sequence[Size],
) -> Iterator[_Scores]:
    """The scores of images of one size, whose views go through the network together."""
    maps = _whole_maps(logits, map(view_of, view_sizes(size, settings)), flip=settings.flip)
    if settings.num_views == 1:
        for i, one in enumerate(next(maps)):
            for tile in _resized(one, out_sizes[i], settings):
                yield _Scores(i, tile, are_logits=True)
        return
    means = [_Mean(out_size, settings) for out_size in out_sizes]
    for scores in maps:
        for mean, one in zip(means, scores, strict=True):
            mean.add(one, are_logits=True)
        del scores, one  # before the next view is computed
    for i, mean in enumerate(means):
        for tile in mean.tiles():
            yield _Scores(i, tile, are_logits=False)


def _slide(
    logits: Logits,
    view_of: Callable[[Tensor, Size], Tensor],
    images: Sequence[Tensor],
    settings: InferenceSettings,
    out_sizes: Sequence[Size],
    limits: BatchLimits,
    on_windows: Callable[[int], object],
) -> Iterator[_Scores]:
    """The scores of images of any sizes, whose windows go through the network together."""
    views = (
        WindowedView(view_of(image, size), settings, index=i)
        for i, image in enumerate(images)
        for size in view_sizes(image.shape[-2:], settings)
    )
    found = slide(
        logits,
        views,
        limits.of(settings.crop_size),
        flip=settings.flip,
        on_windows=on_windows,
    )
    for i, parts in groupby(found, key=lambda part: part[0].index):
        sizes = view_sizes(images[i].shape[-2:], settings)
        tiles_of_views = (
            (tile for _, tile in tiles) for _, tiles in groupby(parts, key=lambda part: part[0])
        )
        for tile in _slide_tiles(tiles_of_views, sizes, settings, out_sizes[i]):
            yield _Scores(i, tile, are_logits=False)


def _slide_tiles(
    tiles_of_views: Iterator[Iterator[Tile]],
    sizes: Sequence[Size],
    settings: InferenceSettings,
    out_size: Size,
) -> Iterator[Tile]:
    """The mean over the views of one image, of which `sizes` are the sizes."""
    if list(sizes) == [out_size]:
        yield from next(tiles_of_views)
        return
    maps = (_joined(tiles, size) for tiles, size in zip(tiles_of_views, sizes, strict=True))
    if settings.num_views == 1:
        yield from _resized(next(maps), out_size, settings)
        return
    mean = _Mean(out_size, settings)
    for scores in maps:
        mean.add(scores, are_logits=False)
        del scores
    yield from mean.tiles()


class _Mean:
    """The mean probabilities of several views of an image, at `out_size`."""

    def __init__(self, out_size: Size, settings: InferenceSettings) -> None:
        self._out_size, self._settings = out_size, settings
        self._total: Tensor | None = None

    def add(self, scores: Tensor, *, are_logits: bool) -> None:
        """Adds the scores of a view, (K, height, width) at its own size."""
        if self._total is None:
            self._total = scores.new_zeros((scores.shape[0], *self._out_size))
        for rows, tile in _resized(scores, self._out_size, self._settings):
            self._total[:, rows] += tile.softmax(0) if are_logits else tile

    def tiles(self) -> Iterator[Tile]:
        """The mean; call it once."""
        assert self._total is not None, "there is at least one view"
        mean = self._total.div_(self._settings.num_views)
        return _resized(mean, self._out_size, self._settings)


def _resized(scores: Tensor, out_size: Size, settings: InferenceSettings) -> Iterator[Tile]:
    return resized_tiles(scores, out_size, align_corners=settings.align_corners)


def normalized_view(
    model: nn.Module, images: Tensor, size: Size, settings: InferenceSettings
) -> Tensor:
    """The normalized images at `size`, (N, 3, height, width), in the dtype of the model."""
    parameter = next(model.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    view = normalize(images, settings.mean, settings.std, dtype=dtype)
    if size == images.shape[-2:]:
        return view
    return functional.interpolate(view, size=size, mode="bilinear", align_corners=False)


def _whole_maps(logits: Logits, views: Iterator[Tensor], *, flip: bool) -> Iterator[Tensor]:
    """The logits (N, K, height, width) of each view, and of its mirror image mirrored back."""
    for view in views:
        yield logits(view)
        if flip:
            yield logits(view.flip(-1)).flip(-1)


def _joined(tiles: Iterable[Tile], size: Size) -> Tensor:
    """One map (K, height, width) of all tiles."""
    joined = None
    for rows, tile in tiles:
        if joined is None:
            joined = tile.new_empty((tile.shape[0], *size))
        joined[:, rows] = tile
    assert joined is not None, "there is at least one tile"
    return joined


def _logits(model: nn.Module, settings: InferenceSettings, images: Tensor) -> Tensor:
    """(N, K, H, W) in float32, or float64 if the model is."""
    with autocast(settings.autocast, images.device):
        logits = model(images).out
    return logits if logits.dtype == torch.float64 else logits.float()
