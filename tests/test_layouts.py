"""Which label belongs to which image, and what is refused. No file holds pixels here."""

import os
from typing import get_args

import pytest

from segtrain.config import DataConfig
from segtrain.data.read.find import first_lines
from segtrain.data.read.layouts import LAYOUTS, instance_files, list_split, scan_layout
from segtrain.errors import DataError


def touch(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def config(root, layout, **more):
    return DataConfig(layout=layout, root=str(root), classes="camvid", **more)


def list_pairs(data, split):
    return list_split(data, split).pairs


def relative_pairs(root, pairs):
    return [(str(p.image.relative_to(root)), str(p.label.relative_to(root)), p.name) for p in pairs]


def write_list(root, content, name="train.txt"):
    touch(root, "i/a.png", "i/b.jpg", "i/my image.png", "l/a.png", "l/b.png", "l/my, label.png")
    path = root / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return config(root, "list", train_split=name)


def listed(root, content):
    return relative_pairs(root, list_pairs(write_list(root, content), "train.txt"))


A_AND_B = [("i/a.png", "l/a.png", "i/a"), ("i/b.jpg", "l/b.png", "i/b")]


def test_a_config_can_name_every_layout():
    assert get_args(DataConfig.model_fields["layout"].annotation) == tuple(LAYOUTS)


def test_cityscapes_pairs_an_image_with_its_label_ids(tmp_path):
    touch(
        tmp_path,
        "leftImg8bit/val/ulm/ulm_1_leftImg8bit.png",
        "leftImg8bit/val/bonn/bonn_2_leftImg8bit.png",
        "gtFine/val/ulm/ulm_1_gtFine_labelIds.png",
        "gtFine/val/ulm/ulm_1_gtFine_instanceIds.png",
        "gtFine/val/bonn/bonn_2_gtFine_labelIds.png",
        "gtFine/val/bonn/bonn_2_gtFine_color.png",
    )
    pairs = list_pairs(config(tmp_path, "cityscapes"), "val")
    assert relative_pairs(tmp_path, pairs) == [
        (
            f"leftImg8bit/val/{name}_leftImg8bit.png",
            f"gtFine/val/{name}_gtFine_labelIds.png",
            name,
        )
        for name in ("bonn/bonn_2", "ulm/ulm_1")
    ]


def test_cityscapes_coarse_split_reads_coarse_labels(tmp_path):
    touch(tmp_path, "leftImg8bit/train_extra/ulm/ulm_1_leftImg8bit.png")
    touch(tmp_path, "gtCoarse/train_extra/ulm/ulm_1_gtCoarse_labelIds.png")
    (pair,) = list_pairs(config(tmp_path, "cityscapes"), "train_extra")
    assert pair.label.name == "ulm_1_gtCoarse_labelIds.png"


def test_cityscapes_with_train_ids_only_names_the_file_found_instead(tmp_path):
    touch(tmp_path, "leftImg8bit/val/ulm/ulm_1_leftImg8bit.png")
    touch(tmp_path, "gtFine/val/ulm/ulm_1_gtFine_labelTrainIds.png")
    with pytest.raises(DataError, match=r"no label .*labelIds.png \(found .*labelTrainIds.png\)"):
        list_pairs(config(tmp_path, "cityscapes"), "val")


@pytest.mark.parametrize(
    ("image", "label"),
    [("images/val/a.jpg", "labels/val/a.png"), ("val/a.png", "valannot/a.png")],
)
def test_camvid_is_read_in_both_published_forms(tmp_path, image, label):
    touch(tmp_path, image, label)
    pairs = list_pairs(config(tmp_path, "camvid"), "val")
    assert relative_pairs(tmp_path, pairs) == [(image, label, "a")]


def test_voc_reads_the_names_of_the_split(tmp_path):
    touch(tmp_path, *(f"JPEGImages/{n}.jpg" for n in "abc"), "JPEGImages/a.txt")
    touch(tmp_path, *(f"SegmentationClass/{n}.png" for n in "abc"), "ImageSets/Segmentation/x.txt")
    (tmp_path / "ImageSets/Segmentation/val.txt").write_text("c\na\n")
    pairs = list_pairs(config(tmp_path, "voc"), "val")
    assert relative_pairs(tmp_path, pairs) == [
        (f"JPEGImages/{n}.jpg", f"SegmentationClass/{n}.png", n) for n in "ac"
    ]


def test_voc_augmented_split_reads_the_augmented_labels(tmp_path):
    touch(tmp_path, "JPEGImages/a.jpg", "JPEGImages/b.jpg", "SegmentationClass/a.png")
    touch(tmp_path, "SegmentationClassAug/a.png", "SegmentationClassAug/b.png")
    touch(tmp_path, "ImageSets/Segmentation/trainaug.txt")
    (tmp_path / "ImageSets/Segmentation/trainaug.txt").write_text("a\nb\n")
    pairs = list_pairs(config(tmp_path, "voc"), "trainaug")
    assert {pair.label.parent.name for pair in pairs} == {"SegmentationClassAug"}


def test_cityscapes_scores_on_coarse_labels_are_told(tmp_path):
    cityscapes_files(tmp_path, "gtCoarse", "val", "ulm/ulm_1")
    cityscapes_files(tmp_path, "gtCoarse", "train", "ulm/ulm_1")
    data = config(tmp_path, "cityscapes")
    (line,) = list_split(data, "val").warnings_of_start()
    assert line == "split 'val' is read from gtCoarse: the benchmark scores the labels of gtFine"
    assert list_split(data, "train").warnings_of_start() == []
    cityscapes_files(tmp_path, "gtFine", "val", "ulm/ulm_1")
    assert list_split(data, "val").warnings_of_start() == []


def test_voc_scores_on_augmented_labels_are_told(tmp_path):
    touch(tmp_path, "JPEGImages/a.jpg", "SegmentationClassAug/a.png", "ImageSets/Segmentation/x")
    for split in ("val", "trainaug"):
        (tmp_path / f"ImageSets/Segmentation/{split}.txt").write_text("a\n")
    data = config(tmp_path, "voc")
    (line,) = list_split(data, "val").warnings_of_start()
    assert "Aug: the benchmark scores the labels of SegmentationClass" in line
    assert list_split(data, "trainaug").warnings_of_start() == []
    touch(tmp_path, "SegmentationClass/a.png")
    assert list_split(data, "val").warnings_of_start() == []


def test_voc_counts_missing_images_and_labels(tmp_path):
    touch(tmp_path, "JPEGImages/a.jpg", "SegmentationClass/b.png", "ImageSets/Segmentation/v.txt")
    (tmp_path / "ImageSets/Segmentation/v.txt").write_text("a\nb\n../c\na 1\n")
    with pytest.raises(DataError) as caught:
        list_pairs(config(tmp_path, "voc"), "v")
    text = str(caught.value)
    assert "4 problems" in text
    assert "v.txt:3" in text
    assert "v.txt:4" in text
    assert "a.jpg: no label" in text
    assert "b: no image" in text


@pytest.mark.parametrize(("split", "folder"), [("train", "training"), ("validation", "validation")])
def test_ade20k_takes_short_and_long_names_of_splits(tmp_path, split, folder):
    touch(tmp_path, f"images/{folder}/a.jpg", f"annotations/{folder}/a.png")
    pairs = list_pairs(config(tmp_path, "ade20k"), split)
    assert relative_pairs(tmp_path, pairs) == [
        (f"images/{folder}/a.jpg", f"annotations/{folder}/a.png", "a")
    ]


def test_folders_are_mirrored_at_any_depth(tmp_path):
    touch(tmp_path, "x/train/one/a b.JPG", "y/train/one/a b.png", "x/train/c.png", "y/train/c.png")
    pairs = list_pairs(config(tmp_path, "folders", images_dir="x", labels_dir="y"), "train")
    assert relative_pairs(tmp_path, pairs) == [
        ("x/train/c.png", "y/train/c.png", "c"),
        ("x/train/one/a b.JPG", "y/train/one/a b.png", "one/a b"),
    ]


@pytest.mark.parametrize("split", ["", "."])
def test_folders_without_splits(tmp_path, split):
    touch(tmp_path, "images/a.png", "labels/a.png")
    assert [p.name for p in list_pairs(config(tmp_path, "folders"), split)] == ["a"]


def test_hidden_files_are_no_images(tmp_path):
    touch(tmp_path, "images/train/a.png", "labels/train/a.png", "images/train/._a.png")
    touch(tmp_path, "images/train/.cache/b.png")
    assert [p.name for p in list_pairs(config(tmp_path, "folders"), "train")] == ["a"]


def test_linked_folders_are_followed_once(tmp_path):
    touch(tmp_path, "elsewhere/a.png", "labels/train/more/a.png", "images/train/b.png")
    touch(tmp_path, "labels/train/b.png")
    os.symlink(tmp_path / "elsewhere", tmp_path / "images/train/more")
    os.symlink(tmp_path / "images/train", tmp_path / "elsewhere/up")
    pairs = list_pairs(config(tmp_path, "folders"), "train")
    assert [pair.name for pair in pairs] == ["b", "more/a"]


@pytest.mark.parametrize("reverse", [False, True])
def test_names_do_not_depend_on_the_order_in_which_the_disk_lists_links(
    tmp_path, monkeypatch, reverse
):
    """A real folder goes before links to it, and of two links the first by name."""
    touch(tmp_path, "images/train/z/a.png", "labels/train/z/a.png")
    touch(tmp_path, "elsewhere/b.png", "labels/train/k/b.png")
    os.symlink("z", tmp_path / "images/train/a")
    os.symlink(tmp_path / "elsewhere", tmp_path / "images/train/m")
    os.symlink(tmp_path / "elsewhere", tmp_path / "images/train/k")
    listed_by_the_disk(monkeypatch, reverse=reverse)
    pairs = list_pairs(config(tmp_path, "folders"), "train")
    assert [pair.name for pair in pairs] == ["k/b", "z/a"]


def listed_by_the_disk(monkeypatch, *, reverse):
    """From here on folders are listed in this order."""
    scandir = os.scandir

    class Listed:
        def __init__(self, path="."):
            with scandir(path) as found:
                self.left = sorted(found, key=lambda entry: entry.name, reverse=not reverse)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __iter__(self):
            return self

        def __next__(self):
            if not self.left:
                raise StopIteration
            return self.left.pop()

    monkeypatch.setattr(os, "scandir", Listed)


@pytest.mark.fault(49)
def test_all_missing_labels_are_counted_and_ten_are_shown(tmp_path):
    touch(tmp_path, *(f"images/train/{i:02}.jpg" for i in range(14)), "labels/train/03.png")
    with pytest.raises(DataError) as caught:
        list_pairs(config(tmp_path, "folders"), "train")
    lines = str(caught.value).splitlines()
    assert "13 problems" in lines[0]
    assert len(lines) == 12
    assert lines[-1].strip() == "and 3 more"
    assert "images/train/00.jpg: no label" in lines[1]


def test_jpeg_labels_are_refused_in_one_line(tmp_path):
    touch(tmp_path, *(f"images/train/{i}.jpg" for i in range(3)))
    touch(tmp_path, *(f"labels/train/{i}.jpg" for i in range(3)))
    with pytest.raises(DataError, match=r"labels/train: 3 files, none is .*JPEG") as caught:
        list_pairs(config(tmp_path, "folders"), "train")
    assert "\n" not in str(caught.value)


def test_every_missing_label_shown_comes_with_a_file_that_resembles_it(tmp_path):
    touch(tmp_path, "images/train/a b.jpg", "images/train/c.jpg")
    touch(tmp_path, "labels/train/a b_mask.png", "labels/train/c_mask.png")
    problems = scan_layout(config(tmp_path, "folders"), "train").problems
    assert problems[0].endswith("(found a b_mask.png; rename it to a b.png)")
    assert problems[1].endswith("(found c_mask.png; rename it to c.png)")


@pytest.mark.parametrize(
    ("label", "advice"),
    [
        ("1_gt.png", "; rename it to 1.png"),
        ("1_label.PNG", "; rename it to 1.png"),
        ("1-Mask.png", "; rename it to 1.png"),
        ("1.jpg.png", "; rename it to 1.png"),
        ("mask_1.png", "; rename it to 1.png"),
        ("GT-1.PNG", "; rename it to 1.png"),
        ("10.png", ""),  # of another image
        ("1_mask.tif", ""),
    ],
)
def test_a_label_with_a_word_behind_its_name_is_to_be_renamed(tmp_path, label, advice):
    touch(tmp_path, "images/train/1.jpg", "images/train/2.jpg", "labels/train/2.png")
    touch(tmp_path, f"labels/train/{label}")
    (problem,) = scan_layout(config(tmp_path, "folders"), "train").problems
    assert problem.endswith(f"(found {label}{advice})")


def test_a_label_in_capitals_is_to_be_renamed_unless_it_is_of_another_image(tmp_path):
    touch(tmp_path, "images/train/a/x.jpg", "labels/train/a/X.PNG", "labels/train/a/x_old.png")
    (problem,) = scan_layout(config(tmp_path, "folders"), "train").problems
    assert problem.endswith("(found X.PNG; rename it to x.png)")
    touch(tmp_path, "images/train/a/X.jpg")
    (problem,) = scan_layout(config(tmp_path, "folders"), "train").problems
    assert problem.endswith("(found X.PNG)")


@pytest.mark.parametrize(
    ("key", "missing", "there"),
    [
        ("labels_dir", "labels", "masks"),
        ("labels_dir", "labels", "annotations"),
        ("images_dir", "images", "JPEGImages"),
    ],
)
def test_a_folder_of_another_name_is_named_as_the_repair(tmp_path, key, missing, there):
    other = {"labels": "images", "images": "labels"}[missing]
    touch(tmp_path, f"{other}/train/1.png", f"{there}/train/1.png")
    with pytest.raises(DataError) as caught:
        list_pairs(config(tmp_path, "folders"), "train")
    assert str(caught.value) == (
        f"{tmp_path}/{missing}: no such folder; if {tmp_path}/{there} is meant, "
        f"set data.{key}: {there}"
    )
    assert len(list_pairs(config(tmp_path, "folders", **{key: there}), "train")) == 1


def test_images_without_a_folder_for_the_split_get_an_example(tmp_path):
    touch(tmp_path, "images/a.png", "labels/a.png")
    with pytest.raises(DataError) as caught:
        list_pairs(config(tmp_path, "folders"), "train")
    assert str(caught.value) == (
        f"{tmp_path}/images/train: no split 'train': the files lie in {tmp_path}/images itself; "
        f"move them into a folder for each split, such as {tmp_path}/images/train/photo.png"
    )


def test_splits_above_the_images_are_to_be_turned_round(tmp_path):
    touch(tmp_path, "train/images/a.png", "train/labels/a.png")
    with pytest.raises(DataError, match=r"/train/images is there: move it to .*/images/train$"):
        list_pairs(config(tmp_path, "folders"), "train")


def test_label_without_image_is_no_problem_but_reported(tmp_path):
    touch(tmp_path, "images/train/a.png", "labels/train/a.png", "labels/train/b.png")
    listing = scan_layout(config(tmp_path, "folders"), "train")
    assert [pair.name for pair in listing.pairs] == ["a"]
    assert listing.extra_labels == [tmp_path / "labels/train/b.png"]
    assert not listing.problems


def test_two_images_for_one_label_are_refused(tmp_path):
    touch(tmp_path, "images/train/a.png", "images/train/a.jpg", "labels/train/a.png")
    with pytest.raises(DataError, match=r"a\.jpg, a\.png have one name"):
        list_pairs(config(tmp_path, "folders"), "train")


@pytest.mark.fault(66)
def test_names_that_differ_in_case_only_are_a_warning(tmp_path):
    touch(tmp_path, *(f"{d}/train/{n}.png" for d in ("images", "labels") for n in ("Ab", "aB")))
    listing = scan_layout(config(tmp_path, "folders"), "train")
    assert len(listing.pairs) == 2
    assert len(listing.warnings) == 1
    assert "Ab, aB" in listing.warnings[0]


def test_missing_split_lists_those_that_exist(tmp_path):
    touch(tmp_path, "images/train/a.png", "images/test/a.png", "labels/train/a.png")
    with pytest.raises(DataError, match="no split 'val'; splits: test, train"):
        list_pairs(config(tmp_path, "folders"), "val")


def test_missing_voc_split_lists_the_text_files(tmp_path):
    touch(tmp_path, "ImageSets/Segmentation/train.txt")
    with pytest.raises(DataError, match="no split 'val'; splits: train"):
        list_pairs(config(tmp_path, "voc"), "val")


def test_root_one_level_too_high_is_recognized(tmp_path):
    touch(tmp_path, "VOCdevkit/VOC2012/ImageSets/Segmentation/val.txt")
    expected = f"did you mean data.root: {tmp_path / 'VOCdevkit' / 'VOC2012'}$"
    with pytest.raises(DataError, match=expected):
        list_pairs(config(tmp_path, "voc"), "val")


def test_root_one_level_too_deep_is_recognized(tmp_path):
    touch(tmp_path, "images/train/a.jpg", "labels/train/a.png")
    with pytest.raises(DataError, match=f"did you mean data.root: {tmp_path}$"):
        list_pairs(config(tmp_path / "images", "folders"), "train")


def test_a_relative_root_is_shown_with_the_working_directory_and_what_resembles_it(
    tmp_path, monkeypatch
):
    (tmp_path / "my_data").mkdir()
    monkeypatch.chdir(tmp_path)
    message = f"data.root: there is no folder mydata in {tmp_path}; did you mean my_data\\?$"
    with pytest.raises(DataError, match=message):
        list_pairs(config("mydata", "folders"), "train")


def test_missing_root_is_named(tmp_path):
    with pytest.raises(DataError, match=r"data\.root: there is no folder .*nowhere"):
        list_pairs(config(tmp_path / "nowhere", "camvid"), "train")


@pytest.mark.fault(50)
def test_empty_split_is_refused(tmp_path):
    (tmp_path / "images/train").mkdir(parents=True)
    (tmp_path / "labels/train").mkdir(parents=True)
    with pytest.raises(DataError, match="the folder is empty"):
        list_pairs(config(tmp_path, "folders"), "train")


def test_split_of_other_formats_shows_what_it_holds(tmp_path):
    touch(tmp_path, "images/train/a.tif", "labels/train/a.png")
    with pytest.raises(DataError, match=r"1 file, none is an image .*a\.tif"):
        list_pairs(config(tmp_path, "folders"), "train")


def test_images_and_labels_in_one_folder_are_refused(tmp_path):
    touch(tmp_path, "both/train/a.png")
    data = config(tmp_path, "folders", images_dir="both", labels_dir="both")
    with pytest.raises(DataError, match="one folder"):
        list_pairs(data, "train")


@pytest.mark.fault(63)
@pytest.mark.parametrize(
    "text",
    [
        "i/a.png l/a.png\ni/b.jpg   l/b.png\n",
        "i/a.png\tl/a.png\ni/b.jpg\tl/b.png",
        "i/a.png, l/a.png\ni/b.jpg,l/b.png\n",
        '"i/a.png" "l/a.png"\n"i/b.jpg","l/b.png"\n',
        "\ufeffi/a.png l/a.png\r\n\r\n# comment, with, commas\r\n  i/b.jpg l/b.png  \r\n",
        "./i/a.png l//a.png\ni/b.jpg l/./b.png\n",
    ],
    ids=["blanks", "tabs", "commas", "quotes", "bom-crlf-comment", "normalized"],
)
def test_list_file_forms(tmp_path, text):
    assert listed(tmp_path, text) == A_AND_B


@pytest.mark.fault(63)
@pytest.mark.parametrize(
    "text",
    ["i/my image.png\tl/my, label.png\n", '"i/my image.png" "l/my, label.png"\n'],
)
def test_list_file_takes_blanks_and_commas_in_names(tmp_path, text):
    assert listed(tmp_path, text) == [("i/my image.png", "l/my, label.png", "i/my image")]


def test_list_file_keeps_its_order(tmp_path):
    assert listed(tmp_path, "i/b.jpg l/b.png\ni/a.png l/a.png\n") == A_AND_B[::-1]


@pytest.mark.fault(63, 64)
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("i/b.jpg", "expected image and label, found 1 column"),
        ("i/b.jpg l/b.png 3", "found 3 columns"),
        ("i/my image.png l/a.png", "found 3 columns"),
        ("i/a.png l/a.png", "already on line 1"),
        ("./i/a.png l/b.png", "already on line 1"),
        ("/etc/passwd l/b.png", "relative to data.root"),
        ("C:\\x.png l/b.png", "relative to data.root"),
        ("i/../../x.png l/b.png", r"'\.\.' is not allowed"),
        ("i/b\x00.jpg l/b.png", "NUL byte"),
        ("i/b\x07.jpg l/b.png", "control characters"),
        ("i/c.jpg l/b.png", "no such file"),
        ("i/b.tif l/b.png", "must be PNG or JPEG"),
        ("i/b.jpg l/b.jpg", "labels must be PNG"),
        ('"i/b.jpg l/b.png', "unexpected end of data"),
    ],
)
def test_list_file_refuses_a_line_by_its_number(tmp_path, line, reason):
    data = write_list(tmp_path, f"i/a.png l/a.png\n\n{line}\n")
    with pytest.raises(DataError, match=rf"train\.txt:3: .*{reason}"):
        list_pairs(data, "train.txt")


@pytest.mark.fault(63)
def test_list_file_that_is_not_utf8_is_refused_by_line(tmp_path):
    data = write_list(tmp_path, b"i/a.png l/a.png\ni/\xe4.png l/a.png\n")
    with pytest.raises(DataError, match=r"train\.txt:2: byte 3 is not UTF-8"):
        list_pairs(data, "train.txt")


@pytest.mark.fault(63)
def test_list_file_in_utf16_is_refused(tmp_path):
    data = write_list(tmp_path, "i/a.png l/a.png\n".encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16"):
        list_pairs(data, "train.txt")


@pytest.mark.fault(50)
def test_list_file_with_comments_only_is_an_empty_split(tmp_path):
    with pytest.raises(DataError, match="no images"):
        list_pairs(write_list(tmp_path, "# nothing\n"), "train.txt")


def test_missing_list_file_shows_those_that_exist(tmp_path):
    data = write_list(tmp_path, "i/a.png l/a.png")
    with pytest.raises(DataError, match=r"no such list file; text files: train\.txt"):
        list_pairs(data, "test.txt")


@pytest.mark.parametrize("layout", ["camvid", "folders", "list", "plain list", "voc"])
def test_links_in_the_data_set_are_followed_in_every_layout(tmp_path, layout, monkeypatch):
    """Whoever may put one there may put the file there; often the data is on another disk."""
    disk, root, name = tmp_path / "disk", tmp_path / "root", "train"
    if layout == "plain list":
        monkeypatch.setattr("segtrain.data.read.plain_list._MIN_BYTES", 0)
    if layout == "voc":
        touch(disk, "JPEGImages/a.jpg", "SegmentationClass/a.png")
        touch(root, "ImageSets/Segmentation/train.txt")
        (root / "ImageSets/Segmentation/train.txt").write_text("a\n")
    else:
        touch(disk, "images/train/a.jpg", "labels/train/a.png")
    root.mkdir(exist_ok=True)
    for folder in disk.iterdir():
        os.symlink(folder, root / folder.name)
    if "list" in layout:
        name = "train.txt"
        (root / name).write_text("images/train/a.jpg labels/train/a.png\n")
    (pair,) = list_pairs(config(root, layout.split()[-1], train_split=name), name)
    assert pair.image.is_relative_to(root)  # under the name that the data set gives it
    assert pair.image.is_file()


def test_a_link_to_the_data_set_itself_is_fine(tmp_path):
    write_list(tmp_path / "real", "i/a.png l/a.png\n")
    os.symlink(tmp_path / "real", tmp_path / "root")
    assert len(list_pairs(config(tmp_path / "root", "list"), "train.txt")) == 1


def test_one_finding_is_one_line():
    assert first_lines("place", ["what"]) == "place: what"


def test_images_of_formats_that_are_not_read_are_counted_and_named(tmp_path):
    """Not those that lie there a second time as PNG or JPEG, and no other files."""
    names = ["a.png", "b.BMP", "c/d.tif", "e.webp", "f.jp2", "a.bmp", "notes.txt"]
    touch(tmp_path, *(f"images/train/{name}" for name in names), "labels/train/a.png")
    listing = scan_layout(config(tmp_path, "folders"), "train")
    folder = tmp_path / "images/train"
    assert sorted(listing.left_out) == [folder / n for n in ("b.BMP", "c/d.tif", "e.webp", "f.jp2")]
    (line,) = listing.warnings_of_start()
    assert line == (
        "4 images are left out: .bmp .jp2 .tif .webp is not read, only JPEG and PNG; convert to "
        f"PNG: {folder}/b.BMP, {folder}/c/d.tif, {folder}/e.webp and 1 more"
    )


def test_nothing_is_said_of_formats_where_all_images_are_read(tmp_path):
    touch(tmp_path, "images/train/a.png", "labels/train/a.png", "images/train/Thumbs.db")
    assert scan_layout(config(tmp_path, "folders"), "train").warnings_of_start() == []


def test_a_folder_of_other_formats_only_says_which_are_read(tmp_path):
    touch(tmp_path, "images/train/a.bmp", "labels/train/a.png")
    with pytest.raises(DataError, match=r"1 file, none is an image .*only JPEG and PNG"):
        list_pairs(config(tmp_path, "folders"), "train")


def cityscapes_files(root, kind, split, *names):
    for name in names:
        touch(root, f"leftImg8bit/{split}/{name}_leftImg8bit.png")
        touch(root, f"{kind}/{split}/{name}_{kind}_labelIds.png")
        touch(root, f"{kind}/{split}/{name}_{kind}_labelTrainIds.png")


def test_cityscapes_reads_train_ids_or_coarse_labels_where_asked(tmp_path):
    cityscapes_files(tmp_path, "gtFine", "train", "ulm/ulm_1")
    cityscapes_files(tmp_path, "gtCoarse", "train", "ulm/ulm_1")
    data = config(tmp_path, "cityscapes")
    by_position = config(tmp_path, "cityscapes", label_format="train_ids")
    found = [
        list_pairs(by_position, "train"),
        list_pairs(data, "gtFine/train"),
        list_pairs(data, "gtCoarse/train"),
    ]
    assert [(pair.label.name, pair.name) for (pair,) in found] == [
        ("ulm_1_gtFine_labelTrainIds.png", "ulm/ulm_1"),
        ("ulm_1_gtFine_labelIds.png", "ulm/ulm_1"),
        ("ulm_1_gtCoarse_labelIds.png", "ulm/ulm_1"),
    ]


def test_where_only_train_ids_lie_the_option_that_reads_them_is_named(tmp_path):
    touch(tmp_path, "leftImg8bit/val/ulm/ulm_1_leftImg8bit.png")
    touch(tmp_path, "gtFine/val/ulm/ulm_1_gtFine_labelTrainIds.png")
    with pytest.raises(DataError, match=r"; set data\.label_format: train_ids to read those"):
        list_pairs(config(tmp_path, "cityscapes"), "val")


def test_joined_splits_keep_their_order_and_their_names_apart(tmp_path):
    cityscapes_files(tmp_path, "gtFine", "train", "ulm/ulm_1")
    cityscapes_files(tmp_path, "gtCoarse", "train_extra", "bonn/bonn_1", "bonn/bonn_2")
    pairs = list_pairs(config(tmp_path, "cityscapes"), "train+train_extra")
    assert [pair.name for pair in pairs] == [
        *("train/ulm/ulm_1", "train_extra/bonn/bonn_1", "train_extra/bonn/bonn_2")
    ]
    assert [pair.label.name for pair in pairs] == [
        "ulm_1_gtFine_labelIds.png",
        *(f"bonn_{i}_gtCoarse_labelIds.png" for i in (1, 2)),
    ]


def test_one_image_does_not_join_with_itself(tmp_path):
    """Fine and coarse labels of one image contradict each other."""
    cityscapes_files(tmp_path, "gtFine", "train", "ulm/ulm_1")
    cityscapes_files(tmp_path, "gtCoarse", "train", "ulm/ulm_1")
    with pytest.raises(DataError, match=r"train/ulm/ulm_1 and gtCoarse/train/ulm/ulm_1 are one im"):
        list_pairs(config(tmp_path, "cityscapes"), "train+gtCoarse/train")


def test_a_plus_joins_only_splits_that_are_named(tmp_path):
    touch(tmp_path, "images/a+b/1.png", "labels/a+b/1.png", "images/a/2.png", "labels/a/2.png")
    data = config(tmp_path, "folders")
    assert [pair.name for pair in list_pairs(data, "a+b")] == ["1"]
    with pytest.raises(DataError, match=r"expected names joined by \+"):
        list_pairs(data, "a+")
    with pytest.raises(DataError, match="no split 'c'"):
        list_pairs(data, "a+c")


def test_excluded_images_are_left_out_of_training_alone(tmp_path):
    for split in ("train", "val"):
        touch(tmp_path, *(f"{kind}/{split}/{n}.png" for kind in ("images", "labels") for n in "ab"))
    data = config(tmp_path, "folders", train_exclude=("a",))
    assert [pair.name for pair in list_pairs(data, "train")] == ["b"]
    assert [pair.name for pair in list_pairs(data, "val")] == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("troisdorf_000000_000074",), "did you mean city/troisdorf_000000_000073"),
        (("x",), "no image x in split 'train'; names look like city/troisdorf_000000_000073"),
        (("city/troisdorf_000000_000073",), "leaves no image in split 'train'"),
    ],
)
def test_an_exclusion_that_has_no_effect_or_leaves_nothing_is_refused(tmp_path, names, text):
    cityscapes_files(tmp_path, "gtCoarse", "train", "city/troisdorf_000000_000073")
    with pytest.raises(DataError, match=text):
        list_pairs(config(tmp_path, "cityscapes", train_exclude=names), "train")


def test_instance_maps_are_listed_with_those_that_are_missing(tmp_path):
    cityscapes_files(tmp_path, "gtFine", "val", "ulm/ulm_1", "ulm/ulm_2")
    data = config(tmp_path, "cityscapes")
    pairs = list_pairs(data, "val")
    expected = [tmp_path / f"gtFine/val/ulm/ulm_{i}_gtFine_instanceIds.png" for i in (1, 2)]
    assert instance_files(data, pairs) == (expected, expected)
    touch(tmp_path, "gtFine/val/ulm/ulm_1_gtFine_instanceIds.png")
    assert instance_files(data, pairs) == (expected, expected[1:])
    touch(tmp_path, "gtFine/val/ulm/ulm_2_gtFine_instanceIds.png")
    assert instance_files(data, pairs) == (expected, [])
    assert instance_files(config(tmp_path, "folders"), pairs) == ([], [])


@pytest.mark.parametrize("folders", [("images/val", "labels/val"), ("val", "val_labels")])
def test_camvid_labels_in_original_colors_have_an_ending(tmp_path, folders):
    touch(tmp_path, f"{folders[0]}/0016E5_1.png", f"{folders[1]}/0016E5_1_L.png")
    pairs = list_pairs(config(tmp_path, "camvid"), "val")
    assert relative_pairs(tmp_path, pairs) == [
        (f"{folders[0]}/0016E5_1.png", f"{folders[1]}/0016E5_1_L.png", "0016E5_1")
    ]


@pytest.mark.parametrize(
    ("layout", "files"),
    [
        ("cityscapes", {"leftImg8bit/test/bonn/b_1_leftImg8bit.png": "bonn/b_1"}),
        ("camvid", {"images/test/a.png": "a"}),
        ("camvid", {"test/a.png": "a"}),
        ("voc", {"JPEGImages/a.jpg": "a", "JPEGImages/of_another_split.jpg": None}),
        ("ade20k", {"images/testing/ADE_test_1.jpg": "ADE_test_1"}),
        ("folders", {"images/test/hall/a.png": "hall/a"}),
    ],
)
def test_a_test_split_without_labels_lists_its_images(tmp_path, layout, files):
    touch(tmp_path, *files, "ImageSets/Segmentation/test.txt")
    (tmp_path / "ImageSets/Segmentation/test.txt").write_text("a\n")
    pairs = list_split(config(tmp_path, layout), "test", labelled=False).pairs
    expected = [(path, path, name) for path, name in files.items() if name]
    assert relative_pairs(tmp_path, pairs) == expected


def test_a_listed_image_that_is_missing_is_told_without_labels_too(tmp_path):
    touch(tmp_path, "JPEGImages/a.jpg", "ImageSets/Segmentation/test.txt")
    (tmp_path / "ImageSets/Segmentation/test.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"b: no image .*/JPEGImages/b\.jpg"):
        list_split(config(tmp_path, "voc"), "test", labelled=False)


def test_a_list_file_always_names_labels(tmp_path):
    data = write_list(tmp_path, "i/a.png l/a.png\n")
    with pytest.raises(DataError, match="its splits name labels; use predict"):
        list_split(data, "train.txt", labelled=False)


def test_labels_that_several_images_share_are_named(tmp_path):
    """As after copying a line and changing one column; two renderings of a scene may be meant."""
    data = write_list(tmp_path, "i/a.png l/a.png\ni/b.jpg l/a.png\n")
    (line,) = list_split(data, "train.txt").warnings_of_start()
    assert line == f"labels are used by several images: {tmp_path}/l/a.png by i/a and i/b"
