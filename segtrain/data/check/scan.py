"""One split, read completely: each pair is decoded once, in processes, from files or a pack.

segtrain reads the indices, never the colours. If a tool reduced RGB labels to a palette file by
file, the colours are right, but each file has other indices. No step fails, and training learns
noise.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from segtrain.data.check.dark_images import Brightness, brightness
from segtrain.data.pack.manifest import PackedImage
from segtrain.data.pack.opening import has_content
from segtrain.data.pack.reader import PackedDataset, Shards, split_rows
from segtrain.data.read import decode, labels
from segtrain.data.read.classes import ClassFile, Color, read_by
from segtrain.data.read.concurrent import for_each_pair
from segtrain.data.read.dataset import SegDataset, size_problem
from segtrain.data.read.find import Pair
from segtrain.errors import DataError
from segtrain.text import MAX_NAME, printable

# The colour of each index that occurs in a label.
Palette = Mapping[int, Color]
_REPAIR = "if the colours are right and the indices are not, set data.label_format: colors"
# Different palettes to compare each label with.
_MAX_COMPARED = 64
_MAX_SHOWN = 3


def used_palette(colors: list[Color], values: Iterable[int]) -> dict[int, Color]:
    """The colours of those `values` that the palette `colors` of a label names.

    Empty for a grey ramp, where each colour only repeats its index.
    """
    if all(color == (i, i, i) for i, color in enumerate(colors)):
        return {}
    return {i: colors[i] for i in sorted(values) if i < len(colors)}


def class_problem(palette: Palette, classes: ClassFile) -> str:
    """Which indices have the `color` that the class file gives another class; empty if none."""
    owner = {classes.palette[i]: i for i in classes.given_colors}
    wrong = []
    for index, color in palette.items():
        meant = owner.get(color)
        read = classes.train_id_of.get(index)
        if meant is not None and read is not None and read != meant:
            is_class = read < classes.num_classes
            name = f"'{printable(classes.names[read], MAX_NAME)}'" if is_class else "ignored"
            other = printable(classes.names[meant], MAX_NAME)
            wrong.append(f"index {index} is {name}, but has the color {list(color)} of '{other}'")
    if not wrong:
        return ""
    more = f"; and {len(wrong) - _MAX_SHOWN} more" if len(wrong) > _MAX_SHOWN else ""
    return (
        f"the palette contradicts class file {classes.name}: {'; '.join(wrong[:_MAX_SHOWN])}{more};"
        f" {_REPAIR}; if the indices are right, correct `color` in the class file"
    )


def moved_colors(labels: Mapping[str, Palette]) -> tuple[str, bool]:
    """Names two labels with one colour at different indices, and whether all colours are equal.

    Empty if there are none: palettes that only have different colours are no mistake.
    """
    found = ""
    compared: dict[tuple[tuple[int, Color], ...], str] = {}
    common: dict[int, Color] = {}
    for name, palette in labels.items():
        # Most labels agree with all before them, and need no comparison with each palette.
        agrees = all(common.setdefault(i, color) == color for i, color in palette.items())
        for items, other in islice(compared.items(), 0 if agrees else _MAX_COMPARED):
            before = dict(items)
            moved = _moved(before, palette)
            if moved is None:
                continue
            i, j = moved
            text = (
                f"labels have the same colours at different indices: {list(before[i])} is {i} in "
                f"{printable(other)} and {j} in {printable(name)}, and ids are the indices; were "
                f"the palettes made file by file? {_REPAIR}"
            )
            if set(before.values()) == set(palette.values()):
                return text, True
            found = found or text
        compared.setdefault(tuple(palette.items()), name)
    return found, False


def _moved(before: Palette, now: Palette) -> tuple[int, int] | None:
    """An index of `before` that has another colour in `now`, and where its colour is in `now`."""
    index = {color: i for i, color in now.items()}
    for i, color in before.items():
        if i in now and now[i] != color and color in index:
            return i, index[color]
    return None


# A raw id, or an RGB colour where labels hold colours.
Value = int | Color


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
    for scan in for_each_pair(work, items, pool, dataset.split):
        total.add(scan)
    return total


def _work(
    dataset: SegDataset, *, count_rgb: bool, compare: bool
) -> tuple[Callable[[Any], SplitScan], Sequence[Any]]:
    """A function, and what to call it with for each pair."""
    if isinstance(dataset, PackedDataset):
        work = partial(scan_packed, num_classes=dataset.classes.num_classes, count_rgb=count_rgb)
        return work, packed_pairs(dataset, compare=compare)
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


class PackedPair(NamedTuple):
    """An image of a pack. shards: that hold it. compared: whether its files are hashed, too."""

    image: PackedImage
    pair: Pair
    shards: Shards
    compared: bool


def packed_pairs(dataset: PackedDataset, *, compare: bool) -> list[PackedPair]:
    """All images of `dataset`. compare: also hash the files that it was made from."""
    # A record of its own for each, because all of them travel to other processes.
    shards, compared = dataset.shards, compare and dataset.source_is_there
    return [
        PackedPair(
            replace(image, shard=0),
            pair,
            Shards(shards.directory, [shards.shards[image.shard]]),
            compared,
        )
        for image, pair in zip(dataset.images, dataset.pairs, strict=True)
    ]


def scan_packed(item: PackedPair, num_classes: int, count_rgb: bool) -> SplitScan:
    """What one image and its label hold."""
    scan = SplitScan("", 1, num_classes)
    packed, pair, shards, compared = item
    try:
        shards.check(packed, num_classes)
    except DataError as error:
        scan.bad_files.append(BadFile.of(shards.path(packed), error))
        return scan
    finally:
        if compared:
            _compare(scan, item)
    image, label = split_rows(shards.rows(packed))
    scan.digests[bytes.fromhex(packed.image.sha256)] = [pair.name]
    scan.sizes[label.shape] = 1
    if packed.orientation != 1:
        scan.turned = [pair.name]
    scan.brightness = [brightness(image, packed.depth, pair.name)]
    if count_rgb:
        scan.rgb[:] = [np.bincount(image[..., c].ravel(), minlength=256) for c in range(3)]
    scan.pixels += np.bincount(label.ravel(), minlength=256)[:num_classes]
    num_valid = int(scan.pixels.sum())
    scan.images[:] = scan.pixels > 0
    scan.pixels_beside[:] = scan.images * num_valid
    scan.ignored_pixels = label.size - num_valid
    if not num_valid:
        scan.all_ignored = [pair.name]
    return scan


def _compare(scan: SplitScan, item: PackedPair) -> None:
    """Notes files that do not have the bytes that were packed."""
    for path, file in ((item.pair.image, item.image.image), (item.pair.label, item.image.label)):
        try:
            if has_content(path, file):
                continue
        except DataError as error:
            scan.bad_files.append(BadFile.of(path, error))
            continue
        reason = "changed since it was packed; delete the pack and make it again"
        scan.bad_files.append(BadFile(printable(path), reason))
