"""Palettes of label files, compared with the class file and with each other.

segtrain reads the indices, never the colours. If a tool reduced RGB labels to a palette file by
file, the colours are right, but each file has other indices. No step fails, and training learns
noise.
"""

from collections.abc import Iterable, Mapping
from itertools import islice

from segtrain.data.classes import ClassFile, Color
from segtrain.text import MAX_NAME, printable

# The colour of each index that occurs in a label.
Palette = Mapping[int, Color]
_REPAIR = "if the colours are right and the indices are not, set data.label_format: colors"
# Different palettes to compare each label with.
_MAX_COMPARED = 64
_MAX_SHOWN = 3


def used_palette(colors: list[Color], values: Iterable[int]) -> dict[int, Color]:
    """The colours of those `values` that the palette `colors` of a label names.

    Empty for a grey ramp, where each colour only repeats its index.
    """
    if all(color == (i, i, i) for i, color in enumerate(colors)):
        return {}
    return {i: colors[i] for i in sorted(values) if i < len(colors)}


def class_problem(palette: Palette, classes: ClassFile) -> str:
    """Which indices have the `color` that the class file gives another class; empty if none."""
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
    more = f"; and {len(wrong) - _MAX_SHOWN} more" if len(wrong) > _MAX_SHOWN else ""
    return (
        f"the palette contradicts class file {classes.name}: {'; '.join(wrong[:_MAX_SHOWN])}{more};"
        f" {_REPAIR}; if the indices are right, correct `color` in the class file"
    )


def moved_colors(labels: Mapping[str, Palette]) -> tuple[str, bool]:
    """Names two labels with one colour at different indices, and whether all colours are equal.

    Empty if there are none: palettes that only have different colours are no mistake.
    """
    found = ""
    compared: dict[tuple[tuple[int, Color], ...], str] = {}
    common: dict[int, Color] = {}
    for name, palette in labels.items():
        # Most labels agree with all before them, and need no comparison with each palette.
        agrees = all(common.setdefault(i, color) == color for i, color in palette.items())
        for items, other in islice(compared.items(), 0 if agrees else _MAX_COMPARED):
            before = dict(items)
            moved = _moved(before, palette)
            if moved is None:
                continue
            i, j = moved
            text = (
                f"labels have the same colours at different indices: {list(before[i])} is {i} in "
                f"{printable(other)} and {j} in {printable(name)}, and ids are the indices; were "
                f"the palettes made file by file? {_REPAIR}"
            )
            if set(before.values()) == set(palette.values()):
                return text, True
            found = found or text
        compared.setdefault(tuple(palette.items()), name)
    return found, False


def _moved(before: Palette, now: Palette) -> tuple[int, int] | None:
    """An index of `before` that has another colour in `now`, and where its colour is in `now`."""
    index = {color: i for i, color in now.items()}
    for i, color in before.items():
        if i in now and now[i] != color and color in index:
            return i, index[color]
    return None
