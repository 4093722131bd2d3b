"""Conventions of pairs: each reads the folder of its docstring, and claims are compared."""

import re

import cv2
import numpy as np
import pytest
from folders import labels_of, quick_init, save, scene

from segtrain.cli import table
from segtrain.desk.survey.affixes import parse_names
from segtrain.desk.survey.conventions.examples import example
from segtrain.desk.survey.pairs import CONVENTIONS, match, with_pairs
from segtrain.desk.survey.questions import Answers, UndecidedError
from segtrain.desk.survey.survey import survey


@pytest.fixture(autouse=True)
def no_network_and_no_contact_sheet(monkeypatch):
    quick_init(monkeypatch)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_the_folder_of_a_convention_is_read_by_it_among_all_others(name, tmp_path):
    """Pictures and masks are drawn as the docstring has them; the survey asks all conventions."""
    images, labels = example(CONVENTIONS[name].module.__doc__)
    for i, image in enumerate(images):
        pixels = scene(i)[0]
        save(tmp_path / image.path, pixels[..., 0] if image.path.endswith(".tif") else pixels)
    for k, label in enumerate(labels):
        mask = np.zeros((64, 80), np.uint8)
        mask[6 * k : 6 * k + 9, 8 * k : 8 * k + 20] = 255
        save(tmp_path / label.path, mask)
    claim = CONVENTIONS[name].module.claim(images, labels)
    # One label for several images is asked about.
    answers = Answers(pairs=name if claim.shared else None)
    found = {
        (file, path)
        for one in survey(tmp_path, answers).sets
        for path, files in one.labels.items()
        for file in files
    }
    assert claim.owners.keys() == {label.path for label in labels}
    shared = {(label, image) for label, others in claim.shared.items() for image in others}
    assert found == {*claim.owners.items(), *shared}


@pytest.mark.parametrize(("number", "most"), [(2, 4), (6, 4), (9, 2)])
def test_images_of_one_label_are_asked_about_and_stay_on_one_side(lab, number, most):
    """Fixed cameras, with a mask each; a hash of single images would divide them."""
    sizes = [most if most > 2 or k % 3 < 2 else 1 for k in range(number)]
    folder, made, truth = lab.folder / "data", lab.folder / "made", {}
    for k in range(number):
        mask = scene(k, 2)[1]
        save(folder / f"masks/{k + 40}.png", mask * 255)
        for i in range(sizes[k]):
            noise = np.random.default_rng(9 * k + i).normal(0, 20, (64, 80, 3))
            pixels = (mask[..., None] * 120 + 60 + noise).clip(0, 255).astype(np.uint8)
            name = f"{k + 40}/{(k * 7919 + i * 104729 + 4099) % 65521:04x}.png"
            save(folder / name, pixels)
            truth[name] = mask
    words = "init", folder, "--output", made, "--jobs", "1"
    asked = lab.command(*words).err
    assert f"masks/40.png is called as the folder of {most} images, such as 40/" in asked
    said = lab.done(*words, "--pairs", "scenes").out
    total = sum(sizes)
    assert f"{number + total} files: {total} images, {number} labels\n" in said
    found, _ = labels_of(made)
    assert found.keys() == truth.keys()
    assert all((found[name] == truth[name]).all() for name in truth)
    lines = [(made / f"{split}.txt").read_text() for split in ("train", "val")]
    cameras = [{*re.findall(r"^(\d+)/", text, re.MULTILINE)} for text in lines]
    assert cameras[0].isdisjoint(cameras[1])
    assert "near-duplicate" not in said


def pairs(images, labels):
    names = parse_names([*images, *labels])
    return match(names[: len(images)], names[len(images) :])[1]


def test_labels_of_one_kind_follow_one_convention_and_those_of_another_another():
    """masks/3.png is of 3.jpg, and objects/3/1.png as well."""
    images = [f"images/{i}.jpg" for i in range(8)]
    masks = [f"masks/{i}.png" for i in range(8)]
    objects = [f"gt_objects/{i}/{k}.png" for i in range(8) for k in range(2 + i % 2)]
    wanted = {
        image: sorted([masks[i], *(x for x in objects if x.startswith(f"gt_objects/{i}/"))])
        for i, image in enumerate(images)
    }
    assert pairs(images, [*masks, *objects]).labels == wanted


def test_a_lone_picture_above_all_is_the_image_of_no_label():
    labels = [f"masks/{x}.png" for x in "uvwxyz"]
    found = pairs(["logo.jpg", *(f"images/{x}.jpg" for x in "abcdef")], labels)
    assert (found.labels, found.alone) == ({}, labels)


def test_numbers_of_objects_are_no_images():
    """obj_1_3.png is perhaps of 1.jpg, and not of 3.jpg."""
    labels = [f"masks/obj_{i}_{k}.png" for i in range(5) for k in range(3)]
    assert pairs([f"images/{i}.jpg" for i in range(5)], labels).labels == {}


def test_a_label_that_fits_two_images_is_unclear_although_no_convention_accounts_for_any():
    found = pairs(["img/s1/1.jpg", "img/s2/1.jpg"], ["gt/1.png"])
    assert (found.labels, found.unclear, found.alone) == ({}, ["gt/1.png"], [])


def test_only_conventions_that_no_other_beats_are_asked_about():
    """Equal names give an image to the first label alone, and so do both others, which go on."""
    images = [f"img/img_{i}x.jpg" for i in (1, 2, 4)]
    labels = ["masks/img_1x/img_1x_mask.png", "masks/img_2x/img_4x_part2.png"]
    with pytest.raises(UndecidedError, match="2 ways to find the images of labels") as error:
        pairs(images, labels)
    inside, folders = error.value.readings
    assert (inside.option, inside.files) == ("--pairs inside", ("img/img_4x.jpg", labels[1]))
    assert (folders.option, folders.files) == ("--pairs folders", ("img/img_2x.jpg", labels[1]))


def test_a_label_whose_image_a_list_gives_another_one_is_alone():
    """labels/0.png has the name of 0.jpg, and the list gives it fix0.png."""
    images, labels = ["images/0.jpg", "images/1.jpg"], ["labels/0.png", "labels/1.png"]
    fixed = ["labels/fix0.png"]
    names = parse_names([*images, *labels, *fixed])
    matches = match(names[:2], names[2:])[1]
    pattern_of = {name.path: "labels/*.png" for name in names}
    found = with_pairs(matches, names[:2], {"images/0.jpg": "labels/fix0.png"}, pattern_of)
    assert found.labels == {"images/0.jpg": fixed, "images/1.jpg": ["labels/1.png"]}
    assert found.alone == ["labels/0.png"]


def test_how_far_each_convention_came_is_said():
    found = pairs(["a/1.jpg", "a/2.jpg"], ["b/1.png", "b/7.png"])
    assert found.tried == ["image and label have one name: 1 of 2 labels"]


def test_two_ways_to_pair_are_shown_as_pictures_and_answered(tmp_path, lab):
    """masks/3/1.png is of 3.jpg, or of 1.jpg in a folder of the class 3."""
    for i in range(8):
        pixels, classes = scene(i, 2)
        save(tmp_path / f"data/images/{i}.jpg", pixels)
        _, objects = cv2.connectedComponents(classes)
        for k in range(8):
            # Further files show nothing.
            save(tmp_path / f"data/masks/{i}/{k}.png", np.uint8(objects == k + 1) * 255)
    words = "init", tmp_path / "data", "--output", tmp_path / "made", "--jobs", "1"
    said = lab.command(*words).err
    assert "2 ways to find the images of labels" in said
    shown = [cv2.imread(str(path)) for path in sorted((tmp_path / "made").iterdir())]
    assert len(shown) == 2
    # An image and a label beside it.
    assert all(picture.shape == (260, 520, 3) for picture in shown)
    assert "expected words of named, names" in lab.command(*words, "--pairs", "folder").err
    lab.done(*words, "--pairs", "folders,named")
    found, _ = labels_of(tmp_path / "made")
    for i in range(8):
        np.testing.assert_array_equal(found[f"images/{i}.jpg"], scene(i, 2)[1])


def test_a_label_with_the_names_of_two_images_is_of_neither():
    images = [f"images/{x}.jpg" for x in ("cat", "tree", "fox")]
    found = pairs(images, ["masks/cat_tree.png", "masks/fox_a.png"])
    assert (found.unclear, found.labels) == (
        ["masks/cat_tree.png"],
        {"images/fox.jpg": ["masks/fox_a.png"]},
    )


def test_the_command_line_knows_each_convention():
    """Its table imports none of the desk, so it has their names once more."""
    assert {*table._PAIRS} == {"named", *CONVENTIONS}
