"""From scores to predictions, for each task: a pixel has one class, or each class by itself."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from segtrain.evaluation.counts import Counts, PresenceCounts
from segtrain.evaluation.decision_rule import DecisionRule

Tile = tuple[slice, Tensor]
"""Some rows of an image, and their scores (K, rows, w)."""

Wanted = Literal["none", "highest", "all"]
"""Which probabilities a caller needs; more may come."""

# Rows at a time, which stay in a processor's cache: a third of the time.
_CACHED_ROWS = 32


class LabelMap(NamedTuple):
    """A prediction, on the device of its image.

    label: (h, w) uint8, the most probable class of every pixel, or what a rule says; where classes
        overlap (h, w, K) uint8, 1 where a class is.
    is_finite: () bool, whether the highest scores are finite numbers; else `label` means nothing.
    probability: (h, w) float, that of `label`; or (K, h, w), of every class, as always where they
        overlap; None if neither was asked for.
    """

    label: Tensor
    is_finite: Tensor
    probability: Tensor | None = None


class Decoding(Protocol):
    """What a task makes of scores, tile by tile.

    takes_highest: whether the highest score of a pixel is all that it looks at.
    counts: what counts the predictions of a data set.
    """

    takes_highest: bool
    counts: type[Counts]

    def bands(self, num_classes: int) -> tuple[int, ...]:
        """The shape of a label, but for height and width."""
        ...

    def probabilities(self, logits: Tensor, dim: int = 1) -> Tensor:
        """Those of the classes along `dim`."""
        ...

    def label_map(
        self, tiles: Iterator[Tile], wanted: Wanted, rule: DecisionRule | None, *, is_logits: bool
    ) -> LabelMap:
        """The prediction of an image by its scores, (K, rows, w) each, from the top down."""
        ...

    def describe(self) -> str:
        """A few words for people; empty: there is nothing to say."""
        ...


class OneClass:
    """A pixel has the class of the highest score, or what a rule says (task semantic)."""

    takes_highest, counts = True, Counts

    def bands(self, num_classes: int) -> tuple[int, ...]:
        """None."""
        return ()

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
            finite.append(highest.values.isfinite().all())
            if wanted == "highest":
                known.append(of_highest(tile, highest.values) if is_logits else highest.values)
            elif wanted == "all":
                known.append(tile.softmax(0) if is_logits else tile.clone())
        probability = torch.cat(known, dim=-2) if known else None
        return LabelMap(torch.cat(labels), torch.stack(finite).all(), probability)

    def describe(self) -> str:
        """Nothing: it is what everybody does."""
        return ""


class EachClass:
    """A pixel has every class whose probability reaches its threshold (task multilabel).

    thresholds: one for all classes, or one a class.
    """

    takes_highest, counts = False, PresenceCounts

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


def of_highest(logits: Tensor, highest: Tensor) -> Tensor:
    """The softmax of the highest logit of every pixel, (h, w), of `logits`, (K, h, w)."""
    rows = _CACHED_ROWS if logits.device.type == "cpu" else len(highest)
    parts = zip(logits.split(rows, 1), highest.split(rows), strict=True)
    return torch.cat([(part - most).exp_().sum(0).reciprocal_() for part, most in parts])
