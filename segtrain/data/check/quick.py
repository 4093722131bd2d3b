"""The check before training: the headers of all files and a few whole pairs, about 0.2 ms a pair.

`segtrain data check` reads all pixels (`full.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from segtrain.data.check.dark_images import whole_split_problem
from segtrain.data.check.findings import (
    ONE_SPLIT,
    Finding,
    brightness_findings,
    file_findings,
    refuse_errors,
    split_findings,
)
from segtrain.data.check.scan import SplitScan, scan_image, scan_label
from segtrain.data.read.classes import read_by
from segtrain.data.read.dataset import SegDataset, size_problem
from segtrain.data.read.decode import label_mode_problem, read_header
from segtrain.data.read.labels import looks_like_train_ids
from segtrain.data.read.layouts import Pair
from segtrain.errors import DataError
from segtrain.text import printable

# Reading headers waits for the disk, not for the processor.
_HEADER_THREADS = 16
# Images and labels to look at in any case, and of the images with 16 bits: a wrong class file or a
# wrong conversion shows in every one.
_SAMPLES = 4
_DEEP_SAMPLES = 8
# To look at before all are called dark, or their ids train ids.
_MORE_SAMPLES = 32
# Only if at least this fraction of the classes has raw ids that cannot be train ids.
_MIN_TELLING = 0.25
# What a few pairs can tell.
_KINDS = {"unreadable", "values", "faint", "palette", "palettes", "one class", "train ids"}


def quick_check(train: SegDataset, evaluation: SegDataset) -> list[str]:
    """Warnings about the two splits, one line each.

    Raises:
        DataError: training would stop at this data: files that are not PNG or JPEG, sizes that
            differ, labels of a wrong kind (all are counted, the first ten shown); or, in the sample
            of pairs, files that cannot be read, unknown label values, a palette that contradicts
            the class file, nearly black images; or labels of a single class.
    """
    if train.split == evaluation.split:
        return [ONE_SPLIT, *check_split(train)]
    return check_split(train) + check_split(evaluation)


def check_split(dataset: SegDataset) -> list[str]:
    """`quick_check` of one split; nothing of a pack, which repeats what was found before packing.

    Raises:
        DataError: as there.
    """
    if dataset.is_packed:
        return []
    scan = SplitScan(dataset.split, len(dataset), dataset.classes.num_classes)
    depths = _scan_headers(dataset, scan)
    refuse_errors(file_findings(scan))
    _scan_images(dataset, scan, depths)
    _scan_labels(dataset, scan)
    kinds = _KINDS if _can_tell_train_ids(dataset) else _KINDS - {"train ids"}
    classes = read_by(dataset.classes, dataset.label_format)
    found = [one for one in split_findings(scan, classes) if one.kind in kinds]
    # Other labels may all agree.
    refuse_errors(one for one in found if one.kind != "palettes")
    return _lines(found)


def dark_warnings(dataset: SegDataset) -> list[str]:
    """Warnings about dark images of `dataset`, from a sample of at most 64.

    A pack brings its own. Images that cannot be read give no warning: reading them later fails
    with a message.
    """
    if dataset.is_packed:
        return []
    scan = SplitScan(dataset.split, len(dataset), dataset.classes.num_classes)
    indices = _spread(range(len(dataset)), _MORE_SAMPLES)
    try:
        depths = {i: read_header(dataset.pairs[i].image).depth for i in indices}
    except DataError:
        return []
    _scan_images(dataset, scan, depths)
    if scan.unreadable:
        return []
    return _lines(one for one in brightness_findings(scan) if one.kind == "faint")


def _lines(findings: Iterable[Finding]) -> list[str]:
    """Each on a line, with its first place."""
    return [
        f"split {one.split!r}, by a sample: {one.text}"
        + (f"; such as {printable(one.places[0])}" if one.places else "")
        for one in findings
    ]


def _scan_headers(dataset: SegDataset, scan: SplitScan) -> dict[int, int]:
    """The bit depth of each image, by its index; `scan` gets what the headers say is wrong."""
    read = partial(_read_headers, num_classes=scan.pixels.size, label_format=dataset.label_format)
    depths = {}
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        for i, (found, depth) in enumerate(pool.map(read, dataset.pairs)):
            scan.add(found)
            depths[i] = depth
    return depths


def _read_headers(pair: Pair, num_classes: int, label_format: str) -> tuple[SplitScan, int]:
    """What is wrong with a pair, as far as its headers tell, and the bit depth of its image."""
    scan, path, depth = SplitScan("", 1, num_classes), pair.image, 0
    try:
        image = read_header(path)
        depth, path = image.depth, pair.label
        label = read_header(path)
        if problem := label_mode_problem(label.mode, label_format):
            raise DataError(problem)
        if problem := size_problem(pair, image.size, label.size):
            scan.size_problems.append(problem)
    except DataError as error:
        scan.add_unreadable(path, error)
    return scan, depth


def _scan_images(dataset: SegDataset, scan: SplitScan, depths: Mapping[int, int]) -> None:
    """Adds a few images to `scan`, and more while all of them are suspicious.

    depths: bits per sample of the images to choose from, by their index.
    """
    indices = list(depths)
    deep = [i for i in indices if depths[i] > 8]
    few = [*_spread(indices, _SAMPLES), *_spread(deep, _DEEP_SAMPLES)]
    more = _spread(deep or indices, _MORE_SAMPLES)
    for number, i in enumerate(dict.fromkeys([*few, *more])):
        if number >= len(set(few)) and not whole_split_problem(scan.brightness):
            return
        scan.add(scan_image(dataset.pairs[i], dataset.classes.num_classes))


def _scan_labels(dataset: SegDataset, scan: SplitScan) -> None:
    """Adds a few labels to `scan`, and more while their ids are suspicious.

    With a single class beside ignored pixels any model scores 100 %: there all labels are read.
    """
    num_classes, can_tell = dataset.classes.num_classes, _can_tell_train_ids(dataset)
    indices = range(len(dataset))
    few, more = _spread(indices, _SAMPLES), _spread(indices, _MORE_SAMPLES)
    last = len({*few, *more})
    for number, i in enumerate(dict.fromkeys([*few, *more, *indices])):
        is_single = num_classes > 1 and np.count_nonzero(scan.pixels) < 2
        may_be_train_ids = can_tell and looks_like_train_ids(scan.values, dataset.classes)
        if number >= len(few) and not is_single and (number >= last or not may_be_train_ids):
            return
        scan.add(scan_label(dataset.pairs[i], dataset.classes, dataset.label_format))


def _can_tell_train_ids(dataset: SegDataset) -> bool:
    """Whether a sample of labels shows that they hold train ids instead of raw ids.

    Not with ADE20K, whose raw ids are 1 to 150, and train ids 0 to 149.
    """
    classes = dataset.classes
    telling = sum(min(one.ids) >= classes.num_classes for one in classes.classes)
    return dataset.label_format == "ids" and telling >= _MIN_TELLING * classes.num_classes


def _spread(indices: Sequence[int], count: int) -> Sequence[int]:
    """`count` of the indices or a few more, evenly spread; all if they are fewer."""
    return indices[:: max(1, len(indices) // count)]
