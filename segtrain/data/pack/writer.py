"""Makes a pack: lays its shards out, then fills them.

The file `unfinished` stands in the folder until all is there, and the manifest comes last. So
whatever stops the work, no half pack can be opened; the next run begins again from nothing.
"""

import errno
import hashlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
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
# Of an image in the manifest, about.
_BYTES_PER_RECORD = 1200


def plan_pack(
    data: DataConfig, datasets: Sequence[SegDataset], warnings: Mapping[str, Sequence[str]]
) -> Pack:
    """The manifest of a pack of these splits; CRCs and hashes are still zero.

    warnings: what the check of each split has found odd, by its name.

    Raises:
        DataError: a header cannot be read.
    """
    classes = datasets[0].classes
    planned = Pack(
        format=FORMAT,
        made_by={"segtrain": __version__, "opencv": cv2.__version__, "pillow": PIL.__version__},
        options={name: getattr(data, name) for name in OPTIONS},
        classes=_CLASS_FILE.dump_json(classes).decode(),
        ignores_color=classes.ignores_color,
        shards=(),
        splits={
            dataset.split: PackedSplit(
                excluded_names(data, dataset.split),
                tuple(dict.fromkeys((*dataset.warnings, *warnings.get(dataset.split, ())))),
                _unplaced(dataset.pairs, data.root),
            )
            for dataset in datasets
        },
    )
    return _placed(planned)


def is_made_of(pack: Pack, planned: Pack) -> bool:
    """Whether `pack` was made of the files and options that are `planned`."""
    return _plan_of(pack) == _plan_of(planned)


def excluded_names(data: DataConfig, split: str) -> tuple[str, ...]:
    """Which images `data` leaves out of `split`."""
    return tuple(sorted(data.train_exclude)) if split == data.train_split else ()


def source_name(path: Path, root: str) -> str:
    """The path of a file, relative to data.root if it lies below."""
    # The join adds a slash at the end.
    prefix = os.path.join(str(Path(os.path.expanduser(root))), "")
    return os.fspath(path).removeprefix(prefix)


def _plan_of(pack: Pack) -> dict[str, Any]:
    content = asdict(pack) | {"made_by": None}
    for split in content["splits"].values():
        split["warnings"] = None
        for image in split["images"]:
            image["crc"] = image["image"]["sha256"] = image["label"]["sha256"] = None
    return content


def _unplaced(pairs: Sequence[Pair], root: str) -> tuple[PackedImage, ...]:
    """The images of a split, each at offset 0 of shard 0."""

    def source(path: Path) -> SourceFile:
        with files.os_errors_as(DataError, path):
            found = os.stat(path)
        return SourceFile(source_name(path, root), found.st_size, found.st_mtime_ns, _NO_HASH)

    def look(pair: Pair) -> PackedImage:
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

    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        return tuple(pool.map(look, pairs))


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
        offset = len(_shard_header(group))
        for _, image in group:
            placed.append(replace(image, shard=i, offset=offset))
            offset += image.num_bytes
        shards.append(Shard(f"{i:05d}.safetensors", offset))
    return _with_images(replace(pack, shards=tuple(shards)), placed)


def _with_images(pack: Pack, images: Sequence[PackedImage]) -> Pack:
    """`pack` with other records of its images, in the order of `Pack.images`."""
    rest = iter(images)
    splits = {
        name: replace(split, images=tuple(next(rest) for _ in split.images))
        for name, split in pack.splits.items()
    }
    return replace(pack, splits=splits)


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


def num_bytes(pack: Pack) -> int:
    """The space that a pack takes on the disk."""
    records = _BYTES_PER_RECORD * sum(1 for _ in pack.images())
    return records + sum(shard.num_bytes for shard in pack.shards)


def lay_out(directory: Path, pack: Pack) -> None:
    """Makes all shards at their full size, with their headers.

    Raises:
        ExecutionError: the disk is full, or a file cannot be written.
    """
    groups = groupby(enumerate(pack.images()), key=lambda numbered: numbered[1].shard)
    with _disk_errors(directory):
        (directory / UNFINISHED).touch()
        for shard, (_, numbered) in zip(pack.shards, groups, strict=True):
            with (directory / shard.name).open("xb") as file:
                file.write(_shard_header(list(numbered)))
                file.flush()
                _allocate(file.fileno(), shard.num_bytes)


def fill(
    directory: Path,
    planned: Pack,
    datasets: Sequence[SegDataset],
    pool: ProcessPoolExecutor | None,
) -> Pack:
    """Writes the rows of all images; returns `planned` with their CRCs and hashes.

    Raises:
        DataError: images or labels that cannot be used, after all others are written.
        ExecutionError: the disk is full, or a process was killed.
    """
    images = list(planned.images())
    pairs = [pair for dataset in datasets for pair in dataset.pairs]
    shards = [directory / planned.shards[image.shard].name for image in images]
    first = datasets[0]
    fill_one = partial(_fill_one, classes=first.classes, label_format=first.label_format)
    tasks = list(zip(shards, images, pairs, strict=True))
    with _disk_errors(directory):
        filled = list(for_each_pair(fill_one, tasks, pool, "pack"))
    if problems := [result for result in filled if isinstance(result, str)]:
        title = f"{printable(directory)}: not finished; repair these and run the command again"
        raise DataError(first_lines(title, problems))
    return _with_images(planned, filled)


def finish(directory: Path, pack: Pack) -> None:
    """Writes the manifest: from now on `pack` can be opened.

    Raises:
        ExecutionError: the disk is full, or a file cannot be written.
    """
    with _disk_errors(directory):
        for shard in pack.shards:
            with (directory / shard.name).open("rb") as file:
                os.fsync(file.fileno())
        files.sync_directory(directory)
        files.write_atomic(directory / MANIFEST, to_json(pack))
        (directory / UNFINISHED).unlink()


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


def _allocate(handle: int, num_bytes: int) -> None:
    """Reserves the space of a file, so that the disk is not full only after hours."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(handle, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    os.truncate(handle, num_bytes)


@contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    """Says of an OSError inside that the pack cannot be written."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        what = f"cannot write the pack: {reason}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what += "; free some space and run the command again"
        raise ExecutionError(f"{printable(directory)}: {what}") from error
