"""The check before training: the headers of all files and a few whole pairs, about 0.2 ms a pair.

`segtrain data check` reads all pixels (`full.py`).
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from segtrain.data.check.dark_images import check_brightness, spread
from segtrain.data.check.issues import ONE_SPLIT
from segtrain.data.check.scan import (
    BadFile,
    Palette,
    by_reason,
    class_problem,
    moved_colors,
    used_palette,
)
from segtrain.data.read.dataset import SegDataset, size_problem
from segtrain.data.read.decode import (
    decode_palette,
    decode_raw_label,
    label_mode_problem,
    read_bytes,
    read_header,
    read_raw_label,
)
from segtrain.data.read.labels import (
    count_ids,
    looks_like_train_ids,
    read_label,
    single_class,
    train_ids,
)
from segtrain.data.read.layouts import Pair, first_lines
from segtrain.errors import DataError
from segtrain.text import printable
from segtrain.types import IGNORE_INDEX

# Reading headers waits for the disk, not for the processor.
_HEADER_THREADS = 16
# A wrong class file or a wrong conversion shows in every label, so a few are enough.
_SAMPLES = 4
# Labels to look at before their ids are called train ids.
_ID_SAMPLES = 32
# Only if at least this fraction of the classes has raw ids that cannot be train ids.
_MIN_TELLING = 0.25


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
    depths = _check_headers(dataset)
    sample = [dataset.pairs[i] for i in spread(range(len(dataset)), _SAMPLES)]
    _refuse_single_class(dataset, sample)
    problem, warnings = check_brightness(dataset, dict(enumerate(depths)))
    if problem:
        raise DataError(problem)
    if dataset.label_format == "ids":
        lines = [_check_palettes(dataset, sample), _train_ids_warning(dataset, sample)]
        warnings += [f"split {dataset.split!r}: {line}" for line in lines if line]
    return warnings


def _check_headers(dataset: SegDataset) -> list[int]:
    """The bit depth of each image; refuses pairs that cannot be read, as far as headers tell."""
    check = partial(_check_header, label_format=dataset.label_format)
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        found = list(pool.map(check, dataset.pairs))
    bad_files = by_reason(result for result in found if isinstance(result, BadFile))
    if bad_files:
        lines = []
        for reason, places in bad_files.items():
            more = f" ({len(places)} files are like this)" if places[1:] else ""
            lines.append(f"{places[0]}: {reason}{more}")
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


def _refuse_single_class(dataset: SegDataset, sample: Sequence[Pair]) -> None:
    """Refuses labels with a single class beside ignored pixels: any model scores 100 % there.

    Reads the labels of the sample, and more only until a second class is found.
    """
    classes = dataset.classes
    values: set[int] = set()
    for number, pair in enumerate([*sample, *dataset.pairs]):
        is_settled = classes.num_classes == 1 or len(values - {IGNORE_INDEX}) > 1
        if number >= len(sample) and is_settled:
            return
        values.update(count_ids(read_label(pair.label, classes, dataset.label_format)))
    names = [classes.names[i] for i in values - {IGNORE_INDEX}]
    if classes.num_classes > 1 and len(names) < 2:
        is_mask = dataset.label_format == "ids" and (
            count_ids(read_raw_label(dataset.pairs[0].label)).keys() == {0, 255}
        )
        raise DataError(f"split {dataset.split!r}: {single_class(names, is_mask=is_mask)}")


def _check_palettes(dataset: SegDataset, sample: Sequence[Pair]) -> str:
    """What is odd about the palettes of the labels in `sample`; empty if nothing is.

    Raises:
        DataError: a palette contradicts the class file.
    """
    palettes: dict[str, Palette] = {}
    for pair in sample:
        data = read_bytes(pair.label)
        ids = count_ids(decode_raw_label(data, pair.label))
        palette = used_palette(decode_palette(data, pair.label), ids)
        if problem := class_problem(palette, dataset.classes):
            raise DataError(f"{printable(pair.label)}: {problem}")
        palettes[pair.name] = palette
    return moved_colors(palettes)[0]


def _train_ids_warning(dataset: SegDataset, sample: Sequence[Pair]) -> str:
    """A warning if the labels in `sample` and many others hold only train ids."""
    classes = dataset.classes
    # ADE20K: raw ids are 1 to 150, train ids 0 to 149. A sample of labels cannot tell which it has.
    telling = sum(min(c.ids) >= classes.num_classes for c in classes.classes)
    if telling < _MIN_TELLING * classes.num_classes:
        return ""
    ids: Counter[int] = Counter()
    more = [dataset.pairs[i] for i in spread(range(len(dataset)), _ID_SAMPLES)]
    for number, pair in enumerate([*sample, *more], start=1):
        ids.update(count_ids(read_raw_label(pair.label)))
        if number >= len(sample) and not looks_like_train_ids(ids, classes):
            return ""
    return f"by a sample of labels, {train_ids(ids)}"
