import pytest

from segtrain.checkpoint.format import experiment_fields
from segtrain.config import Config, DataConfig
from segtrain.data.read.classes import (
    ClassFile,
    SegClass,
    class_file_from_json,
    default_palette,
    load_class_file,
)
from segtrain.errors import ConfigError
from segtrain.run.pictures import raw_ids
from segtrain.types import IGNORE_INDEX


def load(tmp_path, text):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return load_class_file(str(path))


def refusal(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def test_names_alone_are_enough_and_defaults_give_way_to_what_is_given(tmp_path):
    found = load(tmp_path, "classes: [background, crack, spalling]")
    assert [one.ids for one in found.classes] == [(0,), (1,), (2,)]
    assert found.palette == [(0, 0, 0), (128, 0, 0), (0, 128, 0)]
    assert (found.ignore_ids, found.ignore_color) == ((IGNORE_INDEX,), (224, 224, 192))
    found = load(tmp_path, "classes: [a, {name: b, color: [0, 0, 0]}, c]")
    assert found.palette == [(128, 0, 0), (0, 0, 0), (0, 128, 0)]
    found = load(tmp_path, "classes: [{name: no, ids: [0]}, {name: cell, ids: [255]}]")
    assert found.ignore_ids == ()
    assert load(tmp_path, "classes: [a]\nignore_color: [9, 9, 9]").ignore_color == (9, 9, 9)
    assert found.train_id_of == {0: 0, 255: 1}


SUCH_AS = "such as 'classes: [background, crack]'"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("classes:\n- a\n- b\n- a\n", ["4: classes[2].name: a is also the name of class 0"]),
        (
            "classes: [{name: a, color: [1, 2, 3]}, {name: b, more_colors: [[1, 2, 3]]}]\n"
            "ignore_ids: [1, 5, 5]\n",
            [
                "1: classes[1].more_colors: [1, 2, 3] is also the color of a",
                "2: ignore_ids: 1 is also an id of b",
                "2: ignore_ids: 5 is also an id of what is ignored",
            ],
        ),
        ("classes:\n- {name: a, category: x}\n- b\n", ["1: classes: a category is given for some"]),
        (
            "classes:\n- {name: a, color: [256, 0, 0]}\n- {nam: c}\n",
            [
                "2: classes[0].color[0]: must be less than or equal to 255, got 256",
                "3: classes[1].name: is required",
                "3: classes[1].nam: unknown key; did you mean 'name'?",
            ],
        ),
        ("- a\n- b\n", [f"1: a list at the top; expected keys and values, {SUCH_AS}"]),
    ],
)
def test_every_mistake_is_listed_with_its_line(tmp_path, text, lines):
    for found, line in zip(refusal(tmp_path, text), lines, strict=True):
        assert found.startswith(f"own.yaml:{line}")


def test_255_classes_fit_and_256_do_not(tmp_path):
    text = "ignore_ids: []\nclasses: [" + ", ".join(f"c{i}" for i in range(255))
    found = load(tmp_path, text + "]")
    assert len({*found.palette, found.ignore_color}) == 256
    (line,) = refusal(tmp_path, text + ", c255]")
    assert "classes: must have at most 255 items, got " in line


@pytest.mark.parametrize(
    ("ids", "ignore_ids", "written"),
    [
        ([(0,), (1,)], (255,), 255),
        ([(0,), (1, 255)], (), 254),  # 255 would be read as the second class
        ([(0, 7), (1,)], (300, 9), 9),
        ([(0,), (300,)], (299,), 299),
        ([(0, *range(2, 256)), (1,)], (), 256),
    ],
)
def test_no_class_has_the_id_of_pixels_without_a_prediction(ids, ignore_ids, written):
    classes = tuple(SegClass(f"c{i}", (i, i, i), one) for i, one in enumerate(ids))
    found = ClassFile("own", classes, ignore_ids=ignore_ids, ignore_color=(9, 9, 9))
    assert found.write_ignored == written
    assert raw_ids(found)[[0, 1, 255]].tolist() == [ids[0][0], ids[1][0], written]


def test_the_default_palette_is_that_of_pascal_voc():
    """The colours in the development kit's documentation of its 21 classes."""
    voc = load_class_file("voc")
    assert default_palette(21) == voc.palette
    assert voc.palette[20] == (0, 64, 128)
    assert default_palette(256)[255] == (224, 224, 192)
    assert len(set(default_palette(256))) == 256


def test_cityscapes_agrees_with_the_official_scripts():
    labels = pytest.importorskip("cityscapesscripts.helpers.labels").labels
    official = pytest.importorskip("cityscapesscripts.evaluation.evalPixelLevelSemanticLabeling")
    found = load_class_file("cityscapes")
    for label in labels:
        if label.id >= 0:
            assert found.train_id_of[label.id] == label.trainId
        if 0 <= label.trainId < IGNORE_INDEX:
            one = found.classes[label.trainId]
            assert (one.name, one.color, one.ids) == (label.name, label.color, (label.id,))
            assert one.category == label.category
            expected = official.args.avgClassSize[label.name] if label.hasInstances else None
            assert one.instance_px == expected


def test_a_checkpoint_keeps_further_colors_and_no_key_that_is_unused():
    """An older version refuses keys that it does not know."""
    config = Config(data=DataConfig(layout="camvid", root=".", classes="camvid"))
    for name in ("camvid_colors", "cityscapes"):
        stored = experiment_fields(config, load_class_file(name))["classes"]
        assert class_file_from_json(stored) == load_class_file(name)
        assert ("more_colors" in stored) == (name == "camvid_colors")
        assert "category" not in stored
        assert "instance_px" not in stored


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cityscape", r"named 'cityscape'; did you mean cityscapes\?$"),
        (
            "zzz",
            "expected one of ade20k, camvid, camvid_colors, cityscapes, street_scenes, voc, or a",
        ),
        ("TMP/zebra.yaml", r"data\.classes: .*zebra\.yaml: cannot be read: no such file"),
    ],
)
def test_a_file_that_is_not_there_is_named_with_the_nearest(tmp_path, name, said):
    with pytest.raises(ConfigError, match=said):
        load_class_file(name.replace("TMP", str(tmp_path)))


def test_labels_in_colours_need_the_colour_of_each_class(tmp_path):
    """By default colours, which are those of VOC's palette, classes would be swapped in silence."""
    path = tmp_path / "own.yaml"
    path.write_text(
        "classes:\n- {name: road, color: [0, 0, 0]}\n- crack\n- {name: sky, ids: [9]}\n"
    )
    assert load_class_file(str(path)).num_classes == 3
    with pytest.raises(ConfigError, match="these classes have no `color`: crack, sky"):
        load_class_file(str(path), needs_colors=True)
