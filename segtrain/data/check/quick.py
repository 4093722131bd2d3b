"""The check before training: the headers of all files and a few whole pairs, about 0.2 ms a pair.

`segtrain data check` reads all pixels (`full.py`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from segtrain.data.brightness import brightness
from segtrain.data.check.bad_file import BadFile, by_reason
from segtrain.data.check.faint import faint_problem, faint_warnings
from segtrain.data.check.issues import ONE_SPLIT
from segtrain.data.check.palettes import Palette, class_problem, moved_colors, used_palette
from segtrain.data.classes import IGNORE_INDEX
from segtrain.data.dataset import SegDataset, size_problem
from segtrain.data.decode import (
    decode_palette,
    decode_raw_label,
    label_mode_problem,
    read_bytes,
    read_header,
    read_label,
    read_raw_label,
)
from segtrain.data.labels import count_ids
from segtrain.data.layouts import Pair, first_lines
from segtrain.data.suggest import looks_like_train_ids, single_class, train_ids
from segtrain.errors import DataError
from segtrain.text import printable

# Reading headers waits for the disk, not for the processor.
_HEADER_THREADS = 16
# A wrong class file or a wrong conversion shows in every label, so a few are enough.
_SAMPLES = 4
# Labels to look at before their ids are called train ids.
_ID_SAMPLES = 32
# Part of the classes whose raw id must differ from all train ids for that.
_MIN_TELLING = 0.25


def quick_check(train: SegDataset, evaluation: SegDataset) -> list[str]:
    """Warnings about the two splits, one line each.

    Raises:
        DataError: training would stop at this data: files that are not PNG or JPEG, sizes that
            differ, labels of a wrong kind (all are counted, the first ten shown); or, in the sample
            of pairs, files that cannot be read, unknown label values, a palette that contradicts
            the class file, next to black images; or labels of a single class.
    """
    if train.split == evaluation.split:
        return [ONE_SPLIT, *_check_split(train)]
    return _check_split(train) + _check_split(evaluation)


def _check_split(dataset: SegDataset) -> list[str]:
    depths = dict(enumerate(_check_headers(dataset)))
    sample = range(0, len(dataset), max(1, len(dataset) // _SAMPLES))
    labels, seen = [], []
    for i in sample:
        image, label = dataset[i]
        labels.append(label)
        seen.append(brightness(image, depths[i], printable(dataset.pairs[i].image)))
    _refuse_single_class(dataset, labels)
    if problem := faint_problem(dataset, depths, seen):
        raise DataError(problem)
    warnings = faint_warnings(dataset, seen)
    if dataset.label_format == "ids":
        lines = [_check_palettes(dataset, sample), _train_ids_warning(dataset, sample)]
        warnings += [f"split {dataset.split!r}: {line}" for line in lines if line]
    return warnings


def _check_headers(dataset: SegDataset) -> list[int]:
    """The bit depth of each image; refuses pairs that cannot be read, as far as headers tell."""
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        found = list(
            pool.map(lambda pair: _check_header(pair, dataset.label_format), dataset.pairs)
        )
    bad_files = [result for result in found if isinstance(result, BadFile)]
    if bad_files:
        lines = [
            f"{places[0]}: {reason}"
            + (f" ({len(places)} files are like this)" if places[1:] else "")
            for reason, places in by_reason(bad_files).items()
        ]
        raise DataError(first_lines(f"split {dataset.split!r}", lines))
    return found


def _check_header(pair: Pair, label_format: str) -> BadFile | int:
    headers = []
    for path in (pair.image, pair.label):
        try:
            headers.append(read_header(path))
        except DataError as error:
            return BadFile.of(path, error)
    image, label = headers
    if problem := label_mode_problem(label.mode, label_format):
        return BadFile(printable(pair.label), problem)
    if problem := size_problem(pair, image.size, label.size):
        return BadFile.of(pair.label, DataError(problem))
    return image.depth


def _refuse_single_class(dataset: SegDataset, sample: Sequence[np.ndarray]) -> None:
    """Refuses labels with a single class beside ignored pixels: any model scores 100 % there.

    The sample nearly always holds two classes; if not, labels are read until a second is found.
    """
    classes = dataset.classes
    values = {int(value) for label in sample for value in np.unique(label)}
    rest = iter(dataset.pairs)
    while classes.num_classes > 1 and len(values - {IGNORE_INDEX}) < 2:
        pair = next(rest, None)
        if pair is None:
            names = [classes.names[i] for i in values - {IGNORE_INDEX}]
            text = single_class(names, is_mask=_holds_masks(dataset))
            raise DataError(f"split {dataset.split!r}: {text}")
        label = read_label(pair.label, classes, dataset.label_format)
        values.update(int(value) for value in np.unique(label))


def _holds_masks(dataset: SegDataset) -> bool:
    """Whether the first label is a mask of 0 and 255."""
    if dataset.label_format == "colors":
        return False
    return set(np.unique(read_raw_label(dataset.pairs[0].label)).tolist()) == {0, 255}


def _check_palettes(dataset: SegDataset, sample: Iterable[int]) -> str:
    """What is odd about the palettes of the labels in `sample`; empty if nothing is.

    Raises:
        DataError: a palette contradicts the class file.
    """
    palettes: dict[str, Palette] = {}
    for i in sample:
        path = dataset.pairs[i].label
        data = read_bytes(path)
        palette = used_palette(decode_palette(data, path), count_ids(decode_raw_label(data, path)))
        if problem := class_problem(palette, dataset.classes):
            raise DataError(f"{printable(path)}: {problem}")
        palettes[dataset.name(i)] = palette
    return moved_colors(palettes)[0]


def _train_ids_warning(dataset: SegDataset, sample: Iterable[int]) -> str:
    """A warning if the labels in `sample`, and then those of more labels, hold only train ids."""
    classes = dataset.classes
    # Where nearly all raw ids are train ids too, as in ADE20K with 1 to 150, a sample of labels
    # cannot tell them apart.
    telling = sum(min(c.ids) >= classes.num_classes for c in classes.classes)
    if telling < _MIN_TELLING * classes.num_classes:
        return ""
    ids: Counter[int] = Counter()
    for i in sample:
        ids.update(count_ids(read_raw_label(dataset.pairs[i].label)))
    rest = iter(dataset.pairs[:: max(1, len(dataset) // _ID_SAMPLES)])
    while looks_like_train_ids(ids, classes):
        pair = next(rest, None)
        if pair is None:
            return f"by a sample of labels, {train_ids(ids)}"
        ids.update(count_ids(read_raw_label(pair.label)))
    return ""
