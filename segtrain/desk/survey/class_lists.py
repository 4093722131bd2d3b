"""The decision: what each value of the labels means.

In this order, each stage on what the one before has left: numbers of objects are none of classes; a
list of classes names values; colours may be shades of each other; some values mean no data; some
may be slips; the others are classes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from segtrain.desk.survey import doubts
from segtrain.desk.survey.class_entries import NamedClass
from segtrain.desk.survey.class_table import Class, Classes
from segtrain.desk.survey.contents import KINDS, Color, Value, word
from segtrain.desk.survey.label_set import MOST_CLASSES, LabelSet, shares_of
from segtrain.desk.survey.legends import named_values
from segtrain.desk.survey.no_data import as_classes, ignored_values
from segtrain.desk.survey.object_values import check_objects
from segtrain.desk.survey.questions import (
    Answers,
    Reading,
    UndecidedError,
    default_names,
    ignore_option,
)
from segtrain.desk.survey.separate_files import classes_of_files
from segtrain.desk.survey.shades import distance, meanings
from segtrain.desk.survey.survey import Survey
from segtrain.errors import ConfigError, DataError
from segtrain.text import counted, first_of


class _Known(NamedTuple):
    """What is known of the values before classes are chosen.

    named: what the file `source` names. ignored: values without a class. left: the others.
    """

    labels: LabelSet
    answers: Answers
    source: str
    named: Mapping[Value, NamedClass]
    ignored: Sequence[Value]
    left: Sequence[Value]


def choose_classes(survey: Survey, labels: LabelSet, answers: Answers) -> Classes:
    """The classes of `labels`, which is counted; of labels without a list a sample is read again.

    Raises:
        ConfigError: --names or --ignore do not fit the labels.
        DataError: the values are those of no labels, or of one class.
        UndecidedError: two readings fit.
    """
    if labels.classes:
        return classes_of_files(survey, labels, answers)
    # A list as long as there are values has said what they are; one value may be no data beside it.
    if not any(len(legend.classes) >= len(labels.values) - 1 for legend in survey.legends):
        check_objects(survey.root, labels, answers)
    # Names first: the colours of a list tell which colours are shades of them.
    source, named = named_values(survey.legends, labels, answers)
    meaning = meanings(labels, list(named), answers)
    there = sorted(set(meaning.values()))
    ignored, reasons = ignored_values(labels, answers, source, named, there)
    left = [value for value in there if value not in ignored]
    known = _Known(labels, answers, source, named, ignored, left)
    if labels.kind == "first":
        reasons.append(f"labels hold {KINDS['first']}")
    if labels.threshold is not None is answers.threshold:
        reasons.append("files of 1 bit: 1 is white, as 255 in the others")
    _check_values(known)
    names, reason = _names(survey, known)
    _check_number(survey, known, names, (*reasons, reason))
    shades = _shades(meaning, (*names, *ignored))
    reasons = (reason, *reasons, *_about_shades(labels, shades))
    warnings = ()
    if survey.legends and not source and answers.names is None:
        others = first_of(legend.source for legend in survey.legends)
        warnings = (f"names of classes that do not fit the labels: {others}",)
    return _table(known, names, shades, reasons, warnings)


def _check_values(known: _Known) -> None:
    """Stops at values that may be slips, and at those that a list of classes does not name.

    UndecidedError: there are such values.
    """
    labels, answers, _, named, ignored, left = known
    # --ignore has said what values without a class are, --names which are classes.
    if answers.ignore is None:
        doubts.check_blends(labels, ignored, left, as_classes(named, ignored, left))
        if answers.names is None and not named:
            doubts.check_rare(labels, ignored, left)
    # Where there is a list, a value that it does not name is never a class unasked.
    if named and not named.keys() >= set(left):
        raise _unnamed(known)


def _check_number(
    survey: Survey, known: _Known, names: Mapping[Value, str], reasons: Sequence[str]
) -> None:
    """Stops where there are too many classes, or labels show one only.

    names: of the class of each value. reasons: of what is decided, for the message.

    DataError: there are too many, or one.
    """
    place = f"{survey.root}: {known.labels.pattern}"
    if len(names) > MOST_CLASSES:
        raise DataError(
            f"{place}: {len(names)} classes; at most {MOST_CLASSES}; --ignore leaves some out"
        )
    # A list may name classes that no label shows.
    shown = [name for value, name in names.items() if value in known.left]
    if len(shown) < 2:
        what = f"one class only, {first_of(shown)}; segmentation needs two, such as background"
        if known.answers.threshold is not None:
            what += f"; --threshold {known.answers.threshold:g} is about masks in grey levels"
        raise DataError("\n  ".join([f"{place}: {what}", *reasons]))


def _shades(meaning: Mapping[Value, Value], values: Iterable[Value]) -> dict[Value, list[Value]]:
    """Of each of `values` the others that count as it; meaning: what each value counts as."""
    shades: dict[Value, list[Value]] = {value: [] for value in values}
    for shade, main in meaning.items():
        if shade != main and main in shades:
            shades[main].append(shade)
    return shades


def _table(
    known: _Known,
    names: Mapping[Value, str],
    shades: Mapping[Value, Sequence[Value]],
    reasons: Sequence[str],
    warnings: Sequence[str],
) -> Classes:
    """The classes with their values, colours and pixels; shades: as `_shades` has them."""
    labels, _, _, named, ignored, _ = known
    colors = _colors(names, named, labels.palette)
    pixels = {
        value: sum(labels.values[v].pixels for v in (value, *others) if v in labels.values)
        for value, others in shades.items()
    }
    return Classes(
        tuple(Class(name, (v, *shades[v]), colors[v], pixels[v]) for v, name in names.items()),
        tuple(v for value in ignored for v in (value, *shades[value])),
        tuple(reasons),
        tuple(warnings),
        ignored_names={v: named[v].name for v in ignored if v in named},
        ignored_pixels=sum(pixels[value] for value in ignored),
    )


def _unnamed(known: _Known) -> UndecidedError:
    """What are the values that a list of classes does not name: no data, or further classes?"""
    labels, _, source, named, ignored, left = known
    unnamed = tuple(v for v in left if v not in named)
    apart = as_classes(named, ignored, left)
    return UndecidedError(
        f"{labels.pattern}: the labels hold {first_of(map(word, unnamed), 5)}, which "
        f"{source} does not name ({shares_of(labels, unnamed[:5])})",
        [
            Reading("no data", ignore_option([*ignored, *unnamed]), unnamed, leaves_out=True),
            Reading("classes of their own", apart, unnamed),
        ],
    )


def _names(survey: Survey, known: _Known) -> tuple[dict[Value, str], str]:
    """The name of the class of each value, and where names are from."""
    labels, answers, source, named, ignored, left = known
    what = "colours" if labels.kind == "colors" else "values"
    shown = first_of(map(word, left), 20)
    if answers.names is not None:
        if len(answers.names) != len(left):
            raise ConfigError(
                f"--names: {len(answers.names)} names for the {what} {shown}: expected {len(left)}"
            )
        reason = f"names from the command line, in the order of the {what}"
        return dict(zip(left, answers.names, strict=True)), reason
    if named:
        names = {v: entry.name for v, entry in named.items() if v not in ignored}
        return names, f"names and {what} from {source}"
    reason = f"{what} {shown}, a class each; no file names them (--names, --ignore for no data)"
    plain = [default_names([v])[0] for v in left] if survey.low_inside else default_names(left)
    return dict(zip(left, plain, strict=True)), reason


def _about_shades(labels: LabelSet, shades: Mapping[Value, Sequence[Value]]) -> Iterator[str]:
    """A line for each colour with shades: `6 shades of #14a03c, 92 pixels, ...`."""
    for color, its_shades in shades.items():
        if its_shades:
            pixels = sum(labels.values[shade].pixels for shade in its_shades)
            shown = first_of(map(word, its_shades), 3)
            number = counted(len(its_shades), "shade", "shades")
            most = max(distance(color, shade) for shade in its_shades)
            how = f"{pixels} pixels, at most {most} off in a channel, counted as it"
            yield f"{number} of {word(color)}, {how}: {shown}"


def _colors(
    values: Iterable[Value], named: Mapping[Value, NamedClass], palette: Sequence[Color]
) -> dict[Value, Color | None]:
    """The colour of each class: its value, else the list's, else that of the palette.

    None: there is none, or a class before it has it.
    """
    color_of: dict[Value, Color | None] = {}
    for value in values:
        color = named[value].color if value in named else None
        if not isinstance(value, int):
            color = value
        elif color is None and value < len(palette) and len(set(palette)) > 1:
            color = palette[value]
        color_of[value] = None if color in color_of.values() else color
    return color_of
