"""What all losses have in common; the contract is in the docstring of the package."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from segtrain.config import LossConfig, LossTerm
from segtrain.errors import ConfigError
from segtrain.task.targets import pixel_weights


class LossOptions(NamedTuple):
    """What a loss is made from."""

    config: LossConfig | LossTerm
    class_weights: Tensor | None = None  # those of `config`, (K,) on the device of the logits
    microbatches: int = 1  # the parts that a batch is cut into (train.accumulate_steps)
    positive_weights: Tensor | None = None  # those of `config`, as class_weights


class Loss(Protocol):
    """A loss in two halves; see the package. Made from `LossOptions`."""

    num_sums: int  # the rows of `sums`
    # A class that is called with logits of type `Enlarged` says `takes_enlarged = True` itself; all
    # others, what derives from it included, get tensors.

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """This rank's sums, (num_sums, K) of each class or (num_sums, 1) of all, float64.

        logits: (N, K, H, W); labels: (N, H, W) int64, 0 .. K-1 or IGNORE_INDEX; with task
        multilabel (N, K, H, W) uint8 of 0, 1 and IGNORE_INDEX.
        """

    def loss_from_sums(self, totals: Tensor) -> Tensor:
        """The loss (), of the sums of all ranks; 0 if all pixels are ignored."""


class PixelMean:
    """The mean of `pixel_losses` over valid pixels: sum(w[label] * loss) / sum(w[label]).

    One rank has a single valid pixel, whose loss is 4; the other has three without any loss. The
    mean of the four is 1, where a mean over ranks would be 2.

    >>> ranks = [torch.tensor([4.0]), torch.zeros(3)]
    >>> totals = sum(column_of_sums(losses, torch.ones_like(losses)) for losses in ranks)
    >>> PixelMean(LossOptions(LossConfig())).loss_from_sums(totals).item()
    1.0
    """

    num_sums = 2

    def __init__(self, options: LossOptions) -> None:
        self.options = options

    def pixel_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of every pixel, (N, H, W) float32 or wider, finite where it is ignored."""
        raise NotImplementedError

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(2, 1): the weighted losses and the weights."""
        return self._weighted(self.pixel_losses(logits, labels), labels)

    def loss_from_sums(self, totals: Tensor) -> Tensor:
        """The mean."""
        total, weight = totals[:, 0]
        return total / torch.where(weight == 0, 1.0, weight)

    def _weighted(self, losses: Tensor, labels: Tensor) -> Tensor:
        if losses.shape != labels.shape:
            shapes = f"{tuple(losses.shape)} for labels {tuple(labels.shape)}"
            raise ConfigError(f"loss.kind: pixel_losses gives {shapes}; one a label is needed")
        weights = pixel_weights(labels, self.options.class_weights)
        return column_of_sums(losses * weights, weights)


def column_of_sums(*values: Tensor) -> Tensor:
    """The sum of each tensor, (n, 1) float64."""
    return torch.stack([tensor.sum(dtype=torch.float64) for tensor in values]).unsqueeze(1)
