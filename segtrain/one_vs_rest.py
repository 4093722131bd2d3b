"""Each class against all else: counts, average precision, and thresholds of probability.

Of classes that overlap these are the scores; of others the curves of each class. As in `metrics`
only integers are added up, so that neither images nor ranks change a bit by their order.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.metrics import ConfusionMatrix, Scores, histogram, ratio, scores_from
from segtrain.types import IGNORE_INDEX


class BinaryCounts:
    """Of classes that overlap: `counts` are pixels of each class by label and prediction.

    (K, 2, 2) int64 on `device`. Of two pixels one has both classes, and the other none; for the
    second class it is ignored.

    >>> counts = BinaryCounts(2)
    >>> label = torch.tensor([[[1, 1], [0, 255]]], dtype=torch.uint8)  # (1, 2, K)
    >>> counts.update(torch.ones_like(label), label).tolist()
    [[[0, 1], [0, 1]], [[0, 0], [0, 1]]]
    >>> counts.scores().iou, counts.scores().precision
    ((0.5, 1.0), (0.5, 1.0))
    """

    def __init__(self, num_classes: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(num_classes, 2, 2, dtype=torch.int64, device=device)

    def update(self, pred: Tensor, label: Tensor) -> Tensor:
        """Adds the pixels of an image and returns their counts, as `counts`.

        pred, label: (h, w, K) uint8 of 0 and 1; label also of IGNORE_INDEX.

        Raises:
            ValueError: shapes differ.
        """
        num_classes = len(self.counts)
        if pred.shape != label.shape or pred.shape[-1] != num_classes:
            shapes = f"pred {tuple(pred.shape)}, label {tuple(label.shape)}"
            raise ValueError(f"expected (h, w, {num_classes}), got {shapes}")
        # Five cells a class: two labels by two predictions, and ignored pixels, which are dropped.
        cells = (2 * label.to(torch.int32) + pred).masked_fill_(label == IGNORE_INDEX, 4)
        cells += torch.arange(0, 5 * num_classes, 5, dtype=torch.int32, device=cells.device)
        counts = histogram(cells.flatten(), 5 * num_classes).view(num_classes, 5)
        counts = counts[:, :4].view(num_classes, 2, 2).to(self.counts.device)
        self.counts += counts
        return counts

    def sum_over_ranks(self) -> None:
        """Makes the counts of every rank the sum over all ranks (collective; call it once)."""
        dist.all_reduce_sum(self.counts)
        dist.wait_for_device(self.counts.device)

    def scores(self) -> Scores:
        """The scores of all pixels so far; `pixel_acc` is of all pixels and classes together."""
        rows = self.counts.tolist()
        correct = [present[1] for _, present in rows]
        labelled = [sum(present) for _, present in rows]
        predicted = [absent[1] + present[1] for absent, present in rows]
        valid = [sum(absent) + sum(present) for absent, present in rows]
        right = sum(absent[0] + present[1] for absent, present in rows)
        return scores_from(correct, labelled, predicted, valid, ratio(right, sum(valid)))


# A power of 2: then a bin holds exactly the float32 probabilities from its threshold on.
CURVE_BINS = 1024


class CurveCounts:
    """Each class against all else: `counts` are pixels by class, label and probability.

    (K, 2, 1024) int64 on `device`: without the class (row 0) and with it (row 1), by the
    probability of this class, in bins of equal width from 0 to 1. Ignored pixels do not count.
    """

    def __init__(self, num_classes: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(num_classes, 2, CURVE_BINS, dtype=torch.int64, device=device)

    def update(self, probability: Tensor, label: Tensor) -> Tensor:
        """Adds the pixels of an image and returns their counts, as `counts`.

        probability: (K, h, w) float in [0, 1]. label: (h, w) uint8, or (h, w, K) where classes
        overlap.
        """
        counts = torch.empty_like(self.counts)
        for k, of_class in enumerate(probability):  # one by one: K maps of bins would not fit
            own = label if label.ndim == 2 else label[..., k]
            bins = of_class.nan_to_num(0).mul(CURVE_BINS).to(torch.int32).clamp_(0, CURVE_BINS - 1)
            shows = own == (k if label.ndim == 2 else 1)
            bins.add_(shows.to(torch.int32), alpha=CURVE_BINS)
            # A bin behind all others, which is dropped.
            bins.masked_fill_(own == IGNORE_INDEX, 2 * CURVE_BINS)
            pixels = histogram(bins.flatten(), 2 * CURVE_BINS + 1)[:-1]
            counts[k] = pixels.view(2, CURVE_BINS)
        self.counts += counts
        return counts

    def sum_over_ranks(self) -> None:
        """Makes the counts of every rank the sum over all ranks (collective; call it once)."""
        dist.all_reduce_sum(self.counts)
        dist.wait_for_device(self.counts.device)


def average_precision(counts: Tensor) -> tuple[float, ...]:
    """That of each class, of `CurveCounts.counts`; NaN for a class without pixels.

    The sum of precision times growth of recall over all thresholds, as scikit-learn's
    average_precision_score of probabilities rounded down to 1/1024.
    """
    ap = []
    # From the highest threshold down: each sum is of all pixels that are predicted there.
    for absent, present in counts.flip(-1).cumsum(-1).tolist():
        hits = [0, *present]
        terms = (
            (hits[i + 1] - hits[i]) * hits[i + 1] / (hits[i + 1] + wrong)
            for i, wrong in enumerate(absent)
            if hits[i + 1] > hits[i]
        )
        ap.append(ratio(math.fsum(terms), hits[-1]))
    return tuple(ap)


# Thresholds that are tried, and counted for each image: multiples of 1/64.
_LEVELS = 64


def levels_of(counts: Tensor) -> Tensor:
    """`CurveCounts.counts`, (K, 2, 1024), in 64 bins: (K, 2, 64)."""
    return counts.unflatten(-1, (_LEVELS, -1)).sum(-1)


def best_thresholds(levels: Tensor) -> tuple[float, ...]:
    """The threshold of each class whose IoU is the highest, of (K, 2, 64) from `levels_of`.

    Of several the one next to 0.5, which is also that of a class without pixels.
    """
    chosen = []
    # Sums from the end, then back in the order of the levels.
    for absent, present in levels.flip(-1).cumsum(-1).flip(-1).tolist():
        # From the first level on, all pixels are predicted: that is no threshold.
        pairs = list(zip(present, absent, strict=True))[1:]
        # IoU: hits / (all labelled pixels, which are present[0], and wrong ones).
        ious = [ratio(hits, present[0] + wrong) if present[0] else 0.0 for hits, wrong in pairs]
        equal = [i + 1 for i, iou in enumerate(ious) if iou == max(ious)]
        chosen.append(min(equal, key=lambda i: abs(i - _LEVELS // 2)) / _LEVELS)
    return tuple(chosen)


def counts_at(levels: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Pixels by label and prediction at these thresholds, (..., K, 2, 2), of (..., K, 2, 64)."""
    first = torch.tensor([round(t * _LEVELS) for t in thresholds], device=levels.device)
    # (K, 1, 64): the levels from the threshold of a class on.
    above = torch.arange(_LEVELS, device=levels.device) >= first.view(-1, 1, 1)
    predicted = (levels * above).sum(-1)
    return torch.stack([levels.sum(-1) - predicted, predicted], -1)


def scores_of(matrix: Tensor, calibration: Tensor) -> Scores:
    """The scores of `counts` of a ConfusionMatrix, or of BinaryCounts and CurveCounts."""
    if matrix.ndim == 2:
        whole = ConfusionMatrix(len(matrix))
        whole.counts += matrix.cpu()
        return whole.scores()
    binary = BinaryCounts(len(matrix))
    binary.counts += matrix.cpu()
    return replace(binary.scores(), ap=average_precision(calibration))
