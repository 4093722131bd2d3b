"""The confusion matrix and its scores; how far probabilities can be trusted.

Only integers are added up, so neither the order of the images nor the number of ranks changes the
result. The scores follow the official Cityscapes evaluator (cityscapesscripts): ignored pixels do
not count; a class that occurs neither in labels nor in predictions is left out of the mean; a class
that is predicted but never labelled has IoU 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.text import MAX_NAME, counted, first_of, printable, table_lines
from segtrain.types import IGNORE_INDEX


@dataclass(frozen=True)
class Scores:
    """Scores in [0, 1]; NaN where there are no pixels to judge. The first five are per class."""

    iou: tuple[float, ...]  # intersection / union
    dice: tuple[float, ...]  # 2 * correct / (labelled + predicted pixels), which is F1
    precision: tuple[float, ...]  # correct / predicted pixels
    recall: tuple[float, ...]  # correct / labelled pixels; others call it the class's accuracy
    class_frequency: tuple[float, ...]  # labelled pixels of the class / of all classes
    mean_iou: float  # over the classes that are not NaN ("mIoU")
    mean_dice: float  # the same ("mDice")
    mean_precision: float  # the same ("mPrecision")
    mean_recall: float  # the same ("mAcc")
    pixel_acc: float  # correct / labelled pixels of all classes ("aAcc")
    freq_weighted_iou: float  # mean of `iou` weighted by `class_frequency` ("fwIoU")
    num_pixels: int  # labelled ones, of all classes
    labelled: tuple[int, ...]  # the same of each class
    area_ratio: tuple[float, ...]  # predicted / labelled pixels of each class
    ap: tuple[float, ...] | None = None  # average precision, of classes that overlap

    def scalars(self, names: Sequence[str]) -> dict[str, float]:
        """The scores by their tags in TensorBoard and metrics.jsonl, without NaN."""
        columns = {"IoU": self.iou, "Dice": self.dice}
        classes = {
            f"{column}/{name}": value
            for column, of_classes in columns.items()
            for name, value in zip(names, of_classes, strict=True)
        }
        values = {**self.means(), **classes}
        return {f"eval/{tag}": value for tag, value in values.items() if not math.isnan(value)}

    def mean_iou_of(self, indices: Sequence[int]) -> float:
        """The mean IoU of some classes, over those that are not NaN."""
        return mean_of_present([self.iou[i] for i in indices])

    def mean_iou_without(self, left_out: Sequence[str], names: Sequence[str]) -> float:
        """The same of all classes but those called so; names: of all."""
        return self.mean_iou_of([i for i, name in enumerate(names) if name not in left_out])

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """The scores for a JSON file; NaN becomes None, because JSON has no NaN."""
        means = {name: or_none(value) for name, value in self.means().items()}
        columns = self.by_class()
        classes = [
            {"name": name} | dict(zip(columns, map(or_none, values), strict=True))
            for name, *values in zip(names, *columns.values(), strict=True)
        ]
        return {**means, "num_pixels": self.num_pixels, "classes": classes}

    def by_class(self) -> dict[str, tuple[float, ...]]:
        """The scores of each class by their names in tables and files."""
        columns = {
            "IoU": self.iou,
            "Dice": self.dice,
            "precision": self.precision,
            "recall": self.recall,
            "share": self.class_frequency,
            "area_ratio": self.area_ratio,
        }
        return columns if self.ap is None else columns | {"AP": self.ap}

    def means(self) -> dict[str, float]:
        """The scores over all classes by their usual names."""
        means = {
            "mIoU": self.mean_iou,
            "mDice": self.mean_dice,
            "mPrecision": self.mean_precision,
            "mAcc": self.mean_recall,
            "aAcc": self.pixel_acc,
            "fwIoU": self.freq_weighted_iou,
        }
        return means if self.ap is None else means | {"mAP": mean_of_present(self.ap)}


# Of probabilities; and those of the error and the curve, as in arXiv:1706.04599, which divide them.
FINE_BINS, _RELIABILITY_BINS = 960, 15

# Numbers in all copies of a histogram on a device. Neighbouring pixels are counted in different
# copies: atomic additions to one number go one after another, and half of an image may be road.
_SPREAD_CELLS = 2**15


class ConfusionMatrix:
    """`counts`: pixels of each label (row) and prediction (column), (K, K) int64 on `device`.

    On a CUDA device, the host waits for it in `sum_over_ranks` and `scores` only.

    Four pixels, of which one is ignored. Of class 0 one pixel is right, and two are labelled: its
    IoU is 1/2. Class 2 is nowhere, and left out of the mean.

    >>> matrix = ConfusionMatrix(3)
    >>> label, pred = torch.tensor([[0, 0, 1, 255], [0, 1, 1, 0]], dtype=torch.uint8)
    >>> matrix.update(pred, label).tolist()
    [[1, 1, 0], [0, 1, 0], [0, 0, 0]]
    >>> matrix.scores().iou, matrix.scores().mean_iou
    ((0.5, 0.5, nan), 0.5)
    """

    def __init__(self, num_classes: int, device: torch.device | str = "cpu") -> None:
        if not 1 <= num_classes <= IGNORE_INDEX:
            raise ValueError(f"num_classes: expected 1 to {IGNORE_INDEX}, got {num_classes}")
        self.num_classes = num_classes
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
        # Pixels of labels and of predictions out of range, which the host does not wait to see.
        self._checks_late = self.counts.device.type != "cpu"
        self._out_of_range = torch.zeros(2, dtype=torch.int64, device=device)

    def update(self, pred: Tensor, label: Tensor) -> Tensor:
        """Adds the pixels of one or more images and returns their counts, as `counts`.

        pred, label: uint8 of the same shape; pred in 0..K-1, label in 0..K-1 or IGNORE_INDEX.

        Raises:
            ValueError: shapes differ or a value is out of range. Then nothing is added. On a CUDA
                device `sum_over_ranks` and `scores` raise the second.
        """
        if pred.shape != label.shape or not pred.dtype == label.dtype == torch.uint8:
            kinds = [f"{tuple(x.shape)} {x.dtype}" for x in (pred, label)]
            raise ValueError(f"expected uint8 of one shape, got pred {kinds[0]}, label {kinds[1]}")
        table = self._table(pred, label)
        if self._checks_late:
            self._out_of_range += torch.stack([table[-1].sum(), table[:, -1].sum()])
        elif bool(table[-1].any() | table[:, -1].any()):
            highest, labels = self.num_classes - 1, label[label != IGNORE_INDEX]
            name, values = ("pred", pred) if table[:, -1].any() else ("label", labels)
            above = values[values > highest].unique().tolist()[:10]
            raise ValueError(f"{name}: expected 0 to {highest}, found {above}")
        # Without the row of ignored labels, and the row and column of values out of range.
        counts = table[1:-1, :-1]
        self.counts += counts
        return counts

    def _table(self, pred: Tensor, label: Tensor) -> Tensor:
        """Counts (K + 2, K + 1): row 0 ignored labels, last row and column values out of range."""
        size = self.num_classes
        # In one byte 255 + 1 is 0, so ignored pixels go to row 0. That is several times faster than
        # selecting the valid pixels first.
        rows = (label + 1).clamp_(max=min(size + 1, 255))
        columns = pred.clamp(max=size)
        cells = rows.to(torch.int32).mul_(size + 1).add_(columns)
        table = histogram(cells.flatten(), (size + 2) * (size + 1))
        return table.view(size + 2, size + 1).to(self.counts.device)

    def sum_over_ranks(self) -> None:
        """Makes the counts of every rank the sum over all ranks (collective; call it once).

        Raises:
            ValueError: this rank was given values out of range.
        """
        self._check()
        dist.all_reduce_sum(self.counts)
        dist.wait_for_device(self.counts.device)

    def scores(self) -> Scores:
        """The scores of all pixels so far; copies the counts to the host.

        Raises:
            ValueError: values out of range were given.
        """
        self._check()
        # Python integers are exact for any number of pixels, and K is small.
        rows = self.counts.tolist()
        correct = [row[i] for i, row in enumerate(rows)]
        labelled = [sum(row) for row in rows]
        predicted = [sum(column) for column in zip(*rows, strict=True)]
        total = sum(labelled)
        return scores_from(
            correct, labelled, predicted, [total] * len(rows), ratio(sum(correct), total)
        )

    def _check(self) -> None:
        if not self._checks_late:
            return
        dist.wait_for_device(self.counts.device)
        labels, preds = self._out_of_range.tolist()
        highest = self.num_classes - 1
        for name, number in (("label", labels), ("pred", preds)):
            if number:
                raise ValueError(f"{name}: expected 0 to {highest}, found {number} pixels above")


def scores_from(
    correct: Sequence[int],
    labelled: Sequence[int],
    predicted: Sequence[int],
    valid: Sequence[int],
    pixel_acc: float,
) -> Scores:
    """Those of K classes with these pixels; valid: pixels that count for the class."""
    both = [a + b for a, b in zip(labelled, predicted, strict=True)]
    iou = tuple(ratio(n, total - n) for n, total in zip(correct, both, strict=True))
    dice = tuple(ratio(2 * n, total) for n, total in zip(correct, both, strict=True))
    precision = tuple(map(ratio, correct, predicted))
    recall = tuple(map(ratio, correct, labelled))
    total = sum(labelled)
    # A class without labelled pixels has weight 0, whether its IoU is 0 or NaN.
    weighted = math.fsum(ratio(n, total) * i for n, i in zip(labelled, iou, strict=True) if n > 0)
    return Scores(
        iou=iou,
        dice=dice,
        precision=precision,
        recall=recall,
        class_frequency=tuple(map(ratio, labelled, valid)),
        mean_iou=mean_of_present(iou),
        mean_dice=mean_of_present(dice),
        mean_precision=mean_of_present(precision),
        mean_recall=mean_of_present(recall),
        pixel_acc=pixel_acc,
        freq_weighted_iou=weighted if total else math.nan,
        num_pixels=total,
        labelled=tuple(labelled),
        area_ratio=tuple(map(ratio, predicted, labelled)),
    )


class Calibration:
    """How often predictions are right that the model gives a certain probability.

    `counts`: wrong pixels (row 0) and right ones (row 1) by the probability of the predicted class,
    in 960 bins of equal width from 0 to 1; (2, 960) int64 on `device`. Ignored pixels do not
    count.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(2, FINE_BINS, dtype=torch.int64, device=device)

    def update(self, probability: Tensor, pred: Tensor, label: Tensor) -> None:
        """Adds pixels; all of one shape: probability float in [0, 1], pred and label as above."""
        bins = probability.nan_to_num(0).mul(FINE_BINS).to(torch.int32)
        # Right pixels are a row further. Ignored ones get a bin behind all others, which is
        # dropped.
        bins.clamp_(0, FINE_BINS - 1).add_((pred == label).to(torch.int32), alpha=FINE_BINS)
        bins.masked_fill_(label == IGNORE_INDEX, 2 * FINE_BINS)
        pixels = histogram(bins.flatten(), 2 * FINE_BINS + 1)[:-1]
        self.counts += pixels.view(2, FINE_BINS).to(self.counts.device)

    def sum_over_ranks(self) -> None:
        """Makes the counts of every rank the sum over all ranks (collective; call it once)."""
        dist.all_reduce_sum(self.counts)
        dist.wait_for_device(self.counts.device)


class ReliabilityBin(NamedTuple):
    """Pixels whose predictions have about one probability.

    share: of all pixels. confidence: their mean probability. accuracy: the part that is right.
    """

    share: float
    confidence: float
    accuracy: float


def reliability(counts: Tensor) -> list[ReliabilityBin]:
    """The reliability curve of `Calibration.counts`, (2, 960), without empty bins.

    Of `CurveCounts.counts` too: is a class there as often as its probability says?
    """
    # Of curves, the counts of all classes together.
    wrong, right = counts.flatten(0, -3).sum(0).tolist() if counts.ndim > 2 else counts.tolist()
    total = sum(wrong) + sum(right)
    bins = []
    number = len(wrong)
    # The first fine bin whose middle is in each bin: 1,024 are no multiple of 15.
    first = [round(k * number / _RELIABILITY_BINS) for k in range(_RELIABILITY_BINS + 1)]
    for fine in map(range, first, first[1:]):
        if size := sum(wrong[i] + right[i] for i in fine):
            middle = sum((i + 0.5) / number * (wrong[i] + right[i]) for i in fine)
            correct = sum(right[i] for i in fine)
            bins.append(ReliabilityBin(size / total, middle / size, correct / size))
    return bins


def calibration_error(counts: Tensor) -> float:
    """The expected calibration error (arXiv:1706.04599, equation 3); NaN without pixels.

    counts: as of `reliability`. Right to 0.0005, half the width of the fine bins.
    """
    bins = reliability(counts)
    return math.fsum(b.share * abs(b.accuracy - b.confidence) for b in bins) if bins else math.nan


def score_table(
    scores: Scores, names: Sequence[str], iiou: Sequence[float] | None = None
) -> list[str]:
    """Lines of text with the scores in percent: first the classes, then the means.

    iiou: instance-weighted IoU of each class, for a further column.
    """
    lines = table("class", names, scores.by_class() | ({} if iiou is None else {"iIoU": iiou}))
    lines.append("  ".join(f"{n} {percent(value)}" for n, value in scores.means().items()))
    missing = [
        tuple(map(math.isnan, pair)) for pair in zip(scores.iou, scores.precision, strict=True)
    ]
    for kind, words in (
        ((True, True), "left out of mIoU, neither labelled nor predicted"),
        ((False, True), "left out of mPrecision, never predicted"),
    ):
        shown = [
            printable(n, MAX_NAME) for n, flags in zip(names, missing, strict=True) if flags == kind
        ]
        lines += [f"{words}: {', '.join(shown)}"] if shown else []
    return lines


# Of a class in all labels. With fewer its IoU, and with it the mean, jumps by the luck of a region.
FEW_PIXELS = 100


def thin_classes(scores: Scores, names: Sequence[str], split: str) -> list[str]:
    """Warnings about classes of which the labels of `split` show nothing or nearly nothing."""
    if not scores.num_pixels:
        is_ignored = all(map(math.isnan, scores.class_frequency))
        what = (
            f"no pixel of {split} is labelled"
            if is_ignored
            else f"no label of {split} shows any class"
        )
        return [f"warning: {what}: there is nothing to score"]
    pixels = scores.labelled
    pairs = [(printable(name, MAX_NAME), n) for name, n in zip(names, pixels, strict=True)]
    none = [name for name, n in pairs if n == 0]
    few = [f"{name} ({counted(n, 'pixel', 'pixels')})" for name, n in pairs if 0 < n < FEW_PIXELS]
    lines = []
    if none:
        what = "count as 0 in mIoU once they are predicted, and not at all before"
        lines.append(f"warning: no label of {split} shows {first_of(none)}: such classes {what}")
    if few:
        part = f"each is 1/{len(pixels) - len(none)} of mIoU"
        lines.append(f"warning: {split} shows very little of {first_of(few)}: {part}")
    return lines


def table(title: str, names: Sequence[str], columns: Mapping[str, Sequence[float]]) -> list[str]:
    """Lines of text with a row for each name and its values in percent."""
    cells = ([column, *map(percent, values)] for column, values in columns.items())
    return table_lines([[title, *names], *cells])


def percent(value: float) -> str:
    """`value` in percent with two decimals, six characters wide; a dash for NaN."""
    return f"{'-' if math.isnan(value) else format(100 * value, '.2f'):>6}"


def histogram(cells: Tensor, num_cells: int) -> Tensor:
    """How often each of 0 .. num_cells - 1 occurs in `cells`, (n,) int32, as int64."""
    if cells.device.type == "cpu":
        return torch.bincount(cells, minlength=num_cells)
    return _histogram_without_wait(cells, num_cells)


def _histogram_without_wait(cells: Tensor, num_cells: int) -> Tensor:
    """As `histogram`: bincount reads the largest value, for which the host would wait."""
    copies = max(1, _SPREAD_CELLS // num_cells)
    places = torch.arange(cells.numel(), device=cells.device).remainder_(copies)
    places.mul_(num_cells).add_(cells)
    table = torch.zeros(copies * num_cells, dtype=torch.int64, device=cells.device)
    one = torch.ones((), dtype=torch.int64, device=cells.device)
    # Expanded: no ones are stored for each pixel.
    table.scatter_add_(0, places, one.expand(places.shape))
    return table.view(copies, num_cells).sum(0)


def ratio(part: float, whole: float) -> float:
    """`part` / `whole`; NaN if `whole` is 0."""
    return part / whole if whole else math.nan


def mean_of_present(values: Sequence[float]) -> float:
    """The mean of the values that are not NaN; NaN if there are none."""
    present = [v for v in values if not math.isnan(v)]
    return math.fsum(present) / len(present) if present else math.nan


def or_none(value: float) -> float | None:
    """`value` for JSON, which has no NaN."""
    return None if math.isnan(value) else value
