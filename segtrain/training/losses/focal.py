"""The focal loss."""

import torch
from torch import Tensor

from segtrain.training.losses.cross_entropy import CrossEntropy


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
