"""Where each image of a pack will lie, from the headers of the files."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import PIL
from pydantic import TypeAdapter

from segtrain import __version__
from segtrain.config import DataConfig
from segtrain.data.classes import ClassFile
from segtrain.data.dataset import SegDataset
from segtrain.data.decode import read_header
from segtrain.data.listing import Pair
from segtrain.data.pack.manifest import (
    FORMAT,
    Pack,
    PackedImage,
    PackedSplit,
    Shard,
    SourceFile,
    sha256_of,
    shard_header,
)
from segtrain.errors import DataError
from segtrain.text import printable

# Options of the section data, besides the splits, that say which files are read and how.
OPTIONS = ("layout", "images_dir", "labels_dir", "label_format")

# No shard is larger, unless one image is.
SHARD_BYTES = 1 << 30
# Reading headers waits for the disk, not for the processor.
_HEADER_THREADS = 16
# What is not known before the pixels are read.
_NO_HASH = "0" * 64
_CLASS_FILE = TypeAdapter(ClassFile)


def plan_pack(
    data: DataConfig,
    datasets: Sequence[SegDataset],
    warnings: Mapping[str, Sequence[str]],
) -> Pack:
    """The manifest of a pack of these splits; CRCs and hashes are still zero.

    warnings: what the check of each split has found odd, by its name.

    Raises:
        DataError: a header cannot be read.
    """
    splits = {dataset.split: _unplaced(dataset, data, warnings) for dataset in datasets}
    planned = Pack(
        FORMAT,
        _versions(),
        {name: getattr(data, name) for name in OPTIONS},
        _CLASS_FILE.dump_json(datasets[0].classes).decode(),
        datasets[0].classes.ignores_color,
        (),
        splits,
    )
    return _placed(planned)


def layout_hash(pack: Pack) -> str:
    """The SHA-256 of what must not change while a pack is made: which image lies where."""
    content = asdict(pack)
    for split in content["splits"].values():
        split["warnings"] = ()
        for image in split["images"]:
            image["crc"] = image["orientation"] = image["depth"] = 0
            image["image"], image["label"] = image["image"]["name"], image["label"]["name"]
    return sha256_of(content | {"made_by": None})


def excluded_names(data: DataConfig, split: str) -> tuple[str, ...]:
    """Which images `data` leaves out of `split`."""
    return tuple(sorted(data.train_exclude)) if split == data.train_split else ()


def source_name(path: Path, root: str) -> str:
    """The path of a file, relative to data.root if it lies below."""
    # The join adds a slash at the end.
    prefix = os.path.join(str(Path(os.path.expanduser(root))), "")
    return os.fspath(path).removeprefix(prefix)


def _versions() -> dict[str, str]:
    return {"segtrain": __version__, "opencv": cv2.__version__, "pillow": PIL.__version__}


def _unplaced(
    dataset: SegDataset, data: DataConfig, warnings: Mapping[str, Sequence[str]]
) -> PackedSplit:
    """The images of a split, each at offset 0 of shard 0."""
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        images = tuple(pool.map(partial(_look, root=data.root), dataset.pairs))
    odd = tuple(dict.fromkeys((*dataset.warnings, *warnings.get(dataset.split, ()))))
    return PackedSplit(excluded_names(data, dataset.split), odd, images)


def _look(pair: Pair, root: str) -> PackedImage:
    header = read_header(pair.image)
    sources = [_source(path, root) for path in (pair.image, pair.label)]
    return PackedImage(pair.name, *sources, *header.size, header.depth, header.orientation, 0, 0, 0)


def _source(path: Path, root: str) -> SourceFile:
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(f"{printable(path)}: {(error.strerror or '').lower()}") from error
    return SourceFile(source_name(path, root), found.st_size, found.st_mtime_ns, _NO_HASH)


def _placed(pack: Pack) -> Pack:
    """`pack` with its shards, in which neighbours lie beside each other."""
    groups: list[list[tuple[int, PackedImage]]] = []
    size = 0
    for number, image in enumerate(pack.images()):
        if not groups or size + image.num_bytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append((number, image))
        size += image.num_bytes
    placed: list[PackedImage] = []
    shards = []
    for i, group in enumerate(groups):
        offset = len(shard_header(group))
        for _, image in group:
            placed.append(replace(image, shard=i, offset=offset))
            offset += image.num_bytes
        shards.append(Shard(f"{i:05d}.safetensors", offset))
    return with_images(replace(pack, shards=tuple(shards)), placed)


def with_images(pack: Pack, images: Sequence[PackedImage]) -> Pack:
    """`pack` with other records of its images, in the order of `Pack.images`."""
    rest = iter(images)
    splits: dict[Any, PackedSplit] = {
        name: replace(split, images=tuple(next(rest) for _ in split.images))
        for name, split in pack.splits.items()
    }
    return replace(pack, splits=splits)
