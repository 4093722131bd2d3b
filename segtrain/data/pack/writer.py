"""Makes a pack: lays its shards out, then fills them.

The file `unfinished` stands in the folder until all is there, and the manifest comes last. So
whatever stops the work, no half pack can be opened; the next run begins again from nothing.
"""

import hashlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import cv2
import PIL
from pydantic import TypeAdapter

from segtrain import __version__, files
from segtrain.config import DataConfig
from segtrain.data.pack.manifest import (
    FORMAT,
    MANIFEST,
    UNFINISHED,
    Pack,
    PackedImage,
    PackedSplit,
    Shard,
    SourceFile,
    checksum,
    to_json,
)
from segtrain.data.pack.reader import packed_rows
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.concurrent import for_each_pair
from segtrain.data.read.dataset import SegDataset, size_problem
from segtrain.data.read.decode import decode_image, read_bytes, read_header
from segtrain.data.read.find import Pair, first_lines
from segtrain.data.read.labels import decode_label
from segtrain.distributed.signals import die_with_parent
from segtrain.errors import DataError, ExecutionError
from segtrain.text import printable

# The options of the section `data`, besides the splits, that say which files are read and how.
OPTIONS = ("layout", "images_dir", "labels_dir", "label_format")

# No shard is larger, unless one image is.
SHARD_BYTES = 1 << 30
# Reading headers waits for the disk, not for the processor.
_HEADER_THREADS = 16
# What is not known before the pixels are read.
_NO_HASH = "0" * 64
_CLASS_FILE = TypeAdapter(ClassFile)
_METADATA = {
    "format": f"segtrain pack {FORMAT}",
    "rows": "(H, 4 W) uint8: W pixels of RGB, then W train ids, 255 is ignored",
}
# Data begins on a page.
_ALIGNMENT = 4096


def plan_pack(
    data: DataConfig, datasets: Sequence[SegDataset], warnings: Mapping[str, Sequence[str]]
) -> Pack:
    """The manifest of a pack of these splits; CRCs and hashes are still zero.

    warnings: what the check of each split has found odd, by its name.

    Raises:
        DataError: a header cannot be read.
    """
    pairs = [pair for dataset in datasets for pair in dataset.pairs]
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        images, shards = _placed(list(pool.map(partial(_unplaced, root=data.root), pairs)))
    rest = iter(images)
    classes = datasets[0].classes
    return Pack(
        format=FORMAT,
        made_by={"segtrain": __version__, "opencv": cv2.__version__, "pillow": PIL.__version__},
        options={name: getattr(data, name) for name in OPTIONS},
        classes=_CLASS_FILE.dump_json(classes).decode(),
        ignores_color=classes.ignores_color,
        shards=tuple(shards),
        splits={
            dataset.split: PackedSplit(
                excluded_names(data, dataset.split),
                tuple(dict.fromkeys((*dataset.warnings, *warnings[dataset.split]))),
                tuple(islice(rest, len(dataset))),
            )
            for dataset in datasets
        },
    )


def excluded_names(data: DataConfig, split: str) -> tuple[str, ...]:
    """Which images `data` leaves out of `split`."""
    return tuple(sorted(data.train_exclude)) if split == data.train_split else ()


def source_name(path: Path, root: str) -> str:
    """The path of a file, relative to data.root if it lies below."""
    # The join adds a slash at the end.
    prefix = os.path.join(str(Path(os.path.expanduser(root))), "")
    return os.fspath(path).removeprefix(prefix)


def _unplaced(pair: Pair, root: str) -> PackedImage:
    """The record of an image, as far as the headers tell, at offset 0 of shard 0."""

    def source(path: Path) -> SourceFile:
        found = os.stat(path)
        return SourceFile(source_name(path, root), found.st_size, found.st_mtime_ns, _NO_HASH)

    header = read_header(pair.image)
    height, width = header.size
    return PackedImage(
        pair.name,
        image=source(pair.image),
        label=source(pair.label),
        height=height,
        width=width,
        depth=header.depth,
        orientation=header.orientation,
        shard=0,
        offset=0,
        crc=0,
    )


def _placed(images: Sequence[PackedImage]) -> tuple[list[PackedImage], list[Shard]]:
    """The images at their places, neighbours beside each other, and the shards they lie in."""
    groups: list[list[tuple[int, PackedImage]]] = []
    size = 0
    for number, image in enumerate(images):
        if not groups or size + image.num_bytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append((number, image))
        size += image.num_bytes
    placed, shards = [], []
    for i, group in enumerate(groups):
        offset = len(_shard_header(group))
        for _, image in group:
            placed.append(replace(image, shard=i, offset=offset))
            offset += image.num_bytes
        shards.append(Shard(f"{i:05d}.safetensors", offset))
    return placed, shards


def _shard_header(numbered: Sequence[tuple[int, PackedImage]]) -> bytes:
    """The first bytes of a shard with these images, each with its number in the pack."""
    tensors: dict[str, Any] = {"__metadata__": _METADATA}
    start = 0
    for number, image in numbered:
        stop = start + image.num_bytes
        tensors[f"{number:07d}"] = {
            "dtype": "U8",
            "shape": list(image.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def remove_unfinished(directory: Path) -> bool:
    """Removes the shards of a run that was interrupted; returns whether there was one.

    Raises:
        DataError: `directory` holds something else.
    """
    if (directory / UNFINISHED).exists():
        for shard in directory.glob("[0-9]*.safetensors"):
            shard.unlink()
        return True
    if other := sorted(x.name for x in directory.iterdir() if not x.name.startswith(".")):
        raise DataError(
            f"{printable(directory)}: holds {printable(other[0])}, which is no pack; choose "
            "an empty folder by --output"
        )
    return False


def write_pack(
    directory: Path,
    planned: Pack,
    datasets: Sequence[SegDataset],
    pool: ProcessPoolExecutor | None,
) -> None:
    """Writes the pack that is `planned` into an empty folder.

    Raises:
        DataError: images or labels that cannot be used, after all others are written.
        ExecutionError: the disk is full, a file cannot be written, or a process was killed.
    """
    with files.os_errors_as(ExecutionError, directory, "the pack cannot be written"):
        (directory / UNFINISHED).touch()
        _lay_out(directory, planned)
        filled = iter(_filled(directory, planned, datasets, pool))
        splits = {
            name: replace(split, images=tuple(islice(filled, len(split.images))))
            for name, split in planned.splits.items()
        }
        for shard in planned.shards:
            with (directory / shard.name).open("rb") as file:
                os.fsync(file.fileno())
        files.sync_directory(directory)
        files.write_atomic(directory / MANIFEST, to_json(replace(planned, splits=splits)))
        (directory / UNFINISHED).unlink()


def _lay_out(directory: Path, pack: Pack) -> None:
    """Makes all shards at their full size, with their headers."""
    groups = groupby(enumerate(pack.images()), key=lambda numbered: numbered[1].shard)
    for shard, (_, numbered) in zip(pack.shards, groups, strict=True):
        with (directory / shard.name).open("xb") as file:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                # Now, so that the disk is not full only after hours. Before the header: where the
                # file system cannot reserve, glibc would read what is written already.
                os.posix_fallocate(file.fileno(), 0, shard.num_bytes)
            file.truncate(shard.num_bytes)
            file.write(_shard_header(list(numbered)))


def _filled(
    directory: Path,
    planned: Pack,
    datasets: Sequence[SegDataset],
    pool: ProcessPoolExecutor | None,
) -> list[PackedImage]:
    """Writes the rows of all images; returns their records, with CRCs and hashes."""
    images = list(planned.images())
    pairs = [pair for dataset in datasets for pair in dataset.pairs]
    shards = [directory / planned.shards[image.shard].name for image in images]
    first = datasets[0]
    fill_one = partial(_fill_one, classes=first.classes, label_format=first.label_format)
    tasks = list(zip(shards, images, pairs, strict=True))
    filled = list(for_each_pair(fill_one, tasks, pool, "pack"))
    if problems := [result for result in filled if isinstance(result, str)]:
        title = f"{printable(directory)}: not finished; repair these and run the command again"
        raise DataError(first_lines(title, problems))
    return filled


def start_process() -> None:
    """What each process of the pool does first."""
    cv2.setNumThreads(0)
    # Ctrl-C reaches all processes of a terminal; the main one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)


def _fill_one(
    task: tuple[Path, PackedImage, Pair], classes: ClassFile, label_format: str
) -> PackedImage | str:
    """Writes the rows of one image; returns its record, or why it cannot be used."""
    shard, planned, pair = task
    try:
        image_file, label_file = read_bytes(pair.image), read_bytes(pair.label)
        image = decode_image(image_file, pair.image)
        label = decode_label(label_file, pair.label, classes, label_format)
        if problem := size_problem(pair, image.shape[:2], label.shape):
            return problem
    except DataError as error:
        return str(error)
    found = image.shape[:2], len(image_file), len(label_file)
    expected = (planned.height, planned.width), planned.image.num_bytes, planned.label.num_bytes
    if found != expected:
        return f"{printable(pair.image)}: changed while it was packed; run the command again"
    rows = packed_rows(image, label)
    with files.open_regular(shard, "r+b") as file:
        file.seek(planned.offset)
        file.write(rows.data)
    return replace(
        planned,
        image=replace(planned.image, sha256=hashlib.sha256(image_file).hexdigest()),
        label=replace(planned.label, sha256=hashlib.sha256(label_file).hexdigest()),
        crc=checksum(rows),
    )
