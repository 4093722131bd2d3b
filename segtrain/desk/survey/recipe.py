"""The options of training, each with its reason; a pure function of what was decided before."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from segtrain.config.data import DataConfig
from segtrain.data.read.decode import MAX_PIXELS
from segtrain.data.read.image import ImageForm, set_dtype
from segtrain.data.read.raster import windows
from segtrain.desk.survey.class_table import Classes
from segtrain.desk.survey.contents import spread
from segtrain.desk.survey.foreground import Foreground
from segtrain.desk.survey.image_facts import ImageFacts, image_facts
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.questions import Answers, Reading, UndecidedError
from segtrain.desk.survey.splits import Splits
from segtrain.desk.survey.survey import Survey
from segtrain.errors import ConfigError, DataError
from segtrain.text import first_of

_IMAGENET = {key: DataConfig.model_fields[key].default for key in ("mean", "std")}
# Rarer than the most frequent class by this factor: the loss is weighted.
_UNBALANCED = 20
_LARGEST_WEIGHT = 10.0
_FITS = "over all devices; segtrain train --fit makes it fit"
_SMALL = "over all devices; no GPU and few images: 8 take 1.4 times as long"
_SIDES = "a mirrored left kidney or lung is a right one; 0.5 if no class has a side"
# Of fewer images a processor makes a first model within minutes.
_FEW = 64
# Images whose values are known, at least.
_LEAST_SEEN = 24


class Machine(NamedTuple):
    """What there is to train with.

    has_gpu: a CUDA device. weights: for model.pretrained, None if missing. has_bfloat16: the
        device computes in it, a CPU faster than in float32.
    """

    has_gpu: bool
    weights: str | None
    has_bfloat16: bool = False


class Option(NamedTuple):
    """A line of the config."""

    key: str  # section.key
    value: Any
    reason: str = ""


# How images are read


@dataclass(frozen=True)
class Pixels:
    """form: how images are read. options: what the config says of it."""

    form: ImageForm
    options: tuple[Option, ...]


def choose_pixels(
    survey: Survey,
    images: Sequence[Image],
    answers: Answers,
    machine: Machine,
    foreground: Foreground | None,
) -> Pixels:
    """How the images are read; one scale for all of them, that of a narrow `foreground`.

    Raises:
        ConfigError: they differ in their channels or types, or have fewer than asked for.
        UndecidedError: a fourth channel may be a band or mean nothing.
    """
    dtypes = {image.dtype for image in images}
    if len(dtypes) > 1:
        raise ConfigError(
            f"{survey.root}: images of different types: {first_of(sorted(dtypes))}; one scale "
            "cannot fit them: convert them to one"
        )
    (dtype,) = dtypes
    facts = _facts(survey, images)
    numbers = sorted({image.channels for image in images})
    channels = answers.channels or _channels(survey.root, images, numbers, facts)
    # Images that cannot be read in so many channels say nothing of the scale.
    usable = [found for sample in facts if (found := _in_channels(sample, channels))]
    if not usable:
        raise ConfigError(f"--channels {channels}: the images have {first_of(numbers)}")
    form = ImageForm(channels, set_dtype(np.dtype(dtype)))
    options = [Option("data.channels", channels, "as the files hold")] if channels != 3 else []
    if dtype != "uint8":
        low = min(value for sample in usable for value in sample.low)
        high = max(value for sample in usable for value in sample.high)
        scale = _value_range(np.dtype(dtype), low, high)
        reason = f"{dtype}; seen in {len(usable)} images: {low:g} to {high:g}"
        if foreground is not None:
            scale = foreground.value_range
            usable = [_in_channels(sample, channels) for sample in foreground.facts]
            clips = "percentiles 0.5 and 99.5 of each class, as nnU-Net clips CT"
            reason = f"{clips}; seen are {low:g} to {high:g}"
        # Whole numbers have the range of their type unless the config says another.
        if scale != form.limits or form.dtype.kind == "f":
            form = form._replace(value_range=scale)
            options.append(Option("data.value_range", list(scale), reason))
        if foreground is not None:
            options.append(Option("data.clip", True, "values beyond the range become its ends"))
    # Pretrained weights go on with the statistics that they were trained with.
    if channels == 3 and machine.weights and dtype == "uint8":
        mean, std = _IMAGENET.values()
        reason = "those of the pretrained weights (ImageNet)"
    else:
        mean, std = _statistics(usable, form)
        reason = f"of {len(usable)} images, each channel, on the scale of 0..255"
    options += [Option("data.mean", list(mean), reason), Option("data.std", list(std))]
    return Pixels(form, tuple(options))


def _facts(survey: Survey, images: Sequence[Image]) -> list[ImageFacts]:
    """Facts about a sample of the images; where few have labels, that of the survey missed them."""
    sample = [image for image in images if image.path in survey.facts]
    if len(sample) < _LEAST_SEEN:
        sample = spread(images, _LEAST_SEEN)
    facts = []
    for image in sample:
        with suppress(DataError):  # a damaged file, which is named elsewhere
            files = [survey.root / file for file in image.files]
            facts.append(survey.facts.get(image.path) or image_facts(files))
    return facts


def _channels(
    root: Path, images: Sequence[Image], numbers: list[int], facts: Sequence[ImageFacts]
) -> int:
    """The channels to train on. numbers: those of the images. facts: of a sample of them."""
    if numbers in ([1], [3], [1, 3]):
        return 3  # grey becomes RGB, as pretrained weights expect
    if any(image.alpha for image in images) and numbers[-1] <= 4:
        # Not all images have it, or it never varies: then it says nothing.
        if numbers != [4] or all(sample.std[-1] == 0 for sample in facts):
            return 3
        raise UndecidedError(
            f"{root}: images have four channels, and the fourth varies: a band, or transparency?",
            [
                Reading("a band to train on", "--channels 4"),
                Reading("transparency, left out", "--channels 3"),
            ],
        )
    if len(numbers) > 1:
        raise ConfigError(
            f"{root}: images of {first_of(numbers)} channels; one network cannot take them "
            "all: --channels 3 reads the first three, or keep those of one kind"
        )
    return numbers[0]


def _in_channels(facts: ImageFacts, channels: int) -> ImageFacts | None:
    """The facts as an image of so many channels has them; None: it has too few."""
    there = len(facts.mean)
    if there < channels != 3:
        return None
    # Grey, perhaps with alpha, becomes RGB.
    taken = [x[:1] * 3 if there < channels else x[:channels] for x in facts[:4]]
    return ImageFacts(*taken, facts.has_nan)


def _value_range(dtype: np.dtype, low: float, high: float) -> tuple[float, float]:
    """The range that becomes 0..255; whole numbers of n bits are from 0 to 2^n - 1."""
    # 12 bits in files of 16 bits: 0 to 4095.
    if dtype.kind in "ui" and low >= 0:
        return 0.0, float(2 ** max(8, int(high).bit_length()) - 1)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    return float(f"{low:.6g}"), float(f"{high:.6g}")


def _statistics(
    facts: Sequence[ImageFacts], form: ImageForm
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, in units of 0..255."""
    means, stds = (np.array([getattr(sample, key) for sample in facts]) for key in ("mean", "std"))
    mean = means.mean(axis=0)
    # The variance of all images together: within them, and between their means.
    std = np.sqrt((stds**2 + means**2).mean(axis=0) - mean**2)
    low, high = form.limits
    factor = 255 / (high - low)
    return tuple(
        tuple(round(max(float(x), least), 3) for x in channel_values)
        for channel_values, least in (((mean - low) * factor, -np.inf), (std * factor, 1e-3))
    )


# How the network is trained


def _sample_sizes(image: Image) -> list[tuple[int, int]]:
    """The sizes of what training takes for an image: of a raster, its windows."""
    if math.prod(image.size) <= MAX_PIXELS:
        return [image.size]
    return [(window.height, window.width) for window in windows(image.size)]


def choose_options(
    splits: Splits, classes: Classes, pixels: Pixels, machine: Machine, *, is_body: bool
) -> list[Option]:
    """Model, crop, batch, steps and the rest, from sizes, frequencies and the number of images.

    is_body: the images are slices of a patient, whose sides are known.
    """
    samples = [size for image in splits.train for size in _sample_sizes(image)]
    heights, widths = zip(*samples, strict=True)
    sizes = int(median(heights)), int(median(widths))
    # Of a raster each window counts as an image.
    count = len(samples)
    is_first = count < _FEW and not machine.has_gpu
    batch = min(4 if is_first else 8, max(2, count))
    passes, least, most = (100, 2000, 40_000) if machine.has_gpu else (30, 300, 1500)
    steps = int(max(least, min(most, round(count * passes / batch, -2))))
    every = max(50, steps // 10)
    is_rgb = pixels.form.channels == 3 and pixels.form.dtype == np.uint8
    return [
        *pixels.options,
        *_input_options(sizes, 512 if machine.has_gpu else 256, is_rgb),
        *([Option("augment.flip_prob", 0.0, _SIDES)] if is_body else []),
        *_model_options(sizes, machine, is_first=is_first),
        Option("train.steps", steps, f"{steps * batch / count:.0f} passes over {count} images"),
        Option("train.batch_size", batch, _SMALL if is_first else _FITS),
        *_precision_options(machine),
        *_loss_options(classes),
        *_optim_options(machine, steps, batch),
        Option("schedule.warmup_steps", steps // 20, "5 %"),
        Option("eval.every_steps", every, "the best checkpoint is kept"),
        Option("checkpoint.every_steps", every, "what an interruption can cost at most"),
        Option("log.every_steps", min(20, every)),
    ]


def _precision_options(machine: Machine) -> Iterator[Option]:
    if machine.has_bfloat16:
        device = "GPU has it: 1.6 times as fast as tf32"
        if not machine.has_gpu:
            device = "processor's convolutions are at least 1.5 times as fast as in float32"
        yield Option("train.precision", "bfloat16", f"this {device}")


def _input_options(sizes: tuple[int, int], largest: int, is_rgb: bool) -> Iterator[Option]:
    crop = [min(largest, max(64, side // 32 * 32)) for side in sizes]
    yield Option("augment.crop_size", crop, f"images are {sizes[0]}x{sizes[1]} (median), in 32s")
    scales = "as PSPNet and DeepLab; narrower if all has one scale"
    yield Option("augment.scale_range", [0.5, 2.0], scales)
    if is_rgb:  # colours change in 8-bit RGB alone
        light = "light and camera vary; 0.0 if colour tells the classes"
        yield Option("augment.color_prob", 0.5, light)


def _model_options(sizes: tuple[int, int], machine: Machine, *, is_first: bool) -> Iterator[Option]:
    yield Option("model.arch", "deeplabv3plus", "sharp borders for its cost (arXiv:1802.02611)")
    if machine.has_gpu:
        yield Option("model.backbone", "resnet50", "a middle way on a GPU")
    else:
        yield Option("model.backbone", "resnet18", "no GPU here: a small network")
    if machine.weights:
        reason = "ImageNet; found on this machine or the network"
        yield Option("model.pretrained", machine.weights, reason)
    if is_first:
        yield Option("model.output_stride", 16, "a first model within minutes; 8: finer, slower")
    elif min(sizes) < 320:
        yield Option("model.output_stride", 8, "8: small images")
    else:
        yield Option("model.output_stride", 16, "8: finer, twice the memory")


def _optim_options(machine: Machine, steps: int, batch: int) -> Iterator[Option]:
    if machine.weights:
        rate = "0.01 for 16 images (PSPNet), scaled to the batch"
        yield Option("optim.lr", 0.01 * batch / 16, rate)
        yield Option("optim.weight_decay", 5e-4, "small data sets")
    else:
        recipe = "from random weights, as recipe camvid_deeplabv3plus_r18"
        yield Option("optim.kind", "muon", recipe)
        yield Option("optim.lr", 0.002)
        yield Option("optim.weight_decay", 0.05)
        yield Option("optim.decay_norm_and_bias", False)
        yield Option("optim.ema_decay", 0.99 if steps < 3000 else 0.999, "averages the last steps")


def _loss_options(classes: Classes) -> Iterator[Option]:
    """A weight a class with mean 1, if frequencies differ much; Dice too where classes overlap."""
    if classes.all_pixels:
        dice = "each class counts as much, however few its pixels"
        yield Option("loss.also", [{"kind": "dice_linear"}], dice)
        return
    pixels = np.array([class_info.pixels for class_info in classes.classes], dtype=float)
    # A class without a pixel has no frequency.
    if 0 < _UNBALANCED * pixels.min() <= pixels.max():
        weights = 1 / np.log(1.02 + pixels / pixels.sum())
        weights = np.minimum(weights / weights.mean(), _LARGEST_WEIGHT)
        reason = "1 / ln(1.02 + frequency), ENet (arXiv:1606.02147)"
        yield Option("loss.class_weights", [round(float(w), 2) for w in weights], reason)
