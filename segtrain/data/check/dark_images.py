"""Images that are nearly black after reading: few of 16 bits used, values of 0..1.

No step fails with such images, but the model has seen nothing. One dark image is no mistake; a data
set of dark images only is.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import cv2
import numpy as np

from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.decode import read_header, read_image
from segtrain.errors import DataError
from segtrain.text import printable

# Reading keeps the high byte: a sensor's 14 bits reach 63 of 255 then, 12 bits reach 15.
_FAINT_16_BIT = 64
_FAINT = 16
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
        return self.depth == _DEEP and self.peak < _FAINT_16_BIT


def brightness(image: np.ndarray, depth: int, name: str) -> Brightness:
    """Of an image (H, W, 3) uint8, read from a file of `depth` bits per sample."""
    first = image[0, 0]
    # The first row nearly always decides, and saves a pass over the image.
    flat = bool((image[0] == first).all()) and bool((image == first).all())
    peak = _high_percentile(image) if depth == _DEEP else int(image.max())
    return Brightness(name, depth, peak, flat)


def lost_bits(images: Sequence[Brightness]) -> str:
    """A message about 16-bit images that are `lost`."""
    peak = max(image.peak for image in images)
    bits = 8 + peak.bit_length()
    return (
        f"16-bit images use at most {bits} of their 16 bits, and reading takes the high 8: "
        f"99.9 % of the samples are no brighter than {peak} of 255; rescale the values to 0..255 "
        f"and save 8 bits (of {bits} bits: divide by {2 ** (bits - 8)})"
    )


def whole_split_problem(images: Sequence[Brightness]) -> str:
    """Why these images, if they are all, cannot be what is meant; empty if they can."""
    deep = [image for image in images if image.depth == _DEEP]
    if deep and all(image.lost for image in deep):
        return f"the {lost_bits(deep)}"
    if images and all(image.flat for image in images):
        return "every image is of a single colour; were they saved correctly?"
    peak = max((image.peak for image in images), default=_FAINT)
    if peak < _FAINT:
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


# Images to look at in any case: of all, and of those with 16 bits.
_SAMPLES = 4
_DEEP_SAMPLES = 8
# A whole split is called faint only if this many images more are faint.
_MORE_SAMPLES = 32


def faint_lines(dataset: SegDataset) -> list[str]:
    """Warnings about the images of `dataset`, from a sample of at most 64.

    A pack brings its own. Images that cannot be read give no warning: reading them later fails
    with a message.
    """
    if dataset.is_packed:
        return []
    indices = spread(range(len(dataset)), _MORE_SAMPLES)
    try:
        depths = {i: read_header(dataset.pairs[i].image).depth for i in indices}
        problem, warnings = check_brightness(dataset, depths)
    except DataError:
        return []
    return [problem] if problem else warnings


def check_brightness(dataset: SegDataset, depths: Mapping[int, int]) -> tuple[str, list[str]]:
    """Why the images cannot be what is meant, empty if they can; and warnings about some of them.

    depths: bits per sample of the images to choose from, by their index.
    """

    def look(i: int) -> Brightness:
        path = dataset.pairs[i].image
        return brightness(read_image(path), depths[i], printable(path))

    indices = list(depths)
    deep = [i for i in indices if depths[i] > 8]
    seen = [look(i) for i in [*spread(indices, _SAMPLES), *spread(deep, _DEEP_SAMPLES)]]
    # Only while all images are suspicious are more needed.
    more = iter(spread(deep or indices, _MORE_SAMPLES))
    while problem := whole_split_problem(seen):
        i = next(more, None)
        if i is None:
            return f"split {dataset.split!r}, such as {seen[-1].name}: {problem}", []
        seen.append(look(i))
    lost = {image.name: image for image in seen if image.lost}
    if not lost:
        return "", []
    num_seen = len({image.name for image in seen})
    return "", [
        f"split {dataset.split!r}, such as {next(iter(lost))}: {len(lost)} of {num_seen} images "
        f"looked at: {lost_bits(list(lost.values()))}, if these are not just dark"
    ]


def spread(indices: Sequence[int], count: int) -> Sequence[int]:
    """`count` of the indices or a few more, evenly spread; all if they are fewer."""
    return indices[:: max(1, len(indices) // count)]
