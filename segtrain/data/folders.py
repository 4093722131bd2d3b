"""The folders of a data set, or a DataError that names the likely repair."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from segtrain.config import DataConfig
from segtrain.config.suggest import did_you_mean
from segtrain.data.listing import IMAGE_SUFFIXES, first_names
from segtrain.errors import DataError
from segtrain.files import walk
from segtrain.text import printable

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
    return f"{what}: {first_names(names)}" if names else f"there are no {what}"


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
