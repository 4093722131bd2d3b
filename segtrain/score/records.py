"""The scores of one evaluation image by image, and the file in which a run keeps its best one."""

import csv
import io
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.sequences import sequences_of
from segtrain.errors import DataError
from segtrain.files import os_errors_as, read_bytes, write_atomic
from segtrain.inference.settings import InferenceSettings
from segtrain.metrics import FINE_BINS, Scores, or_none
from segtrain.one_vs_rest import scores_of
from segtrain.run.directory import EVALUATION
from segtrain.task.contract import Outcome
from segtrain.text import distinct, printable

RIGHT, LABELLED, PREDICTED = range(3)

# A picture stands for its neighbours in a sequence: one in so many of its images.
_SEQUENCE_PART = 20


@dataclass(frozen=True)
class Records:
    """What an evaluation counted.

    about: split, step of the model, and how it predicted, for people and JSON.
    names: of the images, N. classes: K names.
    images: (N, K, 3) int64, of each image and class the pixels that are right, labelled and
        predicted. matrix: (K, K) int64, as `ConfusionMatrix.counts`. calibration: (2, 960) int64,
        as `Calibration.counts`. Where classes overlap as `BinaryCounts` and `ProbabilityCounts`.
    """

    about: dict[str, Any]
    names: tuple[str, ...]
    classes: tuple[str, ...]
    images: np.ndarray
    matrix: np.ndarray
    calibration: np.ndarray

    @classmethod
    def of(
        cls, outcome: Outcome, dataset: SegDataset, settings: InferenceSettings, step: int
    ) -> "Records | None":
        """Those of an evaluation of `dataset` by the model of `step`; None: its task has none."""
        counts = outcome.by_image()
        if counts is None:
            return None
        about = {"split": dataset.split, "step": step, "inference": settings.describe()}
        names = tuple(dataset.names)
        return cls(about, names, dataset.classes.names, *(x.cpu().numpy() for x in counts))

    @classmethod
    def joined(cls, parts: Sequence["Records"], **about: Any) -> "Records":
        """Those of several evaluations of different images, in the order of their names."""
        names = [name for part in parts for name in part.names]
        order = sorted(range(len(names)), key=names.__getitem__)
        return cls(
            about,
            tuple(names[i] for i in order),
            parts[0].classes,
            np.concatenate([part.images for part in parts])[order],
            np.sum([part.matrix for part in parts], axis=0),
            np.sum([part.calibration for part in parts], axis=0),
        )

    def is_like(self, other: "Records", *, step: int) -> bool:
        """Whether it evaluates the model of `step` on the same images and labels, in that way."""
        return (
            self.about == other.about | {"step": step}
            and (self.names, self.classes) == (other.names, other.classes)
            and np.array_equal(self.images[..., LABELLED], other.images[..., LABELLED])
        )

    @property
    def scores(self) -> Scores:
        """Those of all images together."""
        return scores_of(torch.from_numpy(self.matrix), torch.from_numpy(self.calibration))

    @property
    def class_iou(self) -> np.ndarray:
        """(N, K) float64: the IoU of each class in each image; NaN where it has no pixels there."""
        right, union = self.images[..., RIGHT], self.images[..., LABELLED:].sum(2)
        with np.errstate(invalid="ignore"):
            return right / (union - right)

    @property
    def image_iou(self) -> np.ndarray:
        """(N,) float64: the mean IoU of the classes that are labelled in the image, else NaN.

        Csurka et al., What is a good evaluation measure for semantic segmentation?, BMVC 2013.
        """
        is_labelled = self.images[..., LABELLED] > 0
        total = np.where(is_labelled, self.class_iou, 0).sum(1)
        with np.errstate(invalid="ignore"):
            return total / is_labelled.sum(1)

    def worst(self, number: int, *, by_class: int | None = None, best: bool = False) -> list[int]:
        """The images with the lowest scores, lowest first; neighbours of a sequence count once.

        by_class: a class whose IoU counts, where it is labelled. best: the highest instead.
        """
        score = self.image_iou if by_class is None else self.class_iou[:, by_class]
        counts = self.images[..., LABELLED]
        counts = counts.sum(1) if by_class is None else counts[:, by_class]
        order = sorted(np.flatnonzero(counts).tolist(), key=lambda i: score[i], reverse=best)
        sequences = sequences_of(self.names)
        length = Counter(sequences)
        chosen: list[int] = []
        taken: dict[str, list[int]] = defaultdict(list)
        for i in order:
            sequence = sequences[i]
            gap = length[sequence] / _SEQUENCE_PART
            # A near neighbour of an image that is chosen would show the same.
            if all(abs(i - other) >= gap for other in taken[sequence]):
                chosen.append(i)
                taken[sequence].append(i)
            if len(chosen) == number:
                break
        return chosen

    def table(self) -> str:
        """CSV: a line for each image, the worst first; IoU of each class, blank without pixels.

        Then the pixels of each class that are right, labelled and predicted.
        """
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        kinds = "right_px", "labelled_px", "predicted_px"
        pixels = [f"{name} {kind}" for name in self.classes for kind in kinds]
        titles = ["image", "IoU", "accuracy", "labelled_px", *self.classes, *pixels]
        rows.writerow(distinct(titles))
        score, by_class = self.image_iou, self.class_iou
        right, labelled = (self.images[..., column].sum(1) for column in (RIGHT, LABELLED))
        # Images without labels come last: NaN compares to nothing.
        for i in sorted(range(len(self.names)), key=lambda i: (math.isnan(score[i]), score[i])):
            accuracy = right[i] / labelled[i] if labelled[i] else math.nan
            values = [score[i], accuracy, int(labelled[i]), *by_class[i]]
            values += self.images[i].ravel().tolist()
            rows.writerow([self.names[i], *(_cell(value) for value in values)])
        return text.getvalue()

    def confusion_csv(self) -> str:
        """CSV: pixels of each class by label (a line) and prediction (a column)."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(distinct(["label", *self.classes]))
        for name, counts in zip(self.classes, self.matrix.tolist(), strict=True):
            rows.writerow([name, *counts])
        return text.getvalue()

    def save(self, directory: Path) -> None:
        """Writes the file of the run in `directory`; raises OSError."""
        about = {"about": self.about, "names": self.names, "classes": self.classes}
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        data = io.BytesIO()
        np.savez_compressed(
            data, about=text, images=self.images, matrix=self.matrix, calibration=self.calibration
        )
        # Not durable: another evaluation of best.pt computes the same.
        write_atomic(directory / EVALUATION, data.getvalue(), durable=False)


def load_records(directory: Path) -> Records | None:
    """Those that the run in `directory` has kept; None if there are none.

    Raises:
        DataError: the file is damaged.
    """
    path = directory / EVALUATION
    if not path.exists():
        return None
    with os_errors_as(DataError, path):
        data = read_bytes(path)
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = [file[name] for name in ("images", "matrix", "calibration")]
            about = json.loads(file["about"].tobytes())
        records = Records(about["about"], *(tuple(about[k]) for k in ("names", "classes")), *arrays)
        size, n = len(records.classes), len(records.names)
        shapes = [x.shape[:2] for x in arrays]
        # Either classes exclude each other, or they overlap: two forms of counts.
        if shapes not in ([(n, size), (size, size), (2, FINE_BINS)], [(n, size), *2 * [(size, 2)]]):
            raise ValueError("sizes do not fit")
    except Exception as error:  # zipfile, numpy and json raise many kinds
        raise DataError(
            f"{printable(path)}: damaged ({printable(str(error))}); remove it, and the next "
            "evaluation writes it anew"
        ) from error
    return records


def scores_csv(scores: Scores, classes: Sequence[str]) -> str:
    """CSV: a line for each class, then the means."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    columns = scores.by_class()
    rows.writerow(["class", *columns])
    for name, *values in zip(classes, *columns.values(), strict=True):
        rows.writerow([name, *map(_cell, values)])
    means = scores.mean_iou, scores.mean_dice, scores.mean_precision, scores.mean_recall
    rows.writerow(["mean", *map(_cell, means), *[""] * (len(columns) - len(means))])
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, int):
        return value
    value = or_none(float(value))
    return "" if value is None else f"{value:.6f}"
