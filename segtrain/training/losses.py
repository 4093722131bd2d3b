"""Losses as sums over pixels.

A mean over each rank's pixels, averaged over the ranks, is not the mean over all pixels: a rank
whose crops are mostly ignored would weigh as much as a full one. So a loss here returns this rank's
sum and this rank's weight, and the engine divides the sums of all ranks by all their weights.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain.config import LossConfig
from segtrain.distributed import collectives as dist
from segtrain.types import IGNORE_INDEX, SegLogits


class PixelSum(NamedTuple):
    """A loss before division: `total / weight` over all ranks is the mean.

    total: () float64, sum of the pixels' losses on this rank, differentiable.
    weight: () float64, what these pixels count: their number, or the sum of their class weights.
    """

    total: Tensor
    weight: Tensor


class StepLoss(NamedTuple):
    """The terms of the training loss on this rank; `aux` is None without an auxiliary head."""

    out: PixelSum
    aux: PixelSum | None


def cross_entropy(
    logits: Tensor, labels: Tensor, *, class_weights: Tensor | None = None
) -> PixelSum:
    """Cross entropy summed over the pixels that are not ignored.

    With class weights w this is torch's weighted mean once divided:
    sum(w[label] * loss) / sum(w[label]).

    Args:
        logits: (N, K, H, W).
        labels: (N, H, W) int64, 0 .. K-1 or IGNORE_INDEX.
        class_weights: (K,).
    """
    return _weighted_sum(_pixel_losses(logits, labels), labels, class_weights)


def label_weight(labels: Tensor, class_weights: Tensor | None) -> Tensor:
    """What the pixels of `labels` (N, H, W) count together, () float64: 1 each or their class's
    weight, and 0 where they are ignored."""
    return _pixel_weights(labels, class_weights).sum(dtype=torch.float64)


def ohem_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    threshold: float,
    min_kept: int,
    class_weights: Tensor | None = None,
) -> PixelSum:
    """Cross entropy of the hard pixels: those whose true class has a probability below `threshold`,
    and at least the `min_kept` hardest of the whole batch (collective).

    The batch is that of all ranks, so the pixels are those that one process would choose (online
    hard example mining, arXiv:1604.03540, in the per-pixel form of mmsegmentation's
    OHEMPixelSampler, which counts `min_kept` per image and drops pixels as hard as the last one
    kept; here these are kept too, and so are all pixels if there are fewer than `min_kept`).

    Args:
        logits: (N, K, H, W).
        labels: (N, H, W) int64, 0 .. K-1 or IGNORE_INDEX.
        class_weights: (K,); they weigh the pixels kept but do not decide which.
    """
    losses = _pixel_losses(logits, labels)
    with torch.no_grad():
        # The loss is -log(probability), so the hardest pixels have the largest.
        hardness = losses.masked_fill(labels == IGNORE_INDEX, -math.inf)
        limit = _just_below(_kth_largest_of_all_ranks(hardness.flatten(), min_kept))
        easy_loss = -math.log(threshold) if threshold > 0 else math.inf
        easy = (hardness <= easy_loss) & (hardness < limit)
        kept = labels.masked_fill(easy, IGNORE_INDEX)
    return _weighted_sum(losses, kept, class_weights)


def _pixel_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of every pixel, (N, H, W) float32 or wider, 0 where it is ignored."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Not reduced here: on CUDA torch adds up with atomics, whose order changes from run to run.
    return F.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="none")


def _pixel_weights(labels: Tensor, class_weights: Tensor | None) -> Tensor:
    """What each pixel counts, (N, H, W): bool, or the dtype of `class_weights`."""
    if class_weights is None:
        return labels != IGNORE_INDEX
    # A table lookup: indexing with a mask, or bincount, would make the host wait for the device.
    table = class_weights.new_zeros(IGNORE_INDEX + 1)
    table[: len(class_weights)] = class_weights
    return table[labels]


def _weighted_sum(losses: Tensor, labels: Tensor, class_weights: Tensor | None) -> PixelSum:
    """The sum of the pixels' losses (N, H, W) that `labels` does not ignore."""
    weights = _pixel_weights(labels, class_weights)
    return PixelSum((losses * weights).sum(dtype=torch.float64), weights.sum(dtype=torch.float64))


def _kth_largest_of_all_ranks(values: Tensor, k: int) -> Tensor:
    """The k-th largest of all ranks' `values` together, or -inf if there are fewer.

    No rank can own more than k of the k largest, so k values of each are enough.
    """
    largest = values.new_full((k,), -math.inf)
    mine = values.topk(min(k, len(values)), sorted=False).values
    largest[: len(mine)] = mine
    # Not kthvalue, which works through all the values in a single block of CUDA threads.
    return dist.all_gather(largest).flatten().topk(k, sorted=False).values.min()


def _just_below(limit: Tensor) -> Tensor:
    """`limit`, lowered by what rounding may put between equally hard pixels.

    Enlarged logits repeat along the border of an image, and which of them come out a bit larger
    depends on the last bits of the features, and thereby on the split of the batch over ranks.
    """
    return limit - _ROUNDING * torch.finfo(limit.dtype).eps * limit.abs().clamp(min=1)


# In units in the last place: two interpolations of logits up to 64.
_ROUNDING = 256


class SegLoss:
    """The training loss of a config: the same pixel loss for both heads.

    Args:
        device: where the logits and labels will be.
        passes: the parts that a batch is cut into; `ohem_min_kept` is shared among them.
    """

    def __init__(self, config: LossConfig, device: torch.device, *, passes: int = 1) -> None:
        self.aux_weight = config.aux_weight
        weights = config.class_weights
        self._class_weights = None if weights is None else torch.tensor(weights, device=device)
        self._min_kept = math.ceil(config.ohem_min_kept / passes)
        self._config = config

    def __call__(self, logits: SegLogits, labels: Tensor) -> StepLoss:
        """The sums of this rank for logits (N, K, H, W) and int64 labels (N, H, W)."""
        aux = None if logits.aux is None else self._pixel_loss(logits.aux, labels)
        return StepLoss(self._pixel_loss(logits.out, labels), aux)

    def label_weight(self, labels: Tensor) -> Tensor:
        """What the pixels of int64 labels (N, H, W) count before any mining, () float64."""
        return label_weight(labels, self._class_weights)

    def _pixel_loss(self, logits: Tensor, labels: Tensor) -> PixelSum:
        if self._config.kind == "cross_entropy":
            return cross_entropy(logits, labels, class_weights=self._class_weights)
        return ohem_cross_entropy(
            logits,
            labels,
            threshold=self._config.ohem_threshold,
            min_kept=self._min_kept,
            class_weights=self._class_weights,
        )
