"""Relaxed labels along the boundaries of classes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain.models.blocks import at_least_float32
from segtrain.training.losses.base import PixelMean
from segtrain.types import IGNORE_INDEX


class BoundaryRelaxation(PixelMean):
    """-log(sum of p over the classes near the pixel), boundary label relaxation.

    arXiv:1812.01593, section 3.2. Near are the labels of the window of 2 r + 1 pixels a side around
    it, r = `boundary_px`. Away from boundaries this is cross entropy. Ignored pixels and what lies
    outside the crop add no class.

    NVIDIA's ImgWtLossSoftNLL differs in three ways: it also trains ignored pixels that are near
    valid ones; it weighs a pixel by the mean weight of its classes, here by that of its label; and
    it adds up the means of the images, here the mean is over the pixels of all.
    """

    def pixel_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The relaxed cross entropy of every pixel, about 0 where it is ignored."""
        log_p = at_least_float32(logits).log_softmax(1)
        near = self._classes_near(labels, logits.shape[1])
        # Of no class at all the loss would be infinite, and infinity times 0 is not a number.
        near |= (labels == IGNORE_INDEX).unsqueeze(1)
        return -log_p.masked_fill(~near, -torch.inf).logsumexp(1)

    def _classes_near(self, labels: Tensor, num_classes: int) -> Tensor:
        """(N, K, H, W) bool: whether a pixel in the window has the class."""
        classes = torch.arange(num_classes, device=labels.device).view(1, -1, 1, 1)
        radius = self.options.config.boundary_px
        found = (labels.unsqueeze(1) == classes).float()
        found = F.max_pool2d(found, (2 * radius + 1, 1), stride=1, padding=(radius, 0))
        return F.max_pool2d(found, (1, 2 * radius + 1), stride=1, padding=(0, radius)) > 0
