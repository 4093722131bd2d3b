"""Which image belongs to which label: the data layouts that segtrain reads.

To add a layout, write a function that lists a split, enter it in `LAYOUTS` at the end of this file
and add its name to `DataConfig.layout`. For two mirrored folders that is

    def _mine(root: Path, data: DataConfig, split: str) -> Listing:
        return match_folders(split_folder(root, "photos", split), split_folder(root, "ids", split))

    "mine": Layout(_mine, lambda *_: ("photos", "ids")),

The function gets the existing folder `data.root`, the config's section `data`, and the name of a
split. It looks at names only and opens no image. It raises DataError if the split is missing;
what is wrong with single files goes into `Listing.problems`, so that all of it is reported at once.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from segtrain.config import DataConfig
from segtrain.config.messages import did_you_mean
from segtrain.data.read.find import (
    IMAGE_SUFFIXES,
    LABEL_SUFFIX,
    Listing,
    Pair,
    case_clashes,
    check_named_folder,
    data_root,
    existing_folder,
    files_by_name,
    first_lines,
    match_folders,
    only_images,
    split_folder,
    there_are,
)
from segtrain.data.read.lists import CleanPath, clean_relative_path, list_file_rows, list_file_words
from segtrain.errors import DataError
from segtrain.text import first_of, printable

_CONTENT = {"ids": "labelIds", "train_ids": "labelTrainIds", "colors": "color"}


def _cityscapes(root: Path, data: DataConfig, split: str) -> Listing:
    """The pairs of a split.

    Coarse labels are taken where there are no fine ones (train_extra), and in a split whose name
    asks for them: `gtCoarse/train`.
    """
    named, split = _label_folder_and_split(split)
    images = split_folder(root, "leftImg8bit", split)
    coarse = not (root / "gtFine" / split).is_dir() and (root / "gtCoarse" / split).is_dir()
    kind = named or ("gtCoarse" if coarse else "gtFine")
    content = _CONTENT[data.label_format]
    listing = match_folders(
        images,
        split_folder(root, kind, split),
        image_end="_leftImg8bit",
        label_end=f"_{kind}_{content}",
    )
    for i, problem in enumerate(listing.problems):
        if data.label_format == "ids" and problem.endswith("_labelTrainIds.png)"):
            listing.problems[i] += "; set data.label_format: train_ids to read those"
    if kind == "gtCoarse" and split == "val":
        note = "split 'val' is read from gtCoarse: the benchmark scores the labels of gtFine"
        return listing._replace(notes=[note])
    return listing


def _cityscapes_images(root: Path, data: DataConfig, split: str) -> Listing:
    """The images of a split, without labels."""
    return only_images(split_folder(root, "leftImg8bit", split), image_end="_leftImg8bit")


def _label_folder_and_split(text: str) -> tuple[str, str]:
    """`gtCoarse/train` in its two parts; the first is empty if `text` names no folder."""
    folder, slash, split = text.partition("/")
    return (folder, split) if slash and folder in ("gtFine", "gtCoarse") else ("", text)


def _instance_file(label: Path) -> Path:
    """The instance map that belongs to a label file."""
    stem = label.stem.rpartition("_")[0]
    return label.with_name(f"{stem}_instanceIds.png")


class Layout(NamedTuple):
    """How the files of a data set are arranged.

    scan: (root, data, split) -> the listing of the split.
    folders: (root, data, split) -> the folders below `root` that `scan` searches; nothing may be
        written there.
    has_list_file: whether a text file lists the split, so that messages may quote its lines.
    images: as `scan`, for a split without labels; None: a split cannot be without.
    instances: the file with the instances of a label, if the data set has such files.
    joins: whether a split "a+b" is the splits a and b.
    """

    scan: Callable[[Path, DataConfig, str], Listing]
    folders: Callable[[Path, DataConfig, str], Sequence[str]]
    has_list_file: bool = False
    images: Callable[[Path, DataConfig, str], Listing] | None = None
    instances: Callable[[Path], Path] | None = None
    joins: bool = True


def list_split(
    data: DataConfig, split: str, *, quoted: bool = True, labelled: bool = True
) -> Listing:
    """The listing of `split`, which has no problems.

    quoted: whether messages may show lines of a text file that lists the split.
    labelled: False for a split without labels: each pair has its image twice.

    Raises:
        DataError: no such split, no images in it, or files missing; all of them are counted and
            the first ten shown.
    """
    listing = scan_layout(data, split, labelled=labelled)
    title = f"{printable(data.root)}, split {split!r}"
    if listing.problems and not quoted and LAYOUTS[data.layout].has_list_file:
        raise DataError(
            f"{title}: problems with a list file and what it names: {len(listing.problems)}; the "
            "checkpoint names that file, so none is shown; --split shows them"
        )
    if listing.problems:
        raise DataError(first_lines(title, listing.problems))
    return listing


def scan_layout(data: DataConfig, split: str, *, labelled: bool = True) -> Listing:
    """The listing of `split`, with its problems.

    "a+b" is both splits, a first; there, names begin with the split's. Images that
    `data.train_exclude` names are left out of `data.train_split`.

    Raises:
        DataError: the split itself is missing or holds no image, or two parts share an image.
    """
    try:
        root = data_root(data)
        parts = split_parts(root, data, split)
        layout = LAYOUTS[data.layout]
        scan = layout.scan if labelled else layout.images
        if scan is None:
            raise DataError(f"data.layout {data.layout}: its splits name labels; use predict")
        listings = [scan(root, data, part) for part in parts]
        listing = listings[0] if len(parts) == 1 else join_listings(parts, listings)
    except OSError as error:
        place = printable(error.filename or data.root)
        raise DataError(f"{place}: {error.strerror or error}") from error
    if not listing.pairs and not listing.problems:
        raise DataError(f"{printable(root)}, split {split!r}: no images in it")
    return without_excluded(listing, data) if split == data.train_split else listing


def split_parts(root: Path, data: DataConfig, split: str) -> list[str]:
    """The splits that `split` joins: "a+b" is ["a", "b"], unless "a+b" itself exists.

    Raises:
        DataError: a name is empty.
    """
    layout = LAYOUTS[data.layout]
    if not layout.joins or "+" not in split:
        return [split]
    folders = [root / name for name in ("", *layout.folders(root, data, split))]
    names = (split, f"Segmentation/{split}.txt")  # VOC has files, not folders
    if any((folder / name).exists() for folder in folders for name in names):
        return [split]
    parts = split.split("+")
    if not all(parts):
        raise DataError(f"split {split!r}: expected names joined by +, such as train+train_extra")
    return parts


class InstanceFiles(NamedTuple):
    """Where the instance maps of labels are, or would be."""

    paths: list[Path]  # of all labels, in their order; empty if the layout has no instance maps
    missing: list[Path]  # those of `paths` that do not exist


def instance_files(data: DataConfig, pairs: Sequence[Pair]) -> InstanceFiles:
    """The instance maps of the labels of `pairs`.

    A part of them may be missing: split train+train_extra of Cityscapes has coarse labels too.
    """
    place = LAYOUTS[data.layout].instances
    paths = [place(pair.label) for pair in pairs] if place else []
    return InstanceFiles(paths, [path for path in paths if not path.is_file()])


def _camvid(root: Path, data: DataConfig, split: str) -> Listing:
    if (root / split).is_dir() and not (root / "images").is_dir():
        original = root / f"{split}_labels"
        images = root / split
        labels = original if original.is_dir() else existing_folder(root, f"{split}annot")
    else:
        images, labels = (split_folder(root, kind, split) for kind in ("images", "labels"))
    # The label of 0001TP_006690.png is 0001TP_006690_L.png where it has the original 32 colours.
    found = files_by_name(labels, (LABEL_SUFFIX,))
    end = "_L" if found and all(name.endswith("_L") for name in found) else ""
    return match_folders(images, labels, label_end=end)


def _camvid_images(root: Path, data: DataConfig, split: str) -> Listing:
    plain = (root / split).is_dir() and not (root / "images").is_dir()
    return only_images(root / split if plain else split_folder(root, "images", split))


def _camvid_folders(root: Path, data: DataConfig, split: str) -> Sequence[str]:
    if (root / "images").is_dir():
        return ("images", "labels")
    return (split, f"{split}annot", f"{split}_labels")


def _voc(root: Path, data: DataConfig, split: str) -> Listing:
    names, problems = list_file_words(split_folder(root, "ImageSets/Segmentation", f"{split}.txt"))
    images = files_by_name(existing_folder(root, "JPEGImages"), IMAGE_SUFFIXES)
    # The augmented set (SBD) has labels of its own for all of VOC's images. A split is read from
    # the folder with fewer labels missing, so that the two kinds of label are never mixed.
    existing = [n for n in ("SegmentationClass", "SegmentationClassAug") if (root / n).is_dir()]
    folders = [existing_folder(root, n) for n in existing or ["SegmentationClass"]]
    found = {folder: files_by_name(folder, (LABEL_SUFFIX,)) for folder in folders}
    folder = min(found, key=lambda folder: sum(name not in found[folder] for name in names))
    pairs = []
    for name in sorted(names):
        image, label = images.get(name), found[folder].get(name)
        if not image:
            path = root / "JPEGImages" / name
            problems.append(f"{printable(name)}: no image {printable(path)}.jpg")
        elif not label:
            path = folder / name
            problems.append(f"{printable(image[0])}: no label {printable(path)}{LABEL_SUFFIX}")
        else:
            pairs.append(Pair(image[0], label[0], name))
    notes = []
    if split == "val" and folder.name == "SegmentationClassAug":
        what = "the benchmark scores the labels of SegmentationClass, which has other borders"
        notes.append(f"split 'val' is read from {printable(folder)}: {what}")
    return Listing(pairs, problems, notes=notes)


def _voc_images(root: Path, data: DataConfig, split: str) -> Listing:
    names, problems = list_file_words(split_folder(root, "ImageSets/Segmentation", f"{split}.txt"))
    images = files_by_name(existing_folder(root, "JPEGImages"), IMAGE_SUFFIXES)
    missing = [root / "JPEGImages" / name for name in sorted(names) if name not in images]
    problems += [f"{printable(path.name)}: no image {printable(path)}.jpg" for path in missing]
    found = [(images[name][0], name) for name in sorted(names) if name in images]
    return Listing([Pair(image, image, name) for image, name in found], problems)


def _ade20k_split(root: Path, split: str) -> str:
    if (root / "images" / split).is_dir():
        return split
    return {"train": "training", "val": "validation", "test": "testing"}.get(split, split)


def _ade20k_images(root: Path, data: DataConfig, split: str) -> Listing:
    return only_images(split_folder(root, "images", _ade20k_split(root, split)))


def _ade20k(root: Path, data: DataConfig, split: str) -> Listing:
    split = _ade20k_split(root, split)
    images = split_folder(root, "images", split)
    return match_folders(images, split_folder(root, "annotations", split))


def _folders(root: Path, data: DataConfig, split: str) -> Listing:
    check_named_folder(root, "images_dir", data.images_dir)
    images = split_folder(root, data.images_dir, split)
    check_named_folder(root, "labels_dir", data.labels_dir)
    labels = split_folder(root, data.labels_dir, split)
    if images.resolve() == labels.resolve():
        raise DataError(
            f"{printable(images)}: images and labels lie in one folder; "
            "separate them, or name every pair in a text file (data.layout: list)"
        )
    return match_folders(images, labels)


def _folder_images(root: Path, data: DataConfig, split: str) -> Listing:
    check_named_folder(root, "images_dir", data.images_dir)
    return only_images(split_folder(root, data.images_dir, split))


def _list(root: Path, data: DataConfig, split: str) -> Listing:
    path = root / split
    if not path.is_file():
        texts = sorted(file.name for suffix in ("txt", "csv") for file in root.glob(f"*.{suffix}"))
        raise DataError(f"{printable(path)}: no such list file; {there_are('text files', texts)}")
    # Here, since a wrong config is refused before NumPy is imported.
    from segtrain.data.read.plain_list import plain_pairs

    if (plain := plain_pairs(path, root)) is not None:
        return Listing(plain, [])
    rows, problems = list_file_rows(path)
    pairs: dict[str, Pair] = {}
    first_line: dict[str, int] = {}
    for line, *names in rows:
        image = _listed_file(names[0], root, is_label=False)
        label = _listed_file(names[1], root, is_label=True)
        bad = [file.problem for file in (image, label) if file.problem]
        name = image.path.rpartition(".")[0]
        if not bad and image.path in first_line:
            bad = [f"{printable(image.path)}: already on line {first_line[image.path]}"]
        elif not bad and name in pairs:
            both = f"{printable(pairs[name].image)} and {printable(root / image.path)}"
            bad = [f"{both} have one name; rename one"]
        first_line.setdefault(image.path, line)
        problems += [f"{printable(path)}:{line}: {problem}" for problem in bad]
        if not bad:
            pairs[name] = Pair(root / image.path, root / label.path, name)
    notes = _shared_labels(list(pairs.values()))
    return Listing(list(pairs.values()), problems, case_clashes(pairs), notes=notes)


def _shared_labels(pairs: Sequence[Pair]) -> list[str]:
    """A line if images share a label: as a rule a line was copied and changed in one column."""
    users: dict[Path, str] = {}
    shared = []
    for pair in pairs:
        first = users.setdefault(pair.label, pair.name)
        if first != pair.name:
            shared.append(
                f"{printable(pair.label)} by {printable(first)} and {printable(pair.name)}"
            )
    return [f"labels are used by several images: {first_of(shared, 3)}"] if shared else []


def _listed_file(name: str, root: Path, *, is_label: bool) -> CleanPath:
    path, problem = clean_relative_path(name)
    if not problem and not path.lower().endswith(LABEL_SUFFIX if is_label else IMAGE_SUFFIXES):
        kinds = "labels must be PNG files" if is_label else "images must be PNG or JPEG files"
        problem = f"{printable(path)}: {kinds}"
    if not problem and not os.path.isfile(root / path):  # Path.is_file raises for long names
        problem = f"{printable(path)}: no such file below {printable(root)}"
    return CleanPath(path, problem)


LAYOUTS: dict[str, Layout] = {
    "cityscapes": Layout(
        _cityscapes,
        lambda *_: ("leftImg8bit", "gtFine", "gtCoarse"),
        images=_cityscapes_images,
        instances=_instance_file,
    ),
    "camvid": Layout(_camvid, _camvid_folders, images=_camvid_images),
    "voc": Layout(
        _voc,
        lambda *_: ("JPEGImages", "SegmentationClass", "SegmentationClassAug", "ImageSets"),
        has_list_file=True,
        images=_voc_images,
    ),
    "ade20k": Layout(_ade20k, lambda *_: ("images", "annotations"), images=_ade20k_images),
    "folders": Layout(
        _folders,
        lambda root, data, split: (data.images_dir, data.labels_dir),
        images=_folder_images,
    ),
    "list": Layout(_list, lambda *_: (), has_list_file=True, joins=False),
}


def join_listings(parts: Sequence[str], listings: Sequence[Listing]) -> Listing:
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
    rest = zip(*(listing[2:] for listing in listings), strict=True)
    return Listing(pairs, problems, *([one for part in kind for one in part] for kind in rest))


def without_excluded(listing: Listing, data: DataConfig) -> Listing:
    """`listing`, of the training split, without the images of `data.train_exclude`.

    Raises:
        DataError: a name is not in it, or no image is left.
    """
    if not data.train_exclude:
        return listing
    excluded = set(data.train_exclude)
    names = {pair.name for pair in listing.pairs}
    if unknown := sorted(excluded - names):
        known = {name.rpartition("/")[2]: name for name in names}
        hint = did_you_mean(unknown[0].rpartition("/")[2], known) or (
            f"; names look like {printable(min(names))}" if names else ""
        )
        raise DataError(
            f"data.train_exclude: no image {printable(unknown[0])} in split "
            f"{data.train_split!r}{hint}"
        )
    pairs = [pair for pair in listing.pairs if pair.name not in excluded]
    if listing.pairs and not pairs:
        raise DataError(f"data.train_exclude: leaves no image in split {data.train_split!r}")
    return listing._replace(pairs=pairs)
