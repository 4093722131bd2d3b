"""What values of labels mean: the table that init prints, and the questions about odd values.

Each question is answered by each option that it offers.
"""

import re
import shlex
import shutil

import cv2
import numpy as np
import pytest
from folders import COLORS, NAMES, images_in, labels_of, quick_init, save, write
from PIL import Image

from segtrain.data.read.classes import load_class_file, says_no_class


@pytest.fixture(autouse=True)
def no_network_and_no_contact_sheet(monkeypatch):
    quick_init(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def init(lab, folder):
    """Runs init with more words; what it says, and the exit code."""

    def run(*more):
        output = folder.with_name("made")
        shutil.rmtree(output, ignore_errors=True)
        return lab.command("init", folder, "--output", output, "--jobs", "1", *more)

    return run


def rows_of(said):
    """The cells of the table of classes, without its title."""
    lines = said.split("  class ")[1].split("\nsplits ")[0].splitlines()[1:]
    return [re.split(r"  +", line.strip()) for line in lines]


# The table


def test_the_table_has_every_value_as_a_class_or_as_ignored(folder, init):
    """2 is void by the list, 255 a border; 4 and 9 are named, and no label shows 9."""

    def drawn(classes, _):
        label = np.array([0, 1, 2, 4], np.uint8)[classes]
        label[-1] = 255
        return label

    truth = write(folder, drawn)
    (folder / "classes.txt").write_text("0 sky\n1 road\n2 don't care\n4 tree\n9 car\n")
    pixels = np.concatenate([drawn(x, 0).ravel() for x in truth.values()])
    share = {v: f"{(pixels == v).mean():.2%}" for v in (0, 1, 2, 4, 255)}
    assert rows_of(init().out) == [
        ["sky", "0", share[0], "6"],
        ["road", "1", share[1], "6"],
        ["tree", "4", share[4], "6"],
        ["car", "9", "0.00%", "0", "no label shows it"],
        ["don't care", "2", share[2], "6", "ignored"],
        ["-", "255", share[255], "6", "ignored"],
    ]


def test_the_table_names_what_files_of_masks_leave_out(folder, init):
    for i, _, classes in images_in(folder):
        for k, name in enumerate(("car", "ignore", "tree"), start=1):
            save(folder / f"masks/{name}/t{i}.png", np.uint8(255) * (classes == k))
    names = [(row[0], row[-1] == "ignored") for row in rows_of(init().out)]
    assert names == [("background", False), ("car", False), ("tree", False), ("ignore", True)]


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (lambda classes: classes, 4),
        (lambda classes: classes + 1, 4),
        (lambda classes: classes * np.uint8(255), 2),
        (lambda classes: COLORS[classes], 4),
        (lambda classes: np.array([7, 11, 26, 33], np.uint16)[classes], 4),
    ],
    ids=["ids", "ids from 1", "masks", "colours", "16 bits"],
)
@pytest.mark.parametrize("is_grey", [False, True])
def test_plain_folders_warn_of_nothing(folder, init, make, number, is_grey):
    """But of the network that the test takes away; grey images reach black and white."""
    write(folder, lambda classes, _: make(classes), num_classes=number, number=10)
    for path in folder.glob("images/*") if is_grey else ():
        grey = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        grey[:3], grey[3:6] = 0, 255
        save(path, grey)
    warnings = re.findall("^warning: (.*)$", init().out, re.M)
    assert [x for x in warnings if "no pretrained weights" not in x] == []


@pytest.mark.parametrize("number", [6, 9])
def test_a_rare_class_in_a_third_of_the_files_asks_nothing(folder, init, number):
    def drawn(classes, i):
        if i % 3 == 0:  # 0.05 % of all pixels
            classes[30, 30:38] = 2
        return classes

    write(folder, drawn, number=number, num_classes=2)
    assert rows_of(init().out)[2][:2] == ["class_2", "2"]


# Questions


def with_strays(classes, i):
    """A slip of the pen in the first label, and 255 around it."""
    label = np.where(np.arange(64)[:, None] > 61, 255, classes).astype(np.uint8)
    if i == 0:
        label[30, 30:33] = 5
    return label


def in_one_file(classes, i):
    return np.where(classes == 3, 7, classes).astype(np.uint8) if i == 0 else classes % 3


def objects_of(classes, i):
    """The areas of a label and some squares by number: more in some than in others."""
    _, objects = cv2.connectedComponents((classes > 0).astype(np.uint8))
    for k in range(4 + i % 5):
        objects[8 + 6 * k : 11 + 6 * k, 60:64] = objects.max() + 1
    return objects


def counted_on(classes, i):
    """16-bit numbers that grow from file to file."""
    objects = objects_of(classes, i)
    return ((objects + 40 * i) * (objects > 0)).astype(np.uint16)


def with_gaps(classes, i):
    """Of the numbers of a label one is missing: an object that was deleted."""
    objects = objects_of(classes, i)
    objects[objects == 2 + i % 3] = 0
    return objects.astype(np.uint8)


def squares(values):
    """Each value on a square of its own."""
    label = np.zeros((64, 80), np.uint8)
    for k, value in enumerate(values):
        y, x = 8 * (k // 9), 8 * (k % 9)
        label[y : y + 5, x : x + 6] = value
    return label


def kept_from_frame_to_frame(_, i):
    """Cells of two films: each film has its numbers, and shows them in nearly all frames."""
    return squares([(4, 11, 21, 36, 37, 39), (6, 19, 20, 21, 35)][i > 4])


def in_random_colors(classes, i):
    objects = objects_of(classes, i)
    colors = np.random.default_rng(i).integers(40, 256, (objects.max() + 1, 3), np.uint8)
    colors[0] = 0
    return colors[objects]


def more_than_classes(classes, i):
    """As `counted_on`, by more than 255 objects."""
    label = np.zeros(classes.shape, np.uint16)
    for k in range(40 + i):
        y, x = 6 * (k // 13), 6 * (k % 13)
        label[y : y + 4, x : x + 4] = 60 * i + k + 1
    return label


def with_soft_borders(classes, _):
    """A mask whose border was antialiased."""
    return cv2.GaussianBlur((classes > 0) * np.uint8(255), (5, 3), 0)


def stray_as(mark):
    """The label that training sees of `with_strays`."""

    def seen(label):
        return np.where(label == 5, 4 if mark == "class" else 255, label)

    return seen


def foreground(label):
    return (label.reshape(64, 80, -1) > 0).any(2)


BINARY, EACH = "--instances binary", "--ignore none"
QUESTIONS = {
    "a slip": (with_strays, "few pixels or files show 5 (3 px, as in masks/t0.png)"),
    "a file": (in_one_file, "few pixels or files show 7"),
    "gaps": (with_gaps, "about one area of each value from 1 on"),
    "running": (counted_on, "numbers are in one file each"),
    "kept": (kept_from_frame_to_frame, "nearly each of 10 numbers is one area in every label"),
    "colours": (in_random_colors, "colours are in one file each"),
    "many": (more_than_classes, "numbers are in one file each"),
    "soft": (with_soft_borders, "values between 0 and 255, only along the borders"),
}
ANSWERS = {
    "a slip": {"--ignore 255,5": stray_as("slip"), "--ignore 255": stray_as("class")},
    "a file": {
        "--ignore 7": lambda x: np.where(x == 7, 255, x),
        EACH: lambda x: np.where(x == 7, 3, x),
    },
    "gaps": {BINARY: foreground, EACH: None},
    "running": {BINARY: foreground, EACH: None},
    "kept": {BINARY: foreground, EACH: None},
    "colours": {BINARY: foreground, EACH: None},
    "many": {BINARY: foreground},
    "soft": {"--threshold 128": lambda x: x >= 128},
}


@pytest.mark.parametrize("case", QUESTIONS)
def test_odd_values_are_asked_about_and_each_answer_is_what_training_sees(folder, init, case):
    make, message = QUESTIONS[case]
    number = 24 if case == "a file" else 8
    truth = {
        path: make(x, i) for i, (path, x) in enumerate(write(folder, make, number=number).items())
    }
    asked = init()
    assert (asked.code, message in asked.err) == (2, True), asked.err
    offered = re.findall(r"^segtrain:   [a-z].*?: (--.*)$", asked.err, re.M)
    assert offered == [*ANSWERS[case]]
    for option, seen in ANSWERS[case].items():
        assert init(*shlex.split(option)).code == 0, option
        found, _ = labels_of(folder.with_name("made"))
        for path, label in truth.items():
            # A class each: the labels divide the pixels as the values do.
            expected = np.unique(label.reshape(5120, -1), axis=0, return_inverse=True)[1]
            if seen is not None:
                np.testing.assert_array_equal(found[path], seen(label), err_msg=option)
            else:
                pairs = {*zip(expected.ravel().tolist(), found[path].ravel().tolist(), strict=True)}
                assert len(pairs) == expected.max() + 1, option


@pytest.mark.parametrize(
    "make",
    [
        lambda *_: squares(range(3, 10)),
        lambda *_: squares([*range(3, 13), 5, 9]),
        lambda _, i: squares([5 + i % 9]),
    ],
    ids=["few parts of a body", "some of two areas", "one class an image"],
)
def test_classes_are_not_taken_for_numbers_that_are_kept(folder, init, make):
    write(folder, make, number=18)
    said = init("--pairs", "named")
    assert said.code == 0, said.err


def test_three_pixels_in_one_of_two_labels_are_asked_about(folder, init):
    write(folder, with_strays, number=2)
    assert "few pixels or files show 5 (3 px" in init().err


def test_objects_around_which_255_lies_are_no_answer_to_binary(folder, init):
    """It would become the class, so the question says what helps."""

    def drawn(classes, i):
        label = with_gaps(classes, i)
        label[-2:] = 255
        return label

    write(folder, drawn, number=8)
    said = init().err
    assert "--instances binary takes 255 for objects, too: make it 0 first" in said
    assert "objects of one class" not in said


def test_a_list_of_all_values_says_that_they_are_no_objects(folder, init):
    write(folder, with_gaps, number=8)
    (folder / "classes.txt").write_text("\n".join(f"{i} part{i}" for i in range(20)))
    assert init().code == 0


def test_an_answer_leaves_out_what_the_list_calls_void(folder, init):
    """255 may be a class; the void of the list is none, whatever the answer is."""
    write(folder, lambda x, _: np.array([0, 1, 255], np.uint8)[x], num_classes=3)
    (folder / "classes.txt").write_text("0 void\n1 road\n255 lake\n2 tree\n")
    init()
    assert load_class_file(str(folder.with_name("made") / "classes.yaml")).names[:2] == (
        "road",
        "tree",
    )
    for path in folder.glob("masks/*"):
        label = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        label[:9, :9], label[:9, 9:18] = 7, 9
        save(path, label)
    said = init().err
    assert "no data: --ignore 0,7,9" in said
    for option in re.findall(r": (--ignore .*)$", said, re.M):
        init(*shlex.split(option))
        names = load_class_file(str(folder.with_name("made") / "classes.yaml")).names
        assert not any(map(says_no_class, names)), option


def test_both_answers_about_255_leave_out_what_the_list_calls_void(folder, init):
    write(folder, lambda x, _: np.array([255, 0, 1, 2], np.uint8)[x])
    (folder / "classes.txt").write_text("0 void\n1 road\n2 tree\n")
    asked = init().err
    assert "255 is most of them" in asked
    offered = re.findall(r"^segtrain:   255 .*: (--.*)$", asked, re.M)
    assert offered == ["--ignore 0,255", "--ignore 0 --names road,tree,class_255"]
    assert [init(*shlex.split(option)).code for option in offered] == [0, 0]


SPREAD = np.array([0, 7, 11, 255], np.uint8)


@pytest.mark.parametrize(
    ("listed", "options"),
    [
        ("a\nb\nc\nd", ["--ignore none --names a,b,c,d", "--ignore 255 --names a,b,c"]),
        ("a\nb\nc", ["--ignore none --names background,a,b,c", "--ignore 255 --names a,b,c"]),
        ("cell", ["--ignore 11,255 --names background,cell"]),
        ("void\nb\nc\nd", ["--ignore 0 --names b,c,d", "--ignore 0,255 --names b,c"]),
    ],
)
def test_a_list_that_does_not_fit_offers_its_names_and_all_work(folder, init, listed, options):
    write(folder, lambda classes, _: SPREAD[classes])
    (folder / "classes.txt").write_text(listed)
    said = init().err
    offered = re.findall(r"values(?:; .*)?: (--.*)$", said, re.M)
    assert {"--ignore 255 --names class_0,class_7,class_11", *options} <= {*offered}
    for option in offered:
        assert init(*shlex.split(option)).code == 0, option


@pytest.mark.parametrize(
    ("listed", "options"),
    [
        ("background\na\nb\nc\nd", []),
        ("a\nb\nc\nd", []),
        ("a\nb\nc\nd\ne", ["a,b,c,d", "background,a,b,c"]),
    ],
)
def test_a_list_whose_last_class_no_label_shows_may_count_from_1(folder, init, listed, options):
    """Behind a background without a name; all classes would be shifted by one."""
    write(folder)
    (folder / "classes.txt").write_text(listed)
    offered = re.findall(r"^segtrain:   . is a: (--.*)$", init().err, re.M)
    assert offered == [f"--ignore none --names {names}" for names in options]
    assert [init(*shlex.split(option)).code for option in offered] == [0] * len(offered)


def test_a_question_repeats_what_the_command_line_leaves_out(folder, init):
    write(folder, lambda classes, _: SPREAD[classes])
    (folder / "classes.txt").write_text("a\nb")
    offered = re.findall(r"values(?:; .*)?: (--.*)$", init("--ignore", "7").err, re.M)
    assert "--ignore 7,255 --names a,b" in offered
    assert [init(*shlex.split(option)).code for option in offered] == [0] * len(offered)


@pytest.mark.parametrize("option", ["--names", "--ignore"])
def test_two_frequent_shades_may_be_classes_or_one_of_them_none(folder, init, option):
    shades = np.stack([COLORS[0], COLORS[1], COLORS[1] + 2, COLORS[3]])
    write(folder, lambda classes, _: shades[classes])
    asked = init().err
    assert "if they are one class, make the labels equal first" in asked
    answer = re.search(rf": ({option} .*)$", asked, re.M)[1]
    assert init(*shlex.split(answer)).code == 0
    found, _ = labels_of(folder.with_name("made"))
    values = {*np.unique(np.concatenate([x.ravel() for x in found.values()])).tolist()}
    assert values == ({0, 1, 2, 3} if option == "--names" else {0, 1, 2, 255})


def test_objects_that_are_told_apart_in_red_alone_may_be_one_class(folder, init):
    """BBBC039: nuclei that touch have other numbers, so that each number has many areas."""
    truth = write(folder, lambda classes, _: np.dstack([classes, classes * 0, classes * 0]))
    option = re.search(r"objects of one class: (--instances binary)$", init().err, re.M)[1]
    assert init(*option.split()).code == 0
    found, _ = labels_of(folder.with_name("made"))
    assert all((label == (truth[path] > 0)).all() for path, label in found.items())


# Black and white


@pytest.mark.parametrize("suffix", ["png", "tif", "bmp"])
def test_white_of_1_bit_is_that_of_8_bits(folder, init, suffix):
    """DIBCO of several years: text is black."""
    truth = {}
    for i, path, classes in images_in(folder, num_classes=2, number=12):
        paper = Image.fromarray(classes == 0)  # of 1 bit
        saved = folder / f"masks/t{i}.{suffix if i % 3 else 'png'}"
        saved.parent.mkdir(exist_ok=True)
        (paper.convert("1") if i % 3 else paper.convert("L")).save(saved)
        truth[path] = (classes == 0).astype(np.uint8)
    said = init("--labels", f"masks/*.png, masks/*.{suffix}").out
    assert "files of 1 bit: 1 is white, as 255 in the others" in said
    assert [row[1] for row in rows_of(said)] == ["0", "255"]
    found, _ = labels_of(folder.with_name("made"))
    assert found.keys() == truth.keys()
    assert all((label == truth[path]).all() for path, label in found.items())


@pytest.mark.parametrize("other", ["palette", "8 bits", "jpg"])
def test_1_is_not_white_in_other_files(folder, init, other):
    """In a palette it is an index, in 8 bits a number; and a JPEG has a threshold of its own."""
    for i, _, classes in images_in(folder, num_classes=2, number=12):
        mask, end = Image.fromarray(classes * np.uint8(255)), "png"
        if i % 2 and other == "jpg":
            end = "jpg"
        elif other == "jpg":
            mask = mask.convert("1")
        elif i % 2:
            mask = Image.fromarray(classes)
            if other == "palette":  # of two colours, which Pillow stores in 1 bit
                mask.putpalette([0, 0, 0, 255, 255, 255])
        (folder / "masks").mkdir(exist_ok=True)
        mask.save(folder / f"masks/t{i}.{end}")
    assert init("--labels", "masks").code in (2, 3)


# Lists of classes


@pytest.mark.parametrize("differs", [False, True])
def test_a_palette_of_cityscapes_names_its_ids_if_all_colours_agree(folder, init, differs):
    """As in GTA5, beside no file that names classes; 4 is static, which has no class."""
    known = {k.ids[0]: (k.name, k.color) for k in load_class_file("cityscapes").classes}
    ids = np.array([4, *list(known)[:7]], np.uint8)
    palette = np.arange(768, dtype=np.uint8).reshape(256, 3)
    for value, (_, color) in known.items():
        palette[value] = color
    palette[ids[3]] += np.uint8(differs)
    for i, _, classes in images_in(folder):
        label = Image.fromarray(ids[(classes + np.arange(80) // 20 % 2 * 4) % 8])
        label.putpalette(palette.ravel().tolist())
        (folder / "masks").mkdir(exist_ok=True)
        label.save(folder / f"masks/t{i}.png")
    rows = {row[1]: row[0] for row in rows_of(init().out)}
    names = {"4": "id 4"} | {str(v): known[v][0] for v in ids[1:].tolist()}
    assert (
        rows.items() >= ({str(v): f"class_{v}" for v in ids.tolist()} if differs else names).items()
    )


def test_objects_have_the_name_of_the_only_class_of_a_list(folder, init):
    write(folder, with_gaps, number=8)
    (folder / "classes.txt").write_text("background\ncell")
    assert init("--instances", "binary").code == 0
    names = load_class_file(str(folder.with_name("made") / "classes.yaml")).names
    assert names == ("background", "cell")


def test_labelme_counts_from_minus_1(folder, init):
    write(folder, lambda classes, _: np.where(classes == 3, 255, classes).astype(np.uint8))
    (folder / "labels.txt").write_text("__ignore__\n_background_\ncar\nroad\n")
    rows = {row[0]: row[1] for row in rows_of(init().out)}
    assert rows == {"_background_": "0", "car": "1", "road": "2", "__ignore__": "255"}


@pytest.mark.parametrize("name", ["classes.xlsx", "Class-Names.txt", "legend.pdf", "palette.txt"])
def test_a_file_that_is_called_a_list_and_cannot_be_read_is_named(folder, init, name):
    write(folder)
    (folder / name).write_bytes(b"1 2 3\n4 5 6\n" if name == "palette.txt" else b"\0\1")
    assert f"warning: 1 file has no names of classes: {name}" in init().out


def test_the_names_of_a_mapping_are_those_of_the_values(folder, init):
    """A file that is called as CVAT's, and is none of it."""
    write(folder)
    (folder / "labelmap.txt").write_text("".join(f"{i}: {name}\n" for i, name in enumerate(NAMES)))
    assert [(row[0], row[1]) for row in rows_of(init().out)] == [
        (name, str(i)) for i, name in enumerate(NAMES)
    ]


def test_a_list_for_each_label_is_that_of_none(folder, init):
    """LabelMe's folders of a label each, which number the classes anew."""
    for i, path, classes in images_in(folder, "p{i}_json/img.png"):
        save(folder / path.replace("img", "label"), classes)
        names = ["_background_", *(f"part {(i + k) % 6}" for k in range(3))]
        (folder / path).with_name("label_names.txt").write_text("\n".join(names))
    assert "6 files number the classes differently, as one for each label" in init().err


def test_numbers_of_folders_are_named_by_a_list(folder, init):
    for i, _, classes in images_in(folder):
        for k in (1, 2, 3):
            save(folder / f"masks/{k}/t{i}.png", np.uint8(classes == k) * 255)
    (folder / "classes.txt").write_text("road\ncar\ntree\n")
    assert init().code == 0
    names = load_class_file(str(folder.with_name("made") / "classes.yaml")).names
    assert names == ("background", "road", "car", "tree")
