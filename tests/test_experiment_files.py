"""What `segtrain init` writes: names of files that are hard to write down, and labels it draws."""

import os
import shutil

import numpy as np
import pytest
from folders import COLORS, assert_same_division, images_in, labels_of, quick_init, save, scene
from PIL import Image as Picture

from segtrain.config import load_config
from segtrain.desk.commands.init import WEIGHT_FILES
from segtrain.desk.survey.contents import spread
from segtrain.run.directory import CONFIG


@pytest.fixture(autouse=True)
def no_network_and_no_contact_sheet(monkeypatch):
    quick_init(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def words(folder):
    return "init", folder, "--output", folder.with_name("made"), "--jobs", "1"


def as_stored(classes):
    return classes


def one_hot(classes):
    """What training cannot read, so that it is drawn."""
    return np.eye(4, dtype=np.uint8)[classes]


def write(folder, names, make=as_stored):
    """An image and a label of each name; the classes by the path of the image."""
    truth = {}
    for i, name in enumerate(names):
        pixels, truth[f"images/{name}.png"] = scene(i)
        save(folder / f"images/{name}.png", pixels)
        suffix = "npy" if make is one_hot else "png"
        save(folder / f"labels/{name}.{suffix}", make(truth[f"images/{name}.png"]))
    return truth


HARD = [
    "# a",
    " b",
    "c, d",
    "e;f",
    'g"h',
    "i  j",
    "'k'",
    "l'm",
    "ñ 木",
    "~",
    "$HOME",
    "%s{0}",
    "a:b",
]


@pytest.mark.parametrize("make", [as_stored, one_hot])
def test_names_of_any_characters_train_with_their_own_labels(folder, lab, words, make):
    truth = write(folder, HARD, make)
    lab.done(*words)
    assert_same_division(labels_of(folder.with_name("made"))[0], truth)


def test_an_image_that_a_list_would_take_for_a_comment_or_an_address_trains(folder, lab, words):
    truth = {}
    for i, name in enumerate(["#1", " 2", "3", "C:", "5", "6"]):
        pixels, truth[f"{name}/image.png"] = scene(i)
        save(folder / f"{name}/image.png", pixels)
        save(folder / f"{name}/mask.png", truth[f"{name}/image.png"])
    lab.done(*words)
    assert_same_division(labels_of(folder.with_name("made"))[0], truth)


@pytest.mark.parametrize("name", ["a\nb", "a\u202fb", b"a\xff", "a#xywh=0,0,9,9"])
def test_a_name_that_no_list_can_hold_is_refused_before_labels_are_drawn(folder, lab, words, name):
    write(folder, [*"123456", os.fsdecode(name)], one_hot)
    said = lab.refused(*words, code=3)
    assert f"{folder}: names hold control characters, special blanks, " in said
    assert said.rstrip().endswith("; rename these files")


def test_labels_that_are_drawn_may_lie_in_a_folder_of_any_name(folder, lab, words):
    truth = write(folder, "123456", one_hot)
    (folder / "labels").rename(folder / "labels\nof 1")
    lab.done(*words)
    assert_same_division(labels_of(folder.with_name("made"))[0], truth)


def test_the_folder_of_the_experiment_may_have_any_name(folder, lab):
    truth = write(folder, "123456", one_hot)
    output = lab.folder / "o #1, {x}: 'a' \"b\"+c\t~$HOME\n- d"
    lab.done("init", folder, "--output", output, "--jobs", "1")
    assert_same_division(labels_of(output)[0], truth)


@pytest.mark.parametrize("make", [as_stored, one_hot])
def test_images_with_one_name_but_for_the_suffix_are_refused(folder, lab, words, make):
    write(folder, "1234567", make)
    suffix = "npy" if make is one_hot else "png"
    Picture.open(folder / "images/7.png").save(folder / "images/1.bmp")
    (folder / "images/7.png").unlink()
    names = [*(f"{i}.png" for i in range(1, 7)), "1.bmp"]
    lines = (f"images/{name}\tlabels/{i}.{suffix}\n" for i, name in enumerate(names, start=1))
    (folder / "pairs.txt").write_text("".join(lines))
    said = lab.refused(*words, code=3)
    assert "images with one name but for the suffix: images/1." in said
    assert "rename all but one of each name" in said


def test_labels_of_names_that_differ_in_case_are_drawn_to_files_of_their_own(folder, lab, words):
    truth = write(folder, ["a", "A", "b", "B", "c", "d"], one_hot)
    lab.done(*words)
    drawn = [path.name.casefold() for path in folder.with_name("made").glob("labels/images/*")]
    assert len(set(drawn)) == len(drawn) == 6
    assert_same_division(labels_of(folder.with_name("made"))[0], truth)


def test_a_folder_of_the_same_name_elsewhere_is_not_taken_for_the_one_that_is_trained(
    folder, lab, monkeypatch
):
    monkeypatch.chdir(lab.folder)
    write(folder, "123456")
    write(lab.folder / "other/data", "123456")
    lab.done("init", "data")
    said = lab.refused("train", "other/data")
    assert "data_segtrain/config.yaml: is of " in said
    assert "and not of other/data; segtrain init other/data --output OTHER makes" in said


def test_few_labelled_images_among_many_are_those_whose_scale_is_taken(folder, lab, words):
    """A sample of all images has none of them."""
    number = 420
    missed = sorted({*range(number)} - {*spread(range(number), 200)})
    for i, path, classes in images_in(folder, "images/{i:04}.tif", number):
        image = np.full((64, 80), i, np.uint16)
        if i in missed[:8]:
            save(folder / f"labels/{i:04}.png", classes)
            image = scene(i)[0][..., 0].astype(np.uint16) * 16
        save(folder / path, image)
    lab.done(*words, "--leave-out", "images")
    assert load_config(folder.with_name("made") / CONFIG).data.value_range == (0, 4095)


def test_colours_some_of_which_are_transparent_are_drawn(folder, lab, words):
    """The first file has no alpha channel."""
    truth = write(folder, "123456", lambda classes: COLORS[classes])
    opaque = np.where(truth["images/4.png"] > 0, 255, 0).astype(np.uint8)
    save(folder / "labels/4.png", np.dstack([COLORS[truth["images/4.png"]], opaque]))
    lab.done(*words)
    assert_same_division(labels_of(folder.with_name("made"))[0], truth)


def test_files_of_weights_are_those_that_torchvision_downloads():
    from torchvision.models import get_model_weights

    for name, file in WEIGHT_FILES.items():
        assert get_model_weights(name)["IMAGENET1K_V1"].url.endswith(f"/{file}")


def test_a_dry_run_may_name_the_working_directory(folder, lab, monkeypatch):
    write(folder, "123456")
    place = lab.folder / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    lab.done("init", folder, "--dry-run", "--output", ".")
    assert [path.name for path in place.iterdir()] == ["here_samples.png"]
    shutil.rmtree(place)


def test_a_question_of_a_dry_run_leaves_its_pictures_and_goes_on_in_the_output(
    folder, lab, monkeypatch
):
    """With the answers that were given before."""
    truth = write(folder, "123456")
    for path in truth:
        pixels = np.array(Picture.open(folder / path))
        save(folder / path, np.dstack([pixels, pixels[..., 0]]))
    monkeypatch.chdir(lab.folder)
    outcome = lab.command("init", "data", "--dry-run", "--output", "o p", "--val", "0.3")
    assert outcome.code == 2
    assert "pictures: o p_reading_1.png\n" in outcome.err
    assert "segtrain init data --val 0.3 --output 'o p', and one of them goes on" in outcome.err
    assert {path.name for path in lab.folder.iterdir()} == {"data", "o p_reading_1.png"}
