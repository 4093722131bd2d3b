"""What all losses have in common; the contract is in the docstring of the package."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from segtrain.config import LossConfig, LossTerm
from segtrain.types import IGNORE_INDEX


class LossOptions(NamedTuple):
    """What a loss is made from."""

    config: LossConfig | LossTerm
    class_weights: Tensor | None = None  # those of `config`, (K,) on the device of the logits
    microbatches: int = 1  # the parts that a batch is cut into (train.accumulate_steps)
    batch_size: int | None = None  # images a step, over all ranks; None: equally many on all ranks


class Loss(Protocol):
    """A loss in two halves; see the package. Made from `LossOptions`."""

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """This rank's sums, float64 and of the same shape on all ranks.

        logits: (N, K, H, W); labels: (N, H, W) int64, 0 .. K-1 or IGNORE_INDEX.
        """

    def loss_from_sums(self, totals: Tensor) -> Tensor:
        """The loss (), of the sums of all ranks; 0 if all pixels are ignored."""

    def shape(self, num_classes: int) -> tuple[int, ...]:
        """The shape of `sums`; only used where this is one of several terms (`loss.also`)."""


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

    def loss_from_sums(self, totals: Tensor) -> Tensor:
        """The mean."""
        total, weight = totals
        return total / torch.where(weight == 0, 1.0, weight)

    def shape(self, num_classes: int) -> tuple[int, ...]:
        """(2,)."""
        return (2,)

    def _weighted(self, losses: Tensor, labels: Tensor) -> Tensor:
        weights = pixel_weights(labels, self.options.class_weights)
        total = (losses * weights).sum(dtype=torch.float64)
        return torch.stack([total, weights.sum(dtype=torch.float64)])


def pixel_weights(labels: Tensor, class_weights: Tensor | None) -> Tensor:
    """(N, H, W), 0 where ignored: 1 (as bool), or the weight of the class."""
    if class_weights is None:
        return labels != IGNORE_INDEX
    # A table lookup: indexing with a mask, or bincount, would make the host wait for the device.
    table = class_weights.new_zeros(IGNORE_INDEX + 1)
    table[: len(class_weights)] = class_weights
    return table[labels]
