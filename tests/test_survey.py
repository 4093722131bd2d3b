"""Folders in which a guess trains wrong: each is read as its truth, pixel by pixel, or refused."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

import cv2
import numpy as np
import pytest
import tifffile
import yaml
from folders import (
    COLORS,
    NAMES,
    assert_same_division,
    images_in,
    labels_of,
    quick_init,
    save,
    scene,
    write,
)
from PIL import Image as Picture
from PIL import ImageOps

from segtrain.config import load_config
from segtrain.data import open_dataset
from segtrain.data.read.classes import load_class_file
from segtrain.data.read.decode import to_stored
from segtrain.data.read.find import Window
from segtrain.data.read.find_tiles import tile_boxes
from segtrain.data.read.georeference import MapPlace, other_place, place_of
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.rims import blended_pixels
from segtrain.data.read.sources import source_of, sources_of
from segtrain.data.read.tiles import TileBox, overlapping
from segtrain.desk.survey.affixes import parse_names
from segtrain.desk.survey.balance import balance
from segtrain.desk.survey.choose_set import choose_labels
from segtrain.desk.survey.class_ids import train_ids
from segtrain.desk.survey.class_table import Class, Classes
from segtrain.desk.survey.contents import LabelFacts, ValueFacts
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.label_sets import label_sets
from segtrain.desk.survey.pairs import Matches
from segtrain.desk.survey.questions import Answers, UndecidedError
from segtrain.desk.survey.splits import Splits, choose_splits
from segtrain.desk.survey.survey import Survey, survey
from segtrain.errors import ConfigError, DataError

SLOW = pytest.mark.slow("desk", "data")


@pytest.fixture(autouse=True)
def no_network_and_no_contact_sheet(monkeypatch):
    quick_init(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def words(folder):
    """The words of init on the folder; what it has made before is deleted."""

    def words(*more):
        output = folder.with_name("made")
        shutil.rmtree(output, ignore_errors=True)
        return "init", folder, "--output", output, "--jobs", "1", *more

    return words


@pytest.fixture
def init(lab, folder, words):
    """Runs init with more words; the labels that training sees, and what was said."""

    def run(*more):
        said = lab.done(*words(*more)).out
        return labels_of(folder.with_name("made"))[0], said

    return run


@pytest.fixture
def refused(lab, words):
    return lambda *more, code=2: lab.refused(*words(*more), code=code)


@pytest.fixture
def asked(lab, folder, words):
    """The question that init stops with; its pictures are gone."""

    def run():
        outcome = lab.command(*words())
        assert outcome.code == 2
        assert "and one of them goes on" in outcome.err
        assert all(path.match("reading_*") for path in folder.with_name("made").iterdir())
        return outcome.err

    return run


@pytest.fixture
def config_of(lab, folder):
    """A config by hand, of images/{train,val} and labels/{train,val}, and its class file."""

    def made(classes, **more):
        path = lab.folder / "classes.yaml"
        path.write_text(yaml.safe_dump({"classes": classes, **more}))
        return lab.config(folder, data={"layout": "folders", "classes": str(path)})

    return made


def names(folder):
    return load_class_file(str(folder.with_name("made") / "classes.yaml")).names


def disc(seed, radius=9):
    """A disc somewhere in (64, 80) bool."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((64, 80), np.uint8)
    cv2.circle(mask, (int(rng.integers(20, 60)), int(rng.integers(20, 44))), radius, 1, -1)
    return mask > 0


def save_indexed(path, label, palette):
    """A PNG of these indices (H, W) and colours (N, 3)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Picture.fromarray(label.astype(np.uint8), mode="P")
    picture.putpalette(np.asarray(palette, np.uint8).tobytes())
    picture.save(path)


def mask_of(shown):
    return np.where(shown, 255, 0).astype(np.uint8)


def assert_labels(found, truth):
    assert found.keys() == truth.keys()
    for name, label in truth.items():
        np.testing.assert_array_equal(found[name], label, err_msg=name)


def paired(folder):
    """The survey, and the label files of each image by its path."""
    found = survey(folder)
    return found, {path: x for one in found.sets for path, x in one.labels.items()}


# Bands in files of their own

BANDS = [
    ("scene{i:02}/B{k:02}.tif", "scene{i:02}/mask.tif"),
    ("scenes/scene{i:02}/B{k:02}.tif", "labels/scene{i:02}.tif"),
    ("train/{i}x/B{k:02}.tif", "train_labels/{i}x_mask.png"),
    pytest.param("data/{i}x/B{k:02}.tif", "data/{i}x/label.png", marks=SLOW),
    pytest.param("train_{name}/{name}_{i:03}.tif", "train_gt/gt_{i:03}.tif", marks=SLOW),
    ("B{k:02}/{i:03}.tif", "masks/{i:03}.png"),
    ("{city}/{i:03}_B{k:02}.tif", "masks/{city}/{i:03}.png"),
    (
        "train_{name}/{name}_patch_{i}_1_by_1_LC08_053.tif",
        "train_gt/gt_patch_{i}_1_by_1_LC08_053.tif",
    ),
]


def write_bands(folder, image, label):
    """The files of each image in order, a channel each; its pixels, its classes and its label."""
    found = {}
    for i in range(5):
        stored, classes = scene(i)
        files, place = {}, {"i": i, "city": ("bern", "zurich")[i % 2]}
        for k, name in enumerate(("red", "green", "blue")):
            path = image.format(k=k + 2, name=name, **place)
            files[path] = stored[..., k]
            save(folder / path, files[path])
        save(folder / label.format(**place), classes)
        order = tuple(sorted(files))
        pixels = np.dstack([files[path] for path in order])
        found[order] = pixels, classes, (label.format(**place),)
    return found


def test_bands_in_files_are_one_image(folder, init):
    truth = write_bands(folder, *BANDS[0])
    found, said = init("--channels", "3")
    assert_labels(found, {first: classes for (first, *_), (_, classes, _) in truth.items()})
    assert any(f"in this order: {first}, " in said for first, *_ in truth)
    data = load_config(folder.with_name("made") / "config.yaml").data
    pixels = {folder / first: pixels for (first, *_), (pixels, *_) in truth.items()}
    for split in (data.train_split, data.eval_split):
        dataset = open_dataset(data, split)
        for pair, (image, _) in zip(dataset.pairs, dataset, strict=True):
            np.testing.assert_array_equal(image, pixels[pair.image])


@pytest.mark.parametrize(("image", "label"), BANDS)
def test_bands_go_together_by_names_and_an_image_of_others_is_refused(folder, image, label):
    truth = write_bands(folder, image, label)
    found, labels = paired(folder)
    assert {one.files for one in found.images} == truth.keys()
    assert labels == {first: file for (first, *_), (*_, file) in truth.items()}
    path = folder / image.format(i=3, k=3, name="green", city="zurich")
    other = folder / image.format(i=3, k=8, name="nir", city="zurich")
    other.parent.mkdir(exist_ok=True)
    path.rename(other)
    with pytest.raises(DataError, match=r"other bands than most|no labels that belong"):
        choose_labels(survey(folder), Answers())


# Splits: of labelled images of these names, no file is opened


def named(path, split=None, scene="", sequence=""):
    return Image((path,), (64, 80), 3, False, "uint8", split, scene, sequence)


def survey_of(images, *sets, **more):
    """The survey of these images and sets of labels, and of nothing else."""
    nothing = {"equal_sets": {}, "legends": (), "facts": {}, "similar": frozenset(), "notes": ()}
    nothing |= {"moving": False, "tiles": {}, "pair_source": "", "annotations": {}}
    nothing |= {"split_source": ""}
    return Survey(Path("data"), tuple(images), sets, **nothing | more)


VOLUME = json.dumps(
    {"ann": {"slices": [], "size": [9, 8], "axis": None, "spacing_mm": None, "stored": None}}
)


def divided(images, shown_in, *, split_source="", tiles=(), **answers):
    """The splits of these images; shown_in: the paths of those that show each value."""
    files = {one.path: (one.path,) for one in images}
    labels = LabelSet("masks/*.png", "ids", files, {}, shown_in=shown_in)
    found = survey_of(images, labels, split_source=split_source, tiles=dict(tiles))
    return choose_splits(found, labels, Answers(**answers))


def paths(images):
    return {one.path for one in images}


def test_groups_are_on_one_side_of_the_split_or_refused():
    """Six patients of three slices each, whose names show no sequence."""
    names = [f"images/{'abc'[i // 6]}{i * 37 % 101}_p{i % 6}.png" for i in range(18)]
    images = [named(name) for name in names]
    split = divided(images, {}, group=re.compile(r"_(p\d)"), val=0.4)
    assert "whole groups (6, --group)" in split.reason
    train, val = ({path[-6:] for path in paths(part)} for part in (split.train, split.val))
    assert (len(train | val), len(val)) == (6, 2)
    assert not train & val
    for pattern, said in {
        "q": "18 images have no group: images/",
        "p(?=[0-9])": "all images are of one group",
        "images/(.*)": "each image is a group",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(f"--group {pattern}: {said}")):
            divided(images, {}, group=re.compile(pattern))
    given = [named(name, "val" if i < 4 else "train") for i, name in enumerate(names)]
    said = "4 groups are on both sides of the splits that are there: p0, p1, p2"
    with pytest.raises(ConfigError, match=said):
        divided(given, {}, split_source="val.txt", group=re.compile(r"_(p\d)"))


def test_given_splits_that_divide_sequences_are_told():
    """One slice of every patient is evaluated on, as a file of names says."""
    images = [
        named(f"pat{x}_slice{i}.png", "val" if i == 2 else "train", sequence=f"pat{x}_slice")
        for x in "abcdef"
        for i in range(4)
    ]
    (said,) = divided(images, {}, split_source="val.txt").warnings
    assert "6 of 6 images to evaluate on have a near-duplicate or a neighbour among" in said
    assert said.endswith("keep sequences together (--group)")


@pytest.mark.parametrize("known", ["group", "volumes", "volumes, one divided", ""])
def test_groups_that_are_apart_already_are_told_of_like_images_alone(tmp_path, known):
    """Empty slices of two patients are alike, whatever the division."""
    least = 1 if "divided" in known else 0
    images = [
        named(f"images/{x}/z{i}.png", "val" if x == "dan" and i >= least else "train", sequence=x)
        for x in ("ann", "bob", "cid", "dan")
        for i in range(3)
    ]
    alike = frozenset((f"images/ann/z{i}.png", f"images/dan/z{i}.png") for i in range(3))
    (tmp_path / "volumes.json").write_text(VOLUME if "volumes" in known else "{}")
    labels = LabelSet("masks/*.png", "ids", {x.path: (x.path,) for x in images}, {}, shown_in={})
    found = replace(survey_of(images, labels, split_source="val.txt", similar=alike), root=tmp_path)
    answers = Answers(group=re.compile("(ann|bob|cid|dan)") if known == "group" else None)
    (said,) = choose_splits(found, labels, answers).warnings
    assert f"{3 - least} of {3 - least} images to evaluate on have a near-duplicate" in said
    assert ("--group" in said) == (known not in ("group", "volumes"))


@pytest.mark.parametrize("rare", [(3, 17), (8, 30), (21, 22)])
def test_a_rare_class_is_trained_on_and_evaluated(rare):
    """One that two of 40 images show, wherever their names put them."""
    names = [f"images/{i * 37 % 101:03}x.png" for i in range(40)]
    shown = {names[i] for i in rare}
    split = divided([*map(named, names)], {0: {*names}, 3: shown})
    assert len(shown & paths(split.train)) == len(shown & paths(split.val)) == 1


@pytest.mark.parametrize("only", range(0, 20, 3))
def test_a_class_of_one_image_stays_to_train_on(only):
    names = [f"images/{i * 37 % 101:03}x.png" for i in range(20)]
    split = divided([*map(named, names)], {0: {*names}, 3: {names[only]}})
    assert names[only] in paths(split.train)
    assert split.val


def test_images_beside_the_folders_of_splits_are_asked_about(folder, init, asked):
    for place, number, seed in (("train/", 8, 0), ("val/", 3, 20), ("", 5, 40)):
        for _, path, classes in images_in(
            folder, f"{place}images/{place[:1]}{{i}}.png", number, seed=seed
        ):
            save(folder / path.replace("images", "labels"), classes)
    said = asked()
    assert "folders: 5 images with a label are in none of these splits" in said
    assert len(init("--val", "0.2")[0]) == 16
    assert len(init("--leave-out", "images")[0]) == 11


def test_a_split_leaves_no_class_out_of_training():
    """A folder of images for each class, which would be divided as a whole."""
    shown = {k: {f"MT_{k}/{100 * k + i}.jpg" for i in range(7)} for k in range(1, 6)}
    images = [named(x, scene=f"MT_{k}") for k, found in shown.items() for x in sorted(found)]
    split = divided(images, {0: paths(images)} | shown)
    assert all(found & paths(split.train) for found in shown.values())


@pytest.mark.parametrize("copy", ["{}_aug{}", "{} ({})"])
def test_copies_stay_together_where_names_show_sequences(copy):
    """`img_001` and `img_001_aug0` look like two sequences, with frames of one number."""
    stems = [f"img_{i:03}" for i in range(10)]
    names = [x for stem in stems for x in (stem, *(copy.format(stem, k) for k in (1, 2)))]
    split = divided([named(x, sequence=re.sub(r"\d+\D*$", "", x)) for x in names], {})
    train, val = ({path[:7] for path in paths(part)} for part in (split.train, split.val))
    assert len(train) + len(val) == 10
    assert not train & val


def test_images_that_no_list_names_are_counted_so():
    images = [named("a.png", "train"), named("b.png", "unlisted")]
    labels = LabelSet("masks/*.png", "ids", {x.path: (f"masks/{x.path}",) for x in images}, {})
    found = balance(survey_of(images, labels), labels, Splits((images[0],), (), "lists"))
    assert "2 left out (images of no list: 1, labels of no list: 1)" in found.line()


# A file or a folder for each class


def organs(folder, label="masks/s{i:02}_{name}.png"):
    """A lesion in a liver, a file each."""
    truth = {}
    for i, path, _ in images_in(folder, "images/s{i:02}.png"):
        liver, lesion = disc(i, 20), disc(i, 5)
        for name, shown in (("liver", liver), ("lesion", lesion)):
            save(folder / label.format(i=i, name=name), mask_of(shown))
        truth[path] = np.where(lesion, 2, liver).astype(np.uint8)
    return truth


@pytest.mark.parametrize("label", ["masks/{name}/s{i:02}.png", "masks/s{i:02}/{name}.png"])
def test_a_smaller_area_lies_on_a_larger_one(folder, init, label):
    truth = organs(folder, label)
    found, said = init("--names", "liver,lesion")
    assert_labels(found, truth)
    pixels = np.concatenate([x.ravel() for x in truth.values()])
    _, liver, twice = np.bincount(pixels) / pixels.size
    assert f"{twice:.2%} of the pixels are in several: the smaller area counts" in said
    assert re.search(rf"^  liver +{liver:.2%} +6$", said, re.M)


@pytest.mark.parametrize(("number", "is_asked"), [(2, True), (4, False)])
def test_masks_that_few_images_have_on_the_area_of_others_are_asked_about(
    folder, init, asked, number, is_asked
):
    """A tumour is a class, a region of interest on a lesion is none."""
    truth = {}
    for i, path, _ in images_in(folder, "images/s{i:02}.png", 8):
        lesion, region = disc(i, 20), disc(i, 5)
        save(folder / f"masks/s{i:02}_lesion.png", mask_of(lesion))
        if i < number:
            save(folder / f"masks/s{i:02}_region.png", mask_of(region))
        truth[path] = lesion + (lesion & region & (i < number)).astype(np.uint8)
    if is_asked:
        said = asked()
        assert "few images have masks of region (2 images), which lie on others: classes?" in said
        found, _ = init("--names", "lesion", "--leave-out", "labels")
        assert_labels(found, {path: (x > 0).astype(np.uint8) for path, x in truth.items()})
        found, _ = init("--names", "lesion,region")
    else:
        found, _ = init()
    assert_labels(found, truth)


def test_of_several_rare_masks_not_all_may_lie_on_others(folder, asked):
    """The pixels that are in several files may be those of one class alone."""
    for i, _, _ in images_in(folder, "images/s{i:02}.png", 8):
        save(folder / f"masks/s{i:02}_lesion.png", mask_of(disc(i, 20)))
        if i < 2:
            save(folder / f"masks/s{i:02}_region.png", mask_of(disc(i, 5)))
            corner = np.zeros((64, 80), bool)
            corner[:6, :10] = True
            save(folder / f"masks/s{i:02}_stamp.png", mask_of(corner & ~disc(i, 20)))
    assert "region (2 images), stamp (2 images), which may lie on others" in asked()


@pytest.mark.parametrize("task", [(), ("--task", "multilabel")])
def test_a_class_list_names_numbered_files_that_overlap_too(folder, init, task):
    for i, _, _ in images_in(folder, "images/s{i:02}.png"):
        for number, shown in enumerate((disc(i, 20), disc(i, 5)), start=1):
            save(folder / f"masks/class_{number}/s{i:02}.png", mask_of(shown))
    (folder / "classes.txt").write_text("liver\nlesion\n")
    init(*task)
    assert names(folder) == (*(() if task else ("background",)), "liver", "lesion")


def test_an_ignored_class_without_pixels_is_said_once(folder, init):
    for i, _, _ in images_in(folder, "images/s{i:02}.png"):
        side = np.arange(80) < 40
        shown = {"left": disc(i) & side, "right": disc(i) & ~side, "void": disc(i) & False}
        for name, mask in shown.items():
            save(folder / f"masks/s{i:02}_{name}.png", mask_of(mask))
    _, said = init()
    assert "ignored: void, by name" in said
    assert "no class: void" not in said


def test_the_pattern_of_a_set_without_a_word_has_one_star():
    """KITTI: um_1.png and um_road_1.png for um_1.jpg."""
    paths = ["img/um_1.jpg", "gt/um_1.png", "gt/um_road_1.png"]
    by_path = {x.path: x for x in parse_names(paths)}
    mask = LabelFacts("ids", (4, 4), dict.fromkeys((0, 1, 2), ValueFacts(8, 4, 1, "")))
    facts = {x.pattern: [mask] for x in by_path.values()}
    matches = Matches({paths[0]: paths[1:]}, bands={}, unclear=[], alone=[])
    found = {x.pattern for x in label_sets(Path(), matches, by_path, facts)}
    assert found == {"gt/*.png", "gt/*road*.png"}


def test_a_class_of_which_nothing_is_left_is_refused(folder, refused):
    for i, _, _ in images_in(folder, "images/s{i:02}.png"):
        parts = {"left": disc(i) & (np.arange(80) < 40), "right": disc(i) & (np.arange(80) >= 40)}
        for name, shown in {**parts, "body": disc(i)}.items():
            save(folder / f"masks/s{i:02}_{name}.png", mask_of(shown))
    assert "nothing is left of body: other classes, in smaller areas" in refused(code=3)


def test_names_choose_and_order_the_classes_of_files(folder, init, refused):
    truth = organs(folder)
    found, _ = init("--names", "lesion=2,liver=1")
    assert names(folder) == ("background", "liver", "lesion")
    assert_labels(found, truth)
    found, _ = init("--names", "lesion")
    assert names(folder) == ("background", "lesion")
    assert_labels(found, {name: (label == 2).astype(np.uint8) for name, label in truth.items()})
    assert "--names: tumour: no such class; the files show lesion, liver" in refused(
        "--names", "liver,tumour"
    )
    for wrong in ("lesion=3,liver=1", "lesion=1,liver", "liver,liver"):
        assert "--names" in refused("--names", wrong)


@pytest.mark.parametrize("given", ["lesion=2,lesion=1", "background=0", "lesion=²"])
def test_names_of_classes_of_files_that_cannot_be_are_refused(folder, refused, given):
    organs(folder)
    assert f"--names {given}: " in refused("--names", given)


def test_folders_of_masks_with_the_names_of_images_may_be_classes(folder, init, asked):
    """masks/scratch/x00.png and masks/dent/x01.png, of images/x00.png and images/x01.png."""
    truth = {}
    for i, path, _ in images_in(folder, "images/x{i:02}.png", 12):
        save(folder / f"masks/{('dent', 'scratch')[i % 2]}/x{i:02}.png", mask_of(disc(i)))
        truth[path] = disc(i) * np.uint8(1 + i % 2)
    said = asked()
    assert "all of them, of one kind: --labels 'masks/dent/x*.png, masks/scratch/x*.png'" in said
    assert "classes: --names dent,scratch" in said
    found, _ = init("--names", "dent,scratch", "--pairs", "named")
    assert names(folder) == ("background", "dent", "scratch")
    assert_labels(found, truth)
    found, _ = init("--labels", "masks/dent/x*.png, masks/scratch/x*.png", "--pairs", "named")
    assert_labels(found, {path: (x > 0).astype(np.uint8) for path, x in truth.items()})


def test_folders_that_images_and_masks_share_are_asked_about(folder, init, asked):
    """Parts with defects as MVTec has them; the good ones have no mask."""
    truth = {}
    for k, name in enumerate(("dent", "hole"), start=1):
        for i, path, _ in images_in(folder, f"test/{name}/{{i:03}}.png", 6, seed=10 * k):
            save(folder / f"ground_truth/{name}/{i:03}_mask.png", mask_of(disc(i + k)))
            truth[path] = disc(i + k) * np.uint8(k)
    for _, path, label in images_in(folder, "train/good/{i:03}.png", 4, seed=100):
        truth[path] = np.zeros_like(label)
    with_masks = {name: label for name, label in truth.items() if "good" not in name}
    said = asked()
    assert "in 2 folders (dent, hole): classes, or places?" in said
    assert "classes: --names dent,hole" in said
    assert "places, with one class: --names background,foreground" in said
    named = "--pairs", "named"  # the defects are drawn in the labels alone
    found, said = init("--names", "dent,hole", "--leave-out", "images", *named)
    assert "4 left out (images without a label: 4)" in said
    assert_labels(found, with_masks)
    found, _ = init("--names", "dent,hole", "--missing", "background", *named)
    assert_labels(found, truth)
    found, _ = init("--names", "background,defect", "--leave-out", "images", *named)
    assert_labels(found, {name: (label > 0).astype(np.uint8) for name, label in with_masks.items()})


def split_of(folder, name):
    lines = (folder.with_name("made") / name).read_text().splitlines()
    return [line.split("\t")[0] for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("classes_said", [("door", "frame", "x"), ("car", "track", "train")])
def test_classes_may_be_called_as_images_or_splits_are(folder, init, classes_said):
    truth = {}
    for i, path, classes in images_in(folder, "images/a{i}.jpg", 8):
        for k, name in enumerate(classes_said, start=1):
            save(folder / f"masks/{name}/a{i}.png", mask_of(classes == k))
        truth[path] = classes
    found, _ = init()
    assert names(folder) == ("background", *classes_said)
    assert_labels(found, truth)


def test_of_two_names_the_background_is_0_in_any_order(folder, init):
    truth = write(folder, lambda classes, _: mask_of(classes), num_classes=2)
    (folder / "classes.txt").write_text("crack\nbackground\n")
    found, _ = init()
    assert names(folder) == ("background", "crack")
    assert_labels(found, truth)


def test_rendered_images_are_those_that_are_named(folder, init, refused):
    """They look like labels, and no folder says what they are."""
    truth = {}
    for i, _, classes in images_in(folder, "labels/{i}.png", 8):
        save(folder / f"renders/{i}.png", COLORS[::-1][classes])
        save(folder / f"labels/{i}.png", classes)
        truth[f"renders/{i}.png"] = classes
    assert "all pictures look like labels" in refused(code=3)
    assert_labels(init("--images", "renders")[0], truth)


@pytest.mark.parametrize(
    "copy",
    [
        None,
        "jpg/{i}_mask_2.jpg",
        *(pytest.param(x, marks=SLOW) for x in ("png/copy{i}.png", "again/{i}.jpg")),
    ],
)
def test_images_without_a_label_show_background_where_it_is_said(folder, init, copy):
    """But no copies, nor masks of which a list says nothing."""
    truth, rows = {}, []
    for i, path, label in images_in(folder, "jpg/{i}.jpg", 12):
        truth[path] = label * np.uint8(i < 9)
        if i >= 9:
            continue
        save(folder / f"labels/jpg/{i}.tif", label)
        rows.append(f"{path},{i}.tif\n")
        if copy:
            picture = np.dstack([mask_of(disc(i))] * 3) if "mask" in copy else scene(i)[0]
            save(folder / copy.format(i=i), picture)
    if copy:
        (folder / "pairs.csv").write_text("".join(rows))
    more = ["--leave-out", "images"] if copy else []
    # Masks that lie beside those of the list are asked about.
    more += ["--labels", "labels"] if copy and "mask" in copy else []
    found, said = init("--missing", "background", *more)
    assert_labels(found, truth)
    which = "labels of another kind" if copy and "mask" in copy else "images without a label"
    assert not copy or f"{which}: 9" in said


def test_images_without_a_label_show_background_in_the_folders_that_are_said(
    folder, init, asked, refused
):
    """AITEX: none of NODefect/ has a mask, and two of Defect/ have lost theirs."""
    truth = {}
    for i, path, label in images_in(folder, "Defect/{i}.png", 8, num_classes=2):
        if i < 6:
            save(folder / f"masks/{i}_mask.png", mask_of(label))
            truth[path] = label
    for _, path, label in images_in(folder, "NODefect/roll_{i}/a{i}.png", 4, seed=20):
        truth[path] = np.zeros_like(label)
    said = asked()
    option = "--missing background:NODefect --leave-out images"
    assert f"those of NODefect do, and others are left out: {option}\n" in said
    assert_labels(init(*option.split())[0], truth)
    # Of a folder, and not of a part of its name.
    said = refused("--missing", "background:ODefect,roll", "--leave-out", "images")
    assert "--missing background:ODefect,roll: no folder ODefect has images; those of" in said
    assert "label: Defect, NODefect/roll_0, " in said
    assert "no folder roll has" in refused("--missing", "background:NODefect,roll")


@pytest.mark.parametrize("name", ["{kind}/part_{i:03}", "{kind}/{k:03}"])
def test_a_folder_without_labels_is_offered_as_good_parts_and_not_as_the_images(
    folder, asked, init, name
):
    truth = {}
    for i, kind in enumerate(("good", "pit", "good", "scratch") * 4):
        pixels, classes = scene(i, num_classes=3)
        stem = name.format(kind=kind, i=i, k=i // 4)
        save(folder / f"images/{stem}.png", pixels)
        truth[f"images/{stem}.png"] = classes if kind != "good" else np.zeros_like(classes)
        if kind != "good":
            save(folder / f"masks/{stem}_mask.png", classes)
    said = asked()
    assert "--images" not in said
    option = "--missing background:images/good"
    assert f"are asked about: {option}\n" in said
    assert_labels(init(*option.split())[0], truth)


@pytest.mark.parametrize(("label", "classes"), [("{k}/{i}", 3), ("{bucket}/{i:05}_{name}", 2)])
def test_folders_of_classes_or_buckets_that_are_called_as_images_are_none(
    folder, init, label, classes
):
    truth = {}
    for i, path, drawn in images_in(folder, "img/{i}.jpg", 10):
        truth[path] = np.zeros_like(drawn)
        for k in range(classes):
            shown = np.zeros((64, 80), bool)
            shown[10 * k : 10 * k + 8, 3 * i : 3 * i + 20] = True
            name = label.format(i=i, k=k, bucket=i // 5, name=("hair", "skin")[k % 2])
            save(folder / "anno" / f"{name}.png", mask_of(shown))
            truth[path][shown] = k + 1
    found, _ = init("--pairs", "named")
    assert_labels(found, truth)


@pytest.mark.parametrize("mend", ["in some images", "in one of many", "in all images"])
def test_corrected_labels_beside_those_before_are_asked_about(folder, init, asked, mend):
    """Two classes were exchanged, so that areas are equal."""
    order = np.array([0, 2, 1, 3], np.uint8)
    for i, _, classes in images_in(folder, "images/t{i}.png", 20):
        wrong = {"in some images": i % 3 == 0, "in one of many": i == 7}.get(mend, True)
        save(folder / f"old/labels/t{i}.png", order[classes] if wrong else classes)
        save(folder / f"new/labels/t{i}.png", classes)
    assert "2 sets of labels fit the images" in asked()


def test_sets_of_labels_are_taken_together_where_that_is_the_answer(folder, init, asked):
    """Of two people, who have two images in common; bob tells fewer classes apart."""
    truth, said_by = {}, {"fine": np.array([0, 1, 2, 3]), "coarse": np.array([0, 1, 2, 2])}
    for i, path, classes in images_in(folder, "images/t{i}.png", 8):
        for name, there in (("fine", i < 5), ("coarse", i >= 3)):
            if there:
                save(folder / f"{name}/labels/t{i}.png", said_by[name][classes].astype(np.uint8))
        truth[path] = classes
    offered = re.findall(r"^segtrain:   (\S+\.png) \(", asked(), re.M)
    assert len(offered) == 2
    for one, other in (offered, offered[::-1]):
        found, _ = init("--labels", f"{one}, {other}")
        first = one.split("/")[0]
        for i, (path, label) in enumerate(sorted(found.items())):
            both = "fine" if i < 3 else "coarse" if i >= 5 else first
            np.testing.assert_array_equal(label, said_by[both][truth[path]])
    found, _ = init("--labels", offered[0], "--leave-out", "images")
    assert len(found) == 5


def test_of_two_equal_sets_the_one_with_more_images_is_taken(folder, init):
    """Only the images that both have are compared."""
    truth = write(folder, label="labels/t{i}.png", number=10)
    for path, classes in [*truth.items()][:5]:
        save(folder / path.replace("images", "labels_old"), classes)
    found, _ = init()
    assert_labels(found, truth)


def sets_of(patterns, values=None):
    """A survey of two images for each pattern, which no other set labels."""
    sets = [
        LabelSet(pattern, "ids", {f"{k}_{i}.jpg": (f"{k}_{i}.png",) for i in (0, 1)}, values or {})
        for k, pattern in enumerate(patterns)
    ]
    return survey_of([named(path) for one in sets for path in one.labels], *sets)


@pytest.mark.parametrize(
    "patterns",
    [
        ("train/masks/*.png", "val/masks/*.png"),
        ("train_masks/*.png", "val_masks/*.png"),
        ("train/masks/*.png", "val/labels/*.png"),
        ("area1/*.png", "area2/*.png"),
    ],
)
def test_labels_of_other_images_in_places_of_like_names_are_one_set(patterns):
    assert len(choose_labels(sets_of(patterns), Answers()).labels) == 4


@pytest.mark.parametrize("end", ["*.png", "{}_*.png", "*_mask.png"])
def test_labels_in_places_of_other_names_are_asked_about(end):
    """forest_seg/*.png and city_masks/*.png: a suffix is no name in common."""
    found = sets_of([f"{x}/{end.format(x[0])}" for x in ("forest_seg", "city_masks")])
    with pytest.raises(UndecidedError, match="2 sets of labels fit the images"):
        choose_labels(found, Answers())


def test_values_of_joined_sets_add_up():
    facts = ValueFacts(7, 3, 1, "")
    found = choose_labels(sets_of(["train/*.png", "val/*.png"], {1: facts}), Answers())
    assert found.values[1].pixels == 14


# Pairs


def test_a_listed_label_that_cannot_be_read_is_refused_and_not_replaced(folder, init, refused):
    rows, truth = [], {}
    for i, path, label in images_in(folder, "images/a{i}.png"):
        truth[path] = label
        stored = label.astype(np.int16)
        stored[:, 70:] = -1
        save(folder / f"labels/a{i}.tif", stored)
        save(folder / f"weak/a{i}_mask.png", mask_of(disc(i)))
        rows.append(f"a{i}.png,a{i}.tif\n")
    (folder / "pairs.csv").write_text("image,label\n" + "".join(rows))
    said = refused(code=3)
    assert "labels/a0.tif: the label of images/a0.png by pairs.csv: values below 0" in said
    for name, label in truth.items():
        save(folder / name.replace("images", "labels").replace("png", "tif"), label)
    found, _ = init("--labels", "labels")
    assert_labels(found, truth)


PHOTOS = [
    ("image/{i}.jpg", "depth/{i}.png"),
    pytest.param("train/vi/{i}D.png", "train/ir/{i}D.png", marks=SLOW),
    ("vis/{i:03}D.png", "ir/{i:03}D.png"),
    ("Visible/{i}.png", "Infrared/{i}.png"),
    ("images/rgb/{i}.png", "images/nir/{i}.png"),
]


@pytest.mark.parametrize(("image", "other"), PHOTOS)
def test_the_photo_is_trained_of_pictures_of_one_label(folder, image, other):
    pairs = {}
    for i, path, classes in images_in(folder, image):
        photo = scene(i)[0]
        second = photo[..., 0].astype(np.uint16) * 99 if "depth" in other else 255 - photo
        second = second[..., 0] if "nir" in other else second
        save(folder / other.format(i=i), second)
        name = PurePosixPath(path)
        label = name.parent.with_name("label") / f"{name.stem}.png"
        save(folder / label, classes)
        pairs[path] = (str(label),)
    found, labels = paired(folder)
    assert labels == pairs
    assert {one.files for one in found.images} == {(path,) for path in pairs}
    assert any("6 labels fit several pictures, the first is used: " in x for x in found.notes)


def test_of_two_dates_an_answer_or_a_list_chooses(folder, init, asked):
    for i, _, classes in images_in(folder, "B/{i}.png"):
        save(folder / f"A/{i}.png", 255 - scene(i)[0])
        save(folder / f"label/{i}.png", classes)
    said = asked()
    assert "several pictures for one label: A/0.png and B/0.png" in said
    assert "those in A: --images A" in said
    assert init("--images", "B")[0].keys() == {f"B/{i}.png" for i in range(6)}
    rows = "".join(f"B/{i}.png,label/{i}.png\n" for i in range(6))
    (folder / "pairs.csv").write_text(rows)
    assert init("--leave-out", "images")[0].keys() == {f"B/{i}.png" for i in range(6)}


def test_of_two_kinds_of_images_one_may_be_chosen(folder, init, asked):
    """The label fits the name of one kind better; the other one is named, and can be chosen."""
    truth = {}
    for i, path, classes in images_in(folder, "rgb/b1-{i:03}_Clipped.jpg"):
        save(folder / f"nir/b1-{i:03}.jpg", 255 - scene(i)[0])
        save(folder / f"gt/b1-{i:03}_mask.png", classes)
        truth[path] = classes
    said = asked()
    assert "not used would be images without a label (6): rgb/b1-000_Clipped.jpg" in said
    assert "the images are in rgb: --images rgb" in said
    found, said = init("--images", "rgb")
    assert_labels(found, truth)
    assert "pictures that --images does not name: 6" in said


def checked_in_turn(lab, made, lines):
    """What is said where every second of these pairs is evaluated on."""
    for i, name in enumerate(("train.txt", "val.txt")):
        (made / name).write_text("\n".join(lines[i::2]))
    return lab.command("data", "check", made, "--jobs", "1").out


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("images/img_{i:03}{end}.png", "masks/img_{i:03}{end}_mask.png"),
        ("images/IMG_{i}_jpg.rf.{hash}.png", "masks/IMG_{i}_jpg.rf.{hash}.png"),
    ],
)
def test_copies_of_a_picture_have_their_own_labels_and_one_split(folder, init, lab, image, label):
    """Each picture, the same mirrored, and upside down."""
    truth = {}
    for i in range(5):
        pixels, classes = scene(i)
        for end, (down, right) in {"": (1, 1), "_flip": (1, -1), "_rot": (-1, -1)}.items():
            names = {"i": i, "end": end, "hash": f"{i * 7919 + len(end) * 104729:032x}"}
            save(folder / image.format(**names), pixels[::down, ::right])
            save(folder / label.format(**names), classes[::down, ::right])
            truth[image.format(**names)] = classes[::down, ::right]
    found, said = init()
    assert_labels(found, truth)
    assert "copies and like images kept together" in said
    train, val = (
        {source_of(path.removesuffix(".png")) for path in split_of(folder, f"{x}.txt")}
        for x in ("train", "val")
    )
    assert (len(train) + len(val), train & val) == (5, set())

    made = folder.with_name("made")
    texts = [(made / f"{x}.txt").read_text() for x in ("train", "val")]
    said = checked_in_turn(lab, made, [x for text in texts for x in text.splitlines()[2:]])
    assert "images to evaluate on are copies of images to train on, flipped or" in said


def test_names_that_only_count_are_of_no_copies():
    """As a folder of photographs that were renamed together, which folds would refuse."""
    for form in ("photo ({})", "aug_{}", "rot{}"):
        names = [form.format(i) for i in range(1, 40)]
        assert sources_of(names) == names
    names = [f"{animal} ({i})" for animal in ("cat", "dog") for i in range(1, 9)]
    assert sources_of(names) == names


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a/b_hflip", "a/b"),
        ("a/b_rot90_bright", "a/b"),
        ("aug_b", "b"),
        ("b-copy", "b"),
        ("street_7", "street_7"),
        ("rot", "rot"),
        ("carrot_1", "carrot_1"),
        ("noise/b", "noise/b"),
    ],
)
def test_words_of_copies_are_no_part_of_a_source(name, source):
    assert source_of(name) == source


# Values


def test_masks_that_were_resized_with_interpolation_are_doubted(folder, init, asked, lab):
    for i, path, classes in images_in(folder):
        label = cv2.resize(2 * (classes > 0).astype(np.uint8), (160, 128), interpolation=1)
        assert set(np.unique(label)) == {0, 1, 2}
        save(folder / path, cv2.resize(scene(i)[0], (160, 128)))
        save(folder / f"masks/t{i}.png", label)
    said = asked()
    assert "1 only where a lower and a higher value meet" in said
    assert "resized: no data there: --ignore 1" in said
    found, _ = init("--ignore", "none")
    assert {v for label in found.values() for v in np.unique(label).tolist()} == {0, 1, 2}
    said = lab.command("data", "check", folder.with_name("made"), "--jobs", "1").out
    assert "class_1 is only where a lower and a higher value meet" in said


def test_a_pixel_is_blended_if_lower_and_higher_values_are_near():
    label = np.array([[0, 0, 0, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0]], np.uint8).repeat(6, 0)
    np.testing.assert_array_equal(np.flatnonzero(blended_pixels(label)[0]), [3])
    colors = np.array([[[0, 0, 0]] * 3 + [[100, 0, 40]] + [[200, 0, 80]] * 3], np.uint8)
    np.testing.assert_array_equal(np.flatnonzero(blended_pixels(colors)[0]), [3])


def test_255_on_most_pixels_of_a_list_is_told(folder, lab, config_of):
    for split, seed in (("train", 0), ("val", 6)):
        places = {"image": f"images/{split}/t{{i}}.png", "label": f"labels/{split}/t{{i}}.png"}
        write(folder, lambda classes, _: classes - np.uint8(1), number=3, seed=seed, **places)
    config = config_of([{"name": name, "ids": [i]} for i, name in enumerate(NAMES[1:])])
    told = r"[67]\d% of the pixels have no class: if they show a background"
    assert re.search(told, lab.done("data", "check", config, "--jobs", "1").out)


def above(classes, mark):
    """The labels with `mark` in the uppermost 20 rows."""
    return np.where(np.arange(64)[:, None] < 20, mark, classes).astype(classes.dtype)


def less_one(classes):
    """255 is the background."""
    return classes - np.uint8(1)


@pytest.mark.parametrize(
    ("stored", "said", "option", "seen"),
    [
        (less_one, "255 is most of them", "none", lambda x: less_one(x).clip(max=3)),
        (partial(above, mark=255), "255 is a large part of them", "255", partial(above, mark=255)),
    ],
)
def test_255_on_a_large_area_is_asked_about(folder, init, asked, stored, said, option, seen):
    truth = write(folder, lambda classes, _: stored(classes))
    assert said in (question := asked())
    assert "--ignore 255" in question
    found, _ = init("--ignore", option)
    assert_labels(found, {path: seen(x) for path, x in truth.items()})


def test_white_beside_colours_is_said_to_be_perhaps_no_data(folder, init):
    truth = write(folder, lambda x, _: np.array([*COLORS, (255,) * 3], np.uint8)[above(x, 4)])
    _, said = init()
    assert re.search("color_ffffff .*  may mean no data: --ignore '#ffffff'", said)
    found, _ = init("--ignore", "#ffffff")
    ids = np.array([0, 3, 2, 1], np.uint8)  # by their colours
    assert_labels(found, {path: above(ids[x], 255) for path, x in truth.items()})


def write_colors(folder, colors=COLORS, names=NAMES):
    """CamVid's list of classes."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [" ".join(map(str, [*color, name])) for color, name in zip(colors, names, strict=True)]
    (folder / "label_colors.txt").write_text("\n".join(lines))


@pytest.mark.parametrize("is_palette", [False, True])
def test_colours_a_little_off_are_those_of_the_list(folder, init, is_palette):
    truth = {}
    write_colors(folder)
    order = np.array([0, 3, 1, 2])  # of the indices
    for i, path, classes in images_in(folder):
        shift = (3, -4, 7) if is_palette else (i % 5, 5 - i, i)
        shown = (COLORS + shift).clip(0, 255).astype(np.uint8)
        if is_palette:
            palette = shown[np.argsort(order)]
            save_indexed(folder / f"masks/t{i}.png", order[classes], palette)
        else:
            save(folder / f"masks/t{i}.png", shown[classes])
        truth[path] = classes
    found, said = init()
    assert {names(folder).index(name) for name in NAMES} == {0, 1, 2, 3}
    at = np.array([names(folder).index(name) for name in NAMES], np.uint8)
    assert_labels(found, {name: at[label] for name, label in truth.items()})
    if not is_palette:
        pixels = sum(int((x == 3).sum()) for x in truth.values())
        assert f"6 shades of #14a03c, {pixels} pixels, at most 5 off in a channel" in said


def test_a_colour_between_two_classes_is_refused(folder, refused):
    colors = np.array([*COLORS[:3], COLORS[2] + 6], np.uint8)
    write_colors(folder, colors)

    def drawn(classes, _):
        shown = colors[classes]
        shown[60:62, :9] = COLORS[2] + np.uint8(3)
        return shown

    write(folder, drawn)
    said = refused(code=3)
    assert "#5d5d67 (108 pixels, as in masks/t0.png)" in said
    assert "is within 3 of #5a5a64 and 3 of #60606a" in said


@pytest.mark.parametrize("third", [0, 7])
def test_ids_in_the_first_of_three_channels_are_read_and_other_16_bit_colours_refused(
    folder, init, refused, third
):
    """As SYNTHIA has them: ids in the first of three 16-bit channels, objects in the second."""

    def stored(classes, _):
        objects = cv2.connectedComponents((classes > 1).astype(np.uint8))[1] * (classes > 1)
        channels = np.dstack([classes, objects, np.full_like(classes, third)]).astype(np.uint16)
        return np.ascontiguousarray(channels[..., ::-1])  # as BGR

    truth = write(folder, stored, image="RGB/{i:07}.png", label="GT/LABELS/{i:07}.png")
    if third:
        assert "16-bit colours: save ids as PNG of one channel" in refused(code=3)
        return
    found, said = init()
    assert "labels hold ids in the first of three 16-bit channels, and numbers of objects" in said
    assert_labels(found, truth)


def reordered(folder):
    """Palettes that were made file by file: the colours are right in each."""
    truth = {}
    for i, path, classes in images_in(folder):
        order = np.roll(np.arange(4), i)  # of the indices
        save_indexed(folder / f"masks/t{i}.png", order[classes], COLORS[np.argsort(order)])
        truth[path] = classes
    return truth


@pytest.mark.parametrize("names", [NAMES, ("void", "car", "ignore", "tree")])
def test_palettes_made_file_by_file_are_read_by_colours_that_a_list_names(folder, init, names, lab):
    truth = reordered(folder)
    write_colors(folder, names=names)
    found, _ = init()
    # With two ignored colours labels are drawn.
    train_ids = np.array([0, 1, 2, 3] if names == NAMES else [255, 0, 255, 1], np.uint8)
    assert_labels(found, {name: train_ids[label] for name, label in truth.items()})
    made = folder.with_name("made")
    assert lab.command("data", "check", made, "--jobs", "1").code == 0


def test_palettes_that_differ_are_refused_where_a_list_names_all_colours_but_one(folder, refused):
    reordered(folder)
    write_colors(folder, [*COLORS[:3], COLORS[3] + 60])
    said = refused(code=3)
    assert "gives the same values other colours than those before it" in said
    assert "or name the colours in class_dict.csv" in said


def test_what_is_transparent_in_a_mask_is_not_drawn(folder, init):
    def drawn(classes, _):
        shown = np.dstack([COLORS[classes], 255 * (classes > 0).astype(np.uint8)])
        shown[..., :3][classes == 0] = 77  # what an editor leaves below
        return shown

    truth = write(folder, drawn)
    assert_same_division(init()[0], truth)


def test_ids_of_objects_may_be_one_class(folder, init, asked):
    truth = {}
    for i, path, classes in images_in(folder, num_classes=2):
        count, objects = cv2.connectedComponents(classes)
        for k in range(3 + i % 3):  # some have more than others
            objects[8 + 6 * k : 11 + 6 * k, 60:64] = count + k
        numbers = np.unique(objects, return_inverse=True)[1]
        save(folder / f"masks/t{i}.png", numbers.reshape(64, 80).astype(np.uint8))
        truth[path] = (objects > 0).astype(np.uint8)
    assert "objects of one class: --instances binary" in asked()
    found, _ = init("--instances", "binary", "--names", "background,cell")
    assert names(folder) == ("background", "cell")
    assert_labels(found, truth)


# Sizes


def at_size(label, height, width):
    """Its nearest pixels, as Pillow finds them."""
    return np.asarray(Picture.fromarray(label).resize((width, height), Picture.Resampling.NEAREST))


@pytest.mark.parametrize("size", [(55, 69), (128, 160)])
@pytest.mark.parametrize("form", ["ids", "colours", "files"])
def test_labels_of_another_size_by_one_factor_are_drawn_anew(folder, init, asked, form, size):
    truth = {}
    for i, path, classes in images_in(folder, num_classes=3):
        small = at_size(classes, *size)
        truth[path] = at_size(small, 64, 80)
        for k in (1, 2) if form == "files" else ():
            save(folder / f"masks/{NAMES[k]}/t{i}.png", mask_of(small == k))
        if form != "files":
            save(folder / f"masks/t{i}.png", small if form == "ids" else COLORS[small])
    said = asked()
    assert f"in all {12 if form == 'files' else 6} files" in said
    assert f"t0.png: {size[0]}x{size[1]}, image 64x80" in said
    assert_same_division(init("--resize", "labels")[0], truth)
    if form == "files":
        found, _ = init("--resize", "labels", "--task", "multilabel")
        assert_labels(found, {x: np.dstack([y == 1, y == 2]) for x, y in truth.items()})


@pytest.mark.parametrize("more", [(), ("--resize", "labels")])
@pytest.mark.parametrize("size", [(56, 80), (56, 74), (64, 79)], ids=["a band", "sides", "a row"])
def test_labels_of_another_size_by_several_factors_are_refused(folder, refused, size, more):
    """They would be stretched over what they do not show."""
    write(folder, lambda x, _: at_size(x, *size))
    said = refused(*more, code=3)
    assert f"masks/t0.png: {size[0]}x{size[1]}, image 64x80" in said
    assert "cut both to the same part" in said


def test_labels_of_which_one_has_the_size_of_its_image_are_refused(folder, refused):
    write(folder, lambda x, i: x if i == 4 else at_size(x, 32, 40))
    assert "5 labels have another size than the image" in refused(code=3)


def test_labels_of_the_size_of_the_images_need_no_other(folder, refused):
    write(folder)
    assert "--resize: no effect on labels of the size of the images" in refused("--resize=labels")


def test_a_part_of_a_label_of_another_size_is_that_of_the_whole(tmp_path):
    label = scene(0)[1]
    save(tmp_path / "m.png", label[::2, ::2])
    image = Image(("i.png",), label.shape, 3, False, "uint8", None, "", "")
    labels = LabelSet("*.png", "ids", {"i.png": ("m.png",)}, {}, resized=True)
    classes = Classes(tuple(Class(str(k), (k,), None, 1) for k in range(4)), (), ())
    whole, part = (
        train_ids(tmp_path, labels, classes, image, x) for x in (None, Window(7, 30, 20, 25))
    )
    np.testing.assert_array_equal(whole, np.kron(label[::2, ::2], np.ones((2, 2))))
    np.testing.assert_array_equal(part, whole[7:27, 30:55])


# Orientation


def photo(path, upright, orientation):
    """A JPEG that a viewer turns by its EXIF to show `upright`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Picture.Exif()
    exif[0x0112] = orientation
    stored = Picture.fromarray(np.ascontiguousarray(to_stored(upright, orientation)))
    stored.save(path, exif=exif, quality=95)
    shown = np.asarray(ImageOps.exif_transpose(Picture.open(path)))
    assert abs(shown.astype(int) - upright).mean() < 12


@pytest.mark.parametrize("orientations", [(1, 6), (5, 2, 7, 4), pytest.param((8, 3), marks=SLOW)])
def test_labels_of_photos_that_exif_turns_are_turned_back(folder, init, orientations):
    """As tools of annotation write them: on the picture as it is shown."""
    truth = {}
    for i in range(12):
        turn = orientations[i % len(orientations)]
        image, classes = scene(i)
        if i >= 8:  # square ones follow the others
            image, classes = image[:, :64], classes[:, :64]
        photo(folder / f"images/p{i}.jpg", image, turn)
        save(folder / f"labels/p{i}.png", classes)
        truth[f"images/p{i}.jpg"] = to_stored(classes, turn)
    found, said = init()
    assert "as EXIF turns the images" in said
    assert_labels(found, truth)


@pytest.mark.parametrize("orientations", [(3,), (2, 1)])
@pytest.mark.parametrize("drawn", ["stored", "turned"])
def test_where_sizes_do_not_tell_how_labels_lie_edges_do(folder, init, orientations, drawn):
    truth = {}
    for i in range(8):
        turn = orientations[i % len(orientations)]
        image, classes = scene(i)
        photo(folder / f"images/p{i}.jpg", image, turn)
        truth[f"images/p{i}.jpg"] = to_stored(classes, turn)
        save(
            folder / f"labels/p{i}.png", classes if drawn == "turned" else to_stored(classes, turn)
        )
    assert_labels(init()[0], truth)


def test_where_edges_do_not_tell_how_labels_lie_it_is_asked(folder, init, asked):
    truth = {}
    for i in range(8):
        classes = scene(i)[1]
        photo(folder / f"images/p{i}.jpg", scene(i + 20)[0], 3)
        truth[f"images/p{i}.jpg"] = np.rot90(classes, 2)
        save(folder / f"labels/p{i}.png", classes)
    assert "the pixels as viewers show them: --exif turned" in asked()
    assert_labels(init("--exif", "turned")[0], truth)


def test_an_image_that_exif_turns_and_that_has_no_label_asks_nothing(folder, init):
    for i in range(8):
        image, classes = scene(i, 2)
        photo(folder / f"images/p{i}.jpg", image, 3 if i == 7 else 1)
        if i < 7:
            save(folder / f"masks/p{i}.png", classes)
    found = init("--missing", "background")[0]
    assert not found["images/p7.jpg"].any()


def test_labels_on_the_pixels_as_stored_stay(folder, init):
    truth = {}
    for i in range(8):
        image, classes = scene(i)
        photo(folder / f"images/p{i}.jpg", image, 6)
        truth[f"images/p{i}.jpg"] = np.rot90(classes)
        save(folder / f"labels/p{i}.png", truth[f"images/p{i}.jpg"])
    assert_labels(init()[0], truth)


# Places


def write_tiff(path, array, place=None, size=1.0, epsg=32632, *, tags=(), **options):
    """A TIFF; place: x and y of its upper left corner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if place is not None:
        tags = [
            (33550, "d", 3, (size, size, 0.0), True),
            (33922, "d", 6, (0.0, 0.0, 0.0, *place, 0.0), True),
            (34735, "H", 8, (1, 1, 0, 1, 3072, 0, 1, epsg), True),
        ]
    tifffile.imwrite(path, array, extratags=tags, **options)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"place": (1008.0, 5000.0)}, "8 pixels to the right and 0 down"),
        ({"place": (1000.0, 5064.0)}, "0 pixels to the right and -64 down"),
        ({"size": 2.0}, "pixels of another size or direction"),
        ({"epsg": 32633}, "coordinate system EPSG:32633 instead of EPSG:32632"),
        ({"place": (1000.5, 5000.0)}, ""),
    ],
)
def test_what_two_files_say_of_the_map_is_compared(tmp_path, place, said):
    files = tmp_path / "image.tif", tmp_path / "label.tif"
    for file, where in zip(files, ({}, place), strict=True):
        write_tiff(file, np.zeros((9, 8), np.uint8), **{"place": (1000.0, 5000.0)} | where)
    assert other_place(*(place_of(file, read_info(file)) for file in files)) == said


def test_labels_that_lie_elsewhere_on_the_map_are_refused(folder, lab, refused, config_of):
    for kind, x in (("images", 1000.0), ("labels", 1008.0)):
        for split, i in (("train", 0), ("train", 1), ("val", 2)):
            image, classes = scene(i)
            pixels = image if kind == "images" else classes
            write_tiff(folder / kind / split / f"t{i}.tif", pixels, (x, 5000.0))
    said = "8 pixels to the right and 0 down"
    assert said in refused(code=3)
    config = config_of([{"name": name, "ids": [i]} for i, name in enumerate(NAMES)])
    assert said in lab.command("data", "check", config, "--jobs", "1").out
    assert said in lab.refused("train", config, "--output", lab.folder / "run", code=3)


def test_labels_whose_numbers_are_scaled_are_refused(folder, refused):
    item = '<Item name="{}" sample="0" role="{}">{}</Item>'
    items = item.format("OFFSET", "offset", 0) + item.format("SCALE", "scale", 0.5)
    tags = [(42112, "s", 0, f"<GDALMetadata>{items}</GDALMetadata>", True)]
    for i, _, classes in images_in(folder):
        write_tiff(folder / f"labels/t{i}.tif", 2 * classes, tags=tags)
    assert "GDAL's scale or offset makes other numbers of the label's ids" in refused(code=3)


@pytest.mark.parametrize(
    ("dtype", "mark"),
    [("int16", -1), ("float32", np.nan), pytest.param("float32", -9999, marks=SLOW)],
)
def test_no_data_below_0_is_no_data(folder, init, dtype, mark):
    truth = {}
    for i, path, classes in images_in(folder):
        tags = [(42113, "s", 0, str(mark), True)]
        write_tiff(folder / f"labels/t{i}.tif", above(classes.astype(dtype), mark), tags=tags)
        truth[path] = above(classes, 255)
    found, said = init()
    assert "GDAL_NODATA" in said
    assert_labels(found, truth)


def test_a_class_file_by_hand_is_told_of_no_data_below_0(folder, lab, config_of):
    truth = {}
    for split in ("train", "val"):
        for i, path, classes in images_in(folder, f"images/{split}/t{{i}}.png", 2):
            tags = [(42113, "s", 0, "-1", True)]
            label = above(classes.astype(np.int16), -1)
            write_tiff(folder / f"labels/{split}/t{i}.tif", label, tags=tags)
            truth[path] = above(classes, 255)
    config = config_of([*NAMES])
    hint = "such as -1: to ignore it, list it there: `ignore_ids: [255, 65535]`"
    assert hint in lab.command("data", "check", config, "--jobs", "1").out
    assert hint in lab.refused("train", config, "--output", lab.folder / "run", code=3)
    config = config_of([*NAMES], ignore_ids=[255, 65535])
    assert lab.command("data", "check", config, "--jobs", "1").code == 0
    assert_labels(labels_of(config)[0], truth)


def test_a_mask_inside_of_a_tiff_is_refused(folder, refused):
    for i in range(8):
        image, classes = scene(i)
        save(folder / f"labels/t{i}.png", classes)
        (folder / "images").mkdir(exist_ok=True)
        with tifffile.TiffWriter(folder / f"images/t{i}.tif") as file:
            file.write(image, photometric="rgb")
            file.write(np.ones((64, 80), bool), photometric="mask", subfiletype=4)
    assert "a mask in the TIFF says where it has values, and is not read" in refused(code=3)


def mosaic():
    """Pixels and classes of a picture of 384x400."""
    scenes = [[scene(10 * row + column) for column in range(5)] for row in range(6)]
    return tuple(np.vstack([np.hstack([s[k] for s in row]) for row in scenes]) for k in (0, 1))


# Tiles that overlap by a third: the place of the corner of each, in a grid of 5 x 6.
CORNERS = [(42 * (i // 6), 52 * (i % 6)) for i in range(30)]
NAMES_OF_TILES = [
    "tile_r{row}_c{column}",
    "img(r{row},c{column})",
    "area_{y}_{x}",
    "P0003__1__{x}___{y}",
    "{column}_{row}",
    "patch_{i}_{row}_by_{column}_LC08_053",
    "2QB7XA_{x}-{y}-{right}-{bottom}",
    "P0003_{y}_{bottom}_{x}_{right}",
    "area_{x}_{y}_80_64",
]


def boxes_of(names, look, places=None):
    """Of tiles of 64x80; look: what the tile of a number shows."""
    return tile_boxes(names, [(64, 80)] * len(names), places or [None] * len(names), look)


@pytest.mark.parametrize("form", NAMES_OF_TILES)
def test_the_place_of_a_tile_is_told_by_its_name(form):
    """Counted in rows and columns, or in pixels."""
    image, names = mosaic()[0], []
    for i, (y, x) in enumerate(CORNERS):
        place = {"row": y // 42, "column": x // 52, "bottom": y + 64, "right": x + 80}
        names.append(form.format(i=37 * i % 30, y=y, x=x, **place))
    boxes = boxes_of(names, lambda i: image[CORNERS[i][0] :, CORNERS[i][1] :][:64, :80])
    assert [box[1:] for box in boxes] == [(y, x, y + 64, x + 80) for y, x in CORNERS]
    assert len({box.mosaic for box in boxes}) == 1


def test_the_place_of_a_tile_is_told_by_its_georeference():
    places = [MapPlace((1.0, 0.0, 1000.0 + x, 0.0, -1.0, 5000.0 - y)) for y, x in CORNERS]
    boxes = boxes_of([f"a{i}" for i in range(30)], lambda _: None, places)
    _, top, left, *_ = boxes[0]
    found = [(box.top - top, box.left - left) for box in boxes]
    assert found == CORNERS
    assert {(box.bottom - box.top, box.right - box.left) for box in boxes} == {(64, 80)}


@pytest.mark.parametrize(
    "name", ["tile_r{row}_c{column}.png", pytest.param("a{i:02}.tif", marks=SLOW)]
)
def test_no_pixel_to_evaluate_on_is_trained_on(folder, init, lab, name):
    """The latter tiles say their place on the map."""
    image, label = mosaic()
    boxes = {}
    for i, (y, x) in enumerate(CORNERS):
        here = np.s_[y : y + 64, x : x + 80]
        file = name.format(i=37 * i % 56, row=y // 42, column=x // 52)
        for kind, whole in (("images", image), ("masks", label)):
            if file.endswith(".tif"):
                write_tiff(folder / kind / file, whole[here], (1000.0 + x, 5000.0 - y))
            else:
                save(folder / kind / file, whole[here])
        boxes[f"images/{file}"] = here
    found, said = init()
    assert "tiles that overlap them left out" in said
    seen = {"train.txt": np.zeros(label.shape, bool), "val.txt": np.zeros(label.shape, bool)}
    for split, pixels in seen.items():
        for path in split_of(folder, split):
            pixels[boxes[path]] = True
    assert not (seen["train.txt"] & seen["val.txt"]).any()
    assert len(found) >= 20

    lines = [f"{path}\t{path.replace('images', 'masks')}" for path in boxes]
    said = checked_in_turn(lab, folder.with_name("made"), lines)
    assert "15 tiles to evaluate on show what tiles to train on show, too" in said


def test_classes_of_a_part_of_the_picture_stay_to_train_on():
    """A class in a corner, and tiles that overlap by half: most of them are left to train on."""
    _, label = mosaic()
    label = np.where(label == 3, 0, label)
    label[:100, :60] = 3
    images, shown, tiles = [], {value: set() for value in range(4)}, {}
    for row, column in np.ndindex(11, 10):
        top, left = 32 * row, 36 * column
        images.append(named(f"images/field-{row}-{column}.png"))
        tiles[images[-1].path] = TileBox("field", top, left, top + 64, left + 64)
        for value in np.unique(label[top : top + 64, left : left + 64]).tolist():
            shown[value].add(images[-1].path)
    split = divided(images, shown, tiles=tiles)
    assert all(found & paths(split.train) for found in shown.values())
    assert len(split.train) >= 66


def test_tiles_that_only_touch_do_not_overlap():
    image, at = mosaic()[0], [divmod(i, 5) for i in range(30)]
    names = [f"a/tile_r{row}_c{column}" for row, column in at]
    boxes = boxes_of(names, lambda i: image[64 * at[i][0] :, 80 * at[i][1] :][:64, :80])
    assert boxes[7] == TileBox("a/tile", 64, 160, 128, 240)
    assert not list(overlapping(boxes))


@pytest.mark.parametrize("gap", [1, 30])
def test_frames_of_clips_are_no_tiles(gap):
    """street_2_30 is the second clip; its frames look alike, and none is left out."""
    names = [f"street_{clip}_{gap * frame}" for clip in range(3) for frame in range(6)]
    boxes = boxes_of(names, lambda i: np.roll(scene(i // 6)[0], i % 6, axis=1))
    assert not list(overlapping(boxes))


@pytest.mark.parametrize("form", ["cam_{a}_{b}", "{a}-{b}", "cam_{a}_{b}_{c}_{d}", "{a}_by_{b}"])
@pytest.mark.parametrize("gap", [1, 30])
def test_frames_of_a_camera_that_stands_still_are_no_tiles(form, gap):
    """Soft pictures, which look nearly alike a few pixels farther."""
    at = [(gap * (i // 8), gap * (i % 8)) for i in range(48)]
    names = [form.format(a=a, b=b, c=a + 64, d=b + 80) for a, b in at]
    soft = cv2.GaussianBlur(scene(3)[0], (0, 0), 9)
    boxes = boxes_of(names, lambda i: np.roll(soft, i % 2, axis=1))
    assert not list(overlapping(boxes))
