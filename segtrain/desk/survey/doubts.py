"""Values that may be no classes: on few pixels or in few files, or only between others."""

from collections.abc import Sequence

from segtrain.data.read.rims import is_blend
from segtrain.desk.survey.contents import Value, word
from segtrain.desk.survey.label_set import LabelSet, shares_of
from segtrain.desk.survey.questions import Reading, UndecidedError, ignore_option
from segtrain.text import first_of

# Rare is a value of a few dots. So is one in a few files, if these are a 20th of all, or if it has
# so few of all pixels; and one of a few dots in each of its files, if these are a tenth of all.
_FEW_FILES, _FEW_PIXELS, _DOTS_PX = 2, 1e-4, 8


def is_rare(labels: LabelSet, value: Value) -> bool:
    """Whether few pixels and files show the value: perhaps a slip of the hand."""
    facts, number = labels.values[value], len(labels.labels)
    total = sum(value_facts.pixels for value_facts in labels.values.values())
    if facts.pixels <= _DOTS_PX:
        return True
    if facts.files <= _FEW_FILES:
        is_small = facts.pixels < _FEW_PIXELS * total
        return 20 * facts.files <= number or (is_small and 3 * facts.files <= number)
    return 10 * facts.files <= number and facts.pixels <= _DOTS_PX * facts.files


def check_rare(labels: LabelSet, ignored: Sequence[Value], left: Sequence[Value]) -> None:
    """Stops where values are rare, and two others remain without them.

    ignored: values without a class, which an answer must repeat. left: the others.

    Raises:
        UndecidedError: a class, or a slip?
    """
    rare = tuple(value for value in left if is_rare(labels, value))
    if not rare or len(left) - len(rare) < 2:
        return
    shown = (
        f"{word(v)} ({labels.values[v].pixels} px, as in {labels.values[v].example})" for v in rare
    )
    is_one = len(rare) == 1
    raise UndecidedError(
        f"{labels.pattern}: few pixels or files show {first_of(shown, 5)}: "
        f"{'a class, or a slip' if is_one else 'classes, or slips'}?",
        [
            Reading(
                "a slip: no data there" if is_one else "slips: no data there",
                ignore_option([*ignored, *rare]),
                rare,
                leaves_out=True,
            ),
            Reading("a class" if is_one else "classes", ignore_option(ignored), rare),
        ],
    )


def check_blends(
    labels: LabelSet, ignored: Sequence[Value], left: Sequence[Value], keep: str
) -> None:
    """Stops where a value is only between others: labels were resized, or its areas are thin.

    ignored, left: as for `check_rare`. keep: the options that make a class of each of `left`.

    Raises:
        UndecidedError: one is so.
    """
    facts = labels.values
    total = sum(value_facts.pixels for value_facts in facts.values())
    blends = tuple(
        v
        for v in left
        if v in facts and facts[v].files > 1 and is_blend(facts[v].blended, facts[v].pixels, total)
    )
    if not blends or len(blends) == len(left):
        return
    resized = ignore_option([*ignored, *blends])
    raise UndecidedError(
        f"{labels.pattern}: {first_of(map(word, blends), 5)} only where a lower and a higher "
        f"value meet ({shares_of(labels, blends[:5])}): were labels resized with "
        "interpolation, or is this a class of thin lines?",
        [
            Reading("resized: no data there", resized, blends, leaves_out=True),
            Reading("a class", keep, blends),
        ],
    )
