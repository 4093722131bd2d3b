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
from operator import add
from pathlib import Path
from typing import overload

import numpy as np

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

    def __init__(self, root: Path) -> None:
        self._root = root
        self._text = bytearray()  # all paths, each image before its label
        self._ends = array("Q")  # of each path in it

    def extend(self, images: Sequence[str], labels: Sequence[str]) -> None:
        """Appends pairs of paths relative to the root, normalized."""
        paths = [path for pair in zip(images, labels, strict=True) for path in pair]
        text = "".join(paths)
        encoded = paths if text.isascii() else [path.encode() for path in paths]
        ends = np.cumsum(np.fromiter(map(len, encoded), np.uint64, len(paths)))
        self._ends.frombytes((ends + np.uint64(len(self._text))).tobytes())
        self._text += text.encode()

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

    def _path(self, place: int) -> str:
        start = self._ends[place - 1] if place else 0
        return self._text[start : self._ends[place]].decode()


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
    table, folders = PairTable(root), set()
    # Hashes of 8 bytes stand for paths: a set of the paths would take ten times as much. Should two
    # paths have one hash, a missing file is found when it is opened.
    needed, names, used = [], [], []
    for text in _chunks(path):
        found = (_PLAIN_ASCII if text.isascii() else _PLAIN).findall(text)
        others = text.count("\n") + 1 - len(found)
        if others and others != len(_WITHOUT_PAIR.findall(text)):
            return None
        if not found:
            continue
        image_folders, image_files, label_folders, label_files = zip(*found, strict=True)
        images = list(map(add, image_folders, image_files))
        labels = list(map(add, label_folders, label_files))
        if not "".join(images + labels).isprintable():
            return None
        folders.update(image_folders, label_folders)
        used.append(_hashes(labels))
        needed += [_hashes(images), used[-1]]
        names.append(_hashes([image.casefold().rpartition(".")[0] for image in images]))
        table.extend(images, labels)
    if not names or not all(_are_different(np.concatenate(one)) for one in (names, used)):
        return None
    return table if _contains(_existing(root, folders), needed) else None


def _chunks(path: Path) -> Iterator[str]:
    """The text of the file in pieces of whole lines, without the line feed at the end of each."""
    with path.open("rb") as file:
        start = file.read(3)
        file.seek(3 if start == b"\xef\xbb\xbf" else 0)
        while chunk := file.read(_CHUNK):
            yield (chunk + file.readline()).removesuffix(b"\n").decode()


def _hashes(texts: Sequence[str]) -> np.ndarray:
    return np.fromiter(map(hash, texts), np.int64, len(texts))


def _are_different(hashes: np.ndarray) -> bool:
    hashes.sort()
    return bool((hashes[1:] != hashes[:-1]).all())


def _contains(existing: np.ndarray, needed: Sequence[np.ndarray]) -> bool:
    existing.sort()
    for hashes in needed:
        hashes.sort()  # in place: neighbours are found at neighbouring places
        places = np.searchsorted(existing, hashes).clip(max=len(existing) - 1)
        if not len(existing) or not (existing[places] == hashes).all():
            return False
    return True


def _existing(root: Path, folders: set[str]) -> np.ndarray:
    """Hashes of the files in `folders`."""
    found = [np.empty(0, np.int64)]
    for folder in folders:
        with os.scandir(root / folder) as entries:
            paths = [folder + e.name for e in entries if e.is_file()]
        found.append(_hashes(paths))
    return np.concatenate(found)
