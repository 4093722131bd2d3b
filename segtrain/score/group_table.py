"""Scores of patients, sites or other groups of images, each counted as one."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from segtrain.metrics import mean_of_present, or_none, percent
from segtrain.score.records import LABELLED, PREDICTED, RIGHT
from segtrain.text import counted, printable, table_lines

_WORST = 5


@dataclass(frozen=True)
class ScoresByGroup:
    """What is right in each group, G, in all of its images together.

    names: of the groups, sorted. num_images: (G,). classes: K names. iou, dice: (G, K) float64; NaN
    for a class that has no pixels in labels and predictions of the group.
    """

    names: tuple[str, ...]
    num_images: tuple[int, ...]
    classes: tuple[str, ...]
    iou: np.ndarray
    dice: np.ndarray

    @classmethod
    def of(
        cls, images: np.ndarray, groups: Sequence[str], classes: Sequence[str]
    ) -> "ScoresByGroup":
        """images: (N, K, 3), as of `Records`. groups: of each image."""
        names, place = np.unique(np.array(groups, dtype=object), return_inverse=True)
        pixels = np.zeros((len(names), *images.shape[1:]), np.int64)
        # Unlike `+=`, `add.at` adds every image of a group.
        np.add.at(pixels, place, images)
        right, both = pixels[..., RIGHT], pixels[..., LABELLED] + pixels[..., PREDICTED]
        with np.errstate(invalid="ignore"):
            iou, dice = right / (both - right), 2 * right / both
        return cls(tuple(names), tuple(np.bincount(place).tolist()), tuple(classes), iou, dice)

    def lines(self) -> list[str]:
        """A table of mean and standard deviation over groups; then the worst groups."""
        columns = [
            ["class", *self.classes, "mean of classes"],
            ["groups", *(str(len(x)) for x in self._present(self.iou))],
        ]
        for title, scores in (("IoU", self.iou), ("Dice", self.dice)):
            present = self._present(scores)
            columns.append([title, *(percent(mean_of_present(x)) for x in present)])
            columns.append(["sd", *(percent(_deviation(x)) for x in present)])
        means = self._means(self.iou)
        # A group in which no class has pixels has no score.
        judged = [i for i, mean in enumerate(means) if not math.isnan(mean)]
        worst = sorted(judged, key=means.__getitem__)[:_WORST]
        named = ", ".join(f"{printable(self.names[i])} {percent(means[i]).strip()}" for i in worst)
        return [
            f"mean and standard deviation over {counted(len(self.names), 'group', 'groups')}",
            *table_lines(columns),
            f"lowest mIoU of groups: {named}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """The scores for a JSON file; NaN becomes None."""
        scores = {"IoU": self.iou, "Dice": self.dice}
        by_score = {}
        for title, of_groups in scores.items():
            # Without the last column, which is the mean of the classes.
            pairs = zip(self.classes, self._present(of_groups)[:-1], strict=True)
            by_score[title] = {
                name: {"mean": or_none(mean_of_present(x)), "sd": or_none(_deviation(x))}
                for name, x in pairs
            }
        rows = []
        for i, (name, number) in enumerate(zip(self.names, self.num_images, strict=True)):
            row: dict[str, Any] = {"group": name, "num_images": number}
            for title, of_groups in scores.items():
                row[f"m{title}"] = or_none(mean_of_present(of_groups[i].tolist()))
                values = map(or_none, of_groups[i].tolist())
                row[title] = dict(zip(self.classes, values, strict=True))
            rows.append(row)
        return {"over_groups": by_score, "groups": rows}

    def _means(self, scores: np.ndarray) -> list[float]:
        """The mean of the classes of each group."""
        return [mean_of_present(row) for row in scores.tolist()]

    def _present(self, scores: np.ndarray) -> list[list[float]]:
        """The scores of each class, then the means of the classes, of groups that have them."""
        columns = [*scores.T.tolist(), self._means(scores)]
        return [[x for x in column if not math.isnan(x)] for column in columns]


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; NaN of fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else math.nan
