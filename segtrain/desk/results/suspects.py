"""Which masks are probably wrong: those that the model does not believe.

A network learns first what most masks agree on, and masks that contradict them keep a high loss
(small loss, arXiv:1804.06872). One that it has learnt by heart (arXiv:1706.05394) has a low one,
and is not found. What counts is the mean loss of a pixel in one pass over the whole images, against
that of the same class in other images: some classes are hard everywhere. The measure is the
modified z-score of Iglewicz and Hoaglin (How to Detect and Handle Outliers, 1993), of the logarithm
of the loss: the distance to the median in median deviations, which a few wrong masks do not move.
The mean of few pixels scatters more, so distances are multiplied by the root of the class's share
of the image. A shifted mask is a little wrong in all classes: an image has the root of the sum of
the squares of its positive scores.

What is wrong with a mask the model says, by the pixels for which it is sure of another class than
the mask (the idea of confident learning, arXiv:1911.00068 and arXiv:2307.05080).
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor

from segtrain.data.read.concurrent import prefetch
from segtrain.data.read.dataset import SegDataset
from segtrain.errors import CheckpointError
from segtrain.inference.predictor import Predictor
from segtrain.run.console import ProgressBar
from segtrain.text import first_of
from segtrain.types import IGNORE_INDEX

# The score of an image from which on its mask stands out. The authors call a single value of 3.5 an
# outlier; here several classes add up, and on drawn scenes and CamVid 5 separates better.
OUTLIER = 5.0
BY_HEART = "a wrong mask that the model has learnt by heart is not found"
# A class of which an image shows less says little about it; in part for the sake of its borders.
_LEAST_SHARE, _LEAST_PIXELS = 0.002, 64
LEAST_IMAGES = 8  # with a class, for a median of its losses
_LEAST_PROBABILITY = 1e-28  # lower ones count as this, a loss of 64
# Added to the loss: below, differences are those of a model that is sure.
_SMALL_LOSS = 0.01
# The least deviation, of the logarithm: where all losses are alike, none stands out by a little.
_LEAST_DEVIATION = 0.1
_NORMAL = 1.4826  # standard deviations in a median deviation, of the normal distribution

SURE = 0.9
_LEAST_REGION = 5e-4  # of the image
_SHIFT_PX = 8
# What a shift must explain: part of the pixels that disagree, and part of the image. On drawn
# scenes and CamVid masks in their places came to at most 0.20 of these pixels. Shifted ones came to
# at least 0.40 on scenes that the model has learnt, and to 0.15 to 0.32 on CamVid after 23 epochs.
_SHIFT_EXPLAINS, _SHIFT_GAIN = 0.25, 0.01
_MOST_CLAIMS, _LEAST_PART = 3, 0.1  # of the largest one
_SLIGHT = 5e-3  # of the image; claims of less do not explain a high loss


class Suspect(NamedTuple):
    """An image whose mask may be wrong.

    index: in the row of images that `rank` was given. score: of the image. class_id: its worst
        class.
    loss, usual: the mean loss of a pixel of this class here, and the median over the images.
    """

    index: int
    score: float
    class_id: int
    loss: float
    usual: float

    @property
    def stands_out(self) -> bool:
        """Whether the mask is probably wrong."""
        return self.score >= OUTLIER


class Ranking(NamedTuple):
    """suspects: all images that could be judged, the worst first. unseen: the number of others."""

    suspects: list[Suspect]
    unseen: int


def measure(
    predictor: Predictor, dataset: SegDataset, *, num_threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """The losses and pixels of each image and class as `rank` takes them, by one pass.

    num_threads: that decode images ahead.

    Raises:
        CheckpointError: the scores of an image are not finite.
        MemoryLimitError: the memory does not suffice for an image.
    """
    number = len(dataset)
    sums = np.zeros((2, number, predictor.num_classes))
    bar = ProgressBar(number, 0, "measure", enabled=True, unit="image", last_line=False)
    # Closed also after an error: threads decode images ahead.
    with bar, closing(prefetch(dataset.__getitem__, range(number), num_threads)) as decoded:
        for index, (image, label) in enumerate(decoded):
            place, pixels = f"image {dataset.name(index)}", torch.from_numpy(image)
            (predicted,) = predictor.label_maps(
                [pixels], [label.shape[:2]], place=place, probabilities="all"
            )
            if not predicted.is_finite:
                raise CheckpointError(f"{place}: the scores of the model are not finite numbers")
            sums[:, index] = class_sums(predicted.probability, label)
            bar.update()
    return sums[0], sums[1]


def class_sums(probability: Tensor, label: np.ndarray) -> np.ndarray:
    """The cross entropy of the pixels of each class, and their number, (2, K).

    probability: (K, h, w). label: (h, w) uint8 train ids, or IGNORE_INDEX.
    """
    classes = torch.from_numpy(label).to(probability.device, torch.int64)
    # `gather` needs a class for ignored pixels. Their bin is cut off at the end.
    own = probability.gather(0, classes.clamp(max=len(probability) - 1).unsqueeze(0))
    losses = -own.clamp(min=_LEAST_PROBABILITY).log().cpu().numpy()
    sums = [np.bincount(label.ravel(), x, IGNORE_INDEX + 1) for x in (losses.ravel(), None)]
    return np.stack(sums)[:, : len(probability)]


def rank(losses: np.ndarray, pixels: np.ndarray) -> Ranking:
    """Ranks the images.

    losses, pixels: (N, K) by image and class; sums over the pixels.
    """
    whole = pixels.sum(1, keepdims=True)
    mean = np.where(
        pixels >= np.maximum(_LEAST_PIXELS, _LEAST_SHARE * whole),
        losses / np.maximum(pixels, 1),
        np.nan,
    )
    mean[:, np.isfinite(mean).sum(0) < LEAST_IMAGES] = np.nan
    ranked = []
    if np.isfinite(mean).any():
        usual, scores = modified_z(mean, np.sqrt(pixels / np.maximum(whole, 1)))
        of_image = np.sqrt((np.nan_to_num(scores).clip(min=0) ** 2).sum(1))
        for i in np.flatnonzero(np.isfinite(scores).any(1)).tolist():
            k = int(np.nanargmax(scores[i]))
            numbers = map(float, (mean[i, k], usual[k]))
            ranked.append(Suspect(i, float(of_image[i]), k, *numbers))
    ranked.sort(key=lambda suspect: (-suspect.score, suspect.index))
    return Ranking(ranked, len(mean) - len(ranked))


def modified_z(mean: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The median of each column, (K,), and the scores (N, K), NaN where `mean` (N, K) is NaN.

    weights: (N, K), of the distances to the median.
    """
    usual, score = np.full(mean.shape[1], np.nan), np.full(mean.shape, np.nan)
    for k in np.flatnonzero(np.isfinite(mean).any(0)):
        known = np.isfinite(mean[:, k])
        logs, weight = np.log(mean[known, k] + _SMALL_LOSS), weights[known, k]
        distance = weight * (logs - np.median(logs))
        least = _LEAST_DEVIATION * np.median(weight)
        score[known, k] = distance / max(_NORMAL * np.median(np.abs(distance)), least)
        usual[k] = np.median(mean[known, k])
    return usual, score


class PairClaim(NamedTuple):
    """What seems to be wrong with a mask, in words, and the part of the image that says so."""

    words: str
    share: float


class Shift(NamedTuple):
    """down, right: pixels by which the mask would be moved. before, after: the part of the pixels
    of the image, but for a border, that agree with the prediction.
    """

    down: int
    right: int
    before: float
    after: float

    @property
    def explains(self) -> bool:
        """Whether the mask seems to be shifted."""
        gain = self.after - self.before
        return gain >= max(_SHIFT_GAIN, _SHIFT_EXPLAINS * (1 - self.before))


def disputed(label: np.ndarray, pred: np.ndarray, probability: np.ndarray) -> np.ndarray:
    """Where the model is sure of another class than the label, (h, w) bool; slivers are left out.

    label, pred: (h, w) uint8. probability: of `pred`, (h, w).
    """
    sure = (pred != label) & (label != IGNORE_INDEX) & (probability >= SURE)
    cleaned = cv2.morphologyEx(sure.astype(np.uint8), cv2.MORPH_OPEN, np.ones((3, 3), np.uint8))
    _, regions, stats, _ = cv2.connectedComponentsWithStats(cleaned, connectivity=4)
    large = stats[:, cv2.CC_STAT_AREA] >= _LEAST_REGION * label.size
    large[0] = False  # what is in no region
    return large[regions]


def best_shift(label: np.ndarray, pred: np.ndarray) -> Shift:
    """The shift of the label by up to 8 px a side that agrees best with the prediction.

    Every second pixel is tried, then the neighbours of the best.
    """
    most = _SHIFT_PX
    height, width = label.shape
    # Without a border as wide as the largest shift: all shifts compare the same pixels.
    inner = pred[most : height - most, most : width - most]

    def agreement(down: int, right: int) -> float:
        moved = label[most - down : height - most - down, most - right : width - most - right]
        valid = np.count_nonzero(moved != IGNORE_INDEX)
        return np.count_nonzero(moved == inner) / valid if valid else 0.0

    before = agreement(0, 0) if inner.size else 1.0
    best = Shift(0, 0, before, before)
    # An image of at most 16 px a side has no such inner part.
    if not inner.size:
        return best
    coarse = range(-most, most + 1, 2)
    tried = [(down, right) for down in coarse for right in coarse]
    for _ in range(2):
        for down, right in tried:
            if (after := agreement(down, right)) > best.after:
                best = Shift(down, right, before, after)
        near = [(best.down + y, best.right + x) for y in (-1, 0, 1) for x in (-1, 0, 1)]
        tried = [offset for offset in near if max(map(abs, offset)) <= most]
    return best


def claims(
    label: np.ndarray,
    pred: np.ndarray,
    probability: np.ndarray,
    names: Sequence[str],
    class_id: int,
) -> list[PairClaim]:
    """What seems to be wrong with a mask, the largest part first.

    Where the model is sure of little, the last one says what it makes of class `class_id`.
    label, pred, probability: as for `disputed`. names: of the classes.
    """
    shift = best_shift(label, pred)
    if shift.explains:
        return [_shift_claim(shift)]
    kept = sorted(_class_claims(label, pred, probability, names), key=lambda claim: -claim.share)
    kept = [claim for claim in kept[:_MOST_CLAIMS] if claim.share >= _LEAST_PART * kept[0].share]
    if sum(claim.share for claim in kept) < _SLIGHT:
        kept.append(_unsure_claim(label, pred, probability, names, class_id))
    return kept


def _unsure_claim(
    label: np.ndarray,
    pred: np.ndarray,
    probability: np.ndarray,
    names: Sequence[str],
    class_id: int,
) -> PairClaim:
    """What the model predicts where the mask has the class."""
    where, name = label == class_id, names[class_id]
    wrong = where & (pred != label)
    words = f"of {name} the model predicts {1 - wrong.sum() / where.sum():.0%} as labelled"
    if wrong.any():
        other = int(np.bincount(pred[wrong]).argmax())
        # From here on only the pixels of the class that it predicts there most often.
        wrong &= pred == other
        sure = probability[wrong].mean()
        words += f", {wrong.sum() / where.sum():.0%} as {names[other]} ({sure:.0%} sure)"
    return PairClaim(words, wrong.sum() / label.size)


def _shift_claim(shift: Shift) -> PairClaim:
    moves = ((shift.down, "down", "up"), (shift.right, "right", "left"))
    way = " and ".join(
        f"{abs(px)} px {positive if px > 0 else negative}" for px, positive, negative in moves if px
    )
    words = (
        f"shifted: moved {way} it would agree with the prediction on {shift.after:.1%} of the "
        f"pixels, now on {shift.before:.1%}"
    )
    return PairClaim(words, shift.after - shift.before)


def _class_claims(
    label: np.ndarray, pred: np.ndarray, probability: np.ndarray, names: Sequence[str]
) -> Iterator[PairClaim]:
    """Classes that are swapped, that look like another, and that are missing."""

    def table(chosen: np.ndarray) -> np.ndarray:
        keys = label[chosen].astype(np.int64) * len(names) + pred[chosen]
        return np.bincount(keys, minlength=len(names) ** 2).reshape(len(names), len(names))

    known = table((probability >= SURE) & (label != IGNORE_INDEX))
    wrong = table(disputed(label, pred, probability))
    # (K, K): of the pixels of a class for which the model is sure, most are another class.
    mostly = wrong > 0.5 * known.sum(1, keepdims=True)
    swapped = mostly & mostly.T
    for a, b in np.argwhere(np.triu(swapped)).tolist():
        share = (wrong[a, b] + wrong[b, a]) / label.size
        yield PairClaim(f"{names[a]} and {names[b]} are swapped ({share:.1%} of the image)", share)
    for a, b in np.argwhere(mostly & ~swapped).tolist():
        share = wrong[a, b] / label.size
        yield PairClaim(f"{names[a]} looks like {names[b]} ({share:.1%} of the image)", share)
    missing = np.where(mostly, 0, wrong)
    for b in np.flatnonzero(missing.any(0)).tolist():
        share = missing[:, b].sum() / label.size
        instead = first_of((names[a] for a in np.argsort(-missing[:, b]) if missing[a, b]), 3)
        words = f"{names[b]} is missing here ({share:.1%} of the image, labelled {instead})"
        yield PairClaim(words, share)
