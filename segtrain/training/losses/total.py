"""The training loss of a config: a weighted sum of losses, for the head and the auxiliary head."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain.config import LossConfig
from segtrain.training.losses.base import Loss, LossOptions, pixel_weights
from segtrain.training.losses.cross_entropy import BoundaryRelaxation, CrossEntropy, Focal
from segtrain.training.losses.dice import Dice
from segtrain.training.losses.lovasz import lovasz
from segtrain.training.losses.ohem import OHEM
from segtrain.types import SegLogits

LOSSES: dict[str, Callable[[LossOptions], Loss]] = {
    "cross_entropy": CrossEntropy,
    "ohem": OHEM,
    "dice": Dice,
    "focal": Focal,
    "lovasz": lovasz,
    "boundary_relaxation": BoundaryRelaxation,
}
"""`loss.kind`: what is called with `LossOptions`."""


class WeightedSum:
    """The sum of weight * loss over several losses; a loss in two halves itself.

    Their sums travel as one matrix with K columns, each loss from a row of its own on.
    """

    def __init__(self, losses: list[Loss], weights: list[float]) -> None:
        self._losses, self._weights = losses, weights

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(rows, K): the sums of all losses, filled up with zeros (collective)."""
        num_classes = logits.shape[1]
        rows = []
        for loss in self._losses:
            flat = loss.sums(logits, labels).flatten()
            rows.append(F.pad(flat, (0, -len(flat) % num_classes)))
        return torch.cat(rows).view(-1, num_classes)

    def loss_from_sums(self, totals: Tensor) -> Tensor:
        """The weighted sum of the values."""
        num_classes = totals.shape[1]
        shapes = [loss.shape(num_classes) for loss in self._losses]
        rows = totals.split([-(-math.prod(shape) // num_classes) for shape in shapes])
        values = [
            weight * loss.loss_from_sums(part.flatten()[: math.prod(shape)].view(shape))
            for loss, weight, part, shape in zip(
                self._losses, self._weights, rows, shapes, strict=True
            )
        ]
        return torch.stack(values).sum()


class SegLoss:
    """The training loss of a config: the same loss for the head and the auxiliary head.

    microbatches, batch_size: train.accumulate_steps and train.batch_size.
    """

    def __init__(
        self,
        config: LossConfig,
        device: torch.device,
        *,
        microbatches: int = 1,
        batch_size: int | None = None,
    ) -> None:
        self.aux_weight = config.aux_weight
        losses, self._class_weights = [], None
        for term in config.terms:
            weights = term.class_weights
            weights = None if weights is None else torch.tensor(weights, device=device)
            losses.append(LOSSES[term.kind](LossOptions(term, weights, microbatches, batch_size)))
            if self._class_weights is None:  # `Config` sees to it that microbatches have no others
                self._class_weights = weights
        self._loss = losses[0]
        if len(losses) > 1 or config.weight != 1:
            self._loss = WeightedSum(losses, [term.weight for term in config.terms])

    def __call__(self, logits: SegLogits, labels: Tensor) -> Tensor:
        """The sums of this rank, (heads, ...), for logits (N, K, H, W) and int64 labels (N, H, W).

        heads: 2, or 1 without an auxiliary head.
        """
        aux = [] if logits.aux is None else [self._loss.sums(logits.aux, labels)]
        return torch.stack([self._loss.sums(logits.out, labels), *aux])

    def means(self, totals: Tensor) -> Tensor:
        """(2,) float64: the loss of the head and of the auxiliary head, NaN without one."""
        means = torch.stack([self._loss.loss_from_sums(total) for total in totals])
        return F.pad(means, (0, 2 - len(means)), value=torch.nan)

    def objective(self, sums: Tensor, totals: Tensor) -> Tensor:
        """(): its gradient is this rank's part of the gradient of `out + aux_weight * aux`.

        sums: of this rank; totals: of all ranks. For the value of the loss use `means`.
        """
        parts = []
        for weight, local, total in zip((1.0, self.aux_weight), sums, totals, strict=False):
            # The value is that of the total; the gradient goes to this rank's sums.
            part = weight * local
            parts.append(self._loss.loss_from_sums(total + (part - part.detach())))
        return torch.stack(parts).sum()

    def label_weight(self, labels: Tensor) -> Tensor:
        """The sum of `pixel_weights` of int64 labels (N, H, W), before any mining, () float64."""
        return pixel_weights(labels, self._class_weights).sum(dtype=torch.float64)
