"""Pairs from two mirrored folders: a label has the path of its image, with the suffix .png."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from segtrain.data.folders import LABEL_WORDS, files_by_name, visible_files
from segtrain.data.listing import (
    IMAGE_SUFFIXES,
    LABEL_SUFFIX,
    MAX_SHOWN,
    OTHER_IMAGES,
    Listing,
    Pair,
)
from segtrain.errors import DataError
from segtrain.text import counted, printable


def match_folders(
    images_dir: Path, labels_dir: Path, *, image_end: str = "", label_end: str = ""
) -> Listing:
    """All images below `images_dir` with the labels of the same name below `labels_dir`.

    image_end, label_end: what file names have after the common name and before the suffix.

    Raises:
        DataError: there are no images.
    """
    pictures, images = _images_below(images_dir, image_end)
    labels = files_by_name(labels_dir, (LABEL_SUFFIX,), label_end)
    clashes = case_clashes(images)
    if not files_by_name(labels_dir, (LABEL_SUFFIX,)):
        return Listing([], [_none_of(labels_dir, "a label", LABEL_SUFFIX)], clashes)
    pairs, problems, missing = [], [], []
    for name, files in images.items():
        problems += [*_one_name(files), *_one_name(labels.get(name, []))]
        if name in labels:
            pairs.append(Pair(files[0], labels[name][0], name))
        else:
            label = labels_dir / (name + label_end + LABEL_SUFFIX)
            missing.append(f"{printable(files[0])}: no label {printable(label)}")
            if len(missing) <= MAX_SHOWN:
                missing[-1] += _similar_file(labels_dir, name, label_end, images)
    return Listing(
        pairs,
        problems + missing,
        clashes,
        sorted(file for name in labels.keys() - images.keys() for file in labels[name]),
        sorted(pictures[name][0] for name in pictures.keys() - images.keys()),
    )


def only_images(images_dir: Path, *, image_end: str = "") -> Listing:
    """All images below `images_dir`, which have no labels: each pair has its image twice.

    Raises:
        DataError: there are no images.
    """
    pictures, images = _images_below(images_dir, image_end)
    return Listing(
        [Pair(files[0], files[0], name) for name, files in images.items()],
        [problem for files in images.values() for problem in _one_name(files)],
        case_clashes(images),
        left_out=sorted(pictures[name][0] for name in pictures.keys() - images.keys()),
    )


def _images_below(
    images_dir: Path, image_end: str
) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """Images of all formats, and of those that are read, by name."""
    pictures = files_by_name(images_dir, IMAGE_SUFFIXES + OTHER_IMAGES, image_end)
    readable = {
        name: [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
        for name, files in pictures.items()
    }
    images = {name: readable[name] for name in sorted(readable) if readable[name]}
    if not images:
        raise DataError(_none_of(images_dir, "an image", image_end + "|".join(IMAGE_SUFFIXES)))
    return pictures, images


def _one_name(files: Sequence[Path]) -> list[str]:
    """A problem if several files have one name."""
    if len(files) < 2:
        return []
    names = ", ".join(printable(file.name) for file in files)
    return [f"{printable(files[0].parent)}: {names} have one name; keep one"]


def case_clashes(names: Iterable[str]) -> list[str]:
    """Names that are equal on a file system without upper and lower case."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.casefold(), []).append(name)
    return [
        "differ only in upper and lower case: " + ", ".join(printable(name) for name in group)
        for group in groups.values()
        if len(group) > 1
    ]


def _similar_file(
    labels_dir: Path, name: str, label_end: str, images: Mapping[str, Sequence[Path]]
) -> str:
    """Text " (found ...)" with a file that may be the missing label of `name`, or empty."""
    folder = (labels_dir / name).parent
    if not folder.is_dir():
        return ""
    place, _, stem = name.rpartition("/")
    text = re.escape(stem)
    # "photo_mask.png" or "photo.jpg.png" for "photo.jpg": only the name is wrong.
    renamed = re.compile(
        rf"{LABEL_WORDS}[-_. ]?{text}|{text}([-_. ]?{LABEL_WORDS}|\.jpe?g|\.png)?", re.IGNORECASE
    )
    similar = []
    for file in folder.iterdir():
        of_another = (f"{place}/{file.stem}" if place else file.stem) in images
        is_png = file.suffix.lower() == LABEL_SUFFIX
        if is_png and not label_end and not of_another and renamed.fullmatch(file.stem):
            similar.append((0, file.name))
        elif file not in images[name] and file.name.lower().startswith(stem.lower()):
            similar.append((1, file.name))
    if not similar:
        return ""
    rank, found = min(similar)
    advice = "" if rank else f"; rename it to {printable(stem + LABEL_SUFFIX)}"
    return f" (found {printable(found)}{advice})"


def _none_of(folder: Path, what: str, ending: str) -> str:
    """Why there are no files `*ending` below `folder`."""
    files = visible_files(folder)
    if not files:
        return f"{printable(folder)}: the folder is empty; expected {what} *{ending}"
    text = (
        f"{printable(folder)}: {counted(len(files), 'file', 'files')}, none is {what} *{ending}; "
        f"the first is {printable(files[0])}"
    )
    if what == "an image":
        text += "; only JPEG and PNG are read"
    elif files[0].lower().endswith((".jpg", ".jpeg")):
        # The stored ids are gone: a PNG made from this file would be wrong without looking wrong.
        text += ", and JPEG has changed its values: make PNG files from the original labels"
    return text
