"""The decision: what the values of labels mean; a pure function of the survey."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from segtrain.data.read.rims import is_blend
from segtrain.desk.survey.contents import KINDS, Color, Value, word
from segtrain.desk.survey.decide import MOST_CLASSES, is_instances, shares_of
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.legends import named_values
from segtrain.desk.survey.names import NamedClass
from segtrain.desk.survey.questions import (
    Answers,
    Reading,
    UndecidedError,
    default_names,
    ignore_option,
    names_option,
)
from segtrain.desk.survey.shades import distance, meanings
from segtrain.desk.survey.survey import Survey
from segtrain.errors import ConfigError, DataError, refuse_unused
from segtrain.text import counted, first_of
from segtrain.types import IGNORE_INDEX

# A border between areas: so much of it lies beside other values.
_THIN = 0.3
_STRAY = 1e-5
# Where so much is without a class, it may be the background.
_MOST_NO_DATA = 0.5
# And so it may where so much is, and at most one class has more, and no list names the classes.
_MUCH_NO_DATA = 0.2
_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)
_LAST_OF_16_BITS = 65535


class Class(NamedTuple):
    """values: in labels that mean it, the first one is the usual. pixels: of all of them."""

    name: str
    values: tuple[Value, ...]
    color: Color | None
    pixels: int


@dataclass(frozen=True)
class Classes:
    """reasons: a line for each decision, as comments and for the terminal. warnings: likewise.

    all_pixels: of all labels, where classes overlap; else 0.
    """

    classes: tuple[Class, ...]
    ignored: tuple[Value, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    all_pixels: int = 0

    @property
    def total(self) -> int:
        """The pixels that shares of classes are of."""
        return self.all_pixels or sum(class_info.pixels for class_info in self.classes)


class _Known(NamedTuple):
    """What is known of the values before classes are chosen.

    there: values in the labels, sorted, without shades. named: what the file `source` names.
    """

    labels: LabelSet
    answers: Answers
    source: str
    named: Mapping[Value, NamedClass]
    there: Sequence[Value]

    @property
    def has_ids(self) -> bool:
        return self.labels.kind != "colors"


def choose_classes(survey: Survey, labels: LabelSet, answers: Answers) -> Classes:
    """The classes of `labels`, which is counted.

    Raises:
        ConfigError: --names or --ignore do not fit the labels.
        DataError: the values are those of no labels, or of one class.
        UndecidedError: two readings fit.
    """
    if labels.classes:
        return _by_file(survey, labels, answers)
    place = f"{survey.root}: {labels.pattern}"
    is_number = labels.kind in ("ids", "first")
    if is_number and (len(labels.values) > MOST_CLASSES + 1 or is_instances(labels)):
        raise DataError(
            f"{place}: {len(labels.values)} different values, up to {word(max(labels.values))}: "
            f"numbers of objects, greys (--threshold 128), or no labels of classes; at most "
            f"{MOST_CLASSES} classes"
        )
    # Names first: the colours of a list tell which colours are shades of them.
    source, named = named_values(survey.legends, labels, answers)
    meaning = meanings(labels, list(named), answers)
    known = _Known(labels, answers, source, named, sorted(set(meaning.values())))
    # Before values become classes: those between two others may come from interpolation.
    _check_blends(known)
    ignored, reasons = _ignored(known)
    if labels.kind == "first":
        reasons.append(f"labels hold {KINDS['first']}")
    left = [value for value in known.there if value not in ignored]
    # Where there is a list, a value that it does not name is never a class unasked.
    if named and not named.keys() >= set(left):
        raise _unnamed(known, ignored, left)
    names, reason, warnings = _names(known, ignored, left)
    if survey.legends and not source and answers.names is None:
        others = first_of(legend.source for legend in survey.legends)
        warnings = [*warnings, f"names of classes that do not fit the labels: {others}"]
    shown = [name for value, name in names.items() if value in left]
    if len(shown) < 2:
        what = f"one class only, {first_of(shown)}; segmentation needs two, such as background"
        if answers.threshold is not None:
            what += f"; --threshold {answers.threshold:g} is about masks in grey levels"
        raise DataError("\n  ".join([f"{place}: {what}", *reasons, reason]))
    # Of each value the others that count as it.
    shades = {v: [s for s, main in meaning.items() if v == main != s] for v in (*names, *ignored)}
    reasons += _about_shades(labels, shades)
    colors = _colors(names, named, labels.palette)
    classes = [
        Class(
            name,
            (value, *shades[value]),
            colors[value],
            sum(labels.values[v].pixels for v in (value, *shades[value]) if v in labels.values),
        )
        for value, name in names.items()
    ]
    without = [v for value in ignored for v in (value, *shades[value])]
    return Classes(tuple(classes), tuple(without), (reason, *reasons), tuple(warnings))


def _by_file(survey: Survey, labels: LabelSet, answers: Answers) -> Classes:
    """Several files an image: one for each class, or for each object of the only class."""
    if answers.ignore:
        held = f"{labels.pattern}: a file for each class or object"
        refuse_unused(vars(answers), "ignore", held)
    numbers = range(1, len(labels.classes) + 1)
    without = labels.void
    background = [i for i in numbers if labels.classes[i - 1].lower() == "background"]
    shown = [i for i in numbers if i in labels.values and labels.values[i].pixels]
    kept = [0, *(i for i in shown if i not in (*without, *background))]
    names = ("background", *(labels.classes[i - 1] for i in kept[1:]))
    is_one = labels.classes == ("foreground",)
    if labels.overlapping:
        return _overlapping(survey, labels, kept[1:], answers)
    if answers.names is not None and is_one:
        # --names lesion is short for background,lesion.
        given = answers.names if len(answers.names) > 1 else ("background", *answers.names)
        names = _given(given, 2, "a background and what the files show")
    how = "in files of their own"
    reason = (
        f"{labels.pattern}: {counted(len(names) - 1, 'class', 'classes')}, {how}; what none of "
        "them shows is background"
    )
    if labels.claimed:
        total = sum(facts.pixels for facts in labels.values.values())
        reason += (
            f"; {labels.claimed / total:.2%} of the pixels are in several: the smaller area "
            "counts, and --task multilabel keeps all"
        )
    reasons = [reason]
    if without:
        reasons.append(f"ignored: {first_of(labels.classes[i - 1] for i in without)}, by name")
    if empty := [labels.classes[i - 1] for i in numbers if i not in (*shown, *background)]:
        reasons.append(f"no class: {first_of(empty)}, whose files show nothing")
    classes = []
    for i, name in zip(kept, names, strict=True):
        # Files of a class called background show what none of the others shows.
        values = (i,) if i else (0, *background)
        pixels = sum(labels.values[v].pixels for v in values if v in labels.values)
        classes.append(Class(name, values, None, pixels))
    return Classes(tuple(classes), tuple(without), tuple(reasons))


def _overlapping(
    survey: Survey, labels: LabelSet, kept: Sequence[int], answers: Answers
) -> Classes:
    """The classes `kept` of files of their own, each found by itself.

    DataError: no file shows anything. ConfigError: --names for one class gives more.
    """
    if not kept:
        raise DataError(f"{labels.pattern}: no file shows anything")
    names = [labels.classes[i - 1] for i in kept]
    if answers.names is not None and labels.classes == ("foreground",):
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
    if without := [
        f"{name} ({len(labels.labels) - owned[i]})"
        for i, name in zip(kept, names, strict=True)
        if owned[i] < len(labels.labels)
    ]:
        reasons.append(f"images without a file of a class do not show it: {first_of(without)}")
    if labels.void:
        reasons.append(f"ignored: {first_of(labels.classes[i - 1] for i in labels.void)}, by name")
    classes = [
        Class(name, (i,), None, labels.values[i].pixels)
        for i, name in zip(kept, names, strict=True)
    ]
    # All pixels of the images: classes that overlap may sum up to more or to less.
    pixels = sum(math.prod(size) for size in sizes)
    return Classes(tuple(classes), (IGNORE_INDEX,), tuple(reasons), all_pixels=pixels)


# The stages, alike for ids and colours


def _ignored(known: _Known) -> tuple[list[Value], list[str]]:
    """The values without a class, and why: by the command line, by name, or by a rule for 255."""
    labels, answers, _, named, there = known
    if answers.ignore is not None:
        usual = {0, 255} if known.has_ids else set()
        if unknown := answers.ignore - set(there) - named.keys() - usual:
            raise ConfigError(
                f"--ignore: no label holds {first_of(sorted(map(word, unknown)))}; they hold "
                f"{first_of(map(word, there), 20)}"
            )
        return sorted(answers.ignore), []
    ignored = sorted(v for v, entry in named.items() if entry.means_no_class)
    shown = first_of(f"{word(v)} ({named[v].name})" for v in ignored)
    reasons = [f"ignored: {shown}, by name"] if ignored else []
    if known.has_ids:
        marked = [v for v in there if v in labels.no_data and v not in named]
        # The mark says no data, but 0 is the background of many labels.
        if 0 in marked:
            raise _class_or_not(labels, "GDAL_NODATA of the files is 0", 0)
        ignored += marked
        reasons += [f"ignored: {v}: GDAL_NODATA of the files" for v in marked]
        left = [v for v in there if v not in ignored]
        unsure = [v for v in left if v not in named]
        # The highest value of the type: 65535 in 16 bits, as 255 in 8.
        last = _LAST_OF_16_BITS if _LAST_OF_16_BITS in unsure else 255
        if reason := _why_no_data(labels, left, unsure, last, has_names=bool(named)):
            ignored.append(last)
            reasons.append(f"ignored: {last}: {reason}")
            _check_count(known, ignored)
    return ignored, reasons


def _check_blends(known: _Known) -> None:
    """Stops where a value is only between others: labels were resized, or its areas are thin.

    Raises:
        UndecidedError: one is so, and --ignore does not say what it means.
    """
    if known.answers.ignore is not None:
        return
    facts = known.labels.values
    total = sum(value_facts.pixels for value_facts in facts.values())
    blends = tuple(
        v
        for v in known.there
        if v in facts and facts[v].files > 1 and is_blend(facts[v].blended, facts[v].pixels, total)
    )
    if not blends or len(blends) == len(known.there):
        return
    raise UndecidedError(
        f"{known.labels.pattern}: {first_of(map(word, blends), 5)} only where a lower and a higher "
        f"value meet ({shares_of(known.labels, blends[:5])}): were labels resized with "
        "interpolation, or is this a class of thin lines?",
        [
            Reading("resized: no data there", ignore_option(blends), blends, leaves_out=True),
            Reading("a class", ignore_option([]), blends),
        ],
    )


def _check_count(known: _Known, ignored: Sequence[Value]) -> None:
    """Stops where a list begins with a 0 that means no class, and labels have 255 for it.

    So they may hold the values of the list less 1, as those of COCO-Stuff do.

    Raises:
        UndecidedError: the labels hold no value that the list could not have less 1.
    """
    labels, named = known.labels, known.named
    values = [v for v in known.there if v != 255]
    if not (0 in named and named[0].means_no_class) or not {v + 1 for v in values} <= named.keys():
        return
    less = names_option(named[v + 1].name for v in values)
    raise UndecidedError(
        f"{labels.pattern}: 255 means no data, and so does 0 in {known.source} "
        f"({named[0].name}): the labels may hold its values less 1",
        [
            Reading(f"0 is {named[0].name}", ignore_option(ignored)),
            Reading(f"0 is {named[1].name}", f"{ignore_option([255])} {less}"),
        ],
    )


def _unnamed(known: _Known, ignored: Sequence[Value], left: Sequence[Value]) -> UndecidedError:
    """What are the values that a list of classes does not name: no data, or further classes?"""
    named = known.named
    unnamed = tuple(v for v in left if v not in named)
    names = [named[v].name if v in named else default_names([v])[0] for v in left]
    apart = f"{ignore_option(ignored)} {names_option(names)}"
    return UndecidedError(
        f"{known.labels.pattern}: the labels hold {first_of(map(word, unnamed), 5)}, which "
        f"{known.source} does not name ({shares_of(known.labels, unnamed[:5])})",
        [
            Reading("no data", ignore_option([*ignored, *unnamed]), unnamed, leaves_out=True),
            Reading("classes of their own", apart, unnamed),
        ],
    )


def _names(
    known: _Known, ignored: Sequence[Value], left: Sequence[Value]
) -> tuple[dict[Value, str], str, list[str]]:
    """The name of the class of each value, where names are from, and warnings."""
    labels, answers, source, named, _ = known
    what = "values" if known.has_ids else "colours"
    shown = first_of(map(word, left), 20)
    if answers.names is not None:
        names = _given(answers.names, len(left), f"the {what} {shown}")
        reason = f"names from the command line, in the order of the {what}"
        return dict(zip(left, names, strict=True)), reason, []
    if named:
        names = {v: entry.name for v, entry in named.items() if v not in ignored}
        absent = first_of(name for v, name in names.items() if v not in left)
        warnings = [f"no label shows {absent}"] if absent else []
        return names, f"names and {what} from {source}", warnings
    warnings = list(_strays(labels, left))
    if left[:1] == [0] and len(left) > 2:
        last = left[-1]  # lists have what is unlabelled first or, as CamVid's, last
        ways = f"{ignore_option([0])} or {ignore_option([last])}"
        warnings.append(f"0 and {last} are taken for classes; if one means no data, add {ways}")
    # White alone beside black is the foreground.
    for color, name in ((_BLACK, "black"), *(((_WHITE, "white"),) if len(left) > 2 else ())):
        if color in left:
            option = ignore_option([color])
            warnings.append(f"{name} is taken for a class; if it means no data, add {option}")
    if known.has_ids and left and left[0] > 0 and not ignored:
        warnings.append(f"values begin at {left[0]}, and nothing is ignored")
    reason = f"{what} {shown}, a class each; no file names them (--names)"
    return dict(zip(left, default_names(left), strict=True)), reason, warnings


def _about_shades(labels: LabelSet, shades: Mapping[Value, Sequence[Value]]) -> Iterator[str]:
    for color, its_shades in shades.items():
        if its_shades:
            pixels = sum(labels.values[shade].pixels for shade in its_shades)
            shown = first_of(map(word, its_shades), 3)
            number = counted(len(its_shades), "shade", "shades")
            most = max(distance(color, shade) for shade in its_shades)
            how = f"{pixels} pixels, at most {most} off in a channel, counted as it"
            yield f"{number} of {word(color)}, {how}: {shown}"


# Rules


def _why_no_data(
    labels: LabelSet, values: Sequence[int], unsure: Sequence[int], last: int, *, has_names: bool
) -> str:
    """Why the `last` value of the type, such as 255, means no data, or empty.

    values: those that may be classes. unsure: those of them that no list names.

    Raises:
        DataError: some labels hold 0 and 255, the others 0 and 1.
        UndecidedError: it, or the border of a trimap, may be a class or not.
    """
    is_trimap = "trimap" in labels.pattern.lower() or values in ([0, 127, 255], [0, 128, 255])
    if is_trimap and len(values) == 3:
        border = values[1] if values[1] in (127, 128) else values[2]
        if border in unsure:
            found = f"three values, {first_of(values)}; {border} is usually the uncertain border"
            raise _class_or_not(labels, found, border)
        return ""
    others = [v for v in values if v != last]
    # 0 and 255 alone are a mask, whose foreground is 255.
    if last not in unsure or others in ([], [0]):
        return ""
    if others == [0, 1]:
        files = [labels.values[v].files for v in (1, last)]
        # Perhaps no file holds both: some masks have 1 for the foreground, others 255.
        if sum(files) <= sum(map(len, labels.labels.values())):
            raise DataError(
                f"{labels.pattern}: {files[1]} labels hold 0 and {last}, {files[0]} others 0 and "
                f"1: make them equal first, or say by --ignore what {last} means"
            )
    total = sum(facts.pixels for facts in labels.values.values())
    if len(others) > 1 and labels.values[last].pixels > _MOST_NO_DATA * total:
        found = f"the labels hold {first_of(values)}, and {last} is most of them"
        raise _class_or_not(labels, found, last)
    # A list leaves it out, or it lies around objects as a thin border, as in VOC.
    if has_names or labels.values[last].rim >= _THIN * labels.values[last].pixels:
        return "beside other ids it means no data, as in VOC and Cityscapes"
    areas = sorted(labels.values[v].pixels for v in values)
    if labels.values[last].pixels >= max(areas[-2], _MUCH_NO_DATA * total) and len(others) > 1:
        found = f"the labels hold {first_of(values)}, and {last} is a large part of them"
        raise _class_or_not(labels, found, last)
    if len(others) >= 3 and others[0] <= 1 and others[-1] - others[0] == len(others) - 1:
        return f"beside {others[0]} to {others[-1]} it means no data, as in VOC and Cityscapes"
    if len(values) > 3 and len({b - a for a, b in pairwise(values)}) == 1:
        return ""  # grey levels: 0, 85, 170, 255
    found = f"the labels hold {first_of(values)}: {last} may be a class, or mean no data"
    raise _class_or_not(labels, found, last)


def _class_or_not(labels: LabelSet, found: str, value: int) -> UndecidedError:
    return UndecidedError(
        f"{labels.pattern}: {found} ({shares_of(labels, [value])})",
        [
            Reading(f"{value} means no data", ignore_option([value]), (value,), leaves_out=True),
            Reading(f"{value} is a class", ignore_option([]), (value,)),
        ],
    )


def _strays(labels: LabelSet, values: Sequence[Value]) -> Iterator[str]:
    """A warning for each value of a few pixels in a few files: perhaps a slip of the hand."""
    total = sum(facts.pixels for facts in labels.values.values())
    for value in values:
        facts = labels.values[value]
        if facts.pixels < _STRAY * total and facts.files <= 2:
            yield (
                f"{word(value)} is on {facts.pixels} pixels, in {facts.example}: a class, or a "
                f"slip? {ignore_option([value])} leaves it out"
            )


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


def _given(names: tuple[str, ...], number: int, what: str) -> tuple[str, ...]:
    if len(names) != number:
        raise ConfigError(f"--names: {len(names)} names for {what}: expected {number}")
    return names
