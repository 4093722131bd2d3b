"""Images of which reading leaves next to nothing: few bits of 16, values of 0..1, a single colour.

Nothing fails there, and what is trained has seen nothing. A dark image is no mistake, a data set of
dark images only is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

# A sensor's 14 bits reach 63 of 255 when the high byte is taken of them, 12 bits reach 15.
_FAINT_16_BIT = 64
_FAINT = 16
_DEEP = 16
# The brightest samples of a deep image that say nothing: burnt-in marks, hot pixels.
_LEFT_OUT = 1000  # one of so many


class Brightness(NamedTuple):
    """What of an image matters here.

    name: its path or name, for messages.
    depth: bits of a sample in the file.
    peak: the largest sample once it is read, 0..255; of a deep image without the brightest 0.1 %.
    flat: whether all pixels are equal.
    """

    name: str
    depth: int
    peak: int
    flat: bool

    @property
    def lost(self) -> bool:
        """Whether 16 bits were stored and so few of them used that the high byte is next to 0."""
        return self.depth == _DEEP and self.peak < _FAINT_16_BIT


def brightness(image: np.ndarray, depth: int, name: str) -> Brightness:
    """Of an image (H, W, 3) uint8 as it was read from a file of `depth` bits a sample."""
    first = image[0, 0]
    flat = bool((image[0] == first).all()) and bool((image == first).all())
    peak = _high_percentile(image) if depth == _DEEP else int(image.max())
    return Brightness(name, depth, peak, flat)


def _high_percentile(image: np.ndarray) -> int:
    """The largest sample of (H, W, 3) uint8 when the brightest 0.1 % are left out."""
    hist = cv2.calcHist([np.ascontiguousarray(image).reshape(-1)], [0], None, [256], [0, 256])
    above = np.cumsum(hist.reshape(-1)[::-1])  # (256,): samples of at least 255, 254, ...
    return 255 - int(np.argmax(above > image.size // _LEFT_OUT))


def lost_bits(images: Sequence[Brightness]) -> str:
    """What to say of 16-bit images that are `lost`."""
    peak = max(one.peak for one in images)
    bits = 8 + peak.bit_length()
    return (
        f"16-bit images use at most {bits} of their 16 bits, and reading takes the high 8: "
        f"99.9 % of the samples are no brighter than {peak} of 255; rescale the values to 0..255 "
        f"and save 8 bits (of {bits} bits: divide by {2 ** (bits - 8)})"
    )


def whole_split_problem(images: Sequence[Brightness]) -> str:
    """Why images that are all like these cannot be what was meant; empty if they can."""
    deep = [one for one in images if one.depth == _DEEP]
    if deep and all(one.lost for one in deep):
        return f"the {lost_bits(deep)}"
    if images and all(one.flat for one in images):
        return "every image is of a single colour; were they saved as they were meant?"
    peak = max((one.peak for one in images), default=_FAINT)
    if peak < _FAINT:
        return (
            f"nothing in the images is brighter than {peak} of 255: are they labels, or values of "
            "another unit such as 0..1? Rescale them to 0..255"
        )
    return ""
