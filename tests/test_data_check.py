"""`segtrain data check`: every kind of damage is found in one run, and good data passes."""

import json
import math
import re
import shutil

import cv2
import numpy as np
import pytest
from PIL import Image

from segtrain.cli import main as segtrain
from segtrain.config import AugmentConfig, Config, DataConfig, TrainConfig
from segtrain.data import open_dataset
from segtrain.data.check.full import check_data
from segtrain.data.check.issues import as_text, shared_image_issues
from segtrain.data.check.quick import quick_check
from segtrain.data.check.scan import SplitScan
from segtrain.data.check.stats import enet_weights, median_frequency_weights
from segtrain.errors import ConfigError, DataError

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


def config(root, **data):
    return Config(
        data=DataConfig(layout="folders", root=str(root), classes=str(root / "toy.yaml"), **data),
        augment=AugmentConfig(crop_size=(4, 5)),
        train=TrainConfig(batch_size=3),
    )


def kinds(result, severity="error"):
    return {(f.split, f.kind) for f in result.issues if f.severity == severity}


def finding(result, kind):
    (found,) = [f for f in result.issues if f.kind == kind]
    return found


def opened(root, **data):
    settings = config(root, **data).data
    return open_dataset(settings, "train"), open_dataset(settings, "val")


def test_good_data_has_no_findings(root):
    result = check_data(config(root), jobs=1)
    assert result.ok
    assert result.issues == []


def test_pixels_and_images_are_counted_per_class(root):
    train = check_data(config(root), jobs=1).scans[0]
    width = SIZE[1]
    assert train.pixels.tolist() == [3 * width, (1 + 5 + 6) * width, 1 * width]
    assert train.images.tolist() == [2, 3, 1]
    assert train.ignored_pixels == 2 * width


def test_processes_count_what_one_process_counts(root):
    for i in range(260):  # enough for two processes
        write_pair(root, "train", f"more{i}", rows(i % 3, i % 2), seed=i)
    one, two = (check_data(config(root), jobs=jobs) for jobs in (1, 2))
    assert one.scans[0].pixels.tolist() == two.scans[0].pixels.tolist()
    assert as_text(one) == as_text(two)


def test_every_kind_of_damage_is_found_in_one_run(root):
    write_pair(root, "train", "unlabelled", rows(0), seed=6)
    (root / "labels/train/unlabelled.png").unlink()
    write_pair(root, "train", "small", rows(0), seed=7)
    Image.fromarray(np.zeros((6, 8), np.uint8)).save(root / "labels/train/small.png")
    write_pair(root, "train", "text", rows(0), seed=8)
    (root / "images/train/text.png").write_text("no picture")
    write_pair(root, "train", "values", rows(0, 7, 7, 9), seed=9)
    shutil.rmtree(root / "labels/val")
    result = check_data(config(root), jobs=1)
    assert not result.ok
    assert kinds(result) == {
        ("train", "files"),
        ("train", "sizes"),
        ("train", "unreadable"),
        ("train", "values"),
        ("val", "split"),
    }
    assert "unlabelled" in finding(result, "files").places[0]
    assert "label 6x8" in finding(result, "sizes").places[0]
    assert "text.png" in finding(result, "unreadable").places[0]


def test_what_is_wrong_with_many_files_is_said_once_and_all_are_listed(root):
    for name in "abc":
        Image.new("RGB", (9, 6)).save(root / f"labels/train/{name}.png")
    found = finding(check_data(config(root), jobs=1), "unreadable")
    assert found.text.startswith("3 files cannot be read: the label is RGB")
    assert found.places == [str(root / f"labels/train/{name}.png") for name in "abc"]


@pytest.mark.fault(52)
def test_unknown_values_come_with_their_labels_and_pixels(root):
    write_pair(root, "train", "v1", rows(0, 7, 7, 9), seed=9)
    write_pair(root, "train", "v2", rows(9, 0), seed=10)
    places = finding(check_data(config(root), jobs=1), "values").places
    assert places == [
        f"9: {4 * SIZE[1]} pixels in 2 labels, first v1, v2",
        f"7: {2 * SIZE[1]} pixels in 1 label, first v1",
    ]


@pytest.mark.fault(54)
def test_zero_and_255_masks_are_an_error_although_255_is_ignored(root):
    shutil.rmtree(root / "images")
    shutil.rmtree(root / "labels")
    write_pair(root, "train", "a", rows(0, 255), seed=1)
    write_pair(root, "val", "b", rows(0, 255), seed=2)
    result = check_data(config(root), jobs=1)
    assert kinds(result) == {("train", "one class"), ("val", "one class")}
    assert "ids: [255]" in result.issues[0].text


def test_a_mask_whose_255_is_a_class_is_not_taken_for_train_ids(root):
    (root / "toy.yaml").write_text("classes: [background, {name: crack, ids: [255]}]\n")
    for name, label in {"a": rows(0, 255), "b": rows(0), "c": rows(0)}.items():
        write_pair(root, "train", name, label, seed=ord(name))
    for name in "de":
        write_pair(root, "val", name, rows(0), seed=ord(name))
    warned = check_data(config(root), jobs=1).issues
    assert "train ids" not in {finding.kind for finding in warned}


def test_a_missing_root_is_one_finding_for_both_splits(root):
    data = DataConfig(layout="folders", root=str(root / "no"), classes=str(root / "toy.yaml"))
    result = check_data(Config(data=data), jobs=1)
    assert [(f.split, f.kind) for f in result.issues] == [("", "split")]


def test_labels_that_cannot_be_read_say_nothing_about_classes(root):
    for name in "de":
        Image.new("RGB", (9, 6)).save(root / f"labels/val/{name}.png")
    result = check_data(config(root), jobs=1)
    assert kinds(result) == {("val", "unreadable")}
    assert kinds(result, "warning") == set()


def test_fewer_images_than_a_batch_are_a_warning(root):
    write_pair(root, "train", "more", rows(0, 1), seed=6)
    assert kinds(check_data(config(root), jobs=1), "warning") == set()
    for name in ("more", "a"):
        (root / f"images/train/{name}.png").unlink()
        (root / f"labels/train/{name}.png").unlink()
    assert finding(check_data(config(root), jobs=1), "few").text.startswith("images: 2, fewer than")


def test_the_median_size_is_shown_where_most_images_are_smaller_than_the_crop(root):
    write_pair(root, "train", "large", np.zeros((20, 30)), seed=6)
    settings = config(root)
    settings = settings.model_copy(update={"augment": AugmentConfig(crop_size=(8, 8))})
    text = finding(check_data(settings, jobs=1), "small").text
    assert text.startswith("3 of 4 images")
    assert text.endswith("the median size is [6, 9]")


def test_files_that_count_from_1_get_that_advice(root):
    for name in "abc":
        write_pair(root, "train", name, rows(1, 2, 3, 255), seed=ord(name))
    text = finding(check_data(config(root), jobs=1), "values").text
    assert "count from 1" in text
    assert "`ids: [1]` to `ids: [3]`" in text


def test_one_more_class_than_the_class_file_names_gets_that_advice(root):
    write_pair(root, "train", "v", rows(0, 1, 2, 3), seed=9)
    text = finding(check_data(config(root), jobs=1), "values").text
    assert text.endswith(
        "give them a class there, or, if they are to be ignored, write `ignore_ids: [255, 3]` there"
    )


def test_the_advice_on_an_unknown_id_is_right_to_the_letter(root):
    """With a list of its own a class file ignores 255 no more."""
    write_pair(root, "train", "v", rows(0, 1, 254, 255), seed=9)
    text = finding(check_data(config(root), jobs=1), "values").text
    line = re.search("write `(.*)` there", text).group(1)
    (root / "toy.yaml").write_text(f"{CLASSES}{line}\n")
    assert ("train", "values") not in kinds(check_data(config(root), jobs=1))


@pytest.mark.fault(65, 68)
def test_oddities_are_warnings(root):
    write_pair(root, "val", "f", rows(0, 1), seed=1)  # the image of train/a
    write_pair(root, "train", "g", rows(255), seed=11)
    write_pair(root, "train", "h", rows(0, 1), seed=2)  # the image of train/b
    write_pair(root, "train", "lonely", rows(0), seed=12)
    (root / "images/train/lonely.png").unlink()
    write_pair(root, "train", "tiny", [[0, 1, 2, 2], [1, 1, 1, 1]], seed=13)
    result = check_data(config(root), jobs=1)
    assert result.ok
    assert kinds(result, "warning") == {
        ("train", "extra labels"),
        ("train", "all ignored"),
        ("train", "small"),
        ("train", "copies"),
        ("", "both splits"),
    }
    assert finding(result, "both splits").places == ["a = f"]
    assert finding(result, "copies").places == ["b = h"]
    assert "1 of 6 images" in finding(result, "small").text


@pytest.mark.parametrize(
    ("short_side_px", "crop_size", "small"),
    [
        (None, (6, 9), False),
        (None, (7, 9), True),
        (None, (6, 10), True),
        (4, (4, 6), False),
        (4, (5, 6), True),
        (4, (4, 7), True),
    ],
)
def test_images_are_measured_against_the_crop_as_resized(root, short_side_px, crop_size, small):
    settings = config(root, short_side_px=short_side_px).model_copy(
        update={"augment": AugmentConfig(crop_size=crop_size)}
    )
    expected = {("train", "small")} if small else set()
    assert kinds(check_data(settings, jobs=1), "warning") == expected


@pytest.mark.fault(72)
def test_absent_classes_are_named_per_split(root):
    for name in "de":
        write_pair(root, "val", name, rows(0, 1), seed=ord(name))
    absent = finding(check_data(config(root), jobs=1), "absent")
    assert (absent.split, absent.places) == ("val", ["car"])


@pytest.mark.fault(53)
def test_train_ids_under_a_class_file_of_raw_ids_are_suspected(root):
    (root / "toy.yaml").write_text(
        "classes: [{name: a, ids: [0]}, {name: b, ids: [2]}, {name: c, ids: [8]}]\n"
        "ignore_ids: [1, 255]\n"
    )
    for name in "abcde":
        write_pair(root, "train" if name in "abc" else "val", name, rows(0, 1, 2), seed=ord(name))
    result = check_data(config(root), jobs=1)
    assert ("train", "train ids") in kinds(result, "warning")
    train, val = quick_check(*opened(root))
    assert train.startswith("split 'train': by a sample of labels, no label holds an id above 2,")
    assert val.startswith("split 'val': ")
    write_pair(root, "train", "z", rows(0, 8))
    (line,) = quick_check(*opened(root))
    assert line == val


@pytest.mark.fault(60)
def test_labels_of_train_ids_are_counted_by_position(root):
    expected = check_data(config(root), jobs=1).scans[0].pixels.tolist()
    raw_ids = "classes: [{name: sky, ids: [10]}, {name: road, ids: [20]}, {name: car, ids: [30]}]\n"
    (root / "toy.yaml").write_text(raw_ids)
    result = check_data(config(root, label_format="train_ids"), jobs=1)
    assert result.issues == []
    assert quick_check(*opened(root, label_format="train_ids")) == []
    assert result.scans[0].pixels.tolist() == expected


def test_exif_orientation_is_a_warning(root):
    exif = Image.Exif()
    exif[0x0112] = 3
    for name in ("y.png", "z.jpg"):
        Image.new("RGB", (9, 6)).save(root / "images/train" / name, exif=exif)
        # In a label it says nothing: ids are read as stored.
        label = Image.fromarray(rows(1).astype(np.uint8))
        label.save((root / "labels/train" / name).with_suffix(".png"), exif=exif)
    assert finding(check_data(config(root), jobs=1), "orientation").places == ["y", "z"]


def test_one_split_for_both_purposes_is_a_warning(root):
    result = check_data(config(root, eval_split="train"), jobs=1)
    assert len(result.scans) == 1
    assert kinds(result, "warning") == {("", "one split")}
    train = opened(root)[0]
    assert quick_check(train, train) == [finding(result, "one split").text]


def test_labels_without_an_image_are_told_where_training_starts(root):
    for name in "abc":
        (root / f"images/train/{name}.png").rename(root / f"images/train/{name}.txt")
    write_pair(root, "train", "z", rows(0, 1))
    train, val = opened(root)
    (line,) = train.warnings
    paths = ", ".join(str(root / f"labels/train/{name}.png") for name in "abc")
    assert line == f"3 labels have no image and are not used: {paths}"
    assert not val.warnings


def test_colour_labels_are_counted_and_unknown_colours_reported(root):
    (root / "toy.yaml").write_text(
        "classes: [{name: a, color: [1, 2, 3]}, {name: b, color: [9, 8, 7]}]\n"
        "ignore_color: [5, 5, 5]\n"
    )
    colors = np.array([[1, 2, 3], [9, 8, 7], [5, 5, 5], [0, 0, 7]], np.uint8)
    for path in root.glob("labels/*/*.png"):
        Image.fromarray(colors[rows(0, 0, 0, 1, 1, 2)]).save(path)
    result = check_data(config(root, label_format="colors"), jobs=1)
    assert result.ok
    assert result.scans[0].pixels.tolist() == [3 * 27, 3 * 18]
    assert result.scans[0].ignored_pixels == 3 * 9
    Image.fromarray(colors[rows(0, 3)]).save(root / "labels/train/a.png")
    result = check_data(config(root, label_format="colors"), jobs=1)
    assert finding(result, "values").places == [f"(0, 0, 7): {5 * 9} pixels in 1 label, first a"]


def test_a_colour_that_the_class_file_does_not_list_is_never_ignored_by_default(root):
    classes = "classes: [{name: a, color: [1, 2, 3]}, {name: b, color: [9, 8, 7]}]\n"
    (root / "toy.yaml").write_text(classes)
    colors = np.array([[1, 2, 3], [9, 8, 7], [0, 0, 0]], np.uint8)
    for path in root.glob("labels/*/*.png"):
        Image.fromarray(colors[rows(0, 1, 2)]).save(path)
    result = check_data(config(root, label_format="colors"), jobs=1)
    (found, _) = [one for one in result.issues if one.kind == "values"]
    assert found.places == [f"(0, 0, 0): {3 * 4 * 9} pixels in 3 labels, first a, b, c"]
    assert "write `ignore_color: [0, 0, 0]` there" in found.text
    with pytest.raises(DataError, match=r"\[0, 0, 0\] \(36 pixels\).*`ignore_color: \[0, 0, 0\]`"):
        quick_check(*opened(root, label_format="colors"))
    (root / "toy.yaml").write_text(classes + "ignore_color: [0, 0, 0]\n")
    assert check_data(config(root, label_format="colors"), jobs=1).issues == []


def test_median_frequency_weights_by_hand(root):
    train = check_data(config(root), jobs=1).scans[0]
    assert train.pixels_beside.tolist() == [36 + 54, 36 + 54 + 54, 36]
    median = 27 / 90
    expected = [median / (27 / 90), median / (108 / 144), median / (9 / 36)]
    assert median_frequency_weights(train) == pytest.approx(expected, rel=1e-3)


def test_enet_weights_by_hand():
    weights = enet_weights(np.array([3, 1, 0]))
    expected = [1 / math.log(1.77), 1 / math.log(1.27), 1 / math.log(1.02)]
    assert weights == pytest.approx(expected, rel=1e-3)


def write_config(root):
    path = root / "toy_config.yaml"
    path.write_text(
        f"data: {{layout: folders, root: {root}, classes: {root}/toy.yaml}}\n"
        "augment: {crop_size: [4, 5]}\n"
        "train: {batch_size: 3}\n"
    )
    return str(path)


def test_command_exits_with_0_and_prints_the_table(root, capsys):
    assert segtrain(["data", "check", write_config(root), "--jobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train: 3 pairs of 6x9 to 6x9, 11.1% of the pixels ignored"
    assert "the data is fine" in lines[-1]
    (road,) = [line for line in lines if line.startswith("road")]
    assert road.split() == ["road", "75.000", "%", "3", "8.333", "%", "1"]


def test_command_exits_with_3_and_writes_all_findings_as_json(root, capsys):
    for i in range(15):
        write_pair(root, "train", f"v{i}", rows(0, 7), seed=20 + i)
        (root / f"labels/train/v{i}.png").unlink()
    code = segtrain(["data", "check", write_config(root), "--json", str(root / "out.json")])
    assert code == 3
    assert "and 5 more" in capsys.readouterr().out
    report = json.loads((root / "out.json").read_text())
    assert not report["ok"]
    assert report["splits"]["train"]["classes"]["car"] == {"pixels": 9, "images": 1}
    (found,) = report["findings"]
    assert (found["severity"], found["kind"], len(found["places"])) == ("error", "files", 15)


def test_quick_check_passes_good_data(root):
    quick_check(*opened(root))


@pytest.mark.fault(51)
def test_quick_check_shows_every_pair_whose_sizes_differ(root):
    for name in "ac":
        Image.fromarray(np.zeros((6, 8), np.uint8)).save(root / f"labels/train/{name}.png")
    with pytest.raises(DataError) as caught:
        quick_check(*opened(root))
    lines = str(caught.value).splitlines()
    assert lines[0] == "split 'train': 2 problems"
    assert "a.png: label 6x8" in lines[1]
    assert "c.png: label 6x8" in lines[2]


@pytest.mark.fault(57)
def test_quick_check_refuses_colour_labels_where_ids_are_expected(root):
    Image.new("RGB", (9, 6)).save(root / "labels/val/e.png")
    with pytest.raises(DataError, match=r"e\.png: the label is RGB, expected one channel"):
        quick_check(*opened(root))


def test_quick_check_says_once_what_is_wrong_with_all_files(root):
    for name in "abc":
        Image.new("RGB", (9, 6)).save(root / f"labels/train/{name}.png")
    with pytest.raises(DataError, match=r"a\.png: the label is RGB.*\(3 files are like this\)$"):
        quick_check(*opened(root))


@pytest.mark.fault(54)
def test_quick_check_refuses_masks_whose_foreground_is_ignored(root):
    for name in "abc":
        write_pair(root, "train", name, rows(0, 255), seed=ord(name))
    message = r"^split 'train': only 'sky' ever occurs; .*`ids: \[255\]`"
    with pytest.raises(DataError, match=message):
        quick_check(*opened(root))


def test_quick_check_passes_a_set_whose_second_class_is_rare(root):
    for i in range(20):
        write_pair(root, "train", f"m{i:02d}", rows(0), seed=20 + i)
    for name in "abc":
        write_pair(root, "train", name, rows(0), seed=ord(name))
    write_pair(root, "train", "m13", rows(0, 2), seed=99)
    quick_check(*opened(root))


@pytest.mark.fault(59)
def test_quick_check_refuses_a_text_file_that_is_named_like_a_picture(root):
    (root / "images/val/e.png").write_text("no picture")
    with pytest.raises(DataError, match=r"e\.png: neither a PNG nor a JPEG"):
        quick_check(*opened(root))


def test_quick_check_finds_a_class_file_that_does_not_fit(root):
    for name in "abc":
        write_pair(root, "train", name, rows(0, 3), seed=ord(name))
    with pytest.raises(DataError, match=r"label ids outside class file toy: 3"):
        quick_check(*opened(root))


# Images of which reading leaves next to nothing


def write_images(root, split, top, *, dtype=np.uint16, lowest=0):
    """Images of all values up to `top`, with OpenCV, which takes the high byte when it reads."""
    for i, path in enumerate(sorted((root / "images" / split).glob("*.png"))):
        values = np.random.default_rng(i).integers(lowest, top, (*SIZE, 3), endpoint=True)
        assert cv2.imwrite(str(path), values.astype(dtype))


@pytest.mark.parametrize(
    ("top", "bits", "left"), [(1023, 10, 3), (4095, 12, 15), (16383, 14, 63), (255, 8, 0)]
)
def test_few_bits_of_16_are_an_error_with_the_repair(root, top, bits, left):
    write_images(root, "train", top, lowest=top)
    found = finding(check_data(config(root), jobs=1), "faint")
    assert (found.severity, found.split, found.places) == ("error", "train", ["a", "b", "c"])
    assert f"at most {bits} of their 16 bits" in found.text
    assert f"no brighter than {left} of 255" in found.text
    assert "rescale the values to 0..255" in found.text
    with pytest.raises(DataError, match=rf"split 'train', .*\.png: .*at most {bits} of their 16"):
        quick_check(*opened(root))


def write_12_bits(path, *, seed=0, marked=False):
    """An image of 12 bits in 16, with a burnt-in pixel if it is `marked`."""
    values = np.random.default_rng(seed).integers(0, 4096, (40, 50, 3)).astype(np.uint16)
    if marked:
        values[0, 0] = 65535
    assert cv2.imwrite(str(path), values)


def test_a_burnt_in_pixel_does_not_hide_12_bits(root):
    for i, name in enumerate("abc"):
        write_pair(root, "train", name, np.arange(2000).reshape(40, 50) % 3)
        write_12_bits(root / f"images/train/{name}.png", seed=i, marked=True)
    found = finding(check_data(config(root), jobs=1), "faint")
    assert (found.severity, found.places) == ("error", ["a", "b", "c"])
    assert "at most 12 of their 16 bits" in found.text
    with pytest.raises(DataError, match=r"split 'train', .*\.png: .*at most 12 of their 16"):
        quick_check(*opened(root))


def test_most_images_of_12_bits_are_a_warning_at_the_start_too(root):
    write_images(root, "train", 65535)
    for i in range(5):
        write_pair(root, "train", f"m{i}", np.arange(2000).reshape(40, 50) % 3)
        write_12_bits(root / f"images/train/m{i}.png", seed=i)
    # Only a.png is bright, and it is the first of the sample.
    for name in "bc":
        (root / f"images/train/{name}.png").unlink()
        (root / f"labels/train/{name}.png").unlink()
    assert check_data(config(root), jobs=1).ok
    (line,) = quick_check(*opened(root))
    assert "split 'train'" in line
    assert "at most 12 of their 16 bits" in line


def test_images_of_all_16_bits_are_fine(root):
    write_images(root, "train", 65535)
    assert check_data(config(root), jobs=1).issues == []
    quick_check(*opened(root))


def test_a_dark_image_of_16_bits_among_bright_ones_is_a_warning(root):
    write_images(root, "train", 65535)
    dark = np.random.default_rng(9).integers(0, 4096, (*SIZE, 3)).astype(np.uint16)
    cv2.imwrite(str(root / "images/train/b.png"), dark)
    result = check_data(config(root), jobs=1)
    assert result.ok
    assert finding(result, "faint").places == ["b"]
    (line,) = quick_check(*opened(root))
    assert "images/train/b.png" in line


def test_a_camera_of_12_bits_among_images_of_8_is_an_error(root):
    for i in range(40):
        write_pair(root, "train", f"m{i:02d}", rows(0, 1), seed=20 + i)
    values = np.random.default_rng(0).integers(0, 4096, (*SIZE, 3)).astype(np.uint16)
    cv2.imwrite(str(root / "images/train/m07.png"), values)
    assert not check_data(config(root), jobs=1).ok
    with pytest.raises(DataError, match=r"m07\.png: the 16-bit images use at most 12"):
        quick_check(*opened(root))


def test_values_of_0_and_1_saved_as_bytes_are_an_error(root):
    write_images(root, "val", 1, dtype=np.uint8)
    assert kinds(check_data(config(root), jobs=1)) == {("val", "faint")}
    with pytest.raises(DataError, match=r"split 'val', .*brighter than 1 of 255"):
        quick_check(*opened(root))


def test_a_split_of_black_images_is_an_error_and_a_single_one_a_warning(root):
    cv2.imwrite(str(root / "images/train/b.png"), np.zeros((*SIZE, 3), np.uint8))
    result = check_data(config(root), jobs=1)
    assert kinds(result, "warning") == {("train", "single colour")}
    assert finding(result, "single colour").places == ["b"]
    quick_check(*opened(root))
    for name in "ac":
        cv2.imwrite(str(root / f"images/train/{name}.png"), np.full((*SIZE, 3), 200, np.uint8))
    assert kinds(check_data(config(root), jobs=1)) == {("train", "faint")}
    with pytest.raises(DataError, match="every image is of a single colour"):
        quick_check(*opened(root))


def test_one_bright_image_far_from_the_sample_is_enough(root):
    for i in range(31):
        write_pair(root, "train", f"m{i:02d}", rows(0, 1), seed=20 + i)
    write_images(root, "train", 9, dtype=np.uint8)
    with pytest.raises(DataError, match="train"):
        quick_check(*opened(root))
    bright = np.random.default_rng(1).integers(0, 256, (*SIZE, 3)).astype(np.uint8)
    cv2.imwrite(str(root / "images/train/m05.png"), bright)
    assert quick_check(*opened(root)) == []


def test_images_of_formats_that_are_not_read_are_a_warning(root):
    for name in ("x.bmp", "y.tif"):
        (root / "images/train" / name).touch()
    result = check_data(config(root), jobs=1)
    assert result.ok
    found = finding(result, "formats")
    assert found.text.startswith("2 images are left out: .bmp .tif is not read, only JPEG and PNG")
    assert found.places == [str(root / "images/train" / name) for name in ("x.bmp", "y.tif")]
    train, val = opened(root)
    assert [len(train.warnings), len(val.warnings)] == [1, 0]


def test_names_alone_are_refused_for_labels_in_colours(root):
    with pytest.raises(ConfigError, match=r"toy\.yaml: .*sky, road, car; give each class"):
        check_data(config(root, label_format="colors"), jobs=1)
    with pytest.raises(ConfigError, match=r"toy\.yaml: .*sky, road, car; give each class"):
        opened(root, label_format="colors")


def test_images_that_occur_more_than_once_are_counted_and_few_are_named():
    """Many equal images, such as black ones, are one line that can be read."""
    scan = SplitScan("train", 1, num_classes=2)
    scan.digests[b"black"] += [f"{i}.png" for i in range(10_000)]
    other = SplitScan("val", 1, num_classes=2)
    other.digests[b"black"].append("v.png")
    twice, both = shared_image_issues([scan, other], is_one_split=False)
    assert twice.text == "1 image occurs more than once"
    assert twice.places == [" = ".join(f"{i}.png" for i in range(10)) + " and 9990 more"]
    assert both.text == "1 image is in both splits: the scores will be too good"
    scan.digests[b"white"] += ["a.png", "b.png"]
    (twice,) = shared_image_issues([scan], is_one_split=False)
    assert twice.text == "2 images occur more than once"
    assert twice.places[1] == "a.png = b.png"
