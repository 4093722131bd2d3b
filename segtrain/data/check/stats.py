"""The statistics of a split: classes, sizes, colours, and class weights for the loss."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from segtrain.config import DataConfig
from segtrain.data.check.findings import refuse_errors, split_findings
from segtrain.data.check.scan import SplitScan, scan_split
from segtrain.data.pack.opening import open_dataset
from segtrain.data.read.classes import read_by
from segtrain.data.read.concurrent import num_processes
from segtrain.distributed.machine import process_pool
from segtrain.errors import DataError
from segtrain.text import MAX_NAME, printable

# ENet's weights are 1 / ln(c + frequency); c = 1.02 keeps them within [1, 50] (arXiv:1606.02147).
_ENET_CONSTANT = 1.02


def median_frequency_weights(scan: SplitScan) -> list[float]:
    """Median of the class frequencies / frequency of the class, (K,); 1 for an absent class.

    The frequency of a class: its pixels divided by all valid pixels of the images in which it
    occurs (arXiv:1411.4734).
    """
    present = scan.pixels > 0
    frequency = scan.pixels[present] / scan.pixels_beside[present]
    return _weights(present, np.median(frequency) / frequency)


def enet_weights(pixels: np.ndarray) -> list[float]:
    """1 / ln(1.02 + frequency of the class), (K,) (arXiv:1606.02147)."""
    return _weights(pixels >= 0, 1 / np.log(_ENET_CONSTANT + pixels / pixels.sum()))


def inverse_frequency_weights(pixels: np.ndarray) -> list[float]:
    """All valid pixels / (classes that occur * pixels of the class), (K,); 1 for an absent class.

    A pixel then weighs 1 on average.
    """
    present = pixels > 0
    return _weights(present, pixels.sum() / (present.sum() * pixels[present]))


def default_beta(pixels: np.ndarray) -> float:
    """1 - 1 / N for the mean number N of pixels of the classes that occur."""
    return 1 - 1 / max(1.0, pixels[pixels > 0].mean())


def effective_number_weights(pixels: np.ndarray, beta: float) -> list[float]:
    """(1 - beta) / (1 - beta ** pixels), scaled to a mean of 1, (K,); 1 for an absent class.

    The inverse effective number of samples (arXiv:1901.05555, equation 2 and section 4). The scale
    is over the classes that occur. beta 0 gives all 1; towards 1 it is the inverse frequency.
    """
    present = pixels > 0
    # beta ** pixels is close to 1 or 0: computed as it stands, 1 minus it would lose digits.
    raw = 1 / -np.expm1(pixels[present] * np.log(beta)) if beta > 0 else np.ones(present.sum())
    return _weights(present, raw / raw.mean())


def _weights(present: np.ndarray, weights: np.ndarray) -> list[float]:
    """`weights` of the `present` classes (K,) bool, to 4 digits, and 1 for the others."""
    result = np.ones(len(present))
    result[present] = weights
    return [float(f"{weight:.4g}") for weight in result]


@dataclass(frozen=True)
class SplitStats:
    """What one split holds.

    mean_size: mean height and width of the images.
    rgb_mean, rgb_std: over all pixels of all images, in units of 0..255, as data.mean wants.
    beta: that of the effective numbers.
    class_weights: (K,) by the name of the method.
    """

    class_names: Sequence[str]
    scan: SplitScan
    mean_size: tuple[float, float]
    rgb_mean: tuple[float, ...]
    rgb_std: tuple[float, ...]
    beta: float
    class_weights: dict[str, list[float]]

    def as_text(self) -> str:
        """For a terminal: the images, a table of the classes, and lines to paste into a config."""
        scan = self.scan
        num_valid = int(scan.pixels.sum())
        height, width = self.mean_size
        ignored = scan.ignored_pixels / (num_valid + scan.ignored_pixels)
        columns = [
            class_column(self.class_names),
            ["pixels", *map(str, scan.pixels)],
            ["of valid", *(f"{100 * pixels / num_valid:.3f} %" for pixels in scan.pixels)],
            ["images", *map(str, scan.images)],
            *([name, *(f"{w:g}" for w in weights)] for name, weights in self.class_weights.items()),
        ]
        lines = [
            f"{printable(scan.split)}: {scan.num_pairs} images of {height:.1f}x{width:.1f} on "
            f"average, {num_valid} valid pixels, {ignored:.1%} ignored",
            "",
            *table_lines(columns),
            "",
            "for the data section, if the images are unlike those of the pretraining:",
            f"  mean: {[round(value, 3) for value in self.rgb_mean]}",
            f"  std: {[round(value, 3) for value in self.rgb_std]}",
            "for the loss section, one of them if rare classes matter:",
        ]
        notes = {"effective_number": f", beta 1 - {1 - self.beta:.3g}"}
        for name, weights in self.class_weights.items():
            lines.append(f"  class_weights: {weights}  # {name}{notes.get(name, '')}")
        return "\n".join(lines)

    def as_json(self) -> str:
        """All numbers as one JSON object."""
        content = {
            "split": self.scan.split,
            "images": self.scan.num_pairs,
            "valid_pixels": int(self.scan.pixels.sum()),
            "mean_size": self.mean_size,
            "rgb_mean": self.rgb_mean,
            "rgb_std": self.rgb_std,
            **counts_of(self.scan, self.class_names),
            "effective_number_beta": self.beta,
            "class_weights": self.class_weights,
        }
        return json.dumps(content, indent=2)


def measure(
    data: DataConfig, split: str, *, beta: float | None = None, jobs: int | None = None
) -> SplitStats:
    """Reads all images and labels of `split` once.

    Args:
        beta: of the effective numbers; None: `default_beta`.
        jobs: processes; None: one for each core that this process may use.

    Raises:
        ConfigError: the class file is missing or wrong.
        DataError: a file is missing or cannot be used: what is left would have other statistics.
        ExecutionError: a process was killed.
    """
    dataset = open_dataset(data, split)
    with process_pool(num_processes(len(dataset), jobs)) as pool:
        scan = scan_split(dataset, pool, count_rgb=True)
    found = split_findings(scan, read_by(dataset.classes, data.label_format))
    refuse_errors(one for one in found if one.kind in ("unreadable", "sizes", "values"))
    if not scan.pixels.any():
        raise DataError(f"split {printable(scan.split)!r}: no label has a pixel of any class")
    beta = default_beta(scan.pixels) if beta is None else beta
    weights = {
        "median_frequency": median_frequency_weights(scan),
        "inverse_frequency": inverse_frequency_weights(scan.pixels),
        "effective_number": effective_number_weights(scan.pixels, beta),
        "enet": enet_weights(scan.pixels),
    }
    sizes = np.array(list(scan.sizes.elements())).reshape(-1, 2)
    mean, std = _moments(scan.rgb)
    names = dataset.classes.names
    return SplitStats(names, scan, tuple(sizes.mean(0).tolist()), mean, std, beta, weights)


def counts_of(scan: SplitScan, class_names: Sequence[str]) -> dict[str, Any]:
    """The pixels, sizes and classes of a split, for JSON."""
    counts = zip(class_names, scan.pixels.tolist(), scan.images.tolist(), strict=True)
    return {
        "ignored_pixels": scan.ignored_pixels,
        "sizes": [[*size, count] for size, count in sorted(scan.sizes.items())],
        "classes": {name: {"pixels": n, "images": m} for name, n, m in counts},
    }


def class_column(names: Sequence[str]) -> list[str]:
    """The first column of a table of classes."""
    return ["class", *(printable(name, MAX_NAME) for name in names)]


def table_lines(columns: Sequence[Sequence[str]]) -> list[str]:
    """A table from its columns, each with its title: the first to the left, others to the right."""
    first, *widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join([name.ljust(first), *map(str.rjust, cells, widths)])
        for name, *cells in zip(*columns, strict=True)
    ]


def _moments(counts: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, from the pixels of each value (3, 256)."""
    values, means, stds = np.arange(256), [], []
    for channel in counts:
        # Python's integers: exact, so the number of processes does not show.
        n, first, second = (int(channel @ values**power) for power in (0, 1, 2))
        means.append(first / n)
        stds.append(((n * second - first**2) ** 0.5) / n)
    return tuple(means), tuple(stds)
