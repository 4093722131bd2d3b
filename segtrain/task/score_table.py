"""What an evaluation says, as lines of text and for JSON, by the rules of the data set.

IoU favours large objects: a near car outweighs ten far ones. The instance-weighted IoU (iIoU)
counts a pixel of an instance with weight `mean size of an instance of its class / size of this
instance` (arXiv:1604.01685, section 4.1, and evalPixelLevelSemanticLabeling.py of
cityscapesscripts):

    iIoU = iTP / (iTP + FP + iFN)

iTP, iFN: correct and wrong pixels of all instances, weighted. FP: pixels of other classes that are
predicted as this one, not weighted, because a prediction has no instances. A region without
instances of its own (a group of people) and ignored pixels count in none of them. A category is
the union of its classes: a car that is taken for a bus is a correct vehicle.

Only integers are kept, by class and size, and their weighted sum is rounded once. So neither the
order of the images nor the number of ranks changes a bit of the result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from segtrain.data.read.classes import ClassFile
from segtrain.data.read.raw_label import read_raw_label
from segtrain.distributed import collectives as dist
from segtrain.errors import DataError
from segtrain.metrics import (
    ConfusionMatrix,
    Scores,
    mean_of_present,
    or_none,
    percent,
    ratio,
    score_table,
    table,
)
from segtrain.task.prediction import Prediction
from segtrain.text import printable
from segtrain.types import IGNORE_INDEX

# An instance map holds `class id * 1000 + number of the instance`, or the class id alone where a
# pixel belongs to no single instance.
_IDS_PER_CLASS = 1000

# Places in the values of `InstanceCounts.counts`.
_NUMBER, _RIGHT_CLASS, _RIGHT_CATEGORY = range(3)


@dataclass(frozen=True)
class GroupScores:
    """Scores in [0, 1]; NaN where there are no pixels to judge, or no instances are defined.

    iiou: by class. The next two: by category, in the order of `categories`. Means leave out NaN.
    """

    categories: tuple[str, ...]
    iiou: tuple[float, ...]
    category_iou: tuple[float, ...]
    category_iiou: tuple[float, ...]

    @property
    def means(self) -> dict[str, float]:
        """The means over classes or categories, by their keys in JSON."""
        return {
            "miIoU": mean_of_present(self.iiou),
            "category_mIoU": mean_of_present(self.category_iou),
            "category_miIoU": mean_of_present(self.category_iiou),
        }


class InstanceCounts:
    """Counts the pixels of instances; `add` is a callback of `evaluate_dataset`.

    paths: the instance maps, in the order of the data set.
    """

    def __init__(self, classes: ClassFile, paths: Sequence[Path]) -> None:
        self._classes, self._paths = classes, paths
        names = _category_names(classes)
        self._category = np.array([names.index(c.category) for c in classes.classes])
        # (train id, pixels of the instance) -> number of such instances, and their pixels that are
        # predicted as the right class and as the right category.
        self.counts: dict[tuple[int, int], list[int]] = {}

    def add(self, prediction: Prediction) -> None:
        """Counts one image.

        Raises:
            DataError: its instance map cannot be read, has another size, or holds unknown ids.
        """
        path = self._paths[prediction.index]
        self.update(prediction.pred, read_raw_label(path), path)

    def update(self, pred: np.ndarray, instances: np.ndarray, path: str | Path = "") -> None:
        """Counts `pred`, (H, W) uint8 train ids, on the map `instances`, (H, W) uint8 or uint16.

        path: of the map, for messages.
        """
        if instances.shape != pred.shape:
            raise DataError(
                f"{printable(path)}: instance map {instances.shape[0]}x{instances.shape[1]}, label "
                f"{pred.shape[0]}x{pred.shape[1]}: sizes (height x width) must be equal"
            )
        # The official comparison: 1000 itself would be an instance of class 1, which is ignored.
        mask = instances > _IDS_PER_CLASS
        ids, predicted = instances[mask], pred[mask]
        # Sorting them, as np.unique does, takes longer than all else here.
        pixels = np.bincount(ids)
        values = pixels.nonzero()[0]
        train_ids = np.array([self._train_id(int(v), path) for v in values], dtype=np.uint8)
        # `_train_id` is asked once for each instance, and this table for each pixel.
        own_of = np.full(len(pixels), IGNORE_INDEX, np.uint8)
        own_of[values] = train_ids
        own = own_of[ids]
        judged = own != IGNORE_INDEX
        ids, own, predicted = ids[judged], own[judged], predicted[judged]
        sizes = pixels[values]
        right_class, right_category = (
            np.bincount(ids[same], minlength=len(pixels))[values]
            for same in (predicted == own, self._category[predicted] == self._category[own])
        )
        columns = [x.tolist() for x in (train_ids, sizes, right_class, right_category)]
        for train_id, size, *right in zip(*columns, strict=True):
            if train_id != IGNORE_INDEX:
                self._count((train_id, size), [1, *right])

    def sum_over_ranks(self) -> None:
        """Makes the counts of every rank the sum over all ranks (collective; call it once)."""
        parts = dist.all_gather_object([[*key, *value] for key, value in self.counts.items()])
        self.counts = {}
        for row in (row for part in parts for row in part):
            self._count((row[0], row[1]), row[2:])

    def weighted(self, train_ids: Sequence[int], right: int) -> tuple[float, float]:
        """Correct and wrong pixels of the instances of `train_ids`, weighted.

        right: what must be right of a pixel, _RIGHT_CLASS or _RIGHT_CATEGORY.
        """
        correct, wrong = [], []
        for (train_id, size), values in self.counts.items():
            if train_id in train_ids:
                weight = self._classes.classes[train_id].instance_px / size
                correct.append(values[right] * weight)
                wrong.append((values[_NUMBER] * size - values[right]) * weight)
        return math.fsum(correct), math.fsum(wrong)

    def _count(self, key: tuple[int, int], values: Sequence[int]) -> None:
        total = self.counts.setdefault(key, [0, 0, 0])
        for i, value in enumerate(values):
            total[i] += value

    def _train_id(self, instance: int, path: str | Path) -> int:
        raw = instance // _IDS_PER_CLASS
        train_id = self._classes.train_id_of.get(raw)
        has_size = train_id == IGNORE_INDEX or (
            train_id is not None and self._classes.classes[train_id].instance_px
        )
        if not has_size:
            raise DataError(
                f"{printable(path)}: instance {instance} is of class id {raw}, to which class file "
                f"{self._classes.name} gives no instance_px"
            )
        return train_id


def group_scores(
    matrix: ConfusionMatrix, classes: ClassFile, instances: InstanceCounts | None
) -> GroupScores | None:
    """The scores of categories and, with `instances`, the instance-weighted ones.

    None if the class file has no categories.
    """
    names = _category_names(classes)
    if not names:
        return None
    counts = np.array(matrix.counts.tolist(), dtype=object)  # Python integers cannot overflow
    groups = [[i for i, c in enumerate(classes.classes) if c.category == name] for name in names]

    def iou(group: list[int]) -> float:
        right = int(counts[np.ix_(group, group)].sum())
        return ratio(right, int(counts[group].sum() + counts[:, group].sum()) - right)

    def iiou(group: list[int], right: int) -> float:
        # A category counts only if all of its classes have instances.
        if instances is None or any(classes.classes[i].instance_px is None for i in group):
            return math.nan
        correct, wrong = instances.weighted(group, right)
        false = int(counts[:, group].sum() - counts[np.ix_(group, group)].sum())
        return ratio(correct, correct + false + wrong)

    return GroupScores(
        categories=names,
        iiou=tuple(iiou([i], _RIGHT_CLASS) for i in range(classes.num_classes)),
        category_iou=tuple(map(iou, groups)),
        category_iiou=tuple(iiou(group, _RIGHT_CATEGORY) for group in groups),
    )


def _category_names(classes: ClassFile) -> tuple[str, ...]:
    """The categories in the order in which they first occur; empty without any."""
    return tuple(dict.fromkeys(c.category for c in classes.classes if c.category is not None))


@dataclass(frozen=True)
class ScoreReport:
    """The scores of one evaluation.

    groups: None if the class file has no categories.
    benchmark: further scores by which the data set's own benchmark ranks, by name; may be empty.
    calibration_error: see `segtrain.metrics.calibration_error`.
    """

    names: Sequence[str]
    scores: Scores
    groups: GroupScores | None
    benchmark: dict[str, float]
    calibration_error: float

    def lines(self) -> list[str]:
        """The table of the classes and the means, in percent."""
        has_instances = self.groups is not None and not all(map(math.isnan, self.groups.iiou))
        lines = score_table(self.scores, self.names, self.groups.iiou if has_instances else None)
        if not math.isnan(self.calibration_error):
            lines.append(f"calibration error {self.calibration_error:.4f}")
        if self.groups is not None:
            lines += _category_lines(self.groups, with_instances=has_instances)
        if self.benchmark:
            lines.append("  ".join(f"{name} {percent(x)}" for name, x in self.benchmark.items()))
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The scores for a JSON file; NaN becomes None, because JSON has no NaN."""
        fields = self.scores.to_dict(self.names)
        fields["calibration_error"] = or_none(self.calibration_error)
        if self.groups is not None:
            fields |= {name: or_none(value) for name, value in self.groups.means.items()}
            for row, iiou in zip(fields["classes"], self.groups.iiou, strict=True):
                row["iIoU"] = or_none(iiou)
            fields["categories"] = [
                {"name": name, "IoU": or_none(iou), "iIoU": or_none(iiou)}
                for name, iou, iiou in zip(
                    self.groups.categories,
                    self.groups.category_iou,
                    self.groups.category_iiou,
                    strict=True,
                )
            ]
        if self.benchmark:
            fields["benchmark"] = {name: or_none(x) for name, x in self.benchmark.items()}
        return fields


def ade20k_scores(scores: Scores) -> dict[str, float]:
    """The scores of the scene parsing challenge (CSAILVision/sceneparsing, demoEvaluation.m).

    There a class that occurs nowhere has IoU 0 and is part of the mean over all classes; on the
    whole of the validation split there is no such class.
    """
    iou = [0.0 if math.isnan(x) else x for x in scores.iou]
    mean = math.fsum(iou) / len(iou) if scores.num_pixels else math.nan
    return {
        "ADE20K mIoU": mean,
        "ADE20K pixel accuracy": scores.pixel_acc,
        "ADE20K score": (mean + scores.pixel_acc) / 2,
    }


def _category_lines(groups: GroupScores, *, with_instances: bool) -> list[str]:
    columns = {"IoU": groups.category_iou}
    columns |= {"iIoU": groups.category_iiou} if with_instances else {}
    means = {n: x for n, x in groups.means.items() if with_instances or n == "category_mIoU"}
    last = "  ".join(f"{n.replace('_', ' ')} {percent(x)}" for n, x in means.items())
    return [*table("category", groups.categories, columns), last]
