"""The statistics of a split: classes, sizes, colours, and class weights for the loss."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from segtrain.config import DataConfig
from segtrain.data.check.findings import refuse_errors, split_findings
from segtrain.data.check.scan import SplitScan, scan_split
from segtrain.data.check.values import suggested_range
from segtrain.data.read.concurrent import num_processes
from segtrain.data.read.image import ImageForm, ValueRange
from segtrain.data.read.label_formats import LabelFormat
from segtrain.data.read.opening import open_dataset
from segtrain.distributed.machine import process_pool
from segtrain.errors import DataError
from segtrain.text import printable, table_lines

# ENet's weights are 1 / ln(c + frequency); c = 1.02 keeps them within [1, 50] (arXiv:1606.02147).
_ENET_CONSTANT = 1.02
# Of the values of all channels.
_PERCENTILES = (0.1, 1, 50, 99, 99.9)


def class_weights(scan: SplitScan, beta: float) -> dict[str, list[float]]:
    """Weights (K,) by the name of their method, to 4 digits; an absent class has 1, but for ENet's.

    median_frequency: median of the class frequencies / frequency of the class, which is its pixels
        divided by all valid pixels of the images in which it occurs (arXiv:1411.4734).
    inverse_frequency: all valid pixels / (classes that occur * pixels of the class). A pixel then
        weighs 1 on average.
    effective_number: (1 - beta) / (1 - beta ** pixels), the inverse effective number of samples
        (arXiv:1901.05555, equation 2 and section 4), scaled to a mean of 1. beta 0 gives all 1;
        towards 1 it is the inverse frequency.
    enet: 1 / ln(1.02 + frequency of the class) (arXiv:1606.02147).
    """
    present = scan.pixels > 0
    pixels, total = scan.pixels[present], scan.pixels.sum()
    frequency = pixels / scan.pixels_beside[present]
    # beta ** pixels is close to 1 or 0: computed as it stands, 1 minus it would lose digits.
    effective = 1 / -np.expm1(pixels * np.log(beta)) if beta > 0 else np.ones(len(pixels))

    def padded(values: np.ndarray) -> np.ndarray:
        whole = np.ones(len(present))
        whole[present] = values
        return whole

    weights = {
        "median_frequency": padded(np.median(frequency) / frequency),
        "inverse_frequency": padded(total / (len(pixels) * pixels)),
        "effective_number": padded(effective / effective.mean()),
        "enet": 1 / np.log(_ENET_CONSTANT + scan.pixels / total),
    }
    return {name: [float(f"{w:.4g}") for w in values] for name, values in weights.items()}


def positive_weights(scan: SplitScan) -> list[float]:
    """`loss.positive_weights` of classes that overlap: pixels without the class / with it.

    To 4 digits; 1 for a class that does not occur.
    """
    # A class that is everywhere gets one pixel without it: the config refuses a weight of 0.
    pairs = zip(scan.absent.tolist(), scan.pixels.tolist(), strict=True)
    return [float(f"{max(absent, 1) / there:.4g}") if there else 1.0 for absent, there in pairs]


@dataclass(frozen=True)
class SplitStats:
    """What one split holds.

    beta: that of the effective numbers. labels: what they hold.
    """

    class_names: Sequence[str]
    scan: SplitScan
    form: ImageForm
    beta: float
    labels: LabelFormat

    @cached_property
    def percentiles(self) -> list[float]:
        """Of the values of all channels, at _PERCENTILES, estimated from a sample."""
        sample = np.concatenate(self.scan.sample)
        return np.nanpercentile(sample, _PERCENTILES).tolist()

    @cached_property
    def seen(self) -> tuple[float, float]:
        """The least and the largest value of all images."""
        lows, highs = zip(
            *(s for image in self.scan.values_of_images for s in image.spans), strict=True
        )
        return min(lows), max(highs)

    @cached_property
    def value_range(self) -> tuple[float, float]:
        """`data.value_range`; where that is null, the range that would fit."""
        if self.form.value_range is not None:
            return self.form.value_range
        return suggested_range(self.form, self.percentiles, self.seen[1])

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """All of them by name; mean and std in units of 0..255, as data.mean wants."""
        sizes = np.array(list(self.scan.sizes.elements())).reshape(-1, 2)
        mean, std = _mean_and_std(self.scan.moments, self.value_range)
        return {
            "split": self.scan.split,
            "images": self.scan.num_pairs,
            "valid_pixels": int(self.scan.valid.max()),
            "mean_size": sizes.mean(0).tolist(),
            "dtype": self.form.dtype.name,
            "values": self.seen,
            "percentiles": dict(zip(map(str, _PERCENTILES), self.percentiles, strict=True)),
            "value_range": self.value_range,
            "mean": mean,
            "std": std,
            **self.scan.counts(self.class_names),
            **self._weights,
        }

    @property
    def _weights(self) -> dict[str, Any]:
        if not self.labels.has_classes:
            return {}
        if self.labels.overlapping:
            return {"positive_weights": positive_weights(self.scan)}
        weights = class_weights(self.scan, self.beta)
        return {"effective_number_beta": self.beta, "class_weights": weights}

    def as_text(self) -> str:
        """For a terminal: the images, a table of the classes, and lines to paste into a config."""
        scan, numbers = self.scan, self.numbers
        num_valid, weights = numbers["valid_pixels"], numbers.get("class_weights", {})
        shares = 100 * scan.pixels / np.maximum(scan.valid, 1)
        height, width = numbers["mean_size"]
        # `measure` has refused a split without valid pixels.
        ignored = scan.ignored_pixels / (num_valid + scan.ignored_pixels)
        columns = [
            ["class", *self.class_names],
            ["pixels", *map(str, scan.pixels)],
            ["of valid", *(f"{share:.3f} %" for share in shares)],
            ["images", *map(str, scan.images)],
            *([name, *(f"{w:g}" for w in values)] for name, values in weights.items()),
        ]
        (low, high), (black, white) = self.seen, self.value_range
        parts = zip(_PERCENTILES, self.percentiles, strict=True)
        sampled = ", ".join(f"{part:g} % up to {value:g}" for part, value in parts)
        # mean and std below are for this range.
        is_default = self.form.dtype.kind == "u" and self.value_range == self.form.limits
        notes = {"effective_number": f", beta 1 - {1 - self.beta:.3g}"}
        lines = [
            f"{printable(scan.split)}: {scan.num_pairs} images of {height:.1f}x{width:.1f} on "
            f"average, {num_valid} valid pixels, {ignored:.1%} ignored",
            "",
            *table_lines(columns),
            "",
            f"values: {self.form.dtype} from {low:g} to {high:g}; by a sample {sampled}",
            "for the data section, if the images are unlike those of the pretraining:",
            *([] if is_default else [f"  value_range: [{black:g}, {white:g}]"]),
            f"  mean: {[round(value, 3) for value in numbers['mean']]}",
            f"  std: {[round(value, 3) for value in numbers['std']]}",
            "for the loss section, one of them if rare classes matter:",
            *(f"  {key}: {numbers[key]}" for key in ("positive_weights",) if key in numbers),
            *(
                f"  class_weights: {w}  # {name}{notes.get(name, '')}"
                for name, w in weights.items()
            ),
        ]
        return "\n".join(lines)

    def as_json(self) -> str:
        """All numbers as one JSON object."""
        return json.dumps(self.numbers, indent=2)


def measure(
    data: DataConfig, split: str, *, beta: float | None = None, jobs: int | None = None
) -> SplitStats:
    """Reads all images and labels of `split` once.

    Args:
        beta: of the effective numbers; None: 1 - 1 / the mean pixels of the classes that occur.
        jobs: processes; None: one for each core that this process may use.

    Raises:
        ConfigError: the class file is missing or wrong.
        DataError: a file is missing or cannot be used: what is left would have other statistics.
        ExecutionError: a process was killed.
    """
    dataset = open_dataset(data, split)
    with process_pool(num_processes(len(dataset), jobs)) as pool:
        scan = scan_split(dataset, pool, measure=True)
    findings = split_findings(scan, dataset.labels.meant(dataset.classes))
    # Only what leaves pixels out of the statistics. `data check` is for other findings.
    refuse_errors(
        finding for finding in findings if finding.kind in ("unreadable", "sizes", "values")
    )
    if not scan.pixels.any():
        raise DataError(f"split {printable(scan.split)!r}: no label has a pixel of any class")
    if beta is None:
        beta = 1 - 1 / scan.pixels[scan.pixels > 0].mean()
    return SplitStats(dataset.classes.names, scan, dataset.form, beta, dataset.labels)


def _mean_and_std(
    moments: np.ndarray, value_range: ValueRange
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, in units of 0..255."""
    low, high = value_range
    unit = 255 / (high - low)
    means, stds = [], []
    # Python's integers: exact, so the number of processes does not show.
    for n, first, second in moments.T.tolist():
        n = n or 1  # a channel without any value
        means.append((first / n - low) * unit)
        stds.append(max(n * second - first**2, 0) ** 0.5 / n * unit)
    return tuple(means), tuple(stds)
