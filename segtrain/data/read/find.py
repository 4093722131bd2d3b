"""Finds the files of a data set: folders, what lies in them, and which label an image has."""

import os
from collections.abc import Iterable, Sequence
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
        kinds = ((left_out_text, self.left_out), (extra_labels_text, self.extra_labels))
        found = [f"{text_of(files)}: {first_of(files, _FEW)}" for text_of, files in kinds if files]
        return [*self.notes, *found]


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


def data_root(data: DataConfig) -> Path:
    """The folder `data.root`."""
    root = Path(os.path.expanduser(data.root))  # Path.expanduser raises for unknown users
    if root.is_dir():
        return root
    beside = [path.name for path in root.parent.iterdir()] if root.parent.is_dir() else []
    hint = did_you_mean(root.name, {name: printable(root.parent / name) for name in beside})
    # The usual mistake is a relative path, which starts in the working directory.
    where = "" if root.is_absolute() else f" in {printable(Path.cwd())}"
    raise DataError(f"data.root: there is no folder {printable(root)}{where}{hint}")


def split_folder(root: Path, kind: str, split: str) -> Path:
    """`root/kind/split`: a folder, or a file if `split` ends with ".txt"."""
    folder = root / kind / split
    if folder.exists():
        return folder
    swapped, place = root / split / kind, printable(folder)
    if swapped.is_dir() and not (root / kind).exists():
        raise DataError(f"{place}: no such folder; {printable(swapped)} is there: move it")
    parent = existing_folder(root, kind)
    is_file = split.endswith(".txt")
    if not is_file and files_by_name(parent, IMAGE_SUFFIXES) and not any(parent.glob("*/")):
        raise DataError(
            f"{place}: no such folder: the files lie in {printable(parent)} itself; move them into "
            "a folder for each split"
        )
    found = sorted(path.stem if is_file else path.name for path in _visible(parent, files=is_file))
    name = split.removesuffix(".txt")
    raise DataError(f"{place}: no split {name!r}; {there_are('splits', found)}")


def existing_folder(root: Path, name: str) -> Path:
    """The folder `root/name`."""
    folder = root / name
    if folder.is_dir():
        return folder
    # The usual mistake is a data.root one or two folders too high, or one too deep.
    inside = sorted(path for depth in ("*", "*/*") for path in root.glob(depth))
    for other in (*inside, root.parent):
        if (other / name).is_dir():
            meant = f"did you mean data.root: {printable(other)}"
            raise DataError(f"{printable(folder)}: no such folder; {meant}")
    found = sorted(path.name for path in _visible(root, files=False))
    what = f"folders in {printable(root)}"
    raise DataError(f"{printable(folder)}: no such folder; {there_are(what, found)}")


def _visible(folder: Path, *, files: bool) -> list[Path]:
    """The files in `folder`, or else the folders."""
    return [p for p in folder.iterdir() if p.is_file() == files and p.name[0] != "."]


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
        name if here == folder else f"{here.relative_to(folder)}/{name}"
        for here, files in walk(folder, hidden=False)
        for name in files
    )


def match_folders(
    images_dir: Path, labels_dir: Path | None, *, image_end: str = "", label_end: str = ""
) -> Listing:
    """All images below `images_dir` with the labels of the same name below `labels_dir`.

    labels_dir: None: there are no labels, and each pair has its image twice.
    image_end, label_end: what file names have after the common name and before the suffix.

    Raises:
        DataError: there are no images.
    """
    pictures = files_by_name(images_dir, IMAGE_SUFFIXES + OTHER_IMAGES, image_end)
    images = {
        name: readable
        for name, files in sorted(pictures.items())
        if (readable := [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES])
    }
    if not images:
        raise DataError(_none_of(images_dir, "an image", image_end + "|".join(IMAGE_SUFFIXES)))
    clashes = case_clashes(images)
    if labels_dir is None:
        labels = {name: files[:1] for name, files in images.items()}
    else:
        labels = files_by_name(labels_dir, (LABEL_SUFFIX,), label_end)
        if not labels and not files_by_name(labels_dir, (LABEL_SUFFIX,)):
            return Listing([], [_none_of(labels_dir, "a label", LABEL_SUFFIX)], clashes)
    pairs, problems, missing = [], [], []
    for name, files in images.items():
        problems += [*_one_name(files), *_one_name(labels.get(name, []))]
        if name in labels:
            pairs.append(Pair(files[0], labels[name][0], name))
        else:
            label = labels_dir / (name + label_end + LABEL_SUFFIX)
            found = _similar_file(labels_dir / name, files) if len(missing) < MAX_SHOWN else ""
            missing.append(f"{printable(files[0])}: no label {printable(label)}{found}")
    return Listing(
        pairs,
        problems + missing,
        clashes,
        sorted(file for name in labels.keys() - images.keys() for file in labels[name]),
        sorted(pictures[name][0] for name in pictures.keys() - images.keys()),
    )


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


def _similar_file(path: Path, images: Sequence[Path]) -> str:
    """Text " (found ...)" with a file whose name begins like that of `path`, or empty.

    images: those of this name, which may lie in the same folder.
    """
    folder, start = path.parent, path.name.lower()
    found = folder.iterdir() if folder.is_dir() else ()
    names = [f.name for f in found if f.name.lower().startswith(start) and f not in images]
    return f" (found {printable(min(names))})" if names else ""


def _none_of(folder: Path, what: str, ending: str) -> str:
    """Why there are no files `*ending` below `folder`."""
    text = f"{printable(folder)}: expected {what} *{ending}"
    files = visible_files(folder)
    if not files:
        return f"{text}; the folder is empty"
    if what == "a label" and files[0].lower().endswith((".jpg", ".jpeg")):
        # The stored ids are gone: a PNG made from this file would be wrong without looking wrong.
        return f"{text}; JPEG has changed the values: make PNG files from the original labels"
    return f"{text}; none of {counted(len(files), 'file', 'files')} is, as {printable(files[0])}"
