"""The statistics of a split: classes, sizes, colours, and class weights for the loss."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from segtrain.config import DataConfig
from segtrain.data.check.scan import SplitScan, scan_split
from segtrain.data.pack.opening import open_dataset
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
    weights = np.ones(len(scan.pixels))
    weights[present] = np.median(frequency) / frequency
    return [float(f"{weight:.4g}") for weight in weights]


def enet_weights(pixels: np.ndarray) -> list[float]:
    """1 / ln(1.02 + frequency of the class), (K,) (arXiv:1606.02147)."""
    weights = 1 / np.log(_ENET_CONSTANT + pixels / pixels.sum())
    return [float(f"{weight:.4g}") for weight in weights]


def inverse_frequency_weights(pixels: np.ndarray) -> list[float]:
    """All valid pixels / (classes that occur * pixels of the class), (K,); 1 for an absent class.

    A pixel then weighs 1 on average.
    """
    present = pixels > 0
    weights = np.ones(len(pixels))
    weights[present] = pixels.sum() / (present.sum() * pixels[present])
    return [float(f"{weight:.4g}") for weight in weights]


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
    weights = np.ones(len(pixels))
    weights[present] = raw / raw.mean()
    return [float(f"{weight:.4g}") for weight in weights]


@dataclass(frozen=True)
class SplitStats:
    """What one split holds.

    mean_size: mean height and width of the images.
    rgb_mean, rgb_std: over all pixels of all images, in units of 0..255, as data.mean wants.
    beta: that of the effective numbers.
    class_weights: (K,) by the name of the method.
    """

    class_names: list[str]
    scan: SplitScan
    mean_size: tuple[float, float]
    rgb_mean: tuple[float, float, float]
    rgb_std: tuple[float, float, float]
    beta: float
    class_weights: dict[str, list[float]]


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
    _refuse_unusable(scan)
    beta = default_beta(scan.pixels) if beta is None else beta
    weights = {
        "median_frequency": median_frequency_weights(scan),
        "inverse_frequency": inverse_frequency_weights(scan.pixels),
        "effective_number": effective_number_weights(scan.pixels, beta),
        "enet": enet_weights(scan.pixels),
    }
    sizes = np.array(list(scan.sizes.elements())).reshape(-1, 2)
    mean, std = _moments(scan.rgb)
    names = list(dataset.classes.names)
    return SplitStats(names, scan, tuple(sizes.mean(0).tolist()), mean, std, beta, weights)


def stats_as_text(stats: SplitStats) -> str:
    """For a terminal: the images, a table of the classes, and lines to paste into a config."""
    scan = stats.scan
    num_valid = int(scan.pixels.sum())
    height, width = stats.mean_size
    ignored = scan.ignored_pixels / (num_valid + scan.ignored_pixels)
    lines = [
        f"{printable(scan.split)}: {scan.num_pairs} images of {height:.1f}x{width:.1f} on average, "
        f"{num_valid} valid pixels, {ignored:.1%} ignored",
        "",
        *_table(stats),
        "",
        "for the data section, if the images are unlike those of the pretraining:",
        f"  mean: {_rounded(stats.rgb_mean)}",
        f"  std: {_rounded(stats.rgb_std)}",
        "for the loss section, one of them if rare classes matter:",
    ]
    notes = {"effective_number": f", beta 1 - {1 - stats.beta:.3g}"}
    for name, weights in stats.class_weights.items():
        lines.append(f"  class_weights: {weights}  # {name}{notes.get(name, '')}")
    return "\n".join(lines)


def stats_as_json(stats: SplitStats) -> str:
    """All numbers as one JSON object."""
    scan = stats.scan
    counts = zip(stats.class_names, scan.pixels.tolist(), scan.images.tolist(), strict=True)
    content = {
        "split": scan.split,
        "images": scan.num_pairs,
        "valid_pixels": int(scan.pixels.sum()),
        "ignored_pixels": scan.ignored_pixels,
        "mean_size": stats.mean_size,
        "sizes": [[*size, count] for size, count in sorted(scan.sizes.items())],
        "rgb_mean": stats.rgb_mean,
        "rgb_std": stats.rgb_std,
        "classes": {name: {"pixels": n, "images": m} for name, n, m in counts},
        "effective_number_beta": stats.beta,
        "class_weights": stats.class_weights,
    }
    return json.dumps(content, indent=2)


def _refuse_unusable(scan: SplitScan) -> None:
    problems = [f"{file.place}: {file.reason}" for file in scan.bad_files]
    problems += scan.size_problems
    problems += [
        f"label of {printable(names[0])}: {value} is no id or colour of the class file"
        for value, names in scan.unknown_labels.items()
    ]
    if not problems and not scan.pixels.any():
        problems = [f"split {printable(scan.split)!r}: no label has a pixel of any class"]
    if problems:
        more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
        raise DataError(f"{problems[0]}{more}; 'segtrain data check' lists all that is wrong")


def _moments(counts: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, from the pixels of each value (3, 256)."""
    values, means, stds = np.arange(256), [], []
    for channel in counts:
        # Python's integers: exact, so the number of processes does not show.
        n, first, second = (int(channel @ values**power) for power in (0, 1, 2))
        means.append(first / n)
        stds.append(((n * second - first**2) ** 0.5) / n)
    return tuple(means), tuple(stds)


def _table(stats: SplitStats) -> list[str]:
    scan = stats.scan
    num_valid = int(scan.pixels.sum())
    columns: dict[str, Sequence[str]] = {
        "class": [printable(name, MAX_NAME) for name in stats.class_names],
        "pixels": [str(pixels) for pixels in scan.pixels],
        "of valid": [f"{100 * pixels / num_valid:.3f} %" for pixels in scan.pixels],
        "images": [str(images) for images in scan.images],
    }
    columns |= {name: [f"{w:g}" for w in ws] for name, ws in stats.class_weights.items()}
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([name.ljust(first), *map(str.rjust, cells, widths)]) for name, *cells in rows]


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in values]
