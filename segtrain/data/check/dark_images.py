"""Images that are nearly black after reading: few of 16 bits used, values of 0..1.

No step fails with such images, but the model has seen nothing. One dark image is no mistake; a data
set of dark images only is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

from segtrain.text import counted

# Reading keeps the high byte: a sensor's 14 bits reach 63 of 255 then, 12 bits reach 15.
_DARK_16_BIT = 64
_DARK = 16
_DEEP = 16
# Of a deep image the brightest sample in 1000 is left out: burnt-in marks, hot pixels.
_LEFT_OUT = 1000


class Brightness(NamedTuple):
    """How bright one image is.

    name: its path or name, for messages.
    depth: bits per sample in the file.
    peak: largest sample after reading, 0..255; of a 16-bit image without the brightest 0.1 %.
    """

    name: str
    depth: int
    peak: int


class Darkness(NamedTuple):
    """What is wrong with dark images: a message, their names, and whether it is with all."""

    text: str
    names: list[str]
    is_all: bool


def brightness(image: np.ndarray, depth: int, name: str) -> Brightness:
    """Of an image (H, W, 3) uint8, read from a file of `depth` bits per sample."""
    if depth != _DEEP:
        return Brightness(name, depth, int(image.max()))
    hist = cv2.calcHist([np.ascontiguousarray(image).reshape(-1)], [0], None, [256], [0, 256])
    above = np.cumsum(hist.reshape(-1)[::-1])  # (256,): samples of at least 255, 254, ...
    return Brightness(name, depth, 255 - int(np.argmax(above > image.size // _LEFT_OUT)))


def find_darkness(images: Sequence[Brightness]) -> Darkness | None:
    """What is wrong with images that are dark, among all that were read; None if nothing is."""
    deep = [image for image in images if image.depth == _DEEP]
    lost = [image for image in deep if image.peak < _DARK_16_BIT]
    peak = max((image.peak for image in lost or images), default=_DARK)
    if lost:
        bits = 8 + peak.bit_length()
        which = counted(len(lost), "image of 16 bits uses", "images of 16 bits use")
        text = (
            f"{which} at most {bits} of them, and reading takes the high 8: 99.9 % of the samples "
            f"are no brighter than {peak} of 255; rescale the values to 0..255 and save 8 bits (of "
            f"{bits} bits: divide by {2 ** (bits - 8)}), if these are not just dark"
        )
        return Darkness(text, [image.name for image in lost], lost == deep)
    if peak < _DARK:
        text = (
            f"nothing in the images is brighter than {peak} of 255: are they labels, or values of "
            "another unit such as 0..1? Rescale them to 0..255"
        )
        return Darkness(text, [image.name for image in images], True)
    return None
