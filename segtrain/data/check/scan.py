"""One split, read completely: every pair is decoded once, in processes, and the counts added up."""

import hashlib
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import cv2
import numpy as np
from tqdm import tqdm

from segtrain.data import decode, labels
from segtrain.data.brightness import Brightness, brightness
from segtrain.data.check.bad_file import BadFile
from segtrain.data.check.palettes import Palette, used_palette
from segtrain.data.classes import IGNORE_INDEX, ClassFile, Color
from segtrain.data.dataset import SegDataset, size_problem
from segtrain.data.listing import Pair
from segtrain.errors import DataError, ExecutionError
from segtrain.text import printable

# A raw id, or an RGB colour where labels hold colours.
Value = int | Color
_CHUNK = 8
_PLAIN_PROGRESS_S = 15


@dataclass
class PairScan:
    """What one pair holds.

    pixels: (K + 1,) int64, pixels of each class and, last, of what is ignored or unknown.
    size: (height, width) of the image; None if it cannot be read.
    turned: whether the image has an EXIF orientation.
    values: pixels of each raw id; empty where labels hold colours.
    unknown: pixels of each id or colour that the class file does not name.
    digest: hash of the image file.
    palette: the colours of the ids that occur; empty without a palette.
    """

    name: str
    pixels: np.ndarray
    bad_files: list[BadFile] = field(default_factory=list)
    size_problem: str = ""
    size: tuple[int, int] | None = None
    turned: bool = False
    values: dict[int, int] = field(default_factory=dict)
    unknown: dict[Value, int] = field(default_factory=dict)
    digest: bytes = b""
    brightness: Brightness | None = None
    palette: Palette = field(default_factory=dict)


@dataclass
class UnknownValue:
    """Where an id or colour that the class file does not name occurs."""

    pixels: int = 0
    labels: list[str] = field(default_factory=list)


@dataclass
class SplitScan:
    """The sum over the pairs of a split.

    pixels, images: (K,) int64, pixels of each class and number of images that hold it.
    pixels_beside: (K,) int64, valid pixels of all images that hold the class.
    digests: names of the images by the hash of their file.
    palettes: by the names of the labels that have one.
    """

    split: str
    num_pairs: int
    pixels: np.ndarray
    images: np.ndarray
    pixels_beside: np.ndarray
    ignored_pixels: int = 0
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    values: Counter[int] = field(default_factory=Counter)
    unknown: dict[Value, UnknownValue] = field(default_factory=dict)
    bad_files: list[BadFile] = field(default_factory=list)
    size_problems: list[str] = field(default_factory=list)
    turned: list[str] = field(default_factory=list)
    all_ignored: list[str] = field(default_factory=list)
    digests: dict[bytes, list[str]] = field(default_factory=dict)
    brightness: list[Brightness] = field(default_factory=list)
    palettes: dict[str, Palette] = field(default_factory=dict)

    def add(self, scan: PairScan) -> None:
        """Adds the counts of one pair."""
        pixels = scan.pixels[:-1]
        self.pixels += pixels
        self.images += pixels > 0
        self.pixels_beside += (pixels > 0) * pixels.sum()
        self.ignored_pixels += int(scan.pixels[-1])
        self.values.update(scan.values)
        for value, count in scan.unknown.items():
            unknown = self.unknown.setdefault(value, UnknownValue())
            unknown.pixels += count
            unknown.labels.append(scan.name)
        self.bad_files += scan.bad_files
        if scan.size:
            self.sizes[scan.size] += 1
        if scan.size_problem:
            self.size_problems.append(scan.size_problem)
        if scan.turned:
            self.turned.append(scan.name)
        if scan.pixels[-1] and not pixels.any() and not scan.unknown:
            self.all_ignored.append(scan.name)
        if scan.digest:
            self.digests.setdefault(scan.digest, []).append(scan.name)
        if scan.brightness:
            self.brightness.append(scan.brightness)
        if scan.palette:
            self.palettes[scan.name] = scan.palette


def process_pool(jobs: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    """`jobs` processes for `scan_split`, ended at the end of the block; None for one job."""
    if jobs == 1:
        return nullcontext()
    # Spawned, because a fork of a process that runs threads (OpenCV, torch) can hang.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        jobs, mp_context=context, initializer=cv2.setNumThreads, initargs=(0,)
    )


def scan_split(dataset: SegDataset, pool: ProcessPoolExecutor | None) -> SplitScan:
    """Reads every pair of `dataset` in the processes of `pool`, or in this one if it is None.

    What is wrong with a pair is recorded, not raised.

    Raises:
        ExecutionError: a process was killed.
    """
    counts = np.zeros((3, dataset.classes.num_classes), np.int64)
    total = SplitScan(dataset.split, len(dataset), *counts)
    work = partial(_scan_pair, classes=dataset.classes, label_format=dataset.label_format)
    try:
        scans = (
            map(work, dataset.pairs)
            if pool is None
            else pool.map(work, dataset.pairs, chunksize=_CHUNK)
        )
        for scan in _with_progress(scans, len(dataset), dataset.split):
            total.add(scan)
    except BrokenProcessPool as error:
        raise ExecutionError(
            "a checking process was killed, probably for lack of memory; use fewer --jobs"
        ) from error
    except BaseException:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        raise
    return total


def _scan_pair(pair: Pair, classes: ClassFile, label_format: str) -> PairScan:
    scan = PairScan(pair.name, np.zeros(classes.num_classes + 1, np.int64))
    try:
        _scan_image(scan, pair)
    except DataError as error:
        scan.bad_files.append(BadFile.of(pair.image, error))
    try:
        size = _scan_label(scan, pair, classes, label_format)
        if scan.size:
            scan.size_problem = size_problem(pair, scan.size, size)
    except DataError as error:
        scan.bad_files.append(BadFile.of(pair.label, error))
    return scan


def _scan_image(scan: PairScan, pair: Pair) -> None:
    data = decode.read_bytes(pair.image)
    scan.digest = hashlib.blake2b(data, digest_size=16).digest()
    image = decode.decode_image(data, pair.image)
    scan.size = image.shape[0], image.shape[1]
    header = decode.decode_header(data, pair.image)
    scan.turned = header.orientation != 1
    scan.brightness = brightness(image, header.depth, pair.name)


def _scan_label(
    scan: PairScan, pair: Pair, classes: ClassFile, label_format: str
) -> tuple[int, ...]:
    """Counts the pixels of the label and returns its (height, width)."""
    data = decode.read_bytes(pair.label)
    if label_format == "colors":
        colors = decode.decode_colors(data, pair.label)
        label = labels.map_colors(colors, classes)
        scan.unknown = labels.count_colors(colors[label < 0])
        counts = np.bincount(label[label >= 0], minlength=256)
        scan.pixels[:-1] = counts[: classes.num_classes]
        scan.pixels[-1] = label.size - scan.pixels[:-1].sum()
        return label.shape
    raw = decode.decode_raw_label(data, pair.label)
    scan.values = labels.count_ids(raw)
    for raw_id, count in scan.values.items():
        train_id = classes.train_id_of.get(raw_id, IGNORE_INDEX)
        scan.pixels[min(train_id, classes.num_classes)] += count
    scan.unknown = {i: n for i, n in scan.values.items() if i not in classes.train_id_of}
    scan.palette = used_palette(decode.decode_palette(data, pair.label), scan.values)
    return raw.shape


def _with_progress(scans: Iterable[PairScan], num_pairs: int, split: str) -> Iterator[PairScan]:
    """`scans` under a progress bar; without a terminal a line every 15 s."""
    if sys.stderr.isatty():
        yield from tqdm(scans, desc=printable(split), total=num_pairs, unit="pair", leave=False)
        return
    last = time.monotonic()
    for done, scan in enumerate(scans, start=1):
        if time.monotonic() - last > _PLAIN_PROGRESS_S:
            sys.stderr.write(f"{printable(split)}: {done} of {num_pairs} pairs\n")
            last = time.monotonic()
        yield scan
