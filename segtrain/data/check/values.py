"""The values of images: what they use of their range."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

from segtrain.data.read.image import ImageForm, ValueRange

# The part of the brightest samples of a deep image: burnt-in marks, hot pixels.
_LEFT_OUT = 0.001
# Beyond so many bits the whole type is in use.
_FULL_BITS = 14


class ImageValues(NamedTuple):
    """The values of one image that has this form; pixels without a value do not count.

    name: its path or name, for messages.
    peak: the largest value; of more than 8 bits without the brightest 0.1 %. NaN without any value.
    spans: the least and the largest value of each channel.
    white, outside: shares of the samples at the top of the range or above, and outside of it.
    means, stds: of each channel, in units of 0..255; NaN without any value.
    keeps_all: whether the file keeps every number. loses_band: whether an alpha channel that is
        not constant is left out.
    """

    name: str
    form: ImageForm
    peak: float
    spans: tuple[ValueRange, ...]
    white: float
    outside: float
    means: tuple[float, ...]
    stds: tuple[float, ...]
    keeps_all: bool
    loses_band: bool = False

    @property
    def peak_255(self) -> float:
        """The peak in units of 0..255."""
        low, high = self.form.limits
        return (self.peak - low) * 255 / (high - low)

    @property
    def is_grey(self) -> bool:
        """Whether it has several channels, all equal, as of a file of one, and not of one value."""
        moments = {*zip(self.means, self.stds, strict=True)}
        return len(self.means) > 1 and len(moments) == 1 and self.stds[0] > 0


def image_values(
    image: np.ndarray,
    form: ImageForm,
    name: str,
    *,
    keeps_all: bool = False,
    loses_band: bool = False,
) -> ImageValues:
    """Of an image (H, W, C) as `read_image` gives it in this form; the rest as in ImageValues."""
    low, high = form.limits
    left_out = 0 if form.dtype == np.uint8 else _LEFT_OUT
    if image.dtype.kind == "f":
        samples = [band[~np.isnan(band)] for band in np.moveaxis(image, 2, 0)]
        # Sums of millions of values lose digits in float32.
        wide = [band.astype(np.float64) if band.size else np.full(1, np.nan) for band in samples]
        moments = [(band.mean(), band.std()) for band in wide]
        # A band without values gets a zero, since min, max and quantiles need one.
        samples = [band if band.size else np.zeros(1, np.float32) for band in samples]
        spans = tuple((float(band.min()), float(band.max())) for band in samples)
        every = np.concatenate(samples)
        peak = math.nan if np.isnan(image).all() else float(np.quantile(every, 1 - left_out))
        white, outside = (every >= high).mean(), ((every < low) | (every > high)).mean()
    else:
        counts = _histogram(image)  # (C, values)
        used = [np.flatnonzero(band) for band in counts]
        spans = tuple((float(values[0]), float(values[-1])) for values in used)
        every = counts.sum(axis=0)
        above = np.cumsum(every[::-1])[::-1]  # samples of at least 0, 1, 2, ...
        # The largest value that more samples reach than are left out.
        peak = float(np.flatnonzero(above > int(image.size * left_out))[-1])
        values, size = np.arange(every.size), image.shape[0] * image.shape[1]
        means = counts @ values / size
        moments = zip(
            means, np.sqrt(np.maximum(counts @ values**2 / size - means**2, 0)), strict=True
        )
        white = every[values >= high].sum() / image.size
        outside = every[(values < low) | (values > high)].sum() / image.size
    shares = float(white), float(outside)
    unit = 255 / (high - low)
    means, stds = zip(*((float(m - low) * unit, float(s) * unit) for m, s in moments), strict=True)
    return ImageValues(name, form, peak, spans, *shares, means, stds, keeps_all, loses_band)


def joined_values(blocks: Sequence[ImageValues]) -> ImageValues:
    """Of an image by blocks of equal size: those of the brightest; of shares and means the mean."""
    brightest = max(blocks, key=lambda block: -math.inf if math.isnan(block.peak) else block.peak)
    white, outside = np.mean([(block.white, block.outside) for block in blocks], axis=0).tolist()
    means = np.array([block.means for block in blocks])
    known = np.maximum((~np.isnan(means)).sum(0), 1)
    means = np.where(np.isnan(means).all(0), np.nan, np.nansum(means, 0) / known)
    return brightest._replace(white=white, outside=outside, means=tuple(means.tolist()))


def _histogram(image: np.ndarray) -> np.ndarray:
    """Samples of each value in each channel of an image (H, W, C) uint8 or uint16, (C, values)."""
    whole, size = np.ascontiguousarray(image), np.iinfo(image.dtype).max + 1
    channels = range(image.shape[2])
    histograms = [cv2.calcHist([whole], [c], None, [size], [0, size]).ravel() for c in channels]
    return np.stack(histograms).astype(np.float64)


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
