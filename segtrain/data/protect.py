"""Refuses to write where a data set is read: pictures there become data, or replace labels."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from segtrain.config import DataConfig
from segtrain.data.listfile import list_file_rows
from segtrain.errors import ConfigError, DataError

_KINDS = {
    "cityscapes": ("leftImg8bit", "gtFine", "gtCoarse"),
    "camvid": ("images", "labels"),
    "voc": ("JPEGImages", "SegmentationClass", "SegmentationClassAug", "ImageSets"),
    "ade20k": ("images", "annotations"),
}
_PREDICTIONS = "predictions"


def check_run_directory(directory: Path, data: DataConfig) -> None:
    """Refuses a run in a folder that is searched for images or labels, to any depth.

    Raises:
        ConfigError: with the folder.
    """
    _check("--output", directory, [directory], _searched(data, _splits(data)), "runs/my")


def check_pictures(
    option: str, output: Path, names: Iterable[str], data: DataConfig, *, splits: Sequence[str] = ()
) -> None:
    """Refuses to write pictures where they would be read as data, or replace what is.

    Args:
        option: of the command line, for the message.
        names: of the files to be written, relative to `output`.
        splits: further splits that are read.

    Raises:
        ConfigError: with the folder.
    """
    every = [*_splits(data), *splits]
    targets = [output, *(output / above for above in {os.path.dirname(name) for name in names})]
    _check(option, output, targets, _searched(data, every), _PREDICTIONS)
    listed = {os.path.realpath(folder): folder for folder in _listed(data, every)}
    for target in targets:
        if folder := listed.get(os.path.realpath(target)):
            raise ConfigError(_refusal(option, output, folder, _PREDICTIONS))


def _check(
    option: str, output: Path, targets: Sequence[Path], folders: Sequence[Path], example: str
) -> None:
    for folder in folders:
        place = Path(os.path.realpath(folder))
        if any(Path(os.path.realpath(target)).is_relative_to(place) for target in targets):
            raise ConfigError(_refusal(option, output, folder, example))


def _refusal(option: str, output: Path, folder: Path, example: str) -> str:
    return (
        f"{option} {output}: would write into {folder}, where images or labels of the data set "
        f"are read; choose a folder outside of it, such as {option} {example}"
    )


def _splits(data: DataConfig) -> list[str]:
    return [data.train_split, data.eval_split]


def _root(data: DataConfig) -> Path:
    return Path(os.path.expanduser(data.root))


def _searched(data: DataConfig, splits: Sequence[str]) -> list[Path]:
    """The folders in which every file counts, to any depth."""
    root = _root(data)
    kinds = [root / kind for kind in _KINDS.get(data.layout, ())]
    if data.layout == "folders":
        kinds = [root / data.images_dir, root / data.labels_dir]
    if data.layout == "camvid" and not kinds[0].is_dir():
        kinds = [root / (split + end) for split in splits for end in ("", "annot")]
    found = []
    for kind in kinds:
        # images_dir may be ".", and the runs often lie in the data set's folder.
        whole = Path(os.path.realpath(root)).is_relative_to(os.path.realpath(kind))
        found += [kind / split for split in splits] if whole else [kind]
    return found


def _listed(data: DataConfig, splits: Sequence[str]) -> set[Path]:
    """The folders of the files that the list files name; other files in them do not count."""
    root, folders = _root(data), set()
    for split in splits if data.layout == "list" else ():
        try:
            rows, _ = list_file_rows(root / split)
        except DataError:
            continue  # what is not read needs no protection
        folders |= {root / os.path.dirname(name) for row in rows for name in row[1:]}
    return folders
