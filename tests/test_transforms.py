import pickle
import random

import cv2
import numpy as np
import pytest

from segtrain.config import AugmentConfig
from segtrain.data.read.image import ImageForm
from segtrain.data.sample.geometry import (
    Placement,
    Span,
    largest_class_share,
    resample_image,
    resample_label,
)
from segtrain.data.sample.photometric import change_pixels
from segtrain.data.sample.transforms import TrainTransform, draw_placement
from segtrain.errors import ConfigError
from segtrain.types import IGNORE_INDEX

MEAN = (124.0, 116.0, 104.0)
PLAIN = {"scale_range": (1.0, 1.0), "flip_prob": 0.0}
SMOOTH_PX = 2.0


def augment(**options):
    return AugmentConfig(**{**PLAIN, **options})


def make(**options):
    return TrainTransform(augment(**options), form=ImageForm(mean=MEAN))


def rng(seed=0):
    return np.random.default_rng(seed)


def picture(height, width, seed=0):
    """A smooth random image and a label whose classes are blobs of the same smooth field."""
    noise = rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), SMOOTH_PX), None, 0, 255, cv2.NORM_MINMAX)
    return image, image[..., 0] // 32


def ramps(height, width, step=3):
    """An image that tells each pixel's place: red = step * column, green = step * row."""
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0], image[..., 1] = step * np.arange(width), step * np.arange(height)[:, None]
    return image


def placement(size, crop, *, scale=(1.0, 1.0), start=(0, 0), pad=(0, 0), angle_deg=0.0, flip=False):
    rows, columns = (
        Span(size[i], round(size[i] * scale[i]), crop[i], start[i], pad[i]) for i in (0, 1)
    )
    return Placement(rows, columns, angle_deg, flip)


def test_crops_reach_every_position_equally_often():
    label = np.zeros((12, 9), np.uint8)
    counts = np.zeros((4, 3))
    generator = rng()
    for _ in range(1500):
        drawn = draw_placement(augment(crop_size=(9, 7)), label, generator)
        counts[drawn.rows.start, drawn.columns.start] += 1
    assert counts.min() > 75  # 125 expected, standard deviation 11
    assert counts.max() < 175


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("scale", "start"), [(0.5, (10, 24)), (0.8, (10, 40)), (1.6, (25, 20))])
def test_one_resampling_equals_resizing_the_whole_image_then_cropping(scale, start, flip):
    image, label = picture(100, 160)
    crop = (32, 44)
    place = placement(label.shape, crop, scale=(scale, scale), start=start, flip=flip)
    size = (place.columns.scaled, place.rows.scaled)
    top, left = (round(scale * first) for first in start)
    window = np.s_[top : top + crop[0], left : left + crop[1]]
    whole = cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)[window]
    whole_label = cv2.resize(label, size, interpolation=cv2.INTER_NEAREST_EXACT)[window]
    if flip:
        whole, whole_label = whole[:, ::-1], whole_label[:, ::-1]
    difference = cv2.absdiff(resample_image(image, place, fill=(0, 0, 0)), whole.copy())
    # At its rim a crop does not look beyond its own source pixels.
    assert difference[1:-1, 1:-1].max() <= 1
    assert (resample_label(label, place) == whole_label).all()


def test_a_pixel_larger_than_the_crop_takes_the_memory_of_the_crop():
    place = Placement(Span(1, 200_000, 9), Span(3, 600_000, 7, start=1))
    image = np.arange(9, dtype=np.uint8).reshape(1, 3, 3)
    assert (resample_image(image, place, fill=(0, 0, 0)) == image[0, 1]).all()


@pytest.mark.fault(68)
@pytest.mark.parametrize("pixel", [(30, 40), (12, 60), (50, 25)])
def test_a_pixel_is_known_where_a_rotated_crop_shows_it(pixel):
    """Sides scaled by 2 and 0.5, so that an angle in source pixels would show."""
    image = np.zeros((61, 81, 3), np.uint8)
    image[pixel[0] - 1 : pixel[0] + 2, pixel[1] - 2 : pixel[1] + 3] = 255
    where = placement((61, 81), (122, 40), scale=(2.0, 0.5), angle_deg=25.0)
    crop = resample_image(image, where, fill=(0, 0, 0))[..., 0].astype(float)
    shown = [(crop.sum(1 - axis) * (np.arange(crop.shape[axis]) + 0.5)).sum() for axis in (0, 1)]
    row, column = where.turned(pixel)
    expected = (row * where.rows.factor, column * where.columns.factor)
    assert np.array(shown) / crop.sum() == pytest.approx(expected, abs=0.6)
    assert where.turned((0, 0)) is None


ORIENTATIONS = {
    (turns, flip): (lambda crop, turns=turns, flip=flip: np.rot90(crop, -turns)[:, :: 1 - 2 * flip])
    for turns in range(4)
    for flip in (False, True)
}


@pytest.mark.parametrize(
    ("options", "reached"),
    [
        ({}, {(0, False)}),
        ({"crop_size": (40, 60)}, {(0, False)}),
        ({"flip_prob": 1.0}, {(0, True)}),
        ({"quarter_turn_prob": 1.0}, {(1, False), (2, False), (3, False)}),
        ({"quarter_turn_prob": 0.7, "flip_prob": 0.5}, set(ORIENTATIONS)),
    ],
)
def test_flips_and_turns_are_exact_pieces_of_the_image(options, reached):
    """Also of crops that are not square, with the label, and at every angle."""
    image = ramps(40, 60)
    label = image[..., 0] ^ image[..., 1]
    found = set()
    for seed in range(60):
        crop, crop_label = make(**{"crop_size": (16, 24)} | options)(image, label, rng(seed))
        assert crop.shape == (*options.get("crop_size", (16, 24)), 3)
        assert crop.flags.c_contiguous
        left, top = crop[..., :2].min((0, 1)) // 3
        for orientation, undo in ORIENTATIONS.items():
            upright, upright_label = undo(crop), undo(crop_label)
            window = np.s_[top : top + upright.shape[0], left : left + upright.shape[1]]
            if np.array_equal(upright, image[window]):
                found.add(orientation)
                np.testing.assert_array_equal(upright_label, label[window])
    assert found == reached


def test_turns_come_after_scale_rotation_padding_and_flip():
    image, label = picture(60, 90)
    options = {"crop_size": (32, 44), "scale_range": (0.4, 2.0), "rotate_deg": 30.0}
    plain = draw_placement(augment(**options, flip_prob=0.5), label, rng(7))
    for turns in range(4):
        turned = plain._replace(turns=turns)
        for resample, source in ((resample_image, image), (resample_label, label)):
            fill = {"fill": (1, 2, 3)} if source is image else {}
            expected = np.rot90(resample(source, plain, **fill), turns)
            np.testing.assert_array_equal(resample(source, turned, **fill), expected)


@pytest.mark.parametrize("angle_deg", [0.0, 20.0])
def test_floats_move_as_train_ids_do_and_are_nan_where_these_are_ignored(angle_deg):
    _, label = picture(60, 90)
    options = {"crop_size": (70, 100), "scale_range": (0.5, 0.9), "flip_prob": 1.0}
    place = draw_placement(augment(**options), label, rng(3))._replace(angle_deg=angle_deg)
    ids = resample_label(label, place)
    assert (ids == 255).any()
    assert (ids != 255).any()
    numbers = np.stack([label, -2.5 * label], axis=2).astype(np.float32)
    found = resample_label(numbers, place)
    assert found.dtype == np.float32
    expected = np.where(ids == 255, np.nan, ids.astype(np.float32))
    np.testing.assert_array_equal(found[..., 0], expected)
    np.testing.assert_array_equal(found[..., 1], -2.5 * expected)


def test_rotated_crop_equals_rotating_the_whole_image_then_cropping():
    image, label = picture(90, 140)
    place = placement(label.shape, (40, 50), start=(30, 60), angle_deg=7.3)
    matrix = cv2.getRotationMatrix2D(((140 - 1) / 2, (90 - 1) / 2), 7.3, 1.0)
    whole = cv2.warpAffine(image, matrix, (140, 90))[30:70, 60:110]
    whole_label = cv2.warpAffine(label, matrix, (140, 90), flags=cv2.INTER_NEAREST)[30:70, 60:110]
    difference = cv2.absdiff(resample_image(image, place, fill=(0, 0, 0)), whole)
    assert difference.max() <= 4  # warpAffine may place samples to 1/32 pixel only
    assert (resample_label(label, place) != whole_label).mean() < 0.005


@pytest.mark.parametrize("seed", range(6))
def test_image_and_label_stay_within_half_a_source_pixel(seed):
    """Bilinear interpolation of a ramp is the sampled place itself, whatever the geometry."""
    image = ramps(60, 80)
    column = np.tile(np.arange(80, dtype=np.uint8), (60, 1))
    row = np.tile(np.arange(60, dtype=np.uint8)[:, None], (1, 80))
    transform = make(crop_size=(48, 56), scale_range=(0.5, 2.0), rotate_deg=45.0, flip_prob=0.5)
    crop, columns = transform(image, column, rng(seed))
    _, rows = transform(image, row, rng(seed))
    # Source pixels at the border are blended with the padding when the image is turned.
    inner = (columns > 0) & (columns < 79) & (rows > 0) & (rows < 59)
    off = np.maximum(np.abs(crop[..., 0] / 3 - columns), np.abs(crop[..., 1] / 3 - rows))[inner]
    assert inner.any()
    # Half a pixel, and the rounding of a grey level (1/6 pixel) and of coordinates (1/32).
    assert off.max() <= 0.5 + 1 / 6 + 1 / 32


def test_same_generator_gives_the_same_bytes_whatever_was_drawn_before():
    transform = make(
        crop_size=(32, 48),
        scale_range=(0.5, 2.0),
        rotate_deg=10.0,
        flip_prob=0.5,
        blur_prob=0.5,
        color_prob=0.5,
        extra=({"name": "GaussNoise"}, {"name": "RandomGamma", "args": {"p": 0.5}}),
    )
    image, label = picture(50, 70)
    before = image.copy(), label.copy()
    forward = [transform(image, label, rng(i)) for i in range(8)]
    transform = pickle.loads(pickle.dumps(transform))
    backward = [transform(image, label, rng(i)) for i in reversed(range(8))][::-1]
    for first, second in zip(forward, backward, strict=True):
        np.testing.assert_array_equal(first[0], second[0])
        np.testing.assert_array_equal(first[1], second[1])
        assert first[0].flags.c_contiguous
        assert first[1].flags.c_contiguous
    assert len({crop.tobytes() for crop, _ in forward}) == 8
    np.testing.assert_equal((image, label), before)


def test_padding_is_the_mean_colour_and_ignored_even_when_colours_change():
    image, label = picture(20, 30)
    options = {"flip_prob": 0.5, "quarter_turn_prob": 0.8}
    options |= {"crop_size": (50, 64), "color_prob": 1.0, "blur_prob": 1.0}
    transform = make(**options)
    for seed in range(12):
        crop, crop_label = transform(image, label, rng(seed))
        ignored = crop_label == IGNORE_INDEX
        assert (ignored.shape, (~ignored).sum()) == ((50, 64), 20 * 30)
        assert (crop[ignored] == MEAN).all()
        generator = rng(seed)
        unchanged = transform.crop(image, label, generator).image
        changed = change_pixels(unchanged, augment(**options), [], generator)
        assert (crop[~ignored] == changed[~ignored]).all()


def test_small_image_lies_anywhere_in_the_crop():
    label = np.ones((20, 30), np.uint8)
    places = [draw_placement(augment(crop_size=(22, 32)), label, rng(seed)) for seed in range(100)]
    assert {(p.rows.pad, p.columns.pad) for p in places} == {
        (i, j) for i in range(3) for j in range(3)
    }


def test_crop_beyond_a_turned_image_is_all_padding():
    image, label = picture(10, 400)
    place = placement(label.shape, (10, 20), angle_deg=90.0)
    assert (resample_label(label, place) == IGNORE_INDEX).all()
    assert (resample_image(image, place, fill=(1, 2, 3)) == (1, 2, 3)).all()


def test_one_class_rarely_fills_the_crop_when_its_share_is_limited():
    """A third of the positions show one class too much; 11 of them in a row hardly happen."""
    label = np.zeros((32, 128), np.uint8)
    label[:, 48:] = np.arange(80) % 3
    image = np.zeros((32, 128, 3), np.uint8)

    def shares(limit):
        transform = make(crop_size=(24, 16), max_class_share=limit)
        crops = [transform(image, label, rng(seed))[1] for seed in range(100)]
        return np.array([np.bincount(crop.ravel()).max() / crop.size for crop in crops])

    assert (shares(1.0) > 0.75).sum() > 25
    assert (shares(0.75) <= 0.75).all()


def test_ignored_pixels_do_not_count_for_the_share_of_a_class():
    label = np.full((16, 96), IGNORE_INDEX, np.uint8)
    label[:, 40], label[:, 41] = 1, 2
    transform = make(crop_size=(16, 48), max_class_share=0.9)
    for seed in range(30):
        crop = transform(np.zeros((16, 96, 3), np.uint8), label, rng(seed))[1]
        assert {1, 2} <= set(np.unique(crop))
    whole = placement((16, 96), (16, 96))
    assert largest_class_share(label, whole) == 0.5
    assert largest_class_share(np.full_like(label, IGNORE_INDEX), whole) == 1


def test_flip_scale_and_rotation_have_their_distributions():
    options = augment(crop_size=(64, 64), scale_range=(0.5, 2.0), rotate_deg=10.0, flip_prob=0.5)
    label = np.zeros((1000, 2000), np.uint8)
    generator = rng()
    drawn = [draw_placement(options, label, generator) for _ in range(2000)]
    scales = np.sort([place.rows.scaled / 1000 for place in drawn])
    angles = np.array([place.angle_deg for place in drawn])
    # Distance of the empirical from the uniform distribution; 1.95 / sqrt(n): Kolmogorov, 0.1 %.
    assert np.abs(scales - np.linspace(0.5, 2.0, 2000)).max() / 1.5 < 1.95 / 2000**0.5
    turned = angles[angles != 0]
    assert abs(len(turned) / 2000 - 0.5) < 0.04
    assert np.abs(np.sort(turned) - np.linspace(-10, 10, len(turned))).max() / 20 < 0.087
    assert abs(np.mean([place.flip for place in drawn]) - 0.5) < 0.04


def test_short_side_sets_the_size_that_scale_one_means():
    place = draw_placement(
        augment(crop_size=(8, 8)), np.zeros((120, 90), np.uint8), rng(), short_side_px=45
    )
    assert (place.rows.scaled, place.columns.scaled) == (60, 45)


def test_blur_is_the_five_pixel_gaussian():
    image, label = picture(30, 40)
    crop, _ = make(crop_size=(30, 40), blur_prob=1.0)(image, label, rng())
    np.testing.assert_array_equal(crop, cv2.GaussianBlur(image, (5, 5), 0))


def test_each_extra_transform_tosses_its_own_coin():
    """albumentations' set_random_seed would give all transforms of a Compose the same stream."""
    extra = (
        {"name": "InvertImg", "args": {"p": 0.5}},
        {"name": "Posterize", "args": {"num_bits": 1, "p": 0.5}},
    )
    transform = make(crop_size=(4, 5), extra=extra)
    image, label = np.full((4, 5, 3), 200, np.uint8), np.zeros((4, 5), np.uint8)
    found = [transform(image, label, rng(i)) for i in range(60)]
    results = {int(crop[0, 0, 0]) for crop, _ in found}
    assert results == {200, 55, 128, 0}
    assert not np.any([crop_label for _, crop_label in found])


def edge_shift_px(name, **args):
    """By how many columns a transform moves the image at most: where its edge at column 37 goes.

    The area under the profile across the edge, which a symmetric blur leaves as it is.
    """
    transform = getattr(pytest.importorskip("albumentations"), name)(**args)
    image, shifts = np.full((48, 160, 3), 70, np.uint8), []
    image[:, 37:] = 180
    for seed in range(16):
        transform.set_random_state(rng(seed), random.Random(seed))
        profile = transform(image=image, force_apply=True)["image"][8:40, 7:67].mean((0, 2))
        low, high = profile[:6].mean(), profile[-6:].mean()
        shifts.append(30 - ((profile - low) / (high - low)).sum())
    return np.abs(shifts).max()


STILL = {"allow_shifted": False, "direction_range": (0, 0)}


@pytest.mark.parametrize(
    ("name", "moving", "way"),
    [
        ("MotionBlur", {}, r"give it args: \{allow_shifted: false, direction_range: \[0, 0\]\}"),
        ("MotionBlur", STILL | {"allow_shifted": True}, "give it args"),
        ("MotionBlur", {"allow_shifted": False, "blur_limit": (15, 15)}, "give it args"),
        ("Downscale", {"scale_range": (0.3, 0.3)}, "remove it"),
        ("GlassBlur", {}, "remove it"),
        ("ZoomBlur", {}, "remove it"),
    ],
)
def test_an_extra_transform_that_moves_the_image_under_its_label_is_refused(name, moving, way):
    assert edge_shift_px(name, **moving) > 0.5
    said = rf"augment\.extra\[0\] \({name}\): moves the image and leaves its label .*; {way}"
    with pytest.raises(ConfigError, match=said):
        make(crop_size=(16, 20), extra=({"name": name, "args": moving},))


def test_motion_blur_about_each_pixel_is_taken():
    make(crop_size=(16, 20), extra=({"name": "MotionBlur", "args": STILL},))
    assert edge_shift_px("MotionBlur", **STILL, blur_limit=(15, 15)) < 0.02


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("GausianBlur", {}, "not an ImageOnlyTransform of albumentations"),
        ("HorizontalFlip", {}, "may move pixels or change labels"),
        ("GaussNoise", {"std_rang": (0.1, 0.2)}, "std_rang'"),
        ("GaussNoise", {"std_range": (0.1, 7.0)}, "std_range"),
        ("Normalize", {}, r"returns float32 \(16, 20, 3\): expected uint8"),
        ("FDA", {}, "metadata"),
    ],
)
def test_an_extra_transform_that_cannot_be_used_is_refused_with_the_reason(name, args, said):
    extra = {"name": "InvertImg"}, {"name": name, "args": args}
    with pytest.raises(ConfigError, match=rf"^augment\.extra\[1\] \({name}\): .*{said}"):
        make(crop_size=(16, 20), extra=extra)
