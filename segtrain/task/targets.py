"""What a loss gets of a task: labels, and their weight. A step needs no more of it."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from segtrain import plugins
from segtrain.types import IGNORE_INDEX


class Targets(ABC):
    """The labels of a task, for a loss. name: that of the config."""

    name: str

    @abstractmethod
    def for_loss(self, stored: Tensor) -> Tensor:
        """Labels as losses get them, of those of a batch, (..., H, W) or (..., H, W, K)."""

    @abstractmethod
    def loss_weight(self, labels: Tensor, class_weights: Tensor | None) -> Tensor:
        """The weight of what `for_loss` gives in a mean over pixels, () float64.

        That by which losses divide: microbatches and workers count by it.

        class_weights: (K,); None: all are 1.
        """


class ClassTargets(Targets):
    """A pixel has one class."""

    name = "semantic"

    def for_loss(self, stored: Tensor) -> Tensor:
        """(..., H, W) int64."""
        return stored.long()

    def loss_weight(self, labels: Tensor, class_weights: Tensor | None) -> Tensor:
        """The sum of `pixel_weights`."""
        return pixel_weights(labels, class_weights).sum(dtype=torch.float64)


class PresenceTargets(Targets):
    """A pixel has any number of classes."""

    name = "multilabel"

    def for_loss(self, stored: Tensor) -> Tensor:
        """(..., K, H, W) uint8."""
        return stored.movedim(-1, -3)

    def loss_weight(self, labels: Tensor, class_weights: Tensor | None) -> Tensor:
        """The pixels of each class that are known, times its weight."""
        # (K,): the pixels of each class that are not ignored.
        valid = (labels != IGNORE_INDEX).sum((0, 2, 3), dtype=torch.float64)
        return valid.sum() if class_weights is None else valid @ class_weights.double()


_TARGETS = {targets.name: targets for targets in (ClassTargets, PresenceTargets)}


def targets_of(task: str) -> Targets:
    """Those of the task of this name, one of segtrain's own or of a plugin."""
    return plugins.choose("task", task, _TARGETS)()


def pixel_weights(labels: Tensor, class_weights: Tensor | None) -> Tensor:
    """(N, H, W), 0 where ignored: 1 (as bool), or the weight of the class.

    Of floats what is not NaN, of any shape.
    """
    if labels.is_floating_point():
        return ~labels.isnan()
    if class_weights is None:
        return labels != IGNORE_INDEX
    # A table lookup: indexing with a mask, or bincount, would make the host wait for the device.
    table = class_weights.new_zeros(IGNORE_INDEX + 1)
    table[: len(class_weights)] = class_weights
    return table[labels]
