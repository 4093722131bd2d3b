"""`segtrain data check`: every kind of damage is found in one run, and good data passes."""

import json
import shutil
from dataclasses import replace
from functools import partial

import cv2
import numpy as np
import pytest
from PIL import Image

from segtrain.config import DataConfig
from segtrain.data import open_dataset
from segtrain.data.check import findings, scan
from segtrain.data.check.checks import check_data, quick_check
from segtrain.data.read import concurrent
from segtrain.errors import DataError

SIZE = (6, 9)
CLASSES = "classes: [sky, road, car]\n"


def write_pair(root, split, name, label, *, seed=0):
    for kind in ("images", "labels"):
        (root / kind / split).mkdir(parents=True, exist_ok=True)
    label = np.asarray(label, np.uint8)
    image = np.random.default_rng(seed).integers(0, 256, (*label.shape, 3), dtype=np.uint8)
    Image.fromarray(image).save(root / f"images/{split}/{name}.png")
    Image.fromarray(label).save(root / f"labels/{split}/{name}.png")


def rows(*values):
    """A label of SIZE whose rows hold the given values, the last one to the end."""
    values = list(values) + [values[-1]] * (SIZE[0] - len(values))
    return np.repeat(np.array(values)[:, None], SIZE[1], axis=1)


@pytest.fixture
def root(tmp_path):
    """Three training and two validation pairs with all three classes and some ignored pixels."""
    write_pair(tmp_path, "train", "a", rows(0, 0, 1, 2, 255), seed=1)
    write_pair(tmp_path, "train", "b", rows(0, 1, 1), seed=2)
    write_pair(tmp_path, "train", "c", rows(1), seed=3)
    write_pair(tmp_path, "val", "d", rows(0, 1, 2), seed=4)
    write_pair(tmp_path, "val", "e", rows(0, 2), seed=5)
    (tmp_path / "toy.yaml").write_text(CLASSES)
    return tmp_path


def write_labels(root, label, names="abc", *, split="train"):
    """Pairs with `label`, in the place of those that are there."""
    for name in names:
        write_pair(root, split, name, label, seed=ord(name))


def config(root, **data):
    return DataConfig(layout="folders", root=str(root), classes=str(root / "toy.yaml"), **data)


def checked(root, *, jobs=1, **options):
    return check_data(config(root, **options), jobs=jobs)


def kinds(result, severity="error"):
    return {(f.split, f.kind) for f in result.findings if f.severity == severity}


def finding(result, kind):
    (found,) = [f for f in result.findings if f.kind == kind]
    return found


def opened(root, **data):
    settings = config(root, **data)
    return open_dataset(settings, "train"), open_dataset(settings, "val")


def quickly_checked(root, **data):
    return quick_check(*opened(root, **data))


def refusal(root, **data):
    """What the check before training refuses."""
    with pytest.raises(DataError) as caught:
        quickly_checked(root, **data)
    return str(caught.value)


def assert_fine(root, **data):
    assert checked(root, **data).findings == []
    assert quickly_checked(root, **data) == []


def test_good_data_has_no_findings_and_its_pixels_are_counted(root):
    assert_fine(root)
    result = checked(root)
    train, width = result.scans[0], SIZE[1]
    assert result.ok
    assert train.pixels.tolist() == [3 * width, (1 + 5 + 6) * width, 1 * width]
    assert train.images.tolist() == [2, 3, 1]
    assert train.ignored_pixels == 2 * width


@pytest.mark.slow("data")  # test_pack has a pack of two processes
def test_processes_count_what_one_process_counts(root, monkeypatch):
    for i in range(20):
        write_pair(root, "train", f"more{i}", rows(i % 3, i % 2), seed=i)
    monkeypatch.setattr(concurrent, "_PAIRS_PER_PROCESS", 10)
    one, two = (checked(root, jobs=jobs) for jobs in (1, 2))
    assert one.scans[0].pixels.tolist() == two.scans[0].pixels.tolist()
    assert one.as_text() == two.as_text()


# Errors.


def test_a_split_that_cannot_be_listed_is_a_finding_beside_others(root):
    (root / "labels/train/a.png").unlink()
    shutil.rmtree(root / "labels/val")
    result = checked(root)
    assert kinds(result) == {("train", "files"), ("val", "split")}
    assert "train/a.png: no label" in next(iter(finding(result, "files").places))


def rgb_labels(root, names="abc"):
    for name in names:
        Image.new("RGB", (9, 6), (9, 0, 0)).save(root / f"labels/train/{name}.png")


def narrow_labels(root):
    for name in "ac":
        Image.fromarray(np.zeros((6, 8), np.uint8)).save(root / f"labels/train/{name}.png")


def no_picture(root):
    (root / "images/train/b.png").write_text("no picture")


MASK = rows(0, 255)


@pytest.mark.fault(51, 54, 57, 59)
@pytest.mark.parametrize(
    ("damage", "kind", "said"),
    [
        (narrow_labels, "sizes", ["2 labels have", "6x8 instead of 6x9: ", "a.png, ", "c.png"]),
        (partial(rgb_labels, names="b"), "unreadable", ["1 file cannot be read: the label is RGB"]),
        (rgb_labels, "unreadable", ["3 files cannot be read: the label is RGB", "train/c.png"]),
        (no_picture, "unreadable", ["read: not a PNG or JPEG image", "b.png"]),
        (partial(write_labels, label=MASK), "one class", ["that occur: sky;", "`ids: [255]`"]),
        (partial(write_labels, label=rows(0, 3)), "values", ["ids outside class file toy: 3"]),
    ],
)
def test_what_training_would_stop_at_is_refused_before_it(root, damage, kind, said):
    damage(root)
    result = checked(root)
    assert kinds(result) == {("train", kind)}
    # Labels that cannot be read say nothing about classes.
    assert kind != "unreadable" or kinds(result, "warning") == set()
    for message in ("\n".join(finding(result, kind).lines()), refusal(root)):
        assert message.startswith("split 'train': ")
        assert [part for part in said if part not in message] == []


@pytest.mark.fault(52)
def test_unknown_values_come_with_their_labels_and_pixels(root):
    write_pair(root, "train", "v1", rows(0, 7, 7, 9), seed=9)
    write_pair(root, "train", "v2", rows(9, 0), seed=10)
    assert finding(checked(root), "values").places == {
        f"9: {4 * SIZE[1]} pixels in 2 labels": ["v1", "v2"],
        f"7: {2 * SIZE[1]} pixels in 1 label": ["v1"],
    }


def test_what_differs_in_the_file_only_is_one_line_with_a_count_and_three_names():
    """And in JSON all of it; what is found in most files stands first."""
    found = {"gone": ["a"], "late": [*"bcdefg"], "": ["h", "i"]}
    words = "file", "files", "cannot be read"
    (one,) = findings._counted("error", "s", "unreadable", found, *words)
    text = "split 's': 9 files cannot be read"
    assert one.lines() == [text, "  late: b, c, d and 3 more", "  h, i", "  gone: a"]
    assert json.loads(json.dumps(vars(one)))["places"] == found
    few = replace(one, places={"late": [*"bcdefg"]})
    assert few.lines() == [f"{text}: late: b, c, d and 3 more"]
    many = replace(one, places={f"odd{i}": () for i in range(15)})
    assert many.lines()[10:] == ["  odd9", "  and 5 more"]


def test_one_split_is_searched_to_the_end_for_a_rare_second_class(root, monkeypatch):
    for i in range(70):
        write_pair(root, "train", f"m{i:02d}", rows(0), seed=20 + i)
    write_labels(root, rows(0))
    assert "classes that occur: sky;" in refusal(root)
    write_pair(root, "train", "m13", rows(0, 2), seed=99)
    assert quickly_checked(root) == []
    # But not if what the sample shows is wrong anyway.
    for path in root.glob("labels/train/*.png"):
        Image.fromarray(rows(7).astype(np.uint8)).save(path)
    read, whole = [], scan.scan_label
    monkeypatch.setattr(scan, "scan_label", lambda pair, *a: read.append(pair) or whole(pair, *a))
    assert "ids outside class file toy: 7" in refusal(root)
    assert len(read) == 37


# Warnings.


@pytest.mark.fault(60, 65, 72)
def test_oddities_are_warnings(root):
    write_pair(root, "val", "f", rows(0, 1), seed=1)  # the image of train/a
    write_labels(root, rows(0, 1), "de", split="val")
    write_pair(root, "train", "g", rows(255), seed=11)
    write_pair(root, "train", "lonely", rows(0), seed=12)
    (root / "images/train/lonely.png").unlink()
    exif = Image.Exif()
    exif[0x0112] = 3
    for name in ("y.png", "z.jpg"):
        write_pair(root, "train", name[0], rows(1))
        (root / "images/train" / f"{name[0]}.png").unlink()
        Image.new("RGB", (9, 6), (200, name == "z.jpg", 9)).save(
            root / "images/train" / name, exif=exif
        )
    # In a label it says nothing: ids are read as stored.
    Image.fromarray(rows(1).astype(np.uint8)).save(root / "labels/train/y.png", exif=exif)
    result = checked(root)
    assert result.ok
    assert {(f.split, f.kind): f.places.get("", []) for f in result.findings} == {
        ("train", "files"): [],
        ("train", "all ignored"): ["g"],
        ("train", "orientation"): ["y", "z"],
        ("val", "absent"): ["car"],
        ("", "both splits"): ["a = f"],
    }


def test_a_jpeg_that_is_damaged_in_its_middle_is_named(root, capfd):
    """OpenCV decodes it all the same, and libjpeg prints a line without a name."""
    (root / "images/train/a.png").unlink()
    pixels = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(root / "images/train/a.jpg", quality=95)
    assert not checked(root).findings
    data = bytearray((root / "images/train/a.jpg").read_bytes())
    data[-80:-78] = b"\xff\xd9"
    (root / "images/train/a.jpg").write_bytes(data)
    said = "1 image is damaged, and decoded with parts that are grey or shifted"
    assert quickly_checked(root) == [f"split 'train', by a sample: {said}; such as a"]
    line = "Corrupt JPEG data: premature end of data segment"
    assert [x.lines() for x in checked(root).findings] == [[f"split 'train': {said}: {line}: a"]]
    assert capfd.readouterr().err.count("Corrupt JPEG") == 0


@pytest.mark.parametrize("way", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("scale", [1.3, 2.5])
def test_rims_of_a_class_that_has_areas_too_are_a_warning(root, way, scale):
    """As a leaf around a fruit, where ids were resized with interpolation."""
    for name in "abc":
        label, rng = np.zeros((200, 260), np.uint8), np.random.default_rng(ord(name))
        for value, radius in ((1, 30), (1, 25), (2, 20), (2, 15), (2, 15)):
            cv2.circle(label, [int(x) for x in rng.integers(0, (260, 200))], radius, value, -1)
        how = getattr(cv2, f"INTER_{way.upper()}")
        write_pair(root, "train", name, cv2.resize(label, None, None, scale, scale, how))
    lines = [found.text for found in checked(root).findings if found.kind == "blended"]
    assert len(lines) == (way != "nearest")
    assert [x for x in quickly_checked(root) if "resized" in x] == [
        f"split 'train', by a sample: {line}" for line in lines
    ]
    if lines:
        assert lines[0].startswith("lines of one pixel show road in many places")


@pytest.mark.fault(53)
def test_train_ids_under_a_class_file_of_raw_ids_are_suspected(root):
    (root / "toy.yaml").write_text(
        "classes: [{name: a, ids: [0]}, {name: b, ids: [2]}, {name: c, ids: [8]}]\n"
        "ignore_ids: [1, 255]\n"
    )
    write_labels(root, rows(0, 1, 2))
    write_labels(root, rows(0, 1, 2), "de", split="val")
    assert ("train", "train ids") in kinds(checked(root), "warning")
    train, val = quickly_checked(root)
    assert train.startswith("split 'train', by a sample: no label holds an id above 2,")
    assert val.startswith("split 'val', ")
    write_pair(root, "train", "z", rows(0, 8))
    assert quickly_checked(root) == [val]
    # Nor is a mask whose 255 is a class.
    (root / "toy.yaml").write_text("classes: [background, {name: crack, ids: [255]}]\n")
    for split, names in (("train", "abcz"), ("val", "de")):
        write_labels(root, rows(0, 255), names, split=split)
    assert "train ids" not in {found.kind for found in checked(root).findings}


def test_one_split_for_both_purposes_is_a_warning(root):
    result = checked(root, eval_split="train")
    assert len(result.scans) == 1
    assert kinds(result, "warning") == {("", "one split")}
    train = opened(root)[0]
    assert quick_check(train, train) == [finding(result, "one split").text]


def test_images_of_both_lists_are_a_warning_before_training(root):
    for split, names in (("train", "abc"), ("val", "cde")):
        folders = ("train" if name in "abc" else "val" for name in names)
        pairs = [f"{folder}/{name}.png" for folder, name in zip(folders, names, strict=True)]
        lines = "".join(f"images/{pair} labels/{pair}\n" for pair in pairs)
        (root / f"{split}.txt").write_text(lines)
    lists = {"train_split": "train.txt", "eval_split": "val.txt"}
    data = config(root).model_copy(update={"layout": "list"} | lists)
    (line,) = quick_check(*(open_dataset(data, split) for split in lists.values()))
    assert line == "1 image is in both splits, so the scores will be too good: " + str(
        root / "images/train/c.png"
    )


# Labels in colours.


COLORS = [1, 2, 3], [9, 8, 7]
WITH_COLORS = "classes: [{name: a, color: [1, 2, 3]}, {name: b, color: [9, 8, 7]}]\n"


def test_colour_labels_are_counted_and_an_unlisted_colour_is_never_ignored_by_default(root):
    colors = np.array([COLORS[i] for i in (0, 0, 0, 1, 1)] + [(0, 0, 0)], np.uint8)
    for path in root.glob("labels/*/*.png"):
        Image.fromarray(colors[rows(*range(6))]).save(path)
    (root / "toy.yaml").write_text(WITH_COLORS)
    found, _ = [x for x in checked(root, label_format="colors").findings if x.kind == "values"]
    assert found.places == {f"(0, 0, 0): {3 * 9} pixels in 3 labels": ["a", "b", "c"]}
    assert "write `ignore_color: [0, 0, 0]` there" in found.text
    assert found.text in refusal(root, label_format="colors")
    (root / "toy.yaml").write_text(WITH_COLORS + "ignore_color: [0, 0, 0]\n")
    assert_fine(root, label_format="colors")
    train = checked(root, label_format="colors").scans[0]
    assert (train.pixels.tolist(), train.ignored_pixels) == ([3 * 27, 3 * 18], 3 * 9)


# The command.


@pytest.fixture
def check(root, lab):
    """Runs `segtrain data check`."""
    path = root / "toy_config.yaml"
    path.write_text(f"data: {{layout: folders, root: {root}, classes: {root}/toy.yaml}}\n")
    return partial(lab.command, "data", "check", path, "--jobs", 1)


def test_command_exits_with_0_and_prints_the_table(check):
    code, out, _ = check()
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "train: 3 pairs of 6x9 to 6x9, 11.1% of the pixels ignored"
    assert "the data is fine" in lines[-1]
    (road,) = [line for line in lines if line.startswith("road")]
    assert road.split() == ["road", "75.000", "%", "3", "8.333", "%", "1"]


def test_command_exits_with_3_and_writes_all_findings_as_json(root, check):
    for i in range(15):
        write_pair(root, "train", f"v{i}", rows(0, 7), seed=20 + i)
        (root / f"labels/train/v{i}.png").unlink()
    code, out, _ = check("--json", root / "out.json")
    assert code == 3
    assert "and 5 more" in out
    report = json.loads((root / "out.json").read_text())
    assert not report["ok"]
    assert report["splits"]["train"]["classes"]["car"] == {"pixels": 9, "images": 1}
    (found,) = report["findings"]
    assert (found["severity"], found["kind"], len(found["places"])) == ("error", "files", 15)


# Images of which reading leaves next to nothing


def write_image(path, *, seed=0, lowest=0, top=4095, dtype=np.uint16):
    """An image of all values up to `top`."""
    rng = np.random.default_rng(seed)
    values = rng.integers(lowest, top, (*SIZE, 3), endpoint=True).astype(dtype)
    assert cv2.imwrite(str(path), values)


def write_images(root, split, top, **options):
    for i, path in enumerate(sorted((root / "images" / split).glob("*.png"))):
        write_image(path, seed=i, top=top, **options)


@pytest.mark.parametrize(("top", "bits"), [(1023, 10), (16383, 14), (255, 8)])
def test_few_bits_of_16_are_an_error_with_the_repair(root, top, bits):
    write_images(root, "train", top, lowest=top)
    found = finding(checked(root), "faint")
    assert (found.severity, found.split, found.places[""]) == ("error", "train", ["a", "b", "c"])
    assert found.text.startswith(f"3 images of 16 bits use at most {bits} of them")
    assert f"no larger than {top}; set data.value_range: [0, {top}]" in found.text
    assert refusal(root) == f"split 'train': {found.text}: a, b, c"


def test_dark_images_of_16_bits_among_bright_ones_are_a_warning(root):
    write_images(root, "train", 65535)
    write_image(root / "images/train/b.png", seed=9)
    result = checked(root)
    assert result.ok
    found = finding(result, "faint")
    assert found.text.startswith("1 image of 16 bits uses at most 12 of them")
    assert found.places == {"": ["b"]}
    (line,) = quickly_checked(root)
    assert line.startswith("split 'train', by a sample: 1 image of 16 bits uses at most 12 of them")
    assert line.endswith("if these are not just dark; such as b")


def test_values_of_0_and_1_saved_as_bytes_are_an_error(root):
    write_images(root, "val", 1, dtype=np.uint8)
    assert kinds(checked(root)) == {("val", "faint")}
    assert "split 'val': nothing in the images is brighter than 1 of 255" in refusal(root)
