"""Classes of labels with a file for each class, or for each object of a single class."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from segtrain.desk.survey.class_table import Class, Classes
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.questions import Answers, Reading, UndecidedError, names_option
from segtrain.desk.survey.survey import Survey
from segtrain.errors import ConfigError, DataError, refuse_unused
from segtrain.text import counted, first_of
from segtrain.types import IGNORE_INDEX

_MOST_WITH_PART = 0.25  # of the images
_LEAST_WITH_WHOLE = 0.9  # of the images
_LEAST_ON_OTHERS = 0.9  # of the pixels of a part


def classes_of_files(survey: Survey, labels: LabelSet, answers: Answers) -> Classes:
    """The classes: the background, and each class with pixels; void names are ignored.

    Raises:
        ConfigError: --names does not fit, or --ignore is given.
        UndecidedError: a mask may be a class or a region of interest.
        DataError: classes may overlap, and no file shows anything.
    """
    if answers.ignore:
        held = f"{labels.pattern}: a file for each class or object"
        refuse_unused(vars(answers), "ignore", held)
    numbers = range(1, len(labels.classes) + 1)
    ignored = labels.void
    background = [i for i in numbers if labels.classes[i - 1].lower() == "background"]
    shown = [i for i in numbers if i in labels.values and labels.values[i].pixels]
    kept = [0, *(i for i in shown if i not in (*ignored, *background))]
    words = _named(survey, labels.classes)
    names = ("background", *(words[i - 1] for i in kept[1:]))
    is_one = labels.is_one_class
    if labels.overlapping:
        return _overlapping(survey, labels, dict(zip(kept[1:], names[1:], strict=True)), answers)
    if answers.names is None:
        _ask_about_parts(labels, kept[1:])
    if answers.names is not None and is_one:
        # --names lesion is short for background,lesion.
        given = answers.names if len(answers.names) > 1 else ("background", *answers.names)
        if len(given) != 2:
            raise ConfigError(
                f"--names: {len(given)} names for a background and what the files show: expected 2"
            )
        names = given
    elif is_one and (named := _the_only_name(survey)):
        names = ("background", named)
    how = "in files of their own; what none of them shows is background"
    if labels.numbered:
        how = f"all but {'0' if labels.kind == 'ids' else 'black'} (--instances binary)"
    reason = f"{labels.pattern}: {counted(len(names) - 1, 'class', 'classes')}, {how}"
    if labels.claimed:
        total = sum(facts.pixels for facts in labels.values.values())
        reason += (
            f"; {labels.claimed / total:.2%} of the pixels are in several: the smaller area "
            "counts, and --task multilabel keeps all"
        )
    reasons = [reason]
    if ignored:
        reasons.append(f"ignored: {first_of(labels.classes[i - 1] for i in ignored)}, by name")
    if empty := [words[i - 1] for i in numbers if i not in (*shown, *background, *ignored)]:
        reasons.append(f"no class: {first_of(empty)}, whose files show nothing")
    classes = []
    for i, name in zip(kept, names, strict=True):
        # Files of a class called background show the rest, as value 0 does.
        values = (i,) if i else (0, *background)
        pixels = sum(labels.values[v].pixels for v in values if v in labels.values)
        classes.append(Class(name, values, None, pixels))
    return Classes(
        tuple(classes),
        tuple(ignored),
        tuple(reasons),
        ignored_names={i: labels.classes[i - 1] for i in ignored},
        ignored_pixels=sum(labels.values[i].pixels for i in ignored if i in labels.values),
    )


def _ask_about_parts(labels: LabelSet, shown: Sequence[int]) -> None:
    """Asks about masks that few images have and that lie on others, if nearly all have another.

    A tumour on its organ is a class; a region of interest on a lesion is none. `labels.claimed`
    is the overlap of all classes: of several parts, some may not lie on others.
    """
    files = Counter(
        k for own in labels.labels.values() for k in {labels.class_of.get(x) for x in own}
    )
    number = len(labels.labels)
    parts = [
        k
        for k in shown
        if files[k] <= _MOST_WITH_PART * number
        and labels.claimed >= _LEAST_ON_OTHERS * labels.values[k].pixels
    ]
    if not parts or not any(files[k] >= _LEAST_WITH_WHOLE * number for k in shown):
        return
    in_parts = sum(labels.values[k].pixels for k in parts)
    lie = "lie" if labels.claimed >= _LEAST_ON_OTHERS * in_parts else "may lie"
    names = [labels.classes[k - 1] for k in shown]
    others = [labels.classes[k - 1] for k in shown if k not in parts]
    counts = first_of(
        [f"{labels.classes[k - 1]} ({counted(files[k], 'image', 'images')})" for k in parts]
    )
    raise UndecidedError(
        f"{labels.pattern}: few images have masks of {counts}, which {lie} on others: classes?",
        [
            Reading("classes of their own", names_option(names)),
            Reading("no data", f"{names_option(others)} --leave-out labels"),
        ],
    )


def _named(survey: Survey, words: Sequence[str]) -> Sequence[str]:
    """If all words are numbers, their names from a class list; else the words."""
    if all(word.isdecimal() for word in words):
        numbers = [int(word) for word in words]
        for legend in survey.legends:
            entries = legend.classes
            if not legend.has_values:  # count from 1, as 0 is the background
                entries = [x._replace(value=i) for i, x in enumerate(entries, start=1)]
            name_of = {entry.value: entry.name for entry in entries}
            if name_of.keys() >= {*numbers} and min(numbers, default=0) > 0:
                return [name_of[number] for number in numbers]
    return words


def _the_only_name(survey: Survey) -> str:
    """The name of the only class in the class lists, background aside; else empty."""
    every = (entry for legend in survey.legends for entry in legend.classes)
    names = {entry.name for entry in every if not entry.means_no_class} - {"background"}
    return names.pop() if len(names) == 1 else ""


def _overlapping(
    survey: Survey, labels: LabelSet, name_of: Mapping[int, str], answers: Answers
) -> Classes:
    """Classes that may overlap, without a background; name_of: by their numbers.

    Raises:
        DataError: no file shows anything.
        ConfigError: --names gives several names for one class.
    """
    if not name_of:
        raise DataError(f"{labels.pattern}: no file shows anything")
    kept, names = [*name_of], [*name_of.values()]
    if answers.names is not None and labels.is_one_class:
        if len(answers.names) > 1:
            raise ConfigError(f"--names {','.join(answers.names)}: the files show one class")
        names = list(answers.names)
    sizes = (image.size for image in survey.images if image.path in labels.labels)
    reasons = [
        f"{labels.pattern}: {counted(len(names), 'class', 'classes')}, in files of their own, "
        "each found by itself"
    ]
    owned = Counter(
        i for files in labels.labels.values() for i in {labels.class_of.get(f, 1) for f in files}
    )
    if without_file := [
        f"{name} ({len(labels.labels) - owned[i]})"
        for i, name in zip(kept, names, strict=True)
        if owned[i] < len(labels.labels)
    ]:
        reasons.append(f"images without a file of a class do not show it: {first_of(without_file)}")
    if labels.void:
        reasons.append(f"ignored: {first_of(labels.classes[i - 1] for i in labels.void)}, by name")
    classes = [
        Class(name, (i,), None, labels.values[i].pixels)
        for i, name in zip(kept, names, strict=True)
    ]
    # All pixels of the images: classes that overlap may sum up to more or to less.
    pixels = sum(math.prod(size) for size in sizes)
    return Classes(tuple(classes), (IGNORE_INDEX,), tuple(reasons), all_pixels=pixels)
