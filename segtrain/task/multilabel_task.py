"""A pixel has any number of classes, each found by itself."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segtrain.data.read.classes import ClassFile
from segtrain.distributed import collectives as dist
from segtrain.one_vs_rest import BinaryCounts, CurveCounts, best_thresholds, counts_at, levels_of
from segtrain.run.pictures import LABELS, MASKS, mask_names, raw_bands
from segtrain.task.contract import Decoding, Task, Tile, Wanted
from segtrain.task.decision_rule import DecisionRule
from segtrain.task.outcome import ClassOutcome
from segtrain.task.prediction import LabelMap
from segtrain.task.score_table import InstanceCounts
from segtrain.task.semantic_task import ClassCounts, ClassTask
from segtrain.task.targets import PresenceTargets


class EachClass(Decoding):
    """A pixel has every class whose probability reaches its threshold.

    thresholds: one for all classes, or one a class.
    """

    def __init__(self, thresholds: tuple[float, ...]) -> None:
        self._thresholds = thresholds

    def bands(self, num_classes: int) -> tuple[int, ...]:
        """One a class."""
        return (num_classes,)

    def probabilities(self, logits: Tensor, dim: int = 1) -> Tensor:
        """The sigmoid of each class."""
        return logits.sigmoid()

    def label_map(
        self, tiles: Iterator[Tile], wanted: Wanted, rule: DecisionRule | None, *, is_logits: bool
    ) -> LabelMap:
        """Where each class is; a rule has no place here."""
        present, finite, known = [], [], []
        thresholds: Tensor | None = None
        for _, tile in tiles:
            p = tile.sigmoid() if is_logits else tile
            if thresholds is None:  # once an image
                thresholds = torch.tensor(self._thresholds, dtype=p.dtype).view(-1, 1, 1)
                thresholds = thresholds.to(p.device, non_blocking=True)
            present.append((p >= thresholds).to(torch.uint8))
            finite.append(p.isfinite().all())
            if wanted != "none":
                known.append(p.clone())
        label = torch.cat(present, dim=1).movedim(0, -1).contiguous()
        probability = torch.cat(known, dim=1) if known else None
        return LabelMap(label, torch.stack(finite).all(), probability)

    def describe(self) -> str:
        """The thresholds."""
        return "from " + " ".join(f"{t:.3g}" for t in self._thresholds)


class PresenceOutcome(ClassOutcome):
    """Of classes that overlap."""

    def fitted(
        self, given: tuple[float, ...] | None
    ) -> tuple["PresenceOutcome", tuple[float, ...] | None]:
        """The same at the thresholds of the highest IoU, and these."""
        if given is not None:
            return self, None
        thresholds = best_thresholds(levels_of(self.calibration.counts))
        # Each image was counted at all of these thresholds, so none is predicted again.
        matrix = BinaryCounts(len(thresholds), self.levels.device)
        by_image = counts_at(self.levels, thresholds)  # (N, K, 2, 2)
        matrix.counts += by_image.sum(0)
        images = _right_labelled_predicted(by_image)
        return replace(self, matrix=matrix, images=images), thresholds

    def chart(self, names: Sequence[str]) -> None:
        """No class is taken for another."""
        return

    def groups(self, classes: ClassFile, instances: InstanceCounts | None) -> None:
        """Categories are of classes of which a pixel has one."""
        return

    def table(self) -> dict[str, Any]:
        """Pixels of each class by label and prediction, absent before present."""
        return {"counts": self.matrix.counts.tolist()}


class PresenceCounts(ClassCounts):
    """Those of classes that overlap: each by itself, with its curve in the place of calibration.

    So there are curves whether anybody asks or not.
    """

    _outcome = PresenceOutcome

    def __init__(
        self,
        task: Task,
        num_images: int,
        num_classes: int,
        device: torch.device,
        curves: CurveCounts | None,
    ) -> None:
        super().__init__(task, num_images, num_classes, device, None)
        self._asks_curves = curves is not None
        self._calibration = CurveCounts(num_classes, device)
        size = num_images, *levels_of(self._calibration.counts).shape
        self._levels = torch.zeros(size, dtype=torch.int32, device=device)

    def add(self, index: int, found: LabelMap, label: Tensor) -> None:
        """Counts image `index`; nothing waits for the device."""
        self._images[index] = _right_labelled_predicted(self._matrix.update(found.label, label))
        if found.probability is not None:
            self._levels[index] = levels_of(self._calibration.update(found.probability, label))
        self.num_infinite += ~found.is_finite

    def sum_over_ranks(self, num_by_windows: int) -> PresenceOutcome:
        """Those of all ranks (collective)."""
        # Before the sums of `super`, which waits for the device at its end.
        dist.all_reduce_sum(self._levels)
        curves = self._calibration if self._asks_curves else None
        found = super().sum_over_ranks(num_by_windows)
        return replace(found, levels=self._levels, curves=curves)


class Multilabel(PresenceTargets, ClassTask):
    """Classes overlap (task multilabel); labels are (H, W, K): 1, 0 or IGNORE_INDEX."""

    counted_by = PresenceCounts
    refuses_rules = (
        "with task multilabel each class has a threshold of its own; use "
        "--set eval.thresholds=[...]"
    )

    def mean(self, members: Iterable[Tensor]) -> Tensor:
        """log(p / (1 - p)) of the mean p, for `sigmoid`."""
        total: Tensor | None = None
        for logits in members:
            # A class and all else, of which each is a member's softmax.
            log_p = torch.stack([logits, torch.zeros_like(logits)]).log_softmax(dim=0)
            total = log_p if total is None else torch.logaddexp(total, log_p)
        return total[0] - total[1]

    def thresholds(self, given: tuple[float, ...] | None) -> tuple[float, ...] | None:
        """0.5 unless told otherwise."""
        return given or (0.5,)

    def option_of(self, name: str, threshold: float) -> str:
        """A place of the config."""
        return f"{threshold} in eval.thresholds"

    def decoding(self, thresholds: tuple[float, ...] | None) -> Decoding:
        """Each class has a threshold."""
        return EachClass(self.thresholds(thresholds))

    def matrix(self, num_classes: int, device: torch.device) -> BinaryCounts:
        """Of each class by itself."""
        return BinaryCounts(num_classes, device)

    def agreement(self, found: Tensor, logits: Tensor) -> Tensor:
        """Of the classes whose probability is above 0.5."""
        return ((found > 0) == (logits > 0)).float().mean()

    def stored(self, classes: ClassFile, label: np.ndarray) -> np.ndarray:
        """Bands (H, W, K) of the ids of the class file."""
        return raw_bands(classes, label)

    def pictures(self, classes: ClassFile, label: np.ndarray) -> Mapping[str, np.ndarray]:
        """A mask of each class: 255 where it is."""
        masks = enumerate(mask_names(classes))
        return {f"{MASKS}/{name}": np.uint8(255) * (label[..., k] == 1) for k, name in masks}

    def folders(self, classes: ClassFile) -> list[str]:
        """One of each class, and that of bands."""
        return [*(f"{MASKS}/{name}" for name in mask_names(classes)), LABELS]


def _right_labelled_predicted(counts: Tensor) -> Tensor:
    """The pixels (..., K, 3) of `ClassOutcome.images`, of `BinaryCounts.counts`, (..., K, 2, 2)."""
    right, labelled, predicted = (
        counts[..., 1, 1],
        counts[..., 1, :].sum(-1),
        counts[..., 1].sum(-1),
    )
    return torch.stack([right, labelled, predicted], -1)
