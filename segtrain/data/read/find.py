"""Finds the files of a data set: folders, what lies in them, and which label an image has."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from segtrain.config import DataConfig
from segtrain.config.messages import did_you_mean
from segtrain.errors import DataError
from segtrain.files import walk
from segtrain.text import counted, first_of, printable

# Other formats are refused: two decoders are enough to keep safe, and both keep what they store.
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
LABEL_SUFFIX = ".png"
# Images of these formats are reported, because they look like lost data; other files are not.
OTHER_IMAGES = (
    *(".apng", ".arw", ".avif", ".bmp", ".cr2", ".dib", ".dng", ".exr", ".gif", ".hdr", ".heic"),
    *(".heif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpf", ".jpx", ".jxl", ".nef", ".npy", ".pbm"),
    *(".pgm", ".pnm", ".ppm", ".raw", ".tga", ".tif", ".tiff", ".webp"),
)
MAX_SHOWN = 10
_FEW = 3


class Pair(NamedTuple):
    """One image with its label. `name` is unique in the split: a relative path without suffix."""

    image: Path
    label: Path
    name: str


class Listing(NamedTuple):
    """What a layout finds for one split.

    pairs: images whose label exists, sorted by name.
    problems: a line for each thing that makes the split unusable, such as a missing label.
    warnings: a line for each oddity that does not.
    extra_labels: labels without an image, which are not used.
    left_out: images of formats that are not read and that exist in no other format.
    notes: further lines that training and evaluation show when they start.
    """

    pairs: Sequence[Pair]
    problems: list[str]
    warnings: Sequence[str] = ()
    extra_labels: Sequence[Path] = ()
    left_out: Sequence[Path] = ()
    notes: Sequence[str] = ()

    def warnings_of_start(self) -> list[str]:
        """What training and evaluation must say when they start."""
        lines = list(self.notes)
        if self.left_out:
            lines.append(f"{left_out_text(self.left_out)}: {first_of(self.left_out, _FEW)}")
        if self.extra_labels:
            text = extra_labels_text(self.extra_labels)
            lines.append(f"{text}: {first_of(self.extra_labels, _FEW)}")
        return lines


def extra_labels_text(files: Sequence[Path]) -> str:
    """How many labels have no image."""
    words = "label has no image and is not used", "labels have no image and are not used"
    return counted(len(files), *words)


def left_out_text(files: Sequence[Path]) -> str:
    """How many images are left out because of their format, with the repair."""
    suffixes = sorted({file.suffix.lower() for file in files})
    images = counted(len(files), "image is", "images are")
    return f"{images} left out: {' '.join(suffixes)} is not read, only JPEG and PNG; convert to PNG"


def first_lines(title: str, findings: Sequence[str]) -> str:
    """`title` and up to MAX_SHOWN findings below it; a single finding stands on the same line."""
    if len(findings) == 1:
        return f"{title}: {findings[0]}"
    shown = [f"  {finding}" for finding in findings[:MAX_SHOWN]]
    if len(findings) > MAX_SHOWN:
        shown.append(f"  and {len(findings) - MAX_SHOWN} more")
    return "\n".join([f"{title}: {len(findings)} problems", *shown])


# What other programs append or prepend to the name of an image to name its label.
LABEL_WORDS = r"(masks?|gt|labels?|seg|segmentation|annotations?|groundtruth)"
# Usual names of the folders that images_dir and labels_dir name.
_USUAL_NAMES = {
    "images_dir": re.compile(r"images?|imgs?|photos?|pictures?|jpegimages|rgb", re.IGNORECASE),
    "labels_dir": re.compile(
        rf"{LABEL_WORDS}|ann|anns|targets?|ground[-_ ]truth|segmentationclass(raw)?", re.IGNORECASE
    ),
}


def data_root(data: DataConfig) -> Path:
    """The folder `data.root`."""
    root = Path(os.path.expanduser(data.root))  # Path.expanduser raises for unknown users
    if root.is_dir():
        return root
    if root.exists():
        raise DataError(f"data.root: {printable(root)} is not a folder")
    beside = [path.name for path in root.parent.iterdir()] if root.parent.is_dir() else []
    hint = did_you_mean(root.name, {name: printable(root.parent / name) for name in beside})
    # The usual mistake is a relative path, which starts in the working directory.
    where = "" if root.is_absolute() else f" in {printable(Path.cwd())}"
    raise DataError(f"data.root: there is no folder {printable(root)}{where}{hint}")


def split_folder(root: Path, kind: str, split: str) -> Path:
    """`root/kind/split`: a folder, or a file if `split` ends with ".txt"."""
    place = root / kind / split
    if place.exists():
        return place
    is_file = split.endswith(".txt")
    swapped = root / split / kind
    if swapped.is_dir() and not (root / kind).exists():
        raise DataError(f"{place}: no such folder; {swapped} is there: move it to {place}")
    parent = existing_folder(root, kind)
    if not is_file and files_by_name(parent, IMAGE_SUFFIXES) and not any(parent.glob("*/")):
        raise DataError(
            f"{place}: no split {split!r}: the files lie in {parent} itself; move them into a "
            f"folder for each split, such as {place}/photo.png"
        )
    found = sorted(
        path.stem if is_file else path.name
        for path in parent.iterdir()
        if path.is_file() == is_file and not path.name.startswith(".")
    )
    name = split.removesuffix(".txt")
    raise DataError(f"{printable(place)}: no split {name!r}; {there_are('splits', found)}")


def existing_folder(root: Path, name: str) -> Path:
    """The folder `root/name`."""
    folder = root / name
    if folder.is_dir():
        return folder
    # The usual mistake is a data.root one or two folders too high, or one too deep.
    inside = sorted(place for depth in ("*", "*/*") for place in root.glob(depth))
    roots = [place for place in inside if (place / name).exists()]
    roots += [root.parent] if (root.parent / name).is_dir() else []
    if roots:
        raise DataError(
            f"{printable(folder)}: no such folder; did you mean data.root: {printable(roots[0])}"
        )
    found = there_are(f"folders in {printable(root)}", _folder_names(root))
    raise DataError(f"{printable(folder)}: no such folder; {found}")


def check_named_folder(root: Path, key: str, name: str) -> None:
    """Refuses a missing folder if exactly one folder has a usual name for `key` of the config."""
    found = [other for other in _folder_names(root) if _USUAL_NAMES[key].fullmatch(other)]
    if len(found) == 1 and not (root / name).exists():
        raise DataError(
            f"{printable(root / name)}: no such folder; if {printable(root / found[0])} is meant, "
            f"set data.{key}: {printable(found[0])}"
        )


def there_are(what: str, names: Sequence[str]) -> str:
    """`what: a, b, c`, or that there are none."""
    return f"{what}: {first_of(names)}" if names else f"there are no {what}"


def files_by_name(folder: Path, suffixes: Sequence[str], end: str = "") -> dict[str, list[Path]]:
    """Files below `folder` with one of `suffixes`, by their name without `end` and suffix."""
    found: dict[str, list[Path]] = {}
    for file in visible_files(folder):
        stem, suffix = os.path.splitext(file)
        if suffix.lower() in suffixes and stem.endswith(end):
            found.setdefault(stem.removesuffix(end), []).append(folder / file)
    return found


def visible_files(folder: Path) -> list[str]:
    """All files below `folder`, relative to it, sorted; links to folders are followed.

    Hidden files do not count: on foreign disks macOS leaves "._name.png" beside "name.png".
    """
    return sorted(
        name if place == folder else f"{place.relative_to(folder)}/{name}"
        for place, files in walk(folder, hidden=False)
        for name in files
    )


def _folder_names(root: Path) -> list[str]:
    return sorted(
        path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")
    )


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
