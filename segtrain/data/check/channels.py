"""What the channels of the training images hold, for checkpoints: images to predict are compared.

A network takes any numbers: bands in another order, or grey levels after another normalization,
give a label map like any other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from pydantic import ConfigDict, FiniteFloat, TypeAdapter

from segtrain.data.check.finding import Finding
from segtrain.data.check.image_findings import scaling_words
from segtrain.data.check.values import ImageValues, image_values
from segtrain.data.read.concurrent import prefetch
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.decode import Scaling
from segtrain.text import counted, first_of

# As many images as `quick_check` looks at; few threads, because each holds a decoded one.
_SAMPLES, _THREADS = 32, 4
# The mean of a channel of one image: how far from that of the training it may be without a word.
# Sets of one sensor and place vary less than what they are used for.
_SPREADS, _OF_DEVIATION, _LEAST = 4.0, 0.5, 2.0
# By the root mean square over channels, in spreads: an order that fits badly, and one that fits.
_BAD_FIT, _BETTER = 1.5, 3.0


@dataclass(frozen=True)
class Channels:
    """Of each channel, by a sample of images, in units of 0..255.

    bands: names of the channels, as the files give them; (): not known.
    mean, std: of all pixels. spread: the standard deviation of the means of images.
    scaling, dtype: as of ImageForm; None: not known. grey: the share of `is_grey` images.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    bands: tuple[str, ...]
    mean: tuple[FiniteFloat, ...]
    std: tuple[FiniteFloat, ...]
    spread: tuple[FiniteFloat, ...]
    scaling: Scaling = ()
    dtype: Literal["uint8", "uint16", "float32"] | None = None
    grey: FiniteFloat = 0.0

    def __post_init__(self) -> None:
        if not len(self.mean) == len(self.std) == len(self.spread):
            raise ValueError("mean, std and spread are of different numbers of channels")


_ADAPTER = TypeAdapter(Channels)


def channels_to_json(channels: Channels) -> str:
    """Text for a checkpoint."""
    # Indented, because `torch_file` refuses long text without blanks.
    return _ADAPTER.dump_json(channels, indent=1).decode()


def channels_from_json(text: str) -> Channels:
    """Raises pydantic.ValidationError if `text` is not of `channels_to_json`."""
    return _ADAPTER.validate_json(text)


def measure_channels(dataset: SegDataset) -> Channels:
    """Reads a sample of the images; DataError: one cannot be read."""
    # The step is rounded up: at most _SAMPLES images, spread over the whole split.
    indices = range(len(dataset))[:: -(-len(dataset) // _SAMPLES)]
    samples = list(prefetch(partial(_values, dataset), indices, _THREADS))
    means, stds = (
        np.array([getattr(sample, key) for sample in samples]) for key in ("means", "stds")
    )
    is_known = ~np.isnan(means)
    # A channel without any value in an image is NaN there, and does not count.
    count = np.maximum(is_known.sum(0), 1)
    mean = np.where(is_known, means, 0).sum(0) / count
    between = np.where(is_known, means - mean, 0) ** 2
    within = np.where(is_known, stds, 0) ** 2
    # The variance of all pixels is that of the images' means plus the mean of those within images.
    # Each image counts alike, whatever its size.
    std = np.sqrt((between + within).sum(0) / count)
    spread = np.sqrt(between.sum(0) / np.maximum(count - 1, 1))
    moments = (tuple(x.tolist()) for x in (mean, std, spread))
    form, grey = dataset.form, float(np.mean([sample.is_grey for sample in samples]))
    return Channels(form.bands, *moments, form.scaling, form.dtype.name, grey)


def _values(dataset: SegDataset, index: int) -> ImageValues:
    image, _ = dataset.view(index)
    return image_values(image, dataset.form, dataset.name(index))


def channel_findings(images: Sequence[ImageValues], trained: Channels) -> Iterator[Finding]:
    """Which images to predict hold channels unlike those of the training."""
    from scipy.optimize import linear_sum_assignment

    mean, std, spread = map(np.array, (trained.mean, trained.std, trained.spread))
    # `near` is the unit in which orders of channels are compared, `far` the limit for a channel
    # where it is. _LEAST keeps the division finite for a channel that is constant.
    near = np.maximum.reduce([spread, std * _OF_DEVIATION / 2, np.full_like(std, _LEAST)])
    far = _SPREADS * np.maximum.reduce([spread, std * _OF_DEVIATION, np.full_like(std, _LEAST)])
    orders: dict[tuple[int, ...], list[str]] = {}
    strange: list[str] = []
    for image in images:
        means = np.array(image.means)
        if means.shape != mean.shape or np.isnan(means).any():
            continue
        costs = ((means - mean[:, None]) / near[:, None]) ** 2  # (channel there, channel here)
        # The cheapest assignment tells whether the same bands come in another order.
        _, order = linear_sum_assignment(costs)
        as_is, best = (
            np.sqrt(costs.diagonal().mean()),
            np.sqrt(costs[range(len(order)), order].mean()),
        )
        # Both must hold: a bad fit alone may be another scene or sensor.
        if as_is > _BAD_FIT and best * _BETTER < as_is:
            orders.setdefault(tuple((order + 1).tolist()), []).append(image.name)
        elif (np.abs(means - mean) > far).any():
            strange.append(image.name)
    grey = [image.name for image in images if image.is_grey]
    # Of one channel means are equal, too.
    if grey and not trained.grey and len({*trained.mean}) > 1:
        which = counted(len(grey), "image is", "images are")
        text = (
            f"{which} grey, and no image of the training that was looked at: one channel is taken "
            "three times; if it is one of several, predict a file that holds all of them"
        )
        yield Finding("warning", "", "grey", text, {"": grey})
    others = [image for image in images if image.form.scaling != trained.scaling]
    if others:
        here, there = (scaling_words(x) for x in (others[0].form.scaling, trained.scaling))
        text = (
            f"{counted(len(others), 'image says', 'images say')} by other scales or offsets than "
            f"those of the training what the numbers mean ({here} here, {there} there); numbers "
            "are taken as they are stored"
        )
        yield Finding("warning", "", "scales", text, {"": [image.name for image in others]})
    for order, names in orders.items():
        which = counted(len(names), "image fits", "images fit")
        text = (
            f"{which} the channels of the training much better in the order {first_of(order, 16)}: "
            "are these other bands, or bands in another order? gdal_translate -b orders them"
        )
        yield Finding("warning", "", "order", text, {"": names})
    if strange:
        which = counted(len(strange), "image has", "images have")
        values = ", ".join(f"{m:.0f} ± {s:.0f}" for m, s in zip(mean, std, strict=True))
        text = (
            f"{which} channels whose mean is far from that of the training ({values} of 255): are "
            "the values of another unit, or normalized in another way?"
        )
        yield Finding("warning", "", "strange", text, {"": strange})
