"""Changes of colour against their definition in float64 arithmetic."""

import numpy as np
import pytest

from segtrain.config import AugmentConfig
from segtrain.data.sample.photometric import ColorChange, change_colors, draw_color_change

GREYS = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(8, 32, 3)
# A whole number after each part of a change: half a grey level of error.
ROUNDING = 0.5
# OpenCV holds the matrix in 1024ths: three products of 255 at most, each off by half of one.
FIXED_POINT = 3 * 255 * 0.5 / 1024
# Half of 1/180 circle is 1/60 of a sixth of it, in which a value goes from 0 to 255. Saturation and
# result are whole numbers, too, and OpenCV divides by tables of 12 bits.
HUE = 255 / 60 + 2 * ROUNDING + 1.25


def noise(height=53, width=71, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def scaled(values, brightness, contrast):
    return np.clip(np.clip(values + brightness, 0, 255) * contrast, 0, 255)


def saturated(values, factor):
    grey = (values * [0.299, 0.587, 0.114]).sum(axis=-1, keepdims=True)
    return np.clip(grey + factor * (values - grey), 0, 255)


def turned(values, share):
    """HSV by its definition (A. R. Smith, 1978), with `share` of the circle added to the hue."""
    red, green, blue = np.moveaxis(values.astype(float), -1, 0)
    value, chroma = values.max(axis=-1), np.ptp(values, axis=-1)
    divisor = np.where(chroma == 0, 1, chroma)
    sixths = np.where(
        value == red,
        (green - blue) / divisor,
        np.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sixths = sixths + 6 * share
    parts = []
    for offset in (5, 3, 1):
        k = (offset + sixths) % 6
        parts.append(value - chroma * np.clip(np.minimum(k, 4 - k), 0, 1))
    return np.stack(parts, axis=-1)


def largest_error(result, exact):
    assert result.dtype == np.uint8
    return np.abs(result - exact).max()


@pytest.mark.parametrize(
    ("brightness", "contrast"),
    [(31.9, 1.0), (-31.9, 1.0), (0.0, 0.53), (40.7, 1.49), (-77, 1.3), (60, 0.6)],
)
def test_brightness_is_added_and_clipped_before_contrast_multiplies(brightness, contrast):
    change = ColorChange(brightness=brightness, contrast=contrast)
    exact = scaled(GREYS.astype(float), brightness, contrast)
    assert largest_error(change_colors(GREYS, change), exact) <= ROUNDING + 1e-9


@pytest.mark.parametrize("factor", [0.0, 0.83, 1.21, 2.0])
@pytest.mark.parametrize("width", [1, 7, 71])
def test_saturation_blends_with_the_grey_of_bt601(factor, width):
    image, change = noise(width=width), ColorChange(saturation=factor)
    exact = saturated(image.astype(float), factor)
    assert largest_error(change_colors(image, change), exact) <= ROUNDING + FIXED_POINT
    np.testing.assert_array_equal(change_colors(GREYS, change), GREYS)


@pytest.mark.parametrize("turn", [-90, -18, -1, 1, 5, 18, 60, 90])
def test_hue_turns_the_circle_of_hsv(turn):
    image, change = noise(), ColorChange(hue=turn / 180)
    exact = turned(image, turn / 180)
    result = change_colors(image, change)
    assert largest_error(result, exact) <= HUE
    assert np.abs(result - exact).mean() < 2 * ROUNDING
    np.testing.assert_array_equal(change_colors(GREYS, change), GREYS)


def test_the_hue_is_rounded_to_the_nearest_step_in_both_directions():
    image = np.array([[[200, 0, 0], [0, 90, 0], [0, 0, 255], [80, 80, 0]]], np.uint8)
    third = change_colors(image, ColorChange(hue=1 / 3))
    np.testing.assert_array_equal(third, image[..., [2, 0, 1]])
    red = np.array([[[255, 0, 0]]], np.uint8)
    step = 255 / 30  # what 1/180 of the circle adds to green or blue
    for share, green, blue in [(0.51, 1, 0), (1.49, 1, 0), (-0.49, 0, 0), (-0.51, 0, 1)]:
        result = change_colors(red, ColorChange(hue=share / 180))
        assert largest_error(result, [[[255, green * step, blue * step]]]) <= 1


def test_all_changes_come_in_the_order_of_mmsegmentation_with_contrast_early():
    image = noise()
    change = ColorChange(brightness=30.0, contrast=1.4, saturation=0.6, hue=0.1)
    lighter = scaled(image.astype(float), 30.0, 1.4)
    exact = turned(saturated(lighter, 0.6), 0.1)
    # Each part passes the error of those before it on, at most 0.6 + 0.4 and 1 times.
    assert largest_error(change_colors(image, change), exact) <= HUE + 2 * ROUNDING + FIXED_POINT
    other = turned(scaled(saturated(image.astype(float), 0.6), 30.0, 1.4), 0.1)
    assert np.abs(exact - other).max() > 20


def test_no_change_returns_the_pixels_and_any_change_leaves_its_input_alone():
    image = noise()
    before = image.copy()
    np.testing.assert_array_equal(change_colors(image, ColorChange()), before)
    for change in ({"contrast": 1.3}, {"saturation": 0.4}, {"hue": 0.2}):
        assert (change_colors(image, ColorChange(**change)) != before).any()
        np.testing.assert_array_equal(image, before)


def test_each_change_is_drawn_for_itself_and_uniformly():
    augment = AugmentConfig(color_prob=0.25, color_jitter=(0.1, 0.4, 0.3, 0.05))
    rng, number = np.random.default_rng(0), 8000
    drawn = np.array([draw_color_change(augment, rng) for _ in range(number)])
    offsets = (drawn - ColorChange()) / [25.5, 0.4, 0.3, 0.05]
    changed = offsets != 0
    assert np.abs(changed.mean(axis=0) - 0.25).max() < 0.02  # 4 standard deviations
    assert np.abs(np.corrcoef(changed.T) - np.eye(4)).max() < 0.05
    for column in range(4):
        sizes = np.sort(offsets[changed[:, column], column])
        # Distance from the uniform distribution; 1.95 / sqrt(n): Kolmogorov, 0.1 %.
        uniform = np.linspace(-1, 1, len(sizes))
        assert np.abs(sizes - uniform).max() / 2 < 1.95 / len(sizes) ** 0.5
