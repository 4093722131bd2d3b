"""How an image becomes a prediction: the settings of inference, from a config or by hand."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from segtrain.config import Config
from segtrain.models.normalize import Color
from segtrain.models.precision import autocast_dtype, for_evaluation

Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class InferenceSettings:
    """How an image becomes a prediction.

    crop_size: (height, width) of the sliding window; unused in mode `whole`.
    overlap: the part of a window that its neighbour repeats, in [0, 1).
    scales: sizes of the views relative to the image after `short_side_px`.
    short_side_px: the image is first resized to this short side; None: it keeps its size.
    align_corners: how score maps are resized, as inside the model.
    mean, std: the normalization, in units of 0..255.
    autocast: dtype of mixed precision; None: the model's own.
    tf32: products of float32 numbers are rounded to TF32; said only, see `float32_products`.
    batch_size: views or windows that go through the network together; None: see `batch_limits`.
    """

    mode: Literal["whole", "slide"] = "whole"
    crop_size: Size = (512, 512)
    overlap: float = 1 / 3
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    short_side_px: int | None = None
    align_corners: bool = False
    mean: Color
    std: Color
    autocast: torch.dtype | None = None
    tf32: bool = False
    batch_size: int | None = None

    @property
    def num_views(self) -> int:
        """How many score maps are averaged; a sliding window averages its own mirror image."""
        return len(self.scales) * (2 if self.flip and self.mode == "whole" else 1)

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
            autocast=autocast_dtype(precision),
            tf32=precision.precision == "tf32",
            batch_size=config.eval.batch_size,
        )

    def to_dict(self) -> dict[str, Any]:
        """The settings for JSON: `autocast` is the name of its dtype, or None."""
        autocast = None if self.autocast is None else str(self.autocast).removeprefix("torch.")
        return {**asdict(self), "autocast": autocast}

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
        if self.autocast is not None:
            parts.append(str(self.autocast).removeprefix("torch.") + " autocast")
        if self.tf32:
            parts.append("TF32 if the device has it")
        return "; ".join(parts)


def view_size(size: Sequence[int], short_side_px: int | None, scale: float) -> Size:
    """The (height, width) of a view of an image of `size`; sides are rounded, and at least 1."""
    base = 1.0 if short_side_px is None else short_side_px / min(size)
    height, width = (max(1, math.floor(side * base * scale + 0.5)) for side in size)
    return height, width


def view_sizes(size: Sequence[int], settings: InferenceSettings) -> list[Size]:
    """The (height, width) of the view of each scale, for an image of `size`."""
    return [view_size(size, settings.short_side_px, scale) for scale in settings.scales]
