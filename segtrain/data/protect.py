"""Refuses to write where a data set is read: pictures there become data, or replace labels."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from segtrain.config import DataConfig
from segtrain.data.layouts import LAYOUTS
from segtrain.data.listfile import list_file_rows
from segtrain.errors import ConfigError, DataError


def check_run_directory(directory: Path, data: DataConfig) -> None:
    """Refuses a run in a folder that is searched for images or labels, to any depth.

    Raises:
        ConfigError: with the folder.
    """
    _check("--output", directory, [directory], _searched(data, _splits(data)), "runs/my")


def check_pictures(
    option: str, output: Path, names: Iterable[str], data: DataConfig, *, splits: Sequence[str] = ()
) -> None:
    """Refuses to write pictures where they would be read as data, or replace data.

    Args:
        option: of the command line, for the message.
        names: of the files to be written, relative to `output`.
        splits: further splits that are read.

    Raises:
        ConfigError: with the folder.
    """
    splits = [*_splits(data), *splits]
    targets = [output, *(output / above for above in {os.path.dirname(name) for name in names})]
    _check(option, output, targets, _searched(data, splits), "predictions")
    listed = {_real(folder): folder for folder in _listed(data, splits)}
    for target in targets:
        if folder := listed.get(_real(target)):
            raise _refusal(option, output, folder, "predictions")


def _check(
    option: str, output: Path, targets: Sequence[Path], folders: Sequence[Path], example: str
) -> None:
    for folder in folders:
        if any(_real(target).is_relative_to(_real(folder)) for target in targets):
            raise _refusal(option, output, folder, example)


def _refusal(option: str, output: Path, folder: Path, example: str) -> ConfigError:
    return ConfigError(
        f"{option} {output}: would write into {folder}, where images or labels of the data set "
        f"are read; choose a folder outside of it, such as {option} {example}"
    )


def _splits(data: DataConfig) -> list[str]:
    return [data.train_split, data.eval_split]


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _searched(data: DataConfig, splits: Sequence[str]) -> list[Path]:
    """The folders in which every file counts, to any depth."""
    root = Path(os.path.expanduser(data.root))
    found = []
    for split in splits:
        for name in LAYOUTS[data.layout].folders(root, data, split):
            folder = root / name
            # images_dir may be ".", and runs often lie in the data set's folder.
            holds_root = _real(root).is_relative_to(_real(folder))
            found.append(folder / split if holds_root else folder)
    return found


def _listed(data: DataConfig, splits: Sequence[str]) -> set[Path]:
    """The folders of the files that list files name; other files in them do not count."""
    root, folders = Path(os.path.expanduser(data.root)), set()
    for split in splits if data.layout == "list" else ():
        try:
            rows, _ = list_file_rows(root / split)
        except DataError:
            continue  # what cannot be read needs no protection
        folders |= {root / os.path.dirname(name) for row in rows for name in row[1:]}
    return folders
