"""Files that may be lists of images, each read as rows of names, perhaps with a split.

Text has a row a line, tables have a column `split` or `fold`; JSON and YOLO's data.yaml have lists
below the word of a split; nnU-Net's splits_final.json has such a pair of lists for each fold, and
CVAT's XML the subset of each image.
"""

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from segtrain.config.strict_yaml import foreign_yaml
from segtrain.desk.survey.file_names import ROLE_WORDS, split_of, words_of
from segtrain.desk.survey.names import decoded
from segtrain.files import parse_json, read_bytes

_TEXT = (".txt", ".csv", ".tsv", ".lst", ".list", "")
SUFFIXES = (*_TEXT, ".json", ".yaml", ".yml", ".xml")
# YAML is read a hundred times as slowly.
_MAX_BYTES, _MAX_YAML_BYTES = 64 << 20, 1 << 20
_LIST_WORDS = {"list", "lists", "filelist", "files", "names", "ids", "pairs", "set"}
_LIST_WORDS |= {"split", "splits"}
_FOLD = re.compile(r"(fold|cv)s?\d*")
_MOST_FOLDS = 20
# More files of one form, or in one folder, are of single images.
_MOST_ALIKE = 20
# Longer text is the content of a picture or a path to nothing.
_MAX_NAME = 1000
_SPLIT_COLUMNS = {"split", "set", "fold", "subset", "partition"}
_NAME_COLUMNS = {"image", "images", "img", "file", "filename", "name", "path"}
_OTHERS = "--val FILE names other images"
# Below these, JSON has a list of images; COCO the first of them.
_KEYS_OF_LISTS = ("images", "files", "filenames", "names", "ids", "items", "samples", "data")


class ListRow(NamedTuple):
    """A line or an entry; text: all of it, as a name may have blanks and commas.

    split: train, val or test, if the file says it for this row.
    """

    text: str
    cells: tuple[str, ...]
    split: str | None = None


class ListFile(NamedTuple):
    """The rows of a file. header: the columns of a table, or nothing. note: what to say of it."""

    rows: tuple[ListRow, ...] = ()
    header: tuple[str, ...] = ()
    note: str = ""


def is_called_list(path: str) -> bool:
    """Whether the name says a list and nothing else: `train.txt`, `val_list.csv`, `fold_0.txt`."""
    words = words_of(PurePosixPath(path).stem)
    others = other_words(path)
    if any(map(_FOLD.fullmatch, words)):
        others = [x for x in others if not (x.isdecimal() or _FOLD.fullmatch(x))]
    return not others and any(x not in ROLE_WORDS for x in words)


def other_words(path: str) -> list[str]:
    """The words of a name beside those of splits, lists and images: `cat` of `cat_train.txt`."""
    words = words_of(PurePosixPath(path).stem)
    known = _LIST_WORDS | ROLE_WORDS
    return [word for word in words if not split_of(word) and word not in known]


def is_called_fold(path: str) -> bool:
    """Whether the name says a fold by its number, and no split: `fold_0.txt`."""
    stem = PurePosixPath(path).stem
    says_fold = any(map(_FOLD.fullmatch, words_of(stem))) and re.search(r"\d", stem)
    return bool(says_fold) and is_called_list(path) and split_in(path) is None


def split_in(text: str) -> str | None:
    """The split that a word, a key or the name of a list says; None: none, or other things too."""
    return said_split(text) if is_called_list(text) else None


def said_split(path: str) -> str | None:
    """The first split among the words of a name: of `instances_val2017.json` val."""
    splits = [split for word in words_of(PurePosixPath(path).stem) if (split := split_of(word))]
    # train_val.txt is to train on, as trainval.txt is.
    return "train" if {*splits} == {"train", "val"} else next(iter(splits), None)


def list_files(paths: Iterable[str], pictures: Iterable[str]) -> list[str]:
    """The files among `paths` that may be lists of images, without reading them.

    A file for each picture is none: it is called as the picture, or as many others are.
    """
    stems = {PurePosixPath(picture).stem.lower() for picture in pictures}
    maybe = []
    for path in paths:
        place = PurePosixPath(path)
        if place.suffix.lower() not in SUFFIXES:
            continue
        # Of files without a suffix only those that are called so: no LICENSE, no Makefile.
        if is_called_list(path) or (place.suffix and place.stem.lower() not in stems):
            maybe.append(path)
    forms = {path: re.sub(r"\d+", "0", path) for path in maybe}
    alike = Counter(forms.values())
    beside = Counter(PurePosixPath(path).parent for path in maybe)
    return [
        path
        for path in maybe
        if is_called_list(path)
        or max(alike[forms[path]], beside[PurePosixPath(path).parent]) <= _MOST_ALIKE
    ]


def read_list(path: Path) -> ListFile:
    """The rows of a file, with `/` between folders; none, if it is no list or unreadable."""
    with suppress(OSError, ValueError, RecursionError):
        suffix = path.suffix.lower()
        is_yaml = suffix in (".yaml", ".yml")
        text = decoded(read_bytes(path, _MAX_YAML_BYTES if is_yaml else _MAX_BYTES))
        if is_yaml:
            return ListFile(tuple(_of_yolo(foreign_yaml(text), path.parent)))
        if suffix == ".xml":
            return ListFile(tuple(_of_cvat(text)))
        if suffix in _TEXT:
            return _of_text(text, is_table=suffix in (".csv", ".tsv"))
        return _of_json(parse_json(text))
    return ListFile()


def columns_of(file: ListFile) -> list[int]:
    """The columns that may name images; first those that a header calls so, then ids."""
    width = max((len(row.cells) for row in file.rows), default=0)
    said = [{*words_of(cell)} for cell in file.header] + [set()] * width
    columns = [j for j in range(width) if _SPLIT_COLUMNS.isdisjoint(said[j])]
    return sorted(columns, key=lambda j: (_NAME_COLUMNS.isdisjoint(said[j]), "id" not in said[j]))


def _of_text(text: str, *, is_table: bool) -> ListFile:
    # Not stripped: a table may have an empty cell first.
    lines = [x for x in text.splitlines() if x.strip() and not x.lstrip().startswith("#")]
    rows = [_row(line, _cells(line)) for line in lines]
    if not (rows and _is_header(rows[0], is_table=is_table)):
        return ListFile(tuple(rows))
    header, rows = rows[0].cells, rows[1:]
    says = (j for j, cell in enumerate(header) if not _SPLIT_COLUMNS.isdisjoint(words_of(cell)))
    column = next(says, None)
    if column is None:
        return ListFile(tuple(rows), header)
    values = [row.cells[column] if column < len(row.cells) else "" for row in rows]
    splits, note = _splits_of(values, is_fold="fold" in words_of(header[column]))
    rows = [row._replace(split=split) for row, split in zip(rows, splits, strict=True)]
    return ListFile(tuple(rows), header, note)


def _is_header(row: ListRow, *, is_table: bool) -> bool:
    """Whether it says what columns hold; a name alone, such as `img`, does so in tables only."""
    words = {word for cell in row.cells for word in words_of(cell)}
    known = _SPLIT_COLUMNS | _NAME_COLUMNS | ROLE_WORDS | {"id"}
    is_plain = not re.search(r"[\d./]", row.text)
    return is_plain and not words.isdisjoint(known) and (is_table or len(row.cells) > 1)


def _cells(line: str) -> list[str]:
    cells = re.split(r"[\t,;]", line)
    return cells if len(cells) > 1 else line.split()


def _row(text: str, cells: Iterable[str], split: str | None = None) -> ListRow:
    text, *parts = (x.strip().strip('"').replace("\\", "/") for x in (text, *cells))
    return ListRow(text, tuple(x if len(x) <= _MAX_NAME else "" for x in parts), split)


def _splits_of(values: Sequence[str], *, is_fold: bool) -> tuple[list[str | None], str]:
    """The split that each value says, and what to say; numbers of folds: the first one is val."""
    numbers = sorted({int(x) for x in values if x.isdecimal()})
    if is_fold and 1 < len(numbers) <= _MOST_FOLDS:
        splits = ["val" if x == str(numbers[0]) else "train" for x in values]
        return splits, f"fold {numbers[0]} of {len(numbers)} is evaluated on; {_OTHERS}"
    return [split_in(x) for x in values], ""


def _of_json(content: Any) -> ListFile:
    # nnU-Net has a list of folds; others name them.
    folds = [*content.values()] if isinstance(content, dict) else content
    if not (isinstance(folds, list) and folds and all(map(_is_fold, folds))):
        return ListFile(tuple(_rows_of_json(content, None)))
    note = f"the first of {len(folds)} folds is used; {_OTHERS}" if len(folds) > 1 else ""
    return ListFile(tuple(_rows_of_json(folds[0], None)), (), note)


def _is_fold(content: Any) -> bool:
    return {"train", "val"} <= {split for split, _ in _by_split(content)}


def _by_split(content: Any) -> list[tuple[str, Any]]:
    """Words of splits, and what stands below them."""
    pairs = content.items() if isinstance(content, dict) else ()
    return [(split, value) for key, value in pairs if (split := split_in(key))]


def _rows_of_json(content: Any, split: str | None) -> Iterator[ListRow]:
    """split: what is said above."""
    if isinstance(content, str):
        yield _row(content, [content], split)
    elif isinstance(content, list):
        for item in content:
            yield from _rows_of_json(item, split)
    elif isinstance(content, dict):
        if inner := _by_split(content):
            for word, value in inner:
                yield from _rows_of_json(value, word)
        elif lists := [
            content[key] for key in _KEYS_OF_LISTS if isinstance(content.get(key), list)
        ]:
            yield from _rows_of_json(lists[0], split)
        elif content and all(isinstance(x, str) and split_in(x) for x in content.values()):
            for key, value in content.items():  # a split for each name
                yield _row(key, [key], split_in(value))
        else:
            yield from _record(content, split)


def _record(record: Mapping[str, Any], split: str | None) -> Iterator[ListRow]:
    """An image as JSON has it: names are among its values, and perhaps its split."""
    texts = {key: value for key, value in record.items() if isinstance(value, str)}
    said = next((texts.pop(key) for key in _SPLIT_COLUMNS & texts.keys()), "")
    if texts:
        yield _row("", texts.values(), split_in(said) or split)


def _of_cvat(text: str) -> Iterator[ListRow]:
    """`<image name="1.jpg" subset="Train">`, if subsets are splits."""
    for tag in re.findall(r"<image\s([^>]*)>", text):
        said = {key: html.unescape(value) for key, value in re.findall(r'(\w+)="([^"]*)"', tag)}
        if (split := split_in(said.get("subset", ""))) and "name" in said:
            yield _row(said["name"], [said["name"]], split)


def _of_yolo(content: Any, folder: Path) -> Iterator[ListRow]:
    """`train:` and `val:` name folders or lists of images."""
    for split, said in _by_split(content):
        for name in said if isinstance(said, list) else [said]:
            if not isinstance(name, str | int) or isinstance(name, bool):
                continue
            name = str(name)
            inner = folder / name
            if inner.suffix.lower() in _TEXT[:-1]:
                yield from (row._replace(split=split) for row in read_list(inner).rows)
            else:
                yield _row(name, [name], split)
