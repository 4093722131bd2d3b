"""What a rank counts of each image that it evaluates, for each task."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.metrics import Calibration, ConfusionMatrix, Scores
from segtrain.one_vs_rest import (
    BinaryCounts,
    CurveCounts,
    best_thresholds,
    counts_at,
    levels_of,
    scores_of,
)

if TYPE_CHECKING:
    from segtrain.evaluation.decoding import LabelMap


class Outcome(NamedTuple):
    """What an evaluation counts, the same on every rank.

    matrix, calibration: of all pixels that are not ignored. Where classes overlap each is counted
        by itself.
    images: (N, K, 3) int64: of each image and class the pixels that are right, labelled and
        predicted as this class.
    num_by_windows: images for which there was no memory as a whole.
    levels: (N, K, 2, 64) int32, where classes overlap: `levels_of` each image; else None.
    curves: of each class; None: nobody asked.
    """

    matrix: ConfusionMatrix | BinaryCounts
    calibration: Calibration | CurveCounts
    images: Tensor
    num_by_windows: int
    levels: Tensor | None = None
    curves: CurveCounts | None = None

    def fitted(self) -> tuple["Outcome", tuple[float, ...]]:
        """The same at the thresholds of the highest IoU, and these; where classes overlap."""
        thresholds = best_thresholds(levels_of(self.calibration.counts))
        matrix = BinaryCounts(len(thresholds), self.levels.device)
        by_image = counts_at(self.levels, thresholds)  # (N, K, 2, 2)
        matrix.counts += by_image.sum(0)
        images = _right_labelled_predicted(by_image)
        return self._replace(matrix=matrix, images=images), thresholds

    @property
    def scores(self) -> Scores:
        """Those of all images together."""
        return scores_of(self.matrix.counts, self.calibration.counts)


class Counts:
    """Those of one class a pixel, by a confusion matrix.

    curves: get the probabilities of all classes; None: they are not computed.
    """

    def __init__(
        self, num_images: int, num_classes: int, device: torch.device, curves: CurveCounts | None
    ) -> None:
        self.curves = curves
        self.num_infinite = torch.zeros((), dtype=torch.int64, device=device)
        self._images = torch.zeros(num_images, num_classes, 3, dtype=torch.int64, device=device)
        self._matrix: ConfusionMatrix | BinaryCounts = ConfusionMatrix(num_classes, device)
        self._calibration: Calibration | CurveCounts = Calibration(device)

    def add(self, index: int, found: "LabelMap", label: Tensor) -> None:
        """Counts image `index`; nothing waits for the device."""
        table = self._matrix.update(found.label, label)
        self._images[index] = torch.stack([table.diagonal(), table.sum(1), table.sum(0)], dim=1)
        if self.curves is not None:
            self.curves.update(found.probability, label)
        highest = found.probability
        highest = highest if highest.ndim == 2 else highest.amax(0)
        self._calibration.update(highest, found.label, label)
        self.num_infinite += ~found.is_finite

    def sum_over_ranks(self, num_by_windows: int) -> Outcome:
        """Those of all ranks (collective)."""
        self._matrix.sum_over_ranks()
        self._calibration.sum_over_ranks()
        dist.all_reduce_sum(self._images)
        if self.curves is not None:
            self.curves.sum_over_ranks()
        dist.wait_for_device(self._images.device)
        found = self._matrix, self._calibration, self._images
        return Outcome(*found, num_by_windows, curves=self.curves)


class PresenceCounts(Counts):
    """Those of classes that overlap: each by itself, with its curve in the place of calibration.

    So there are curves whether anybody asks or not.
    """

    def __init__(
        self, num_images: int, num_classes: int, device: torch.device, curves: CurveCounts | None
    ) -> None:
        super().__init__(num_images, num_classes, device, None)
        self._asks_curves = curves is not None
        self._matrix = BinaryCounts(num_classes, device)
        self._calibration = CurveCounts(num_classes, device)
        size = num_images, *levels_of(self._calibration.counts).shape
        self._levels = torch.zeros(size, dtype=torch.int32, device=device)

    def add(self, index: int, found: "LabelMap", label: Tensor) -> None:
        """Counts image `index`; nothing waits for the device."""
        self._images[index] = _right_labelled_predicted(self._matrix.update(found.label, label))
        self._levels[index] = levels_of(self._calibration.update(found.probability, label))
        self.num_infinite += ~found.is_finite

    def sum_over_ranks(self, num_by_windows: int) -> Outcome:
        """Those of all ranks (collective)."""
        dist.all_reduce_sum(self._levels)
        curves = self._calibration if self._asks_curves else None
        found = super().sum_over_ranks(num_by_windows)
        return found._replace(levels=self._levels, curves=curves)


def _right_labelled_predicted(counts: Tensor) -> Tensor:
    """The pixels (..., K, 3) of `Outcome.images`, of `BinaryCounts.counts`, (..., K, 2, 2)."""
    right, labelled, predicted = (
        counts[..., 1, 1],
        counts[..., 1, :].sum(-1),
        counts[..., 1].sum(-1),
    )
    return torch.stack([right, labelled, predicted], -1)
