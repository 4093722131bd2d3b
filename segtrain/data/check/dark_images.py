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
    flat: whether all pixels are equal.
    """

    name: str
    depth: int
    peak: int
    flat: bool

    @property
    def lost(self) -> bool:
        """Whether the file has 16 bits and uses so few that the high byte is nearly 0."""
        return self.depth == _DEEP and self.peak < _DARK_16_BIT


def brightness(image: np.ndarray, depth: int, name: str) -> Brightness:
    """Of an image (H, W, 3) uint8, read from a file of `depth` bits per sample."""
    first = image[0, 0]
    # The first row nearly always decides, and saves a pass over the image.
    flat = bool((image[0] == first).all()) and bool((image == first).all())
    peak = _high_percentile(image) if depth == _DEEP else int(image.max())
    return Brightness(name, depth, peak, flat)


def lost_bits(images: Sequence[Brightness]) -> str:
    """A message about images that are `lost`."""
    peak = max(image.peak for image in images)
    bits = 8 + peak.bit_length()
    which = counted(len(images), "image of 16 bits uses", "images of 16 bits use")
    return (
        f"{which} at most {bits} of them, and reading takes the high 8: 99.9 % of the samples are "
        f"no brighter than {peak} of 255; rescale the values to 0..255 and save 8 bits "
        f"(of {bits} bits: divide by {2 ** (bits - 8)})"
    )


def whole_split_problem(images: Sequence[Brightness]) -> str:
    """Why these images, if they are all, cannot be what is meant; empty if they can."""
    deep = [image for image in images if image.depth == _DEEP]
    if deep and all(image.lost for image in deep):
        return lost_bits(deep)
    if images and all(image.flat for image in images):
        return "every image is of a single colour; were they saved correctly?"
    peak = max((image.peak for image in images), default=_DARK)
    if peak < _DARK:
        return (
            f"nothing in the images is brighter than {peak} of 255: are they labels, or values of "
            "another unit such as 0..1? Rescale them to 0..255"
        )
    return ""


def _high_percentile(image: np.ndarray) -> int:
    """The largest sample of (H, W, 3) uint8 without the brightest 0.1 %."""
    hist = cv2.calcHist([np.ascontiguousarray(image).reshape(-1)], [0], None, [256], [0, 256])
    above = np.cumsum(hist.reshape(-1)[::-1])  # (256,): samples of at least 255, 254, ...
    return 255 - int(np.argmax(above > image.size // _LEFT_OUT))
