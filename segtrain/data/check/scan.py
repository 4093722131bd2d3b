"""One split, read completely: every pair is decoded once, in processes, and the counts added up."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from segtrain.data import decode, labels
from segtrain.data.brightness import Brightness, brightness
from segtrain.data.check.palettes import Palette, used_palette
from segtrain.data.classes import ClassFile, Color, read_by
from segtrain.data.dataset import SegDataset, size_problem
from segtrain.data.listing import Pair
from segtrain.data.pack.reader import PackedDataset
from segtrain.data.prefetch import with_progress
from segtrain.distributed.machine import num_cores
from segtrain.errors import DataError, ExecutionError
from segtrain.text import printable

# A raw id, or an RGB colour where labels hold colours.
Value = int | Color
_CHUNK = 8
# Each process needs enough pairs to pay for its start.
_PAIRS_PER_PROCESS = 128


class BadFile(NamedTuple):
    """A file that cannot be used, and why."""

    place: str
    reason: str

    @classmethod
    def of(cls, path: Path, error: DataError) -> "BadFile":
        """The bad file at `path`; the text of `error` starts with that path."""
        place = printable(path)
        return cls(place, str(error).removeprefix(f"{place}: "))


def by_reason(files: Iterable[BadFile]) -> dict[str, list[str]]:
    """The places for each reason: a wrong setting is wrong for all files and is reported once."""
    places: dict[str, list[str]] = {}
    for place, reason in files:
        places.setdefault(reason, []).append(place)
    return places


@dataclass
class SplitScan:
    """The contents of all pairs of a split, or of one pair.

    pixels, images: (K,) int64, pixels of each class and number of images that hold it.
    pixels_beside: (K,) int64, valid pixels of all images that hold the class.
    ignored_pixels: pixels that are ignored or unknown.
    sizes: number of images of each (height, width).
    values: pixels of each raw id; empty where labels hold colours.
    unknown: pixels of each id or colour that the class file does not name.
    unknown_labels: the labels that hold it.
    turned: images with an EXIF orientation.
    digests: names of the images by the hash of their file.
    palettes: the colours of the ids that occur, by the name of the label.
    rgb: (3, 256) int64, pixels of each red, green and blue value; zeros unless asked for.
    """

    split: str
    num_pairs: int
    num_classes: InitVar[int]
    pixels: np.ndarray = field(init=False)
    images: np.ndarray = field(init=False)
    pixels_beside: np.ndarray = field(init=False)
    ignored_pixels: int = 0
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    values: Counter[int] = field(default_factory=Counter)
    unknown: Counter[Value] = field(default_factory=Counter)
    unknown_labels: dict[Value, list[str]] = field(default_factory=lambda: defaultdict(list))
    bad_files: list[BadFile] = field(default_factory=list)
    size_problems: list[str] = field(default_factory=list)
    turned: list[str] = field(default_factory=list)
    all_ignored: list[str] = field(default_factory=list)
    digests: dict[bytes, list[str]] = field(default_factory=lambda: defaultdict(list))
    brightness: list[Brightness] = field(default_factory=list)
    palettes: dict[str, Palette] = field(default_factory=dict)
    rgb: np.ndarray = field(default_factory=lambda: np.zeros((3, 256), np.int64))

    def __post_init__(self, num_classes: int) -> None:
        self.pixels, self.images, self.pixels_beside = np.zeros((3, num_classes), np.int64)

    def add(self, pair: "SplitScan") -> None:
        """Adds what one pair holds."""
        self.pixels += pair.pixels
        self.images += pair.images
        self.pixels_beside += pair.pixels_beside
        self.ignored_pixels += pair.ignored_pixels
        self.sizes.update(pair.sizes)
        self.values.update(pair.values)
        self.unknown.update(pair.unknown)
        for value, names in pair.unknown_labels.items():
            self.unknown_labels[value] += names
        self.bad_files += pair.bad_files
        self.size_problems += pair.size_problems
        self.turned += pair.turned
        self.all_ignored += pair.all_ignored
        for digest, names in pair.digests.items():
            self.digests[digest] += names
        self.brightness += pair.brightness
        self.palettes |= pair.palettes
        self.rgb += pair.rgb


def num_processes(num_pairs: int, jobs: int | None) -> int:
    """At most `jobs` (None: one for each core that this process may use), and no idle ones."""
    useful = -(-num_pairs // _PAIRS_PER_PROCESS)
    return max(1, min(jobs or num_cores(), useful))


def scan_split(
    dataset: SegDataset,
    pool: ProcessPoolExecutor | None,
    *,
    count_rgb: bool = False,
    compare: bool = False,
) -> SplitScan:
    """Reads every pair of `dataset` in the processes of `pool`, or in this one if it is None.

    What is wrong with a pair is recorded, not raised.

    count_rgb: also count `SplitScan.rgb`.
    compare: also compare a pack with the files that it was made from.

    Raises:
        ExecutionError: a process was killed.
    """
    total = SplitScan(dataset.split, len(dataset), dataset.classes.num_classes)
    work, items = _work(dataset, count_rgb=count_rgb, compare=compare)
    try:
        scans = map(work, items) if pool is None else pool.map(work, items, chunksize=_CHUNK)
        for scan in with_progress(scans, len(dataset), dataset.split):
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


def _work(
    dataset: SegDataset, *, count_rgb: bool, compare: bool
) -> tuple[Callable[[Any], SplitScan], Sequence[Any]]:
    """A function, and what to call it with for each pair."""
    if isinstance(dataset, PackedDataset):
        from segtrain.data.check import packed  # which imports this module

        work = partial(
            packed.scan_packed, num_classes=dataset.classes.num_classes, count_rgb=count_rgb
        )
        return work, packed.packed_pairs(dataset, compare=compare)
    settings = {"classes": dataset.classes, "label_format": dataset.label_format}
    return partial(_scan_pair, **settings, count_rgb=count_rgb), dataset.pairs


def _scan_pair(pair: Pair, classes: ClassFile, label_format: str, count_rgb: bool) -> SplitScan:
    scan = SplitScan("", 1, classes.num_classes)
    try:
        _scan_image(scan, pair, count_rgb)
    except DataError as error:
        scan.bad_files.append(BadFile.of(pair.image, error))
    try:
        _scan_label(scan, pair, classes, label_format)
    except DataError as error:
        scan.bad_files.append(BadFile.of(pair.label, error))
    return scan


def _scan_image(scan: SplitScan, pair: Pair, count_rgb: bool) -> None:
    data = decode.read_bytes(pair.image)
    scan.digests[hashlib.blake2b(data, digest_size=16).digest()] = [pair.name]
    image = decode.decode_image(data, pair.image)
    scan.sizes[image.shape[:2]] = 1
    header = decode.decode_header(data, pair.image)
    if header.orientation != 1:
        scan.turned = [pair.name]
    scan.brightness = [brightness(image, header.depth, pair.name)]
    if count_rgb:
        scan.rgb[:] = [np.bincount(image[..., c].ravel(), minlength=256) for c in range(3)]


def _scan_label(scan: SplitScan, pair: Pair, classes: ClassFile, label_format: str) -> None:
    data = decode.read_bytes(pair.label)
    if label_format == "colors":
        colors = decode.decode_colors(data, pair.label)
        label = labels.map_colors(colors, classes)
        scan.unknown.update(labels.count_colors(colors[label < 0]))
        counts = np.bincount(label[label >= 0], minlength=256)
        scan.pixels += counts[: classes.num_classes]
    else:
        label = decode.decode_raw_label(data, pair.label)
        scan.values.update(labels.count_ids(label))
        train_id_of = read_by(classes, label_format).train_id_of
        for raw_id, count in scan.values.items():
            train_id = train_id_of.get(raw_id)
            if train_id is None:
                scan.unknown[raw_id] = count
            elif train_id < classes.num_classes:
                scan.pixels[train_id] += count
        if palette := used_palette(decode.decode_palette(data, pair.label), scan.values):
            scan.palettes[pair.name] = palette
    num_valid = scan.pixels.sum()
    scan.images[:] = scan.pixels > 0
    scan.pixels_beside[:] = scan.images * num_valid
    scan.ignored_pixels = label.size - int(num_valid)
    scan.unknown_labels.update({value: [pair.name] for value in scan.unknown})
    if not num_valid and not scan.unknown:
        scan.all_ignored = [pair.name]
    for size in scan.sizes:
        if problem := size_problem(pair, size, label.shape):
            scan.size_problems = [problem]
