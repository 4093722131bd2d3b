"""Whether labels fit their images: edges and colours of images beside the borders of labels.

Each label of a sample is laid on each image of it. Labels that belong to their images fit these
better than they fit others; where they do not, names, order or orientation were mixed up.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import cv2
import numpy as np

from segtrain.desk.survey.compared_pairs import ComparedPair, read_pairs
from segtrain.desk.survey.contents import spread
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet

# Of fewer labels nothing can be compared.
_FEWEST_COMPARED = 5
# Images that EXIF turns, of which edges are read.
_TURNED_SAMPLE = 24
# The farthest image in the order that may be the one of a label.
_FARTHEST = 5
# Labels whose borders have so much in common can be exchanged, as those of a camera that stands.
_SAME_BORDERS = 0.5
# So much of a label has borders, as far as it can be compared.
_MOST_BORDERS = 0.7
# The logarithm of how much stronger edges are along the borders of labels when these are turned.
_STRONGER = 0.25
# Standard deviations of all labels together, above which they are upright.
_UPRIGHT = 6.0
# The next four are standard deviations of one label on other images. Below this one a label fits
# its own image by chance.
_BY_CHANCE = 1.0
# A label fits another image from here on.
_STANDS_OUT = 4.5
# Two labels fit each other's images by so much more than their own, if they were exchanged.
_EXCHANGED = 5.0
# Half of all labels fit their own so well, where single ones that do not are worth a question.
_WELL = 2.5
_TURNS = {"upside down": (-1, 1), "mirrored": (1, -1), "turned by 180 degrees": (-1, -1)}


@dataclass(frozen=True)
class EdgeScores:
    """What a sample of images says about their labels, in standard deviations above chance.

    own: how well all labels fit their own images; NaN where that cannot be told.
    others: how well they fit other images in the order, and their own when turned, by these words.
    strangers: labels that do not fit their own image, but another: label and that image.
    number: of labels that were compared.
    """

    own: float = math.nan
    others: Mapping[str, float] = field(default_factory=dict)
    strangers: Sequence[tuple[str, str]] = ()
    number: int = 0


def edge_scores(pairs: Sequence[ComparedPair]) -> EdgeScores:
    """Compares labels with their images, with others and with their own when they are turned."""
    borders = [_borders(pair.values) for pair in pairs]
    kept = [i for i, border in enumerate(borders) if 0 < border.mean() < _MOST_BORDERS]
    pairs, borders = [pairs[i] for i in kept], [borders[i] for i in kept]
    if len(pairs) < _FEWEST_COMPARED:
        return EdgeScores(number=len(pairs))
    if _are_alike(borders):
        return EdgeScores(math.nan, _turned_alone(pairs, borders), number=len(pairs))
    labels = [pair.few_values for pair in pairs]
    fits = _fits(pairs, borders, labels)
    own, others = _above_chance(fits, np.diagonal(fits)), {}
    # Labels that fit as they are were not turned.
    for words, (down, right) in _TURNS.items() if own < _UPRIGHT else ():
        turned = ([x[::down, ::right] for x in some] for some in (borders, labels))
        of_turned = _fits(pairs, *turned)
        others[words] = _above_chance(of_turned, np.diagonal(of_turned))
    return EdgeScores(own, others | _shifted(pairs, fits), _strangers(pairs, fits), len(pairs))


def _shifted(pairs: Sequence[ComparedPair], fits: np.ndarray) -> dict[str, float]:
    """As `EdgeScores.others`, for images farther on in the order."""
    places = np.array([pair.place for pair in pairs])
    scores = {}
    for shift in (k for k in range(-_FARTHEST, _FARTHEST + 1) if k):
        of_others = fits[places[None] == places[:, None] + shift]
        if 2 * len(of_others) >= len(pairs):
            scores[_shift_words(shift)] = _above_chance(fits, of_others)
    return scores


def _turned_alone(pairs: Sequence[ComparedPair], borders: Sequence[np.ndarray]) -> dict[str, float]:
    """As `EdgeScores.others`, of edges of their own images alone, for labels that are alike."""
    scores = {}
    for words, (down, right) in _TURNS.items():
        edges = [
            [np.log(pair.slope[way > 0].mean() + 1e-3) for way in (border, border[::down, ::right])]
            for pair, border in zip(pairs, borders, strict=True)
        ]
        gains = np.diff(edges, axis=1)
        if np.median(gains) > _STRONGER:
            scores[words] = float(gains.mean() / max(gains.std() / len(gains) ** 0.5, 1e-9))
    return scores


def turned_scores(folder: Path, images: Sequence[Image], labels: LabelSet) -> tuple[float, float]:
    """How strong edges are along borders on unclear images as stored, and as EXIF turns them.

    Medians, where 1 is anywhere; NaN if there are no borders.
    """
    unclear = spread([image for image in images if image.path in labels.unclear], _TURNED_SAMPLE)
    stored, turned = (
        _own_edges(read_pairs(folder, unclear, replace(labels, upright=way)))
        for way in (False, True)
    )
    return stored, turned


def _own_edges(pairs: Sequence[ComparedPair]) -> float:
    borders = [(pair.slope, _borders(pair.values) > 0) for pair in pairs]
    found = [float(slope[border].mean()) for slope, border in borders if border.any()]
    return float(np.median(found)) if found else math.nan


def _borders(label: np.ndarray) -> np.ndarray:
    """(H, W) uint8: 1 beside each change of the value, as outlines are not drawn exactly."""
    border = np.zeros(label.shape, np.uint8)
    border[:-1] |= label[1:] != label[:-1]
    border[:, :-1] |= label[:, 1:] != label[:, :-1]
    return cv2.dilate(border, np.ones((3, 3), np.uint8))


def _are_alike(borders: Sequence[np.ndarray]) -> bool:
    """Whether labels show nearly the same, so that others fit as well."""
    flat = np.stack([border.ravel() for border in borders]).astype(np.float32)  # (N, P)
    both = flat @ flat.T
    sizes = np.diagonal(both)
    share = both / (sizes[:, None] + sizes[None] - both)
    return float(np.median(share[~np.eye(len(share), dtype=bool)])) > _SAME_BORDERS


def _fits(
    pairs: Sequence[ComparedPair], borders: Sequence[np.ndarray], labels: Sequence[np.ndarray]
) -> np.ndarray:
    """How well each label fits each image, (N labels, N images).

    Sums and means are 0 by rows and columns: a label that fits all images says nothing.

    borders: on the grid of the slopes. labels: on that of the colours.
    """
    flat = np.stack([border.ravel() for border in borders]).astype(np.float32)  # (N, P)
    slopes = np.stack([pair.slope.ravel() for pair in pairs])
    along = flat @ slopes.T / flat.sum(axis=1, keepdims=True)
    channels = min(pair.colors.shape[1] for pair in pairs)
    colors = np.stack([pair.colors[:, -channels:] for pair in pairs])  # (N, Q, C)
    divided = np.stack([_explained(label.ravel(), colors) for label in labels])
    # As factors, so that one strong edge does not outweigh all others.
    parts = [_centred(np.log(part + 1e-3)) for part in (along, divided)]
    mask = ~np.eye(len(pairs), dtype=bool)
    return sum(part / max(float(part[mask].std()), 1e-9) for part in parts)


def _explained(label: np.ndarray, colors: np.ndarray) -> np.ndarray:
    """(N,) how much of the variance of the colours (N, Q, C) lies between the values of a label."""
    order = np.argsort(label, kind="stable")
    starts = np.flatnonzero(np.diff(label[order], prepend=label[order[0]] - 1))
    counts = np.diff(starts, append=len(label))
    sums = np.add.reduceat(colors[:, order], starts, axis=1)  # (N, K, C): of each value
    return (sums**2 / counts[:, None]).sum(axis=1).mean(axis=1) / len(label)


def _centred(table: np.ndarray) -> np.ndarray:
    return table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()


def _above_chance(fits: np.ndarray, chosen: np.ndarray) -> float:
    """By how many standard deviations the chosen sum up to more than any would.

    With all of the diagonal it is the deviation under random permutations (Hoeffding, 1951).
    """
    deviation = math.sqrt((fits**2).sum() / (len(fits) * (len(fits) - 1)))
    return float(chosen.sum()) / max(deviation * math.sqrt(chosen.size), 1e-9)


def _shift_words(shift: int) -> str:
    if abs(shift) == 1:
        return "the next image" if shift > 0 else "the previous image"
    return f"the image {abs(shift)} places {'later' if shift > 0 else 'before'}"


def _strangers(pairs: Sequence[ComparedPair], fits: np.ndarray) -> list[tuple[str, str]]:
    """As `EdgeScores.strangers`; few only where labels fit their own images well."""
    fits = fits / fits[~np.eye(len(fits), dtype=bool)].std()
    own, best = np.diagonal(fits), fits.argmax(axis=1)
    # The label that belongs to that image is elsewhere, too: else a chance would be as likely.
    is_moved = (np.maximum(own, own[best]) < _BY_CHANCE) & (fits.max(axis=1) > _STANDS_OUT)
    # Of two labels that were exchanged, each fits the image of the other better than its own.
    gains = fits - own[:, None]
    together = np.where((gains > 0) & (gains.T > 0), gains + gains.T, 0.0)
    exchanged = together.max(axis=1) > _EXCHANGED
    best = np.where(exchanged, together.argmax(axis=1), best)
    found = np.flatnonzero(is_moved | exchanged)
    if np.median(own) < _WELL and 4 * len(found) < len(fits):
        return []
    return [(pairs[i].label, pairs[best[i]].image) for i in found]
