"""From one image to class scores: whole or by windows, at several scales, with its mirror image.

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
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from segtrain.evaluation.resize import resized_tiles
from segtrain.evaluation.settings import InferenceSettings, Size, view_sizes
from segtrain.evaluation.windows import Logits, Tile, slide
from segtrain.models.normalize import normalize
from segtrain.models.precision import autocast


def _ignore(count: int) -> None:
    """The default of `on_windows`."""


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
    out_size: (h, w) of the result, usually the size of the label.
    on_windows: called with the number of sliding windows computed since its last call; the calls
        add up to `num_windows`.

    The scores at `out_size` are made and dropped some rows at a time. So a single whole view needs
    memory for its own logits only, and sliding windows over an image of `out_size` for one window's
    height of rows; several scales, or another size, need a map of the view.
    """
    tiles, _ = _score_tiles(model, image, settings, out_size, on_windows)
    return torch.cat([tile.max(0).indices.to(torch.uint8) for _, tile in tiles])


@torch.no_grad()
def predict_probabilities(
    model: nn.Module, image: Tensor, settings: InferenceSettings, out_size: Size
) -> Tensor:
    """The class probabilities of every pixel, (1, K, h, w) float32 or float64, summing to 1.

    Arguments as in `predict_label`, which is the argmax of this.
    """
    tiles, are_logits = _score_tiles(model, image, settings, out_size, _ignore)
    probs = [tile.softmax(0) if are_logits else tile for _, tile in tiles]
    return torch.cat(probs, 1).unsqueeze(0)


def _score_tiles(
    model: nn.Module,
    image: Tensor,
    settings: InferenceSettings,
    out_size: Size,
    on_windows: Callable[[int], object],
) -> tuple[Iterator[Tile], bool]:
    """The scores at `out_size`, from the top down, and whether they are logits or probabilities."""
    if image.ndim != 4 or image.shape[:2] != (1, 3):
        raise ValueError(f"image: expected (1, 3, H, W), got {tuple(image.shape)}")
    logits = partial(_logits, model, settings)
    view_of = partial(normalized_view, model, image, settings)
    sizes = view_sizes(image.shape[-2:], settings)
    are_logits = settings.mode == "whole"
    if are_logits:
        maps = _whole_maps(logits, map(view_of, sizes), flip=settings.flip)
    elif sizes == [out_size]:
        return slide(logits, view_of(out_size), settings, on_windows), False
    else:
        maps = (_joined(slide(logits, view_of(s), settings, on_windows), s) for s in sizes)
    resized = partial(resized_tiles, out_size=out_size, align_corners=settings.align_corners)
    if settings.num_views == 1:
        return resized(next(maps)), are_logits
    total = None
    for scores in maps:
        if total is None:
            total = scores.new_zeros((scores.shape[0], *out_size))
        for rows, tile in resized(scores):
            total[:, rows] += tile.softmax(0) if are_logits else tile
        del scores  # before the next view is computed
    assert total is not None, "there is at least one view"
    return resized(total.div_(settings.num_views)), False


def normalized_view(
    model: nn.Module, image: Tensor, settings: InferenceSettings, size: Size
) -> Tensor:
    """The normalized image at `size`, (1, 3, height, width), in the dtype of the model."""
    parameter = next(model.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    view = normalize(image, settings.mean, settings.std, dtype=dtype)
    if size == image.shape[-2:]:
        return view
    return functional.interpolate(view, size=size, mode="bilinear", align_corners=False)


def _whole_maps(logits: Logits, views: Iterator[Tensor], *, flip: bool) -> Iterator[Tensor]:
    """The logits (K, height, width) of each view, and of its mirror image mirrored back."""
    for view in views:
        yield logits(view)[0]
        if flip:
            yield logits(view.flip(-1))[0].flip(-1)


def _joined(tiles: Iterator[Tile], size: Size) -> Tensor:
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
