"""Colours in labels that mean the same: a rare one close to another is a shade of it."""

from collections.abc import Sequence

from segtrain.desk.survey.contents import Color, Value, word
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.questions import (
    Answers,
    Reading,
    UndecidedError,
    default_names,
    ignore_option,
    names_option,
)
from segtrain.errors import DataError

# A colour this close to another one, and this much rarer, is a shade of it.
_CLOSE, _RARE = 8, 0.01
# The colour that comes next must be so many times as far.
_CLEAR = 2
# So many colours without names come from smoothed edges, or more than so many levels of a mask
# whose others lie beside another value.
_SMOOTHED, _LEVELS, _BESIDE = 32, 4, 0.9


def distance(one: Color, other: Color) -> int:
    """The largest difference of a channel."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def is_close(one: Color, other: Color) -> bool:
    """Whether one colour may be a shade of the other."""
    return distance(one, other) <= _CLOSE


def nearest(color: Color, main: Sequence[Color]) -> list[Color]:
    """The colour of `main` that this one is or is a shade of; several, if none is clearly nearer.

    >>> nearest((12, 0, 0), [(10, 0, 0), (0, 0, 0)]), nearest((99, 0, 0), [(0, 0, 0)])
    ([(10, 0, 0)], [])
    """
    near, *others = sorted(main, key=lambda one: distance(one, color))
    least = distance(near, color)
    rivals = [one for one in others if distance(one, color) < _CLEAR * least]
    return [near, *rivals] if least <= _CLOSE else []


def meanings(labels: LabelSet, named: Sequence[Color], answers: Answers) -> dict[Value, Value]:
    """What each value counts as: itself, or the colour of which it is a shade.

    named: colours that a list of classes gives; of others the frequent ones count as themselves.

    Raises:
        DataError: so many colours, that labels were smoothed; or one is as close to two classes.
        UndecidedError: colours differ by a shade, and both are frequent; a mask has soft borders.
    """
    # Whoever names or ignores values has looked at them.
    if answers.ignore is answers.names is None:
        if _is_smoothed_mask(labels):
            soft = "values between 0 and 255, only along the borders: grey rims, or a smoothed mask"
            mask = Reading("a mask, from the middle grey on", "--threshold 128")
            raise UndecidedError(f"{labels.pattern}: {len(labels.values)} {soft}", [mask])
        if _are_blended(labels):
            repair = "save labels as PNG and resize them by nearest neighbour (--ignore none)"
            raise _smoothed(labels, "colours" if labels.kind == "colors" else "values", repair)
    if labels.kind != "colors":
        return {value: value for value in labels.values}
    colors = sorted(labels.values, key=lambda color: -labels.values[color].pixels)
    main = named or _frequent(labels, colors, answers)
    meaning = {}
    for color in colors:
        # A colour that --ignore names is no shade of a class.
        is_own = color in (answers.ignore or ())
        near = [] if is_own else nearest(color, main)
        if len(near) > 1:
            raise _between(labels, color, near)
        meaning[color] = near[0] if near else color
    if named and len({*meaning.values()} - {*named}) > _SMOOTHED and answers.ignore is None:
        raise _smoothed(labels, "colours", "save masks without that")
    return meaning


def _between(labels: LabelSet, color: Color, near: Sequence[Color]) -> DataError:
    facts = labels.values[color]
    places = " and ".join(f"{distance(rival, color)} of {word(rival)}" for rival in near[:2])
    return DataError(
        f"{labels.pattern}: {word(color)} ({facts.pixels} pixels, as in {facts.example}) is within "
        f"{places}: as near to two classes; give it the exact colour of one, or leave it out "
        "(--ignore)"
    )


def _smoothed(labels: LabelSet, what: str, repair: str) -> DataError:
    return DataError(
        f"{labels.pattern}: {len(labels.values)} {what}, most on few pixels: edges were smoothed "
        f"or resized; {repair}"
    )


def _is_smoothed_mask(labels: LabelSet) -> bool:
    """Whether labels are black and white, with greys along the edges only."""
    between = [facts for value, facts in labels.values.items() if value not in (0, 255)]
    if len(labels.values) <= _LEVELS or not labels.values.keys() >= {0, 255}:
        return False
    pixels = sum(facts.pixels for facts in between)
    is_few = pixels < min(labels.values[value].pixels for value in (0, 255))
    return is_few and sum(facts.rim for facts in between) >= _BESIDE * pixels


def _are_blended(labels: LabelSet) -> bool:
    """Whether labels hold many values, and half of them only beside others, as JPEG leaves them."""
    thin = [x for x in labels.values.values() if x.rim >= _BESIDE * x.pixels]
    return len(thin) > max(_LEVELS, len(labels.values) / 2)


def _frequent(labels: LabelSet, colors: Sequence[Color], answers: Answers) -> list[Color]:
    """The colours without those that are shades of others. colors: the most frequent first."""
    pixels = {color: facts.pixels for color, facts in labels.values.items()}
    main: list[Color] = []
    clash: tuple[Color, ...] = ()
    for color in colors:
        # A colour that --ignore names is no shade of a class, and asks nothing.
        is_own = color in (answers.ignore or ())
        near = next((x for x in main if is_close(x, color)), None) if not is_own else None
        if near is None or pixels[color] > _RARE * pixels[near]:
            main.append(color)
            clash = clash or (() if near is None else (near, color))
    if len(main) > _SMOOTHED and answers.names is answers.ignore is None:
        repair = "save masks without that, or name the classes in class_dict.csv"
        raise _smoothed(labels, "colours", repair)
    ignored = sorted(answers.ignore or ())
    left = [color for color in main if color not in ignored]
    # --ignore none says that each is a class.
    is_said = answers.ignore == frozenset() or len(answers.names or ()) == len(left)
    if clash and not is_said:
        without = ignore_option([*ignored, clash[1]])
        names = default_names(sorted(left))
        ignored_too = f"{ignore_option(ignored)} " if ignored else ""
        readings = [
            Reading(f"{len(left)} classes", f"{ignored_too}{names_option(names)}", clash),
            Reading(f"{word(clash[1])} is no class", without, clash[1:], leaves_out=True),
        ]
        # Counted in one channel, as objects are that touch each other, and black beside them.
        if (0, 0, 0) in left and sum(any(x[k] for x in left) for k in range(3)) == 1:
            readings.append(Reading("objects of one class", "--instances binary"))
        raise UndecidedError(
            f"{labels.pattern}: the colours {word(clash[0])} and {word(clash[1])} differ by a "
            f"shade, and both are frequent ({pixels[clash[0]]} and {pixels[clash[1]]} pixels); if "
            "they are one class, make the labels equal first",
            readings,
        )
    return main
