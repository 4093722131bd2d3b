"""Soft Dice."""

import torch
from torch import Tensor

from segtrain.models.blocks import at_least_float32
from segtrain.training.losses.base import LossOptions
from segtrain.types import IGNORE_INDEX


class Dice:
    """1 - soft Dice, mean over the classes (V-Net, arXiv:1606.04797, section 3).

    For class k, with the probabilities p and the labels g (1 where the label is k, else 0) of all
    valid pixels of the batch: D_k = 2 sum(p g) / (sum(p^2) + sum(g^2)). Classes that no label of
    the batch shows are left out of the mean: whatever the model predicts, their D_k would be 0.

    `dice_linear` leaves out the squares below, as the DiceLoss of MONAI and of MosaicML's Composer
    does. Composer's with `batch` and `ignore_absent_classes`, as in its recipes for
    ADE20K, is then this one but for an epsilon of 1e-5 pixels, and over the pixels of one rank.
    """

    num_sums = 3

    def __init__(self, options: LossOptions) -> None:
        self._squared = options.config.kind == "dice"

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(3, K): sum(p g), sum(p^2) or sum(p), and sum(g^2) = sum(g) of each class."""
        probabilities = at_least_float32(logits).softmax(1)
        classes = torch.arange(logits.shape[1], device=labels.device).view(1, -1, 1, 1)
        truth = labels.unsqueeze(1) == classes  # (N, K, H, W); no class where it is ignored
        valid = (labels != IGNORE_INDEX).unsqueeze(1)
        predicted = probabilities.square() if self._squared else probabilities
        parts = (probabilities * truth, predicted * valid, truth)
        return torch.stack([part.sum((0, 2, 3), dtype=torch.float64) for part in parts])

    def loss_from_sums(self, totals: Tensor) -> Tensor:
        """The mean of 1 - D_k over the classes that labels show."""
        overlap, predicted, labelled = totals  # (K,) each
        present = labelled > 0
        dice = 2 * overlap / torch.where(present, predicted + labelled, 1.0)
        return ((1 - dice) * present).sum() / present.sum().clamp(min=1)
