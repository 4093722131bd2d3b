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
from functools import cache
from itertools import chain
from pathlib import Path

from segtrain.data.read.find import (
    IMAGE_SUFFIXES,
    LABEL_SUFFIX,
    Listing,
    Pair,
    case_clashes,
    there_are,
)
from segtrain.errors import DataError
from segtrain.files import os_errors_as, read_bytes
from segtrain.text import MAX_NAME, counted, first_of, printable

_MAX_BYTES = 256 << 20  # some two million lines
_QUOTED = re.compile(r'"[^"]*"')


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

    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        image, label = self._path(2 * row), self._path(2 * row + 1)
        return Pair(self._root / image, self._root / label, image.rpartition(".")[0])

    def _path(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return self._text[start : self._ends[index]].decode()


def list_pairs(path: Path, root: Path) -> Listing:
    """The images and labels that the list file at `path` names, in its order.

    Raises:
        DataError: there is no such file, or it is no text.
    """
    if not path.is_file():
        texts = sorted(file.name for suffix in ("txt", "csv") for file in root.glob(f"*.{suffix}"))
        raise DataError(f"{printable(path)}: no such list file; {there_are('text files', texts)}")
    images: dict[str, tuple[str, int]] = {}  # path and line, by name
    labels: list[str] = []
    first_user: dict[str, str] = {}  # of each label
    problems, shared = [], []

    @cache
    def files_in(folder: str) -> set[str]:
        # One look at a folder takes less time than a look for each of its files.
        try:
            with os.scandir(root / folder) as entries:
                return {entry.name for entry in entries if entry.is_file()}
        except OSError:
            return set()

    def file_problem(name: str, suffixes: tuple[str, ...]) -> str:
        folder, file = posixpath.split(name)
        if not file.lower().endswith(suffixes):
            return f"{printable(name)}: expected a file {' '.join(suffixes)}"
        # Some disks hold a name in other letters than they list it.
        if file not in files_in(folder) and not os.path.isfile(root / name):
            return f"{printable(name)}: no such file below {printable(root)}"
        return ""

    for line, text in _lines(path):
        image, label, problem = _image_and_label(text)
        problem = problem or file_problem(image, IMAGE_SUFFIXES)
        problem = problem or file_problem(label, (LABEL_SUFFIX,))
        name = image.rpartition(".")[0]
        if not problem and name in images:
            other, first = images[name]
            both = f"{printable(root / other)} and {printable(root / image)} have one name"
            same = f"{printable(image)}: already on line {first}"
            problem = same if image == other else f"{both}; rename one"
        if problem:
            problems.append(f"{printable(path)}:{line}: {problem}")
            continue
        images[name] = image, line
        labels.append(label)
        if name != (user := first_user.setdefault(label, name)):
            shared.append(f"{root / label} by {user} and {name}")
    # As a rule a line was copied and changed in one column.
    notes = [f"labels are used by several images: {first_of(shared, 3)}"] if shared else []
    pairs = PairTable(root, [image for image, _ in images.values()], labels)
    return Listing(pairs, problems, case_clashes(images), notes=notes)


def list_file_words(path: Path) -> tuple[list[str], list[str]]:
    """The names in a file, one a line, and the problems of its other lines."""
    first_line: dict[str, int] = {}
    problems = []
    for number, name in _lines(path):
        place, shown = f"{printable(path)}:{number}", f"'{printable(name, MAX_NAME)}'"
        if name.startswith(("/", "\\")) or ".." in name.split("/") or len(name.split()) != 1:
            problems.append(
                f"{place}: expected one image name without folder and suffix, found {shown}; "
                "layout 'list' reads lines of an image and a label"
            )
        elif name in first_line:
            problems.append(f"{place}: {shown} is already on line {first_line[name]}")
        else:
            first_line[name] = number
    return list(first_line), problems


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and stripped text of each line with content that does not begin with #.

    Bytes that are not UTF-8 become surrogates.
    """
    with os_errors_as(DataError, path):
        data = read_bytes(path, _MAX_BYTES)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{printable(path)}: the file is UTF-16; save it as UTF-8")
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        text = raw.decode("utf-8", "surrogateescape").strip()
        if text and not text.startswith("#"):
            yield number, text


def _image_and_label(text: str) -> tuple[str, str, str]:
    """The columns of a line, normalized, and why it is refused, or empty.

    Columns are separated by a tab, else by a comma, else by blanks; names with blanks or commas can
    stand in double quotes.
    """
    unquoted = _QUOTED.sub("", text)
    delimiter = "\t" if "\t" in unquoted else "," if "," in unquoted else " "
    reader = csv.reader([text], delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        columns = [column.strip() for column in next(reader)]
    except csv.Error as error:
        return "", "", str(error)
    if len(columns) != 2 or not all(columns):
        found = counted(len(columns), "column", "columns")
        problem = (
            f"expected image and label, found {found}; "
            "separate names that hold blanks by a tab or put them in double quotes"
        )
        return "", "", problem
    image, label = columns
    problem = _path_problem(image) or _path_problem(label)
    return posixpath.normpath(image), posixpath.normpath(label), problem


def _path_problem(name: str) -> str:
    """Why `name` in a list file is refused; empty if it is relative and without `..`."""
    if not name.isprintable():
        what = "control characters and bytes that are not UTF-8 are not allowed in names"
    elif name.startswith("/") or name[1:3] in (":\\", ":/"):
        what = "expected a path relative to data.root"
    elif ".." in name.replace("\\", "/").split("/"):
        what = "'..' is not allowed"
    else:
        return ""
    return f"'{printable(name, MAX_NAME)}': {what}"
