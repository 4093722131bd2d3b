"""The classes of a data set: their names, colours and raw ids, and what is ignored."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated

from pydantic import Field

from segtrain.types import IGNORE_INDEX

Color = tuple[int, int, int]


@dataclass(frozen=True)
class SegClass:
    """One class: its name, its colour in pictures, and the label values that mean it.

    more_colors: colours beside `color` that mean it in labels.
    category: the group of classes that is also scored; None: the data set has no groups.
    instance_px: mean pixels of an instance in the data set; None: instances are not scored. Both
        concern scores only, so a checkpoint does not store them.
    """

    name: str
    color: Color
    ids: tuple[int, ...]
    more_colors: tuple[Color, ...] = ()
    category: Annotated[str | None, Field(exclude=True)] = field(default=None, compare=False)
    instance_px: Annotated[float | None, Field(exclude=True)] = field(default=None, compare=False)

    @property
    def label_colors(self) -> tuple[Color, ...]:
        """All colours that mean it in labels."""
        return (self.color, *self.more_colors)


@dataclass(frozen=True)
class ClassFile:
    """The classes of a data set; the position of a class is its train id.

    given_colors: train ids of the classes whose colour is written in the file. Empty for a class
        file from a checkpoint, which does not store it.
    ignores_color: whether labels may hold `ignore_color`. False where the file does not give it:
        the default colour is for pictures only, and in labels it is an unknown colour.
    """

    name: str
    classes: tuple[SegClass, ...]
    ignore_ids: tuple[int, ...]
    ignore_color: Color
    given_colors: Annotated[frozenset[int], Field(exclude=True)] = field(
        default=frozenset(), compare=False, repr=False
    )
    ignores_color: Annotated[bool, Field(exclude=True)] = field(
        default=True, compare=False, repr=False
    )

    @property
    def num_classes(self) -> int:
        """K, at most 255."""
        return len(self.classes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Class names in the order of the train ids."""
        return tuple(c.name for c in self.classes)

    @cached_property
    def palette(self) -> list[Color]:
        """Colours in the order of the train ids, RGB 0..255."""
        return [c.color for c in self.classes]

    @cached_property
    def train_id_of(self) -> dict[int, int]:
        """Raw label value -> train id, or 255 for ignored values; other values are mistakes."""
        ids = {raw: train_id for train_id, c in enumerate(self.classes) for raw in c.ids}
        return ids | dict.fromkeys(self.ignore_ids, IGNORE_INDEX)

    @cached_property
    def write_ids(self) -> list[int]:
        """The raw label value to write for each train id, the first of its ids."""
        return [c.ids[0] for c in self.classes]


def default_palette(num_colors: int) -> list[Color]:
    """The first colours of the Pascal VOC palette, all different, black first; at most 256.

    Bit 3 i + c of the index becomes bit 7 - i of channel c (VOC development kit, VOClabelcolormap).
    """
    return [
        tuple(sum((k >> (3 * i + c) & 1) << (7 - i) for i in range(8)) for c in range(3))
        for k in range(num_colors)
    ]


def read_by(classes: ClassFile, label_format: str) -> ClassFile:
    """The class file with the ids that labels of this format hold; for reading only.

    "train_ids": positions in the file, and 255 to ignore. Predictions are still written with the
    ids of `classes`.
    """
    if label_format != "train_ids":
        return classes
    by_position = tuple(replace(c, ids=(i,)) for i, c in enumerate(classes.classes))
    return replace(classes, classes=by_position, ignore_ids=(IGNORE_INDEX,))


def ignoring_as(before: ClassFile, now: ClassFile) -> ClassFile:
    """`now`; labels may hold the default `ignore_color` if `before` is equal and allows it.

    before: from a checkpoint. Earlier versions ignored the default colour in labels.
    """
    if now == before and before.ignores_color:
        return replace(now, ignores_color=True)
    return now
