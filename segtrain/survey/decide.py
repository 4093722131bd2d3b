"""The decision: which labels, classes, ignored values and splits; a pure function of the survey.

Nothing is guessed where a guess could train wrong: `UndecidedError` shows the readings that fit,
each with the option of the command line that chooses it.
"""

import hashlib
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple

from segtrain.data.read.classes import known_names, load_class_file
from segtrain.errors import ConfigError, DataError
from segtrain.survey.contents import Value
from segtrain.survey.names import Legend, NamedClass
from segtrain.survey.survey import OWN, Comparison, Image, LabelSet, Survey
from segtrain.text import counted, first_of

# A colour this close to another one, and this much rarer, is a variant of it.
_SHADE, _RARE = 8, 0.01
# Values of fewer pixels than this are no class of their own beside a list of classes.
_FEW = 0.001
_MOST_CLASSES = 255
# A border between areas: so much of it lies beside other values.
_THIN = 0.3
_STRAY = 1e-5
# So many colours without names come from smoothed edges.
_SMOOTHED = 32
# Edges along borders of labels, against those of the neighbours.
_SHIFTED = 0.3
_BLACK = 0.95
DEFAULT_VAL = 0.2


@dataclass(frozen=True)
class Answers:
    """What the command line decides; None leaves it to the survey.

    labels: a part of the pattern of a label set. names: of the classes, in the order of their
    values. ignore: values without a class. val: a fraction, or a list file. channels: of images.
    """

    labels: str | None = None
    names: tuple[str, ...] | None = None
    ignore: frozenset[Value] | None = None
    val: float | str | None = None
    channels: int | None = None


class Reading(NamedTuple):
    """One way to read the data: in words, by this option, with these values marked in pictures."""

    words: str
    option: str
    marked: tuple[Value, ...] = ()
    labels: LabelSet | None = None


class UndecidedError(ConfigError):
    """Two readings fit; `readings` says which."""

    def __init__(self, what: str, readings: Sequence[Reading]) -> None:
        ways = [f"  {one.words}: {one.option}" for one in readings]
        super().__init__("\n".join([what, *ways]))
        self.readings = tuple(readings)


class Class(NamedTuple):
    """values: in labels that mean it, the first one is the usual. pixels: of all of them."""

    name: str
    values: tuple[Value, ...]
    color: tuple[int, int, int] | None
    pixels: int


@dataclass(frozen=True)
class Classes:
    """reasons: a line for each decision, as comments and for the terminal. warnings: likewise."""

    classes: tuple[Class, ...]
    ignored: tuple[Value, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()


# Which labels


def choose_labels(survey: Survey, answers: Answers) -> LabelSet:
    """The label set to train on.

    Raises:
        DataError: there are no labels.
        UndecidedError: several sets, which do not say the same.
    """
    sets = list(survey.sets)
    if answers.labels is not None:
        sets = [found for one in sets if (found := _restricted(one, answers.labels))]
        if not sets:
            there = first_of(one.pattern for one in survey.sets) or "none"
            raise ConfigError(f"--labels {answers.labels}: no such labels; found {there}")
    if not sets:
        raise DataError(_no_labels(survey))
    for is_other in (_is_instances, _is_named_instances):
        sets = [one for one in sets if not is_other(one)] or sets
    for one in list(sets):
        # Of two that say the same, ids are exact whatever a palette looks like.
        others = [o for o in sets if o is not one and _equal(survey, one, o)]
        if any(o.kind == "ids" or one.kind != "ids" for o in others):
            sets.remove(one)
    sets = _joined(sets)
    most = max(len(one.labels) for one in sets)
    sets = [one for one in sets if 10 * len(one.labels) >= most]
    if len(sets) > 1:
        raise UndecidedError(
            f"{len(sets)} sets of labels fit the images",
            [
                Reading(
                    f"{one.pattern} ({len(one.labels)} images, {len(one.values)} values)",
                    f"--labels {shlex.quote(one.pattern)}",
                    labels=one,
                )
                for one in sets
            ],
        )
    return sets[0]


def _restricted(labels: LabelSet, wanted: str) -> LabelSet | None:
    """The part of a set that `wanted` names: a folder, a part of a name or a pattern; or None."""
    wanted = wanted.strip("/")
    if wanted == labels.pattern:
        return labels

    def fits(file: str) -> bool:
        below = file.startswith(f"{wanted}/") or f"/{wanted}/" in f"/{file}"
        return below or fnmatchcase(file, f"*{wanted}*" if "*" not in wanted else wanted)

    kept = {
        image: found
        for image, files in labels.labels.items()
        if (found := tuple(file for file in files if fits(file)))
    }
    several = any(len(files) > 1 for files in kept.values())
    classes = labels.classes if several else ()
    if len(labels.classes) > 1 and not several:
        return replace(labels, pattern=wanted, labels=kept, classes=()) if kept else None
    return replace(labels, labels=kept, classes=classes) if kept else None


def _joined(sets: Sequence[LabelSet]) -> list[LabelSet]:
    """The sets, those of one kind that label different images as one."""
    found: list[LabelSet] = []
    for one in sorted(sets, key=lambda one: -len(one.labels)):
        for i, other in enumerate(found):
            alike = one.kind == other.kind and bool(one.classes) == bool(other.classes)
            if alike and not one.labels.keys() & other.labels.keys():
                found[i] = replace(
                    other,
                    pattern=f"{other.pattern}, {one.pattern}",
                    labels={**other.labels, **one.labels},
                    values={**one.values, **other.values},
                    palette=other.palette or one.palette,
                )
                break
        else:
            found.append(one)
    return found


def _is_named_instances(labels: LabelSet) -> bool:
    words = set(re.findall("[a-z]+", labels.pattern.lower()))
    return bool(words & {"segmentationobject", "object", "objects", "instance", "instances"})


def _equal(survey: Survey, one: LabelSet, other: LabelSet) -> bool:
    pair = one.pattern, other.pattern
    return pair in survey.equal_sets or pair[::-1] in survey.equal_sets


def _is_instances(labels: LabelSet) -> bool:
    """Whether values look like `class * 1000 + number`, or numbers of objects."""
    ids = [value for value in labels.values if isinstance(value, int)]
    return len(ids) > _MOST_CLASSES or sum(value >= 1000 for value in ids) > len(ids) / 2


def _no_labels(survey: Survey) -> str:
    lines = [f"{survey.root}: {len(survey.images)} images, and no labels that belong to them"]
    if survey.alone:
        lines.append(
            f"  {len(survey.alone)} pictures look like labels, but have no image of their name: "
            f"{first_of(survey.alone, 3)}"
        )
    if survey.unclear:
        lines.append(
            f"  {len(survey.unclear)} labels fit several images: {first_of(survey.unclear, 3)}"
        )
    lines += [f"  {note}" for note in survey.notes]
    lines.append("  image and label share a part of their names: a.jpg with a.png or a_mask.png")
    return "\n".join(lines)


# Which classes


def check_pairs(labels: LabelSet, found: Comparison, answers: Answers) -> None:
    """Stops where the images say something else than names and values.

    Raises:
        DataError: labels fit the images of their neighbours better than their own.
        UndecidedError: 0 lies where images are black.
    """
    own = found.scores.get(OWN, 1.0)
    words, best = max(found.scores.items(), key=lambda pair: pair[1], default=(OWN, own))
    if best > own + _SHIFTED:
        which = f"{words} image" if words.startswith("the ") else f"their image {words}"
        raise DataError(
            f"{labels.pattern}: labels fit {which} better than their own: edges are {best:.2f} "
            f"times as strong along their borders there, {own:.2f} times here; names, order or "
            "orientation were mixed up"
        )
    if found.black > _BLACK and 0 in labels.values and answers.ignore is None:
        raise UndecidedError(
            f"{labels.pattern}: 0 lies where images are black ({_shares(labels, [0])}): no data, "
            "or a class?",
            [
                Reading("no data", "--ignore 0", (0,)),
                Reading("a class", "--ignore none", (0,)),
            ],
        )


def choose_classes(survey: Survey, labels: LabelSet, answers: Answers) -> Classes:
    """The classes of `labels`, which is counted.

    Raises:
        DataError: the values are those of no labels.
        UndecidedError: two readings fit.
    """
    if labels.classes:
        return _by_file(labels, answers)
    if not labels.values:
        raise DataError(
            f"{survey.root}: {labels.pattern}: no label can be read: "
            f"{first_of(labels.unreadable, 3)}"
        )
    if len(labels.values) > _MOST_CLASSES + 1 or (labels.kind == "ids" and _is_instances(labels)):
        raise DataError(
            f"{survey.root}: {labels.pattern}: {len(labels.values)} different values, up to "
            f"{max(labels.values)}: numbers of objects, or no labels of classes; segtrain "
            f"trains on at most {_MOST_CLASSES} classes"
        )
    if labels.kind == "colors":
        return _of_colors(survey, labels, answers)
    return _of_ids(survey, labels, answers)


def _by_file(labels: LabelSet, answers: Answers) -> Classes:
    """Several files an image: one for each class, or for each object of the only class."""
    names = labels.classes
    if answers.names is not None:
        names = _given(answers.names, len(names) + 1, "a background and each file")[1:]
    background = answers.names[0] if answers.names else "background"
    classes = (
        Class(background, (0,), None, 0),
        *(Class(name, (i,), None, 0) for i, name in enumerate(names, start=1)),
    )
    how = "its objects, a file each" if labels.classes == ("foreground",) else "a file each"
    return Classes(
        classes,
        (),
        (
            f"{labels.pattern}: {counted(len(names), 'class', 'classes')}, {how}; what none of "
            "them shows is background; where several do, the last of the list counts",
        ),
    )


def _of_ids(survey: Survey, labels: LabelSet, answers: Answers) -> Classes:
    values = sorted(labels.values)
    legend, reasons = _legend_for_ids(survey, labels, answers), []
    ignored, warnings = set(answers.ignore or ()), []
    if unknown := ignored - set(values) - {255, 0}:
        raise ConfigError(
            f"--ignore: no label holds {first_of(sorted(unknown, key=str))}; "
            f"they hold {first_of(values, 20)}"
        )
    named: dict[int, NamedClass] = {}
    if legend is not None:
        named = {one.value: one for one in legend.classes if one.value is not None}
        reasons.append(f"names and values from {legend.source}")
        if answers.ignore is None:
            said = [v for v, one in named.items() if one.means_no_class]
            ignored |= set(said)
            if said:
                words = first_of(f"{v} ({named[v].name})" for v in said)
                reasons.append(f"ignored: {words}, by name in {legend.source}")
    left = [value for value in values if value not in ignored]
    unnamed = [value for value in left if legend is not None and value not in named]
    if answers.ignore is None:
        for value in list(unnamed if legend is not None else left):
            reason = _no_class(labels, left, value, legend)
            if reason:
                ignored.add(value)
                reasons.append(f"ignored: {value}: {reason}")
        left = [value for value in left if value not in ignored]
        unnamed = [value for value in unnamed if value not in ignored]
    if unnamed and answers.names is None:
        raise UndecidedError(
            f"{labels.pattern}: the labels hold {first_of(unnamed)}, which {legend.source} does "
            f"not name ({_shares(labels, unnamed)})",
            [
                Reading(
                    "no data", f"--ignore {_listed([*sorted(ignored), *unnamed])}", tuple(unnamed)
                ),
                Reading(
                    "classes of their own",
                    f"--ignore {_listed(sorted(ignored)) or 'none'} --names "
                    + ",".join(named[v].name if v in named else f"class_{v}" for v in left),
                    tuple(unnamed),
                ),
            ],
        )
    if answers.names is not None:
        names = _given(answers.names, len(left), f"the values {first_of(left, 20)}")
        reasons.insert(0, "names from the command line, in the order of the values")
        found = dict(zip(left, names, strict=True))
    elif legend is not None:
        kept = [v for v in named if v not in ignored]
        found = {value: named[value].name for value in sorted(kept)}
        if absent := [one for v, one in found.items() if v not in labels.values]:
            warnings.append(f"no label shows {first_of(absent)}")
    else:
        warnings += _strays(labels, left)
        found = dict(zip(left, _default_names(left), strict=True))
        reasons.append(f"values {first_of(left, 20)}, a class each; no file names them (--names)")
        if left and left[0] == 0 and len(left) > 2:
            warnings.append(
                "0 is taken for a class of its own; if it means no data, add --ignore 0"
            )
        if left and left[0] > 0 and not ignored:
            warnings.append(f"values begin at {left[0]}, and nothing is ignored")
    if len(found) < 2:
        raise DataError(
            f"{survey.root}: {labels.pattern}: one class only, {first_of(found)}; "
            "segmentation needs two, such as background"
        )
    palette = labels.palette
    classes = tuple(
        Class(
            name,
            (value,),
            (named[value].color if value in named else None)
            or (palette[value] if value < len(palette) and len(set(palette)) > 1 else None),
            labels.values[value].pixels if value in labels.values else 0,
        )
        for value, name in found.items()
    )
    return Classes(classes, tuple(sorted(ignored)), tuple(reasons), tuple(warnings))


def _strays(labels: LabelSet, values: Sequence[int]) -> list[str]:
    """A warning for each value of a few pixels in a few files: perhaps a slip of the hand."""
    total = sum(facts.pixels for facts in labels.values.values())
    return [
        f"{value} is on {labels.values[value].pixels} pixels, in {labels.values[value].example}: a "
        f"class, or a slip? --ignore {value} leaves it out"
        for value in values
        if labels.values[value].pixels < _STRAY * total and labels.values[value].files <= 2
    ]


def _no_class(labels: LabelSet, values: Sequence[int], value: int, legend: Legend | None) -> str:
    """Why `value` is no class, or empty.

    Raises:
        UndecidedError: it may be one.
    """
    others = [v for v in values if v != value]
    border = 128 if 128 in values or 127 in values else max(values)
    border = 127 if 127 in values else border
    is_trimap = "trimap" in labels.pattern.lower() or (
        values[0] == 0 and border < 255 == values[-1]
    )
    if is_trimap and len(values) == 3 and value == border:
        raise UndecidedError(
            f"{labels.pattern}: three values, {first_of(values)}; {value} is usually the "
            f"uncertain border ({_shares(labels, [value])})",
            [
                Reading("no class", f"--ignore {value}", (value,)),
                Reading("a class", "--ignore none", (value,)),
            ],
        )
    if value == 255 and others and others != [0] and not (is_trimap and len(values) == 3):
        total = sum(len(files) for files in labels.labels.values())
        if (
            others[:2] == [0, 1]
            and len(others) == 2
            and labels.values[1].files + labels.values[255].files <= total
        ):
            raise DataError(
                f"{labels.pattern}: {labels.values[255].files} labels hold 0 and 255, "
                f"{labels.values[1].files} others 0 and 1: make them equal first, or say by "
                "--ignore what 255 means"
            )
        if legend is not None or labels.values[255].edge >= _THIN:
            return "255 beside other ids means no data, as in VOC and Cityscapes"
        contiguous = others[-1] - others[0] == len(others) - 1 and others[0] <= 1
        if contiguous and len(others) >= 3:
            return f"255 beside {others[0]} to {others[-1]} means no data, as in VOC and Cityscapes"
        evenly = len({b - a for a, b in pairwise(values)}) == 1
        if evenly and len(values) > 3:
            return ""  # grey levels: 0, 85, 170, 255
        raise UndecidedError(
            f"{labels.pattern}: the labels hold {first_of(values)}: 255 may be a class, or mean no "
            f"data ({_shares(labels, [255])})",
            [
                Reading("255 means no data", "--ignore 255", (255,)),
                Reading("255 is a class", "--ignore none", (255,)),
            ],
        )
    return ""


def _legend_for_ids(survey: Survey, labels: LabelSet, answers: Answers) -> Legend | None:
    """The list of classes that fits the values, with a value for each class; None without one."""
    if answers.names is not None:
        return None
    values = set(labels.values) - set(answers.ignore or ())
    fitting, lists = [], []
    for legend in survey.legends:
        if not (legend.has_values or legend.has_colors):
            lists.append(legend)
        if legend.has_values:
            known = {one.value for one in legend.classes}
            if len(known & values) * 2 >= len(known) or values <= known:
                fitting.append(legend)
            continue
        if legend.has_colors and (by_color := _by_palette(legend, labels)):
            fitting.append(by_color)
            continue
        placed = _placed(legend, values, labels)
        if placed is not None:
            fitting.append(placed)
    meanings = {tuple((one.name, one.value) for one in legend.classes) for legend in fitting}
    if len(meanings) > 1:
        best = [one for one in fitting if values <= {c.value for c in one.classes} | {0, 255}]
        names = {tuple((c.name, c.value) for c in one.classes) for one in best}
        if len(names) != 1:
            raise UndecidedError(
                "several files name the classes differently: "
                + first_of(one.source for one in fitting),
                [
                    Reading(one.source, f"--names {','.join(c.name for c in one.classes)}")
                    for one in fitting
                ],
            )
        fitting = best
    fitting = fitting or _known_for_ids(labels, values)
    if lists and not fitting:
        raise UndecidedError(
            f"{labels.pattern}: the labels hold {len(values)} values, "
            f"{first_of(sorted(values), 20)}, and {lists[0].source} names "
            f"{len(lists[0].classes)} classes: they do not fit",
            [
                Reading(
                    "names for the values, in their order",
                    "--names " + ",".join(_default_names(sorted(values))),
                ),
                Reading("values without a class", "--ignore VALUES", tuple(sorted(values)[-1:])),
            ],
        )
    return fitting[0] if fitting else None


# Data sets that are known by the names of their labels.
_KNOWN_NAMES = {"_labelids": "cityscapes", "ade_": "ade20k"}


def _known_for_ids(labels: LabelSet, values: set[int]) -> list[Legend]:
    """The classes of a known data set, if names and values of the labels are its own."""
    for part, name in _KNOWN_NAMES.items():
        if part in labels.pattern.lower():
            file = load_class_file(name)
            named = [NamedClass(c.name, value) for c in file.classes for value in c.ids]
            ignored = [NamedClass(f"id {value}", value, None, True) for value in file.ignore_ids]
            if values <= {one.value for one in (*named, *ignored)}:
                return [Legend(f"the known classes of {name}", (*named, *ignored))]
    return []


def _placed(legend: Legend, values: set[int], labels: LabelSet) -> Legend | None:
    """A list without values: its classes count from 0, or from 1 if the labels say so.

    Raises:
        UndecidedError: both fit.
    """
    number = len(legend.classes)
    plain = {v for v in values if v != 255 or number > 255}
    if plain <= {0, 255} and number == 2:
        plain = values
    from_0, from_1 = plain <= set(range(number)), plain <= set(range(1, number + 1))
    if len(values) == number and plain != values and from_0 and number > 2:
        return None  # as many values as names: 255 may be the last of them
    two = sorted(values)
    if number == 2 and len(two) == 2 and two[0] == 0:
        return _valued(legend, two)
    if number == 1 and len(two) == 2 and two[0] == 0:
        return Legend(
            legend.source,
            (NamedClass("background", 0), legend.classes[0]._replace(value=two[1])),
        )
    if from_0 and from_1:
        raise UndecidedError(
            f"{labels.pattern}: the labels hold {first_of(sorted(plain), 20)}, and {legend.source} "
            f"names {number} classes: counted from 0 or from 1?",
            [
                Reading(
                    f"{low} is {legend.classes[0].name}",
                    "--names "
                    + shlex.quote(",".join(legend.classes[v - low].name for v in sorted(plain))),
                )
                for low in (0, 1)
            ],
        )
    if from_0 or from_1:
        return _valued(legend, range(1 - from_0, number + 1 - from_0))
    if plain <= set(range(number + 1)):
        # 0 to K for K names: 0 stays without a name, and `_of_ids` asks.
        return _valued(legend, range(1, number + 1))
    return None


def _valued(legend: Legend, values: Sequence[int]) -> Legend:
    pairs = zip(legend.classes, values, strict=True)
    return Legend(legend.source, tuple(one._replace(value=value) for one, value in pairs))


def _by_palette(legend: Legend, labels: LabelSet) -> Legend | None:
    """The classes with the values whose palette colours are theirs."""
    value_of = {labels.palette[v]: v for v in labels.values if v < len(labels.palette)}
    if not value_of or len(value_of.keys() & {one.color for one in legend.classes}) < len(value_of):
        return None
    return Legend(
        legend.source,
        tuple(
            one._replace(value=value_of.get(one.color))
            for one in legend.classes
            if one.color in value_of
        ),
    )


def _of_colors(survey: Survey, labels: LabelSet, answers: Answers) -> Classes:
    """Colours: those of a list of classes, or a class each."""
    pixels = {color: facts.pixels for color, facts in labels.values.items()}
    total = sum(pixels.values())
    legend = None if answers.names is not None else _legend_for_colors(survey, pixels)
    ignored = set(answers.ignore or ())
    reasons, warnings = [], []
    if legend is not None:
        main = {one.color: one for one in legend.classes}
        reasons.append(f"names and colours from {legend.source}")
        if answers.ignore is None:
            ignored |= {one.color for one in legend.classes if one.means_no_class}
            if said := [one.name for one in legend.classes if one.means_no_class]:
                reasons.append(f"ignored: {first_of(said)}, by name in {legend.source}")
    else:
        main = {}
        for color in sorted(pixels, key=pixels.get, reverse=True):
            near = [c for c in main if _distance(c, color) <= _SHADE]
            if not near or pixels[color] > _RARE * pixels[near[0]]:
                main[color] = None
        if len(main) > _SMOOTHED and answers.names is None:
            raise DataError(
                f"{survey.root}: {labels.pattern}: {len(pixels)} colours, most on few pixels: "
                "edges were smoothed or resized; save masks without that, or name the classes in "
                "class_dict.csv"
            )
        _refuse_shades(labels, list(main), pixels, answers)
    variants: dict[tuple, list] = defaultdict(list)
    unnamed = []
    for color in sorted(pixels, key=pixels.get, reverse=True):
        if color in main:
            continue
        near = min(main, key=lambda c: _distance(c, color))
        (variants[near] if _distance(near, color) <= _SHADE else unnamed).append(color)
    unnamed = [color for color in unnamed if color not in ignored]
    if unnamed:
        raise UndecidedError(
            f"{labels.pattern}: colours that {legend.source} does not name: "
            + first_of((f"{list(c)} ({pixels[c] / total:.2%} of the pixels)" for c in unnamed), 5),
            [
                Reading(
                    "no data", f"--ignore {_listed([*sorted(ignored), *unnamed])}", tuple(unnamed)
                ),
                Reading(
                    "classes of their own: add them to the file, or name all",
                    "--names " + ",".join([*(o.name for o in main.values()), *map(_hex, unnamed)]),
                    tuple(unnamed),
                ),
            ],
        )
    for color, shades in variants.items():
        count = sum(pixels[shade] for shade in shades)
        reasons.append(
            f"{counted(len(shades), 'shade', 'shades')} of {list(color)}, {count} pixels, "
            f"counted as it: {first_of(map(list, shades), 3)}"
        )
    kept = [color for color in main if color not in ignored]
    if answers.names is not None:
        kept.sort()
        names = _given(answers.names, len(kept), f"the colours {first_of(map(list, kept), 12)}")
        reasons.append("names from the command line, in the order of the colours")
    elif legend is not None:
        names = [main[color].name for color in kept]
        if absent := [main[c].name for c in kept if c not in pixels and c not in variants]:
            warnings.append(f"no label shows {first_of(absent)}")
    else:
        kept.sort()
        names = [_hex(color) for color in kept]
        reasons.append("a class for each colour; no file names them (--names)")
    if len(kept) < 2:
        raise DataError(f"{survey.root}: {labels.pattern}: one class only; segmentation needs two")
    classes = tuple(
        Class(
            name,
            (color, *variants[color]),
            color,
            sum(pixels.get(c, 0) for c in (color, *variants[color])),
        )
        for name, color in zip(names, kept, strict=True)
    )
    shades = [shade for color in ignored for shade in variants.get(color, ())]
    return Classes(classes, (*sorted(ignored), *shades), tuple(reasons), tuple(warnings))


def _legend_for_colors(survey: Survey, pixels: Mapping[Value, int]) -> Legend | None:
    """The list whose colours are those of the labels: of the folder, else of a known data set."""
    known = []
    for name in known_names():
        file = load_class_file(name)
        if len(file.given_colors) == file.num_classes:
            classes = [
                NamedClass(c.name, None, color) for c in file.classes for color in c.label_colors
            ]
            if len({one.name for one in classes}) == len(classes):
                known.append(Legend(f"the known classes of {name}", tuple(classes)))
    total = sum(pixels.values())
    for legend in (*survey.legends, *known):
        if legend.has_colors:
            near = sum(
                n
                for color, n in pixels.items()
                if any(_distance(color, one.color) <= _SHADE for one in legend.classes)
            )
            of_folder = legend in survey.legends
            if near >= (0.5 if of_folder else 0.99) * total and (of_folder or len(pixels) >= 5):
                return legend
    return None


def _refuse_shades(
    labels: LabelSet, main: Sequence[tuple], pixels: Mapping[Value, int], answers: Answers
) -> None:
    for i, color in enumerate(main):
        near = [other for other in main[:i] if _distance(color, other) <= _SHADE]
        if near and (answers.names is None or len(answers.names) != len(main)):
            raise UndecidedError(
                f"{labels.pattern}: the colours {list(near[0])} and {list(color)} differ by a "
                f"shade, and both are frequent ({pixels[near[0]]} and {pixels[color]} pixels)",
                [
                    Reading(
                        f"{len(main)} classes",
                        "--names " + ",".join(map(_hex, sorted(main))),
                        (near[0], color),
                    ),
                    Reading(
                        "one class: make the labels equal first", "no option does it", (color,)
                    ),
                ],
            )


def _distance(a: tuple, b: tuple) -> int:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def _hex(color: Value) -> str:
    return "color_" + "".join(f"{part:02x}" for part in color)


def _given(names: tuple[str, ...], number: int, what: str) -> tuple[str, ...]:
    if len(names) != number:
        raise ConfigError(f"--names: {len(names)} names for {what}: expected {number}")
    return names


def _default_names(values: Sequence[int]) -> list[str]:
    if len(values) == 2 and values[0] == 0:
        return ["background", "foreground"]
    return [f"class_{value}" for value in values]


def _listed(values: Sequence[Value]) -> str:
    """For a command line."""
    words = ",".join(str(v) if isinstance(v, int) else "#" + _hex(v)[6:] for v in values)
    return shlex.quote(words) if words else ""


def _shares(labels: LabelSet, values: Sequence[Value]) -> str:
    total = sum(facts.pixels for facts in labels.values.values())
    return ", ".join(
        f"{v}: {labels.values[v].pixels / total:.2%} of the pixels, in "
        f"{counted(labels.values[v].files, 'file', 'files')}"
        for v in values
    )


# Which images to train and to evaluate on


@dataclass(frozen=True)
class Splits:
    """Images with labels; reason: of the division."""

    train: tuple[Image, ...]
    val: tuple[Image, ...]
    reason: str
    warnings: tuple[str, ...] = ()


def choose_splits(survey: Survey, labels: LabelSet, answers: Answers) -> Splits:
    """The images to train on and those to evaluate on; only images with a label.

    Raises:
        DataError: fewer than two images have labels.
    """
    images = [image for image in survey.images if image.files[0] in labels.labels]
    if len(images) < 2:
        raise DataError(
            f"{survey.root}: {counted(len(images), 'image has', 'images have')} a "
            "label; training and evaluation need one each at least"
        )
    by_split = defaultdict(list)
    for image in images:
        by_split[image.split].append(image)
    if survey.split_source and by_split["train"] and answers.val is None:
        val_name = "val" if by_split["val"] else "test"
        if by_split[val_name]:
            others = {k: len(v) for k, v in by_split.items() if k not in ("train", val_name)}
            unused = "".join(f"; {n} of {k or 'no split'} are not used" for k, n in others.items())
            warnings = [_leak(survey, by_split["train"], by_split[val_name])]
            return Splits(
                tuple(by_split["train"]),
                tuple(by_split[val_name]),
                f"the splits of {survey.split_source}: train and {val_name}{unused}",
                tuple(filter(None, warnings)),
            )
        images = by_split["train"]  # whose validation is hidden, perhaps
    elif survey.split_source and answers.val is None and by_split["test"] and by_split["val"]:
        images = by_split["val"]
    share = answers.val if isinstance(answers.val, float) else DEFAULT_VAL
    key, what = _grouping(survey, images)
    groups: dict[str, list[Image]] = defaultdict(list)
    for image in images:
        groups[key[image.files[0]]].append(image)
    order = sorted(groups, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    val: list[Image] = []
    for name in order[:-1]:
        if len(val) + len(groups[name]) / 2 <= max(share * len(images), 1):
            val += groups[name]
    val = val or groups[order[0]]
    chosen = {image.files[0] for image in val}
    train = [image for image in images if image.files[0] not in chosen]
    return Splits(
        tuple(train),
        tuple(image for image in images if image.files[0] in chosen),
        f"{len(val)} of {len(images)} images, {what}, chosen by a hash of the names (--val)",
        tuple(filter(None, [_leak(survey, train, val)])),
    )


def _grouping(survey: Survey, images: Sequence[Image]) -> tuple[dict[str, str], str]:
    """What stays together when images are divided: scene, sequence, or blocks of like images."""
    for attribute, what in (("scene", "scenes"), ("sequence", "sequences")):
        groups = Counter((i.scene, i.sequence)[: 1 + (attribute == "sequence")] for i in images)
        if 4 <= len(groups) <= len(images) / 2:
            key = {
                i.files[0]: "/".join((i.scene, i.sequence)[: 1 + (attribute == "sequence")])
                for i in images
            }
            return key, f"whole {what} ({len(groups)})"
    if survey.similar:
        key, block = {}, 0
        images = sorted(images, key=lambda image: image.place)
        for before, image in zip([None, *images[:-1]], images, strict=True):
            if before is not None and (before.files[0], image.files[0]) not in survey.similar:
                block += 1
            key[image.files[0]] = f"{block} {images[0].files[0]}"
        if len(set(key.values())) >= 4:
            return key, "like neighbours kept together"
    if survey.similar or survey.moving:
        images = sorted(images, key=lambda image: image.place)
        size = max(1, len(images) // 5)
        key = {image.files[0]: str(i // size) for i, image in enumerate(images)}
        return key, "a block of one sequence"
    return {image.files[0]: image.files[0] for image in images}, "single images"


def _leak(survey: Survey, train: Sequence[Image], val: Sequence[Image]) -> str:
    """A warning if many images to evaluate on have a near-duplicate among those to train on."""
    names = {image.files[0] for image in train}
    near = {b for pair in survey.similar for a, b in (pair, pair[::-1]) if a in names}
    if survey.moving:
        frames = [
            (one.files[0], other.files[0])
            for one, other in pairwise(sorted(survey.images, key=lambda image: image.place))
            if (one.scene, one.sequence) == (other.scene, other.sequence)
        ]
        near |= {b for pair in frames for a, b in (pair, pair[::-1]) if a in names}
    found = [image for image in val if image.files[0] in near]
    if len(found) * 3 < len(val):
        return ""
    return (
        f"{len(found)} of {len(val)} images to evaluate on have a near-duplicate among those to "
        f"train on, such as {found[0].files[0]}: scores will be too good; keep sequences together"
    )
