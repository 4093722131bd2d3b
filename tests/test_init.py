"""`segtrain init`: folders in many conventions, and those in which a guess would be wrong."""

import json
import re
import shlex
import shutil
from zipfile import ZipFile

import cv2
import numpy as np
import pytest
import tifffile
from folders import CASES, COLORS, NAMES, assert_same_division, images_in, labels_of, save, scene
from PIL import Image

from segtrain.cli import main
from segtrain.config import load_config
from segtrain.data import open_dataset
from segtrain.data.read.classes import load_class_file, says_no_class
from segtrain.data.read.image_formats import read_stored


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Nobody listens there, so pretrained weights are missing, whatever the machine reaches."""
    monkeypatch.setattr("segtrain.desk.commands.init._HOST", ("127.0.0.1", 9))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def plain(folder):
    """The folder with eight images whose labels hold the ids 0 to 3."""
    write(folder)
    return folder


def init(folder, *words, code=0):
    output = folder.with_name("made")
    assert main(["init", str(folder), "--output", str(output), *words]) == code
    return output


def parts(config):
    """The pairs to train on, and those to evaluate on."""
    data = config.data
    return [open_dataset(data, split).pairs for split in (data.train_split, data.eval_split)]


BLANK = np.zeros((1, 1, 3), np.uint8)
SLOW = pytest.mark.slow("desk", "data", "commands", "trainer", "config", "files")
# Each has a relative among the other conventions.
RELATED = {
    *("mask_beside_the_image", "colors_by_a_labelmap", "grey_in_three_channels"),
    *("splits_with_years", "splits_and_crops", "splits_in_the_stems", "an_end_for_each_class"),
    *("a_folder_named_as_its_images_begin", "a_word_for_labels_above_all_files"),
    *("a_word_for_images_in_both_names", "a_test_set_named_otherwise"),
    "ids_of_cityscapes_and_their_colors",
}


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=SLOW) if x in RELATED else x for x in CASES]
)
def test_a_folder_in_any_convention_is_read_as_it_is_meant(folder, case):
    """And its splits are kept."""
    truth = CASES[case](folder)
    before = sorted(folder.rglob("*"))
    found, config = labels_of(output := init(folder))
    assert_same_division(found, truth)
    assert sorted(folder.rglob("*")) == before  # the data are only read
    assert (output / "samples.png").stat().st_size > 1000
    assert config.data.channels == (4 if case == "bands_in_files" else 3)
    if case.startswith("splits"):
        names = {str(pair.image.relative_to(config.data.root)) for pair in parts(config)[1]}
        assert names == {name for name in truth if "val" in name}


def same(classes):
    return classes


def write(folder, make=same, number=8, num_classes=4, label="labels/{}.png"):
    for i in range(number):
        pixels, classes = scene(i, num_classes)
        save(folder / f"images/{i}.png", pixels)
        save(folder / label.format(i), make(classes))


def labelled(make, **options):
    """What writes a folder whose labels `make` draws of the classes."""
    return lambda folder: write(folder, make, **options)


def test_lists_of_splits_are_those_of_the_task(folder, capsys):
    """VOC has lists for boxes, too; with SBD's labels, trainaug names more images than train.

    One names an image that is not there any more.
    """
    write(folder, label="SegmentationClass/{}.png")
    lists = {
        "Main/train": "012345",
        "Main/val": "67",
        "Segmentation/train": "01",
        "Segmentation/trainaug": "012347",
        "Segmentation/trainval": "0156",
        "Segmentation/val": "569",
    }
    for name, images in lists.items():
        path = folder / "ImageSets" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        # As PowerShell writes it.
        path.write_text("\n".join(images), "utf-16" if name == "Segmentation/val" else "utf-8")
    _, config = labels_of(init(folder))
    said = capsys.readouterr().out
    assert "Segmentation/val.txt: 1 of 3 lines names no image, or several" in said
    for pairs, images in zip(parts(config), ("012347", "56"), strict=True):
        assert sorted(pair.image.stem for pair in pairs) == list(images)


def test_a_dot_in_a_listed_name_begins_no_suffix(folder):
    """`img.v2` is not img.png, which is there, too."""
    names = ["img", *(f"img.v{i}" for i in range(9))]
    for i, name in enumerate(names):
        pixels, classes = scene(i)
        save(folder / f"images/{name}.png", pixels)
        save(folder / f"labels/{name}.png", classes)
    (folder / "train.txt").write_text("\n".join(names[:7]))
    (folder / "val.txt").write_text("\n".join(names[7:]))
    _, config = labels_of(init(folder))
    for pairs, listed in zip(parts(config), (names[:7], names[7:]), strict=True):
        assert sorted(pair.image.stem for pair in pairs) == listed


@pytest.mark.parametrize("start", ["", "C:\\work\\data\\"])
def test_a_list_may_pair_images_and_labels(folder, start):
    """Against their names, and where these have nothing in common; as another machine wrote it."""
    truth, lines = {}, []
    for i in range(8):
        image, label = f"images/{chr(97 + i)}.png", f"labels/{7 - i}x.png"
        image = "images/7.png" if i == 1 else image
        pixels, truth[image] = scene(i)
        save(folder / image, pixels)
        save(folder / label, truth[image])
        lines.append(f"{image}\t{label}")
    for name, some in (("train", lines[:5]), ("val", lines[5:])):
        text = "\n".join(start + line.replace("\t", f"\t{start}") for line in some)
        (folder / f"{name}.txt").write_text(text.replace("/", "\\") if start else text)
    found, config = labels_of(init(folder))
    assert_same_division(found, truth)
    assert len(parts(config)[1]) == 3


def two_sets(folder):
    write(folder, label="fine/labels/{}.png")
    write(folder, lambda classes: np.minimum(classes, 2), label="coarse/labels/{}.png")


def two_versions(folder):
    for split in ("training", "validation"):
        for i in range(4):
            pixels, classes = scene(i if split == "training" else 4 + i)
            save(folder / f"{split}/images/{i}.jpg", pixels)
            save(folder / f"{split}/v1.2/labels/{i}.png", classes)
            save(folder / f"{split}/v2.0/labels/{i}.png", np.minimum(classes, 2))


def numbered(folder):
    """A number for each object, some more than others."""
    for i, _, _ in images_in(folder, number=8, num_classes=2):
        objects = np.arange(80)[None] // 8 * (np.arange(64)[:, None] > 20)
        objects[objects > 3 + i % 4] = 0
        save(folder / f"labels/t{i}.png", objects.astype(np.uint8))


def less_one(folder):
    """Labels hold the number of a name less 1, and 255, as those of COCO-Stuff do."""
    with_list(
        "0: unlabeled\n1: a\n2: b\n3: c\n4: d",
        make=lambda x: np.where(x < 3, x, 255).astype(np.uint8),
    )(folder)


def with_list(text, name="classes.txt", make=same):
    def build(folder):
        write(folder, make)
        (folder / name).write_text(text)

    return build


def two_lists(folder):
    with_list("\n".join(NAMES))(folder)
    (folder / "labels.txt").write_text("\n".join(reversed(NAMES)))


def fourth_channel(folder):
    write(folder)
    for path in (folder / "images").iterdir():
        pixels = np.array(Image.open(path))
        save(path, np.dstack([pixels, pixels[..., 0]]))


SHADES = np.stack([COLORS[0], COLORS[1], COLORS[1] + 2, COLORS[3]])
TABLE = "name,r,g,b\n" + "".join(
    f"{NAMES[i]},{','.join(map(str, COLORS[i].tolist()))}\n" for i in range(3)
)
unnamed_color = with_list(TABLE, "class_dict.csv", lambda classes: COLORS[classes])
# Black, most of the labels, is not in the list.
no_background = with_list(
    "name,hex\ncar,#c81e1e\nroad,#5a5a64\ntree,#14a03c\n", "classes.csv", lambda x: COLORS[x]
)
more_names = with_list("a\nb\nc\nvoid\nd\ne", make=lambda classes: classes + 1)
another_scale = with_list("background\na\nb", make=lambda x: np.array([0, 1, 2, 128], np.uint8)[x])
three_greys = labelled(lambda x: np.array([0, 128, 255], np.uint8)[x], num_classes=3)
no_data_or_class = labelled(lambda x: np.array([0, 1, 255], np.uint8)[x], num_classes=3)
trimap = labelled(lambda classes: classes + 1, num_classes=3, label="trimaps/{}.png")


def nested(folder):
    for i in range(8):
        image, classes = scene(i)
        save(folder / f"images/{i}.png", image)
        organ = np.zeros(classes.shape, np.uint8)
        organ[8:50, 10:60] = 255
        save(folder / f"masks/organ/{i}.png", organ)
        organ[:14] = 0
        save(folder / f"masks/lesion/{i}.png", organ)


def folds(folder):
    write(folder)
    for k in range(2):
        for split, names in (("train", range(8)), ("val", (2 * k, 2 * k + 1))):
            path = folder / f"fold {k}" / f"{split}.txt"
            path.parent.mkdir(exist_ok=True)
            kept = [i for i in names if split == "val" or i // 2 != k]
            path.write_text("\n".join(map(str, [*kept, "gone"])))


VERSION = "--labels 'v2.0/labels/*.png'"
QUESTIONS = [  # what asks, what it says, and answers with the number of classes that they make
    (with_list("a\nb\n"), "names 2 classes: they do not fit", {"--names a,b,c,d": 4}),
    (numbered, "numbers of objects, or classes?", {"--ignore none": 7}),
    (
        less_one,
        "may hold its values less 1",
        {"--ignore 255 --names a,b,c": 3, "--ignore 0,255": 2},
    ),
    (three_greys, "128 is usually the uncertain border", {"--ignore 128": 2}),
    (two_versions, "2 sets of labels fit the images", {VERSION: 3}),
    (nested, "masks show nearly the same", {"--task multilabel": 2, "--names organ,lesion": 3}),
    (labelled(lambda x: SHADES[x]), "differ by a shade", {"--names a,b,c,d": 4}),
    (
        no_data_or_class,
        "255 may be a class, or mean no data",
        {"--ignore none": 3, "--ignore 255": 2},
    ),
    (unnamed_color, "which class_dict.csv does not name", {"--ignore '#14a03c'": 3}),
    (fourth_channel, "the fourth varies: a band, or transparency?", {"--channels 4": 4}),
    (folds, "2 lists say different images to evaluate on, as of folds", {}),
]
MORE_QUESTIONS = [
    (another_scale, "names 3 classes: they do not fit", {"--ignore 128 --names background,a,b": 3}),
    (two_lists, "several files name the classes differently", {"--names a,b,c,d": 4}),
    (more_names, "counted from 0 or from 1?", {"--ignore 3 --names b,c,d": 3}),
    (two_sets, "2 sets of labels fit the images", {"--labels fine/labels": 4}),
    (trimap, "3 is usually the uncertain border", {"--ignore 3": 2}),
    (with_list("car\nroad\ntree"), "which classes.txt does not name", {"--ignore 0": 3}),
    (no_background, "which classes.csv does not name", {"--ignore '#000000'": 3}),
]
QUESTIONS += [pytest.param(*row, marks=SLOW) for row in MORE_QUESTIONS]


def test_a_question_about_annotated_images_is_answered_too(folder, lab, capsys):
    """Their labels are drawn before it, and again after it."""
    truth = CASES["annotations_of_coco"](folder)
    content = (folder / "annotations.json").read_text().replace(".jpg", ".png")
    (folder / "annotations.json").write_text(content)
    for name in truth:
        pixels = np.array(Image.open(folder / name))
        (folder / name).unlink()
        save((folder / name).with_suffix(".png"), np.dstack([pixels, pixels[..., 0]]))
    output = init(folder, code=2)
    assert "a band, or transparency?" in capsys.readouterr().err
    assert {path.name for path in output.iterdir()} <= {"reading_1.png", "reading_2.png"}
    assert "stopped here with a question" in lab.refused("train", output)
    found, config = labels_of(init(folder, "--channels", "4"))
    assert config.data.channels == 4
    assert_same_division(found, {name.replace(".jpg", ".png"): x for name, x in truth.items()})


@pytest.mark.parametrize(("make", "message", "answers"), QUESTIONS)
def test_where_two_readings_fit_it_stops_and_every_option_that_it_offers_goes_on(
    folder, capsys, monkeypatch, make, message, answers
):
    make(folder)
    output = init(folder, code=2)
    said = capsys.readouterr().err
    assert message in said
    assert not (output / "config.yaml").exists()
    pictures = [path.read_bytes() for path in sorted(output.glob("reading_*"))]
    assert len(set(pictures)) == len(pictures) > 0
    offered = re.findall(r"^(?:segtrain:)?  .*?: (--.*)$", said, re.MULTILINE)
    assert offered
    assert all((answer if answer == VERSION else answer.split()[0]) in said for answer in answers)
    # The sheet of each answer takes a fifth of the time; the conventions above look at it.
    monkeypatch.setattr("segtrain.desk.survey.experiment_files.contact_sheet", lambda *_: BLANK)
    for option in {**answers, **dict.fromkeys(offered)}:
        if "VALUES" in option:
            continue
        init(folder, *shlex.split(option))
        assert not list(output.glob("reading_*"))
        if option in offered:
            names = load_class_file(str(output / "classes.yaml")).names
            assert not any(map(says_no_class, names))
        if option in answers:
            found, _ = labels_of(output)
            values = set().union(*(set(np.unique(label).tolist()) for label in found.values()))
            assert len(values - {255}) == answers[option]
        shutil.rmtree(output)


def shifted(folder):
    for i in range(12):
        save(folder / f"images/{i:02}.png", scene(i)[0])
        save(folder / f"labels/{i:02}.png", scene(i + 1)[1])


def shifted_outlines(folder):
    """Of 12 images, each with those of the next one."""
    from pycocotools.mask import encode

    shifted(folder)
    (folder / "labels").rename(folder.parent / f"{folder.name}_masks")
    images, outlines = [], []
    for i in range(12):
        images.append({"id": i, "file_name": f"{i:02}.png", "height": 64, "width": 80})
        path = folder.parent / f"{folder.name}_masks/{i:02}.png"
        classes = np.array(Image.open(path))
        for k in (1, 2, 3):
            runs = encode(np.asfortranarray(classes == k, np.uint8))
            mask = {"size": runs["size"], "counts": runs["counts"].decode()}
            about = {"iscrowd": 0, "area": 1, "bbox": [0, 0, 1, 1], "segmentation": mask}
            outlines.append({"id": 10 * i + k, "image_id": i, "category_id": k} | about)
    names = [{"id": k, "name": NAMES[k]} for k in (1, 2, 3)]
    content = {"images": images, "annotations": outlines, "categories": names}
    (folder / "annotations.json").write_text(json.dumps(content))


def other_size(folder):
    write(folder)
    save(folder / "labels/3.png", np.zeros((60, 80), np.uint8))


def cut_off(part, end):
    """What cuts off the end of a label, or of each image."""

    def build(folder):
        write(folder)
        for path in folder.glob(part):
            path.write_bytes(path.read_bytes()[:end])

    return build


def no_labels(folder):
    write(folder)
    for i, name in enumerate("stuvwxyz"):  # in the order of the images
        (folder / f"labels/{i}.png").rename(folder / f"labels/{name}.png")


def two_forms(folder):
    for i, _, classes in images_in(folder, number=8, num_classes=2):
        save(folder / f"labels/t{i}.png", classes * (255 if i % 2 else 1))


def other_palettes(folder):
    """The same values, whose colours are others in one file."""
    write(folder)
    for path in (folder / "labels").iterdir():
        picture = Image.open(path)
        picture.putpalette((COLORS[::-1] if path.stem == "0" else COLORS).reshape(-1).tolist())
        picture.save(path)


def short_palette(folder):
    """The first palette has no colours for the values whose colours are others in one file."""
    write(folder)
    for path in (folder / "labels").iterdir():
        number = int(path.stem)
        picture = Image.fromarray(np.minimum(scene(number)[1], 1 if number == 0 else 3))
        colors = COLORS[[0, 1, 3, 2]] if number == 5 else COLORS[: 4 if number else 2]
        picture.putpalette(colors.reshape(-1).tolist())
        picture.save(path)


def two_kinds(folder):
    write(folder, lambda classes: np.eye(4, dtype=np.uint8)[classes], label="labels/{}.npy")
    save(folder / "labels/3.npy", scene(3)[1])


def several_values(folder):
    """In a file that is not in the sample which decides that there is a file for each object."""
    CASES["a_file_for_each_object"](folder)
    path = sorted(folder.glob("*/masks/*"))[3]
    save(path, np.indices((64, 80))[0].astype(np.uint8) // 16)


OBJECTS = np.kron(np.arange(320).reshape(16, 20), np.ones((4, 4))).astype("u2")
one_shown = with_list("void\nroad\ncrack", make=lambda classes: np.minimum(classes, 1))
turned = labelled(lambda classes: classes[::-1, ::-1].copy(), number=12)
blurred = labelled(lambda classes: COLORS[classes], label="labels/{}.jpg")
smooth_colors = with_list(TABLE, "class_dict.csv", lambda x: cv2.blur(COLORS[x], (3, 3)))
see_through = labelled(lambda classes: np.dstack([COLORS[classes], 80 * classes]))
below_0 = labelled(lambda classes: classes.astype(np.int16) - 1, label="labels/{}.npy")
BAD = [
    (shifted, "fit the next image better than their own"),
    (shifted_outlines, "annotations.json (COCO): labels fit the next image better than their own"),
    (other_size, "labels/3.png: 60x80, image 64x80"),
    (cut_off("labels/3.png", -30), "labels/3.png: damaged"),
    (no_labels, "8 pictures look like labels, but have no image: labels/s.png"),
    (labelled(lambda _: OBJECTS), "or no labels of classes"),
    (turned, "labels fit their image turned by 180 degrees better"),
    (two_forms, "4 labels hold 0 and 255, 4 others 0 and 1"),
    (cut_off("images/*", 20), "no image can be read; 8 images are left out"),
    (cut_off("images/*", -200), "no image can be read; 8 images are damaged"),
    (two_kinds, "3.npy: holds one channel of numbers, other labels hold a channel for each class"),
    (other_palettes, "its palette gives the same values other colours"),
    (short_palette, "its palette gives the same values other colours"),
    (one_shown, "one class only, road"),
    (several_values, "holds 4 values, where each of several files shows one class"),
    (blurred, "*.jpg (JPEG has blurred their values: save labels as PNG)"),
    (smooth_colors, "colours, most on few pixels: edges were smoothed"),
    (see_through, "*.png (their transparency varies: save labels without it)"),
    (below_0, "*.npy (values below 0, above 65535 or between whole numbers)"),
]


def test_outlines_that_seem_mixed_up_are_taken_if_the_user_says_so(folder):
    shifted_outlines(folder)
    found, _ = labels_of(init(folder, "--pairs", "named"))
    assert len(found) == 12


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_data_are_refused(folder, capsys, make, message):
    make(folder)
    output = init(folder, code=3)
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_sixteen_bits_train_as_they_are_and_a_list_may_say_what_0_means(folder, lab):
    """Colours change in 8-bit images alone, so the config does not ask for it."""
    for i in range(8):
        pixels, classes = scene(i)
        wide = pixels.astype(np.uint16) * 16
        wide[classes == 0] = 0
        save(folder / f"images/{i}.tif", wide)
        save(folder / f"labels/{i}.png", classes)
    (folder / "legend.csv").write_text("value,name\n0,no data\n1,car\n2,road\n3,tree\n")
    found, config = labels_of(init(folder))
    assert config.augment.color_prob == 0
    assert config.data.value_range == (0, 4095)
    classes = open_dataset(config.data, config.data.train_split).classes
    assert classes.names == ("car", "road", "tree")
    assert (found["images/3.tif"] == 255).any()
    small = [f"--set={key}" for key in ("train.steps=1", "schedule.warmup_steps=0")]
    small += [
        "--set=model.num_stages=2",
        "--set=model.output_stride=8",
        "--set=data.num_workers=0",
        "--device=cpu",
    ]
    small += ["--set=model.head_channels=8", "--set=model.aux_channels=8"]
    lab.done("train", lab.folder / "made/config.yaml", "--output", lab.folder / "run", *small)


def test_a_damaged_image_is_left_out_and_classes_of_one_colour_have_it_once(plain, capsys):
    (plain / "images/3.png").write_bytes(b"")
    rows = (f"{i},{name},{'0,0,0' if i < 2 else f'{i},0,0'}" for i, name in enumerate(NAMES))
    (plain / "class_dict.csv").write_text("\n".join(["id,name,r,g,b", *rows]))
    output = init(plain)
    assert "1 image is left out: " in capsys.readouterr().out
    assert len(labels_of(output)[0]) == 7
    classes = load_class_file(str(output / "classes.yaml"))
    assert classes.names == NAMES
    colors = [one.color for one in classes.classes]
    assert len(set(colors)) == 4
    assert (colors[0], *colors[2:]) == ((0, 0, 0), (2, 0, 0), (3, 0, 0))


def test_what_may_be_wrong_is_named(plain, lab):
    """Turned images, lists that are not read or do not fit, a class of one split."""
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.open(plain / "images/3.png").save(plain / "images/3.png", exif=exif)
    (plain / "colors.json").write_text('{"#800000": "a", "#008000": "b"}')
    save(plain / "labels/3.png", np.where(scene(3)[1] == 3, 7, scene(3)[1]).astype(np.uint8))
    (lab.folder / "val.txt").write_text("3.png\n4.png\n")
    words = "init", plain, "--val", lab.folder / "val.txt", "--output"
    said = lab.done(*words, lab.folder / "made").out
    for line in (
        "warning: 1 image carries an EXIF orientation, which is ignored",
        "stored: images/3.png",
        "warning: names of classes that do not fit the labels: colors.json",
        "warning: no image to train on shows class_7\n",
    ):
        assert line in said
    (plain / "colors.json").unlink()
    (plain / "classes.txt").write_text("a\na\n")
    said = lab.done(*words, lab.folder / "again").out
    assert "warning: 1 file has no names of classes: classes.txt" in said


@pytest.mark.parametrize(
    ("label", "code"), [("{}_labelTrainIds.png", 0), ("{}_labelIds.png", 0), ("labels/{}.png", 2)]
)
def test_a_table_of_ids_and_train_ids_names_those_of_the_labels(folder, capsys, label, code):
    """Which they hold, their name says, or a question is asked."""
    write(folder, label=label)
    rows = ["name,id,trainId", "void,0,255", "car,1,0", "road,2,1", "tree,3,2", "van,4,3"]
    (folder / "classes.csv").write_text("\n".join(rows))
    output = init(folder, code=code)
    if code:
        assert "classes.csv (train ids)" in capsys.readouterr().err
        return
    classes = load_class_file(str(output / "classes.yaml"))
    assert classes.names == ("car", "road", "tree", "van")
    first = "TrainIds" not in label
    assert [one.ids for one in classes.classes] == [(i + first,) for i in range(4)]


@pytest.mark.parametrize(("mark", "tag"), [(200, b"200"), (65535, b"nan"), (0, b"0")])
def test_the_number_of_a_tiff_for_no_data_is_no_class_or_a_question(plain, capsys, mark, tag):
    """0 is often left there from the image. 65535 is to 16 bits what 255 is to 8."""
    for path in (plain / "labels").iterdir():
        stored = np.array(Image.open(path), np.uint16)
        stored[:6] = mark
        path.unlink()
        nodata = (42113, "s", 0, tag, True)
        tifffile.imwrite(path.with_suffix(".tif"), stored, extratags=[nodata])
    output = init(plain, code=2 * (mark == 0))
    if mark == 0:
        assert "GDAL_NODATA of the files is 0" in capsys.readouterr().err
        return
    classes = load_class_file(str(output / "classes.yaml"))
    assert (len(classes.names), classes.ignore_ids) == (4, (mark,))


@pytest.mark.parametrize("mode", ["1", "P", "L"])
def test_the_mean_is_that_of_the_levels_and_colours_that_training_sees(plain, lab, mode):
    """Grey images are among others."""
    for path in (plain / "images").iterdir():
        if mode != "L" or path.stem != "5":
            Image.open(path).convert(mode).save(path)
    _, config = labels_of(init(plain))
    splits = config.data.train_split, config.data.eval_split
    images = [image for split in splits for image, _ in open_dataset(config.data, split)]
    assert config.data.mean == pytest.approx(np.mean(images, axis=(0, 1, 2)), abs=1e-3)
    assert max(config.data.std) > 10
    if mode == "L":
        said = lab.refused("init", plain, "--output", lab.folder / "four", "--channels", 4)
        assert "--channels 4: the images have 1, 3" in said


def test_a_label_in_one_grey_is_one_of_colours_beside_others_in_colours(folder):
    write(folder, lambda classes: COLORS[classes])
    save(folder / "labels/2.png", np.zeros((64, 80, 3), np.uint8))
    found, _ = labels_of(init(folder))
    assert len(np.unique(found["images/2.png"])) == 1
    assert len(np.unique(found["images/3.png"])) == 4


def test_a_file_for_each_class_may_be_rare_and_may_mean_no_class(folder):
    """Two images of forty show a tree; void is ignored; classes have weights by their shares."""
    names = ("background", "road", "roof", "tree")
    for i, _, classes in images_in(folder, "images/p{i}_a.png", 40):
        shows = {name: classes == k for k, name in enumerate(names)}
        shows["void"] = np.indices(classes.shape)[0] > 60
        for name, shown in shows.items():
            if name != "tree" or i < 2:
                save(folder / f"masks/p{i}_a_{name}.png", shown.astype(np.uint8) * 255)
    found, config = labels_of(init(folder))
    assert load_class_file(config.data.classes).names == names
    assert all((label[61:] == 255).all() for label in found.values())
    assert all((label[:61] != 255).all() for label in found.values())
    assert sum((label == 3).any() for label in found.values()) == 2
    assert config.loss.class_weights[3] == max(config.loss.class_weights)


def class_colors(output):
    classes = load_class_file(str(output / "classes.yaml"), needs_colors=True).classes
    return {one.name: one.color for one in classes}


def test_the_names_that_a_question_offers_are_in_the_order_of_the_values(folder, capsys):
    unnamed_color(folder)
    init(folder, code=2)
    option = re.search("classes of their own: (.*)", capsys.readouterr().err)[1]
    wanted = dict(zip((*NAMES[:3], "color_14a03c"), map(tuple, COLORS.tolist()), strict=True))
    assert class_colors(init(folder, *shlex.split(option))) == wanted


def test_red_green_and_blue_are_colours_although_one_channel_is_set_in_each(folder):
    write(folder, lambda classes: (np.eye(3, dtype=np.uint8) * 128)[classes], num_classes=3)
    (folder / "class_dict.csv").write_text("name,r,g,b\na,0,128,0\nb,0,0,128\nc,128,0,0\n")
    wanted = {"a": (0, 128, 0), "b": (0, 0, 128), "c": (128, 0, 0)}
    assert class_colors(init(folder)) == wanted


def test_the_images_to_evaluate_on_may_be_named_in_a_file(plain, lab):
    names = lab.folder / "mine.txt"
    names.write_text("3.png\nimages/5\n")
    found, config = labels_of(init(plain, "--val", str(names)))
    assert [pair.name for pair in parts(config)[1]] == ["images/3", "images/5"]
    assert len(found) == 8
    # Nor does one of a test split train then.
    for path in [plain / kind / f"{i}.png" for kind in ("images", "labels") for i in range(8)]:
        (path.parent / "test").mkdir(exist_ok=True)
        path.rename(path.parent / ("test" if path.stem < "2" else "") / path.name)
    for number, val in enumerate((names, 0.3)):
        output = lab.folder / str(number)
        said = lab.done("init", plain, "--output", output, "--val", val).out
        assert len(labels_of(output)[0]) == 6
        assert "2 of test are not used" in said
    names.write_text("3.png\nmissing\n")
    said = lab.refused("init", plain, "--output", lab.folder / "b", "--val", names)
    assert "line 2 names no image" in said


def test_nothing_is_overwritten_or_written_into_the_data(plain, lab, monkeypatch):
    assert "exists already" in lab.refused("init", plain, "--output", init(plain))
    said = lab.refused("init", plain, "--output", plain / "x")
    assert f"such as --output {lab.folder / 'data_segtrain'}" in said
    (lab.folder / "file").touch()
    label = plain / "labels/0.png"
    content = label.read_bytes()
    label.write_bytes(b"")  # which a survey would see
    said = lab.refused("init", plain, "--output", lab.folder / "file" / "x")
    assert "cannot be written" in said
    label.write_bytes(content)
    monkeypatch.chdir(plain / "images")  # from inside the experiment goes beside the data
    lab.done("init", "..")
    assert (lab.folder / "data_segtrain" / "config.yaml").exists()


def test_sequences_stay_together_and_a_split_that_leaks_is_named(folder, lab, capsys):
    for sequence in range(6):
        pixels, classes = scene(sequence)
        for frame in range(4):
            noise = np.random.default_rng(frame).integers(0, 6, pixels.shape, dtype=np.uint8)
            save(folder / f"images/drive{sequence}_{frame:03}.png", pixels // 2 + noise)
            save(folder / f"labels/drive{sequence}_{frame:03}.png", classes)
    found, config = labels_of(init(folder))
    assert len(found) == 24
    train, val = ({pair.name.split("_")[0] for pair in pairs} for pairs in parts(config))
    assert not train & val
    assert "near-duplicate" not in capsys.readouterr().out
    for path in sorted(folder.rglob("*.png")):
        split = "val" if path.stem.endswith("3") else "train"
        target = path.parent / split / path.name
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    said = lab.done("init", folder, "--output", lab.folder / "other").out
    assert "6 of 6 images to evaluate on have a near-duplicate or a neighbour " in said


@pytest.mark.parametrize(
    ("name", "slices"),
    [("patient_{i:02}_t{t}", 1), ("patient_{i:02}_t{t}/z{k}", 3), ("p{i:02}/visit{t}/{k}", 3)],
    ids=["pictures", "slices", "folders"],
)
def test_scans_of_a_patient_are_not_divided(folder, name, slices):
    """Four of ten patients have two."""
    scans = [(i, t) for i in range(10) for t in range(1, 2 + (i < 4))]
    for seed, (i, t) in enumerate(scans):
        for k in range(slices):
            pixels, classes = scene(3 * seed + k)
            save(folder / f"images/{name.format(i=i, t=t, k=k)}.png", pixels)
            save(folder / f"masks/{name.format(i=i, t=t, k=k)}.png", classes)
    found, config = labels_of(init(folder))
    assert len(found) == len(scans) * slices
    patient = re.compile(r"p[a-z_]*(\d\d)")
    train, val = ({patient.search(pair.name)[1] for pair in pairs} for pairs in parts(config))
    assert val
    assert not train & val


@pytest.mark.parametrize(
    ("place", "value", "is_fast"),
    [
        ("torch.cuda.is_bf16_supported", True, True),
        ("torch.cuda.is_bf16_supported", False, False),
        ("segtrain.models.precision.cpu_gain", 1.5, True),
        ("segtrain.models.precision.cpu_gain", 1.4, False),
    ],
)
def test_what_is_fast_in_bfloat16_trains_in_it(plain, monkeypatch, place, value, is_fast):
    monkeypatch.setattr("torch.cuda.is_available", lambda: "cuda" in place)
    monkeypatch.setattr(place, lambda including_emulation=None: value)
    written = init(plain) / "config.yaml"
    assert load_config(written).train.precision == ("bfloat16" if is_fast else "tf32")
    why = "bfloat16 # this processor's convolutions are at least 1.5 times as fast as in float32"
    assert (why in " ".join(written.read_text().split())) == (is_fast and "cuda" not in place)


@pytest.mark.parametrize(
    ("number", "has_gpu", "wanted"), [(16, False, (4, 16)), (80, False, (8, 8)), (16, True, (8, 8))]
)
def test_few_images_make_a_first_model_within_minutes(folder, monkeypatch, number, has_gpu, wanted):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=None: True)
    for i, _, label in images_in(folder, "images/{i}.png", number):
        save(folder / f"masks/{i}.png", label)
    config = load_config(init(folder) / "config.yaml")
    assert (config.train.batch_size, config.model.output_stride) == wanted


def test_a_threshold_divides_grey_masks(folder, lab):
    """Soft masks, as an editor's brush or a network leaves them; in one file and a file a class."""
    rng = np.random.default_rng(0)
    soft, masks = {}, {}
    for i, _, label in images_in(folder, "images/{i}.png", 8, num_classes=2):
        blurred = cv2.GaussianBlur(np.float32(label == 1) * 255, (0, 0), 3)
        soft[i] = (blurred + rng.uniform(0, 2, blurred.shape)).clip(0, 255).astype(np.uint8)
        save(folder / f"masks/{i}.png", soft[i])
        masks[f"images/{i}.png"] = (soft[i] >= 100).astype(np.uint8)
    assert lab.command("init", folder, "--output", lab.folder / "plain").code != 0
    found, config = labels_of(init(folder, "--threshold", "100"))
    assert load_class_file(config.data.classes).names == ("background", "foreground")
    assert found.keys() == masks.keys()
    assert all((found[name] == mask).all() for name, mask in masks.items())
    for i, grey in soft.items():
        (folder / f"masks/{i}.png").unlink()
        for name in ("crack", "hole"):
            other = grey if name == "crack" else np.roll(grey, 15, 1)
            save(folder / f"masks/{name}/{i}.png", other)
    words = "--threshold", 100, "--task", "multilabel", "--output", lab.folder / "both"
    lab.done("init", folder, *words)
    found, _ = labels_of(lab.folder / "both")
    for i, grey in soft.items():
        expected = np.stack([grey, np.roll(grey, 15, 1)], 2) >= 100
        assert (found[f"images/{i}.png"] == expected).all()


def test_a_threshold_of_ids_colours_and_a_folder_of_volumes_are_refused(folder, lab):
    write(folder, label="masks/{}.png")
    said = lab.refused("init", folder, "--threshold", 100, "--output", lab.folder / "m", code=3)
    assert "; --threshold 100 is about masks in grey levels" in said
    write(folder, lambda classes: COLORS[classes], label="masks/{}.png")
    said = lab.refused("init", folder, "--threshold", 100, "--output", lab.folder / "m")
    assert "--threshold: no effect on masks/*.png: colours" in said
    volumes = lab.folder / "volumes"
    volumes.mkdir()
    (volumes / "scan.nii.gz").write_bytes(b"x")
    said = lab.refused("init", volumes, "--output", lab.folder / "m", code=3)
    assert f"of volumes segtrain data import {volumes} makes slices" in said
    tables = lab.folder / "tables"
    tables.mkdir()
    (tables / "train-00000.parquet").write_bytes(b"PAR1")
    said = lab.refused("init", tables, "--output", lab.folder / "none", code=3)
    assert "found 1 .parquet; write each image of such a file as JPEG or PNG, and its" in said


def test_jpegs_that_are_damaged_in_the_middle_are_named(folder, lab):
    write(folder)
    for path in folder.glob("images/*"):
        Image.open(path).save(path.with_suffix(".jpg"), quality=95)
        path.unlink()
    data = bytearray((folder / "images/2.jpg").read_bytes())
    data[-80:-78] = b"\xff\xd9"
    (folder / "images/2.jpg").write_bytes(data)
    said = lab.done("init", folder, "--output", lab.folder / "m").out
    assert "as libjpeg says; data check finds all such: images/2.jpg" in said


def test_a_dry_run_writes_ten_pairs_and_nothing_else(folder, lab, monkeypatch):
    write(folder, number=12)
    monkeypatch.chdir(lab.folder)
    said = lab.done("init", "data", "--dry-run").out
    assert {path.name for path in lab.folder.iterdir()} == {"data", "data_segtrain_samples.png"}
    assert "splits     " in said
    sheet = cv2.imread("data_segtrain_samples.png")
    assert sheet.shape[1] in (9 * 260, 10 * 260)  # of 10 images to train on


def outlined(folder):
    """Annotations of LabelMe for all images but the last of six."""
    for i, path, _ in images_in(folder):
        shapes = [{"label": "car", "points": [[9, 9], [60, 12], [40, 50]]}]
        content = {"shapes": shapes, "imagePath": path, "imageHeight": 64, "imageWidth": 80}
        if i < 5:
            (folder / f"{i}.json").write_text(json.dumps(content))


def in_two_folders(folder):
    for i, _, classes in images_in(folder):
        for k, name in ((1, "crack"), (2, "hole")):
            save(folder / f"masks/{name}/t{i}.png", np.uint8(classes == k) * 255)


def one_map(folder):
    pixels, classes = (np.tile(x, (8, 6) + (1,) * (x.ndim - 2)) for x in scene(0))
    save(folder / "images/map.tif", pixels)
    save(folder / "labels/map.tif", classes)


tinted = labelled(lambda classes: COLORS[classes])
WITHOUT_EFFECT = {
    outlined: ["ignore 0", "instances binary", "threshold 9", "attribute kind"],
    write: ["attribute kind"],
    tinted: ["attribute kind", "threshold 9"],
    in_two_folders: ["attribute kind", "instances binary", "ignore 3"],
    one_map: ["attribute kind", "group '(m)'"],
}


@pytest.mark.parametrize(
    ("make", "option"),
    [(make, option) for make, options in WITHOUT_EFFECT.items() for option in options],
)
def test_an_option_without_effect_on_labels_of_a_kind_is_refused(lab, make, option):
    make(lab.folder / "data")
    name, *words = shlex.split(f"--{option}")
    said = lab.refused("init", lab.folder / "data", "--output", lab.folder / "m", name, *words)
    assert said.startswith(f"segtrain: {name}: no effect on ")


def test_images_without_outlines_are_background_if_it_is_said(folder, lab):
    outlined(folder)
    told = lab.command("init", folder, "--output", lab.folder / "m").err
    assert "not used would be images without a label (1): images/t5.png" in told
    assert "show background alone: --missing background" in told
    lab.done("init", folder, "--output", lab.folder / "m", "--leave-out", "images")
    assert "images/t5.png" not in labels_of(lab.folder / "m")[0]
    words = "init", folder, "--missing", "background", "--names", "car", "--output"
    lab.done(*words, lab.folder / "n")
    found, _ = labels_of(lab.folder / "n")
    assert not found["images/t5.png"].any()
    assert found.keys() == {f"images/t{i}.png" for i in range(6)}
    words = "--missing", "background:images"
    said = lab.refused("init", folder, "--output", lab.folder / "o", *words)
    assert "--missing background:images: folders are for labels that are pictures" in said
    said = lab.refused("init", folder, "--output", lab.folder / "o", "--labels", "masks")
    assert "--labels masks: no such labels; found annotations of LabelMe" in said


def test_outlines_beside_masks_are_counted_and_offered(folder, lab):
    outlined(folder)
    for i, _, classes in images_in(folder):
        save(folder / f"masks/t{i}.png", classes)
    said = lab.done("init", folder, "--output", lab.folder / "m").out
    assert "annotations beside the labels: 5" in said
    (folder / "masks/t3.png").unlink()
    said = lab.command("init", folder, "--output", lab.folder / "n").err
    assert "LabelMe has the labels: --labels LabelMe" in said
    words = "--labels", "labelme", "--leave-out", "images,labels"
    said = lab.done("init", folder, "--output", lab.folder / "n", *words).out
    assert "5 annotation files" in said
    assert "images/t3.png" in labels_of(lab.folder / "n")[0]


def test_labels_that_only_seem_mirrored_go_on_by_an_option(folder, lab):
    """Lesions that hardly show, and a bright bar where their mirror images lie."""
    rng = np.random.default_rng(0)
    for i in range(6):
        label = np.zeros((64, 80), np.uint8)
        label[20 + i : 50, 6:16] = 1
        pixels = rng.normal(90, 2, (64, 80)) + 2 * label + 120 * label[:, ::-1]
        save(folder / f"images/{i}.png", np.uint8(pixels))
        save(folder / f"masks/{i}.png", label * np.uint8(255))
    output = "--output", lab.folder / "m"
    said = lab.refused("init", folder, *output, code=3)
    assert "labels fit their image mirrored better" in said
    option = re.search(r"(--\S+ \S+) goes on", said)[1]
    lab.done("init", folder, *output, *option.split())
    assert labels_of(lab.folder / "m")[0]["images/2.png"][30, 10] == 1


def test_rois_of_imagej_are_named_by_import_and_init(folder, lab):
    folder.mkdir()
    tifffile.imwrite(folder / "cells.tif", np.zeros((3, 40, 50), np.uint8), imagej=True)
    with ZipFile(folder / "cells_RoiSet.zip", "w") as file:
        file.writestr("0001-0002.roi", b"Iout")
    said = lab.refused("data", "import", folder, "--output", lab.folder / "m", code=3)
    assert "cells_RoiSet.zip: ROIs of ImageJ are not read; draw them into label maps" in said
    (folder / "cells.tif").unlink()
    save(folder / "cells.png", scene(0)[0])
    damaged = bytearray((folder / "cells_RoiSet.zip").read_bytes())
    damaged[damaged.index(b"PK\1\2")] = 0
    (folder / "other.zip").write_bytes(damaged)
    said = lab.refused("init", folder, "--output", lab.folder / "m", code=3)
    assert "1 file of ImageJ's ROIs, not read: cells_RoiSet.zip" in said


def lesions(folder, dtype, low, high, step):
    """Air and bone of `low` and `high`, tissue around `low + step`, and a lesion in it, brighter by
    a sixteenth of `step`; the lesions of the images to train on and evaluate on."""
    rng = np.random.default_rng(0)
    for i in range(6):
        label = np.zeros((64, 80), np.uint8)
        label[20 + i : 50, 30:60] = 1
        pixels = low + step + rng.normal(0, step / 60, label.shape) + step / 16 * label
        pixels[:, :9], pixels[:, -5:] = low, high
        save(folder / f"images/{i}.tif", pixels.round().astype(dtype))
        save(folder / f"labels/{i}.png", label)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "step"),
    [(np.float32, -1024, 1800, 1060), (np.int16, -1024, 1800, 1060), (np.uint16, 0, 60000, 3000)],
    ids=["CT by import", "CT", "microscopy"],
)
def test_a_narrow_foreground_is_seen_on_a_scale_of_its_own(folder, lab, dtype, low, high, step):
    lesions(folder, dtype, low, high, step)
    output = lab.folder / "m"
    said = lab.done("init", folder, "--output", output).out
    config = load_config(output / "config.yaml")
    files = zip(*(pair[:2] for pair in parts(config)[0]), strict=True)
    pixels, labels = (np.stack([read_stored(x)[..., 0] for x in side]) for side in files)
    expected = np.percentile(pixels[labels > 0], (0.5, 99.5))
    np.testing.assert_allclose(config.data.value_range, expected, rtol=1e-5)
    assert config.data.clip
    shown = " ".join(said.split())
    assert "percentiles 0.5 and 99.5 of each class, as nnU-Net clips CT" in shown
    clipped = (pixels.clip(*expected) - expected[0]) * 255 / np.ptp(expected)
    np.testing.assert_allclose(config.data.mean, clipped.mean(), rtol=1e-3)
    np.testing.assert_allclose(config.data.std, clipped.std(), rtol=1e-3)
    assert "outside of data.value_range" not in said


def test_a_rare_class_beyond_the_values_of_all_is_not_clipped(folder, lab):
    lesions(folder, np.int16, -1024, 1800, 1060)
    for i in range(6):
        for kind, value in {"images/{}.tif": 400 + i, "labels/{}.png": 2}.items():
            path = folder / kind.format(i)
            stored = read_stored(path)
            stored[5, 20:23] = value
            save(path, stored[..., 0])
    lab.done("init", folder, "--output", lab.folder / "m")
    data = load_config(lab.folder / "m/config.yaml").data
    assert data.clip
    assert data.value_range[1] >= 404


def test_a_wide_foreground_keeps_the_scale_of_all_values(folder, lab):
    lesions(folder, np.int16, -100, 200, 100)
    for i in range(6):
        label = cv2.imread(str(folder / f"labels/{i}.png"), cv2.IMREAD_UNCHANGED)
        label[:, -5:] = label[:, :9] = 1
        save(folder / f"labels/{i}.png", label)
    lab.done("init", folder, "--output", lab.folder / "m")
    config = load_config(lab.folder / "m/config.yaml")
    assert (config.data.value_range, config.data.clip) == ((-100.0, 200.0), False)
