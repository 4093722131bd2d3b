"""Changes of brightness, contrast, saturation and hue, in as few passes over a crop as they need.

Brightness and contrast change each value by itself: together they are one table of 256 values.
Saturation is one 3x3 matrix. Hue is an addition between two conversions.
"""

from typing import NamedTuple

import cv2
import numpy as np

from segtrain.config import AugmentConfig

# ITU-R BT.601, as cv2.COLOR_RGB2GRAY and torchvision.
_LUMA = np.array([0.299, 0.587, 0.114])
_HUE_CIRCLE = 180  # of cv2.COLOR_RGB2HSV for bytes, also in mmsegmentation


class ColorChange(NamedTuple):
    """What changes, in this order; the defaults change nothing.

    brightness: added to all values, which are 0..255. contrast: the factor of all values.
    saturation: 0 is grey, 1 the image, and between and beyond them what lies on their line.
    hue: a rotation of the colour circle, as a share of it.
    """

    brightness: float = 0.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0


def draw_color_change(augment: AugmentConfig, rng: np.random.Generator) -> ColorChange:
    """A random change: each of the four is left out with probability 1 - `augment.color_prob`."""

    def drawn(largest: float) -> float:
        return rng.uniform(-largest, largest) if rng.random() < augment.color_prob else 0.0

    return ColorChange(
        brightness=255 * drawn(augment.brightness),
        contrast=1 + drawn(augment.contrast),
        saturation=1 + drawn(augment.saturation),
        hue=drawn(augment.hue),
    )


def change_colors(image: np.ndarray, change: ColorChange) -> np.ndarray:
    """The changed image, (H, W, 3) uint8 RGB; `image` itself is not changed.

    Values beyond 0..255 are clipped after each change, and rounded to the nearest whole number
    after contrast, saturation and hue. The hue turns by whole 180ths of the circle.
    """
    if (change.brightness, change.contrast) != (0, 1):
        image = cv2.LUT(image, value_table(change.brightness, change.contrast))
    if change.saturation != 1:
        # Of 8-bit images cv2.transform is fixed-point arithmetic with 10 bits.
        image = cv2.transform(image, saturation_matrix(change.saturation))
    turn = round(change.hue * _HUE_CIRCLE) % _HUE_CIRCLE
    if turn:
        image = _turn_hue(image, turn)
    return image


def value_table(brightness: float, contrast: float) -> np.ndarray:
    """What becomes of each value, (256,) uint8."""
    brighter = np.clip(np.arange(256) + brightness, 0, 255)
    return np.rint(np.clip(brighter * contrast, 0, 255)).astype(np.uint8)


def saturation_matrix(factor: float) -> np.ndarray:
    """(3, 3) float64: `factor` of the image and the rest of its grey, which stays as it is."""
    return factor * np.eye(3) + (1 - factor) * _LUMA


def _turn_hue(image: np.ndarray, turn: int) -> np.ndarray:
    """The image with `turn` added to its hue, in 180ths of the circle."""
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    turned, same = (np.arange(256) + turn) % _HUE_CIRCLE, np.arange(256)
    table = np.stack([turned, same, same], axis=1).astype(np.uint8)  # (256, 3)
    cv2.LUT(hsv, table[None], dst=hsv)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=hsv)
