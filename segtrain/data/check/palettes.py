"""Palettes of label files, which say what an index was meant to be where ids are read.

Ids are the indices, never the colours. Where an image of colours was reduced to a palette file by
file, the indices are in another order in each file and the colours are still right: nothing fails,
and training learns noise.
"""

from collections.abc import Iterable, Mapping
from itertools import islice

from segtrain.data.classes import ClassFile, Color
from segtrain.text import MAX_NAME, printable

# The colour of each index that occurs in a label.
Palette = Mapping[int, Color]
_REPAIR = "if the colours are right and the indices are not, set data.label_format: colors"
# Different palettes to compare with: an accident of one file is met early.
_MAX_COMPARED = 64
_SHOWN = 3


def used_palette(colors: list[Color], values: Iterable[int]) -> dict[int, Color]:
    """The colours of those `values` that the palette `colors` of a label names.

    Empty for a grey ramp, in which the colour is the index and says nothing more.
    """
    if all(color == (i, i, i) for i, color in enumerate(colors)):
        return {}
    return {i: colors[i] for i in sorted(values) if i < len(colors)}


def class_problem(palette: Palette, classes: ClassFile) -> str:
    """Why a label of this palette contradicts the class file; empty if it does not.

    An index contradicts it if its colour is the `color` that the file gives another class.
    """
    owner = {classes.palette[i]: i for i in classes.given_colors}
    wrong = []
    for index, color in palette.items():
        meant = owner.get(color)
        read = classes.train_id_of.get(index)
        if meant is not None and read is not None and read != meant:
            is_class = read < classes.num_classes
            name = f"'{printable(classes.names[read], MAX_NAME)}'" if is_class else "ignored"
            other = printable(classes.names[meant], MAX_NAME)
            wrong.append(f"index {index} is {name}, but has the color {list(color)} of '{other}'")
    if not wrong:
        return ""
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return (
        f"the palette contradicts class file {classes.name}: {'; '.join(wrong[:_SHOWN])}{more}; "
        f"{_REPAIR}; if the indices are right, correct `color` in the class file"
    )


def moved_colors(labels: Mapping[str, Palette]) -> tuple[str, bool]:
    """Two labels of which one has the other's colours at other indices, as text, "" if none are.

    Palettes that merely differ are no mistake. Returns also whether both labels hold exactly the
    same colours.

    labels: the palette of each label by its name.
    """
    found = ""
    compared: dict[tuple[tuple[int, Color], ...], str] = {}
    common: dict[int, Color] = {}
    for name, palette in labels.items():
        if all(common.setdefault(i, color) == color for i, color in palette.items()):
            compared.setdefault(tuple(palette.items()), name)
            continue
        for items, other in islice(compared.items(), _MAX_COMPARED):
            before = dict(items)
            moved = _moved(before, palette)
            if moved is None:
                continue
            text = _moved_text(other, name, before, moved)
            if set(before.values()) == set(palette.values()):
                return text, True
            found = found or text
        compared.setdefault(tuple(palette.items()), name)
    return found, False


def _moved(before: Palette, now: Palette) -> tuple[int, int] | None:
    """An index of `before` whose colour is at another index in `now`, and that index.

    The first index holds another colour in `now`.
    """
    place = {color: i for i, color in now.items()}
    for i, color in before.items():
        if i in now and now[i] != color and color in place:
            return i, place[color]
    return None


def _moved_text(first: str, second: str, before: Palette, moved: tuple[int, int]) -> str:
    i, j = moved
    return (
        f"labels have the same colours at different indices: {list(before[i])} is {i} in "
        f"{printable(first)} and {j} in {printable(second)}, and ids are the indices; were the "
        f"palettes made file by file? {_REPAIR}"
    )
