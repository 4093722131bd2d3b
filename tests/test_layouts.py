"""Which label belongs to which image, and what is refused. No file holds pixels here."""

import os
from typing import get_args

import pytest

from segtrain.config import DataConfig
from segtrain.data.read.layouts import LAYOUTS, list_split, scan_layout
from segtrain.data.read.recognize import recognize
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


A_AND_B = [("i/a.png", "l/a.png", "i/a"), ("i/b.jpg", "l/b.png", "i/b")]


def test_a_config_can_name_every_layout():
    assert get_args(DataConfig.model_fields["layout"].annotation) == tuple(LAYOUTS)


def fine(name, kind="gtFine", split="train", labels="labelIds"):
    """The pair of a Cityscapes image."""
    image = f"leftImg8bit/{split}/{name}_leftImg8bit.png"
    return image, f"{kind}/{split}/{name}_{kind}_{labels}.png", name


CITYSCAPES = ["leftImg8bit/train/u/1_leftImg8bit.png"]
CITYSCAPES += [
    f"{kind}/train/u/1_{kind}_{labels}.png"
    for kind in ("gtFine", "gtCoarse")
    for labels in ("labelIds", "labelTrainIds", "instanceIds", "color")
]
VOC = [f"JPEGImages/{name}.jpg" for name in "abc"] + [f"SegmentationClass/{n}.png" for n in "ac"]
VOC += [f"SegmentationClassAug/{name}.png" for name in "abc"] + ["JPEGImages/a.txt"]
VOC_LABELS = "SegmentationClass"
COARSE = [file for split in ("val", "train") for file in fine("u/1", "gtCoarse", split)[:2]]
AUGMENTED = ["JPEGImages/a.jpg", "SegmentationClassAug/a.png"]


@pytest.mark.parametrize(
    ("layout", "split", "files", "pairs"),
    [
        ("cityscapes", "train", CITYSCAPES, [fine("u/1")]),
        ("cityscapes train_ids", "train", CITYSCAPES, [fine("u/1", labels="labelTrainIds")]),
        ("cityscapes colors", "train", CITYSCAPES, [fine("u/1", labels="color")]),
        ("cityscapes", "gtCoarse/train", CITYSCAPES, [fine("u/1", "gtCoarse")]),
        ("cityscapes", "train_extra", [], [fine("u/1", "gtCoarse", "train_extra")]),
        ("camvid", "val", [], [("images/val/a.jpg", "labels/val/a.png", "a")]),
        ("camvid", "val", [], [("val/a.png", "valannot/a.png", "a")]),
        ("camvid", "val", [], [("val/a_1.png", "val_labels/a_1_L.png", "a_1")]),
        ("voc", "val", VOC, [(f"JPEGImages/{n}.jpg", f"{VOC_LABELS}/{n}.png", n) for n in "ac"]),
        ("voc", "aug", VOC, [(f"JPEGImages/{n}.jpg", f"{VOC_LABELS}Aug/{n}.png", n) for n in "ab"]),
        ("ade20k", "train", [], [("images/training/a.jpg", "annotations/training/a.png", "a")]),
        ("ade20k", "test", [], [("images/test/a.jpg", "annotations/test/a.png", "a")]),
        ("folders", "t", [], [("images/t/1/a b.JPG", "labels/t/1/a b.png", "1/a b")]),
        ("folders", ".", [], [("images/a.png", "labels/a.png", "a")]),
    ],
)
def test_a_layout_pairs_each_image_of_a_split_with_its_label(tmp_path, layout, split, files, pairs):
    touch(tmp_path, *files, *(file for pair in pairs for file in pair[:2]))
    for name, text in (("val", "c\na\n"), ("aug", "a\nb\n")):
        touch(tmp_path, f"ImageSets/Segmentation/{name}.txt")
        (tmp_path / f"ImageSets/Segmentation/{name}.txt").write_text(text)
    layout, *label_format = layout.split()
    data = config(tmp_path, layout, label_format=(label_format or ["ids"])[0])
    assert relative_pairs(tmp_path, list_pairs(data, split)) == pairs


@pytest.mark.parametrize(
    ("layout", "files", "official", "said"),
    [
        (
            "cityscapes",
            COARSE,
            fine("u/1", split="val")[1],
            "benchmark scores the labels of gtFine",
        ),
        ("voc", AUGMENTED, f"{VOC_LABELS}/a.png", "SegmentationClass, which has other borders"),
    ],
)
def test_a_val_split_read_with_other_labels_than_the_benchmarks_is_told(
    tmp_path, layout, files, official, said
):
    touch(tmp_path, *files, "ImageSets/Segmentation/x")
    for split in ("val", "train"):
        (tmp_path / f"ImageSets/Segmentation/{split}.txt").write_text("a\n")
    data = config(tmp_path, layout)
    (line,) = list_split(data, "val").notes
    assert line.startswith("split 'val' is read from ")
    assert line.endswith(said)
    assert list_split(data, "train").notes == []
    touch(tmp_path, official)
    assert list_split(data, "val").notes == []


def test_voc_counts_missing_images_and_labels(tmp_path):
    touch(tmp_path, "JPEGImages/a.jpg", "SegmentationClass/b.png", "ImageSets/Segmentation/v.txt")
    (tmp_path / "ImageSets/Segmentation/v.txt").write_text("a\nb\n../c\na 1\n")
    with pytest.raises(DataError) as caught:
        list_pairs(config(tmp_path, "voc"), "v")
    parts = ("4 problems", "v.txt:3", "v.txt:4", "a.jpg: no label", "JPEGImages/b.jpg")
    assert [part for part in parts if part not in str(caught.value)] == []
    touch(tmp_path, "JPEGImages/b.jpg", "JPEGImages/b.bmp")
    with pytest.raises(DataError, match=r"JPEGImages: b\.bmp, b\.jpg have one name; keep one"):
        list_pairs(config(tmp_path, "voc"), "v")
    for name in "jpg", "bmp":
        (tmp_path / f"JPEGImages/b.{name}").unlink()
    with pytest.raises(DataError, match=r"3 problems\n(.*\n)*.*no image .*/JPEGImages/b\.jpg"):
        list_split(config(tmp_path, "voc"), "v", labelled=False)


def test_links_are_followed_under_their_own_name_and_hidden_files_are_no_images(tmp_path):
    """Whoever may put a link there may put the file there; often the data is on another disk."""
    touch(tmp_path, "elsewhere/a.png", "labels/train/more/a.png", "images/train/b.png")
    touch(tmp_path, "labels/train/b.png", "images/train/._b.png", "images/train/.cache/c.png")
    os.symlink(tmp_path / "elsewhere", tmp_path / "images/train/more")
    os.symlink(tmp_path / "images/train", tmp_path / "elsewhere/up")
    pairs = list_pairs(config(tmp_path, "folders"), "train")
    assert [pair.name for pair in pairs] == ["b", "more/a"]
    (tmp_path / "train.txt").write_text("images/train/more/a.png labels/train/b.png\n")
    (pair,) = list_pairs(config(tmp_path, "list"), "train.txt")
    assert pair.image == tmp_path / "images/train/more/a.png"


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


A = ["images/train/a.png", "labels/train/a.png"]
UNREADABLE = [f"images/train/{name}" for name in ("b.TGA", "c/d.exr", "e.avif", "f.jxl")]
CLASHING = [f"{kind}/train/{name}.png" for kind in ("images", "labels") for name in ("Ab", "aB")]


@pytest.mark.fault(66)
@pytest.mark.parametrize(
    ("files", "note"),
    [
        (A, None),
        ([*A, "images/train/a.tga", "images/train/notes.txt"], None),  # a is there as PNG
        ([*A, "labels/train/b.png"], "1 label has no image and is not used: ROOT/labels/tra"),
        ([*A, *UNREADABLE], "4 images are left out, no reader has the format: ROOT/images/tra"),
        (CLASHING, "names differ in case only: Ab = aB"),
    ],
)
def test_oddities_of_names_are_notes(tmp_path, files, note):
    touch(tmp_path, *files)
    listing = list_split(config(tmp_path, "folders"), "train")
    assert len(listing.pairs) == (2 if "images/train/Ab.png" in files else 1)
    assert len(listing.notes) == (note is not None)
    assert note is None or listing.notes[0].startswith(note.replace("ROOT", str(tmp_path)))


@pytest.mark.fault(50)
@pytest.mark.parametrize(
    ("layout", "split", "files", "message"),
    [
        ("camvid", "train", [], "data.root: there is no folder ROOT"),
        ("folders", "val", A, "no split 'val'; splits: train"),
        ("folders", "t", ["images/t/a.png", "masks/t/a.png"], "folders in ROOT: images, masks"),
        ("folders", "t", ["images/t/a.exr", "labels/t/a"], "|.npz|.pgm|.ppm, found a.exr"),
        ("folders", "t", ["images/t/a.jpg", "labels/t/a.jpg"], "JPEG changes ids"),
        ("folders", "t", ["images/t/a.jpg", "images/t/a.png", "labels/t/a.png"], "have one name"),
        ("folders same", "t", ["images/t/a.png"], "images and labels lie in one folder"),
        ("cityscapes", "train+gtCoarse/train", CITYSCAPES, "and gtCoarse/train/u/1 are one image"),
        ("folders", "a+", A, "expected names joined by +"),
        ("list", "test.txt", ["train.txt"], "no such list file; text files: train.txt"),
    ],
)
def test_what_makes_a_split_unusable_is_told_with_the_repair(
    tmp_path, layout, split, files, message
):
    root = tmp_path / "data"
    touch(root, *files)
    layout, *where = layout.split()
    options = {"labels_dir": "images"} if where == ["same"] else {}
    data = config(root, layout, **options)
    with pytest.raises(DataError) as caught:
        list_pairs(data, split)
    said = str(caught.value)
    assert message.replace("ROOT", str(root)) in said
    assert "\n" not in said.removesuffix(f"\n{recognize(root)}")


def test_a_list_of_the_working_folder_is_told_by_its_full_path(tmp_path, monkeypatch):
    touch(tmp_path / "data", "train.txt")
    touch(tmp_path, "own/val.txt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"in the working folder: {tmp_path}/own/val.txt"):
        list_pairs(config(tmp_path / "data", "list"), "own/val.txt")


@pytest.mark.fault(63)
@pytest.mark.parametrize(
    "text",
    [
        "i/b.jpg   l/b.png\ni/a.png l/a.png\n",
        "i/a.png\tl/a.png\ni/b.jpg\tl/b.png",
        "i/a.png, l/a.png\ni/b.jpg,l/b.png\n",
        '"i/a.png" "l/a.png"\n"i/b.jpg","l/b.png"\n',
        "\ufeffi/a.png l/a.png\r\n\r\n# comment, with, commas\r\n  i/b.jpg l/b.png  \r\n",
        "./i/a.png l//a.png\ni/b.jpg l/./b.png\n",
        "i/my image.png\tl/my, label.png\n",
        '"i/my image.png" "l/my, label.png"\n',
    ],
    ids=["blanks", "tabs", "commas", "quotes", "bom", "normalized", "tab", "quoted"],
)
def test_list_file_forms(tmp_path, text):
    """Pairs keep the order of the lines."""
    pairs = A_AND_B[::-1] if text.startswith("i/b") else A_AND_B
    mine = [("i/my image.png", "l/my, label.png", "i/my image")]
    found = list_pairs(write_list(tmp_path, text), "train.txt")
    assert relative_pairs(tmp_path, found) == (mine if "my" in text else pairs)


@pytest.mark.fault(63, 64)
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("i/b.jpg", "expected image and label, found 1 column"),
        ("i/a.png l/a.png", "already listed"),
        ("/etc/passwd l/b.png", "relative to data.root"),
        ("i/../../x.png l/b.png", r"'\.\.' is not allowed"),
        ("i/b\x00.jpg l/b.png", "control characters"),
        ("i/c.jpg l/b.png", "no such file"),
        ("i/b.jpg l/b.jpg", "expected a file .png"),
        ("i/my image.png l/a.png", "found 3 columns"),
        ("i/a.png i/b.jpg i/a.png l/b.png", "i/a.png: named twice"),
    ],
)
def test_list_file_refuses_a_line_by_its_number(tmp_path, line, reason):
    data = write_list(tmp_path, f"i/a.png l/a.png\n\n{line}\n")
    with pytest.raises(DataError, match=rf"train\.txt:3: .*{reason}"):
        list_pairs(data, "train.txt")


def test_a_list_names_bands_in_files_of_their_own_and_labels_elsewhere(tmp_path):
    """The list itself lies elsewhere, too; the data may be read-only."""
    root, own = tmp_path / "data", tmp_path / "own"
    touch(root, "s/b2.tif", "s/b3.tif", "s/b8.tif")
    touch(own, "labels/s.tif")
    (own / "train.txt").write_text("s/b3.tif s/b8.tif s/b2.tif s.tif\n")
    data = config(root, "list", labels_dir=str(own / "labels"))
    (pair,) = list_pairs(data, str(own / "train.txt"))
    assert pair.images == tuple(root / f"s/b{n}.tif" for n in (3, 8, 2))
    assert (pair.label, pair.name) == (own / "labels/s.tif", "s/b3")
    (own / "train.txt").write_text("s/b3.tif ../labels/s.tif\n")
    with pytest.raises(DataError, match=r"'\.\.' is not allowed"):
        list_pairs(data, str(own / "train.txt"))


@pytest.mark.fault(50, 63)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"i/a.png l/a.png\ni/\xe4.png l/a.png\n", r"train\.txt:2: .* bytes that are not UTF-8"),
        ("i/a.png l/a.png\n".encode("utf-16"), "the file is UTF-16; save it as UTF-8"),
        (b"# nothing\n", "no images in it"),
    ],
)
def test_a_list_file_in_another_encoding_or_without_images_is_refused(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        list_pairs(write_list(tmp_path, content), "train.txt")


def test_joined_splits_keep_their_order_and_their_names_apart(tmp_path):
    files = [fine("ulm/1"), *(fine(f"bonn/{i}", "gtCoarse", "train_extra") for i in "12")]
    touch(tmp_path, *(file for pair in files for file in pair[:2]))
    pairs = list_pairs(config(tmp_path, "cityscapes"), "train+train_extra")
    names = ["train/ulm/1", "train_extra/bonn/1", "train_extra/bonn/2"]
    assert relative_pairs(tmp_path, pairs) == [
        (*file[:2], name) for file, name in zip(files, names, strict=True)
    ]


def test_excluded_images_are_left_out_of_training_alone(tmp_path):
    for split in ("train", "val"):
        touch(tmp_path, *(f"{kind}/{split}/{n}.png" for kind in ("images", "labels") for n in "ab"))
    data = config(tmp_path, "folders", train_exclude=("a",))
    assert [pair.name for pair in list_pairs(data, "train")] == ["b"]
    assert [pair.name for pair in list_pairs(data, "val")] == ["a", "b"]
    for names, text in (
        (("x",), "no image x in split 'train'; its images: a, b"),
        (("a", "x*"), r"no image x\* in split 'train'; its images: a, b"),
        (("a", "b"), "data.train_exclude: leaves no image in split 'train'"),
        (("?",), "data.train_exclude: leaves no image in split 'train'"),
    ):
        with pytest.raises(DataError, match=text):
            list_pairs(config(tmp_path, "folders", train_exclude=names), "train")


@pytest.mark.parametrize(
    ("entries", "left", "notes"),
    [
        (("s/[1]",), "s/1 s/12 s/[1]2 t/1 t/a*", []),
        (("s/[1]*",), "s/1 s/12 t/1 t/a*", ["s/[1]* leaves out 2 of 6 images: s/[1], s/[1]2"]),
        (("*1",), "s/12 s/[1] s/[1]2 t/a*", ["*1 leaves out 2 of 6 images: s/1, t/1"]),
        (("s/*",), "t/1 t/a*", ["s/* leaves out 4 of 6 images: s/1, s/12, s/[1] and 1 more"]),
        (("t/a*",), "s/1 s/12 s/[1] s/[1]2 t/1", []),  # the name itself
        (("s/1?", "t/1"), "s/1 s/[1] s/[1]2 t/a*", ["s/1? leaves out 1 of 6 images: s/12"]),
    ],
)
def test_images_are_left_out_by_pattern_and_what_it_fits_is_said(tmp_path, entries, left, notes):
    names = ["s/1", "s/12", "s/[1]", "s/[1]2", "t/1", "t/a*"]
    touch(tmp_path, *(f"{kind}/train/{n}.png" for kind in ("images", "labels") for n in names))
    listing = scan_layout(config(tmp_path, "folders", train_exclude=entries), "train")
    assert [pair.name for pair in listing.pairs] == left.split()
    said = [note.replace(" in split 'train'", "") for note in listing.notes]
    assert said == [f"data.train_exclude: {note}" for note in notes]


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


def test_labels_that_several_images_share_are_named(tmp_path):
    """As after copying a line and changing one column; two renderings of a scene may be meant."""
    data = write_list(tmp_path, "i/a.png l/a.png\ni/b.jpg l/a.png\n")
    (line,) = list_split(data, "train.txt").notes
    assert line == f"labels are used by several images: {tmp_path}/l/a.png by i/a and i/b"
