"""What an evaluation counts of classes, whether a pixel has one or several."""

from typing import NamedTuple

import torch
from torch import Tensor

from segtrain.metrics import Calibration, ConfusionMatrix, Scores
from segtrain.one_vs_rest import (
    BinaryCounts,
    CurveCounts,
    best_thresholds,
    counts_at,
    levels_of,
    scores_of,
)


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
        images = right_labelled_predicted(by_image)
        return self._replace(matrix=matrix, images=images), thresholds

    @property
    def scores(self) -> Scores:
        """Those of all images together."""
        return scores_of(self.matrix.counts, self.calibration.counts)


def right_labelled_predicted(counts: Tensor) -> Tensor:
    """The pixels (..., K, 3) of `Outcome.images`, of `BinaryCounts.counts`, (..., K, 2, 2)."""
    right, labelled, predicted = (
        counts[..., 1, 1],
        counts[..., 1, :].sum(-1),
        counts[..., 1].sum(-1),
    )
    return torch.stack([right, labelled, predicted], -1)
