"""The decision: what the values of labels mean; a pure function of the survey."""

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from segtrain.data.read.classes import known_names, load_class_file
from segtrain.errors import ConfigError, DataError
from segtrain.survey.contents import Value
from segtrain.survey.decide import (
    MOST_CLASSES,
    Answers,
    Reading,
    UndecidedError,
    is_instances,
    shares_of,
)
from segtrain.survey.label_sets import LabelSet
from segtrain.survey.names import Legend, NamedClass
from segtrain.survey.survey import Survey
from segtrain.text import counted, first_of

# A colour this close to another one, and this much rarer, is a variant of it.
_SHADE, _RARE = 8, 0.01
# A border between areas: so much of it lies beside other values.
_THIN = 0.3
_STRAY = 1e-5
# So many colours without names come from smoothed edges.
_SMOOTHED = 32


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
    if len(labels.values) > MOST_CLASSES + 1 or (labels.kind == "ids" and is_instances(labels)):
        raise DataError(
            f"{survey.root}: {labels.pattern}: {len(labels.values)} different values, up to "
            f"{max(labels.values)}: numbers of objects, or no labels of classes; segtrain "
            f"trains on at most {MOST_CLASSES} classes"
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
            f"not name ({shares_of(labels, unnamed)})",
            [
                Reading(
                    "no data", f"--ignore {_listed([*sorted(ignored), *unnamed])}", tuple(unnamed)
                ),
                Reading(
                    "classes of their own",
                    f"--ignore {_listed(sorted(ignored)) or 'none'} "
                    + _names([named[v].name if v in named else f"class_{v}" for v in left]),
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
            f"uncertain border ({shares_of(labels, [value])})",
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
            f"data ({shares_of(labels, [255])})",
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
                [Reading(one.source, _names([c.name for c in one.classes])) for one in fitting],
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
                    _names(_default_names(sorted(values))),
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
                    _names([legend.classes[v - low].name for v in sorted(plain)]),
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
                    _names([*(o.name for o in main.values()), *map(_hex, unnamed)]),
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
                        _names(list(map(_hex, sorted(main)))),
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


def _names(names: Sequence[str]) -> str:
    return f"--names {shlex.quote(','.join(names))}"


def _listed(values: Sequence[Value]) -> str:
    """For a command line."""
    words = ",".join(str(v) if isinstance(v, int) else "#" + _hex(v)[6:] for v in values)
    return shlex.quote(words) if words else ""
