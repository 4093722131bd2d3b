"""A pixel has one class, that of the highest score."""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from segtrain.data.read.classes import ClassFile
from segtrain.distributed import collectives as dist
from segtrain.metrics import Calibration, ConfusionMatrix
from segtrain.one_vs_rest import BinaryCounts, CurveCounts
from segtrain.run.pictures import LABELS, Rgb, raw_ids
from segtrain.task.contract import Decoding, ImageCounts, Task, Tile, Wanted
from segtrain.task.decision_rule import DecisionRule
from segtrain.task.outcome import ClassOutcome
from segtrain.task.prediction import LabelMap
from segtrain.task.targets import ClassTargets

# Rows at a time, which stay in a processor's cache: a third of the time.
_CACHED_ROWS = 32


class OneClass(Decoding):
    """A pixel has the class of the highest score, or what a rule says."""

    takes_highest = True

    def probabilities(self, logits: Tensor, dim: int = 1) -> Tensor:
        """Softmax."""
        return logits.softmax(dim)

    def label_map(
        self, tiles: Iterator[Tile], wanted: Wanted, rule: DecisionRule | None, *, is_logits: bool
    ) -> LabelMap:
        """The class of each pixel."""
        labels, finite, known = [], [], []
        for _, tile in tiles:
            highest = tile.max(0)
            if rule is None:
                labels.append(highest.indices.to(torch.uint8))
            else:
                labels.append(rule.label(tile.softmax(0) if is_logits else tile))
            # It stays on the device: the host would have to wait for each tile.
            finite.append(highest.values.isfinite().all())
            if wanted == "highest":
                known.append(of_highest(tile, highest.values) if is_logits else highest.values)
            elif wanted == "all":
                known.append(tile.softmax(0) if is_logits else tile.clone())
        probability = torch.cat(known, dim=-2) if known else None
        return LabelMap(torch.cat(labels), torch.stack(finite).all(), probability)


class ClassCounts(ImageCounts):
    """Those of one class a pixel, by a confusion matrix.

    curves: get the probabilities of all classes; None: they are not computed.
    """

    _outcome = ClassOutcome

    def __init__(
        self,
        task: Task,
        num_images: int,
        num_classes: int,
        device: torch.device,
        curves: CurveCounts | None,
    ) -> None:
        self.curves = curves
        self.num_infinite = torch.zeros((), dtype=torch.int64, device=device)
        self._images = torch.zeros(num_images, num_classes, 3, dtype=torch.int64, device=device)
        self._matrix: ConfusionMatrix | BinaryCounts = task.matrix(num_classes, device)
        self._calibration: Calibration | CurveCounts = Calibration(device)

    def add(self, index: int, found: LabelMap, label: Tensor) -> None:
        """Counts image `index`; nothing waits for the device."""
        table = self._matrix.update(found.label, label)
        # Right, labelled and predicted pixels: the diagonal, sums of rows, sums of columns.
        self._images[index] = torch.stack([table.diagonal(), table.sum(1), table.sum(0)], dim=1)
        if self.curves is not None:
            self.curves.update(found.probability, label)
        highest = found.probability
        if highest is not None:  # as of label maps that another program has written
            # Where curves are asked for, these are the probabilities of all classes.
            highest = highest if highest.ndim == 2 else highest.amax(0)
            self._calibration.update(highest, found.label, label)
        self.num_infinite += ~found.is_finite

    def sum_over_ranks(self, num_by_windows: int) -> ClassOutcome:
        """Those of all ranks (collective)."""
        self._matrix.sum_over_ranks()
        self._calibration.sum_over_ranks()
        dist.all_reduce_sum(self._images)
        if self.curves is not None:
            self.curves.sum_over_ranks()
        dist.wait_for_device(self._images.device)
        found = self._matrix, self._calibration, self._images
        return self._outcome(*found, num_by_windows, curves=self.curves)


class ClassTask(Task):
    """What tasks of classes share. counted_by: what counts their predictions."""

    has_classes = True
    counted_by: type[ClassCounts]

    def counts(
        self, num_images: int, num_classes: int, device: torch.device, curves: CurveCounts | None
    ) -> ClassCounts:
        """Pixels that are right, labelled and predicted, of each image and of all."""
        return self.counted_by(self, num_images, num_classes, device, curves)

    def shown(self, label: np.ndarray) -> np.ndarray:
        """As it is."""
        return label

    def key(self, classes: ClassFile) -> tuple[Sequence[str], Sequence[Rgb]]:
        """The classes."""
        return classes.names, classes.palette


class Semantic(ClassTargets, ClassTask):
    """A pixel has one class (task semantic); labels are train ids."""

    counted_by = ClassCounts

    def mean(self, members: Iterable[Tensor]) -> Tensor:
        """The logarithms of the mean probabilities; `softmax` gives these.

        log(sum_m p_m / M) is computed from the logarithms of p_m, so that small ones do not become
        minus infinity.
        """
        total, number = None, 0
        for logits in members:
            log_p = logits.log_softmax(dim=1)
            total = log_p if total is None else torch.logaddexp(total, log_p)
            number += 1
        return total - math.log(number)

    def option_of(self, name: str, threshold: float) -> str:
        """One of predict."""
        return f"predict --threshold {shlex.quote(f'{name}={threshold}')}"

    def decoding(self, thresholds: tuple[float, ...] | None) -> Decoding:
        """The highest score decides, or a rule; there are no thresholds."""
        return OneClass()

    def matrix(self, num_classes: int, device: torch.device) -> ConfusionMatrix:
        """By label and prediction."""
        return ConfusionMatrix(num_classes, device)

    def agreement(self, found: Tensor, logits: Tensor) -> Tensor:
        """Of the highest logits."""
        return (found.argmax(1) == logits.argmax(1)).float().mean()

    def stored(self, classes: ClassFile, label: np.ndarray) -> np.ndarray:
        """Raw ids, (H, W) uint8, or uint16 if an id is larger."""
        return raw_ids(classes)[label]

    def pictures(self, classes: ClassFile, label: np.ndarray) -> Mapping[str, np.ndarray]:
        """The label map."""
        return {LABELS: self.stored(classes, label)}

    def folders(self, classes: ClassFile) -> list[str]:
        """That of label maps."""
        return [LABELS]

    def ids(self, classes: ClassFile) -> Sequence[int]:
        """The raw ids."""
        return classes.write_ids


def of_highest(logits: Tensor, highest: Tensor) -> Tensor:
    """The softmax of the highest logit of every pixel, (h, w), of `logits`, (K, h, w)."""
    rows = _CACHED_ROWS if logits.device.type == "cpu" else len(highest)
    parts = zip(logits.split(rows, 1), highest.split(rows), strict=True)
    # 1 / sum of exp(x - highest) is the softmax of the highest, and cannot overflow.
    return torch.cat([(part - most).exp_().sum(0).reciprocal_() for part, most in parts])
