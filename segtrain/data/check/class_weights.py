"""Class weights for the loss, from how often the classes occur."""

import numpy as np

from segtrain.data.check.scan import SplitScan

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
