"""The options of training, each with its reason; a pure function of what was decided before."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from segtrain.config.data import DataConfig
from segtrain.errors import ConfigError
from segtrain.survey.classes import Class
from segtrain.survey.contents import ImageFacts
from segtrain.survey.decide import Answers, Reading, Splits, UndecidedError
from segtrain.survey.images import Image
from segtrain.survey.survey import Survey
from segtrain.text import first_of

_IMAGENET = {key: DataConfig.model_fields[key].default for key in ("mean", "std")}
# Rarer than the most frequent class by this factor: the loss is weighted.
_UNBALANCED = 20
_LARGEST_WEIGHT = 10.0


class Machine(NamedTuple):
    """has_gpu: whether there is a CUDA device. weights: for model.pretrained, None if missing."""

    has_gpu: bool
    weights: str | None


@dataclass(frozen=True)
class Pixels:
    """How images are read: data.channels, type, value_range (None: its own), mean and std."""

    channels: int
    dtype: str
    value_range: tuple[float, float] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    reasons: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def choose_pixels(
    survey: Survey, images: Sequence[Image], answers: Answers, machine: Machine
) -> Pixels:
    """How the images are read; one scale for all of them.

    Raises:
        ConfigError: they differ in their channels or types.
        UndecidedError: a fourth channel may be a band or mean nothing.
    """
    facts = [survey.facts[i.files[0]] for i in images if i.files[0] in survey.facts]
    kinds = {(image.channels, image.dtype) for image in images}
    dtypes = {dtype for _, dtype in kinds}
    numbers = sorted({channels for channels, _ in kinds})
    if len(dtypes) > 1:
        raise ConfigError(
            f"{survey.root}: images of different types: {first_of(sorted(dtypes))}; one scale "
            "cannot fit them: convert them to one"
        )
    (dtype,) = dtypes
    reasons: dict[str, str] = {}
    channels = answers.channels or _channels(survey, images, facts, numbers)
    usable = [one for one in facts if len(one.mean) == max(numbers)] or facts
    low = min(min(one.low) for one in usable)
    high = max(max(one.high) for one in usable)
    value_range = _value_range(dtype, low, high, len(usable), reasons)
    scale = value_range or ((0.0, 255.0) if dtype == "uint8" else (0.0, float(np.iinfo(dtype).max)))
    warnings = _odd_values(usable, dtype, scale)
    if channels == 3 and machine.weights and dtype == "uint8":
        reasons["mean"] = "those of the pretrained weights (ImageNet)"
        return Pixels(3, dtype, value_range, *_IMAGENET.values(), reasons, warnings)
    mean, std = _statistics(usable, channels, scale)
    reasons["mean"] = f"of {len(usable)} images, each channel, on the scale of 0..255"
    if channels != 3:
        reasons["channels"] = "as the files hold"
    return Pixels(channels, dtype, value_range, mean, std, reasons, warnings)


def _channels(
    survey: Survey, images: Sequence[Image], facts: Sequence[ImageFacts], numbers: list[int]
) -> int:
    if numbers in ([1], [3], [1, 3]):
        return 3  # grey becomes RGB, as pretrained weights expect
    if any(image.alpha for image in images) and set(numbers) <= {1, 2, 3, 4}:
        opaque = {image.files[0] for image in images if not image.alpha}
        alpha = [
            survey.facts[i.files[0]] for i in images if i.files[0] in survey.facts.keys() - opaque
        ]
        if numbers != [4] or all(one.std[-1] == 0 for one in alpha):
            return 3
        raise UndecidedError(
            f"{survey.root}: images have four channels, and the fourth varies: a band, or "
            "transparency?",
            [
                Reading("a band to train on", "--channels 4"),
                Reading("transparency, left out", "--channels 3"),
            ],
        )
    if len(numbers) > 1:
        raise ConfigError(
            f"{survey.root}: images of {first_of(numbers)} channels; one network cannot take them "
            "all: --channels 3 reads the first three, or keep those of one kind"
        )
    return numbers[0]


def _value_range(
    dtype: str, low: float, high: float, number: int, reasons: dict[str, str]
) -> tuple[float, float] | None:
    """The range that becomes 0..255; None: that of the type."""
    if dtype == "uint8":
        return None
    seen = f"seen in {number} images: {low:g} to {high:g}"
    if dtype.startswith(("uint", "int")):
        bits = max(8, math.ceil(math.log2(max(high, 1) + 1)))
        if low < 0:
            reasons["value_range"] = seen
            return (low, high)
        if bits >= 16 and dtype == "uint16":
            return None
        reasons["value_range"] = f"{bits} bits in {dtype}; {seen}"
        return (0.0, float(2**bits - 1))
    reasons["value_range"] = f"float; {seen}; one scale for all images"
    if low >= 0 and high <= 1:
        return (0.0, 1.0)
    return (float(f"{low:.6g}"), float(f"{high:.6g}"))


def _odd_values(
    facts: Sequence[ImageFacts], dtype: str, scale: tuple[float, float]
) -> tuple[str, ...]:
    warnings = []
    if saturated := [one.at_top for one in facts if one.at_top > 0.25]:
        warnings.append(
            f"{len(saturated)} of {len(facts)} images have more than 25 % of their pixels at the "
            f"largest value of {dtype}: perhaps clipped when they were converted"
        )
    full = [one for one in facts if min(one.low) <= scale[0] and max(one.high) >= scale[1]]
    if dtype == "uint8" and len(facts) > 5 and len(full) == len(facts):
        exact = [one for one in facts if one.at_top < 0.001]
        if len(exact) == len(facts):
            warnings.append(
                "every image spans 0 to 255 exactly: perhaps each was stretched alone, and then "
                "the same thing has other values in each image"
            )
    if dtype != "uint8" and len(facts) > 5:
        highs = sorted(max(one.high) for one in facts)
        at_ends = sum(min(one.low) <= scale[0] and max(one.high) >= scale[1] for one in facts)
        if at_ends > 0.9 * len(facts) or highs[-1] > 20 * max(highs[len(highs) // 10], 1e-9):
            warnings.append(
                f"the largest values of the images go from {highs[0]:g} to {highs[-1]:g}, or all "
                "span the whole range: perhaps each was scaled alone, and then the same thing has "
                "other values in each image"
            )
    if any(one.nan for one in facts):
        warnings.append("images hold NaN: such pixels count as no data")
    return tuple(warnings)


def _statistics(
    facts: Sequence[ImageFacts], channels: int, scale: tuple[float, float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    means, stds = (np.array([getattr(one, key) for one in facts]) for key in ("mean", "std"))
    mean = means.mean(axis=0)
    std = np.sqrt((stds**2 + means**2).mean(axis=0) - mean**2)
    if len(mean) < channels or (len(mean) == 2 and channels == 3):
        mean, std = (np.repeat(x[:1], channels) for x in (mean, std))
    mean, std = mean[:channels], std[:channels]
    factor = 255 / (scale[1] - scale[0])
    return (
        tuple(round(float(x), 3) for x in (mean - scale[0]) * factor),
        tuple(round(max(float(x), 1e-3), 3) for x in std * factor),
    )


class Option(NamedTuple):
    """A line of the config."""

    key: str  # section.key
    value: Any
    reason: str


def choose_options(
    splits: Splits, classes: Sequence[Class], pixels: Pixels, machine: Machine
) -> list[Option]:
    """Model, crop, batch, steps and the rest, from sizes, frequencies and the number of images."""
    heights, widths = zip(*(image.size for image in splits.train), strict=True)
    sizes = int(median(heights)), int(median(widths))
    largest = 512 if machine.has_gpu else 256
    crop = [min(largest, max(64, side // 32 * 32)) for side in sizes]
    count = len(splits.train)
    batch = 8 if count >= 8 else max(2, count)
    passes, least, most = (100, 2000, 40_000) if machine.has_gpu else (30, 300, 1500)
    steps = max(least, min(most, round(count * passes / batch, -2)))
    every = max(50, steps // 10)
    found = [
        Option("data.channels", pixels.channels, pixels.reasons.get("channels", "")),
        Option("data.value_range", pixels.value_range, pixels.reasons.get("value_range", "")),
        Option("data.mean", list(pixels.mean), pixels.reasons["mean"]),
        Option("data.std", list(pixels.std), ""),
        Option("augment.crop_size", crop, f"images are {sizes[0]}x{sizes[1]} (median), in 32s"),
        Option(
            "augment.scale_range",
            [0.5, 2.0],
            "as PSPNet and DeepLab; narrower if all has one scale",
        ),
        Option("model.arch", "deeplabv3plus", "sharp borders for its cost (arXiv:1802.02611)"),
    ]
    if pixels.channels == 3 and pixels.dtype == "uint8":  # colours change in 8-bit RGB alone
        found.append(
            Option(
                "augment.color_prob", 0.5, "light and camera vary; 0.0 if colour tells the classes"
            )
        )
    if machine.has_gpu:
        found += [Option("model.backbone", "resnet50", "a middle way on a GPU")]
    else:
        found += [Option("model.backbone", "resnet18", "no GPU here: a small network")]
    if machine.weights:
        found.append(
            Option(
                "model.pretrained",
                machine.weights,
                "ImageNet; found on this machine or the network",
            )
        )
    stride = 8 if min(sizes) < 320 else 16
    found += [
        Option(
            "model.output_stride",
            stride,
            "8: small images" if stride == 8 else "8: finer, twice the memory",
        ),
        Option("train.steps", steps, f"{steps * batch / count:.0f} passes over {count} images"),
        Option("train.batch_size", batch, "over all devices; segtrain train --fit makes it fit"),
    ]
    if weights := class_weights(classes):
        found.append(
            Option(
                "loss.class_weights", weights, "1 / ln(1.02 + frequency), ENet (arXiv:1606.02147)"
            )
        )
    if machine.weights:
        found += [
            Option(
                "optim.lr", 0.01 * batch / 16, "0.01 for 16 images (PSPNet), scaled to the batch"
            ),
            Option("optim.weight_decay", 5e-4, "small data sets"),
            Option("schedule.warmup_steps", steps // 20, "5 %"),
        ]
    else:
        found += [
            Option(
                "optim.kind", "adamw", "from random weights, as recipe camvid_deeplabv3plus_r18"
            ),
            Option("optim.lr", 0.001, ""),
            Option("optim.weight_decay", 0.05, ""),
            Option("optim.decay_norm_and_bias", False, ""),
            Option("optim.ema_decay", 0.99 if steps < 3000 else 0.999, "averages the last steps"),
            Option("schedule.warmup_steps", steps // 20, "5 %"),
        ]
    found += [
        Option("eval.every_steps", every, "the best checkpoint is kept"),
        Option("checkpoint.every_steps", every, "what an interruption can cost at most"),
        Option("log.every_steps", min(20, every), ""),
    ]
    default = {"data.channels": 3, "data.value_range": None}
    return [one for one in found if one.key not in default or one.value != default[one.key]]


def class_weights(classes: Sequence[Class]) -> list[float] | None:
    """A weight a class with mean 1, if frequencies differ much; None: all alike."""
    pixels = np.array([one.pixels for one in classes], dtype=float)
    if pixels.min() == 0 or pixels.max() < _UNBALANCED * pixels.min():
        return None
    weights = 1 / np.log(1.02 + pixels / pixels.sum())
    weights = np.minimum(weights / weights.mean(), _LARGEST_WEIGHT)
    return [round(float(w), 2) for w in weights]
