"""Makes a pack: lays its shards out, then fills them.

Shards are named `….partial` and a journal says which images are filled, until all are; the manifest
comes last. So whatever stops the work, no half pack can be opened, and the same command goes on.
"""

import errno
import hashlib
import json
import os
import shutil
import signal
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import PIL
from pydantic import TypeAdapter

from segtrain import __version__, files
from segtrain.config import DataConfig
from segtrain.data.pack.manifest import (
    FORMAT,
    JOURNAL,
    MANIFEST,
    Pack,
    PackedImage,
    PackedSplit,
    Shard,
    SourceFile,
    header_of,
    sha256_of,
    shard_header,
    to_json,
)
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.concurrent import with_progress
from segtrain.data.read.dataset import SegDataset, size_problem
from segtrain.data.read.decode import decode_image, read_bytes, read_header
from segtrain.data.read.find import Pair
from segtrain.data.read.labels import decode_label
from segtrain.distributed.signals import die_with_parent
from segtrain.errors import DataError, ExecutionError
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


_PARTIAL = ".partial"
# For the manifest and the journal, about, in bytes.
_BYTES_PER_RECORD = 1200
_CHUNK = 4


class Filled(NamedTuple):
    """What is known of an image once its rows are written. sources: its hash and its label's."""

    crc: int
    sources: tuple[str, str]


class Work(NamedTuple):
    """How the rows of an image are made. pairs: its files, by its number."""

    directory: Path
    pack: Pack
    pairs: Sequence[Pair]
    classes: ClassFile
    label_format: str


def is_finished(directory: Path) -> bool:
    """Whether `directory` holds a whole pack, of whatever data."""
    return (directory / MANIFEST).exists()


def read_journal(directory: Path, pack: Pack) -> dict[int, Filled]:
    """The images that are filled, by their number, as an interrupted run has noted them.

    Those whose files have other sizes or times now are left out.

    Raises:
        DataError: the unfinished pack is one of other images or options, or `directory` holds
            something else.
    """
    path = directory / JOURNAL
    if not path.exists():
        if other := sorted(x.name for x in directory.iterdir() if not x.name.startswith(".")):
            raise DataError(
                f"{printable(directory)}: holds {printable(other[0])}, which is no pack; choose "
                "an empty folder by --output"
            )
        return {}
    try:
        journal = files.read_bytes(path).decode(errors="replace")
    except OSError as error:
        raise DataError(
            f"{printable(path)}: cannot be read: {error.strerror}; delete the pack"
        ) from error
    first, *lines = journal.splitlines() or [""]
    if first != layout_hash(pack):
        raise DataError(
            f"{printable(directory)}: holds an unfinished pack of other images or options; delete "
            "it, or choose another folder by --output"
        )
    images = list(pack.images())
    found = {}
    for line in lines:
        try:
            number, stamp, crc, *sources = files.parse_json(line)
            if stamp == _stamp(images[number]):
                found[number] = Filled(crc, (sources[0], sources[1]))
        except (ValueError, LookupError, TypeError):
            continue  # the last line before a crash
    return found


def missing_bytes(directory: Path, pack: Pack) -> int:
    """Space that the pack still needs, in bytes."""
    needed = sum(shard.num_bytes for shard in pack.shards)
    needed += _BYTES_PER_RECORD * sum(1 for _ in pack.images())
    for shard in pack.shards:
        place = _place(directory, shard.name)
        if place.exists():
            needed -= min(shard.num_bytes, 512 * place.stat().st_blocks)
    return max(0, needed)


def free_bytes(directory: Path) -> int:
    """Space on the disk of `directory`, in bytes."""
    return shutil.disk_usage(directory).free


def lay_out(directory: Path, pack: Pack) -> None:
    """Makes all shards at their full size, with their headers; rows that are there stay.

    Raises:
        ExecutionError: the disk is full, or a file cannot be written.
    """
    with _disk_errors(directory):
        if not (directory / JOURNAL).exists():
            files.write_atomic(directory / JOURNAL, layout_hash(pack) + "\n")
        for i, shard in enumerate(pack.shards):
            handle = os.open(
                _place(directory, shard.name), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666
            )
            with open(handle, "r+b") as file:
                file.write(header_of(pack, i))
                file.flush()
                _allocate(handle, shard.num_bytes)


def fill(
    work: Work,
    known: dict[int, Filled],
    pool: ProcessPoolExecutor | None,
) -> tuple[dict[int, Filled], list[str]]:
    """Writes the rows of all images; returns what is known of each, and what is wrong with others.

    known: what `read_journal` found; the rows of these are compared with their CRC.

    Raises:
        ExecutionError: the disk is full, or a process was killed.
    """
    filled: dict[int, Filled] = {}
    problems: list[str] = []
    with _disk_errors(work.directory), (work.directory / JOURNAL).open("a") as journal:
        journal.write("\n")  # a crash may have left a part of a line
        images = list(work.pack.images())
        numbers = sorted(known)
        tasks = [(_place_of(work, images[n]), images[n], known[n].crc) for n in numbers]
        for number, good in zip(numbers, _run(_holds, tasks, pool, "packed before"), strict=True):
            if good:
                filled[number] = known[number]
        numbers = [n for n in range(len(images)) if n not in filled]
        tasks = [(_place_of(work, images[n]), images[n], work.pairs[n]) for n in numbers]
        write = partial(_fill_one, classes=work.classes, label_format=work.label_format)
        for number, result in zip(numbers, _run(write, tasks, pool, "pack"), strict=True):
            if isinstance(result, str):
                problems.append(result)
                continue
            filled[number] = result
            line = [number, _stamp(images[number]), result.crc, *result.sources]
            journal.write(json.dumps(line) + "\n")
            journal.flush()
    return filled, problems


def finish(directory: Path, pack: Pack, filled: dict[int, Filled]) -> None:
    """Gives the shards their names and writes the manifest.

    Raises:
        ExecutionError: the disk is full, or a file cannot be written.
    """
    images = [_with_result(image, filled[n]) for n, image in enumerate(pack.images())]
    with _disk_errors(directory):
        for shard in pack.shards:
            place = _place(directory, shard.name)
            with place.open("rb") as file:
                os.fsync(file.fileno())
            place.replace(directory / shard.name)
        files.sync_directory(directory)
        files.write_atomic(directory / MANIFEST, to_json(with_images(pack, images)))
        (directory / JOURNAL).unlink()


def start_process() -> None:
    """What each process of the pool does first."""
    cv2.setNumThreads(0)
    # Ctrl-C reaches all processes of a terminal; the main one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)


def _fill_one(
    task: tuple[Path, PackedImage, Pair], classes: ClassFile, label_format: str
) -> Filled | str:
    place, planned, pair = task
    try:
        data = [
            _read(path, source)
            for path, source in ((pair.image, planned.image), (pair.label, planned.label))
        ]
        image = decode_image(data[0], pair.image)
        label = decode_label(data[1], pair.label, classes, label_format)
        if problem := size_problem(pair, image.shape[:2], label.shape):
            return problem
        if image.shape[:2] != (planned.height, planned.width):
            return _changed(pair.image)
    except DataError as error:
        return str(error)
    rows = packed_rows(image, label)
    with files.open_regular(place, "r+b") as file:
        file.seek(planned.offset)
        file.write(rows.data)
    hashes = [hashlib.sha256(content).hexdigest() for content in data]
    return Filled(zlib.crc32(rows), (hashes[0], hashes[1]))


def packed_rows(image: np.ndarray, label: np.ndarray) -> np.ndarray:
    """The rows of an image (H, W, 3) uint8 with its label (H, W) uint8: (H, 4 W) uint8."""
    return np.hstack([image.reshape(len(image), -1), label])


def _read(path: Path, source: SourceFile) -> bytes:
    data = read_bytes(path)
    if len(data) != source.num_bytes:
        raise DataError(_changed(path))
    return data


def _changed(path: Path) -> str:
    return f"{printable(path)}: changed while it was packed; run the command again"


def _holds(task: tuple[Path, PackedImage, int]) -> bool:
    """Whether the rows of an image in a shard have this CRC."""
    place, image, crc = task
    with files.open_regular(place) as file:
        file.seek(image.offset)
        return zlib.crc32(file.read(image.num_bytes)) == crc


def _run(
    function: Callable, tasks: Sequence, pool: ProcessPoolExecutor | None, what: str
) -> Iterator:
    results: Iterable = map(function, tasks)
    if pool is not None:
        results = pool.map(function, tasks, chunksize=_CHUNK)
    try:
        yield from with_progress(results, len(tasks), what)
    except BrokenProcessPool as error:
        raise ExecutionError(
            "a packing process was killed, probably for lack of memory; run the command again with "
            "fewer --jobs: it goes on where it stopped"
        ) from error
    except BaseException:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        raise


def _with_result(image: PackedImage, result: Filled) -> PackedImage:
    sources = [
        replace(source, sha256=digest)
        for source, digest in zip((image.image, image.label), result.sources, strict=True)
    ]
    return replace(image, image=sources[0], label=sources[1], crc=result.crc)


def _stamp(image: PackedImage) -> list[int]:
    """The sizes and times of its files: with others, they may hold something else."""
    return [x for file in (image.image, image.label) for x in (file.num_bytes, file.mtime_ns)]


def _place_of(work: Work, image: PackedImage) -> Path:
    return _place(work.directory, work.pack.shards[image.shard].name)


def _place(directory: Path, name: str) -> Path:
    """Where a shard is: under its own name if a crash came just before the manifest."""
    final = directory / name
    return final if final.exists() else directory / f"{name}{_PARTIAL}"


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
            what += "; free some space and run the command again: it goes on where it stopped"
        raise ExecutionError(f"{printable(directory)}: {what}") from error
