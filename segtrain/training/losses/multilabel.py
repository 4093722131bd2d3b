"""The losses of classes that overlap: each class against all else, by its sigmoid.

Labels are (N, K, H, W): 1 where the class is, 0 where it is not, IGNORE_INDEX where that is not
known. What is ignored of one class may count for another. All sums are rows of a column a class.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain.models.blocks import at_least_float32
from segtrain.training.losses.base import LossOptions
from segtrain.training.losses.lovasz import growth
from segtrain.types import IGNORE_INDEX


class BinaryCrossEntropy:
    """The mean of binary cross entropy over the valid pixels of all classes together.

    sum_k w_k sum_pixels (q_k g (-log p) + (1 - g) (-log(1 - p))) / sum_k w_k (valid pixels of k),
    with `class_weights` w and `positive_weights` q (torch's `pos_weight`).
    """

    num_sums = 2

    def __init__(self, options: LossOptions) -> None:
        self._weights, self._positive = options.class_weights, options.positive_weights

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(2, K): the losses and the pixels of each class, both weighted."""
        losses = self.pixel_losses(at_least_float32(logits), (labels == 1))
        valid = labels != IGNORE_INDEX
        sums = torch.stack([_by_class(losses * valid), _by_class(valid)])
        return sums if self._weights is None else sums * self._weights

    def pixel_losses(self, logits: Tensor, truth: Tensor) -> Tensor:
        """The loss of each pixel and class, (N, K, H, W); truth: bool."""
        positive = None
        if self._positive is not None:
            positive = self._positive.to(logits.dtype).view(-1, 1, 1)
        target = truth.to(logits.dtype)
        return F.binary_cross_entropy_with_logits(
            logits, target, pos_weight=positive, reduction="none"
        )

    def loss_from_sums(self, totals: Tensor) -> Tensor:
        """The mean."""
        total, weight = totals.sum(1)
        return total / torch.where(weight == 0, 1.0, weight)


# Of the focal loss: arXiv:1708.02002, section 5.1.
_GAMMA = 2.0
# The Tversky loss weighs pixels that are missed so, and those found wrongly by the rest to 1.
_TVERSKY_MISSED = 0.7


class BinaryFocal(BinaryCrossEntropy):
    """Cross entropy times (1 - p of what is true) ** 2 (arXiv:1708.02002), as in torchvision."""

    def pixel_losses(self, logits: Tensor, truth: Tensor) -> Tensor:
        """The loss of each pixel and class, (N, K, H, W)."""
        losses = super().pixel_losses(logits, truth)
        wrong = torch.where(truth, -logits, logits).sigmoid()
        return wrong**_GAMMA * losses


class Overlap:
    """1 - hits / (hits + a missed + b found wrongly), mean over the classes that labels show.

    a = b = 1/2 is soft Dice of sigmoids, with or without squares as of `dice.Dice`; a = 0.7 and
    b = 0.3, which its authors found best, the Tversky loss (arXiv:1706.05721, equation 4).
    """

    num_sums = 3

    def __init__(self, options: LossOptions) -> None:
        kind = options.config.kind
        self._squared = kind == "dice"
        self._missed = _TVERSKY_MISSED if kind == "tversky" else 0.5

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(3, K): sum(p g), sum(p^2) or sum(p), and sum(g) of each class."""
        p = at_least_float32(logits).sigmoid()
        truth, valid = labels == 1, labels != IGNORE_INDEX
        predicted = p.square() if self._squared else p
        return torch.stack([_by_class(x) for x in (p * truth, predicted * valid, truth)])

    def loss_from_sums(self, totals: Tensor) -> Tensor:
        """The mean of the classes that labels show."""
        hits, predicted, labelled = totals  # (K,) each
        present = labelled > 0
        # hits + a (labelled - hits) + b (predicted - hits), where a + b = 1.
        whole = self._missed * labelled + (1 - self._missed) * predicted
        part = hits / torch.where(present, whole, 1.0)
        return ((1 - part) * present).sum() / present.sum().clamp(min=1)


class LovaszHinge:
    """The Lovász hinge of each class in each image, mean over all that have valid pixels.

    Berman et al. (arXiv:1705.08790, section 3.1), as `lovasz_hinge(per_image=True)` of their code,
    which has one class.
    """

    num_sums = 2

    def __init__(self, options: LossOptions) -> None:
        del options

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(2, K): the losses of the images, and the images with valid pixels, of each class."""
        scores, flat = at_least_float32(logits).flatten(2), labels.flatten(2)  # (N, K, H W)
        truth, valid = flat == 1, flat != IGNORE_INDEX
        # What is right by more than 1 has no part in the loss, but its place in the order.
        errors = 1 - torch.where(truth, scores, -scores)
        with torch.no_grad():
            growths = torch.empty_like(errors)
            for i, image in enumerate(zip(errors, truth, valid, strict=True)):
                growths[i] = growth(*image, of_absent=True)
        losses = (growths * errors.relu()).sum(2, dtype=torch.float64)  # (N, K)
        return torch.stack([losses.sum(0), valid.any(2).sum(0, dtype=torch.float64)])

    def loss_from_sums(self, totals: Tensor) -> Tensor:
        """The mean over classes and images."""
        total, number = totals.sum(1)
        return total / number.clamp(min=1)


def _by_class(values: Tensor) -> Tensor:
    """The sums of each class, (K,) float64, of (N, K, H, W)."""
    return values.sum((0, 2, 3), dtype=torch.float64)
