"""The Lovasz-Softmax loss (arXiv:1705.08790): the Lovasz extension of 1 - IoU, class by class.

For class k, the error of a pixel is |g - p|: p its probability, g 1 where the label is k, else 0.
With the errors in descending order, the loss of the class is the sum of g_i * error_i, where g_i is
by how much 1 - IoU grows if the i-th pixel is wrong too (Algorithm 1). The loss is the mean over
the classes that labels show.
"""

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.models.blocks import at_least_float32
from segtrain.norm import most_images
from segtrain.training.losses.base import LossOptions, column_of_sums
from segtrain.types import IGNORE_INDEX


class LovaszImages:
    """The mean of the losses of the images that have a valid pixel.

    Each image has a mean over its own classes. Nothing is sorted beyond one image.
    """

    num_sums = 2

    def __init__(self, options: LossOptions | None = None) -> None:
        """options: none serve it."""

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(2, 1): the losses of the images, and their number."""
        errors, truth, valid = _errors(logits, labels)
        with torch.no_grad():
            growths = torch.empty_like(errors)  # (N, K, H W)
            for i, image in enumerate(zip(errors, truth, valid, strict=True)):
                growths[i] = growth(*image)
        by_class = (growths * errors).sum(2, dtype=torch.float64)  # (N, K)
        present = truth.any(2)
        losses = by_class.sum(1) / present.sum(1).clamp(min=1)
        return column_of_sums(losses, valid.any(2))

    def loss_from_sums(self, totals: Tensor) -> Tensor:
        """The mean over the images."""
        total, images = totals[:, 0]
        return total / images.clamp(min=1)


class LovaszBatch:
    """The loss over all pixels of a microbatch, of all ranks.

    Every rank sorts the errors of all ranks, class by class. In a microbatch of P pixels and K
    classes it receives 4 P K bytes for each head (0.6 GB for 16 crops of 713x713 and 19 classes)
    and sorts P numbers K times. With train.shares or train.virtual_ranks, each of these does
    so again.
    """

    num_sums = 2

    def __init__(self, options: LossOptions | None = None) -> None:
        """options: none serve it."""

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(2, K): the part of this rank's pixels in the loss of each class, and its pixels."""
        errors, truth, valid = _errors(logits, labels)
        with torch.no_grad():
            growths = [
                self._growth_among_all(errors[:, k], truth[:, k], valid[:, 0])
                for k in range(logits.shape[1])
            ]
            growths = torch.stack(growths, 1)  # (N, K, H W)
        parts = [part.sum((0, 2), dtype=torch.float64) for part in (growths * errors, truth)]
        return torch.stack(parts)

    def loss_from_sums(self, totals: Tensor) -> Tensor:
        """The mean over the classes that labels show."""
        losses, pixels = totals  # (K,) each
        return losses.sum() / (pixels > 0).sum().clamp(min=1)

    def _growth_among_all(self, errors: Tensor, truth: Tensor, valid: Tensor) -> Tensor:
        """As `growth`, for the pixels (n, H W) of one class, sorted with those of all ranks."""
        # One number a pixel: a sign bit says where g is 0, and -2 is beyond all errors.
        size = errors.abs()  # 1 - p may come out below 0 by a rounding
        packed = torch.where(truth, size, -size).masked_fill(~valid, -2.0)
        # All must send equally much.
        padded = packed.new_full((most_images(len(errors)), errors.shape[1]), -2.0)
        padded[: len(packed)] = packed
        # (ranks, images, H W). Images lie in the order of the batch, so pixels with equal errors
        # are sorted alike on any number of ranks.
        everyone = dist.all_gather(padded)
        shape = everyone.shape
        everyone = everyone.reshape(1, -1)
        growths = growth(everyone.abs(), ~everyone.signbit(), everyone != -2.0)
        return growths.view(shape)[dist.group_rank()][: len(errors)]


def _errors(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Errors and g as bool (N, K, H W), and which pixels count, (N, 1, H W); other errors are 0."""
    p = at_least_float32(logits).softmax(1).flatten(2)
    labels = labels.flatten(1).unsqueeze(1)  # (N, 1, H W)
    truth = labels == torch.arange(logits.shape[1], device=labels.device).view(1, -1, 1)
    valid = labels != IGNORE_INDEX
    return torch.where(truth, 1 - p, p) * valid, truth, valid


def growth(errors: Tensor, truth: Tensor, valid: Tensor, *, of_absent: bool = False) -> Tensor:
    """By how much each pixel lets 1 - IoU grow, once all pixels with larger errors are wrong.

    errors, truth: (K, n) of each class. valid: (1, n) or (K, n). Returns (K, n). Of a class without
    truth the first wrong pixel makes 1 - IoU 1, if `of_absent`; else all are 0.

    With t of T pixels of the class and f others wrong before it, 1 - IoU = (t + f) / (T + f). One
    more of the class adds 1 / (T + f), another one (T - t) / ((T + f) (T + f + 1)).
    """
    order = errors.masked_fill(~valid, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    right = truth.gather(1, order)
    others = valid.expand_as(truth).gather(1, order) & ~right
    # Integers: sums of floating-point numbers are exact for few pixels only.
    wrong_before = right.cumsum(1, dtype=torch.int32)  # t, at the others
    others_before = others.cumsum(1, dtype=torch.int32) - others.int()  # f
    total = truth.sum(1, keepdim=True)  # T
    union = (total + others_before).double()
    grows = torch.where(right, 1 / union, (total - wrong_before) / (union * (union + 1)))
    grows = torch.where((right | others) & (total > 0), grows, 0.0)
    if of_absent:
        grows = torch.where((total == 0) & others & (others_before == 0), 1.0, grows)
    grows = grows.to(errors.dtype)
    return torch.empty_like(grows).scatter_(1, order, grows)
