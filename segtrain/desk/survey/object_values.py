"""Ids and colours that count objects and are no classes: each is one area, and seldom comes again.

They grow with the file or with the folder, or are colours by chance.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import NamedTuple

import cv2
import numpy as np

from segtrain.desk.survey import contents
from segtrain.desk.survey.contents import Value, packed, spread, word
from segtrain.desk.survey.label_set import MOST_CLASSES, LabelSet
from segtrain.desk.survey.questions import Answers, Reading, UndecidedError, ignore_option
from segtrain.errors import DataError
from segtrain.text import first_of

_SAMPLE, _LONGEST_PX = 24, 1024
# Objects are one area each, but for what lies across them; classes are often several.
_AREAS = 1.25
# Of the values: those in one file each. Fewer values prove nothing.
_OF_ONE_FILE, _LEAST_VALUES, _LEAST_COUNTS = 0.9, 6, 3
# Of the numbers from 1 to the largest one of a file: those that it shows, and with so many numbers.
_FILLED, _LEAST_FILLED, _MANY = 0.75, 0.5, 30
# More values than this, each one area a file, may count cells of a film, which many files show.
# Fewer may be parts of a body. Classes of 30 data sets have 1.07 to 3.2 areas, but of faces 1.
_MANY_KEPT, _ONE_AREA = 8, 1.05
# Smaller areas were cut off by what lies across an object; so much rim has a thin line.
_FRAGMENT_PX, _RIM = 3, 0.95
_NO_OBJECTS = 255, 65535


def check_objects(folder: Path, labels: LabelSet, answers: Answers) -> None:
    """Stops where ids or colours may count objects; reads a sample of the labels in `folder`.

    Raises:
        DataError: there are more ids than classes can be, and they are of no objects.
        UndecidedError: objects, or classes?
    """
    is_number = labels.kind in ("ids", "first")
    is_many = len(labels.values) > MOST_CLASSES + 1
    is_said = answers.ignore is not None or answers.names is not None
    if labels.kind in ("ids", "colors") and not is_said and (why := _why_objects(folder, labels)):
        raise _objects_or_classes(labels, why, is_many=is_many)
    # Such as `class * 1000 + number`: Cityscapes' 24003 is the person (24) with the number 3.
    is_coded = is_number and sum(v >= 1000 for v in labels.values) > len(labels.values) / 2
    if is_number and (is_many or (is_coded and not is_said)):
        objects = "numbers of objects" if is_coded else "numbers of objects (--instances binary)"
        if not is_many:
            objects = f"classes (--names, one for each value), {objects}"
        raise DataError(
            f"{folder}: {labels.pattern}: {len(labels.values)} different values, up to "
            f"{max(labels.values)}: {objects}, greys (--threshold 128), or no labels of classes; "
            f"at most {MOST_CLASSES} classes"
        )


def _objects_or_classes(labels: LabelSet, why: str, *, is_many: bool) -> UndecidedError | DataError:
    """The question, with the answers that work; without any it is a refusal that says what helps.

    is_many: there are more values than classes can be.
    """
    background = 0 if labels.kind == "ids" else (0, 0, 0)
    marked = _marked(labels)
    readings, hint = [], ""
    if background not in labels.values:
        hint = f"; --instances binary takes all but {word(background)} for objects"
    elif marked:
        hint = f"; --instances binary takes {first_of(marked)} for objects, too: make it 0 first"
    else:
        readings.append(Reading("objects of one class", "--instances binary"))
    if not is_many:
        readings.append(Reading("classes", ignore_option(marked)))
    what = f"{labels.pattern}: {why}: numbers of objects, or classes?{hint}"
    return UndecidedError(what, readings) if readings else DataError(what)


def _why_objects(folder: Path, labels: LabelSet) -> str:
    """Why values may count objects, or empty."""
    others = [_background(labels), *_marked(labels)]
    facts = {v: x for v, x in labels.values.items() if v not in others}
    # Not the colours along smoothed edges, which are of one file each, too.
    solid = [x.files for x in facts.values() if x.rim < _RIM * x.pixels]
    if len(solid) < 3 or 2 * len(solid) < len(facts):
        return ""
    single = solid.count(1)
    is_unique = single >= _OF_ONE_FILE * len(solid) and len(solid) >= _LEAST_VALUES
    are_numbers = labels.kind == "ids" or all(color[1:] == (0, 0) for color in facts)
    is_kept = are_numbers and _MANY_KEPT < len(solid) <= MOST_CLASSES
    if not (is_unique or is_kept) and (not are_numbers or len({*solid}) == 1):
        return ""
    sample = list(_sampled(folder, labels, others))
    number, areas = (sum(x) for x in zip(*((len(s.values), s.areas) for s in sample), strict=True))
    if not number or areas > _AREAS * number:
        return ""
    if is_unique and (len(labels.labels) > 1 or number > _MANY):
        what = "numbers" if labels.kind == "ids" else "colours"
        return f"{single} of {len(solid)} {what} are in one file each, and nearly all are one area"
    if are_numbers and _are_counted(sample):
        return "each label has about one area of each value from 1 on, some more than others"
    # A label of one value and its background shows the class of an image.
    if is_kept and areas <= _ONE_AREA * number and number > 2 * len(sample):
        return f"nearly each of {len(solid)} numbers is one area in every label that shows it"
    return ""


class _Sampled(NamedTuple):
    """values: of one label, without the background. areas: that are of one of these."""

    values: list[int]
    areas: int


def _background(labels: LabelSet) -> Value:
    usual = 0 if labels.kind == "ids" else (0, 0, 0)
    most = max(labels.values, key=lambda value: labels.values[value].pixels)
    return usual if usual in labels.values else most


def _marked(labels: LabelSet) -> list[int]:
    """What lies around objects in many files, such as 255 in VOC: it is none of them."""
    known = (v for v in _NO_OBJECTS if labels.kind == "ids" and v in labels.values)
    return [v for v in known if 2 * labels.values[v].files >= len(labels.labels)]


def _sampled(folder: Path, labels: LabelSet, others: Sequence[Value]) -> Iterator[_Sampled]:
    """others: values that are no objects."""
    for files in spread(list(labels.labels.values()), _SAMPLE):
        if not files:
            continue
        path = folder / files[0]
        label = contents.values_of(path, labels.kind, contents.middle_window(path))
        step = -(-max(label.shape) // _LONGEST_PX)
        label = label[::step, ::step]
        shown = ~np.isin(label, [packed(value) for value in others])
        # A grid with a cell between two pixels, which joins them if they are equal.
        cells = np.zeros([2 * side - 1 for side in label.shape], np.uint8)
        cells[::2, ::2] = shown
        cells[::2, 1::2] = shown[:, 1:] & (label[:, 1:] == label[:, :-1])
        cells[1::2, ::2] = shown[1:] & (label[1:] == label[:-1])
        _, _, stats, _ = cv2.connectedComponentsWithStats(cells, connectivity=4)
        areas = stats[1:, cv2.CC_STAT_AREA] > 2 * _FRAGMENT_PX
        values = np.unique(label[shown])
        # Colours of red alone number objects, too, as in masks of BBBC039.
        values = values >> 16 if labels.kind == "colors" and not (values & 0xFFFF).any() else values
        yield _Sampled(values.tolist(), int(areas.sum()))


def _are_counted(sample: Sequence[_Sampled]) -> bool:
    """Whether labels number their objects from 1 on, perhaps with gaps.

    Images show the same classes often, but seldom the same number of objects.
    """
    shown = [x.values for x in sample if x.values]
    largest = [values[-1] for values in shown]
    if not shown or len({*largest}) == 1 or max(largest) < 3:
        return False
    filled = [len(values) / values[-1] for values in shown]
    if min(filled) == 1:
        return True
    files_of = Counter(chain.from_iterable(shown))
    # Few images have many objects, so that large numbers are rare.
    third = max(1, len(files_of) // 3)
    ordered = [files_of[value] for value in sorted(files_of)]
    declines = sum(ordered[:third]) >= 2 * sum(ordered[-third:])
    # A class that few images show has one number; counts have many.
    if not declines or len(files_of) < _LEAST_VALUES or len({*largest}) < _LEAST_COUNTS:
        return False
    return median(filled) >= (_LEAST_FILLED if max(largest) >= _MANY else _FILLED)
