"""Cross entropy: against smoothed labels, focal, and with relaxed labels along boundaries."""

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain.errors import ConfigError
from segtrain.models.blocks import at_least_float32
from segtrain.models.enlarged import Enlarged
from segtrain.task.targets import pixel_weights
from segtrain.training.losses.base import LossOptions, PixelMean, column_of_sums
from segtrain.types import IGNORE_INDEX


class CrossEntropy(PixelMean):
    """Cross entropy.

    With e = `label_smoothing`, the class weights w and the label y of a pixel, as in
    torch.nn.functional.cross_entropy: the sum over valid pixels of

        (1 - e) w[y] (-log p[y]) + e / K sum_k w[k] (-log p[k])

    divided by the sum of w[y] (arXiv:1512.00567, section 7).

    Raises:
        ConfigError: a loss that derives from it has losses of pixels of its own, and smoothing,
            whose sums are not made of losses of pixels.
    """

    takes_enlarged = True  # see `Loss`

    def __init__(self, options: LossOptions) -> None:
        super().__init__(options)
        is_own = type(self).pixel_losses is not CrossEntropy.pixel_losses
        if options.config.label_smoothing and is_own and type(self).sums is CrossEntropy.sums:
            raise ConfigError(
                f"loss.label_smoothing: would take the place of what {type(self).__name__} says a "
                "pixel costs; leave it out, or override sums"
            )

    def pixel_losses(self, logits: Tensor | Enlarged, labels: Tensor) -> Tensor:
        """-log(probability of the label), 0 where it is ignored."""
        if isinstance(logits, Enlarged):
            return logits.cross_entropy(labels)
        # Not reduced here: on CUDA torch adds up with atomics, whose order changes from run to run.
        wide = at_least_float32(logits)
        return F.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="none")

    def sums(self, logits: Tensor | Enlarged, labels: Tensor) -> Tensor:
        """(2, 1): the weighted losses and the weights."""
        smoothing, class_weights = self.options.config.label_smoothing, self.options.class_weights
        if isinstance(logits, Enlarged):
            return logits.cross_entropy_sums(labels, class_weights, smoothing)
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
        return column_of_sums(losses, pixel_weights(labels, class_weights))


# Of the focal loss: arXiv:1708.02002, section 5.1.
_GAMMA = 2.0


class Focal(CrossEntropy):
    """(1 - p) ** gamma * -log(p), for the probability p of the true class (arXiv:1708.02002).

    gamma is 2, as in the paper, whose alpha is `class_weights`. As in cross
    entropy, the sum is divided by the weights of the valid pixels, not by their factors.
    """

    takes_enlarged = True  # see `Loss`

    sums = PixelMean.sums  # those of cross entropy may never have the losses of pixels

    def pixel_losses(self, logits: Tensor | Enlarged, labels: Tensor) -> Tensor:
        """The focal loss of every pixel, 0 where it is ignored."""
        losses = super().pixel_losses(logits, labels)
        wrong = -torch.expm1(-losses)  # 1 - p without cancellation
        wrong = wrong.clamp(min=torch.finfo(losses.dtype).tiny)
        return wrong**_GAMMA * losses


class BoundaryRelaxation(PixelMean):
    """-log(sum of p over the classes near the pixel), boundary label relaxation.

    arXiv:1812.01593, section 3.2. Near are the labels of the window of 3 x 3 pixels around it.
    Away from boundaries this is cross entropy. Ignored pixels and what lies
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
        one_hot = (labels.unsqueeze(1) == classes).float()  # (N, K, H, W), all 0 where ignored
        # What pooling pads with is less than 0: outside of the crop there is no class.
        return F.max_pool2d(one_hot, 3, stride=1, padding=1) > 0
