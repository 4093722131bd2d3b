"""Opens a split of a pack, and compares it with the files that it was made from.

At each start: names and order, sizes and times. Where only the time differs, as after a
copy, the contents of a few files are compared; of many, a warning says how to compare them.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from segtrain.config import DataConfig
from segtrain.data.pack.fetching import fetch_shards
from segtrain.data.pack.index import (
    Pack,
    PackedFile,
    PackedImage,
    PackedSplit,
    check_shard,
    read_pack,
)
from segtrain.data.pack.reader import PackedDataset, Shards
from segtrain.data.pack.writer import OPTIONS, excluded_names, source_name
from segtrain.data.read.classes import (
    ClassFile,
    class_differences,
    class_file_from_json,
)
from segtrain.data.read.concurrent import IO_THREADS, prefetch
from segtrain.data.read.find import Pair, first_lines
from segtrain.data.read.image import form_of
from segtrain.data.read.label_formats import label_format_of, told_by
from segtrain.data.read.layouts import list_split, scan_layout
from segtrain.errors import ConfigError, DataError
from segtrain.files import os_errors_as
from segtrain.files.manifest import sha256_of
from segtrain.text import first_of, printable, scheme_of

_MAX_HASHED = 64
_GONE, _CHANGED, _TOUCHED = "gone since it was packed", "changed since it was packed", "touched"
_WAY_OUT = "delete the pack and make it again, or read the files themselves (data.pack: null)"


def has_content(path: Path, file: PackedFile) -> bool:
    """Whether the file at `path` has the bytes that were packed; DataError: it is unreadable."""
    with os_errors_as(DataError, path):
        return sha256_of(path) == file.sha256


def open_packed(
    data: DataConfig, split: str, classes: ClassFile, *, labelled: bool
) -> PackedDataset:
    """The images and labels of a split; see `data.read.opening.open_dataset`."""
    place = os.path.expanduser(data.pack)
    pack, sha256 = read_pack(place)
    packed = pack.splits.get(split)
    if packed is None:
        raise ConfigError(
            f"data.pack: {printable(data.pack)} holds no split {split!r}, only "
            f"{first_of(map(repr, pack.splits))}; --set data.pack=null reads the files"
        )
    if changes := _other_options(pack, packed, data, split, classes):
        listed = "\n  ".join(changes)
        raise ConfigError(
            f"data.pack: {printable(place)} was made with other options\n  {listed}\n"
            "  make another pack with segtrain data pack, or read the files themselves "
            "(data.pack: null)"
        )
    is_there, warnings = _check_source(data, split, packed.images, labelled=labelled)
    if scheme_of(place):
        # Only the shards that hold images of this split.
        directory = fetch_shards(place, pack, sha256, {image.shard for image in packed.images})
    else:
        directory = Path(place)
        for shard in pack.shards:
            check_shard(directory, shard)
    root = Path(os.path.expanduser(data.root))
    # From the manifest: the files whose headers would tell need not be here.
    known = {"dtype": np.dtype(pack.dtype), "bands": pack.bands, "scaling": pack.scaling}
    form = form_of(data)._replace(**known)
    return PackedDataset(
        [_pair(root, image) for image in packed.images],
        classes,
        split=split,
        form=form,
        label_format=data.label_format,
        warnings=[*packed.warnings, *warnings],
        may_exclude=split == data.train_split,
        shards=Shards(directory, pack.shards),
        images=packed.images,
        labelled=labelled,
        source_is_there=is_there,
    )


def _pair(root: Path, packed: PackedImage) -> Pair:
    first, *bands = (root / file.name for file in packed.images)
    return Pair(first, root / packed.label.name, packed.name, tuple(bands))


def _other_options(
    pack: Pack, packed: PackedSplit, data: DataConfig, split: str, classes: ClassFile
) -> list[str]:
    """How the config differs from what the pack was made with: a line for each option."""
    pairs = {f"data.{name}": (pack.options.get(name), getattr(data, name)) for name in OPTIONS}
    pairs["data.train_exclude"] = list(packed.excluded), list(excluded_names(data, split))
    if label_format_of(data.label_format).needs_colors:
        pairs["class file: gives ignore_color"] = pack.ignores_color, classes.ignores_color
    changes = [
        f"{name}: {printable(before)} there, {printable(now)} now"
        for name, (before, now) in pairs.items()
        if before != now
    ]
    # Only differences that change the labels count, not those in colours of pictures.
    old = class_file_from_json(pack.classes)
    return changes + class_differences(old, classes, told_by(data.label_format))[0]


def _check_source(
    data: DataConfig, split: str, images: Sequence[PackedImage], *, labelled: bool
) -> tuple[bool, list[str]]:
    """Compares the files in data.root with those that were packed.

    Returns whether they are there, and warnings. If data.root holds no images of this split,
    nothing is compared: a pack is enough to train.

    Raises:
        DataError: files were changed, added or removed, or their order is another.
    """
    root = Path(os.path.expanduser(data.root))
    pack = f"data.pack {printable(data.pack)}"
    sources = [file for image in images for file in (image.files if labelled else image.images)]
    paths = [root / file.name for file in sources]
    states = list(prefetch(_state, zip(paths, sources, strict=True), IO_THREADS))
    # All of them: the pack was taken along without its files.
    if set(states) == {_GONE}:
        what = f"{pack}: its files are not in data.root {printable(data.root)}"
        if _has_images(data, split):
            # Other images in their place: either data.root or the pack is the wrong one.
            raise DataError(f"{what}, which holds others; {_WAY_OUT}")
        return False, [f"{what}: changes since they were packed are not noticed"]
    by_state = defaultdict(list)
    for path, file, state in zip(paths, sources, states, strict=True):
        by_state[state].append((path, file))
    touched = by_state[_TOUCHED]
    if len(touched) <= _MAX_HASHED:
        # Another time may come from a copy. Only other bytes are a change.
        by_state[_CHANGED] += [file for file in touched if not has_content(*file)]
        touched = []
    problems = [f"{printable(p)}: {what}" for what in (_GONE, _CHANGED) for p, _ in by_state[what]]
    if labelled and not problems:
        # Files that were added show only when the split is listed again.
        problems = _other_names(data, split, images)
    if problems:
        raise DataError(first_lines(f"{pack}, split {split!r}: {_WAY_OUT}", problems))
    if not touched:
        return True, []
    what = f"{pack}: {len(touched)} files have other times than when they were packed"
    return True, [f"{what}, as after a copy; segtrain data check compares them"]


def _state(file_now_and_then: tuple[Path, PackedFile]) -> str:
    """How the file at a path differs, without reading it, from the one that was packed."""
    path, file = file_now_and_then
    try:
        now = os.stat(path)
    except OSError:
        return _GONE
    if now.st_size != file.num_bytes:
        return _CHANGED
    return "" if now.st_mtime_ns == file.mtime_ns else _TOUCHED


def _has_images(data: DataConfig, split: str) -> bool:
    """Whether data.root holds the split, of whatever images."""
    try:
        return bool(scan_layout(data, split, labelled=False).pairs)
    except DataError:
        return False


def _other_names(data: DataConfig, split: str, images: Sequence[PackedImage]) -> list[str]:
    """How the split, listed now, differs from `images`."""
    now = [
        (pair.name, *(source_name(path, data.root) for path in (*pair.images, pair.label)))
        for pair in list_split(data, split).pairs
    ]
    packed = [(image.name, *(file.name for file in image.files)) for image in images]
    if now == packed:
        return []
    changed = sorted({name for name, *_ in set(now) ^ set(packed)})
    return [f"{printable(name)}: added, removed or of other files since" for name in changed] or [
        "the images have another order now"
    ]
