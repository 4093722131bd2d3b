"""Predictions: one on its device, and one on the host beside its image and label."""

from typing import NamedTuple

import numpy as np
from torch import Tensor


class LabelMap(NamedTuple):
    """A prediction, on the device of its image.

    label: (h, w) uint8, the most probable class of every pixel, or what a rule says; where classes
        overlap (h, w, K) uint8, 1 where a class is; or what the task of a plugin predicts.
    is_finite: () bool, whether the highest scores are finite numbers; else `label` means nothing.
    probability: (h, w) float, that of `label`; or (K, h, w), of every class, as always where they
        overlap; None if neither was asked for.
    """

    label: Tensor
    is_finite: Tensor
    probability: Tensor | None = None


class Prediction(NamedTuple):
    """One evaluated image, on the host.

    index: in the data set.
    image: (H, W, C) as stored. label, pred: (h, w) uint8 train ids; label may be IGNORE_INDEX.
        Where classes overlap (h, w, K), 1 where a class is and 0 where not; or as the task of a
        plugin has them.
    """

    index: int
    image: np.ndarray
    label: np.ndarray
    pred: np.ndarray
