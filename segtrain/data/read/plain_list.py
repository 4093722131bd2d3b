"""List files of a million plain lines, which are to be read within seconds.

A line is plain if nothing about it needs a second look, as in

    images/0001.jpg labels/0001.png

`data.read.lists` is the rule: it takes other lines too, and says what is wrong with a line.
This module only finds out that nothing is.
"""

import os
import re
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import add
from pathlib import Path
from typing import overload

from segtrain.data.read.find import Pair

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
    """The pairs in the list file `path`, whose files all exist below `root`, in its order.

    None: the list is short, or something needs a look at single lines: one that is not plain, a
    file that is missing, two images with one label, or with one name, if only but for the
    case of letters.
    """
    try:
        if not path.is_file() or path.stat().st_size < _MIN_BYTES:
            return None
        return _read(path, root)
    except (OSError, UnicodeDecodeError):
        return None


def _read(path: Path, root: Path) -> PairTable | None:
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
