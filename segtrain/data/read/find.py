"""Finds the files of a data set: folders, what lies in them, and which label an image has."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from segtrain.config import DataConfig
from segtrain.errors import DataError
from segtrain.files import walk
from segtrain.text import counted, first_of, printable

# The keys of `segtrain.data.read.image_formats.READERS`; to look at names no decoder is imported.
IMAGE_SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jfif", ".tif", ".tiff", ".webp", ".bmp", ".gif", ".jp2"),
    *(".npy", ".npz", ".pgm", ".ppm"),
)
# What `segtrain predict` takes besides.
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm")
# Formats that can keep class ids; whether a file does is known when it is opened.
LABEL_SUFFIXES = tuple(
    suffix for suffix in IMAGE_SUFFIXES if suffix not in (".jpg", ".jpeg", ".jfif", ".jp2", ".ppm")
)
# Images of these formats are reported, because they look like lost data; other files are not.
_OTHER_IMAGES = (".avif", ".dng", ".exr", ".heic", ".jxl", ".tga")
MAX_SHOWN = 10
_FEW = 3


def unread(paths: Iterable[Path]) -> str:
    """What to do about images whose format no reader has; empty: there are none."""
    endings = {path.suffix.lower() for path in paths}.intersection(_OTHER_IMAGES)
    return f"; convert {first_of(sorted(endings))} to PNG or JPEG" if endings else ""


class Window(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    @property
    def fragment(self) -> str:
        """What names the window behind the name of its file (W3C Media Fragments)."""
        return f"#xywh={self.left},{self.top},{self.width},{self.height}"

    @property
    def ending(self) -> str:
        """What the name of an item has behind that of its file."""
        return f"_y{self.top}_x{self.left}"


class Pair(NamedTuple):
    """One image with its label. `name` is unique in the split: a relative path without suffix.

    bands: the further files of an image whose channels are in several; `image` has the first.
    window: the part of image and label that this pair is; None: all of them.
    """

    image: Path
    label: Path
    name: str
    bands: tuple[Path, ...] = ()
    window: Window | None = None

    @property
    def images(self) -> tuple[Path, ...]:
        """The files of the image, in the order of its channels."""
        return (self.image, *self.bands)


class Listing(NamedTuple):
    """What a layout finds for one split.

    pairs: images whose label exists, sorted by name.
    problems: a line for each thing that makes the split unusable, such as a missing label.
    notes: a line for each oddity that does not, for the start of training and evaluation.
    """

    pairs: Sequence[Pair]
    problems: Sequence[str]
    notes: Sequence[str] = ()


def first_lines(title: str, findings: Sequence[str]) -> str:
    """`title` and up to MAX_SHOWN findings below it; a single finding stands on the same line."""
    if len(findings) == 1:
        return f"{title}: {findings[0]}"
    return "\n".join([f"{title}: {len(findings)} problems", *indented(findings)])


def indented(findings: Sequence[str]) -> list[str]:
    """A line for each of up to MAX_SHOWN findings, and how many more there are."""
    left = len(findings) - MAX_SHOWN
    shown = [*findings[:MAX_SHOWN], *([f"and {left} more"] if left > 0 else [])]
    return [f"  {finding}" for finding in shown]


def data_root(data: DataConfig) -> Path:
    """The folder `data.root`."""
    root = Path(os.path.expanduser(data.root))  # Path.expanduser raises for unknown users
    if not root.is_dir():
        # The usual mistake is a relative path, which starts in the working directory.
        what = f"there is no folder {printable(root.absolute())}"
        raise DataError(f"data.root: {what}; if the data have moved: --set data.root=FOLDER")
    return root


def split_folder(root: Path, kind: str, split: str) -> Path:
    """`root/kind/split`: a folder, or a file if `split` ends with ".txt"."""
    folder = root / kind / split
    if folder.exists():
        return folder
    is_file = split.endswith(".txt")
    entries = _visible(existing_folder(root, kind), files=is_file)
    splits = there_are("splits", [path.stem if is_file else path.name for path in entries])
    raise DataError(f"{printable(folder)}: no split {split.removesuffix('.txt')!r}; {splits}")


def existing_folder(root: Path, name: str) -> Path:
    """The folder `root/name`."""
    folder = root / name
    if folder.is_dir():
        return folder
    folders = [path.name for path in _visible(root, files=False)]
    there = there_are(f"folders in {printable(root)}", folders)
    raise DataError(f"{printable(folder)}: no such folder; {there}")


def _visible(folder: Path, *, files: bool) -> list[Path]:
    """The files in `folder`, or else the folders."""
    return sorted(p for p in folder.iterdir() if p.is_file() == files and p.name[0] != ".")


def there_are(what: str, names: Sequence[str]) -> str:
    """`what: a, b, c`, or that there are none."""
    return f"{what}: {first_of(names)}" if names else f"there are no {what}"


def files_by_name(folder: Path, suffixes: Sequence[str], end: str = "") -> dict[str, list[Path]]:
    """Files below `folder` with one of `suffixes`, by their name without `end` and suffix."""
    by_name: dict[str, list[Path]] = {}
    for file in visible_files(folder):
        stem, suffix = os.path.splitext(file)
        if suffix.lower() in suffixes and stem.endswith(end):
            by_name.setdefault(stem.removesuffix(end), []).append(folder / file)
    return by_name


def one_name(files: Sequence[Path]) -> str:
    """What is wrong with several files of one name; empty for one file, or none."""
    names = ", ".join(printable(file.name) for file in files)
    where = printable(files[0].parent) if files else ""
    return f"{where}: {names} have one name; keep one" if len(files) > 1 else ""


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

    Image b has no label, which is a problem; label c has no image, which is noted.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     for file in ("images/a.jpg", "images/b.jpg", "labels/a_L.png", "labels/c_L.png"):
    ...         Path(root, file).parent.mkdir(exist_ok=True)
    ...         Path(root, file).touch()
    ...     found = match_folders(Path(root, "images"), Path(root, "labels"), label_end="_L")
    >>> [pair.name for pair in found.pairs], len(found.problems), len(found.notes)
    (['a'], 1, 1)

    Raises:
        DataError: there are no images.
    """
    # With the formats that no reader has, so that such images are reported instead of lost.
    pictures = files_by_name(images_dir, IMAGE_SUFFIXES + _OTHER_IMAGES, image_end)
    images = {
        name: readable
        for name, files in sorted(pictures.items())
        if (readable := [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES])
    }
    if not images:
        raise DataError(_none_of(images_dir, "images", image_end + "|".join(IMAGE_SUFFIXES)))
    if labels_dir is None:
        labels = {name: files[:1] for name, files in images.items()}
    else:
        labels = files_by_name(labels_dir, LABEL_SUFFIXES, label_end)
        if not labels and not files_by_name(labels_dir, LABEL_SUFFIXES):
            # From JPEG the stored ids are gone: a PNG made of it would be wrong, and not look so.
            kinds = "|".join(LABEL_SUFFIXES)
            return Listing([], [_none_of(labels_dir, "labels (JPEG changes ids) as", kinds)])
    pairs, problems, missing = [], [], []
    for name, files in images.items():
        # Of two files with one name only the user knows which is meant.
        problems += filter(None, map(one_name, (files, labels.get(name, []))))
        if name in labels:
            pairs.append(Pair(files[0], labels[name][0], name))
        else:
            label = labels_dir / f"{name}{label_end}.png"
            missing.append(f"{printable(files[0])}: no label {printable(label)}")
    notes = case_clashes(images)
    if others := sorted(pictures[name][0] for name in pictures.keys() - images.keys()):
        what = counted(len(others), "image is", "images are")
        notes.append(f"{what} left out, no reader has the format: {first_of(others, _FEW)}")
    if extra := sorted(file for name in labels.keys() - images.keys() for file in labels[name]):
        words = "label has no image and is not used", "labels have no image and are not used"
        notes.append(f"{counted(len(extra), *words)}: {first_of(extra, _FEW)}")
    # Missing labels last: there may be thousands, and only the first lines are shown.
    return Listing(pairs, problems + missing, notes)


def case_clashes(names: Iterable[str]) -> list[str]:
    """A note about names that are equal on a file system without upper and lower case, if any."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.casefold(), []).append(name)
    clashes = [" = ".join(group) for group in groups.values() if len(group) > 1]
    return [f"names differ in case only: {first_of(clashes, _FEW)}"] if clashes else []


def _none_of(folder: Path, what: str, ending: str) -> str:
    """Why there are no files `*ending` below `folder`."""
    files = first_of(visible_files(folder), _FEW) or "no files"
    return f"{printable(folder)}: expected {what} *{ending}, found {files}"
