"""Losses as sums over pixels.

A mean over each rank's pixels, averaged over the ranks, is not the mean over all pixels: a rank
whose crops are mostly ignored would weigh as much as a full one. So a loss here returns this rank's
sum and this rank's weight, and the engine divides the sums of all ranks by the weights of all ranks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain import dist
from segtrain.config import LossConfig
from segtrain.records import IGNORE_INDEX, SegLogits


class PixelSum(NamedTuple):
    """A loss before division: `total / weight` over all ranks is the mean.

    total: () sum of the pixels' losses on this rank, float32 or wider, differentiable.
    weight: () float64, what these pixels count: their number, or the sum of their class weights.
    """

    total: Tensor
    weight: Tensor


class StepLoss(NamedTuple):
    """The terms of the training loss on this rank; `aux` is None without an auxiliary head."""

    out: PixelSum
    aux: PixelSum | None


PixelLoss = Callable[[Tensor, Tensor], PixelSum]


def cross_entropy(
    logits: Tensor, labels: Tensor, *, class_weights: Tensor | None = None
) -> PixelSum:
    """Cross entropy summed over the pixels that are not ignored.

    With class weights this is torch's weighted mean once divided: sum(w[label] * loss) / sum(w[label]).

    Args:
        logits: (N, K, H, W).
        labels: (N, H, W) int64, 0 .. K-1 or IGNORE_INDEX.
        class_weights: (K,).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weights = None if class_weights is None else class_weights.to(wide.dtype)
    total = F.cross_entropy(
        wide, labels, weight=weights, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return PixelSum(total, label_weight(labels, class_weights))


def label_weight(labels: Tensor, class_weights: Tensor | None) -> Tensor:
    """What the pixels of `labels` (N, H, W) count together, () float64: 1 each or their class's
    weight, and 0 where they are ignored."""
    if class_weights is None:
        return (labels != IGNORE_INDEX).sum().double()
    # A table lookup: indexing with a mask, or bincount, would make the host wait for the device.
    table = torch.zeros(IGNORE_INDEX + 1, dtype=torch.float64, device=labels.device)
    table[: len(class_weights)] = class_weights
    return table[labels].sum()


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
    hard example mining, arXiv:1604.03540, in the per-pixel form of mmsegmentation's OHEMPixelSampler).

    Args:
        logits: (N, K, H, W).
        labels: (N, H, W) int64, 0 .. K-1 or IGNORE_INDEX.
        class_weights: (K,); they weigh the pixels kept but do not decide which.
    """
    with torch.no_grad():
        wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        true_class = labels.clamp(max=logits.shape[1] - 1).unsqueeze(1)
        log_prob = wide.log_softmax(1).gather(1, true_class).squeeze(1)  # (N, H, W)
        log_prob = log_prob.masked_fill(labels == IGNORE_INDEX, float("inf"))
        limit = _kth_smallest_of_all_ranks(log_prob.flatten(), min_kept)
        floor = torch.tensor(threshold, dtype=limit.dtype, device=limit.device).log()
        easy = (log_prob >= floor) & (log_prob > limit)
        kept = labels.masked_fill(easy, IGNORE_INDEX)
    return cross_entropy(logits, kept, class_weights=class_weights)


def _kth_smallest_of_all_ranks(values: Tensor, k: int) -> Tensor:
    """The k-th smallest of all ranks' `values` together, or their largest if there are fewer.

    No rank can own more than k of the k smallest, so k values of each are enough.
    """
    smallest = values.new_full((k,), float("inf"))
    mine = values.topk(min(k, len(values)), largest=False, sorted=False).values
    smallest[: len(mine)] = mine
    return dist.all_gather(smallest).flatten().kthvalue(k).values


class SegLoss:
    """The training loss of a config: the same pixel loss for both heads.

    Args:
        class_weights: of `config`, on the device of the logits.
    """

    def __init__(self, config: LossConfig, device: torch.device) -> None:
        self.aux_weight = config.aux_weight
        weights = config.class_weights
        self._class_weights = None if weights is None else torch.tensor(weights, device=device)
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
            min_kept=self._config.ohem_min_kept,
            class_weights=self._class_weights,
        )
