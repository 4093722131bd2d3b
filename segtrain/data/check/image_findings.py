"""What is odd about the values of images."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from segtrain.data.check.finding import Finding
from segtrain.data.check.values import ImageValues
from segtrain.data.read.decode import Scaling
from segtrain.data.read.image import ValueRange
from segtrain.errors import DataError
from segtrain.text import counted, first_of

# In units of 0..255. A sensor's 14 bits in 16 reach 63, its 12 bits reach 15.
_DARK_16_BIT = 64
_DARK = 16
# Of the samples of a split. Bright skies take 0.10 in CamVid; 12 bits cut off at 255 more than
# half of all.
_MANY_WHITE = 0.25
_MANY_OUTSIDE = 0.01
# Of the samples of one image to predict.
_MOSTLY_OUTSIDE = 0.1
# Of the samples of an image that is stretched.
_FEW_WHITE = 0.001
# Grey pictures and photographs that reach both ends in each channel have more than so many, where
# light or paper is white: in a stretched image it is the brightest pixel alone.
_SOME_WHITE = 0.005
# Fewer images may have the same least and largest values by chance.
_MIN_STRETCHED = 8


def find_darkness(images: Sequence[ImageValues], split: str = "") -> Finding | None:
    """What is wrong with images that are dark, among all that were read; None if nothing is.

    An error where it is with all: nothing can be learned from them.
    """
    # The peak is NaN of an image without any value, which is neither dark nor bright.
    images = [image for image in images if not math.isnan(image.peak)]
    # With a data.value_range the user has said which number is white.
    deep = [
        image
        for image in images
        if image.form.dtype == np.uint16 and image.form.value_range is None
    ]
    lost = [image for image in deep if image.peak_255 < _DARK_16_BIT]
    if lost:
        peak = max(int(image.peak) for image in lost)
        bits = max(peak.bit_length(), 1)
        which = counted(len(lost), "image of 16 bits uses", "images of 16 bits use")
        text = (
            f"{which} at most {bits} of them: 99.9 % of the samples are no larger than {peak}; set "
            f"data.value_range: [0, {2**bits - 1}], for all images alike, if these are not just "
            "dark"
        )
        severity = "error" if len(lost) == len(deep) else "warning"
        return Finding(severity, split, "faint", text, {"": [image.name for image in lost]})
    # The default is not below the limit: without images nothing is dark.
    peak = max((image.peak_255 for image in images), default=_DARK)
    if peak < _DARK:
        text = (
            f"nothing in the images is brighter than {peak:.3g} of 255: are they labels, or values "
            "of another unit such as 0..1? Set data.value_range to what they hold"
        )
        return Finding("error", split, "faint", text, {"": [image.name for image in images]})
    return None


def photo_findings(images: Sequence[ImageValues]) -> Iterator[Finding]:
    """What tells that images to predict hold other values than those of the training."""
    if dark := find_darkness(images):
        yield dark
    far = [
        image.name for image in images if image.outside > _MOSTLY_OUTSIDE and not image.form.clip
    ]
    if names := far:
        low, high = images[0].form.limits
        which = counted(len(names), "image has", "images have")
        text = (
            f"{which} more than {_MOSTLY_OUTSIDE:.0%} of the samples outside of [{low:g}, {high:g}]"
            ", the data.value_range of the training: convert them to its unit"
        )
        yield Finding("warning", "", "outside", text, {"": names})


def value_findings(images: Sequence[ImageValues], split: str) -> Iterator[Finding]:
    """What is odd about the values of a split's images, darkness included.

    No step fails with images that are nearly black, cut off at white or stretched one by one, but
    the model sees less than there was, or something else in each image. One such image is no
    mistake; a data set of them may be.
    """
    if not images:
        return
    try:
        # Without known limits the shares at white and outside mean nothing.
        images[0].form.check()
    except DataError as error:
        spans = [span for image in images for span in image.spans]
        seen = f"{min(low for low, _ in spans):g} to {max(high for _, high in spans):g}"
        yield Finding("error", split, "range", f"{error}; seen are {seen}")
        return
    if dark := find_darkness(images, split):
        yield dark
    if dropped := [image.name for image in images if image.loses_band]:
        words = "image has a fourth band that varies", "images have a fourth band that varies"
        end = ", and it is dropped: if it is more than transparency, set data.channels: 4"
        text = counted(len(dropped), *words) + end
        yield Finding("warning", split, "dropped band", text, {"": dropped})
    grey = [image.name for image in images if image.is_grey]
    # Photographs, of 8 bits, may well be of both kinds.
    if 0 < len(grey) < len(images) and images[0].form.dtype != np.uint8:
        words = "image is grey", "images are grey", "and others are not: one channel is taken"
        text = f"{counted(len(grey), *words[:2])}, {words[2]} three times; are channels missing?"
        yield Finding("warning", split, "grey", text, {"": grey})
    low, high = images[0].form.limits
    white, outside = np.mean([(image.white, image.outside) for image in images], axis=0).tolist()
    if images[0].form.clip:  # meant to lie outside
        pass
    elif white > _MANY_WHITE:
        text = (
            f"{white:.1%} of the samples are {high:g}, the top of their range: were larger values "
            "cut off when the files were made? Then make them again"
        )
        names = [image.name for image in images if image.white > _MANY_WHITE]
        yield Finding("warning", split, "white", text, {"": names})
    elif outside > _MANY_OUTSIDE:
        text = (
            f"{outside:.1%} of the samples are outside of data.value_range, [{low:g}, {high:g}]; "
            "segtrain data stats prints what they hold"
        )
        names = [image.name for image in images if image.outside > _MANY_OUTSIDE]
        yield Finding("warning", split, "outside", text, {"": names})
    if span := _common_span(images):
        text = (
            f"the values of every image go from {span[0]:g} to {span[1]:g}: was each stretched by "
            "itself? Then one value means something else in each; make the files again, with one "
            "scale for all"
        )
        yield Finding("warning", split, "stretched", text)


def _common_span(images: Sequence[ImageValues]) -> ValueRange | None:
    """The span of all images where so many equal ones are no chance; None: there is none.

    Photographs and grey pictures too may all reach black and white, but where they are white many
    pixels are.
    """
    # A set: `others` is empty if all images have the same span.
    (span, *others) = {
        (min(low for low, _ in image.spans), max(high for _, high in image.spans))
        for image in images
    }
    channels = {span for image in images for span in image.spans}
    least = _FEW_WHITE if len(channels) > 1 else _SOME_WHITE
    is_chance = any(image.white > least for image in images)
    # After lossy compression the extremes are not those that were written.
    is_kept = len(images) >= _MIN_STRETCHED and all(image.keeps_all for image in images)
    return span if is_kept and not others and not is_chance and span[0] < span[1] else None


def scaling_words(scaling: Scaling) -> str:
    """Such as `scale 0.0001 of band 1, 2, offset -0.1 of band 1`."""
    bands: dict[str, list[int]] = {}
    for role, number, band in scaling:
        bands.setdefault(f"{role} {number:g}", []).append(band + 1)
    return ", ".join(f"{words} of band {first_of(x, 4)}" for words, x in bands.items()) or "none"
