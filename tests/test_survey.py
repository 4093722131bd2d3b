"""Folders in which a guess trains wrong: each is read as its truth, pixel by pixel, or refused."""

import csv
import re
import shutil
from collections import Counter
from pathlib import PurePosixPath

import cv2
import numpy as np
import PIL.Image
import pytest
import tifffile
import yaml
from folders import COLORS, NAMES, assert_same_division, labels_of, save, scene
from PIL import Image, ImageOps

from segtrain.config import load_config
from segtrain.data import open_dataset
from segtrain.data.read.classes import load_class_file
from segtrain.data.read.decode import to_stored
from segtrain.data.read.find_tiles import tile_boxes
from segtrain.data.read.georeference import place_of
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.rims import blended_pixels
from segtrain.data.read.sources import source_of, sources_of
from segtrain.data.read.tiles import TileBox, overlapping


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr("segtrain.commands.init._HOST", ("127.0.0.1", 9))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def init(lab, folder):
    """Runs init with these words; the labels that training sees, and what was said."""

    def run(*words):
        output = folder.with_name("made")
        said = lab.done("init", folder, "--output", output, "--jobs", "1", *words).out
        return labels_of(output)[0], said

    return run


@pytest.fixture
def refused(lab, folder):
    return lambda *words, code=2: lab.refused(
        "init", folder, "--output", folder.with_name("made"), "--jobs", "1", *words, code=code
    )


@pytest.fixture
def asked(lab, folder):
    """The question that init stops with; its pictures are gone."""

    def run(*words):
        output = folder.with_name("made")
        outcome = lab.command("init", folder, "--output", output, "--jobs", "1", *words)
        assert outcome.code == 2
        assert "and one of them goes on" in outcome.err
        assert all(path.name.startswith("reading_") for path in output.iterdir())
        return outcome.err

    return run


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
    picture = PIL.Image.fromarray(label.astype(np.uint8), mode="P")
    picture.putpalette(np.asarray(palette, np.uint8).tobytes())
    picture.save(path)


def mask_of(shown):
    return np.where(shown, 255, 0).astype(np.uint8)


def assert_labels(found, truth):
    assert found.keys() == truth.keys()
    for name, label in truth.items():
        np.testing.assert_array_equal(found[name], label, err_msg=name)


# Bands in files of their own

BANDS = [
    ("scene{i:02}/B{k:02}.tif", "scene{i:02}/mask.tif"),
    ("scenes/scene{i:02}/B{k:02}.tif", "labels/scene{i:02}.tif"),
    ("train/{i}x/B{k:02}.tif", "train_labels/{i}x_mask.png"),
    ("data/{i}x/B{k:02}.tif", "data/{i}x/label.png"),
    ("train_{name}/{name}_patch_{i}_LC08.tif", "train_gt/gt_patch_{i}_LC08.tif"),
    ("train_{name}/{name}_{i:03}.tif", "train_gt/gt_{i:03}.tif"),
    ("B{k:02}/{i:03}.tif", "masks/{i:03}.png"),
    ("{city}/{i:03}_B{k:02}.tif", "masks/{city}/{i:03}.png"),
    (
        "train_{name}/{name}_patch_{i}_1_by_1_LC08_L1TP_002053_2016_2017_01_T1.tif",
        "train_gt/gt_patch_{i}_1_by_1_LC08_L1TP_002053_2016_2017_01_T1.tif",
    ),
]


def write_bands(folder, image, label):
    """The files of an image, each a channel, and the truth by the first of them."""
    pixels, truth = {}, {}
    for i in range(8):
        stored, classes = scene(i)
        files = {}
        for k, name in enumerate(("red", "green", "blue")):
            city = ("bern", "zurich")[i % 2]
            path = image.format(i=i, k=k + 2, name=name, city=city)
            files[path] = stored[..., k]
            save(folder / path, files[path])
        save(folder / label.format(i=i, city=city), classes)
        first = min(files)
        truth[first] = classes
        pixels[first] = np.dstack([files[path] for path in sorted(files)])
    return pixels, truth


@pytest.mark.parametrize(("image", "label"), BANDS)
def test_bands_in_files_are_one_image(folder, init, image, label):
    pixels, truth = write_bands(folder, image, label)
    found, said = init("--channels", "3")
    assert_labels(found, truth)
    assert any(f"in this order: {first}, " in said for first in truth)
    config = load_config(folder.with_name("made") / "config.yaml")
    for split in (config.data.train_split, config.data.eval_split):
        dataset = open_dataset(config.data, split)
        for i, pair in enumerate(dataset.pairs):
            name = str(pair.image.relative_to(folder))
            np.testing.assert_array_equal(dataset[i][0], pixels[name])


@pytest.mark.parametrize(("image", "label"), BANDS)
def test_an_image_of_other_bands_is_refused(folder, refused, image, label):
    write_bands(folder, image, label)
    path = folder / image.format(i=3, k=3, name="green", city="zurich")
    other = folder / image.format(i=3, k=8, name="nir", city="zurich")
    other.parent.mkdir(exist_ok=True)
    path.rename(other)
    said = refused(code=3)
    assert "other bands than most" in said or "no labels that belong to them" in said


def test_scenes_whose_pictures_are_not_called_as_bands_are_no_images_of_bands(folder, refused):
    write_bands(folder, "scenes/scene{i:02}/P{k:02}.tif", "labels/scene{i:02}.tif")
    assert "no labels that belong to them" in refused(code=3)


# A file or a folder for each class


def test_a_class_that_two_images_show_is_one(folder, init):
    truth = {}
    classes = ("dent", "scratch", "rust")
    for i in range(40):
        save(folder / f"images/part{i:03}.png", scene(i)[0])
        label = np.zeros((64, 80), np.uint8)
        for k, name in enumerate(classes, start=1):
            if name != "rust" or i in (6, 20):
                shown = np.zeros_like(label, bool)
                shown[10 * k : 10 * k + 6, i : i + 9] = True
                save(folder / f"masks/{name}/part{i:03}.png", mask_of(shown))
                label[shown] = k
        truth[f"images/part{i:03}.png"] = label
    found, _ = init("--names", ",".join(classes))
    assert names(folder) == ("background", *classes)
    assert_labels(found, truth)


def organs(folder, label="masks/s{i:02}_{name}.png"):
    """A lesion in a liver, a file each."""
    truth = {}
    for i in range(8):
        save(folder / f"images/s{i:02}.png", scene(i)[0])
        liver, lesion = disc(i, 20), disc(i, 5)
        for name, shown in (("liver", liver), ("lesion", lesion)):
            save(folder / label.format(i=i, name=name), mask_of(shown))
        truth[f"images/s{i:02}.png"] = np.where(lesion, 2, liver).astype(np.uint8)
    return truth


@pytest.mark.parametrize(
    "label", ["masks/s{i:02}_{name}.png", "masks/{name}/s{i:02}.png", "masks/s{i:02}/{name}.png"]
)
def test_a_smaller_area_lies_on_a_larger_one(folder, init, label):
    truth = organs(folder, label)
    found, said = init("--names", "liver,lesion")
    assert_labels(found, truth)
    twice = sum(int((x == 2).sum()) for x in truth.values()) / sum(x.size for x in truth.values())
    assert f"{twice:.2%} of the pixels are in several: the smaller area counts" in said
    shares = Counter(np.concatenate([x.ravel() for x in truth.values()]).tolist())
    assert f"  liver                {shares[1] / shares.total():7.2%}" in said


def test_a_class_of_which_nothing_is_left_is_refused(folder, refused):
    for i in range(8):
        save(folder / f"images/s{i:02}.png", scene(i)[0])
        parts = {"left": disc(i) & (np.arange(80) < 40), "right": disc(i) & (np.arange(80) >= 40)}
        for name, shown in {**parts, "body": disc(i)}.items():
            save(folder / f"masks/s{i:02}_{name}.png", mask_of(shown))
    assert "nothing is left of body: other classes, in smaller areas" in refused(code=3)


def test_names_choose_and_order_the_classes_of_files(folder, init, refused, lab):
    truth = organs(folder)
    found, _ = init("--names", "lesion=2,liver=1")
    assert names(folder) == ("background", "liver", "lesion")
    assert_labels(found, truth)
    lab.folder.joinpath("made").rename(lab.folder / "first")
    found, _ = init("--names", "lesion")
    assert names(folder) == ("background", "lesion")
    assert_labels(found, {name: (label == 2).astype(np.uint8) for name, label in truth.items()})
    lab.folder.joinpath("made").rename(lab.folder / "second")
    assert "--names: tumour: no such class; the files show lesion, liver" in refused(
        "--names", "liver,tumour"
    )
    for wrong in ("lesion=3,liver=1", "lesion=1,liver", "liver,liver"):
        assert "--names" in refused("--names", wrong)


def test_folders_of_masks_with_the_names_of_images_are_classes(folder, init):
    """masks/scratch/x00.png and masks/dent/x01.png, of images/x00.png and images/x01.png."""
    truth = {}
    for i in range(12):
        name = ("dent", "scratch")[i % 2]
        save(folder / f"images/x{i:02}.png", scene(i)[0])
        save(folder / f"masks/{name}/x{i:02}.png", mask_of(disc(i)))
        truth[f"images/x{i:02}.png"] = disc(i) * np.uint8(1 + i % 2)
    found, _ = init()
    assert names(folder) == ("background", "dent", "scratch")
    assert_labels(found, truth)


def parts_with_defects(folder, image="test/{name}/{i:03}.png"):
    """As MVTec has them; the good ones have no mask."""
    truth = {}
    for k, name in enumerate(("dent", "hole"), start=1):
        for i in range(6):
            path = image.format(name=name, i=i)
            save(folder / path, scene(10 * k + i)[0])
            save(folder / f"ground_truth/{name}/{i:03}_mask.png", mask_of(disc(i + k)))
            truth[path] = disc(i + k) * np.uint8(k)
    for i in range(4):
        save(folder / f"train/good/{i:03}.png", scene(100 + i)[0])
        truth[f"train/good/{i:03}.png"] = np.zeros((64, 80), np.uint8)
    return truth


def test_folders_that_images_and_masks_share_are_asked_about(folder, init, asked, lab):
    truth = parts_with_defects(folder)
    said = asked()
    assert "in 2 folders, which the images share (dent, hole): classes, or places?" in said
    assert "classes: --names dent,hole" in said
    assert "places, with one class: --names background,foreground" in said
    found, said = init("--names", "dent,hole")
    assert "4 images have no label: train/good/000.png, " in said
    assert_labels(found, {name: label for name, label in truth.items() if "good" not in name})
    lab.folder.joinpath("made").rename(lab.folder / "first")
    found, _ = init("--names", "dent,hole", "--missing", "background")
    assert_labels(found, truth)
    lab.folder.joinpath("made").rename(lab.folder / "second")
    found, _ = init("--names", "background,defect")
    with_masks = {name: label for name, label in truth.items() if "good" not in name}
    assert_labels(found, {name: (label > 0).astype(np.uint8) for name, label in with_masks.items()})


def patients(folder, number=6, slices=3):
    """`number` patients of some slices each, whose names show no sequence."""
    truth = {}
    for i in range(number * slices):
        name = f"{'abcdef'[i // number]}{i * 37 % 101}_p{i % number}.png"
        image, truth[f"images/{name}"] = scene(i)
        save(folder / f"images/{name}", image)
        save(folder / f"masks/{name}", truth[f"images/{name}"])
    return truth


def split_of(folder, name):
    lines = (folder.with_name("made") / name).read_text().splitlines()
    return [line.split("\t")[0] for line in lines if not line.startswith("#")]


def test_a_group_is_on_one_side_of_the_split(folder, init):
    truth = patients(folder)
    found, said = init("--group", r"_(p\d)", "--val", "0.4")
    assert "whole groups (6, --group)" in said
    train, val = ({path[-6:] for path in split_of(folder, f"{x}.txt")} for x in ("train", "val"))
    assert (len(train | val), len(val)) == (6, 2)
    assert not train & val
    assert_labels(found, truth)


def test_groups_that_do_not_fit_are_refused(folder, refused, tmp_path):
    truth = patients(folder)
    assert "--group q: 18 images have no group: images/" in refused("--group", "q")
    assert "--group p(?=[0-9]): all images are of one group" in refused("--group", "p(?=[0-9])")
    assert "--group images/(.*): each image is a group" in refused("--group", "images/(.*)")
    (tmp_path / "val.txt").write_text("\n".join([*truth][:4]))
    said = refused("--group", r"_(p\d)", "--val", tmp_path / "val.txt")
    assert "4 groups are on both sides of the splits that are there: p0, p1, p2" in said


def test_given_splits_that_divide_sequences_are_told(folder, init, tmp_path):
    """One slice of every patient is evaluated on, as a file of names says."""
    for i in range(24):
        image, classes = scene(i)
        save(folder / f"images/pat{'abcdef'[i // 4]}_slice{i % 4}.png", image)
        save(folder / f"masks/pat{'abcdef'[i // 4]}_slice{i % 4}.png", classes)
    (tmp_path / "val.txt").write_text("".join(f"pat{x}_slice2.png\n" for x in "abcdef"))
    _, said = init("--val", tmp_path / "val.txt")
    assert "6 of 6 images to evaluate on have a near-duplicate or a neighbour among" in said


def test_a_rare_class_is_trained_on_and_evaluated(folder, init):
    """One that two of 40 images show, wherever their names put them."""
    for rare in ((3, 17), (8, 30), (21, 22)):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder.with_name("made"), ignore_errors=True)
        for i in range(40):
            image, classes = scene(i, num_classes=3)
            if i in rare:
                classes[20:30, 20:30] = 3
            save(folder / f"images/{i * 37 % 101:03}x.png", image)
            save(folder / f"masks/{i * 37 % 101:03}x.png", classes)
        init()
        shown = {f"images/{i * 37 % 101:03}x.png" for i in rare}
        for name in ("train.txt", "val.txt"):
            assert len(shown.intersection(split_of(folder, name))) == 1


def test_a_split_leaves_no_class_out_of_training(folder, init):
    """A folder of images and masks for each class, which would be divided as a whole."""
    for k, name in enumerate(("Blowhole", "Break", "Crack", "Fray", "Uneven")):
        for i in range(7):
            stem = folder / f"MT_{name}/Imgs/exp1_num_{100 * k + i}"
            save(stem.with_suffix(".jpg"), scene(10 * k + i)[0])
            save(stem.with_suffix(".png"), mask_of(disc(10 * k + i)))
    _, said = init("--names", "Blowhole,Break,Crack,Fray,Uneven")
    assert "no image to train on shows" not in said


def test_the_files_of_a_case_lie_in_its_folder(folder, init):
    truth = {}
    for i in range(8):
        save(folder / f"s{i:02}/image.png", scene(i)[0])
        for k, name in enumerate(("kidney", "liver"), start=1):
            save(folder / f"s{i:02}/masks/{name}.png", mask_of(disc(i, 4 * k)))
        truth[f"s{i:02}/image.png"] = np.where(disc(i, 4), 1, 2 * disc(i, 8)).astype(np.uint8)
    found, _ = init()
    assert_labels(found, truth)


def test_numbers_of_slices_are_no_roles(folder, init):
    """p00_z03_liver.png is of p00_z03.png."""
    truth = {}
    for i in range(12):
        stem = f"p{i // 4:02}_z{i % 4:02}"
        save(folder / f"images/{stem}.png", scene(i)[0])
        for k, name in enumerate(("liver", "spleen"), start=1):
            save(folder / f"masks/{stem}_{name}.png", mask_of(disc(i, 12 - 4 * k)))
        label = np.where(disc(i, 4), 2, disc(i, 8)).astype(np.uint8)
        truth[f"images/{stem}.png"] = label
    found, _ = init()
    assert_labels(found, truth)


def test_images_without_a_label_show_background_where_it_is_said(folder, init):
    truth = {}
    for i in range(12):
        image, classes = scene(i)
        save(folder / f"images/t{i}.png", image)
        if i % 3:
            save(folder / f"masks/t{i}.png", classes)
        truth[f"images/t{i}.png"] = classes * np.uint8(i % 3 > 0)
    found, _ = init("--missing", "background")
    assert_labels(found, truth)


@pytest.mark.parametrize("copy", ["png/copy{i}.png", "again/{i}.jpg", "jpg/{i}_mask_2.jpg"])
def test_copies_and_masks_without_a_label_are_no_background(folder, init, copy):
    truth = {}
    for i in range(12):
        image, label = scene(i)
        save(folder / f"jpg/{i}.jpg", image)
        truth[f"jpg/{i}.jpg"] = label * np.uint8(i < 9)
        if i < 9:
            save(folder / f"labels/jpg/{i}.tif", label)
            mask = np.dstack([mask_of(disc(i))] * 3)
            save(folder / copy.format(i=i), mask if "mask" in copy else image)
    (folder / "pairs.csv").write_text("".join(f"jpg/{i}.jpg,{i}.tif\n" for i in range(9)))
    found, said = init("--missing", "background")
    assert_labels(found, truth)
    assert "9 images have no label" in said


# Numbers of images, and other numbers


def objects(folder, image, label, count):
    """`count(i)` objects in image i, a file each; all are of one class."""
    truth = {}
    for i in range(8):
        path = f"images/{image.format(i=i)}.jpg"
        save(folder / path, scene(i)[0])
        shown = [disc(10 * i + k, 4) for k in range(count(i))]
        for k, mask in enumerate(shown):
            save(folder / "masks" / f"{label.format(i=i, k=k)}.png", mask_of(mask))
        truth[path] = np.any(shown, axis=0).astype(np.uint8)
    return truth


OBJECTS = [
    ("{i}", "{i}/{k}", lambda i: 3),
    ("{i}", "{i}/mask_{k}", lambda i: 2 + (i == 1)),
    ("{i}", "{i:04}/{k:04}", lambda i: 3),
    ("{i:04}", "{i:04}/{k:04}", lambda i: 2 + i % 4),
    ("img_{i}", "img_{i}/{k}", lambda i: 3),
    ("img_{i}", "img_{i}/{k}", lambda i: 8),
    ("part{i}a", "part{i}a/{k}", lambda i: 9),
]


@pytest.mark.parametrize(("image", "label", "count"), OBJECTS)
def test_objects_in_a_folder_that_is_called_as_an_image_are_of_it(
    folder, init, image, label, count
):
    truth = objects(folder, image, label, count)
    found, _ = init()
    assert_labels(found, truth)


def test_objects_whose_folder_and_file_are_images_are_refused(folder, refused):
    objects(folder, "{i}", "{i}/{k}", lambda i: 8)
    assert "its folder and its own name are both called as images" in refused(code=3)
    shutil.rmtree(folder)
    objects(folder, "{i}", "{i}/{k}", lambda i: 5 * (i < 4))  # as four classes in five images
    assert "its folder and its own name are both called as images" in refused(code=3)


@pytest.mark.parametrize(("label", "classes"), [("{k}/{i}", 3), ("{bucket}/{i:05}_{name}", 2)])
def test_folders_of_classes_or_buckets_that_are_called_as_images_are_none(
    folder, init, label, classes
):
    truth = {}
    for i in range(10):
        save(folder / f"img/{i}.jpg", scene(i)[0])
        truth[f"img/{i}.jpg"] = np.zeros((64, 80), np.uint8)
        for k in range(classes):
            shown = np.zeros((64, 80), bool)
            shown[10 * k : 10 * k + 8, 3 * i : 3 * i + 20] = True
            name = label.format(i=i, k=k, bucket=i // 5, name=("hair", "skin")[k % 2])
            save(folder / "anno" / f"{name}.png", mask_of(shown))
            truth[f"img/{i}.jpg"][shown] = k + 1
    found, _ = init()
    assert_labels(found, truth)


# Pairs


@pytest.mark.parametrize("header", ["image,mask", "mask,image", ""])
def test_a_table_of_pairs_counts_whatever_it_is_called(folder, init, header):
    order = np.random.default_rng(0).permutation(16)
    rows, truth = [header] if header else [], {}
    for i in range(16):
        image, classes = scene(i)
        save(folder / f"images/{i:03}.png", image)
        save(folder / f"masks/{order[i]:03}.png", classes)
        row = [f"{i:03}.png", f"{order[i]:03}.png"]
        rows.append(",".join(row[::-1] if header.startswith("mask") else row))
        truth[f"images/{i:03}.png"] = classes
    (folder / "mapping.csv").write_text("\n".join(rows) + "\n")
    found, said = init()
    assert "pairs of mapping.csv" in said
    assert_labels(found, truth)


def test_a_listed_label_that_cannot_be_read_is_refused_and_not_replaced(folder, init, refused):
    rows, truth = [], {}
    for i in range(8):
        image, truth[f"images/a{i}.png"] = scene(i)
        label = truth[f"images/a{i}.png"].astype(np.int16)
        label[:, 70:] = -1
        save(folder / f"images/a{i}.png", image)
        save(folder / f"labels/a{i}.tif", label)
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
    ("train/vi/{i}D.png", "train/ir/{i}D.png"),
    ("vis/{i:03}D.png", "ir/{i:03}D.png"),
    ("Visible/{i}.png", "Infrared/{i}.png"),
    ("images/rgb/{i}.png", "images/nir/{i}.png"),
]


@pytest.mark.parametrize(("image", "other"), PHOTOS)
def test_the_photo_is_trained_of_pictures_of_one_label(folder, init, image, other):
    truth = {}
    for i in range(8):
        photo, classes = scene(i)
        second = photo[..., 0].astype(np.uint16) * 99 if "depth" in other else 255 - photo
        second = second[..., 0] if "nir" in other else second
        save(folder / image.format(i=i), photo)
        save(folder / other.format(i=i), second)
        name = PurePosixPath(image.format(i=i))
        save(folder / name.parent.with_name("label") / f"{name.stem}.png", classes)
        truth[image.format(i=i)] = classes
    found, said = init()
    assert_labels(found, truth)
    assert "8 labels fit several pictures, the first is used: " in said


def test_two_dates_are_refused_unless_a_list_chooses(folder, init, refused):
    truth = {}
    for i in range(8):
        photo, truth[f"B/{i}.png"] = scene(i)
        save(folder / f"A/{i}.png", 255 - photo)
        save(folder / f"B/{i}.png", photo)
        save(folder / f"label/{i}.png", truth[f"B/{i}.png"])
    assert "several pictures for one label: A/0.png and B/0.png" in refused(code=3)
    rows = "".join(f"B/{i}.png,label/{i}.png\n" for i in range(8))
    (folder / "pairs.csv").write_text(rows)
    found, _ = init()
    assert_labels(found, truth)


def test_tables_that_disagree_are_refused(folder, refused):
    for i in range(8):
        image, classes = scene(i)
        save(folder / f"images/{i:03}.png", image)
        save(folder / f"masks/{i:03}.png", classes)
    for name, step in (("a.csv", 0), ("b.txt", 1)):
        with (folder / name).open("w") as file:
            rows = csv.writer(file)
            rows.writerows(
                [f"images/{i:03}.png", f"masks/{(i + step) % 8:03}.png"] for i in range(8)
            )
    assert "has the label masks/000.png in a.csv and masks/001.png in b.txt" in refused()


def copies(folder, image, label):
    """Each picture, the same mirrored, and upside down."""
    truth = {}
    for i in range(8):
        pixels, classes = scene(i)
        for end, turned in (("", (1, 1)), ("_flip", (1, -1)), ("_rot", (-1, -1))):
            down, right = turned
            names = {"i": i, "end": end, "hash": f"{i * 7919 + len(end) * 104729:032x}"}
            save(folder / image.format(**names), pixels[::down, ::right])
            save(folder / label.format(**names), classes[::down, ::right])
            truth[image.format(**names)] = classes[::down, ::right]
    return truth


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("images/img_{i:03}{end}.png", "masks/img_{i:03}{end}.png"),
        ("images/img_{i:03}{end}.png", "masks/img_{i:03}{end}_mask.png"),
        ("images/IMG_{i}_jpg.rf.{hash}.png", "masks/IMG_{i}_jpg.rf.{hash}.png"),
    ],
)
def test_copies_of_a_picture_have_their_own_labels_and_one_split(folder, init, lab, image, label):
    truth = copies(folder, image, label)
    found, said = init()
    assert_labels(found, truth)
    assert "copies and like images kept together" in said
    made = folder.with_name("made")
    lists = [(made / name).read_text().splitlines()[2:] for name in ("train.txt", "val.txt")]
    sources = [
        {source_of(line.split("\t")[0].removesuffix(".png")) for line in lines} for lines in lists
    ]
    assert all(sources)
    assert not sources[0] & sources[1]

    lines = [*lists[0], *lists[1]]
    (made / "train.txt").write_text("\n".join(lines[::2]))
    (made / "val.txt").write_text("\n".join(lines[1::2]))
    said = lab.command("data", "check", made, "--jobs", "1").out
    assert "images to evaluate on are copies of images to train on, flipped or" in said


@pytest.mark.parametrize("copy", ["{}_aug{}", "{} ({})"])
def test_copies_stay_together_where_names_show_sequences(folder, init, copy):
    """`img_001` and `img_001_aug0` look like two sequences, with frames of one number."""
    for i in range(10):
        image, classes = scene(i)
        for name in (f"img_{i:03}", *(copy.format(f"img_{i:03}", k) for k in (1, 2))):
            save(folder / f"images/{name}.png", image)
            save(folder / f"masks/{name}.png", classes)
    init()
    train, val = ({path[:14] for path in split_of(folder, f"{x}.txt")} for x in ("train", "val"))
    assert len(train) + len(val) == 10
    assert not train & val


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
    for i in range(8):
        image, classes = scene(i)
        label = cv2.resize(2 * (classes > 0).astype(np.uint8), (160, 128), interpolation=1)
        assert set(np.unique(label)) == {0, 1, 2}
        save(folder / f"images/t{i}.png", cv2.resize(image, (160, 128)))
        save(folder / f"masks/t{i}.png", label)
    said = asked()
    assert "1 only where a lower and a higher value meet" in said
    assert "resized: no data there: --ignore 1" in said
    found, _ = init("--ignore", "none")
    assert {v for label in found.values() for v in np.unique(label).tolist()} == {0, 1, 2}
    said = lab.command("data", "check", folder.with_name("made"), "--jobs", "1").out
    assert "class_1 is only where a lower and a higher value meet" in said


def test_thick_areas_between_others_are_not_doubted(folder, init):
    for i in range(8):
        label = np.repeat(np.arange(4, dtype=np.uint8), 20)[None].repeat(64, 0)
        save(folder / f"images/t{i}.png", scene(i)[0])
        save(folder / f"masks/t{i}.png", np.roll(label, i, axis=1))
    assert "class_2" in init()[1]


def test_a_pixel_is_blended_if_lower_and_higher_values_are_near():
    label = np.array([[0, 0, 0, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0]], np.uint8).repeat(6, 0)
    np.testing.assert_array_equal(np.flatnonzero(blended_pixels(label)[0]), [3])
    colors = np.array([[[0, 0, 0]] * 3 + [[100, 0, 40]] + [[200, 0, 80]] * 3], np.uint8)
    np.testing.assert_array_equal(np.flatnonzero(blended_pixels(colors)[0]), [3])


def test_grey_levels_from_a_jpeg_are_refused(folder, refused):
    for i in range(8):
        image, classes = scene(i, 3)
        _, content = cv2.imencode(".jpg", 100 * classes, [cv2.IMWRITE_JPEG_QUALITY, 95])
        save(folder / f"images/t{i}.png", image)
        save(folder / f"masks/t{i}.png", cv2.imdecode(content, cv2.IMREAD_GRAYSCALE))
    assert "values, most on few pixels: edges were smoothed or resized" in refused(code=3)


def test_255_on_most_pixels_is_asked_about(folder, init, asked):
    truth = {}
    for i in range(8):
        image, classes = scene(i)
        save(folder / f"images/t{i}.png", image)
        save(folder / f"masks/t{i}.png", classes - np.uint8(1))  # 255 is the background
        truth[f"images/t{i}.png"] = (classes - np.uint8(1)).clip(max=3)
    said = asked()
    assert "255 is most of them" in said
    found, _ = init("--ignore", "none")
    assert_labels(found, truth)


def test_255_on_most_pixels_of_a_list_is_told(folder, lab):
    for i in range(8):
        image, classes = scene(i)
        kind = "train" if i < 6 else "val"
        save(folder / f"images/{kind}/t{i}.png", image)
        save(folder / f"labels/{kind}/t{i}.png", classes - np.uint8(1))
    classes = [{"name": name, "ids": [i]} for i, name in enumerate(NAMES[1:])]
    (lab.folder / "classes.yaml").write_text(yaml.safe_dump({"classes": classes}))
    data = {"layout": "folders", "classes": str(lab.folder / "classes.yaml")}
    config = lab.config(folder, data=data)
    told = r"[67]\d% of the pixels have no class: if they show a background"
    assert re.search(told, lab.done("data", "check", config, "--jobs", "1").out)


def test_255_on_the_largest_area_beside_few_ids_is_asked_about(folder, init, asked):
    truth = {}
    for i in range(8):
        image, classes = scene(i)
        classes[:24] = 255
        save(folder / f"images/t{i}.png", image)
        save(folder / f"masks/t{i}.png", classes)
        truth[f"images/t{i}.png"] = classes
    said = asked()
    assert "255 is a large part of them" in said
    assert "--ignore 255" in said
    found, _ = init("--ignore", "255")
    assert_labels(found, truth)


def test_white_beside_colours_is_said_to_be_perhaps_no_data(folder, init):
    truth = {}
    for i in range(8):
        image, classes = scene(i)
        colors = COLORS[classes]
        colors[:20] = 255
        save(folder / f"images/t{i}.png", image)
        save(folder / f"masks/t{i}.png", colors)
        ids = np.array([0, 3, 2, 1])[classes]  # by their colours
        truth[f"images/t{i}.png"] = np.where(np.arange(64)[:, None] < 20, 255, ids)
    _, said = init()
    assert "white is taken for a class; if it means no data, add --ignore '#ffffff'" in said
    shutil.rmtree(folder.with_name("made"))
    found, _ = init("--ignore", "#ffffff")
    assert_labels(found, truth)


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
    for i in range(8):
        image, classes = scene(i)
        save(folder / f"images/t{i}.png", image)
        shift = (3, -4, 7) if is_palette else (i % 5, 5 - i, i)
        shown = (COLORS + shift).clip(0, 255).astype(np.uint8)
        if is_palette:
            palette = shown[np.argsort(order)]
            save_indexed(folder / f"masks/t{i}.png", order[classes], palette)
        else:
            save(folder / f"masks/t{i}.png", shown[classes])
        truth[f"images/t{i}.png"] = classes
    found, said = init()
    assert {names(folder).index(name) for name in NAMES} == {0, 1, 2, 3}
    at = np.array([names(folder).index(name) for name in NAMES], np.uint8)
    assert_labels(found, {name: at[label] for name, label in truth.items()})
    if not is_palette:
        pixels = sum(int((x == 3).sum()) for x in truth.values())
        assert f"8 shades of #14a03c, {pixels} pixels, at most 7 off in a channel" in said


def test_a_colour_between_two_classes_is_refused(folder, refused):
    write_colors(folder, [*COLORS[:3], COLORS[2] + 6])
    for i in range(8):
        image, classes = scene(i)
        save(folder / f"images/t{i}.png", image)
        drawn = np.array([*COLORS[:3], COLORS[2] + np.uint8(6)])[classes]
        drawn[60:62, :9] = COLORS[2] + np.uint8(3)
        save(folder / f"masks/t{i}.png", drawn)
    said = refused(code=3)
    assert "#5d5d67 (144 pixels, as in masks/t0.png)" in said
    assert "is within 3 of #5a5a64 and 3 of #60606a" in said


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252", "utf-16-le"])
def test_names_are_read_in_the_encoding_of_their_file(folder, init, encoding):
    truth = {}
    german = ("Hintergrund", "Straße", "Gehölz", "Häuser")
    write_colors(folder, names=german)
    path = folder / "label_colors.txt"
    path.write_bytes(path.read_text().encode(encoding))
    for i in range(8):
        image, classes = scene(i)
        save(folder / f"images/t{i}.png", image)
        save(folder / f"masks/t{i}.png", COLORS[classes])
        truth[f"images/t{i}.png"] = classes
    found, said = init()
    assert ("not UTF-8: read as Windows-1252" in said) == (encoding == "cp1252")
    if encoding == "utf-16-le":  # without a mark
        assert "file has no names of classes: label_colors.txt" in said
        assert_same_division(found, truth)
    else:
        assert names(folder) == german
        assert_labels(found, truth)


def in_two_channels(folder, third=0):
    """As SYNTHIA has them: ids in the first of three 16-bit channels, objects in the second."""
    truth = {}
    for i in range(8):
        image, classes = scene(i)
        save(folder / f"RGB/{i:07}.png", image)
        objects = cv2.connectedComponents((classes > 1).astype(np.uint8))[1] * (classes > 1)
        stored = np.dstack([classes, objects, np.full_like(classes, third)]).astype(np.uint16)
        save(folder / f"GT/LABELS/{i:07}.png", np.ascontiguousarray(stored[..., ::-1]))  # as BGR
        truth[f"RGB/{i:07}.png"] = classes
    return truth


def test_ids_in_the_first_of_three_channels_are_read(folder, init):
    truth = in_two_channels(folder)
    found, said = init()
    assert "labels hold ids in the first of three 16-bit channels, and numbers of objects" in said
    assert_labels(found, truth)


def test_other_16_bit_colours_are_refused(folder, refused):
    in_two_channels(folder, third=7)
    assert "16-bit colours: save ids as PNG of one channel" in refused(code=3)


def reordered(folder, count=8):
    """Palettes that were made file by file: the colours are right in each."""
    truth = {}
    for i in range(count):
        image, classes = scene(i)
        save(folder / f"images/t{i}.png", image)
        order = np.roll(np.arange(4), i)  # of the indices
        save_indexed(folder / f"masks/t{i}.png", order[classes], COLORS[np.argsort(order)])
        truth[f"images/t{i}.png"] = classes
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


@pytest.mark.parametrize("is_named", [False, True])
def test_palettes_that_differ_are_refused_where_nothing_names_their_colours(
    folder, refused, is_named
):
    reordered(folder)
    if is_named:  # all but one
        write_colors(folder, [*COLORS[:3], COLORS[3] + 60])
    said = refused(code=3)
    assert "gives the same values other colours than those before it" in said
    assert "or name the colours in class_dict.csv" in said


def test_what_is_transparent_in_a_mask_is_not_drawn(folder, init):
    truth = {}
    for i in range(8):
        image, classes = scene(i)
        save(folder / f"images/t{i}.png", image)
        drawn = np.dstack([COLORS[classes], 255 * (classes > 0).astype(np.uint8)])
        drawn[..., :3][classes == 0] = 77  # what an editor leaves below
        save(folder / f"masks/t{i}.png", drawn)
        truth[f"images/t{i}.png"] = classes
    found, _ = init()
    assert_same_division(found, truth)


def test_ids_of_objects_may_be_one_class(folder, init, asked):
    truth = {}
    for i in range(8):
        image, classes = scene(i, 2)
        count, objects = cv2.connectedComponents(classes)
        for k in range(3 + i % 3):  # some have more than others
            objects[8 + 6 * k : 11 + 6 * k, 60:64] = count + k
        save(folder / f"images/t{i}.png", image)
        save(
            folder / f"masks/t{i}.png", np.unique(objects, return_inverse=True)[1].astype(np.uint8)
        )
        truth[f"images/t{i}.png"] = (objects > 0).astype(np.uint8)
    assert "objects of one class: --instances binary" in asked()
    found, _ = init("--instances", "binary", "--names", "background,cell")
    assert names(folder) == ("background", "cell")
    assert_labels(found, truth)


# Orientation


def photo(path, upright, orientation):
    """A JPEG that a viewer turns by its EXIF to show `upright`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(to_stored(upright, orientation)))
    stored.save(path, exif=exif, quality=95)
    shown = np.asarray(ImageOps.exif_transpose(Image.open(path)))
    assert abs(shown.astype(int) - upright).mean() < 12


@pytest.mark.parametrize("orientations", [(1, 6), (8, 3), (5, 2, 7, 4)])
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
    assert "as EXIF turns the images, by their sizes" in said
    assert_labels(found, truth)


def test_labels_on_the_pixels_as_stored_stay(folder, init, refused):
    truth = {}
    for i in range(8):
        image, classes = scene(i)
        photo(folder / f"images/p{i}.jpg", image, 6)
        truth[f"images/p{i}.jpg"] = np.rot90(classes)
        save(folder / f"labels/p{i}.png", truth[f"images/p{i}.jpg"])
    assert_labels(init()[0], truth)
    shutil.rmtree(folder.with_name("made"))
    save(folder / "labels/p3.png", scene(3)[1])
    assert "1 label has another size than the image: labels/p3.png: 64x80" in refused(code=3)


# Places


def georeferenced(path, array, x, y, size=1.0, **tags):
    """A TIFF whose upper left corner is at x, y."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = (
        {"photometric": tags["photometric"], "extrasamples": ["unassalpha"]}
        if ("photometric" in tags)
        else {}
    )
    extra = [
        (33550, "d", 3, (size, size, 0.0), True),
        (33922, "d", 6, (0.0, 0.0, 0.0, x, y, 0.0), True),
        (34735, "H", 8, (1, 1, 0, 1, 3072, 0, 1, tags.get("epsg", 32632)), True),
    ]
    tifffile.imwrite(path, array, extratags=extra, **kind)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": 1008.0}, "8 pixels to the right and 0 down"),
        ({"y": 5000.0 + 64}, "0 pixels to the right and -64 down"),
        ({"size": 2.0}, "pixels of another size or direction"),
        ({"epsg": 32633}, "coordinate system EPSG:32633 instead of EPSG:32632"),
        ({"x": 1000.5}, None),
    ],
)
def test_labels_that_lie_elsewhere_on_the_map_are_refused(
    folder, lab, refused, init, changed, said
):
    truth = {}
    for i in range(8):
        image, classes = scene(i)
        place = {"x": 1000.0, "y": 5000.0}
        georeferenced(folder / f"images/t{i}.tif", image, **place)
        georeferenced(folder / f"labels/t{i}.tif", classes, **(place | changed))
        truth[f"images/t{i}.tif"] = classes
    if said is None:
        return assert_labels(init()[0], truth)
    assert said in refused(code=3)
    classes = [{"name": name, "ids": [i]} for i, name in enumerate(NAMES)]
    (lab.folder / "classes.yaml").write_text(yaml.safe_dump({"classes": classes}))
    data = {"layout": "folders", "classes": str(lab.folder / "classes.yaml")}
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            shutil.copytree(folder / kind, lab.folder / "split" / kind / split)
    config = lab.config(lab.folder / "split", data=data)
    assert said in lab.command("data", "check", config, "--jobs", "1").out
    assert said in lab.refused("train", config, "--output", lab.folder / "run", code=3)
    return None


@pytest.mark.parametrize(("right", "said"), [(8, "8 pixels to the right and 0 down"), (0, None)])
def test_world_files_tell_the_place(folder, init, refused, right, said):
    """Of pixels of half a metre; the corner of an image is half a pixel from the middle of one."""
    truth = {}
    for i in range(8):
        image, truth[f"images/t{i}.png"] = scene(i)
        save(folder / f"images/t{i}.png", image)
        save(folder / f"labels/t{i}.png", truth[f"images/t{i}.png"])
        for kind, x in (("images", 100.25), ("labels", 100.25 + 0.5 * right)):
            lines = f"0.5\n0.0\n0.0\n-0.5\n{x}\n199.75\n"
            (folder / kind / f"t{i}.pgw").write_text(lines)
    path = folder / "images/t0.png"
    assert place_of(path, read_info(path)) == ((0.5, 0.0, 100.0, 0.0, -0.5, 200.0), None)
    if said is None:
        assert_labels(init()[0], truth)
    else:
        assert said in refused(code=3)


def test_labels_whose_numbers_are_scaled_are_refused(folder, refused):
    for i in range(8):
        image, classes = scene(i)
        save(folder / f"images/t{i}.png", image)
        (folder / "labels").mkdir(exist_ok=True)
        item = '<Item name="{}" sample="0" role="{}">{}</Item>'
        items = item.format("OFFSET", "offset", 0) + item.format("SCALE", "scale", 0.5)
        tags = [(42112, "s", 0, f"<GDALMetadata>{items}</GDALMetadata>", True)]
        tifffile.imwrite(folder / f"labels/t{i}.tif", 2 * classes, extratags=tags)
    assert "GDAL's scale or offset makes other numbers of the label's ids" in refused(code=3)


@pytest.mark.parametrize(
    ("dtype", "mark"), [("int16", -1), ("float32", -9999), ("float32", np.nan)]
)
def test_no_data_below_0_is_no_data(folder, init, dtype, mark):
    truth = {}
    for i in range(8):
        image, classes = scene(i)
        save(folder / f"images/t{i}.png", image)
        label = classes.astype(dtype)
        label[50:] = mark
        (folder / "labels").mkdir(exist_ok=True)
        tags = [(42113, "s", 0, str(mark), True)]
        tifffile.imwrite(folder / f"labels/t{i}.tif", label, extratags=tags)
        truth[f"images/t{i}.png"] = np.where(np.arange(64)[:, None] < 50, classes, 255)
    found, said = init()
    assert "GDAL_NODATA" in said
    assert_labels(found, truth)


def test_a_class_file_by_hand_is_told_of_no_data_below_0(folder, lab):
    truth = {}
    for split, i in (("train", 0), ("train", 1), ("val", 2)):
        image, classes = scene(i)
        save(folder / f"images/{split}/t{i}.png", image)
        label = classes.astype(np.int16)
        label[50:] = -1
        (folder / f"labels/{split}").mkdir(parents=True, exist_ok=True)
        tags = [(42113, "s", 0, "-1", True)]
        tifffile.imwrite(folder / f"labels/{split}/t{i}.tif", label, extratags=tags)
        truth[f"images/{split}/t{i}.png"] = np.where(label < 0, 255, classes)
    path = lab.folder / "classes.yaml"
    path.write_text(yaml.safe_dump({"classes": list(NAMES)}))
    config = lab.config(folder, data={"layout": "folders", "classes": str(path)})
    hint = "such as -1: to ignore it, list it there: `ignore_ids: [255, 65535]`"
    assert hint in lab.command("data", "check", config, "--jobs", "1").out
    assert hint in lab.refused("train", config, "--output", lab.folder / "run", code=3)
    path.write_text(yaml.safe_dump({"classes": list(NAMES), "ignore_ids": [255, 65535]}))
    assert lab.command("data", "check", config, "--jobs", "1").code == 0
    data = load_config(config).data
    for split in ("train", "val"):
        dataset = open_dataset(data, split)
        for i, pair in enumerate(dataset.pairs):
            name = str(pair.image.relative_to(folder))
            np.testing.assert_array_equal(dataset[i][1], truth[name])


def test_transparent_pixels_of_a_map_are_no_data(folder, init):
    truth = {}
    for i in range(8):
        image, classes = scene(i)
        alpha = np.full((64, 80, 1), 255, np.uint8)
        alpha[:20] = 0
        pixels = np.concatenate([image, alpha], axis=2)
        georeferenced(folder / f"images/t{i}.tif", pixels, 0.0, 0.0, photometric="rgb")
        save(folder / f"labels/t{i}.png", classes)
        truth[f"images/t{i}.tif"] = np.where(np.arange(64)[:, None] < 20, 255, classes)
    found, _ = init("--channels", "3")
    assert_labels(found, truth)


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
    scenes = [[scene(10 * row + column) for column in range(5)] for row in range(6)]
    return tuple(np.vstack([np.hstack([s[k] for s in row]) for row in scenes]) for k in (0, 1))


NAMES_OF_TILES = [
    "tile_r{row}_c{column}.png",
    "img(r{row},c{column}).png",
    "area_{y}_{x}.png",
    "P0003__1__{x}___{y}.png",
    "{column}_{row}.png",
    "patch_{i}_{row}_by_{column}_LC08_053.png",
    "2QB7XA_{x}-{y}-{right}-{bottom}.jpg",
    "P0003_{y}_{bottom}_{x}_{right}.png",
    "area_{x}_{y}_80_64.png",
    "a{i:02}.tif",
]


@pytest.mark.parametrize("names", NAMES_OF_TILES)
def test_no_pixel_to_evaluate_on_is_trained_on(folder, init, lab, names):
    """Tiles overlap by a third; counted in rows and columns, in pixels, or on the map."""
    image, label = mosaic()
    boxes = {}
    for i in range(56):
        row, column = divmod(i, 7)
        y, x = 42 * row, 52 * column
        here = np.s_[y : y + 64, x : x + 80]
        for folder_name, whole in (("images", image), ("masks", label)):
            path = (
                folder
                / folder_name
                / names.format(
                    i=37 * i % 56, row=row, column=column, y=y, x=x, bottom=y + 64, right=x + 80
                )
            )
            if folder_name == "masks" and path.suffix == ".jpg":
                path = path.with_suffix(".png")
            if path.suffix == ".tif":
                georeferenced(path, whole[here], 1000.0 + x, 5000.0 - y)
            else:
                save(path, whole[here])
        boxes[f"images/{path.stem}{names[-4:]}"] = here
    found, said = init()
    assert "tiles that overlap them left out" in said
    made = folder.with_name("made")
    seen = []
    for name in ("train.txt", "val.txt"):
        seen.append(np.zeros(label.shape, bool))
        for line in (made / name).read_text().splitlines()[2:]:
            seen[-1][boxes[line.split("\t")[0]]] = True
    assert not (seen[0] & seen[1]).any()
    assert len(found) >= 40

    lines = [f"{name}\t{name.replace('images', 'masks').replace('.jpg', '.png')}" for name in boxes]
    (made / "train.txt").write_text("\n".join(lines[::2]))
    (made / "val.txt").write_text("\n".join(lines[1::2]))
    said = lab.command("data", "check", made, "--jobs", "1").out
    assert "28 tiles to evaluate on show what tiles to train on show, too" in said


def test_classes_of_a_part_of_the_picture_stay_to_train_on(folder, init):
    """A class in a corner, and tiles that overlap by half: most of them are left to train on."""
    image, label = mosaic()
    label = np.where(label == 3, 0, label)
    label[:100, :60] = 3
    for i in range(110):
        row, column = divmod(i, 10)
        here = np.s_[32 * row : 32 * row + 64, 36 * column : 36 * column + 64]
        save(folder / f"images/field-{row}-{column}.png", image[here])
        save(folder / f"masks/field-{row}-{column}.png", label[here])
    _, said = init()
    assert "no image to train on shows" not in said
    trained = (folder.with_name("made") / "train.txt").read_text().splitlines()[2:]
    assert len(trained) >= 66


def test_tiles_that_only_touch_do_not_overlap():
    image, _ = mosaic()
    at = [divmod(i, 5) for i in range(30)]
    boxes = tile_boxes(
        [f"a/tile_r{row}_c{column}" for row, column in at],
        [(64, 80)] * 30,
        [None] * 30,
        lambda i: image[64 * at[i][0] :, 80 * at[i][1] :][:64, :80],
    )
    assert boxes[7] == TileBox("a/tile", 64, 160, 128, 240)
    assert not list(overlapping(boxes))


@pytest.mark.parametrize("gap", [1, 30])
def test_frames_of_clips_are_no_tiles(gap):
    """street_2_30 is the second clip; its frames look alike, and none is left out."""
    names = [f"street_{clip}_{gap * frame}" for clip in range(3) for frame in range(6)]
    boxes = tile_boxes(
        names, [(64, 80)] * 18, [None] * 18, lambda i: np.roll(scene(i // 6)[0], i % 6, axis=1)
    )
    assert not list(overlapping(boxes))


@pytest.mark.parametrize("form", ["cam_{a}_{b}", "{a}-{b}", "cam_{a}_{b}_{c}_{d}", "{a}_by_{b}"])
@pytest.mark.parametrize("gap", [1, 30])
def test_frames_of_a_camera_that_stands_still_are_no_tiles(form, gap):
    """Soft pictures, which look nearly alike a few pixels farther."""
    at = [(gap * (i // 8), gap * (i % 8)) for i in range(48)]
    names = [form.format(a=a, b=b, c=a + 64, d=b + 80) for a, b in at]
    soft = cv2.GaussianBlur(scene(3)[0], (0, 0), 9)
    boxes = tile_boxes(names, [(64, 80)] * 48, [None] * 48, lambda i: np.roll(soft, i % 2, axis=1))
    assert not list(overlapping(boxes))
