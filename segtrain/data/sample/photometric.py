"""Changes of a training crop that leave every pixel in its place.

Brightness and contrast change each value by itself: together they are one table of 256 values.
Saturation is one 3x3 matrix. Hue is an addition between two conversions.

The extra transforms are done by albumentations. Its own seeding would repeat the same draws in
every loader worker and epoch, and give all transforms of a Compose the same stream. So each call
hands the caller's generator to them.
"""

import os
import random
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import cv2
import numpy as np

from segtrain import plugins
from segtrain.config import AugmentConfig, ExtraTransform
from segtrain.config.loading import yaml_value
from segtrain.data.read.image import ImageForm
from segtrain.data.sample.geometry import by_bands
from segtrain.errors import ConfigError

# ITU-R BT.601, as cv2.COLOR_RGB2GRAY and torchvision.
_LUMA = np.array([0.299, 0.587, 0.114])
_HUE_CIRCLE = 180  # of cv2.COLOR_RGB2HSV for bytes, also in mmsegmentation


class ColorChange(NamedTuple):
    """What changes, in this order; the defaults change nothing.

    brightness: added to all values, which are 0..255. contrast: the factor of all values.
    saturation: 0 is grey, 1 the image, and between and beyond them what lies on their line.
    hue: a rotation of the colour circle, as a share of it.
    """

    brightness: float = 0.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0


def draw_color_change(augment: AugmentConfig, rng: np.random.Generator) -> ColorChange:
    """A random change: each of the four is left out with probability 1 - `augment.color_prob`."""

    def drawn(largest: float) -> float:
        return rng.uniform(-largest, largest) if rng.random() < augment.color_prob else 0.0

    brightness, contrast, saturation, hue = map(drawn, augment.color_jitter)
    return ColorChange(255 * brightness, 1 + contrast, 1 + saturation, hue)


def change_colors(image: np.ndarray, change: ColorChange) -> np.ndarray:
    """The changed image, (H, W, 3) uint8 RGB; `image` itself is not changed.

    Values beyond 0..255 are clipped after each change, and rounded to the nearest whole number
    after contrast, saturation and hue. The hue turns by whole 180ths of the circle.
    """
    if (change.brightness, change.contrast) != (0, 1):
        brighter = np.clip(np.arange(256) + change.brightness, 0, 255)
        table = np.rint(np.clip(brighter * change.contrast, 0, 255)).astype(np.uint8)
        image = cv2.LUT(image, table)
    if change.saturation != 1:
        matrix = change.saturation * np.eye(3) + (1 - change.saturation) * _LUMA
        # Of 8-bit images cv2.transform is fixed-point arithmetic with 10 bits.
        image = cv2.transform(image, matrix)
    turn = round(change.hue * _HUE_CIRCLE) % _HUE_CIRCLE
    if turn:
        image = _turn_hue(image, turn)
    return image


def _turn_hue(image: np.ndarray, turn: int) -> np.ndarray:
    """The image with `turn` added to its hue, in 180ths of the circle."""
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    turned, same = (np.arange(256) + turn) % _HUE_CIRCLE, np.arange(256)
    table = np.stack([turned, same, same], axis=1).astype(np.uint8)  # (256, 3)
    cv2.LUT(hsv, table[None], dst=hsv)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=hsv)


_BLUR_KERNEL_PX = (5, 5)  # semseg, util/transform.py RandomGaussianBlur


def change_pixels(
    image: np.ndarray, augment: AugmentConfig, extra: Sequence[Any], rng: np.random.Generator
) -> np.ndarray:
    """The image after blur, brightness, contrast, saturation, hue, then the `extra` transforms.

    Each is applied with its own probability. Brightness adds a part of 255 and contrast multiplies
    the values, as in mmsegmentation's PhotoMetricDistortion. Saturation blends with the grey image
    and hue turns the colour circle, as in torchvision's ColorJitter. An extra transform without `p`
    has albumentations' default of 0.5.

    Blur takes images of any form; colours change in 8-bit RGB, extra transforms take 8 bits.

    (H, W, C), `image` itself if nothing was drawn for it. Every number comes from `rng`.
    """
    if augment.blur_prob and rng.random() < augment.blur_prob:
        image = by_bands(lambda band: cv2.GaussianBlur(band, _BLUR_KERNEL_PX, 0), image)
    if augment.color_prob:
        image = change_colors(image, draw_color_change(augment, rng))
    if extra:
        # A transform draws from both generators.
        py_random = random.Random(int(rng.integers(2**63)))
        for transform in extra:
            transform.set_random_state(rng, py_random)
            image = transform(image=image)["image"]
    return image


def extra_transforms(augment: AugmentConfig, form: ImageForm) -> list[Any]:
    """The transforms that `augment.extra` names, in order, each tried on a noise image of `form`.

    Raises:
        ConfigError: one cannot be used; with its index in `augment.extra`. Or `augment` changes
            values of 0..255, and images of this form have others.
    """
    if form.dtype != np.uint8:
        for key in ("color_prob", "extra"):
            if getattr(augment, key):
                what = f"takes 8-bit images, and those of the data set are {form.dtype}; remove it"
                raise ConfigError(f"augment.{key}: {what}")
    if not augment.extra:
        return []
    # Without this the import asks PyPI for a newer version. It takes seconds, so it is made here.
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    import albumentations

    made = []
    for i, extra in enumerate(augment.extra):
        try:
            made.append(_tried(albumentations, extra, (*augment.crop_size, form.channels)))
        except Exception as error:  # foreign code may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"augment.extra[{i}] ({extra.name}): {reason}") from error
    return made


# The image-only transforms that move an image under its label by more than half a pixel, found with
# edges in all of them (albumentations 2.0.8), and the arguments with which they do not.
_MOVING: dict[str, dict[str, Any] | None] = {
    "Downscale": None,
    "GlassBlur": None,
    "MotionBlur": {"allow_shifted": False, "direction_range": (0, 0)},
    "ZoomBlur": None,
}


def _tried(albumentations: ModuleType, extra: ExtraTransform, shape: tuple[int, ...]) -> Any:
    """The transform, run once: some need more inputs, or return floats or another size."""
    kind, plugin = getattr(albumentations, extra.name, None), plugins.find("transform", extra.name)
    if plugin is not None:
        if kind is not None:
            raise TypeError(f"is albumentations' and that of {plugin.source}; rename the latter")
        kind = plugin.made
    if not (isinstance(kind, type) and issubclass(kind, albumentations.ImageOnlyTransform)):
        what = "not an ImageOnlyTransform of albumentations, or derived from it"
        raise TypeError(f"{what}; others may move pixels or change labels")
    # albumentations warns about unknown arguments and wrong values, and leaves them out.
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        transform = kind(**extra.args)
    still = _MOVING.get(extra.name, {})
    if still is None or any(getattr(transform, key) != value for key, value in still.items()):
        way = f"give it args: {yaml_value(still)}" if still else "remove it"
        raise ValueError(f"moves the image and leaves its label where it is; {way}")
    rng = np.random.default_rng(0)
    transform.set_random_state(rng, random.Random(0))
    noise = rng.integers(0, 256, shape, dtype=np.uint8)
    result = transform(image=noise, force_apply=True)["image"]
    if (result.dtype, result.shape) != (np.uint8, shape):
        raise TypeError(f"returns {result.dtype} {result.shape}: expected uint8 {shape} as given")
    return transform
