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
