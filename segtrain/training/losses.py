"""The losses, exact over any number of ranks.

A mean over each rank's pixels, averaged over the ranks, is not the mean over all pixels: a rank
whose crops are mostly ignored would weigh as much as a full one. So every loss has two halves:

    sums(logits, labels)   what the pixels of this rank add up to: a float64 tensor, differentiable
    value(totals)          the loss, computed from the sums of all ranks

Between the two, only `StepSync.reduce` adds up the sums of all ranks. A mean over pixels has two
sums, losses and weights, and its value is their quotient; Dice has three sums for each class. For
the backward pass a rank computes d value / d totals from the totals, without another exchange: the
gradients of the parameters, added up over the ranks, are those of the whole batch.

With train.shares the same happens once for each share instead of each rank. `sums` may look at
other shares only through `segtrain.distributed.collectives`, and must not depend on their order:
OHEM takes the k-th largest of all losses, which is the same in any order.

To add a loss: a class with these two methods, one line in LOSSES, and its name in
`LossConfig.kind` (config/options/loss.py).

With train.accumulate_steps, the sums are those of one pass, like batch statistics. The step weighs
the passes by their valid pixels: exact for a mean over pixels, not for dice.
"""

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain.config import LossConfig
from segtrain.distributed import collectives as dist
from segtrain.models.blocks import at_least_float32
from segtrain.types import IGNORE_INDEX, SegLogits

# OHEM: in units in the last place; two interpolations of logits up to 64.
_ROUNDING = 256


class LossOptions(NamedTuple):
    """What a loss is made from."""

    config: LossConfig
    class_weights: Tensor | None = None  # those of `config`, (K,) on the device of the logits
    passes: int = 1  # the parts that a batch is cut into (train.accumulate_steps)


class Loss(Protocol):
    """A loss in two halves; see the top of this file. Made from `LossOptions`."""

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """This rank's sums, float64 and of the same shape on all ranks.

        logits: (N, K, H, W); labels: (N, H, W) int64, 0 .. K-1 or IGNORE_INDEX.
        """

    def value(self, totals: Tensor) -> Tensor:
        """The loss (), of the sums of all ranks; 0 if all pixels are ignored."""


class PixelMean:
    """The mean of `pixel_losses` over valid pixels: sum(w[label] * loss) / sum(w[label])."""

    def __init__(self, options: LossOptions) -> None:
        self.options = options

    def pixel_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of every pixel, (N, H, W) float32 or wider, finite where it is ignored."""
        raise NotImplementedError

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(2,): the weighted losses and the weights."""
        return self._weighted(self.pixel_losses(logits, labels), labels)

    def value(self, totals: Tensor) -> Tensor:
        """The mean."""
        total, weight = totals
        return total / torch.where(weight == 0, 1.0, weight)

    def _weighted(self, losses: Tensor, labels: Tensor) -> Tensor:
        weights = _pixel_weights(labels, self.options.class_weights)
        total = (losses * weights).sum(dtype=torch.float64)
        return torch.stack([total, weights.sum(dtype=torch.float64)])


class CrossEntropy(PixelMean):
    """Cross entropy."""

    def pixel_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-log(probability of the label), 0 where it is ignored."""
        # Not reduced here: on CUDA torch adds up with atomics, whose order changes from run to run.
        wide = at_least_float32(logits)
        return F.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="none")


class OHEM(CrossEntropy):
    """Cross entropy of the hard pixels: those whose true class has a probability below
    `ohem_threshold`, and at least the `ohem_min_kept` hardest of all ranks.

    Online hard example mining (arXiv:1604.03540) by pixel. mmsegmentation's OHEMPixelSampler counts
    `min_kept` for each image, and drops pixels as hard as the last one kept. Here these are kept.
    Class weights weigh the pixels kept but do not decide which.
    """

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(2,): the weighted losses and the weights of the hard pixels (collective)."""
        config = self.options.config
        losses = self.pixel_losses(logits, labels)
        with torch.no_grad():
            # The loss is -log(probability), so the hardest pixels have the largest.
            hardness = losses.masked_fill(labels == IGNORE_INDEX, -math.inf)
            min_kept = math.ceil(config.ohem_min_kept / self.options.passes)
            limit = _kth_largest_of_all_ranks(hardness.flatten(), min_kept)
            # Enlarged logits repeat along the border of an image. Which of them come out a bit
            # larger depends on the last bits of the features, and these on the split over ranks.
            limit -= _ROUNDING * torch.finfo(limit.dtype).eps * limit.abs().clamp(min=1)
            threshold = config.ohem_threshold
            easy_loss = -math.log(threshold) if threshold > 0 else math.inf
            easy = (hardness <= easy_loss) & (hardness < limit)
            kept = labels.masked_fill(easy, IGNORE_INDEX)
        return self._weighted(losses, kept)


class Dice:
    """1 - soft Dice, mean over the classes (V-Net, arXiv:1606.04797, section 3).

    For class k, with the probabilities p and the labels g (1 where the label is k, else 0) of all
    valid pixels of the batch: D_k = 2 sum(p g) / (sum(p^2) + sum(g^2)). Classes that no label of
    the batch shows are left out of the mean: whatever the model predicts, their D_k would be 0.
    """

    def __init__(self, options: LossOptions) -> None:
        pass

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(3, K): sum(p g), sum(p^2) and sum(g^2) of each class."""
        probabilities = at_least_float32(logits).softmax(1)
        classes = torch.arange(logits.shape[1], device=labels.device).view(1, -1, 1, 1)
        truth = labels.unsqueeze(1) == classes  # (N, K, H, W); no class where it is ignored
        valid = (labels != IGNORE_INDEX).unsqueeze(1)
        parts = (probabilities * truth, probabilities.square() * valid, truth)
        return torch.stack([part.sum((0, 2, 3), dtype=torch.float64) for part in parts])

    def value(self, totals: Tensor) -> Tensor:
        """The mean of 1 - D_k over the classes that labels show."""
        overlap, predicted, labelled = totals  # (K,) each
        present = labelled > 0
        dice = 2 * overlap / torch.where(present, predicted + labelled, 1.0)
        return ((1 - dice) * present).sum() / present.sum().clamp(min=1)


LOSSES: dict[str, type[Loss]] = {"cross_entropy": CrossEntropy, "ohem": OHEM, "dice": Dice}
"""`loss.kind`: what is called with `LossOptions`."""


class SegLoss:
    """The training loss of a config: the same loss for the head and the auxiliary head."""

    def __init__(self, config: LossConfig, device: torch.device, *, passes: int = 1) -> None:
        self.aux_weight = config.aux_weight
        weights = config.class_weights
        self._class_weights = None if weights is None else torch.tensor(weights, device=device)
        self._loss = LOSSES[config.kind](LossOptions(config, self._class_weights, passes))

    def __call__(self, logits: SegLogits, labels: Tensor) -> Tensor:
        """The sums of this rank, (heads, ...), for logits (N, K, H, W) and int64 labels (N, H, W).

        heads: 2, or 1 without an auxiliary head.
        """
        aux = [] if logits.aux is None else [self._loss.sums(logits.aux, labels)]
        return torch.stack([self._loss.sums(logits.out, labels), *aux])

    def means(self, totals: Tensor) -> Tensor:
        """(2,) float64: the loss of the head and of the auxiliary head, NaN without one."""
        means = torch.stack([self._loss.value(total) for total in totals])
        return F.pad(means, (0, 2 - len(means)), value=torch.nan)

    def objective(self, sums: Tensor, totals: Tensor) -> Tensor:
        """(): its gradient is this rank's part of the gradient of `out + aux_weight * aux`.

        sums: of this rank; totals: of all ranks. For the value of the loss use `means`.
        """
        parts = []
        for weight, local, total in zip((1.0, self.aux_weight), sums, totals, strict=False):
            # The value is that of the total; the gradient goes to this rank's sums.
            part = weight * local
            parts.append(self._loss.value(total + (part - part.detach())))
        return torch.stack(parts).sum()

    def label_weight(self, labels: Tensor) -> Tensor:
        """The sum of `_pixel_weights` of int64 labels (N, H, W), before any mining, () float64."""
        return _pixel_weights(labels, self._class_weights).sum(dtype=torch.float64)


def _pixel_weights(labels: Tensor, class_weights: Tensor | None) -> Tensor:
    """(N, H, W), 0 where ignored: 1 (as bool), or the weight of the class."""
    if class_weights is None:
        return labels != IGNORE_INDEX
    # A table lookup: indexing with a mask, or bincount, would make the host wait for the device.
    table = class_weights.new_zeros(IGNORE_INDEX + 1)
    table[: len(class_weights)] = class_weights
    return table[labels]


def _kth_largest_of_all_ranks(values: Tensor, k: int) -> Tensor:
    """The k-th largest of all ranks' `values` together, or -inf if there are fewer."""
    # No rank can own more than k of the k largest, so k values of each are enough.
    largest = values.new_full((k,), -math.inf)
    mine = values.topk(min(k, len(values)), sorted=False).values
    largest[: len(mine)] = mine
    # Not kthvalue, which works through all the values in a single block of CUDA threads.
    return dist.all_gather(largest).flatten().topk(k, sorted=False).values.min()
