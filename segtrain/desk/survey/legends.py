"""Which list of classes belongs to the labels: the one that fits the values they hold."""

from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cache

from segtrain.data.read.classes import known_names, load_class_file
from segtrain.desk.survey.class_entries import NamedClass
from segtrain.desk.survey.contents import Value
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.names import Legend
from segtrain.desk.survey.questions import (
    Answers,
    Reading,
    UndecidedError,
    default_names,
    ignore_option,
    names_option,
)
from segtrain.desk.survey.shades import is_close, nearest
from segtrain.errors import DataError
from segtrain.text import counted, first_of

# Data sets that are known by the names of their labels.
_KNOWN_PATTERNS = {"_labelids": "cityscapes", "ade_": "ade20k"}
# So much of the labels must be in the colours of a list: of one of the folder, of a known data set.
_FITS, _FITS_KNOWN, _MIN_KNOWN_COLORS = 0.5, 0.99, 5
# Or so many of the colours of a list of the folder are on labels.
_SHOWN = 0.5
_BACKGROUND = "background", "bg", "other", "others", "none", "nothing"
# Those files do not change while a program runs, and every folder is compared with them.
_known_file = cache(load_class_file)


def named_values(
    legends: Sequence[Legend], labels: LabelSet, answers: Answers
) -> tuple[str, dict[Value, NamedClass]]:
    """The file that names the classes of the labels, and the class of each value.

    Both are empty if none does, or the command line does.

    Raises:
        UndecidedError: several lists fit and differ, none of those there are fits, or it does not
            say whether it counts from 0 or from 1.
    """
    legend = None
    if answers.names is None and labels.kind == "colors":
        legend = _for_colors(legends, labels)
    elif answers.names is None:
        legend = _for_ids(legends, labels, answers.ignore or frozenset())
    if legend is None:
        return "", {}
    if labels.kind == "colors":
        return legend.source, {entry.color: entry for entry in legend.classes}
    return legend.source, {c.value: c for c in sorted(legend.classes, key=lambda c: c.value)}


def _for_colors(legends: Sequence[Legend], labels: LabelSet) -> Legend | None:
    """The list whose colours are those of the labels: of the folder, else of a known data set."""
    pixels = {color: facts.pixels for color, facts in labels.values.items()}
    known = list(_known_colors(labels)) if len(pixels) >= _MIN_KNOWN_COLORS else []
    for legend in (*legends, *known):
        if legend.has_colors:
            colors = [listed.color for listed in legend.classes]
            near = sum(
                n for c, n in pixels.items() if any(is_close(c, listed) for listed in colors)
            )
            shown = sum(any(is_close(c, listed) for c in pixels) for listed in colors)
            fits = near >= (_FITS_KNOWN if legend in known else _FITS) * sum(pixels.values())
            if fits or (legend not in known and shown >= _SHOWN * len(colors)):
                return legend
    return None


def _known_colors(labels: LabelSet) -> Iterator[Legend]:
    for name in known_names():
        if name == "voc" and "segmentationclass" not in labels.pattern.lower():
            continue  # annotation tools draw other classes in these colours too
        file = _known_file(name)
        has_own = all(not entry.more_colors for entry in file.classes)
        if has_own and len(file.given_colors) == file.num_classes:
            classes = [NamedClass(entry.name, None, entry.color) for entry in file.classes]
            yield Legend(f"the known classes of {name}", tuple(classes))


def _for_ids(legends: Sequence[Legend], labels: LabelSet, said: Set[int]) -> Legend | None:
    """The list that fits the values but those of --ignore, `said`, with a value for each class."""
    values = set(labels.values) - said
    # Lists of Cityscapes number classes twice: for *_labelIds.png and for *_labelTrainIds.png.
    by_train_ids = [renumbered for legend in legends if (renumbered := legend.by_train_ids())]
    if "trainid" in labels.pattern.lower():
        legends = by_train_ids or legends
    elif "labelid" not in labels.pattern.lower():
        legends = [*legends, *by_train_ids]
    fitting = [fit for legend in legends if (fit := _with_values(legend, labels, said))]
    # Lists of the folder come before known data sets.
    fitting = _agreeing(fitting, values, said) or _known_ids(labels, values)
    lists = [legend for legend in legends if not (legend.has_values or legend.has_colors)]
    if lists and not fitting:
        raise _unfit(lists[0], labels, said)
    return fitting[0] if fitting else None


def _unfit(legend: Legend, labels: LabelSet, said: Set[int]) -> UndecidedError:
    """Which values have the names of a list that does not fit them? Arguments as of `_for_ids`."""
    values, classes = set(labels.values) - said, legend.classes
    ordered = sorted(values)
    plain = [value for value in ordered if value != 255]
    # The names for the first values; for those behind a background; for all but 255.
    ways = [(classes, ordered), ((NamedClass("background"), *classes), ordered)]
    ways += [(classes[: len(plain)], plain)] if plain != ordered else []
    # 255 is the foreground of a mask.
    unsaid = () if len(ordered) == 2 else (255,)
    own = _options(Legend("", ()), values, said, unsaid)
    readings = [Reading("other names, in the order of the values", own)]
    for entries, over in ways:
        number = sum(not entry.means_no_class for entry in entries)
        are_distinct = len({entry.name for entry in entries}) == len(entries)
        if number > 1 and len(entries) <= len(over) and are_distinct:
            rest = tuple(value for value in ordered if value not in over[: len(entries)])
            what = f"{first_of((entry.name for entry in entries), 4)}, in the order of the values"
            what += f"; {first_of(rest)} without a class" if rest else ""
            placed = _valued("", entries, over[: len(entries)])
            options = _options(placed, values, said, rest)
            if options not in (reading.option for reading in readings):
                readings.append(Reading(what, options, rest, leaves_out=True))
    return UndecidedError(
        f"{labels.pattern}: the labels hold {len(values)} values, {first_of(ordered, 20)}, and "
        f"{legend.source} names {counted(len(classes), 'class', 'classes')}: they do not fit",
        readings,
    )


def _with_values(legend: Legend, labels: LabelSet, said: Set[int]) -> Legend | None:
    """The list with a value for each class; None: it does not fit. Arguments as of `_for_ids`."""
    values = set(labels.values) - said
    if legend.has_values:
        known = {entry.value for entry in legend.classes}
        # Half of its classes are on the labels, or it names all that they hold.
        return legend if 2 * len(known & values) >= len(known) or values - {255} <= known else None
    if legend.has_colors and (class_of := _classes_by_palette(legend, labels)):
        return _valued(legend.source, class_of.values(), class_of)
    return _placed(legend, labels, said)


def _classes_by_palette(legend: Legend, labels: LabelSet) -> dict[int, NamedClass]:
    """The class whose colour the palette of labels gives to each value, or a shade of it.

    Empty if not all of the palette's values have one of their own.
    """
    by_color = {entry.color: entry for entry in reversed(legend.classes)}
    colors = {v: labels.palette[v] for v in sorted(labels.values) if v < len(labels.palette)}
    # Shades count: a palette may be a little off the list.
    near = {v: nearest(color, list(by_color)) for v, color in colors.items()}
    is_clear = all(len(close) == 1 for close in near.values())
    is_own = len({close[0] for close in near.values() if close}) == len(near)
    return {v: by_color[close[0]] for v, close in near.items()} if is_clear and is_own else {}


def _placed(legend: Legend, labels: LabelSet, said: Set[int]) -> Legend | None:
    """A list without values: its classes count from 0, or from 1 if the labels say so."""
    values = set(labels.values) - said
    number, ordered = len(legend.classes), sorted(values)
    plain = {v for v in values if v != 255 or number > 255}
    # crack alone in classes.txt, and masks of 0 and 255: the background goes without saying.
    if len(ordered) == 2 and ordered[0] == 0 and number <= 2:  # a mask, whatever its foreground is
        background = [NamedClass("background")] if number == 1 else []
        # Of crack and background in this order, 0 is the background nevertheless.
        classes = sorted(legend.classes, key=lambda x: x.name.lower().strip("_") != "background")
        return _valued(legend.source, [*background, *classes], ordered)
    from_0, from_1 = plain <= set(range(number)), plain <= set(range(1, number + 1))
    if not plain or (len(values) == number > 2 and plain != values and from_0):
        return None  # as many values as names: 255 may be the last of them
    # If no label shows the last class, all may be shifted by a background without a name.
    first = legend.classes[0]
    is_unsure = max(plain) < number - 1 and not first.means_no_class
    if from_0 and (from_1 or (is_unsure and first.name.lower().strip("_") not in _BACKGROUND)):
        # Classes from 1 on have one before them.
        ways = legend.classes, (NamedClass("background"), *legend.classes)
        raise UndecidedError(
            f"{labels.pattern}: the labels hold {first_of(sorted(plain), 20)}, and {legend.source} "
            f"names {number} classes: counted from 0 or from 1?",
            [
                Reading(
                    f"{low} is {first.name}",
                    _options(_valued("", way, range(len(way))), values, said),
                )
                for low, way in enumerate(ways)
            ],
        )
    if from_0:
        return _valued(legend.source, legend.classes, range(number))
    if plain <= set(range(number + 1)):  # if 0 is among them, it has no name, and is asked for
        return _valued(legend.source, legend.classes, range(1, number + 1))
    return None


def _valued(source: str, classes: Iterable[NamedClass], values: Iterable[int]) -> Legend:
    pairs = zip(classes, values, strict=True)
    return Legend(source, tuple(entry._replace(value=value) for entry, value in pairs))


# More lists than this are no versions of one: each is of a label of its own.
_MOST_LISTS = 4


def _agreeing(fitting: list[Legend], values: Set[int], said: Set[int]) -> list[Legend]:
    """The lists, if they say the same; else those that name every value, if these do."""
    whole = [legend for legend in fitting if values <= {c.value for c in legend.classes} | {0, 255}]
    for lists in (fitting, whole or fitting):
        if len({tuple((c.name, c.value) for c in legend.classes) for legend in lists}) <= 1:
            return lists
    if len(fitting) > _MOST_LISTS:
        raise DataError(
            f"{len(fitting)} files number the classes differently, as one for each label "
            f"({first_of(x.source for x in fitting)}): none is that of all; import the annotations "
            "that the labels were drawn from, which name them (segtrain data import)"
        )
    raise UndecidedError(
        "several files name the classes differently: "
        f"{first_of(legend.source for legend in fitting)}",
        [Reading(legend.source, _options(legend, values, said)) for legend in fitting],
    )


def _options(
    legend: Legend, values: Set[int], said: Set[int], unsaid: Iterable[int] = (255,)
) -> str:
    """The options that say of labels of these values what the list says.

    said: values that --ignore leaves out already. unsaid: those that have no class unless the list
        names them.
    """
    named = {entry.value: entry for entry in legend.classes}
    without = {v for v in values if (named[v].means_no_class if v in named else v in unsaid)}
    left = sorted(values - without)
    names = [named[v].name if v in named else default_names([v])[0] for v in left]
    return f"{ignore_option(sorted(without | said))} {names_option(names)}"


def _known_ids(labels: LabelSet, values: set[int]) -> list[Legend]:
    """The classes of a known data set, if the labels have its names or colours, and its values."""
    for part, name in _KNOWN_PATTERNS.items():
        file = _known_file(name)
        colors = {value: c.color for c in file.classes for value in c.ids if value in labels.twin}
        # By colours, where an equal set in colours lies beside the ids, as in KITTI.
        is_own = len(colors) >= _MIN_KNOWN_COLORS and colors.items() <= labels.twin.items()
        if part in labels.pattern.lower() or is_own:
            named = [NamedClass(c.name, value) for c in file.classes for value in c.ids]
            ignored = [NamedClass(f"id {value}", value, None, True) for value in file.ignore_ids]
            if values <= {entry.value for entry in (*named, *ignored)}:
                return [Legend(f"the known classes of {name}", (*named, *ignored))]
    return []
