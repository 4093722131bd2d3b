"""Cross entropy, also against smoothed labels, and the focal loss."""

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain.models.blocks import at_least_float32
from segtrain.training.losses.base import PixelMean, pixel_weights
from segtrain.types import IGNORE_INDEX


class CrossEntropy(PixelMean):
    """Cross entropy.

    With e = `label_smoothing`, the class weights w and the label y of a pixel, as in
    torch.nn.functional.cross_entropy: the sum over valid pixels of

        (1 - e) w[y] (-log p[y]) + e / K sum_k w[k] (-log p[k])

    divided by the sum of w[y] (arXiv:1512.00567, section 7).
    """

    def pixel_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-log(probability of the label), 0 where it is ignored."""
        # Not reduced here: on CUDA torch adds up with atomics, whose order changes from run to run.
        wide = at_least_float32(logits)
        return F.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="none")

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(2,): the weighted losses and the weights."""
        smoothing, class_weights = self.options.config.label_smoothing, self.options.class_weights
        if smoothing == 0:
            return super().sums(logits, labels)
        wide = at_least_float32(logits)
        losses = F.cross_entropy(
            wide,
            labels,
            weight=None if class_weights is None else class_weights.to(wide.dtype),
            ignore_index=IGNORE_INDEX,
            reduction="none",
            label_smoothing=smoothing,
        )
        weights = pixel_weights(labels, class_weights)
        sums = [part.sum(dtype=torch.float64) for part in (losses, weights)]
        return torch.stack(sums)


class Focal(CrossEntropy):
    """(1 - p) ** gamma * -log(p), for the probability p of the true class (arXiv:1708.02002).

    gamma: `focal_gamma`; 0 is cross entropy. The alpha of the paper is `class_weights`. As in cross
    entropy, the sum is divided by the weights of the valid pixels, not by their factors.
    """

    def pixel_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The focal loss of every pixel, 0 where it is ignored."""
        losses = super().pixel_losses(logits, labels)
        # For gamma < 1 the derivative at p = 1 is infinite, and infinity times 0 is not a number.
        wrong = -torch.expm1(-losses)  # 1 - p without cancellation
        wrong = wrong.clamp(min=torch.finfo(losses.dtype).tiny)
        return wrong**self.options.config.focal_gamma * losses
