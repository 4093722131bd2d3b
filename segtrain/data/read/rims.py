"""Pixels on rims of labels, as resizing with interpolation or saving as JPEG makes them."""

import cv2
import numpy as np

# Bilinear interpolation blends values over two pixels where it doubles the size.
_WINDOW = np.ones((5, 5), np.uint8)
# Of the pixels of a value: so many lie between others where no class of its own is shown; and of
# all pixels, so few are on rims.
_BLENDED, _RIMS = 0.9, 0.1


def is_blend(blended: int, pixels: int, total: int) -> bool:
    """Whether a value with so many `pixels`, of which so many are `blended_pixels`, is no class.

    total: the pixels of all values.
    """
    return 0 < pixels <= _RIMS * total and blended >= _BLENDED * pixels


def blended_pixels(label: np.ndarray) -> np.ndarray:
    """Where a label has a value between those around it, (H, W) bool.

    Two pixels from a mean of two values, or nearer, lie both of these. A class whose areas are
    thicker has few such pixels; one of thin lines has many if it lies between a lower and a higher
    value.

    label: ids (H, W), up to 2^24; or colours (H, W, 3) uint8, of which one channel at least must
        lie between and none outside.
    """
    least, most = label.min(), label.max()
    if not ((label > least) & (label < most)).any():  # a mask of two values
        return np.zeros(label.shape[:2], bool)
    # OpenCV takes these two types, and the smaller one is three times as fast.
    channels = label.astype(np.uint8 if most <= 255 else np.float32, copy=False)
    low, high = cv2.erode(channels, _WINDOW), cv2.dilate(channels, _WINDOW)
    inside = (low < channels) & (channels < high)
    if label.ndim == 2:
        return inside
    flat = low == high
    return inside.any(axis=2) & (inside | flat).all(axis=2)
