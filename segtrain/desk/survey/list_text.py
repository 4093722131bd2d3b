"""Lists as text: a row a line, and tables with a column `split` or `fold`."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from segtrain.desk.survey.file_names import ROLE_WORDS, words_of
from segtrain.desk.survey.list_names import split_in

# numbers.csv with hundreds of folds has an id in its column `fold`.
_MOST_FOLDS = 20
# Longer text is the content of a picture or a path to nothing.
_MAX_NAME_CHARACTERS = 1000
SPLIT_COLUMNS = {"split", "set", "fold", "subset", "partition"}
_NAME_COLUMNS = {"image", "images", "img", "file", "filename", "name", "path"}
OTHER_FOLDS = "--val FILE names other images"


class ListRow(NamedTuple):
    """A line or an entry; text: all of it, as a name may have blanks and commas; "" of a table.

    split: train, val or test, if the file says it for this row. line: from 1; None in JSON, YAML
    and XML, where rows are no lines.
    """

    text: str
    cells: tuple[str, ...]
    split: str | None = None
    line: int | None = None


class ListFile(NamedTuple):
    """The rows of a file. header: the columns of a table, or nothing. note: what to say of it."""

    rows: tuple[ListRow, ...] = ()
    header: tuple[str, ...] = ()
    note: str = ""


def text_list(text: str, *, is_table: bool) -> ListFile:
    """The rows of a text; is_table: whether its suffix says a table, whose first line is a header.

    Empty lines and lines after `#` are no rows, but count as lines.
    """
    rows = list(_rows_of(text))
    if not (rows and _is_header(rows[0], is_table=is_table)):
        return ListFile(tuple(rows))
    header = rows[0].cells
    # The whole line of a table is no name, though it ends as its last cell does.
    rows = [x._replace(text="") if len(x.cells) == len(header) > 1 else x for x in rows[1:]]
    says = (j for j, cell in enumerate(header) if not SPLIT_COLUMNS.isdisjoint(words_of(cell)))
    column = next(says, None)
    if column is None:
        return ListFile(tuple(rows), header)
    values = [row.cells[column] if column < len(row.cells) else "" for row in rows]
    splits, note = _splits_of(values, is_fold="fold" in words_of(header[column]))
    rows = [row._replace(split=split) for row, split in zip(rows, splits, strict=True)]
    return ListFile(tuple(rows), header, note)


def list_row(text: str, cells: Iterable[str], split: str | None = None) -> ListRow:
    """A row with `/` between folders, and without quotes around names."""
    text, *parts = (x.strip().strip('"').replace("\\", "/") for x in (text, *cells))
    names = tuple(x if len(x) <= _MAX_NAME_CHARACTERS else "" for x in parts)
    return ListRow(text, names, split)


def columns_of(file: ListFile) -> list[int]:
    """The columns that may name images; first those that a header calls so, then ids."""
    width = max((len(row.cells) for row in file.rows), default=0)
    said = [{*words_of(cell)} for cell in file.header] + [set()] * width
    columns = [j for j in range(width) if SPLIT_COLUMNS.isdisjoint(said[j])]
    return sorted(columns, key=lambda j: (_NAME_COLUMNS.isdisjoint(said[j]), "id" not in said[j]))


def _rows_of(text: str) -> Iterator[ListRow]:
    for number, line in enumerate(text.splitlines(), start=1):
        # Not stripped: a table may have an empty cell first.
        if line.strip() and not line.lstrip().startswith("#"):
            yield list_row(line, _cells(line))._replace(line=number)


def _is_header(row: ListRow, *, is_table: bool) -> bool:
    """Whether it says what columns hold; a name alone, such as `img`, does so in tables only."""
    words = {word for cell in row.cells for word in words_of(cell)}
    known = SPLIT_COLUMNS | _NAME_COLUMNS | ROLE_WORDS | {"id"}
    is_plain = not re.search(r"[\d./]", row.text)
    return is_plain and not words.isdisjoint(known) and (is_table or len(row.cells) > 1)


def _cells(line: str) -> list[str]:
    cells = re.split(r"[\t,;]", line)
    return cells if len(cells) > 1 else line.split()


def _splits_of(values: Sequence[str], *, is_fold: bool) -> tuple[list[str | None], str]:
    """The split that each value says, and what to say; numbers of folds: the first one is val."""
    numbers = sorted({int(x) for x in values if x.isdecimal()})
    if is_fold and 1 < len(numbers) <= _MOST_FOLDS:
        splits = ["val" if x == str(numbers[0]) else "train" for x in values]
        return splits, f"fold {numbers[0]} of {len(numbers)} is evaluated on; {OTHER_FOLDS}"
    return [split_in(x) for x in values], ""
