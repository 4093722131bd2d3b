"""Opens a split of a pack if it is what the config asks for."""

import os
from pathlib import Path

from pydantic import ValidationError

from segtrain.config import DataConfig
from segtrain.data.class_file import class_file_from_json
from segtrain.data.classes import ClassFile
from segtrain.data.differences import class_differences
from segtrain.data.listing import Pair
from segtrain.data.pack.manifest import MANIFEST, Pack, PackedSplit, read_pack
from segtrain.data.pack.plan import OPTIONS, excluded_names
from segtrain.data.pack.reader import PackedDataset, Shards
from segtrain.data.pack.source import check_source
from segtrain.errors import ConfigError, DataError
from segtrain.text import printable


def open_packed(
    data: DataConfig,
    split: str,
    classes: ClassFile,
    *,
    quoted: bool = True,
    labelled: bool = True,
) -> PackedDataset:
    """The split in the pack `data.pack`, not yet read.

    quoted: whether messages may show lines of a text file that lists the split.
    labelled: False: every pixel of a label is ignored.

    Raises:
        ConfigError: the pack was made with other options, or does not hold the split.
        DataError: there is no pack, it is damaged, or its files have changed.
    """
    directory = Path(os.path.expanduser(data.pack))
    pack = read_pack(directory)
    packed = _split_of(pack, data, split)
    if changes := _other_options(pack, packed, data, split, classes, directory):
        listed = "\n  ".join(changes)
        raise ConfigError(
            f"data.pack: {printable(directory)} was made with other options\n  {listed}\n"
            "  make another pack with segtrain data pack, or read the files themselves "
            "(data.pack: null)"
        )
    state = check_source(data, split, packed.images, quoted=quoted, labelled=labelled)
    root = Path(os.path.expanduser(data.root))
    return PackedDataset(
        [Pair(root / x.image.name, root / x.label.name, x.name) for x in packed.images],
        classes,
        split=split,
        label_format=data.label_format,
        warnings=[*packed.warnings, *state.warnings],
        may_exclude=split == data.train_split,
        shards=Shards(directory, pack.shards),
        images=packed.images,
        labelled=labelled,
        source_is_there=state.is_there,
    )


def _split_of(pack: Pack, data: DataConfig, split: str) -> PackedSplit:
    packed = pack.splits.get(split)
    if packed is None:
        held = ", ".join(printable(repr(name)) for name in pack.splits)
        raise ConfigError(
            f"data.pack: {printable(data.pack)} holds no split {printable(repr(split))}, only "
            f"{held}; --set data.pack=null reads the files"
        )
    return packed


def _other_options(
    pack: Pack,
    packed: PackedSplit,
    data: DataConfig,
    split: str,
    classes: ClassFile,
    directory: Path,
) -> list[str]:
    """How the config differs from what the pack was made with: a line for each option."""
    changes = []
    pairs = {name: (pack.options.get(name), getattr(data, name)) for name in OPTIONS}
    pairs["train_exclude"] = (list(packed.excluded), list(excluded_names(data, split)))
    for name, (before, now) in pairs.items():
        if before != now:
            changes.append(f"data.{name}: {printable(before)} there, {printable(now)} now")
    if changes:
        return changes
    try:
        old = class_file_from_json(pack.classes)
    except (ValidationError, ConfigError):
        raise DataError(f"{printable(directory / MANIFEST)}: damaged class file") from None
    lines, _ = class_differences(old, classes, data.label_format)
    if data.label_format == "colors" and pack.ignores_color != classes.ignores_color:
        words = {True: "given", False: "not given"}
        lines.append(
            f"class file: ignore_color: {words[pack.ignores_color]} there, "
            f"{words[classes.ignores_color]} now"
        )
    return lines
