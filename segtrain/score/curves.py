"""Precision and recall of a class at each threshold of its probability, and which one to choose.

A pixel is predicted as the class where its probability is at least the threshold, whatever those of
other classes are; `segtrain predict --threshold` does the same. Thresholds are multiples of 1/1024.
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segtrain.errors import ConfigError
from segtrain.metrics import mean_of_present, or_none, percent, table
from segtrain.one_vs_rest import CURVE_BINS, CurveCounts, average_precision
from segtrain.task.contract import Task
from segtrain.text import first_of, printable


@dataclass(frozen=True)
class ClassCurve:
    """Of one class: (1024,) int64 each, at the thresholds 0, 1/1024, 2/1024 ...

    hits: its pixels that are predicted. predicted: pixels that are predicted as the class.
    """

    hits: np.ndarray
    predicted: np.ndarray

    @classmethod
    def of(cls, counts: Tensor) -> "ClassCurve":
        """counts: (2, 1024), those of a class in `CurveCounts.counts`."""
        # Summed from the end: a pixel is predicted at the threshold of its bin and at all below.
        others, own = counts.cpu().numpy()[:, ::-1].cumsum(1)[:, ::-1]
        return cls(own, others + own)

    @property
    def precision(self) -> np.ndarray:
        """(1024,) float64; NaN where nothing is predicted."""
        with np.errstate(invalid="ignore"):
            return self.hits / self.predicted

    @property
    def recall(self) -> np.ndarray:
        """(1024,) float64; NaN for a class that is not labelled."""
        with np.errstate(invalid="ignore"):
            return self.hits / self.hits[0]

    def best(self, *, precision: float = 0.0, recall: float = 0.0) -> int | None:
        """The bin of the threshold above 0 with this precision and the highest recall; or with this
        recall and the highest precision. None: no threshold has it.
        """
        enough = (self.precision >= precision) & (self.recall >= recall)
        # A threshold of 0 would predict every pixel.
        fitting = np.flatnonzero(enough[1:]) + 1
        other = self.recall if precision else self.precision
        # Of equal ones the highest threshold.
        return max(fitting.tolist(), key=lambda i: (other[i], i), default=None)


@dataclass(frozen=True)
class CurveQuestion:
    """What the user asks about thresholds.

    file: a CSV of all curves. class_name: whose threshold is sought, with `precision` or `recall`.
    """

    file: Path | None = None
    class_name: str | None = None
    precision: float | None = None
    recall: float | None = None

    @property
    def is_asked(self) -> bool:
        """Whether there is anything to answer."""
        return self != CurveQuestion()

    def check(self) -> None:
        """ConfigError: options that do not serve each other."""
        wanted = [x for x in (self.precision, self.recall) if x is not None]
        if self.class_name is None and wanted:
            raise ConfigError("--precision, --recall: need --class NAME")
        if self.class_name is not None and len(wanted) != 1:
            raise ConfigError("--class: needs either --precision or --recall")

    def counts(self, names: Sequence[str], device: torch.device) -> CurveCounts | None:
        """What counts for the answers; None if nothing is asked.

        ConfigError: there is no such class.
        """
        if self.class_name is not None and self.class_name not in names:
            there = first_of(names, 20)
            raise ConfigError(f"--class: no class {printable(self.class_name)}; there are {there}")
        return CurveCounts(len(names), device) if self.is_asked else None

    def answer(
        self, counts: Tensor, names: Sequence[str], task: Task
    ) -> tuple[list[str], dict[str, Any]]:
        """Lines of text, and the same for JSON.

        counts: `CurveCounts.counts`.
        """
        ap = average_precision(counts)
        mean = mean_of_present(ap)
        lines = [*table("class", names, {"AP": ap}), f"mAP {percent(mean)}"]
        json = {"mAP": or_none(mean), "AP": dict(zip(names, map(or_none, ap), strict=True))}
        if self.class_name is not None:
            of_class = ClassCurve.of(counts[list(names).index(self.class_name)])
            line, point = self._operating_point(of_class, task)
            lines.append(line)
            json["operating_point"] = {"class": self.class_name, **point}
        return lines, json

    def _operating_point(
        self, curve: ClassCurve, task: Task
    ) -> tuple[str, dict[str, float | None]]:
        shown = printable(self.class_name)
        if not curve.hits[0]:
            return f"{shown}: not labelled, so no threshold can be chosen", {"threshold": None}
        i = curve.best(precision=self.precision or 0.0, recall=self.recall or 0.0)
        if i is None:
            kind, values = (
                ("precision", curve.precision) if self.precision else ("recall", curve.recall)
            )
            words = f"no threshold has a {kind} of {self.precision or self.recall:.2%}"
            most = f"the highest is {np.nanmax(values[1:]):.2%}"
            return f"{shown}: {words}; {most}", {"threshold": None}
        threshold, precision, recall = i / CURVE_BINS, curve.precision[i], curve.recall[i]
        option = task.option_of(shown, threshold)
        line = f"{shown}: precision {precision:.2%}, recall {recall:.2%} by {option}"
        return line, {"threshold": threshold, "precision": precision, "recall": recall}


CURVE_TITLES = "class", "threshold", "precision", "recall", "right_px", "predicted_px"


def curves_csv(counts: Tensor, names: Sequence[str]) -> str:
    """CSV: a line for each class and threshold above 0. counts: `CurveCounts.counts`."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(CURVE_TITLES)
    for name, of_class in zip(names, map(ClassCurve.of, counts), strict=True):
        columns = of_class.precision, of_class.recall, of_class.hits, of_class.predicted
        for i, (precision, recall, *pixels) in enumerate(zip(*columns, strict=True)):
            if i:
                values = ("" if math.isnan(x) else f"{x:.6f}" for x in (precision, recall))
                rows.writerow([name, i / CURVE_BINS, *values, *pixels])
    return text.getvalue()
