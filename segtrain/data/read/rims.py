"""Pixels on rims of labels, as resizing with interpolation or saving as JPEG makes them."""

import cv2
import numpy as np

# Bilinear interpolation blends values over two pixels where it doubles the size.
_SIDE = 5
# Of the pixels of a value: so many lie between others where no class of its own is shown; and of
# all pixels, so few are on rims.
_BLENDED, _RIMS = 0.9, 0.1
# Pixels in lines of one pixel between a lower and a higher value: of the places where such values
# touch, of all pixels between them, and of all pixels. Drawn areas that were resized by 0.25 to
# 4 with bilinear interpolation had 0.24, 0.3 and 4e-4 or more. Of the first, those resized by
# nearest neighbour had 0.065 or less, and the classes of CamVid have 0.04.
_LINED, _THIN, _LEAST, _FEW = 0.15, 0.25, 2e-4, 64


def is_blend(blended: int, pixels: int, total: int) -> bool:
    """Whether a value with so many `pixels`, of which so many are `blended_pixels`, is no class.

    total: the pixels of all values.
    """
    return 0 < pixels <= _RIMS * total and blended >= _BLENDED * pixels


def is_lining(thin: int, blended: int, contacts: int, total: int) -> bool:
    """Whether a class lies in thin lines where a lower and a higher value would touch.

    thin: `blended_pixels` of the class with a `side` of 3. blended: with the usual one. contacts:
    as of `contacts_across`. total: the pixels of all values.
    """
    return thin >= max(_LINED * contacts, _THIN * blended, _LEAST * total, _FEW)


def contacts_across(label: np.ndarray) -> np.ndarray:
    """How many neighbours, one pixel lower and one higher than a value, touch: (largest id + 1,).

    label: ids (H, W).

    >>> contacts_across(np.array([[0, 1, 3, 3, 0]]))
    array([0, 1, 2, 0])
    """
    # A contact counts for each id between its two: +1 above the lower one, -1 at the higher one,
    # then a running sum.
    steps = np.zeros(int(label.max()) + 2, np.int64)
    for here, other in ((label[:, 1:], label[:, :-1]), (label[1:], label[:-1])):
        differs = here != other
        ends = np.sort([here[differs].astype(np.int64), other[differs]], axis=0)
        for place, sign in ((ends[0] + 1, 1), (ends[1], -1)):
            steps += sign * np.bincount(place, minlength=len(steps))
    return steps.cumsum()[:-1]


def blended_pixels(label: np.ndarray, side: int = _SIDE) -> np.ndarray:
    """Where a label has a value between those around it, (H, W) bool.

    Two pixels from a mean of two values, or nearer, lie both of these. A class whose areas are
    thicker has few such pixels; one of thin lines has many if it lies between a lower and a higher
    value.

    label: ids (H, W), up to 2^24; or colours (H, W, 3) uint8, of which one channel at least must
        lie between and none outside. side: of the square around a pixel, in pixels.
    """
    least, most = label.min(), label.max()
    if not ((label > least) & (label < most)).any():  # a mask of two values
        return np.zeros(label.shape[:2], bool)
    # OpenCV takes these two types, and the smaller one is three times as fast.
    channels = label.astype(np.uint8 if most <= 255 else np.float32, copy=False)
    window = np.ones((side, side), np.uint8)
    low, high = cv2.erode(channels, window), cv2.dilate(channels, window)
    inside = (low < channels) & (channels < high)
    if label.ndim == 2:
        return inside
    # A channel that is constant around the pixel does not speak against a blend of two colours.
    flat = low == high
    return inside.any(axis=2) & (inside | flat).all(axis=2)
