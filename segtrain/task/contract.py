"""What a task has to say, and the tuples in which it says it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from segtrain.config import EvalConfig
from segtrain.data.read.classes import ClassFile
from segtrain.errors import ConfigError
from segtrain.metrics import ConfusionMatrix, or_none
from segtrain.one_vs_rest import BinaryCounts, CurveCounts
from segtrain.run.pictures import LABELS, Rgb
from segtrain.task.decision_rule import DecisionRule
from segtrain.task.prediction import LabelMap
from segtrain.task.score_table import InstanceCounts
from segtrain.task.targets import Targets
from segtrain.text import MAX_NAME, first_of, printable

Tile = tuple[slice, Tensor]
"""Some rows of an image, and their scores (K, rows, w)."""

Wanted = Literal["none", "highest", "all"]
"""Which probabilities a caller needs; more may come."""


class Decoding(ABC):
    """What a task makes of scores, tile by tile.

    takes_highest: whether the highest score of a pixel is all that it looks at.
    dtype: of a label.
    """

    takes_highest = False
    dtype = np.dtype(np.uint8)

    def bands(self, num_classes: int) -> tuple[int, ...]:
        """The shape of a label, but for height and width."""
        return ()

    def probabilities(self, logits: Tensor, dim: int = 1) -> Tensor:
        """Those of the classes along `dim`; or what else is averaged over views and windows."""
        return logits

    @abstractmethod
    def label_map(
        self, tiles: Iterator[Tile], wanted: Wanted, rule: DecisionRule | None, *, is_logits: bool
    ) -> LabelMap:
        """The prediction of an image by its scores, (K, rows, w) each, from the top down.

        is_logits: the scores are the network's; else means of `probabilities`.
        """

    def describe(self) -> str:
        """A few words for people; empty: there is nothing to say."""
        return ""


class Report(NamedTuple):
    """What an evaluation says of scores that have no classes. scores: by their names."""

    words: str
    scores: Mapping[str, float]

    def lines(self) -> list[str]:
        """For people."""
        return [self.words]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, where NaN is None."""
        return {name: or_none(score) for name, score in self.scores.items()}


class ClassCountsByImage(NamedTuple):
    """What a record keeps, see `segtrain.score.records.Records`."""

    images: Tensor
    matrix: Tensor
    calibration: Tensor


class Best(NamedTuple):
    """The score that chooses best.pt: higher is better, and NaN is none. lines: warnings."""

    name: str
    score: float
    lines: Sequence[str] = ()


class Outcome(ABC):
    """What an evaluation has counted, the same on every rank.

    num_by_windows: images for which there was no memory as a whole.
    curves: of each class; None: nobody asked, or there are none.
    """

    num_by_windows: int
    curves: CurveCounts | None = None

    @abstractmethod
    def scalars(self, names: Sequence[str]) -> dict[str, float]:
        """The scores by their tags in TensorBoard and metrics.jsonl.

        A task of a plugin has tags `metric/TASK/SCORE`; `eval.best` names one of its `best_scores`.
        """

    @abstractmethod
    def words(self) -> str:
        """The main score, for the line of an evaluation."""

    def report(
        self,
        names: Sequence[str],
        classes: ClassFile,
        *,
        layout: str,
        instances: InstanceCounts | None,
    ) -> Any:
        """What has `lines` and `to_dict`, as `Report`.

        names: of the model's classes. classes: of the data. layout: `data.layout`.
        """
        scores = self.scalars(names).items()
        # Tags are `metric/TASK/SCORE`; a report shows the last part.
        return Report(self.words(), {tag.rpartition("/")[2]: score for tag, score in scores})

    def fitted(self, given: tuple[float, ...] | None) -> tuple["Outcome", tuple[float, ...] | None]:
        """The same at the best thresholds, and these; or itself and None, as if some are given."""
        return self, None

    def best(self, by: EvalConfig, names: Sequence[str], split: str) -> Best:
        """The score that chooses best.pt, if `by` names no metric, as for those of plugins."""
        raise NotImplementedError

    def warnings(self, names: Sequence[str], split: str) -> list[str]:
        """Of what the labels of `split` show too little."""
        return []

    def chart(self, names: Sequence[str]) -> np.ndarray | None:
        """A picture (h, w, 3) of what is taken for what; None: there is none."""
        return None

    def table(self) -> dict[str, Any]:
        """All counts, for JSON."""
        return {}

    def by_image(self) -> ClassCountsByImage | None:
        """What is kept of each image; None: nothing."""
        return None


class ImageCounts(ABC):
    """What a rank counts of each image that it evaluates.

    curves: get the probabilities of all classes; None: they are not computed.
    num_infinite: () int64, the images whose scores are not finite.
    """

    curves: CurveCounts | None = None
    num_infinite: Tensor

    @abstractmethod
    def add(self, index: int, found: LabelMap, label: Tensor) -> None:
        """Counts image `index`; nothing waits for the device."""

    @abstractmethod
    def sum_over_ranks(self, num_by_windows: int) -> Outcome:
        """Those of all ranks (collective)."""


class Task(Targets):
    """What a network tells of a pixel, and what follows from it, from a label to a file.

    has_classes: whether its scores are those of classes, image by image: then it has `matrix`,
        `option_of` and `Outcome.by_image`, too.
    best_scores: the scores of which the highest is the best; `eval.best` names one: NAME/SCORE.
        An error is none of them: its worst checkpoint would be kept.
    refuses_rules: why no `DecisionRule` goes with it, and what does; empty: one may.
    """

    has_classes = False
    best_scores: tuple[str, ...] = ()
    refuses_rules = ""

    def check_best(self, by: EvalConfig) -> None:
        """ConfigError: `eval.best` names no score of which the highest is the best."""
        name, _, score = str(by.best).partition("/")
        if self.has_classes or name != self.name or score in self.best_scores:
            return
        known = first_of(f"{self.name}/{known}" for known in self.best_scores)
        add = f"the task names none: best_scores = ({score!r},) in its class"
        what = f"expected one of {known}" if known else add
        text = printable(str(by.best), MAX_NAME)
        raise ConfigError(f"eval.best: {text}: the highest must be the best; {what}")

    def check_classes(self, what: str) -> None:
        """ConfigError: `what` is about classes, and there are none."""
        if not self.has_classes:
            raise ConfigError(f"{what}: needs scores of classes, and task {self.name} has none")

    def mean(self, members: Iterable[Tensor]) -> Tensor:
        """Logits (N, K, H, W) of the mean of several models, one after another; here their mean.

        One sum and one member are in memory, whatever their number.
        """
        total, number = None, 0
        for logits in members:
            total = logits if total is None else total + logits
            number += 1
        return total / number

    def thresholds(self, given: tuple[float, ...] | None) -> tuple[float, ...] | None:
        """Those of the classes, of `given` in the config; None: it has none, as of a plugin."""
        return None

    def option_of(self, name: str, threshold: float) -> str:
        """What predicts a class from this probability on, for people."""
        raise NotImplementedError

    @abstractmethod
    def decoding(self, thresholds: tuple[float, ...] | None) -> Decoding:
        """What becomes of scores. thresholds: those of the classes, one for all or one each."""

    @abstractmethod
    def counts(
        self, num_images: int, num_classes: int, device: torch.device, curves: CurveCounts | None
    ) -> ImageCounts:
        """What counts the predictions of a data set; curves: as of `evaluate_dataset`."""

    def matrix(self, num_classes: int, device: torch.device) -> ConfusionMatrix | BinaryCounts:
        """What counts right and wrong pixels of classes."""
        raise NotImplementedError

    def agreement(self, found: Tensor, logits: Tensor) -> Tensor:
        """The part of the decisions by `found`, (N, K, H, W), that those by `logits` share, ()."""
        return torch.isclose(found, logits, rtol=1e-3, atol=1e-3).float().mean()

    @abstractmethod
    def stored(self, classes: ClassFile, label: np.ndarray) -> np.ndarray:
        """What label files hold of a prediction, (H, W) or (H, W, bands).

        PNG files have ids of one band; TIFFs all else, band by band.
        """

    def pictures(self, classes: ClassFile, label: np.ndarray) -> Mapping[str, np.ndarray]:
        """What is written of a prediction as PNG, beside colours and overlay, by its folder.

        Without a label map there (LABELS) `stored` is written as TIFF.
        """
        return {}

    def folders(self, classes: ClassFile) -> list[str]:
        """Those of `pictures` and of other label maps."""
        return [LABELS]

    def no_data(self, classes: ClassFile) -> float:
        """What `stored` has where nothing is known: an id, or of floats NaN."""
        is_float = self.decoding(None).dtype.kind == "f"
        return math.nan if is_float else classes.write_ignored

    @abstractmethod
    def shown(self, label: np.ndarray) -> np.ndarray:
        """The label as pictures show it, uint8: (H, W) of numbers of `key` and IGNORE_INDEX.

        Or (H, W, K), where each of `key` is a layer of 0 and 1.
        """

    @abstractmethod
    def key(self, classes: ClassFile) -> tuple[Sequence[str], Sequence[Rgb]]:
        """What pictures show, and in which colours (red, green, blue)."""

    def ids(self, classes: ClassFile) -> Sequence[int] | None:
        """The number of each class in label maps; None: they have no numbers."""
        return None
