"""What an evaluation says, as lines of text and for JSON, by the rules of the data set."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from segtrain.data.classes import ClassFile
from segtrain.evaluation.instances import GroupScores, InstanceCounts, group_scores
from segtrain.metrics import ConfusionMatrix, Scores, percent, score_table
from segtrain.text import MAX_NAME, printable


@dataclass(frozen=True)
class Report:
    """The scores of one evaluation.

    groups: None if the class file has no categories.
    benchmark: further scores by which the data set's own benchmark ranks, by name; may be empty.
    """

    names: Sequence[str]
    scores: Scores
    groups: GroupScores | None
    benchmark: dict[str, float]

    def lines(self) -> list[str]:
        """The table of the classes and the means, in percent."""
        has_instances = self.groups is not None and not all(map(math.isnan, self.groups.iiou))
        lines = score_table(self.scores, self.names, self.groups.iiou if has_instances else None)
        if not self.scores.num_pixels:
            lines.append("no pixel is labelled: there is nothing to score")
        if self.groups is not None:
            lines += _category_lines(self.groups, with_instances=has_instances)
        if self.benchmark:
            lines.append("  ".join(f"{name} {percent(x)}" for name, x in self.benchmark.items()))
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The scores for a JSON file; NaN becomes None, because JSON has no NaN."""
        found = self.scores.to_dict(self.names)
        if self.groups is not None:
            found |= {name: _or_none(value) for name, value in self.groups.means.items()}
            for row, iiou in zip(found["classes"], self.groups.iiou, strict=True):
                row["iIoU"] = _or_none(iiou)
            found["categories"] = [
                {"name": name, "IoU": _or_none(iou), "iIoU": _or_none(iiou)}
                for name, iou, iiou in _categories(self.groups)
            ]
        if self.benchmark:
            found["benchmark"] = {name: _or_none(x) for name, x in self.benchmark.items()}
        return found


def make_report(
    matrix: ConfusionMatrix,
    names: Sequence[str],
    classes: ClassFile,
    instances: InstanceCounts | None,
    *,
    layout: str,
) -> Report:
    """The report of an evaluation.

    names: of the model's classes. classes: of the data. layout: `data.layout`.
    """
    scores = matrix.scores()
    benchmark = ade20k_scores(scores) if layout == "ade20k" else {}
    return Report(names, scores, group_scores(matrix, classes, instances), benchmark)


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
    width = max(len("category"), *(len(printable(name, MAX_NAME)) for name in groups.categories))
    lines = [f"{'category':<{width}}  {'IoU':>6}" + (f"  {'iIoU':>6}" if with_instances else "")]
    for name, *values in _categories(groups):
        columns = values if with_instances else values[:1]
        lines.append("  ".join([f"{printable(name, MAX_NAME):<{width}}", *map(percent, columns)]))
    means = {n: x for n, x in groups.means.items() if with_instances or n == "category_mIoU"}
    return [*lines, "  ".join(f"{n.replace('_', ' ')} {percent(x)}" for n, x in means.items())]


def _categories(groups: GroupScores) -> list[tuple[str, float, float]]:
    return list(zip(groups.categories, groups.category_iou, groups.category_iiou, strict=True))


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
