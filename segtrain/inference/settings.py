"""How an image becomes a prediction: the settings of inference, from a config or by hand.

A device that computes small views one by one is idle between them. On a CPU batches help small
windows only: PSPNet on ResNet-18 takes 0.6 of the time for windows of 64x96 in fours, 0.95 for
257x257, and 1.1 for whole images of 512x1024.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from segtrain.config import Config, override_config
from segtrain.config.loading import given_key, given_keys
from segtrain.errors import ConfigError
from segtrain.models.blocks import Values
from segtrain.models.memory import memory_bytes, rank_bytes
from segtrain.models.precision import autocast_dtype, for_evaluation
from segtrain.task.contract import Decoding
from segtrain.task.tasks import task_of

Size = tuple[int, int]


def set_after_training(
    trained: Config, overrides: Sequence[str], settable: tuple[str, ...], *, source: str
) -> Config:
    """The config of a checkpoint with `overrides`, of which each begins with one of `settable`.

    Raises:
        ConfigError: an option that the checkpoint decides, or one that does not exist.
    """
    # A metric is of no use here, where eval.metrics may be others.
    if trained.eval.best_metric is not None:
        best = {"best": trained.any_best}
        trained = trained.model_copy(update={"eval": trained.eval.model_copy(update=best)})
    config = override_config(trained, overrides, source=source)
    foreign = [text for text in overrides if not text.strip().startswith(settable)]
    if foreign:
        what = f"the checkpoint decides this; only {', '.join(settable)} can be set"
        raise ConfigError("\n".join(f"--set {text}: {what}" for text in foreign))
    if idle := sorted(given_keys(overrides) & {"eval.best", "eval.every_steps"}):
        raise ConfigError(f"--set {idle[0]}: is about evaluations while a model is trained")
    check_eval_precision(overrides, config)
    return config


@dataclass(frozen=True, kw_only=True)
class InferenceSettings:
    """How an image becomes a prediction.

    crop_size: (height, width) of the sliding window; unused in mode `whole`.
    overlap: the part of a window that its neighbour repeats, in [0, 1).
    scales: sizes of the views relative to the image after `short_side_px`.
    flip: views are also mirrored left to right.
    short_side_px: the image is first resized to this short side; None: it keeps its size.
    align_corners: how score maps are resized, as inside the model.
    mean, std, value_range, clip: the normalization, see `segtrain.models.blocks.normalize`.
    autocast: dtype of mixed precision; None: the model's own.
    tf32: products of float32 numbers are rounded to TF32 on CUDA.
    batch_size: views or windows that go through the network together; None: see `batch_limits`.
    task: what the network was trained for.
    thresholds: the probability from which a class is predicted where classes overlap, one for all
        or one a class; None: there are none.
    """

    mode: Literal["whole", "slide"] = "whole"
    crop_size: Size = (512, 512)
    overlap: float = 1 / 3
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    short_side_px: int | None = None
    align_corners: bool = False
    mean: Values
    std: Values
    value_range: tuple[float, float] | None = None
    clip: bool = False
    autocast: torch.dtype | None = None
    tf32: bool = False
    batch_size: int | None = None
    task: str = "semantic"
    thresholds: tuple[float, ...] | None = None

    @property
    def decoding(self) -> Decoding:
        """What becomes of scores."""
        return task_of(self.task).decoding(self.thresholds)

    @property
    def num_views(self) -> int:
        """How many score maps are averaged; a sliding window averages its own mirror image."""
        mirrored = 2 if self.flip and self.mode == "whole" else 1
        return len(self.scales) * mirrored

    @property
    def gives_logits(self) -> bool:
        """Whether scores are the network's logits; otherwise they are mean probabilities."""
        return self.mode == "whole" and self.num_views == 1

    @classmethod
    def from_config(cls, config: Config) -> "InferenceSettings":
        """The settings of an experiment; the window defaults to the training crop."""
        precision = for_evaluation(config)
        return cls(
            mode=config.eval.mode,
            crop_size=config.eval.crop_size or config.augment.crop_size,
            overlap=config.eval.overlap,
            scales=config.eval.scales,
            flip=config.eval.flip,
            short_side_px=config.data.short_side_px,
            align_corners=config.model.align_corners,
            mean=config.data.mean,
            std=config.data.std,
            value_range=config.data.value_range,
            clip=config.data.clip,
            autocast=autocast_dtype(precision),
            tf32=precision.precision == "tf32",
            batch_size=config.eval.batch_size,
            task=config.task,
            thresholds=task_of(config.task).thresholds(config.eval.thresholds),
        )

    def to_dict(self) -> dict[str, Any]:
        """The settings for JSON: `autocast` is the name of its dtype, or None."""
        autocast = None if self.autocast is None else str(self.autocast).removeprefix("torch.")
        fields = {**asdict(self), "autocast": autocast}
        del fields["task"]  # no question of how a prediction is made
        return fields

    def describe(self) -> str:
        """One line for people: `sliding window 713x713, overlap 0.33; scale 1; with flip`."""
        how = "whole image"
        if self.mode == "slide":
            height, width = self.crop_size
            how = f"sliding window {height}x{width}, overlap {self.overlap:.2f}"
        parts = [how]
        if self.short_side_px is not None:
            parts.append(f"short side {self.short_side_px} px")
        parts.append("scale " + " ".join(f"{s:g}" for s in self.scales))
        parts.append("with flip" if self.flip else "no flip")
        parts += filter(None, [self.decoding.describe()])
        if self.autocast is not None:
            parts.append(str(self.autocast).removeprefix("torch.") + " autocast")
        return "; ".join(parts)


def view_size(size: Sequence[int], short_side_px: int | None, scale: float) -> Size:
    """The (height, width) of a view of an image of `size`; sides are rounded, and at least 1."""
    base = 1.0 if short_side_px is None else short_side_px / min(size)
    # Rounded first: 45 * 0.7 is slightly less than 31.5, and must become 32 pixels.
    height, width = (max(1, math.floor(round(side * base * scale, 6) + 0.5)) for side in size)
    return height, width


def view_sizes(size: Sequence[int], settings: InferenceSettings) -> list[Size]:
    """The (height, width) of the view of each scale, for an image of `size`."""
    return [view_size(size, settings.short_side_px, scale) for scale in settings.scales]


# Twice the pixels of an image of Cityscapes. Larger images go by windows: the memory for a whole
# image grows with its pixels.
MAX_WHOLE_PIXELS = 2**22

# The least sides of these windows if eval.crop_size does not set them. A training crop may be tiny:
# 12 megapixels would take thousands of windows, most of them border.
LARGE_WINDOW_PX = 1024


# The least output stride of a network: a smaller view is a part of a feature.
_LEAST_VIEW_PX = 8


class SettingsBySize(NamedTuple):
    """The usual settings, and those for images that are too large for them.

    most_pixels: of an image with the usual settings, at scale 1.
    fitting_pixels: of its largest view, for which the device has memory.
    """

    usual: InferenceSettings
    large: InferenceSettings
    most_pixels: float = MAX_WHOLE_PIXELS
    fitting_pixels: float = math.inf

    @classmethod
    def from_config(
        cls, config: Config, *, mode_is_given: bool, fitting_pixels: float = math.inf
    ) -> "SettingsBySize":
        """mode_is_given: the user has set `eval.mode`, which then holds for all images."""
        usual = InferenceSettings.from_config(config)
        if mode_is_given:
            return cls(usual, usual)
        # Windows become larger than the training crop only if the user has not chosen their size.
        widened = usual.mode == "whole" and config.eval.crop_size is None
        large = _in_windows(usual, fitting_pixels) if widened else replace(usual, mode="slide")
        return cls(usual, large, MAX_WHOLE_PIXELS, fitting_pixels)

    @classmethod
    def that_fit(cls, usual: InferenceSettings, fitting_pixels: float) -> "SettingsBySize":
        """`usual` wherever the memory suffices."""
        large = usual if usual.mode == "slide" else _in_windows(usual, fitting_pixels)
        return cls(usual, large, math.inf, fitting_pixels)

    def of(self, size: Size) -> InferenceSettings:
        """The settings for an image of `size`, (height, width).

        Raises:
            ConfigError: a scale leaves next to nothing of it.
        """
        sides = view_size(size, self.usual.short_side_px, 1.0)
        scale = min(self.usual.scales)
        least = view_size(size, self.usual.short_side_px, scale)
        # An image that is itself so small is no fault of a scale.
        if min(least) < _LEAST_VIEW_PX <= min(sides):
            raise ConfigError(
                f"eval.scales: {scale:g} makes {least[0]}x{least[1]} pixels of an image of "
                f"{sides[0]}x{sides[1]}; views need {_LEAST_VIEW_PX} a side"
            )
        largest = view_size(size, self.usual.short_side_px, max(self.usual.scales))
        fits = self.usual.mode == "slide" or math.prod(largest) <= self.fitting_pixels
        if math.prod(sides) <= self.most_pixels and fits:
            return self.usual
        # A narrow image is not padded up to LARGE_WINDOW_PX: the border would change the result.
        height, width = (
            min(window, max(crop, side))
            for window, crop, side in zip(
                self.large.crop_size, self.usual.crop_size, sides, strict=True
            )
        )
        return replace(self.large, crop_size=(height, width))

    def describe(self) -> str:
        """Both on one line, for people."""
        if self.usual == self.large:
            return self.usual.describe()
        windows = self.large.describe().partition(";")[0]
        # `fitting_pixels` is of the largest view, and this of the image at scale 1.
        most = min(self.most_pixels, self.fitting_pixels / max(self.usual.scales) ** 2)
        return f"{self.usual.describe()}; above {most / 1e6:.1f} megapixels {windows}"


def _in_windows(whole: InferenceSettings, fitting_pixels: float) -> InferenceSettings:
    height, width = (max(side, LARGE_WINDOW_PX) for side in whole.crop_size)
    # Without the memory for such windows, those of the training crop.
    if height * width > fitting_pixels:
        height, width = whole.crop_size
    return replace(whole, mode="slide", crop_size=(height, width))


# More hardly help, and each image of a batch is decoded and kept.
_MOST_VIEWS = 8

# Of one image on a CPU, where neighbouring images share no batch.
_MOST_VIEWS_CPU, _MOST_PIXELS_CPU = 4, 300_000

# What one batch may take of the device's memory; weights and other programs need some too.
_MEMORY_PART = 1 / 4

# Bytes a pixel of a view: features in float32 (the recipes' models take up to 970 with 19 classes,
# which `tests/test_batches.py` counts; kernels take more for themselves); and for each class the
# logits, their probabilities, the same at the size of the label, and their sum over views.
_FEATURES, _CLASS = 1536, 16


class BatchLimits(NamedTuple):
    """The sizes of batches.

    num_images: neighbouring images whose views may share a batch.
    num_views: the most views or windows in a batch. num_pixels: the most of all of them together.
    """

    num_images: int
    num_views: int
    num_pixels: float = math.inf

    def of(self, size: Size) -> int:
        """The most views of `size`, (height, width), in a batch; one always goes."""
        return int(max(1, min(self.num_views, self.num_pixels // math.prod(size))))


# A process of torch that has read a model, without the model.
_PROCESS = 3 << 28
# Weights, their averages, gradients and the two moments of AdamW: prediction chooses as training.
_COPIES = 5


def fitting_pixels(model: nn.Module, device: torch.device, num_classes: int, ranks: int) -> float:
    """The largest view for which `device` has memory, shared by `ranks` if it is a CPU."""
    there = rank_bytes(device, ranks) if device.type == "cpu" else memory_bytes(device)
    there -= _PROCESS + _COPIES * sum(p.nbytes for p in model.parameters())
    return there / (_FEATURES + _CLASS * num_classes)


def batch_limits(
    settings: InferenceSettings, device: torch.device, num_classes: int
) -> BatchLimits:
    """Those that `settings` ask for, or else what suits `device` and its memory."""
    if settings.batch_size is not None:
        return BatchLimits(settings.batch_size, settings.batch_size)
    if device.type == "cpu":
        return BatchLimits(1, _MOST_VIEWS_CPU, _MOST_PIXELS_CPU)
    bytes_a_pixel = _FEATURES + _CLASS * num_classes
    num_pixels = _MEMORY_PART * memory_bytes(device) // bytes_a_pixel
    return BatchLimits(_MOST_VIEWS, _MOST_VIEWS, num_pixels)


def check_eval_precision(overrides: Sequence[str], config: Config) -> None:
    """Refuses a train.precision of the command line that eval.precision takes the place of.

    overrides: `section.key=value`, which `config` has already taken in.
    """
    given = [text for text in overrides if given_key(text) == "train.precision"]
    if given and config.eval.precision is not None:
        raise ConfigError(
            f"--set {given[-1].strip()}: no effect with eval.precision {config.eval.precision}; "
            "set eval.precision instead, or to null"
        )
