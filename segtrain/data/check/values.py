"""What the values of the images say about how the files were made.

No step fails with images that are nearly black, cut off at white or stretched one by one, but the
model sees less than there was, or something else in each image. One such image is no mistake; a
data set of them may be.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import cv2
import numpy as np

from segtrain.data.read.formats import Info
from segtrain.data.read.image import ImageForm, ValueRange
from segtrain.text import counted

# In units of 0..255. A sensor's 14 bits in 16 reach 63, its 12 bits reach 15.
_DARK_16_BIT = 64
_DARK = 16
# The part of the brightest samples of a deep image: burnt-in marks, hot pixels.
_LEFT_OUT = 0.001
# Of the samples of a split. A bright sky in photographs has less on average.
_MANY_WHITE = 0.05
_MANY_OUTSIDE = 0.01
# Of the samples of an image that is stretched.
_FEW_WHITE = 0.001
# Fewer images may have the same least and largest values by chance.
_MIN_STRETCHED = 8
# Beyond so many bits the whole type is in use.
_FULL_BITS = 14


class ImageValues(NamedTuple):
    """The values of one image that has this form; pixels without a value do not count.

    name: its path or name, for messages.
    peak: the largest value; of more than 8 bits without the brightest 0.1 %.
    spans: the least and the largest value of each channel.
    white, outside: shares of the samples at the top of the range or above, and outside of it.
    keeps_all: whether the file keeps every number. loses_band: whether an alpha channel that is
        not constant is left out.
    """

    name: str
    form: ImageForm
    peak: float
    spans: tuple[ValueRange, ...]
    white: float
    outside: float
    keeps_all: bool
    loses_band: bool = False

    @property
    def peak_255(self) -> float:
        """The peak in units of 0..255."""
        low, high = self.form.limits
        return (self.peak - low) * 255 / (high - low)


class ValueFinding(NamedTuple):
    """What is wrong with images: a short name, a message, their names, and whether it is with all.

    Where it is with all, nothing can be learned from them.
    """

    kind: str
    text: str
    names: list[str]
    is_all: bool = False


def image_values(
    image: np.ndarray, form: ImageForm, info: Info, name: str, *, loses_band: bool = False
) -> ImageValues:
    """Of an image (H, W, C) as `read_image` gives it in this form, NaN where it has no value.

    info: the header of its file. loses_band: see `ImageValues`.
    """
    low, high = form.limits
    left_out = 0 if form.dtype == np.uint8 else _LEFT_OUT
    if image.dtype.kind == "f":
        samples = [band[~np.isnan(band)] for band in np.moveaxis(image, 2, 0)]
        samples = [band if band.size else np.zeros(1, np.float32) for band in samples]
        spans = tuple((float(band.min()), float(band.max())) for band in samples)
        every = np.concatenate(samples)
        peak = float(np.quantile(every, 1 - left_out))
        white, outside = (every >= high).mean(), ((every < low) | (every > high)).mean()
    else:
        counts = _histogram(image)  # (C, values)
        used = [np.flatnonzero(band) for band in counts]
        spans = tuple((float(values[0]), float(values[-1])) for values in used)
        every = counts.sum(axis=0)
        above = np.cumsum(every[::-1])[::-1]  # samples of at least 0, 1, 2, ...
        peak = float(np.flatnonzero(above > int(image.size * left_out))[-1])
        values = np.arange(every.size)
        white = every[values >= high].sum() / image.size
        outside = every[(values < low) | (values > high)].sum() / image.size
    facts = float(white), float(outside), info.lossless, loses_band
    return ImageValues(name, form, peak, spans, *facts)


def _histogram(image: np.ndarray) -> np.ndarray:
    """Samples of each value in each channel of an image (H, W, C) uint8 or uint16, (C, values)."""
    whole, size = np.ascontiguousarray(image), np.iinfo(image.dtype).max + 1
    channels = range(image.shape[2])
    found = [cv2.calcHist([whole], [c], None, [size], [0, size]).ravel() for c in channels]
    return np.stack(found).astype(np.float64)


def find_darkness(images: Sequence[ImageValues]) -> ValueFinding | None:
    """What is wrong with images that are dark, among all that were read; None if nothing is."""
    deep = [one for one in images if one.form.dtype == np.uint16 and one.form.value_range is None]
    lost = [one for one in deep if one.peak_255 < _DARK_16_BIT]
    if lost:
        peak = max(int(one.peak) for one in lost)
        bits = max(peak.bit_length(), 1)
        which = counted(len(lost), "image of 16 bits uses", "images of 16 bits use")
        text = (
            f"{which} at most {bits} of them: 99.9 % of the samples are no larger than {peak}; set "
            f"data.value_range: [0, {2**bits - 1}], for all images alike, if these are not just "
            "dark"
        )
        return ValueFinding("faint", text, [one.name for one in lost], len(lost) == len(deep))
    peak = max((one.peak_255 for one in images), default=_DARK)
    if peak < _DARK:
        text = (
            f"nothing in the images is brighter than {peak:.3g} of 255: are they labels, or values "
            "of another unit such as 0..1? Set data.value_range to what they hold"
        )
        return ValueFinding("faint", text, [one.name for one in images], True)
    return None


def value_findings(images: Sequence[ImageValues]) -> Iterator[ValueFinding]:
    """What is odd about the values of a split's images, darkness included."""
    if dark := find_darkness(images):
        yield dark
    if dropped := [one.name for one in images if one.loses_band]:
        words = "image has a fourth band that varies", "images have a fourth band that varies"
        text = (
            f"{counted(len(dropped), *words)}, and it is dropped: if it is more than transparency, "
            "set data.channels: 4"
        )
        yield ValueFinding("dropped band", text, dropped)
    if not images:
        return
    low, high = images[0].form.limits
    white = float(np.mean([one.white for one in images]))
    if white > _MANY_WHITE:
        text = (
            f"{white:.1%} of the samples are {high:g}, the top of their range: were larger values "
            "cut off when the files were made? Then make them again"
        )
        names = [one.name for one in images if one.white > _MANY_WHITE]
        yield ValueFinding("white", text, names)
    outside = float(np.mean([one.outside for one in images]))
    if outside > _MANY_OUTSIDE and white <= _MANY_WHITE:
        names = [one.name for one in images if one.outside > _MANY_OUTSIDE]
        text = (
            f"{outside:.1%} of the samples are outside of data.value_range, [{low:g}, {high:g}]; "
            "segtrain data stats prints what they hold"
        )
        yield ValueFinding("outside", text, names)
    if span := _common_span(images):
        text = (
            f"the values of every image go from {span[0]:g} to {span[1]:g}: was each stretched by "
            "itself? Then one value means something else in each; make the files again, with one "
            "scale for all"
        )
        yield ValueFinding("stretched", text, [])


def _common_span(images: Sequence[ImageValues]) -> ValueRange | None:
    """The span of all images where so many equal ones are no chance; None: there is none.

    Photographs too may all reach black and white, but not in each channel, and where they are white
    many pixels are. A stretched image has that value at its brightest pixel.
    """
    (span, *others) = {
        (min(low for low, _ in one.spans), max(high for _, high in one.spans)) for one in images
    }
    channels = {span for one in images for span in one.spans}
    is_chance = len(channels) > 1 and any(one.white > _FEW_WHITE for one in images)
    is_kept = len(images) >= _MIN_STRETCHED and all(one.keeps_all for one in images)
    return span if is_kept and not others and not is_chance and span[0] < span[1] else None


def suggested_range(form: ImageForm, percentiles: Sequence[float], largest: float) -> ValueRange:
    """A `data.value_range` for a set whose samples have these percentiles.

    percentiles: the first and the last are those that leave out single wrong pixels.
    Whole numbers of n bits get [0, 2^n - 1]; floats what lies between the percentiles.
    """
    if form.dtype.kind == "u":
        top = np.iinfo(form.dtype).max
        bits = int(largest).bit_length()
        return 0.0, float(top if bits > _FULL_BITS or top == 255 else 2 ** max(bits, 1) - 1)
    low, high = (float(f"{value:.3g}") for value in (percentiles[0], percentiles[-1]))
    return (low, high) if low < high else (low, low + 1)
