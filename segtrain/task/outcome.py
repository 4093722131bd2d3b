"""What an evaluation counts of classes, whether a pixel has one or several."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from segtrain.config import EvalConfig
from segtrain.data.read.classes import ClassFile
from segtrain.metrics import (
    Calibration,
    ConfusionMatrix,
    Scores,
    calibration_error,
    thin_classes,
)
from segtrain.one_vs_rest import BinaryCounts, CurveCounts, scores_of
from segtrain.task.contract import Best, ClassCountsByImage, Outcome
from segtrain.task.score_table import (
    GroupScores,
    InstanceCounts,
    ScoreReport,
    ade20k_scores,
    group_scores,
)
from segtrain.text import first_of


@dataclass(frozen=True, eq=False)
class ClassOutcome(Outcome):
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

    @cached_property
    def scores(self) -> Scores:
        """Those of all images together."""
        return scores_of(self.matrix.counts, self.calibration.counts)

    def scalars(self, names: Sequence[str]) -> dict[str, float]:
        """The scores and the calibration error."""
        error = calibration_error(self.calibration.counts)
        return self.scores.scalars(names) | {"eval/calibration_error": error}

    def best(self, by: EvalConfig, names: Sequence[str], split: str) -> Best:
        """mIoU, mDice, or the mean IoU of some classes."""
        scores = self.scores
        if not scores.num_pixels:  # where classes overlap a mean may be 0 then
            return Best(by.best_name, math.nan)
        if not by.best_classes:
            return Best(by.best_name, scores.mean_dice if by.best == "mdice" else scores.mean_iou)
        chosen = [names.index(name) for name in by.best_classes]
        # The IoU of a class without labels is 0 or missing, by whether a pixel is predicted so.
        shown = [i for i in chosen if scores.labelled[i]]
        lines = []
        if shown != chosen:
            unseen = first_of(names[i] for i in chosen if i not in shown)
            what = "left out of this score" if shown else "best.pt is chosen by mIoU instead"
            lines = [f"warning: eval.best: no label of {split} shows {unseen}: {what}"]
        if not shown:
            return Best("mIoU", scores.mean_iou, lines)
        return Best(by.best_name, scores.mean_iou_of(shown), lines)

    def words(self) -> str:
        """The mIoU."""
        return f"mIoU {self.scores.mean_iou:.4f}"

    def warnings(self, names: Sequence[str], split: str) -> list[str]:
        """Of thin classes."""
        return thin_classes(self.scores, names, split)

    def chart(self, names: Sequence[str]) -> np.ndarray | None:
        """The confusion matrix."""
        from segtrain.run.charts import confusion_picture  # with log.charts alone

        return confusion_picture(self.matrix.counts.cpu().numpy(), names)

    def report(
        self,
        names: Sequence[str],
        classes: ClassFile,
        *,
        layout: str,
        instances: InstanceCounts | None,
    ) -> ScoreReport:
        """See `Outcome`."""
        scores = self.scores
        benchmark = ade20k_scores(scores) if layout == "ade20k" else {}
        groups = self.groups(classes, instances)
        return ScoreReport(
            names, scores, groups, benchmark, calibration_error(self.calibration.counts)
        )

    def groups(self, classes: ClassFile, instances: InstanceCounts | None) -> GroupScores | None:
        """The scores of categories; None: there are none."""
        return group_scores(self.matrix, classes, instances)

    def table(self) -> dict[str, Any]:
        """The confusion matrix."""
        return {"confusion_matrix": self.matrix.counts.tolist()}

    def by_image(self) -> ClassCountsByImage:
        """The pixels of each image."""
        return ClassCountsByImage(self.images, self.matrix.counts, self.calibration.counts)
