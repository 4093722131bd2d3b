"""Text files that name images and labels: strict about what a line may hold.

Such files are downloaded and passed around, so no line may name a place outside the data set's
root. Links in that folder are followed, as in every layout: their owner has put them there.
"""

import csv
import posixpath
import re
from pathlib import Path
from typing import NamedTuple

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
        if text and not text.startswith("#"):
            lines.append((number, text))
    return lines, problems


def _columns(text: str) -> list[str]:
    unquoted = _QUOTED.sub("", text)
    delimiter = "\t" if "\t" in unquoted else "," if "," in unquoted else " "
    row = next(csv.reader([text], delimiter=delimiter, skipinitialspace=True, strict=True))
    return [column.strip() for column in row]
