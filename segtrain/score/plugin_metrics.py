"""Scores of plugins (`eval.metrics`), from arrays that are counted image by image."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from segtrain import plugins
from segtrain.config.experiment import Metric
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.task.prediction import Prediction
from segtrain.text import MAX_NAME, first_of, printable


class PluginMetric:
    """A metric that a plugin registers: a class that is made from (class names, options) and has

        counts(label, pred): an array of integers or floats, of one shape for all images
        scores(totals): numbers by name, of the sum of these arrays

    label, pred: (h, w) uint8 train ids; label may be IGNORE_INDEX.
    """

    def __init__(self, chosen: Metric, classes: Sequence[str]) -> None:
        self.name = chosen.name
        self._metric = plugins.choose("metric", chosen.name, {})(tuple(classes), chosen.options)
        self._counts: dict[int, Any] = {}

    def add(self, prediction: Prediction) -> None:
        """Counts one image; a callback of `evaluate_dataset`."""
        counts = np.asarray(self._metric.counts(prediction.label, prediction.pred))
        self._counts[prediction.index] = counts.tolist()

    def scores(self) -> dict[str, float]:
        """The scores of all images, the same on any number of ranks (collective).

        Raises:
            ConfigError: the metric returns no numbers, or not always as many.
        """
        parts = dist.all_gather_object(list(self._counts.items()))
        # In the order of the data set: the sum of floats depends on the order.
        ordered = sorted(pair for part in parts for pair in part)
        counts = [np.asarray(numbers) for _, numbers in ordered]
        shapes = {f"{array.dtype.kind} {array.shape}" for array in counts}
        if len(shapes) != 1 or counts[0].dtype.kind not in "if":
            what = "counts: expected integers or floats, of one shape for all images, found"
            raise ConfigError(f"eval.metrics: {self.name}: {what} {first_of(sorted(shapes), 3)}")
        scores = self._metric.scores(sum(counts))
        try:
            return {str(key): float(x) for key, x in scores.items()}
        except (AttributeError, TypeError, ValueError, OverflowError):
            what = f"scores: expected numbers by name, got {printable(str(scores), MAX_NAME)}"
            raise ConfigError(f"eval.metrics: {self.name}: {what}") from None
