"""Predicting images of any size: large images by sliding windows, the others as configured."""

from dataclasses import replace
from typing import NamedTuple

from segtrain.config import Config
from segtrain.evaluation.settings import InferenceSettings, Size, view_size

# Twice the pixels of an image of Cityscapes. Larger images go by windows: the memory for a whole
# image grows with its pixels.
MAX_WHOLE_PIXELS = 2**22

# The least sides of these windows if eval.crop_size does not set them. A training crop may be tiny:
# 12 megapixels would take thousands of windows, most of them border.
LARGE_WINDOW_PX = 1024


class SettingsBySize(NamedTuple):
    """The settings for images of up to MAX_WHOLE_PIXELS, and those for larger images."""

    usual: InferenceSettings
    large: InferenceSettings

    @classmethod
    def from_config(cls, config: Config, *, mode_is_given: bool) -> "SettingsBySize":
        """mode_is_given: the user has set `eval.mode`, which then holds for all images."""
        usual = InferenceSettings.from_config(config)
        if mode_is_given:
            return cls(usual, usual)
        height, width = usual.crop_size
        if usual.mode == "whole" and config.eval.crop_size is None:
            height, width = max(height, LARGE_WINDOW_PX), max(width, LARGE_WINDOW_PX)
        return cls(usual, replace(usual, mode="slide", crop_size=(height, width)))

    def of(self, size: Size) -> InferenceSettings:
        """The settings for an image of `size`, (height, width)."""
        sides = view_size(size, self.usual.short_side_px, 1.0)
        if sides[0] * sides[1] <= MAX_WHOLE_PIXELS:
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
        return f"{self.usual.describe()}; above {MAX_WHOLE_PIXELS / 1e6:.1f} megapixels {windows}"
