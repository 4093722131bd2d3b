"""One split, read completely: every pair decoded once, in processes, and the findings added up."""

import hashlib
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from tqdm import tqdm

from segtrain.data import decode, labels
from segtrain.data.brightness import Brightness, brightness
from segtrain.data.check.palettes import Palette, used_palette
from segtrain.data.classes import ClassFile, Color
from segtrain.data.dataset import SegDataset, size_problem
from segtrain.data.listing import Pair
from segtrain.errors import DataError, ExecutionError
from segtrain.text import printable

# A raw id, or an RGB colour where labels hold colours.
Value = int | Color
_CHUNK = 8
_PLAIN_PROGRESS_S = 15


class Problem(NamedTuple):
    """What is wrong with the file at `place`."""

    place: str
    reason: str

    @classmethod
    def of(cls, path: Path, error: DataError) -> "Problem":
        """The problem that `error` reports about `path`, which its message begins with."""
        place = printable(path)
        return cls(place, str(error).removeprefix(f"{place}: "))


def by_reason(problems: Iterable[Problem]) -> dict[str, list[str]]:
    """The places of each reason: a wrong setting is wrong for all files, and is said once."""
    places: dict[str, list[str]] = {}
    for place, reason in problems:
        places.setdefault(reason, []).append(place)
    return places


class PairScan(NamedTuple):
    """What one pair holds.

    unreadable, size_problem: empty if all is well.
    size: (height, width) of the image, (0, 0) if it cannot be read.
    pixels: (K + 1,) int64, pixels of each class and, last, of what is ignored.
    values: pixels of each raw id; empty where labels hold colours.
    unknown: pixels of each id or colour that the class file does not name.
    digest: hash of the image file, empty if it cannot be read.
    brightness: of the image, None if it cannot be read.
    palette: the colours of the label's ids, where it has a palette and ids are read.
    """

    name: str
    unreadable: list[Problem]
    size_problem: str
    size: tuple[int, int]
    turned: bool
    pixels: np.ndarray
    values: dict[int, int]
    unknown: dict[Value, int]
    digest: bytes
    brightness: Brightness | None
    palette: Palette


@dataclass
class UnknownValue:
    """Where one id or colour outside the class file was met."""

    pixels: int = 0
    labels: list[str] = field(default_factory=list)


@dataclass
class SplitScan:
    """The sum over the pairs of a split.

    pixels, images: (K,) int64, pixels of each class and number of images that hold it.
    pixels_beside: (K,) int64, valid pixels of all those images.
    digests: names of the images by the hash of their file.
    palettes: of each label that has one.
    """

    split: str
    num_pairs: int
    pixels: np.ndarray
    images: np.ndarray
    pixels_beside: np.ndarray
    ignored_pixels: int = 0
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    values: dict[int, int] = field(default_factory=dict)
    unknown: dict[Value, UnknownValue] = field(default_factory=dict)
    unreadable: list[Problem] = field(default_factory=list)
    size_problems: list[str] = field(default_factory=list)
    turned: list[str] = field(default_factory=list)
    all_ignored: list[str] = field(default_factory=list)
    digests: dict[bytes, list[str]] = field(default_factory=dict)
    brightness: list[Brightness] = field(default_factory=list)
    palettes: dict[str, Palette] = field(default_factory=dict)


def process_pool(jobs: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    """`jobs` processes for `scan_split`, ended at the end of the block; None for one job."""
    if jobs == 1:
        return nullcontext()
    # Spawned, not forked: a fork of a process that runs threads (OpenCV, torch) can hang.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread)


def scan_split(dataset: SegDataset, pool: ProcessPoolExecutor | None) -> SplitScan:
    """Reads every pair of `dataset` in the processes of `pool`, or in this one if it is None.

    What is wrong with a pair is recorded, not raised.

    Raises:
        ExecutionError: a process was killed.
    """
    num_classes = dataset.classes.num_classes
    total = SplitScan(
        dataset.split,
        len(dataset),
        pixels=np.zeros(num_classes, np.int64),
        images=np.zeros(num_classes, np.int64),
        pixels_beside=np.zeros(num_classes, np.int64),
    )
    work = partial(scan_pair, classes=dataset.classes, label_format=dataset.label_format)
    try:
        scans = (
            map(work, dataset.pairs)
            if pool is None
            else pool.map(work, dataset.pairs, chunksize=_CHUNK)
        )
        for scan in _progress(scans, len(dataset), dataset.split):
            _add(total, scan)
    except BrokenProcessPool as error:
        raise ExecutionError(
            "a checking process was killed, probably for lack of memory; use fewer --jobs"
        ) from error
    except BaseException:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        raise
    return total


def scan_pair(pair: Pair, classes: ClassFile, label_format: str) -> PairScan:
    """Everything that can be said about one pair without the others."""
    unreadable: list[Problem] = []
    image_size, turned, digest, light = (0, 0), False, b"", None
    try:
        data = decode.read_bytes(pair.image)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        image = decode.decode_image(data, pair.image)
        image_size = (image.shape[0], image.shape[1])
        header = decode.decode_header(data, pair.image)
        turned = header.orientation != 1
        light = brightness(image, header.depth, pair.name)
    except DataError as error:
        unreadable.append(Problem.of(pair.image, error))
    pixels = np.zeros(classes.num_classes + 1, np.int64)
    values: dict[int, int] = {}
    unknown: dict[Value, int] = {}
    problem = ""
    palette: Palette = {}
    try:
        data = decode.read_bytes(pair.label)
        if label_format == "colors":
            label_size = _count_colors(data, pair, classes, pixels, unknown)
        else:
            label_size = _count_ids(data, pair, classes, pixels, values)
            unknown.update({i: n for i, n in values.items() if i not in classes.train_id_of})
            palette = used_palette(decode.decode_palette(data, pair.label), values)
        problem = size_problem(pair, image_size, label_size) if image_size[0] else ""
    except DataError as error:
        unreadable.append(Problem.of(pair.label, error))
    return PairScan(
        pair.name,
        unreadable,
        problem,
        image_size,
        turned,
        pixels,
        values,
        unknown,
        digest,
        light,
        palette,
    )


def _count_ids(
    data: bytes, pair: Pair, classes: ClassFile, pixels: np.ndarray, values: dict[int, int]
) -> tuple[int, ...]:
    raw = decode.decode_raw_label(data, pair.label)
    values.update(labels.count_ids(raw))
    for raw_id, count in values.items():
        train_id = classes.train_id_of.get(raw_id, labels.IGNORE_INDEX)
        pixels[min(train_id, classes.num_classes)] += count
    return raw.shape


def _count_colors(
    data: bytes, pair: Pair, classes: ClassFile, pixels: np.ndarray, unknown: dict[Value, int]
) -> tuple[int, ...]:
    colors = decode.decode_colors(data, pair.label)
    label = labels.map_colors(colors, classes)
    unknown.update(labels.count_colors(colors[label < 0]))
    counts = np.bincount(label[label >= 0], minlength=256)
    pixels[:-1] = counts[: classes.num_classes]
    pixels[-1] = label.size - pixels[:-1].sum()
    return label.shape


def _add(total: SplitScan, scan: PairScan) -> None:
    total.unreadable += scan.unreadable
    total.pixels += scan.pixels[:-1]
    present = scan.pixels[:-1] > 0
    total.images += present
    total.pixels_beside += present * scan.pixels[:-1].sum()
    total.ignored_pixels += int(scan.pixels[-1])
    if scan.size[0]:
        total.sizes[scan.size] = total.sizes.get(scan.size, 0) + 1
    if scan.size_problem:
        total.size_problems.append(scan.size_problem)
    if scan.brightness is not None:
        total.brightness.append(scan.brightness)
    if scan.palette:
        total.palettes[scan.name] = scan.palette
    if scan.turned:
        total.turned.append(scan.name)
    if scan.pixels[-1] and not scan.pixels[:-1].any() and not scan.unknown:
        total.all_ignored.append(scan.name)
    if scan.digest:
        total.digests.setdefault(scan.digest, []).append(scan.name)
    for value, count in scan.values.items():
        total.values[value] = total.values.get(value, 0) + count
    for value, count in scan.unknown.items():
        seen = total.unknown.setdefault(value, UnknownValue())
        seen.pixels += count
        seen.labels.append(scan.name)


def _progress(scans: Iterable[PairScan], num_pairs: int, split: str) -> Iterator[PairScan]:
    """`scans` under a progress bar, or with a line now and then where there is no terminal."""
    if sys.stderr.isatty():
        yield from tqdm(scans, desc=printable(split), total=num_pairs, unit="pair", leave=False)
        return
    last = time.monotonic()
    for done, scan in enumerate(scans, start=1):
        if time.monotonic() - last > _PLAIN_PROGRESS_S:
            sys.stderr.write(f"{printable(split)}: {done} of {num_pairs} pairs\n")
            last = time.monotonic()
        yield scan


def _one_thread() -> None:
    cv2.setNumThreads(0)
