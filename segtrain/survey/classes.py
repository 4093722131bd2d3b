"""The decision: what the values of labels mean; a pure function of the survey."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from segtrain.errors import ConfigError, DataError
from segtrain.survey.contents import Color, Value, distance, is_shade, word
from segtrain.survey.decide import (
    MOST_CLASSES,
    Answers,
    Reading,
    UndecidedError,
    default_names,
    ignore_option,
    is_instances,
    names_option,
    shares_of,
)
from segtrain.survey.label_sets import LabelSet
from segtrain.survey.legends import legend_for_colors, legend_for_ids
from segtrain.survey.names import NamedClass
from segtrain.survey.survey import Survey
from segtrain.text import counted, first_of

# A shade so much rarer than the colour it is close to is a variant of it.
_RARE = 0.01
# A border between areas: so much of it lies beside other values.
_THIN = 0.3
_STRAY = 1e-5
# So many colours without names come from smoothed edges.
_SMOOTHED = 32


class Class(NamedTuple):
    """values: in labels that mean it, the first one is the usual. pixels: of all of them."""

    name: str
    values: tuple[Value, ...]
    color: Color | None
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
        ConfigError: --names or --ignore do not fit the labels.
        DataError: the values are those of no labels, or of one class.
        UndecidedError: two readings fit.
    """
    place = f"{survey.root}: {labels.pattern}"
    if labels.classes:
        return _by_file(labels, answers)
    if len(labels.values) > MOST_CLASSES + 1 or (labels.kind == "ids" and is_instances(labels)):
        raise DataError(
            f"{place}: {len(labels.values)} different values, up to {word(max(labels.values))}: "
            f"numbers of objects, or no labels of classes; segtrain trains on at most "
            f"{MOST_CLASSES} classes"
        )
    source, named = _named(survey, labels, answers)
    meaning = _meanings(place, labels, named, answers)
    ignored, reasons = _ignored(labels, meaning, named, answers)
    left = sorted(set(meaning.values()) - ignored)
    if unnamed := [v for v in left if v not in named] if named else []:
        raise _question(labels, source, named, unnamed, left, ignored)
    names, reason, warnings = _names(labels, source, named, left, ignored, answers)
    if len(names) < 2:
        raise DataError(
            f"{place}: one class only, {first_of(names.values())}; segmentation needs two, such as "
            "background"
        )
    values = {v: [v, *(s for s, m in meaning.items() if v == m != s)] for v in (*names, *ignored)}
    pixels = {v: facts.pixels for v, facts in labels.values.items()}
    for value, (_, *shades) in values.items():
        if shades:
            reasons.append(
                f"{counted(len(shades), 'shade', 'shades')} of {word(value)}, "
                f"{sum(pixels[s] for s in shades)} pixels, counted as it: "
                f"{first_of(map(word, shades), 3)}"
            )
    classes = [
        Class(
            name,
            tuple(values[v]),
            _color(v, named, labels.palette),
            sum(pixels.get(one, 0) for one in values[v]),
        )
        for v, name in names.items()
    ]
    without = [one for v in sorted(ignored) for one in values[v]]
    return Classes(tuple(classes), tuple(without), (reason, *reasons), tuple(warnings))


def _by_file(labels: LabelSet, answers: Answers) -> Classes:
    """Several files an image: one for each class, or for each object of the only class."""
    names = ("background", *labels.classes)
    if answers.names is not None:
        names = _given(answers.names, len(names), "a background and each file")
    how = "its objects, a file each" if labels.classes == ("foreground",) else "a file each"
    reason = (
        f"{labels.pattern}: {counted(len(names) - 1, 'class', 'classes')}, {how}; what none of "
        "them shows is background; where several do, the last of the list counts"
    )
    return Classes(tuple(Class(n, (i,), None, 0) for i, n in enumerate(names)), (), (reason,))


# The stages, alike for ids and colours


def _named(
    survey: Survey, labels: LabelSet, answers: Answers
) -> tuple[str, dict[Value, NamedClass]]:
    """The file that names the classes, and the class of each value; empty without one."""
    if answers.names is not None:
        return "", {}
    if labels.kind == "colors":
        legend = legend_for_colors(survey.legends, labels)
        return (legend.source, {c.color: c for c in legend.classes}) if legend else ("", {})
    legend = legend_for_ids(survey.legends, labels, answers.ignore or frozenset())
    if legend is None:
        return "", {}
    return legend.source, {c.value: c for c in sorted(legend.classes, key=lambda c: c.value)}


def _meanings(
    place: str, labels: LabelSet, named: Mapping[Value, NamedClass], answers: Answers
) -> dict[Value, Value]:
    """What each value counts as: itself, or the colour of which it is a shade."""
    if labels.kind != "colors":
        return {value: value for value in labels.values}
    pixels = {color: facts.pixels for color, facts in labels.values.items()}
    by_frequency = sorted(pixels, key=pixels.get, reverse=True)
    main, clashing = list(named), []
    for color in by_frequency if not named else ():
        near = next((one for one in main if is_shade(one, color)), None)
        if near is None or pixels[color] > _RARE * pixels[near]:
            main.append(color)
            clashing += [] if near is None else [(near, color)]
    if not named and len(main) > _SMOOTHED and answers.names is None:
        raise DataError(
            f"{place}: {len(pixels)} colours, most on few pixels: edges were smoothed or resized; "
            "save masks without that, or name the classes in class_dict.csv"
        )
    if clashing and (answers.names is None or len(answers.names) != len(main)):
        near, color = clashing[0]
        raise UndecidedError(
            f"{labels.pattern}: the colours {word(near)} and {word(color)} differ by a shade, and "
            f"both are frequent ({pixels[near]} and {pixels[color]} pixels)",
            [
                Reading(
                    f"{len(main)} classes", names_option(default_names(sorted(main))), (near, color)
                ),
                Reading("one class: make the labels equal first", "no option does it", (color,)),
            ],
        )
    found = {}
    for color in by_frequency:
        near = min(main, key=lambda one: distance(one, color))
        is_own = color in main or color in (answers.ignore or ()) or not is_shade(near, color)
        found[color] = color if is_own else near
    return found


def _ignored(
    labels: LabelSet,
    meaning: Mapping[Value, Value],
    named: Mapping[Value, NamedClass],
    answers: Answers,
) -> tuple[set[Value], list[str]]:
    """The values without a class, and why: by the command line, by name, or by a rule for 255."""
    there = sorted(set(meaning.values()))
    if answers.ignore is not None:
        usual = {0, 255} if labels.kind != "colors" else set()
        if unknown := answers.ignore - set(there) - named.keys() - usual:
            raise ConfigError(
                f"--ignore: no label holds {first_of(sorted(map(word, unknown)))}; they hold "
                f"{first_of(map(word, there), 20)}"
            )
        return set(answers.ignore), []
    ignored = {v for v, one in named.items() if one.means_no_class}
    reasons = []
    if ignored:
        shown = first_of(f"{word(v)} ({named[v].name})" for v in named if v in ignored)
        reasons.append(f"ignored: {shown}, by name")
    values = [v for v in there if v not in ignored]
    if labels.kind != "colors":
        unsure = [v for v in values if v not in named]
        if reason := _why_no_data(labels, values, unsure, bool(named)):
            ignored.add(255)
            reasons.append(f"ignored: 255: {reason}")
    return ignored, reasons


def _question(
    labels: LabelSet,
    source: str,
    named: Mapping[Value, NamedClass],
    unnamed: Sequence[Value],
    left: Sequence[Value],
    ignored: Set[Value],
) -> UndecidedError:
    """What the values are that a list of classes does not name: no data, or further classes?"""
    names = [named[v].name if v in named else default_names([v])[0] for v in left]
    return UndecidedError(
        f"{labels.pattern}: the labels hold {first_of(map(word, unnamed), 5)}, which {source} does "
        f"not name ({shares_of(labels, unnamed[:5])})",
        [
            Reading("no data", ignore_option([*sorted(ignored), *unnamed]), tuple(unnamed), True),
            Reading(
                "classes of their own",
                f"{ignore_option(sorted(ignored))} {names_option(names)}",
                tuple(unnamed),
            ),
        ],
    )


def _names(
    labels: LabelSet,
    source: str,
    named: Mapping[Value, NamedClass],
    left: Sequence[Value],
    ignored: Set[Value],
    answers: Answers,
) -> tuple[dict[Value, str], str, list[str]]:
    """The name of the class of each value, where names are from, and warnings."""
    what = "colours" if labels.kind == "colors" else "values"
    shown = first_of(map(word, left), 20)
    if answers.names is not None:
        names = _given(answers.names, len(left), f"the {what} {shown}")
        reason = f"names from the command line, in the order of the {what}"
        return dict(zip(left, names, strict=True)), reason, []
    if named:
        names = {v: one.name for v, one in named.items() if v not in ignored}
        absent = [name for v, name in names.items() if v not in left]
        warnings = [f"no label shows {first_of(absent)}"] if absent else []
        return names, f"names and {what} from {source}", warnings
    warnings = _strays(labels, left)
    if left[:1] == [0] and len(left) > 2:
        warnings.append("0 is taken for a class of its own; if it means no data, add --ignore 0")
    if left and labels.kind != "colors" and left[0] > 0 and not ignored:
        warnings.append(f"values begin at {left[0]}, and nothing is ignored")
    reason = f"{what} {shown}, a class each; no file names them (--names)"
    return dict(zip(left, default_names(left), strict=True)), reason, warnings


# Rules


def _why_no_data(
    labels: LabelSet, values: Sequence[int], unsure: Sequence[int], has_names: bool
) -> str:
    """Why 255 means no data, or empty.

    values: those that may be classes. unsure: those of them that no list names.

    Raises:
        DataError: some labels hold 0 and 255, the others 0 and 1.
        UndecidedError: 255, or the border of a trimap, may be a class or not.
    """
    if len(values) == 3 and (
        "trimap" in labels.pattern.lower() or values in ([0, 127, 255], [0, 128, 255])
    ):
        border = values[1] if values[1] in (127, 128) else values[2]
        if border in unsure:
            raise _class_or_not(
                f"{labels.pattern}: three values, {first_of(values)}; {border} is usually the "
                f"uncertain border ({shares_of(labels, [border])})",
                border,
            )
        return ""
    others = [v for v in values if v != 255]
    if 255 not in unsure or others in ([], [0]):
        return ""
    with_1, with_255 = (labels.values[v].files if v in values else 0 for v in (1, 255))
    total = sum(len(files) for files in labels.labels.values())
    if others == [0, 1] and with_1 + with_255 <= total:
        raise DataError(
            f"{labels.pattern}: {with_255} labels hold 0 and 255, {with_1} others 0 and 1: make "
            "them equal first, or say by --ignore what 255 means"
        )
    if has_names or labels.values[255].edge >= _THIN:
        return "beside other ids it means no data, as in VOC and Cityscapes"
    if len(others) >= 3 and others[0] <= 1 and others[-1] - others[0] == len(others) - 1:
        return f"beside {others[0]} to {others[-1]} it means no data, as in VOC and Cityscapes"
    if len(values) > 3 and len({b - a for a, b in pairwise(values)}) == 1:
        return ""  # grey levels: 0, 85, 170, 255
    raise _class_or_not(
        f"{labels.pattern}: the labels hold {first_of(values)}: 255 may be a class, or mean no "
        f"data ({shares_of(labels, [255])})",
        255,
    )


def _class_or_not(what: str, value: int) -> UndecidedError:
    readings = [
        Reading(f"{value} means no data", ignore_option([value]), (value,), True),
        Reading(f"{value} is a class", ignore_option([]), (value,)),
    ]
    return UndecidedError(what, readings)


def _strays(labels: LabelSet, values: Sequence[Value]) -> list[str]:
    """A warning for each value of a few pixels in a few files: perhaps a slip of the hand."""
    total = sum(facts.pixels for facts in labels.values.values())
    found = [(word(v), labels.values[v]) for v in values]
    return [
        f"{value} is on {facts.pixels} pixels, in {facts.example}: a class, or a slip? "
        f"{ignore_option([value])} leaves it out"
        for value, facts in found
        if facts.pixels < _STRAY * total and facts.files <= 2
    ]


def _color(
    value: Value, named: Mapping[Value, NamedClass], palette: Sequence[Color]
) -> Color | None:
    """The colour of a class: its value, else the list's, else that of the palette."""
    if not isinstance(value, int):
        return value
    if value in named and named[value].color:
        return named[value].color
    return palette[value] if value < len(palette) and len(set(palette)) > 1 else None


def _given(names: tuple[str, ...], number: int, what: str) -> tuple[str, ...]:
    if len(names) != number:
        raise ConfigError(f"--names: {len(names)} names for {what}: expected {number}")
    return names
