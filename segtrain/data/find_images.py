"""Which images a user means by a list of files and folders, and what to call each of them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from segtrain.data.decode_more import MORE_SUFFIXES
from segtrain.data.listing import IMAGE_SUFFIXES, OTHER_IMAGES, first_lines
from segtrain.errors import DataError
from segtrain.files import walk
from segtrain.text import counted, printable

SUFFIXES = (*IMAGE_SUFFIXES, *MORE_SUFFIXES)
_MAX_SHOWN = 10


class Source(NamedTuple):
    """An image and the unique name of its prediction: a relative path without suffix."""

    path: Path
    name: str


def find_images(inputs: Sequence[str | Path], output: Path) -> list[Source]:
    """The images among `inputs`, files or folders searched to any depth, each image once.

    Names are relative to the given folder. If another image already has the name, in upper or lower
    case, the file's suffix is appended, then a number. Files in `output` are left out, so that a
    second run does not predict the pictures of the first.

    Raises:
        DataError: an input is missing, of another format, or a folder without images.
    """
    found: list[Source] = []
    problems = []
    for given in map(Path, inputs):
        if not given.is_dir():
            problems += _file_problem(given)
            found.append(Source(given, given.stem))
        elif _is_below(given, output):
            problems.append(
                f"{printable(given)}: lies in --output, where predictions are no input; choose "
                "another directory for them"
            )
        else:
            inside = list(_images_below(given, output))
            found += inside
            if not inside:
                problems.append(f"{printable(given)}: no images ({' '.join(SUFFIXES)}) in it")
    if problems:
        raise DataError(first_lines("input", problems))
    return _with_unique_names(found)


def skipped_files(inputs: Sequence[str | Path], output: Path) -> list[str]:
    """What in the folders among `inputs` is not predicted: a line for images, a line for others."""
    counts: Counter[str] = Counter()
    for folder in {given.resolve() for given in map(Path, inputs) if given.is_dir()}:
        for here, files in walk(folder, hidden=True):
            if not _is_below(here, output):
                counts.update(Path(name).suffix.lower() for name in files if name[0] != ".")
    images = Counter({end: n for end, n in counts.items() if end in _UNREAD})
    others = Counter({end: n for end, n in counts.items() if end not in (*_UNREAD, *SUFFIXES)})
    lines = []
    if images:
        words = "image of a format that is not read", "images of formats that are not read"
        what = counted(images.total(), *words)
        lines.append(f"skipped {what}: {_by_suffix(images)}; convert to PNG or JPEG")
    if others:
        what = counted(others.total(), "file that is no image", "files that are no images")
        lines.append(f"skipped {what}: {_by_suffix(others)}")
    return lines


_UNREAD = tuple(suffix for suffix in OTHER_IMAGES if suffix not in SUFFIXES)


def _by_suffix(counts: Counter[str]) -> str:
    shown = sorted(counts.most_common(_MAX_SHOWN), key=lambda pair: (-pair[1], not pair[0], pair))
    named = [
        f"{count} {printable(suffix, _MAX_SHOWN) or 'without suffix'}" for suffix, count in shown
    ]
    return ", ".join(named) + (", others" if len(counts) > _MAX_SHOWN else "")


def _file_problem(path: Path) -> list[str]:
    suffix = path.suffix.lower()
    if not path.exists():
        return [f"{printable(path)}: no such file or folder"]
    if suffix in _UNREAD:
        return [f"{printable(path)}: images of this format are not read; convert it to PNG or JPEG"]
    if suffix not in SUFFIXES:
        return [f"{printable(path)}: not an image ({' '.join(SUFFIXES)})"]
    return []


def _images_below(folder: Path, output: Path) -> Iterator[Source]:
    try:
        for here, files in walk(folder, hidden=True):
            for path in (here / name for name in files):
                if path.suffix.lower() in SUFFIXES and not _is_below(path, output):
                    yield Source(path, path.relative_to(folder).with_suffix("").as_posix())
    except OSError as error:
        where = printable(error.filename or folder)
        raise DataError(f"{where}: cannot be read: {error.strerror}") from error


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _with_unique_names(found: Iterable[Source]) -> list[Source]:
    sources: dict[Path, Source] = {}
    taken: set[str] = set()
    for path, name in found:
        if path.resolve() in sources:
            continue
        unique, number = name, 2
        while unique.casefold() in taken:
            # x, x_png, x_3, x_4, ...
            unique = f"{name}_{number if number > 2 else path.suffix[1:].lower()}"
            number += 1
        taken.add(unique.casefold())
        sources[path.resolve()] = Source(path, unique)
    return list(sources.values())
