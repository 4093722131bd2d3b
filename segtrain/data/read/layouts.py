"""Which image belongs to which label: the data layouts that segtrain reads.

To add a layout, enter it in `LAYOUTS` at the end of this file and add its name to
`DataConfig.layout`; segtrain/EXTENDING.md has an example.

A layout looks at names only and opens no image. It raises DataError if the split is missing; what
is wrong with single files goes into `Listing.problems`, so that all of it is reported at once.
"""

import fnmatch
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from segtrain.config import DataConfig
from segtrain.data.read.find import (
    IMAGE_SUFFIXES,
    LABEL_SUFFIXES,
    Listing,
    Pair,
    data_root,
    existing_folder,
    files_by_name,
    first_lines,
    match_folders,
    one_name,
    split_folder,
)
from segtrain.data.read.lists import list_file_words, list_pairs
from segtrain.data.read.recognize import with_recognized
from segtrain.errors import DataError
from segtrain.files import os_errors_as
from segtrain.text import counted, first_of, printable
from segtrain.types import Choices

Scan = Callable[[Path, DataConfig, str, bool], Listing]
"""(root, data, split, labelled) -> the listing of the split.

root: the existing folder `data.root`. labelled: False for a split without labels: each pair has its
image twice, unless a list file names its label.
"""


class FolderLayout(NamedTuple):
    """How the files of a data set are arranged.

    folders: (root, data, split) -> the folders below `root` that `scan` searches; nothing may be
        written there.
    instances: the file with the instances of a label, if the data set has such files.
    """

    scan: Scan
    folders: Callable[[Path, DataConfig, str], Sequence[str]]
    instances: Callable[[Path], Path] | None = None


def list_split(data: DataConfig, split: str, *, labelled: bool = True) -> Listing:
    """The listing of `split`, which has no problems.

    labelled: False for a split without labels: each pair has its image twice.

    Raises:
        DataError: no such split, no images in it, or files missing; all of them are counted and
            the first ten shown.
    """
    listing = scan_layout(data, split, labelled=labelled)
    if listing.problems:
        title = f"{printable(data.root)}, split {split!r}"
        raise DataError(first_lines(title, listing.problems))
    return listing


def scan_layout(data: DataConfig, split: str, *, labelled: bool = True) -> Listing:
    """The listing of `split`, with its problems.

    "a+b" is both splits, a first; there, names begin with the split's. Images that
    `data.train_exclude` names are left out of `data.train_split`.

    Raises:
        DataError: the split itself is missing or holds no image, or two parts share an image.
    """
    scan = LAYOUTS[data.layout].scan
    with os_errors_as(DataError):
        root = data_root(data)
        parts = split_parts(data, split)
        try:
            listings = [scan(root, data, part, labelled) for part in parts]
        except DataError as error:
            # What the folder seems to hold often explains why the layout does not fit.
            error.args = (with_recognized(str(error), root),)
            raise
    listing = listings[0] if len(parts) == 1 else _join_listings(parts, listings)
    if data.train_exclude and split == data.train_split:
        listing = _without_excluded(listing, data)
    # With problems the listing itself says why it is empty.
    if not listing.pairs and not listing.problems:
        raise DataError(f"{printable(root)}, split {split!r}: no images in it")
    return listing


def split_parts(data: DataConfig, split: str) -> list[str]:
    """The splits that `split` joins: "a+b" is ["a", "b"]; DataError: a name is empty."""
    if data.layout == "list" or "+" not in split:  # the name of a list file may hold one
        return [split]
    parts = split.split("+")
    if not all(parts):
        raise DataError(f"split {split!r}: expected names joined by +, such as train+train_extra")
    return parts


def _join_listings(parts: Sequence[str], listings: Sequence[Listing]) -> Listing:
    """One listing of several splits; names begin with the split's, so they stay unique."""
    pairs = [
        pair._replace(name=f"{part}/{pair.name}")
        for part, listing in zip(parts, listings, strict=True)
        for pair in listing.pairs
    ]
    first: dict[Path, str] = {}
    problems = [problem for listing in listings for problem in listing.problems]
    for pair in pairs:
        if pair.image in first:
            both = f"{printable(first[pair.image])} and {printable(pair.name)}"
            problems.append(f"{both} are one image; name each split once")
        first.setdefault(pair.image, pair.name)
    return Listing(pairs, problems, [note for listing in listings for note in listing.notes])


def _without_excluded(listing: Listing, data: DataConfig) -> Listing:
    """`listing`, of the training split, without the images of `data.train_exclude`.

    A pattern leaves out more than its text tells, so a note says what.
    """
    names, excluded = [pair.name for pair in listing.pairs], set()
    known = set(names)
    where = f"in split {data.train_split!r}"
    notes = []
    for entry in data.train_exclude:
        # A name is itself, whatever it holds. Of patterns only * and ? count: names hold "[1]".
        fitting = [entry] if entry in known else fnmatch.filter(names, entry.replace("[", "[[]"))
        if not fitting:
            raise DataError(
                f"data.train_exclude: no image {printable(entry)} {where}; "
                f"its images: {first_of(names, 3)}"
            )
        if entry not in known:
            what = f"{len(fitting)} of {counted(len(names), 'image', 'images')} {where}"
            notes.append(
                f"data.train_exclude: {printable(entry)} leaves out {what}: {first_of(fitting, 3)}"
            )
        excluded.update(fitting)
    pairs = [pair for pair in listing.pairs if pair.name not in excluded]
    if names and not pairs:
        raise DataError(f"data.train_exclude: leaves no image {where}")
    return listing._replace(pairs=pairs, notes=[*listing.notes, *notes])


def instance_files(data: DataConfig, pairs: Sequence[Pair]) -> list[Path]:
    """Where the instance maps of the labels of `pairs` are, or would be; empty if there are none.

    A part of them may be missing: split train+train_extra of Cityscapes has coarse labels too.
    """
    file_of = LAYOUTS[data.layout].instances
    return [file_of(pair.label) for pair in pairs] if file_of else []


def _mirrored(
    root: Path, labelled: bool, images: tuple[str, str], labels: tuple[str, str], **ends: str
) -> Listing:
    """A split in two folders of the same form, each given as a folder below `root` and a split.

    ends: `image_end` and `label_end` of `match_folders`.
    """
    images_dir = split_folder(root, *images)
    labels_dir = split_folder(root, *labels) if labelled else None
    # In one folder each label would be an image too.
    if labels_dir is not None and images_dir.resolve() == labels_dir.resolve():
        raise DataError(
            f"{printable(images_dir)}: images and labels lie in one folder; "
            "separate them, or name every pair in a text file (data.layout: list)"
        )
    return match_folders(images_dir, labels_dir, **ends)


_CITYSCAPES_LABELS = {"ids": "labelIds", "train_ids": "labelTrainIds", "colors": "color"}


def _cityscapes(root: Path, data: DataConfig, split: str, labelled: bool) -> Listing:
    """Coarse labels where there are no fine ones (train_extra) or the split is `gtCoarse/train`."""
    named, _, rest = split.partition("/")
    if rest and named in ("gtFine", "gtCoarse"):
        kind, split = named, rest
    else:
        is_coarse = not (root / "gtFine" / split).is_dir() and (root / "gtCoarse" / split).is_dir()
        kind = "gtCoarse" if is_coarse else "gtFine"
    listing = _mirrored(
        root,
        labelled,
        ("leftImg8bit", split),
        (kind, split),
        image_end="_leftImg8bit",
        label_end=f"_{kind}_{_CITYSCAPES_LABELS[data.label_format]}",
    )
    if labelled and (kind, split) == ("gtCoarse", "val"):
        note = "split 'val' is read from gtCoarse: the benchmark scores the labels of gtFine"
        return listing._replace(notes=[note, *listing.notes])
    return listing


def _camvid(root: Path, data: DataConfig, split: str, labelled: bool) -> Listing:
    images, labels = ("images", split), ("labels", split)
    # CamVid is spread in two forms: images/SPLIT and labels/SPLIT, or SPLIT beside SPLITannot or
    # SPLIT_labels.
    if (root / split).is_dir() and not (root / "images").is_dir():
        original = f"{split}_labels"
        images = split, ""
        labels = (original if (root / original).is_dir() else f"{split}annot"), ""
    # The label of 0001TP_006690.png is 0001TP_006690_L.png where it has the original 32 colours.
    folder = root.joinpath(*labels)
    files = files_by_name(folder, LABEL_SUFFIXES) if folder.is_dir() else []
    is_original = bool(files) and all(name.endswith("_L") for name in files)
    return _mirrored(root, labelled, images, labels, label_end="_L" if is_original else "")


def _ade20k(root: Path, data: DataConfig, split: str, labelled: bool) -> Listing:
    # The published folders are called training and validation.
    if not (root / "images" / split).is_dir():
        long = {"train": "training", "val": "validation", "test": "testing"}
        split = long.get(split, split)
    return _mirrored(root, labelled, ("images", split), ("annotations", split))


_LABELS_DIR = "labels"  # of layout "folders", where data.labels_dir is null


def _folders(root: Path, data: DataConfig, split: str, labelled: bool) -> Listing:
    labels_dir = data.labels_dir or _LABELS_DIR
    return _mirrored(root, labelled, (data.images_dir, split), (labels_dir, split))


def _list(root: Path, data: DataConfig, split: str, labelled: bool) -> Listing:
    labels_root = root / os.path.expanduser(data.labels_dir or "")
    return list_pairs(root / split, root, labels_root)


def _voc(root: Path, data: DataConfig, split: str, labelled: bool) -> Listing:
    names, problems = list_file_words(split_folder(root, "ImageSets/Segmentation", f"{split}.txt"))
    images = files_by_name(existing_folder(root, "JPEGImages"), IMAGE_SUFFIXES)
    folder, labels = _voc_labels(root, names) if labelled else (root / "JPEGImages", images)
    pairs = []
    for name in sorted(names):
        image, label = images.get(name), labels.get(name)
        if not image:
            problems.append(f"no image {printable(root / 'JPEGImages' / name)}.jpg")
        elif not label:
            problems.append(f"{printable(image[0])}: no label {printable(folder / name)}.png")
        else:
            problems += filter(None, map(one_name, (image, label)))
            pairs.append(Pair(image[0], label[0], name))
    notes = []
    if split == "val" and folder.name == "SegmentationClassAug":
        what = "the benchmark scores the labels of SegmentationClass, which has other borders"
        notes.append(f"split 'val' is read from {printable(folder)}: {what}")
    return Listing(pairs, problems, notes=notes)


def _voc_labels(root: Path, names: Sequence[str]) -> tuple[Path, dict[str, list[Path]]]:
    """The folder with the labels of a split, and all labels in it.

    The augmented set (SBD) has labels of its own for all of VOC's images. A split is read from the
    folder with fewer labels missing, so that the two kinds of label are never mixed.
    """
    existing = [n for n in ("SegmentationClass", "SegmentationClassAug") if (root / n).is_dir()]
    folders = [existing_folder(root, n) for n in existing or ["SegmentationClass"]]
    candidates = [(folder, files_by_name(folder, LABEL_SUFFIXES)) for folder in folders]
    return min(candidates, key=lambda pair: sum(name not in pair[1] for name in names))


LAYOUTS: Choices[FolderLayout] = Choices(
    {
        "cityscapes": FolderLayout(
            _cityscapes,
            lambda *_: ("leftImg8bit", "gtFine", "gtCoarse"),
            lambda label: label.with_name(f"{label.stem.rpartition('_')[0]}_instanceIds.png"),
        ),
        "camvid": FolderLayout(
            _camvid,
            lambda root, data, split: (
                "images",
                "labels",
                split,
                f"{split}annot",
                f"{split}_labels",
            ),
        ),
        "voc": FolderLayout(
            _voc,
            lambda *_: ("JPEGImages", "SegmentationClass", "SegmentationClassAug", "ImageSets"),
        ),
        "ade20k": FolderLayout(_ade20k, lambda *_: ("images", "annotations")),
        "folders": FolderLayout(
            _folders, lambda root, data, split: (data.images_dir, data.labels_dir or _LABELS_DIR)
        ),
        "list": FolderLayout(_list, lambda *_: ()),
    }
)
