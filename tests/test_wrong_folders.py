"""Folders that are not made for segmentation, or whose labels are of other images, say so.

And healthy ones, however faint or coarse, ask nothing.
"""

import json
import re

import cv2
import numpy as np
import pytest
from folders import images_in, quick_init, save, scene, write

from segtrain.desk.survey import check_pairs, compared_pairs, edges
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.questions import UndecidedError
from segtrain.errors import DataError


@pytest.fixture(autouse=True)
def no_network_and_no_contact_sheet(monkeypatch):
    quick_init(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


# Other tasks, and formats that are not read


def beside(name, content):
    """Images with a text file of this name each."""

    def make(folder):
        for i, _, _ in images_in(folder, "images/{i}.jpg"):
            path = folder / name.format(i=i)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    return make


def in_folders(*names):
    def make(folder):
        for k, name in enumerate(names):
            list(images_in(folder, f"{name}/{{i}}.jpg", seed=10 * k))

    return make


def hills(i, height):
    """A smooth picture (240, 320), from 0 to `height`."""
    y, x = np.mgrid[:240, :320]
    shown = np.sin(x / 60 + i) + np.cos(y / 70 + 2 * i)
    return np.round((shown + 2) / 4 * height)


def smooth(name, height, dtype=np.uint8):
    """Photos beside smooth pictures of this name."""

    def make(folder):
        for i in range(6):
            photo = np.random.default_rng(i).integers(0, 255, (240, 320, 3), dtype=np.uint8)
            save(folder / f"rgb/{i}.jpg", photo)
            save(folder / name.format(i=i), hills(i, height).astype(dtype))

    return make


def beside_all(name, content):
    """Images with one file for all of them."""

    def make(folder):
        list(images_in(folder, "images/{i}.jpg"))
        (folder / name).write_text(json.dumps(content))

    return make


YOLO = b"0 0.5 0.5 0.2 0.3\n1 0.1 0.2 0.1 1e-1\n"
OUTLINES = b"0 0.5 0.5 0.2 0.3 0.7 0.7\n"
VOC = b"<annotation><object><bndbox><xmin>1</xmin></bndbox></object></annotation>"
COCO = {
    "images": [{"id": i, "file_name": f"{i}.jpg", "height": 64, "width": 80} for i in range(6)],
    "annotations": [
        {"id": i, "image_id": i, "category_id": 1, "bbox": [1, 2, 3, 4], "segmentation": []}
        for i in range(6)
    ],
    "categories": [{"id": 1, "name": "cat"}],
}


def parts_of_people(folder):
    """Two people in each image, and a file for each, which shows three classes."""
    for i, _, classes in images_in(folder, "images/{i:04}.jpg"):
        for k in range(2):
            half = np.arange(80) // 40 == k
            save(folder / f"annotations/{i:04}_02_{k + 1:02}.png", np.where(half, classes, 0))


OTHER_TASKS = {
    "people": (
        parts_of_people,
        "annotations/0000_02_01.png: perhaps a file for each object: masks of one class are read "
        "from a folder for each image (masks/0000/1.png); lay those of several classes together",
    ),
    "matrices": (
        beside("labels/{i}.regions.txt", b"0 1 1 0 0 1 1 0\n" * 9),
        "6 files with matrices of integers as text (labels/0.regions.txt); numpy.loadtxt reads",
    ),
    "yolo": (beside("images/{i}.txt", YOLO), "6 files with boxes of YOLO (images/0.txt)"),
    "yolo_folder": (beside("labels/{i}.txt", YOLO), "boxes are no masks: outline the objects"),
    "yolo_outlines": (beside("labels/{i}.txt", OUTLINES), "add its data.yaml, or one with `names:"),
    "voc": (beside("Annotations/{i}.xml", VOC), "6 files with boxes of Pascal VOC"),
    "coco": (beside_all("a.json", COCO), "boxes are no masks"),
    "depth": (smooth("depth/{i}.png", 99), "depth/*.png: depth maps; save the label"),
    "wide_depth": (smooth("depth/{i}.png", 9000, np.uint16), "depth maps (depth/"),
    "in_masks": (smooth("masks/{i}.png", 60), "masks/*.png: smooth pictures, such as depth"),
    "flow": (
        beside("flow/{i}.flo", b"PIEH"),
        "6 files with optical flow (flow/0.flo)",
    ),
    "classes": (in_folders("cat", "dog"), "folders of whole pictures (cat, dog), as for"),
    "classes_of_splits": (
        in_folders("train/cat", "train/dog", "val/cat", "val/dog"),
        "24 images, and no labels for segmentation: folders of whole pictures (cat, dog)",
    ),
    "normals": (in_folders("rgb", "normals"), "normals/ holds surface normals (normals/"),
    "matlab": (beside("gt/{i}.mat", b"MATLAB 5.0"), "6 files with data of MATLAB (gt/0.mat); save"),
    "hdf5": (beside("gt/{i}.h5", b"\x89HDF"), "6 files with data of HDF5"),
    "svg": (beside("gt/{i}.svg", b"<svg/>"), "6 files with outlines of SVG"),
    "shapes": (beside_all("roofs.shp", ""), "save them as GeoJSON: ogr2ogr"),
    "labelbox": (beside_all("export.ndjson", {"data_row": {}}), "annotations of Labelbox"),
    "superannotate": (
        beside("images/{i}.jpg.json", b'{"metadata": {}, "instances": []}'),
        "annotations of SuperAnnotate (images/0.jpg.json); export masks",
    ),
    "darwin": (
        beside("images/{i}.json", b'{"version": "2", "item": {}, "annotations": []}'),
        "annotations of V7 Darwin",
    ),
    "other_json": (beside("gt/{i}.json", b'{"polygon": [1]}'), "of an unknown tool in JSON"),
    "other_xml": (beside("gt/{i}.xml", b"<Slide><Ring/></Slide>"), "an unknown tool (<Slide>)"),
    "table": (
        beside("images/boxes_{i}.csv", b"filename,xmin,ymin,xmax,ymax\n"),
        "6 files with boxes in a table",
    ),
}


@pytest.mark.parametrize(("make", "line"), OTHER_TASKS.values(), ids=OTHER_TASKS)
def test_a_folder_of_another_task_says_what_it_is(folder, lab, make, line):
    make(folder)
    assert line in lab.refused("init", folder, "--output", lab.folder / "made", code=3)


def test_smooth_labels_may_be_meant(folder, lab):
    smooth("masks/{i}.png", 60)(folder)
    words = "init", folder, "--output", lab.folder / "made", "--jobs", 1
    option = re.search(r"--labels (\S+) takes them as they are", lab.refused(*words, code=3))
    lab.done(*words, "--labels", option[1].strip("'"))


def test_folders_of_places_whose_labels_fit_no_image_are_no_classes(folder, lab):
    for k, name in enumerate(("bern", "rome")):
        for i, _, classes in images_in(folder, f"{name}/{{i}}.jpg", seed=10 * k):
            save(folder / f"masks/{name[0]}{i}.png", classes)
    assert "12 pictures look like labels, but have no image" in lab.refused(
        "init", folder, "--output", lab.folder / "made", code=3
    )


def test_depth_beside_labels_is_named_and_not_used(folder, lab):
    smooth("depth/{i}.png", 99)(folder)
    for i in range(6):
        save(folder / f"labels/{i}.png", np.uint8(hills(i, 255) > 128))
    said = lab.done("init", folder, "--output", lab.folder / "made", "--jobs", 1).out
    assert "warning: depth/*.png: depth maps, not used" in said
    assert "smooth pictures: 6" in said


def test_unread_files_are_named_where_images_have_no_label(folder, lab):
    write(folder)
    (folder / "gt.mat").write_bytes(b"MATLAB")
    words = "init", folder, "--output"
    assert "MATLAB" not in lab.done(*words, lab.folder / "a", "--jobs", 1).out
    (folder / "masks/t5.png").unlink()
    said = lab.command(*words, lab.folder / "b", "--jobs", 1).err
    assert "images/t5.png; not read: 1 file with data of MATLAB (gt.mat); save" in said


# Labels of other images


def pairs_of(drawn):
    """What is compared of images (H, W, C) and labels (H, W)."""
    images = [
        Image((f"{i:02}.png",), label.shape, 3, False, "uint8", None, "", "")
        for i, (_, label) in enumerate(drawn)
    ]
    labels = LabelSet("*.png", "ids", {x.path: (f"m{x.path}",) for x in images}, {})
    return [
        compared_pairs._pair(i, image, labels, pixels, label.astype(np.int32), label.shape)
        for i, (image, (pixels, label)) in enumerate(zip(images, drawn, strict=True))
    ]


def field(rng, size, smoothness):
    found = cv2.GaussianBlur(rng.normal(0, 1, size).astype(np.float32), (0, 0), smoothness)
    return found / found.std()


def grey(shown):
    return np.clip(shown, 0, 255).astype(np.uint8)[..., None]


def clouds(seed):
    """No edge where a cloud ends."""
    rng = np.random.default_rng(seed)
    depth = field(rng, (96, 128), 12) + 0.3 * field(rng, (96, 128), 3)
    bright = 60 / (1 + np.exp(-3 * (depth - 0.9)))
    return grey(90 + bright + 18 * field(rng, (96, 128), 6)), np.uint8(depth > 0.7)


def cells(seed, contrast=10):
    """Soft discs that noise nearly hides."""
    rng, label = np.random.default_rng(seed), np.zeros((128, 112), np.uint8)
    for x, y in rng.integers(0, 120, (20, 2)):
        cv2.circle(label, (int(x), int(y)), int(rng.integers(5, 8)), 1, -1)
    soft = cv2.GaussianBlur(label.astype(np.float32), (0, 0), 2)
    return grey(100 + contrast * soft + rng.normal(0, 10, label.shape)), label


def specks(seed):
    """One to three objects of some 30 pixels, in a JPEG."""
    rng, label = np.random.default_rng(seed), np.zeros((200, 160), np.uint8)
    for x, y in rng.integers(8, 150, (int(rng.integers(1, 4)), 2)):
        cv2.circle(label, (int(x), int(y)), 3, 1, -1)
    pixels = grey(
        120 + 20 * field(rng, label.shape, 8) + 8 * field(rng, label.shape, 1) - 40 * label
    )
    return cv2.imdecode(cv2.imencode(".jpg", pixels)[1], 0)[..., None], label


def textures(seed):
    """Two kinds of grain with one mean."""
    rng = np.random.default_rng(seed)
    label = np.uint8(field(rng, (96, 128), 10) > 0)
    grain = np.where(label > 0, field(rng, (96, 128), 0.8), field(rng, (96, 128), 2.5))
    return grey(120 + 25 * grain), label


def coarse(seed):
    """Outlines that are three pixels off."""
    pixels, label = scene(seed, 2)
    return pixels, np.roll(label, (3, -3), (0, 1))


def organ(seed):
    """Nearly the same place in all images."""
    rng, label = np.random.default_rng(seed), np.zeros((96, 96), np.uint8)
    center = tuple(np.int64(48 + rng.normal(0, 3, 2)).tolist())
    cv2.ellipse(label, center, (14, 18), 0, 0, 360, 1, -1)
    return grey(60 + 15 * label + rng.normal(0, 8, label.shape)), label


HEALTHY = [scene, clouds, cells, specks, textures, coarse, organ]


def check(drawn):
    labels = LabelSet("masks/*.png", "ids", {}, {})
    scores = edges.edge_scores(pairs_of(drawn))
    check_pairs._check_edges(labels, scores, "--pairs named")
    return scores


@pytest.mark.parametrize("number", [5, 12, 30])
@pytest.mark.parametrize("draw", HEALTHY)
def test_labels_of_their_own_images_ask_nothing(draw, number):
    scores = check([draw(seed) for seed in range(number)])
    # What passes was compared, and fits; of five nothing is asked whatever they are.
    assert scores.number == number
    assert number == 5 or scores.own > check_pairs._FITS_OWN


def mixed(order):
    """Pairs of images with the labels of others, whose places `order` gives for i of n."""
    return lambda drawn: [
        (pixels, drawn[order(i, len(drawn))][1]) for i, (pixels, _) in enumerate(drawn)
    ]


def exchanged(drawn):
    """The labels of the third and the tenth image."""
    return mixed(lambda i, _: {3: 10, 10: 3}.get(i, i))(drawn)


CHANCE = "labels do not fit their images better than other images"
MIXED = {
    "shifted": (mixed(lambda i, n: (i + 3) % n), "labels fit the image 3 places later better"),
    "back": (
        mixed(lambda i, n: (i - 1) % n),
        "labels fit the previous image better",
    ),
    "in_twos": (mixed(lambda i, n: i ^ 1), "fit the next or the previous image, in turn, better"),
    "shuffled": (mixed(lambda i, n: 7 * i % n), CHANCE),
    "turned": (
        lambda drawn: [(x, y[::-1]) for x, y in drawn],
        "fit their image upside down better",
    ),
    "exchanged": (exchanged, "2 of 16 labels fit another image better: m03.png fits 10"),
}


@pytest.mark.parametrize("draw", [scene, cells, clouds])
@pytest.mark.parametrize(("mix", "line"), MIXED.values(), ids=MIXED)
def test_labels_of_other_images_do_not_pass(draw, mix, line):
    with pytest.raises((DataError, UndecidedError), match=line):
        check(mix([draw(seed) for seed in range(16)]))


@pytest.mark.parametrize("draw", HEALTHY)
def test_labels_of_another_day_do_not_pass(draw):
    drawn = [(draw(seed)[0], draw(seed + 100)[1]) for seed in range(16)]
    with pytest.raises(UndecidedError, match=CHANCE):
        check(drawn)


def test_few_labels_that_fit_by_chance_ask_nothing():
    scores = check([(scene(seed)[0], scene(seed + 100)[1]) for seed in range(7)])
    assert scores.own < check_pairs._FITS_OWN


def test_labels_that_are_alike_ask_nothing():
    """A camera that stands still, before a scene that changes little."""
    rng = np.random.default_rng(0)
    pixels, label = scene(0)
    pairs = [(np.uint8(pixels // 2 + rng.integers(0, 9, pixels.shape)), label) for _ in range(12)]
    assert np.isnan(check(pairs).own)  # nothing can be told


# Questions of whole folders, whose answers go on


def other_day(folder):
    for i, _, _ in images_in(folder, number=12):
        save(folder / f"masks/t{i}.png", scene(i + 100)[1])


def files_of_classes_of_another_day(folder):
    for i, _, _ in images_in(folder, number=12):
        for k, name in enumerate(("car", "road"), start=1):
            save(folder / f"masks/{name}/t{i}.png", np.uint8(scene(i + 100)[1] == k) * 255)


def whole(folder):
    write(folder, lambda classes, i: np.full_like(classes, 255 * (i % 2)), number=12)


def half_inverted(folder):
    write(folder, lambda x, i: 255 * np.uint8((x > 0) ^ (i % 2 == 1)), number=12, num_classes=2)


QUESTIONS = {
    "other_day": (other_day, CHANCE),
    "files_of_classes": (files_of_classes_of_another_day, CHANCE),
    "whole": (whole, "each label has one value on all of its pixels: classes of whole images"),
    "half_inverted": (half_inverted, "6 of 12 masks look inverted: what lies inside of others"),
}


@pytest.mark.parametrize(("make", "line"), QUESTIONS.values(), ids=QUESTIONS)
def test_what_cannot_be_right_is_asked_and_the_answer_goes_on(folder, lab, make, line):
    make(folder)
    words = "init", folder, "--output", lab.folder / "made", "--jobs", 1
    said = lab.command(*words).err
    assert line in said
    (option,) = re.findall(r"^segtrain:   .*: (--.*)$", said, re.MULTILINE)
    lab.done(*words, *option.split())


def test_masks_that_may_be_inverted_as_a_whole_are_said(folder, lab):
    for i in range(12):
        pixels, label = organ(i)
        save(folder / f"images/{i}.png", pixels[..., 0])
        save(folder / f"masks/{i}.png", np.uint8(255 * (1 - label)))
    words = "init", folder, "--output"
    said = lab.done(*words, lab.folder / "a", "--jobs", 1).out
    assert "255 has the rim of all images, and 0 lies inside, as text on paper" in said
    said = lab.done(*words, lab.folder / "b", "--jobs", 1, "--names", "object,background").out
    assert "has the rim" not in said
