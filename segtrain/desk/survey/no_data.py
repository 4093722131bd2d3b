"""Which values of labels have no class: by the command line, by name, by a mark or by a rule."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from segtrain.desk.survey.class_entries import NamedClass
from segtrain.desk.survey.contents import Value, word
from segtrain.desk.survey.label_set import LabelSet, shares_of
from segtrain.desk.survey.questions import (
    Answers,
    Reading,
    UndecidedError,
    default_names,
    ignore_option,
    names_option,
)
from segtrain.errors import ConfigError, DataError
from segtrain.text import first_of

# A border between areas: so much of it lies beside other values.
_THIN = 0.3
# Where so much is without a class, it may be the background.
_MOST = 0.5
# And so it may where so much is, and at most one class has more, and no list names the classes.
_MUCH = 0.2
_LAST_OF_16_BITS = 65535


def ignored_values(
    labels: LabelSet,
    answers: Answers,
    source: str,
    named: Mapping[Value, NamedClass],
    there: Sequence[Value],
) -> tuple[list[Value], list[str]]:
    """The values without a class, and a line for each reason.

    named: what the file `source` names. there: the values, sorted, without shades.

    Raises:
        ConfigError: --ignore names what no label holds.
        DataError, UndecidedError: 255, 0 or the border of a trimap may be a class or not.
    """
    has_ids = labels.kind != "colors"
    if answers.ignore is not None:
        usual = {0, 255} if has_ids else set()
        if unknown := answers.ignore - set(there) - named.keys() - usual:
            raise ConfigError(
                f"--ignore: no label holds {first_of(sorted(map(word, unknown)))}; they hold "
                f"{first_of(map(word, there), 20)}"
            )
        return sorted(answers.ignore), []
    ignored = sorted(v for v, entry in named.items() if entry.means_no_class)
    shown = first_of(f"{word(v)} ({named[v].name})" for v in ignored)
    reasons = [f"ignored: {shown}, by name"] if ignored else []
    if not has_ids:
        return ignored, reasons
    marked = [v for v in there if v in labels.no_data and v not in named]
    # The mark says no data, but 0 is the background of many labels.
    if 0 in marked:
        left = [v for v in there if v not in ignored]
        keep = as_classes(named, ignored, left)
        raise _class_or_not(labels, "GDAL_NODATA of the files is 0", 0, ignored, keep)
    ignored += marked
    reasons += [f"ignored: {v}: GDAL_NODATA of the files" for v in marked]
    left = [v for v in there if v not in ignored]
    # The highest value of the type: 65535 in 16 bits, as 255 in 8.
    last = _LAST_OF_16_BITS if _LAST_OF_16_BITS in {*left} - named.keys() else 255
    _check_trimap(labels, left, named, ignored)
    # A list that names it has said what it means.
    if last not in named and (reason := _why_last(labels, left, named, ignored, last)):
        ignored.append(last)
        reasons.append(f"ignored: {last}: {reason}")
        _check_count(labels, source, named, there, ignored)
    return ignored, reasons


def as_classes(
    named: Mapping[Value, NamedClass], ignored: Sequence[Value], left: Sequence[Value]
) -> str:
    """The options that make a class of each value `left`, also of those that a list does not name.

    named: what the list names; empty without one.
    """
    if not named:
        return ignore_option(ignored)
    names = [named[v].name if v in named else default_names([v])[0] for v in left]
    return f"{ignore_option(ignored)} {names_option(names)}"


def _check_trimap(
    labels: LabelSet,
    values: Sequence[int],
    named: Mapping[Value, NamedClass],
    ignored: Sequence[int],
) -> None:
    """Stops where the border of a trimap may be a class; arguments as of `_why_last`."""
    if not _is_trimap(labels, values):
        return
    border = values[1] if values[1] in (127, 128) else values[2]
    if border not in named:
        found = f"three values, {first_of(values)}; {border} is usually the uncertain border"
        raise _class_or_not(labels, found, border, ignored, as_classes(named, ignored, values))


def _is_trimap(labels: LabelSet, values: Sequence[int]) -> bool:
    is_called = "trimap" in labels.pattern.lower() and len(values) == 3
    return is_called or values in ([0, 127, 255], [0, 128, 255])


def _why_last(
    labels: LabelSet,
    values: Sequence[int],
    named: Mapping[Value, NamedClass],
    ignored: Sequence[int],
    last: int,
) -> str:
    """Why the `last` value of the type, such as 255, means no data, or empty.

    values: those that may be classes. named: by a list. ignored: what has no class anyway.

    Raises:
        DataError: some labels hold 0 and 255, the others 0 and 1.
        UndecidedError: it may be a class or not.
    """
    others = [v for v in values if v != last]
    # 0 and 255 alone are a mask, whose foreground is 255.
    if last not in values or others in ([], [0]) or _is_trimap(labels, values):
        return ""
    facts, keep = labels.values[last], as_classes(named, ignored, values)
    if others == [0, 1]:
        files = labels.values[1].files, facts.files
        # Perhaps no file holds both: some masks have 1 for the foreground, others 255.
        if sum(files) <= sum(map(len, labels.labels.values())):
            raise DataError(
                f"{labels.pattern}: {files[1]} labels hold 0 and {last}, {files[0]} others 0 and "
                "1: if all but 0 is one class, --instances binary takes it so; else say by "
                f"--ignore what {last} means"
            )
    total = sum(value_facts.pixels for value_facts in labels.values.values())
    if len(others) > 1 and facts.pixels > _MOST * total:
        found = f"the labels hold {first_of(values)}, and {last} is most of them"
        raise _class_or_not(labels, found, last, ignored, keep)
    # A list leaves it out, or it lies around objects as a thin border, as in VOC.
    if named or facts.rim >= _THIN * facts.pixels:
        return "beside other ids it means no data, as in VOC and Cityscapes"
    areas = sorted(labels.values[v].pixels for v in values)
    if facts.pixels >= max(areas[-2], _MUCH * total) and len(others) > 1:
        found = f"the labels hold {first_of(values)}, and {last} is a large part of them"
        raise _class_or_not(labels, found, last, ignored, keep)
    if len(others) >= 3 and others[0] <= 1 and others[-1] - others[0] == len(others) - 1:
        return f"beside {others[0]} to {others[-1]} it means no data, as in VOC and Cityscapes"
    if len(values) > 3 and len({b - a for a, b in pairwise(values)}) == 1:
        return ""  # grey levels: 0, 85, 170, 255
    found = f"the labels hold {first_of(values)}: {last} may be a class, or mean no data"
    raise _class_or_not(labels, found, last, ignored, keep)


def _check_count(
    labels: LabelSet,
    source: str,
    named: Mapping[Value, NamedClass],
    there: Sequence[Value],
    ignored: Sequence[Value],
) -> None:
    """Stops where a list begins with a 0 that means no class, and labels have 255 for it.

    So they may hold the values of the list less 1, as those of COCO-Stuff do. Arguments as of
    `ignored_values`.

    Raises:
        UndecidedError: the labels hold no value that the list could not have less 1.
    """
    values = [v for v in there if v != 255]
    if not (0 in named and named[0].means_no_class) or not {v + 1 for v in values} <= named.keys():
        return
    less = names_option(named[v + 1].name for v in values)
    raise UndecidedError(
        f"{labels.pattern}: 255 means no data, and so does 0 in {source} "
        f"({named[0].name}): the labels may hold its values less 1",
        [
            Reading(f"0 is {named[0].name}", ignore_option(ignored)),
            Reading(f"0 is {named[1].name}", f"{ignore_option([255])} {less}"),
        ],
    )


def _class_or_not(
    labels: LabelSet, found: str, value: int, ignored: Sequence[Value], keep: str
) -> UndecidedError:
    """Is `value` no data or a class? Both answers leave out what is `ignored` anyway, too.

    keep: the options that make a class of it.
    """
    without = ignore_option([*ignored, value])
    return UndecidedError(
        f"{labels.pattern}: {found} ({shares_of(labels, [value])})",
        [
            Reading(f"{value} means no data", without, (value,), leaves_out=True),
            Reading(f"{value} is a class", keep, (value,)),
        ],
    )
