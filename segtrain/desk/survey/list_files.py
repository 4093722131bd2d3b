"""Files that may be lists of images, each read as rows of names, perhaps with a split.

`list_text` reads text and tables. JSON and YOLO's data.yaml have lists below the word of a split;
nnU-Net's splits_final.json has such a pair of lists for each fold, CVAT's XML the subset of each
image, and a manifest of SageMaker Ground Truth, lines of JSON, its address and that of its label.
"""

import html
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from segtrain.config.strict_yaml import foreign_yaml
from segtrain.desk.survey.list_names import TEXT_SUFFIXES, split_in
from segtrain.desk.survey.list_text import (
    OTHER_FOLDS,
    SPLIT_COLUMNS,
    ListFile,
    ListRow,
    list_row,
    text_list,
)
from segtrain.desk.survey.names import decoded
from segtrain.files import parse_json, read_bytes

_MAX_BYTES = 64 << 20
# YAML is read a hundred times as slowly.
_MAX_YAML_BYTES = 1 << 20
# Below these, JSON has a list of images; COCO the first of them.
_KEYS_OF_LISTS = ("images", "files", "filenames", "names", "ids", "items", "samples", "data")


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
        if suffix == ".manifest":
            return ListFile(tuple(map(_of_ground_truth, text.splitlines())))
        if suffix in TEXT_SUFFIXES:
            return text_list(text, is_table=suffix in (".csv", ".tsv"))
        return _of_json(parse_json(text))
    return ListFile()


def _of_json(content: Any) -> ListFile:
    # nnU-Net has a list of folds; others name them.
    folds = [*content.values()] if isinstance(content, dict) else content
    if not (isinstance(folds, list) and folds and all(map(_is_fold, folds))):
        return ListFile(tuple(_rows_of_json(content, None)))
    note = f"the first of {len(folds)} folds is used; {OTHER_FOLDS}" if len(folds) > 1 else ""
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
        yield list_row(content, [content], split)
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
                yield list_row(key, [key], split_in(value))
        else:
            yield from _record(content, split)


def _record(record: Mapping[str, Any], split: str | None) -> Iterator[ListRow]:
    """An image as JSON has it: names are among its values, and perhaps its split."""
    texts = {key: value for key, value in record.items() if isinstance(value, str)}
    said = next((texts.pop(key) for key in SPLIT_COLUMNS & texts.keys()), "")
    if texts:
        yield list_row("", texts.values(), split_in(said) or split)


def _of_cvat(text: str) -> Iterator[ListRow]:
    """`<image name="1.jpg" subset="Train">`, if subsets are splits."""
    for tag in re.findall(r"<image\s([^>]*)>", text):
        said = {key: html.unescape(value) for key, value in re.findall(r'(\w+)="([^"]*)"', tag)}
        if (split := split_in(said.get("subset", ""))) and "name" in said:
            yield list_row(said["name"], [said["name"]], split)


def _of_ground_truth(line: str) -> ListRow:
    """`{"source-ref": "s3://photos/1.jpg", "job-ref": "s3://masks/0_2023.png"}`."""
    entry = parse_json(line)
    pairs = entry.items() if isinstance(entry, dict) else ()
    return list_row("", [str(x) for key, x in pairs if key.endswith("-ref")])


def _of_yolo(content: Any, folder: Path) -> Iterator[ListRow]:
    """`train:` and `val:` name folders or lists of images."""
    for split, said in _by_split(content):
        for name in said if isinstance(said, list) else [said]:
            if not isinstance(name, str | int) or isinstance(name, bool):
                continue
            name = str(name)
            inner = folder / name
            if inner.suffix.lower() in TEXT_SUFFIXES[:-1]:
                # Their lines are not those of data.yaml.
                rows = read_list(inner).rows
                yield from (row._replace(split=split, line=None) for row in rows)
            else:
                yield list_row(name, [name], split)
