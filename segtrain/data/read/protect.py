"""Refuses to write where a data set is read: pictures there would become data or replace labels."""

import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from segtrain.config import DataConfig
from segtrain.data.read.layouts import LAYOUTS, scan_layout, split_parts
from segtrain.errors import ConfigError, DataError
from segtrain.text import printable


def check_run_directory(directory: Path, data: DataConfig, *, example: str = "runs/my") -> None:
    """Refuses a run, or a pack, in a folder that is searched for images or labels, to any depth."""
    splits = [data.train_split, data.eval_split]
    _refuse("--output", directory, _searched(data, splits, {directory.resolve()}), example)


def check_pictures(
    option: str, output: Path, names: Iterable[str], data: DataConfig, *, splits: Sequence[str] = ()
) -> None:
    """Refuses to write pictures where they would be read as data, or replace data.

    option: of the command line, for the message.
    names: of the files to be written, relative to `output`.
    splits: further splits that are read.
    """
    splits = [data.train_split, data.eval_split, *splits]
    targets = {(output / above).resolve() for above in {"", *map(os.path.dirname, names)}}
    folders = [*_searched(data, splits, targets), *_listed(data, splits, targets)]
    _refuse(option, output, folders, "predictions")


def _refuse(option: str, output: Path, folders: Sequence[Path], example: str) -> None:
    if folders:
        raise ConfigError(
            f"{option} {printable(output)}: would write into {printable(folders[0])}, where images "
            f"or labels of the data set are read; choose a folder outside of it, such as {option} "
            f"{example}"
        )


def _searched(data: DataConfig, splits: Sequence[str], targets: Collection[Path]) -> list[Path]:
    """The folders that are searched to any depth and contain some of `targets`."""
    root = Path(os.path.expanduser(data.root))
    folders = []
    for split in (part for whole in splits for part in split_parts(data, whole)):
        for name in LAYOUTS[data.layout].folders(root, data, split):
            folder = root / name
            if root.resolve().is_relative_to(folder.resolve()):
                # images_dir may be ".", and runs often lie in the data set's folder.
                folder /= split
            if any(target.is_relative_to(folder.resolve()) for target in targets):
                folders.append(folder)
    return folders


def _listed(data: DataConfig, splits: Sequence[str], targets: Collection[Path]) -> list[Path]:
    """The folders among `targets` that hold files named by a list file."""
    # A list names single files: only their folders are at risk, not all that lies below these.
    folders: set[Path] = set()
    for split in splits if data.layout == "list" else ():
        with suppress(DataError):  # what cannot be read needs no protection
            pairs = scan_layout(data, split).pairs
            folders |= {path.parent for pair in pairs for path in (*pair.images, pair.label)}
    return [folder for folder in folders if folder.resolve() in targets]
