"""Palettes of labels that contradict the class file or each other: ids are indices, not colours."""

import numpy as np
import pytest
from PIL import Image
from test_data_check import assert_fine, checked, finding, kinds, quickly_checked, rows, write_pair

from segtrain.data.read.classes import default_palette
from segtrain.errors import DataError

COLORS = [(70, 130, 180), (128, 64, 128), (0, 0, 142)]
WITH_COLORS = (
    "classes:\n"
    "  - {name: sky, color: [70, 130, 180]}\n"
    "  - {name: road, color: [128, 64, 128]}\n"
    "  - {name: car, color: [0, 0, 142]}\n"
)


@pytest.fixture
def root(tmp_path):
    """Three training and two validation pairs with the ids 0, 1 and 2."""
    for i, name in enumerate("abcde"):
        write_pair(tmp_path, "train" if i < 3 else "val", name, rows(0, 1, 2), seed=i)
    (tmp_path / "toy.yaml").write_text("classes: [sky, road, car]\n")
    return tmp_path


def write_labels(root, colors_of, *, split="*"):
    """All labels as palette images, with the colours that `colors_of` says of file number i."""
    for i, path in enumerate(sorted(root.glob(f"labels/{split}/*.png"))):
        label = Image.fromarray(rows(0, 1, 2).astype(np.uint8), mode="P")
        label.putpalette([value for color in colors_of(i) for value in color])
        label.save(path)


def quantize_labels(root):
    """Labels in the right colours, each reduced to a palette by itself, as Pillow does it."""
    shares = [(0, 1, 2), (1, 1, 1, 0, 2), (2, 2, 2, 2, 0, 1), (1, 0, 2), (2, 2, 1, 1, 0)]
    for values, path in zip(shares, sorted(root.glob("labels/*/*.png")), strict=True):
        rgb = np.array(COLORS, np.uint8)[rows(*values)]
        Image.fromarray(rgb).quantize(3, method=Image.Quantize.FASTOCTREE).save(path)
        with Image.open(path) as label:  # the colours are right in each
            assert (np.array(label.convert("RGB")) == rgb).all()


def test_quantized_labels_contradict_each_other_and_the_colours_of_the_class_file(root):
    quantize_labels(root)
    assert ("train", "palettes") in kinds(checked(root), "warning")
    warnings = quickly_checked(root)
    assert any("the same colours at different indices" in line for line in warnings)
    (root / "toy.yaml").write_text(WITH_COLORS)
    result = checked(root)
    assert not result.ok
    found = {one.split: one for one in result.findings if one.kind == "palette"}
    assert "set data.label_format: colors" in found["train"].text
    assert len(found["train"].places) > 1
    with pytest.raises(DataError, match=r"that contradicts class file toy.*label_format: colors"):
        quickly_checked(root)
    assert checked(root, label_format="colors").ok


def test_a_colour_that_moved_is_a_warning_also_where_colours_are_missing(root):
    write_labels(root, lambda i: [*COLORS[1:], (9, 9, 9)] if i == 1 else COLORS)
    result = checked(root)
    assert kinds(result, "warning") == {("train", "palettes")}
    assert "[128, 64, 128] is 1 in a and 0 in b" in finding(result, "palettes").text
    write_labels(root, lambda i: [(0, 0, 0), (10 * i, 1, 1), (3, 10 * i, 3)])
    assert_fine(root)


def test_an_ignored_index_with_the_colour_of_a_class_is_refused(root):
    classes = WITH_COLORS.replace("142]}", "142], ids: [3]}") + "ignore_ids: [2]\n"
    (root / "toy.yaml").write_text(classes)
    write_labels(root, lambda i: COLORS)
    result = checked(root)
    said = "index 2 is ignored, but has the color [0, 0, 142] of 'car'"
    assert result.findings[0].places == {said: ["a", "b", "c"]}


@pytest.mark.parametrize(
    "palette",
    [
        [(i, i, i) for i in range(256)],
        default_palette(256),
        COLORS,
        [(0, 0, 0)] * 256,
        [*COLORS, COLORS[0]],  # only indices that occur count
    ],
)
def test_palettes_that_say_nothing_else_pass(root, palette):
    if len(palette) < 256:
        (root / "toy.yaml").write_text(WITH_COLORS)
    elif palette[1] == (1, 1, 1):  # a grey ramp, where a class is black
        (root / "toy.yaml").write_text(WITH_COLORS.replace("128, 64, 128", "0, 0, 0"))
    write_labels(root, lambda i: palette)
    assert_fine(root)
