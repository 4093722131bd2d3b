"""Makes a pack: lays its shards out, then fills them.

The file `unfinished` stands in the folder until all is there, and the manifest comes last. So
whatever stops the work, no half pack can be opened; the next run begins again from nothing.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import PIL
from pydantic import TypeAdapter

from segtrain import __version__, files
from segtrain.config import DataConfig
from segtrain.data.pack.index import (
    FORMAT,
    MANIFEST,
    Pack,
    PackedFile,
    PackedImage,
    PackedSplit,
    Shard,
    checksum,
    to_json,
)
from segtrain.data.pack.reader import packed_rows, row_bytes
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.concurrent import IO_THREADS, for_each_pair, prefetch
from segtrain.data.read.dataset import SegDataset, size_problem
from segtrain.data.read.decode import read_bytes
from segtrain.data.read.find import Pair, first_lines
from segtrain.data.read.image import ImageForm, read_image
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.label_formats import label_format_of
from segtrain.errors import DataError, ExecutionError
from segtrain.text import printable

# The options of the section `data`, besides the splits, that say which files are read and how.
OPTIONS = ("layout", "images_dir", "labels_dir", "label_format", "channels")

# An empty file in a folder where a pack is being made.
_UNFINISHED = "unfinished"
# No shard is larger, unless one image is.
SHARD_BYTES = 1 << 30
_CLASS_FILE = TypeAdapter(ClassFile)
_METADATA = {
    "format": f"segtrain pack {FORMAT}",
    "rows": "uint8: W pixels of C samples of dtype, then W train ids, 255 is ignored, then zeros",
}
# Data begins on a page.
_ALIGNMENT = 4096


class PackedRows(NamedTuple):
    """Where the rows of an image lie: from the byte `offset` of `shard`, an index."""

    shape: tuple[int, int]
    shard: int
    offset: int


def excluded_names(data: DataConfig, split: str) -> tuple[str, ...]:
    """Which images `data` leaves out of `split`."""
    return tuple(sorted(data.train_exclude)) if split == data.train_split else ()


def source_name(path: Path, root: str) -> str:
    """The path of a file, relative to data.root if it lies below."""
    # The join adds a slash at the end.
    prefix = os.path.join(str(Path(os.path.expanduser(root))), "")
    return os.fspath(path).removeprefix(prefix)


def write_pack(
    directory: Path,
    data: DataConfig,
    datasets: Sequence[SegDataset],
    warnings: Mapping[str, Sequence[str]],
    pool: ProcessPoolExecutor | None,
) -> Pack:
    """Writes a pack of these splits into an empty folder, or where a run was interrupted.

    warnings: what the check of each split has found odd, by its name.

    Raises:
        DataError: the folder holds something else; or images or labels that cannot be used, after
            all others are written.
        ExecutionError: the disk is full, a file cannot be written, or a process was killed.
    """
    with files.os_errors_as(ExecutionError, directory, "the pack cannot be written"):
        names = sorted(path.name for path in directory.iterdir() if path.name[0] != ".")
        if names and _UNFINISHED not in names:
            other = f"holds {printable(names[0])}, which is no pack"
            raise DataError(f"{printable(directory)}: {other}; choose an empty folder by --output")
        # Of a run that was interrupted.
        for shard in directory.glob("[0-9]*.safetensors"):
            shard.unlink()
        (directory / _UNFINISHED).touch()
        pairs = [pair for dataset in datasets for pair in dataset.pairs]
        if raster := next((pair for pair in pairs if pair.window is not None), None):
            what = "a raster, which is read by windows; train without data.pack"
            raise DataError(f"{printable(raster.image)}: {what}")
        classes, form = datasets[0].classes, datasets[0].form
        places, shards = _lay_out(directory, pairs, form)
        fill_one = partial(_fill_one, directory=directory, data=data, classes=classes, form=form)
        tasks = list(zip(places, pairs, strict=True))
        images = list(for_each_pair(fill_one, tasks, pool, "pack"))
        if problems := [result for result in images if isinstance(result, str)]:
            title = f"{printable(directory)}: not finished; repair these and run the command again"
            raise DataError(first_lines(title, problems))
        # One list for all splits, of which each takes as many as it has.
        rest = iter(images)
        pack = Pack(
            format=FORMAT,
            made_by={"segtrain": __version__, "opencv": cv2.__version__, "pillow": PIL.__version__},
            options={name: getattr(data, name) for name in OPTIONS},
            dtype=form.dtype.name,
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
            bands=form.bands,
            scaling=form.scaling,
        )
        # The rows before the manifest: after a loss of power it must not describe rows that are
        # gone.
        for shard in shards:
            with (directory / shard.name).open("rb") as file:
                os.fsync(file.fileno())
        files.sync_directory(directory)
        files.write_atomic(directory / MANIFEST, to_json(pack))
        (directory / _UNFINISHED).unlink()
    return pack


def _shard_name(index: int) -> str:
    return f"{index:05d}.safetensors"


def _lay_out(
    directory: Path, pairs: Sequence[Pair], form: ImageForm
) -> tuple[list[PackedRows], list[Shard]]:
    """Makes all shards at their full size, with their headers; neighbours lie beside each other.

    Raises:
        DataError: the header of an image cannot be read.
    """
    infos = prefetch(read_info, (pair.image for pair in pairs), IO_THREADS)
    shapes = [(info.size[0], row_bytes(info.size[1], form)) for info in infos]
    places: list[PackedRows] = []
    shards: list[Shard] = []
    while len(places) < len(pairs):
        tensors: dict[str, Any] = {"__metadata__": _METADATA}
        starts = [0]
        for number in range(len(places), len(pairs)):
            stop = starts[-1] + math.prod(shapes[number])
            if stop > SHARD_BYTES and len(starts) > 1:
                break
            tensors[f"{number:07d}"] = {
                "dtype": "U8",
                "shape": [*shapes[number]],
                "data_offsets": [starts[-1], stop],
            }
            starts.append(stop)
        text = json.dumps(tensors, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        # The last start is the end of the data.
        shard = Shard(_shard_name(len(shards)), len(header) + starts.pop())
        for start in starts:
            places.append(PackedRows(shapes[len(places)], len(shards), len(header) + start))
        shards.append(shard)
        with (directory / shard.name).open("xb") as file:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                # Now, so that the disk is not full only after hours. Before the header: where the
                # file system cannot reserve, glibc would read what is written already.
                os.posix_fallocate(file.fileno(), 0, shard.num_bytes)
            file.truncate(shard.num_bytes)
            file.write(header)
    return places, shards


def _fill_one(
    task: tuple[PackedRows, Pair],
    directory: Path,
    data: DataConfig,
    classes: ClassFile,
    form: ImageForm,
) -> PackedImage | str:
    """Writes the rows of one image; returns its record, or why it cannot be used."""
    place, pair = task
    try:
        # The time first: of a file that changes now, it shows that the pack is older.
        paths = (*pair.images, pair.label)
        times = [os.stat(path).st_mtime_ns for path in paths]
        *image_files, label_file = contents = [read_bytes(path) for path in paths]
        info = read_info(pair.image)
        image = read_image(pair.images, form, contents=image_files)
        label = label_format_of(data.label_format).read(pair.label, classes, content=label_file)
        if problem := size_problem(pair, image.shape[:2], label.shape):
            return problem
        if image.dtype.kind != form.dtype.kind:
            what = f"pixels marked as no data, for which a pack of {form.dtype} has no number"
            return f"{printable(pair.image)}: {what}; train without data.pack"
    except (DataError, OSError) as error:
        return str(error)
    rows = packed_rows(image, label, form)
    if rows.shape != place.shape:
        return f"{printable(pair.image)}: changed while it was packed; run the command again"
    # Each image has bytes of its own, so processes fill a shard side by side without a lock.
    with files.open_regular(directory / _shard_name(place.shard), "r+b") as file:
        file.seek(place.offset)
        file.write(rows.data)
    *images, label_source = (
        PackedFile(source_name(path, data.root), len(raw), time, hashlib.sha256(raw).hexdigest())
        for path, raw, time in zip(paths, contents, times, strict=True)
    )
    return PackedImage(
        pair.name,
        tuple(images),
        label_source,
        *label.shape,
        row_bytes=rows.shape[1],
        orientation=info.orientation,
        shard=place.shard,
        offset=place.offset,
        crc=checksum(rows),
    )
