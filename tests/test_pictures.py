import cv2
import numpy as np
import pytest
from PIL import Image

from segtrain.run.pictures import (
    class_labels,
    error_map,
    legend,
    overlay,
    panel,
    text_mask,
    write_png,
)
from segtrain.types import IGNORE_INDEX

NAMES = ["road", "sky", "car"]
PALETTE = [(128, 64, 128), (70, 130, 180), (0, 0, 142)]


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def labels(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 3, (height, width), dtype=np.uint8)


def test_overlay_mixes_by_opacity_and_leaves_ignored_pixels_and_a_black_class_clear():
    """Tinted with black, the background would be half as bright."""
    image, label = noise(4, 6), labels(4, 6)
    label[0, 0] = IGNORE_INDEX
    palette = [(0, 0, 0), (0, 200, 0), (0, 0, 1)]
    picture = overlay(image, label, palette, alpha=0.25)
    clear = (label == 0) | (label == IGNORE_INDEX)
    assert np.array_equal(picture[clear], image[clear])
    for i in (1, 2):  # nearly black is a colour
        expected = image[label == i] * 0.75 + np.array(palette[i]) * 0.25
        assert np.abs(picture[label == i] - expected).max() <= 1
    assert np.array_equal(overlay(image, label, palette, alpha=0.0), image)


@pytest.mark.parametrize("width", [60, 150, 700])
def test_legend_shows_every_colour_and_is_as_wide_as_asked(width):
    palette = [*PALETTE[:2], (0, 0, 0)]
    picture = legend(NAMES, palette, width)
    assert picture.shape[1] == width
    for color in palette:
        assert (picture == color).all(axis=2).sum() > 100


@pytest.fixture(params=["newest", "old"])
def opencv(request, monkeypatch):
    """With the font of OpenCV 5, or without, as in version 4."""
    if request.param == "old":
        monkeypatch.delattr(cv2, "FontFace", raising=False)
    elif not hasattr(cv2, "FontFace"):
        pytest.skip("needs OpenCV 5")


@pytest.mark.parametrize("width", [45, 90])
def test_names_that_are_cut_or_in_letters_that_a_font_lacks_stay_different(opencv, width):
    for names in (["a long name of a class 1", "a long name of a class 2"], ["हिन्दी", "مدينة"]):
        picture = legend(class_labels(names), [(9, 9, 9)] * 2, width)
        assert picture.shape[1] == width
        rows = [picture[4 + 20 * i : 24 + 20 * i].tobytes() for i in range(2)]
        assert rows[0] != rows[1]
    assert class_labels(["road", "砂"]) == ["0 road", "1 砂"]
    assert class_labels(["road", "砂"], (7, 300)) == ["7 road", "300 砂"]


def test_all_letters_of_a_line_are_on_it(opencv):
    mask = text_mask("Ågjpqy|", 14)
    assert mask.any(axis=0).sum() > 30
    assert not mask[0].any()
    assert not mask[-1].any()


def test_panel_shows_title_image_errors_and_their_colours_in_their_places():
    arguments = (noise(40, 90), labels(40, 90), labels(40, 90, 1))
    plain = panel(*arguments, palette=PALETTE, names=NAMES)
    titled = panel(*arguments, palette=PALETTE, names=NAMES, title="a city/a very long name")
    added = len(titled) - len(plain)
    assert added > 0
    assert np.array_equal(titled[added:], plain)
    assert (titled[:added] != titled[0, -1]).any()
    image, label, pred = arguments
    top = next(y for y in range(len(plain)) if np.array_equal(plain[y : y + 40, :90], image))
    assert np.array_equal(plain[top : top + 40, -90:], error_map(label, pred))
    words = ["errors: wrong", "errors: right", "errors: ignored"]
    colors = error_map(np.array([[0, 0, IGNORE_INDEX]], np.uint8), np.array([[1, 0, 0]], np.uint8))
    key = legend(words, colors[0].tolist(), plain.shape[1])
    assert np.array_equal(plain[-len(key) :], key)
    tall = panel(noise(700, 90), labels(700, 90), labels(700, 90), palette=PALETTE, names=NAMES)
    assert tall.shape[1] == 4 * 66 + 3 * 6  # 512 px high


def test_written_pictures_are_read_back_as_they_were(tmp_path):
    path = tmp_path / "new folder" / ("ö" * 125 + ".png")  # 254 bytes; a disk takes 255
    for picture in (noise(5, 7), labels(5, 7), labels(5, 7).astype(np.uint16) * 20_000):
        write_png(path, picture)
        assert np.array_equal(np.array(Image.open(path)), picture)
        assert list(path.parent.iterdir()) == [path]
