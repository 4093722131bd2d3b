"""What a task has to say, and the tuples in which it says it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from segtrain.data.read.classes import ClassFile
from segtrain.metrics import ConfusionMatrix
from segtrain.one_vs_rest import BinaryCounts, CurveCounts
from segtrain.task.decision_rule import DecisionRule
from segtrain.task.outcome import Outcome

Tile = tuple[slice, Tensor]
"""Some rows of an image, and their scores (K, rows, w)."""

Wanted = Literal["none", "highest", "all"]
"""Which probabilities a caller needs; more may come."""


class LabelMap(NamedTuple):
    """A prediction, on the device of its image.

    label: (h, w) uint8, the most probable class of every pixel, or what a rule says; where classes
        overlap (h, w, K) uint8, 1 where a class is.
    is_finite: () bool, whether the highest scores are finite numbers; else `label` means nothing.
    probability: (h, w) float, that of `label`; or (K, h, w), of every class, as always where they
        overlap; None if neither was asked for.
    """

    label: Tensor
    is_finite: Tensor
    probability: Tensor | None = None


class Decoding(Protocol):
    """What a task makes of scores, tile by tile.

    takes_highest: whether the highest score of a pixel is all that it looks at.
    """

    takes_highest: bool

    def bands(self, num_classes: int) -> tuple[int, ...]:
        """The shape of a label, but for height and width."""
        ...

    def probabilities(self, logits: Tensor, dim: int = 1) -> Tensor:
        """Those of the classes along `dim`."""
        ...

    def label_map(
        self, tiles: Iterator[Tile], wanted: Wanted, rule: DecisionRule | None, *, is_logits: bool
    ) -> LabelMap:
        """The prediction of an image by its scores, (K, rows, w) each, from the top down."""
        ...

    def describe(self) -> str:
        """A few words for people; empty: there is nothing to say."""
        ...


class ImageCounts(Protocol):
    """What a rank counts of each image that it evaluates.

    curves: get the probabilities of all classes; None: they are not computed.
    num_infinite: () int64, the images whose scores are not finite.
    """

    curves: CurveCounts | None
    num_infinite: Tensor

    def add(self, index: int, found: LabelMap, label: Tensor) -> None:
        """Counts image `index`; nothing waits for the device."""
        ...

    def sum_over_ranks(self, num_by_windows: int) -> Outcome:
        """Those of all ranks (collective)."""
        ...


class Task(ABC):
    """What a network tells of a pixel, and what follows from it, from a label to a file.

    name: that of the config.
    refuses_rules: why no `DecisionRule` goes with it, and what does; empty: one may.
    """

    name: str
    refuses_rules = ""

    @abstractmethod
    def for_loss(self, stored: Tensor) -> Tensor:
        """Labels as losses get them, of those of a batch, (..., H, W) or (..., H, W, K)."""

    @abstractmethod
    def loss_weight(self, labels: Tensor, class_weights: Tensor | None) -> Tensor:
        """The weight of what `for_loss` gives in a mean over pixels, () float64.

        class_weights: (K,); None: all are 1.
        """

    @abstractmethod
    def mean(self, members: Iterable[Tensor]) -> Tensor:
        """Logits (N, K, H, W) of the mean probabilities of several models, one after another.

        One sum and one member are in memory, whatever their number.
        """

    def thresholds(self, given: tuple[float, ...] | None) -> tuple[float, ...] | None:
        """Those of the classes, where `given` stands in the config; None: there are none."""
        return None

    @abstractmethod
    def decoding(self, thresholds: tuple[float, ...] | None) -> Decoding:
        """What becomes of scores. thresholds: those of the classes, one for all or one each."""

    @abstractmethod
    def counts(
        self, num_images: int, num_classes: int, device: torch.device, curves: CurveCounts | None
    ) -> "ImageCounts":
        """What counts the predictions of a data set; curves: as of `evaluate_dataset`."""

    @abstractmethod
    def matrix(self, num_classes: int, device: torch.device) -> ConfusionMatrix | BinaryCounts:
        """What counts right and wrong pixels."""

    @abstractmethod
    def agreement(self, found: Tensor, logits: Tensor) -> Tensor:
        """The part of the decisions by `found`, (N, K, H, W), that those by `logits` share, ()."""

    @abstractmethod
    def stored(self, classes: ClassFile, label: np.ndarray) -> np.ndarray:
        """What label files hold of a prediction, (H, W) or (H, W, bands)."""

    @abstractmethod
    def pictures(self, classes: ClassFile, label: np.ndarray) -> Mapping[str, np.ndarray]:
        """What is written of a prediction as PNG, beside colours and overlay, by its folder."""

    @abstractmethod
    def folders(self, classes: ClassFile) -> list[str]:
        """Those of `pictures` and of other label maps."""

    def ids(self, classes: ClassFile) -> Sequence[int] | None:
        """The number of each class in label maps; None: they have no numbers."""
        return None
