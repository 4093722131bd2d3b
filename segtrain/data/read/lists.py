"""Text files that name images and labels: strict about what a line may hold.

Such files are downloaded and passed around, so no line may name a place outside the data set's
root. Links in that folder are followed, as in every layout: their owner has put them there.
"""

import csv
import os
import posixpath
import re
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import add
from pathlib import Path
from typing import NamedTuple, overload

from segtrain.data.read.find import Pair
from segtrain.errors import DataError
from segtrain.files import os_errors_as, read_bytes
from segtrain.text import MAX_NAME, counted, printable

_MAX_BYTES = 256 << 20  # some two million lines
_QUOTED = re.compile(r'"[^"]*"')


class Row(NamedTuple):
    """One line of a list file: its number, counted from 1, and its two columns."""

    line: int
    image: str
    label: str


def list_file_rows(path: Path) -> tuple[list[Row], list[str]]:
    """The `image label` lines of a file, and the problems of its other lines.

    Columns are separated by a tab, else by a comma, else by blanks; names with blanks or commas can
    stand in double quotes. Blank lines and lines that begin with # do not count.
    """
    rows = []
    lines, problems = _read_lines(path)
    for number, text in lines:
        try:
            columns = _columns(text)
        except csv.Error as error:
            problems.append(f"{printable(path)}:{number}: {error}")
            continue
        if len(columns) == 2 and all(columns):
            rows.append(Row(number, *columns))
        else:
            found = counted(len(columns), "column", "columns")
            problems.append(
                f"{printable(path)}:{number}: expected image and label, found {found}; "
                "separate names that hold blanks by a tab or put them in double quotes"
            )
    return rows, problems


def list_file_words(path: Path) -> tuple[list[str], list[str]]:
    """The names in a file, one a line, and the problems of its other lines."""
    first_line: dict[str, int] = {}
    lines, problems = _read_lines(path)
    for number, name in lines:
        place, shown = f"{printable(path)}:{number}", f"'{printable(name, MAX_NAME)}'"
        if name.startswith(("/", "\\")) or ".." in name.split("/") or len(name.split()) != 1:
            problems.append(
                f"{place}: expected one image name without folder and suffix, "
                f"found {shown}; layout 'list' reads lines of an image and a label"
            )
        elif name in first_line:
            problems.append(f"{place}: {shown} is already on line {first_line[name]}")
        else:
            first_line[name] = number
    return list(first_line), problems


def path_problem(name: str) -> str:
    """Why `name` in a list file is refused; empty if it is relative and without `..`."""
    shown = printable(name, MAX_NAME)
    if not name.isprintable():
        return f"'{shown}': control characters are not allowed in names"
    if posixpath.isabs(name) or re.match(r"[A-Za-z]:[\\/]", name):
        return f"{shown}: expected a path relative to data.root"
    return f"{shown}: '..' is not allowed" if ".." in re.split(r"[\\/]", name) else ""


def _read_lines(path: Path) -> tuple[list[tuple[int, str]], list[str]]:
    """(number, stripped text) of the lines with content, and the problems of the others."""
    with os_errors_as(DataError, path):
        data = read_bytes(path, _MAX_BYTES)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{printable(path)}: the file is UTF-16; save it as UTF-8")
    lines, problems = [], []
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        try:
            text = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            problems.append(f"{printable(path)}:{number}: byte {error.start + 1} is not UTF-8")
            continue
        if "\0" in text:  # no file system takes such a name
            problems.append(f"{printable(path)}:{number}: holds a NUL byte")
        elif text and not text.startswith("#"):
            lines.append((number, text))
    return lines, problems


def _columns(text: str) -> list[str]:
    unquoted = _QUOTED.sub("", text)
    delimiter = "\t" if "\t" in unquoted else "," if "," in unquoted else " "
    row = next(csv.reader([text], delimiter=delimiter, skipinitialspace=True, strict=True))
    return [column.strip() for column in row]


# Shorter lists are read line by line: that takes less time than to list large folders.
_MIN_BYTES = 64 << 10
_CHUNK = 64 << 10

_FOLDER = r"((?:[\w-][\w.-]*/)*+)"
_LINE = (
    rf"^{_FOLDER}([\w-][\w.-]*\.(?i:png|jpe?g))(?: ++|\t|, *+)"
    rf"{_FOLDER}([\w-][\w.-]*\.(?i:png))\r?$"
)
_PLAIN = re.compile(_LINE, re.MULTILINE)
_PLAIN_ASCII = re.compile(_LINE, re.MULTILINE | re.ASCII)  # the same for ASCII text, and faster
_WITHOUT_PAIR = re.compile(r"^(?:#[^\r\n]*)?\r?$", re.MULTILINE)


class PairTable(Sequence[Pair]):
    """Pairs of image and label below one folder, in about 100 bytes each instead of a thousand.

    Each name is that of the image without its suffix.
    """

    def __init__(self, root: Path, images: Sequence[str], labels: Sequence[str]) -> None:
        """images, labels: paths relative to the root, normalized."""
        self._root = root
        self._text = bytearray()  # all paths, each image before its label
        self._ends = array("Q")  # of each path in it
        for path in chain.from_iterable(zip(images, labels, strict=True)):
            self._text += path.encode()
            self._ends.append(len(self._text))

    def __len__(self) -> int:
        return len(self._ends) // 2

    @overload
    def __getitem__(self, index: int) -> Pair: ...

    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...

    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        image, label = self._path(2 * row), self._path(2 * row + 1)
        return Pair(self._root / image, self._root / label, image.rpartition(".")[0])

    def _path(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return self._text[start : self._ends[index]].decode()


def plain_pairs(path: Path, root: Path) -> PairTable | None:
    """The pairs in a long list file of plain lines, whose files all exist below `root`, in order.

    Within seconds for a million lines. A line is plain if nothing about it needs a second look, as
    in `images/0001.jpg labels/0001.png`; `list_file_rows` takes other lines too, and says what is
    wrong with one.

    None: the list is short, or a line needs that look: it is not plain, its file is missing, or two
    images have one label, or one name but for the case of letters.
    """
    try:
        if not path.is_file() or path.stat().st_size < _MIN_BYTES:
            return None
        return _plain_table(path, root)
    except (OSError, UnicodeDecodeError):
        return None


def _plain_table(path: Path, root: Path) -> PairTable | None:
    images: list[str] = []
    labels: list[str] = []
    folders: set[str] = set()
    for text in _chunks(path):
        found = (_PLAIN_ASCII if text.isascii() else _PLAIN).findall(text)
        others = text.count("\n") + 1 - len(found)
        if others and others != len(_WITHOUT_PAIR.findall(text)):
            return None
        if found:
            image_folders, image_files, label_folders, label_files = zip(*found, strict=True)
            folders.update(image_folders, label_folders)
            images += map(add, image_folders, image_files)
            labels += map(add, label_folders, label_files)
    names = {image.casefold().rpartition(".")[0] for image in images}
    if not images or len(names) < len(images) or len(set(labels)) < len(labels):
        return None
    existing = {path for folder in folders for path in _files_in(root, folder)}
    is_plain = existing.issuperset(images) and existing.issuperset(labels)
    return PairTable(root, images, labels) if is_plain else None


def _files_in(root: Path, folder: str) -> Iterator[str]:
    with os.scandir(root / folder) as entries:
        yield from (folder + entry.name for entry in entries if entry.is_file())


def _chunks(path: Path) -> Iterator[str]:
    """The text of the file in pieces of whole lines, without the line feed at the end of each."""
    with path.open("rb") as file:
        start = file.read(3)
        file.seek(3 if start == b"\xef\xbb\xbf" else 0)
        while chunk := file.read(_CHUNK):
            yield (chunk + file.readline()).removesuffix(b"\n").decode()
