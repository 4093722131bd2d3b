"""What each value of the labels means: as a record, and as the table that `init` prints."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from segtrain.desk.survey.contents import Color, Value, word
from segtrain.desk.survey.doubts import is_rare
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.questions import default_names, ignore_option
from segtrain.text import first_of, table_lines

_TITLES = "class", "in labels", "pixels", "files"
_BLACK_AND_WHITE = (0, 0, 0), (255, 255, 255)


class Class(NamedTuple):
    """values: in labels that mean it, the first one is the usual. pixels: of all of them."""

    name: str
    values: tuple[Value, ...]
    color: Color | None
    pixels: int


@dataclass(frozen=True)
class Classes:
    """Each value of the labels is one of a class, or ignored.

    reasons: a line for each decision, as comments and for the terminal. warnings: likewise.
    all_pixels: of all labels, where classes overlap; else 0.
    ignored_names: of the ignored values that have names. ignored_pixels: of all ignored values.
    """

    classes: tuple[Class, ...]
    ignored: tuple[Value, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    all_pixels: int = 0
    ignored_names: Mapping[Value, str] = field(default_factory=dict)
    ignored_pixels: int = 0

    @property
    def total(self) -> int:
        """The pixels that shares of classes are of: all that the labels have."""
        shown = sum(class_info.pixels for class_info in self.classes)
        return self.all_pixels or shown + self.ignored_pixels


def class_table(labels: LabelSet, classes: Classes) -> list[str]:
    """A title, a line for each class, and a line for each name of what is ignored.

    A line has the values in labels, the share of all pixels and the number of images that show it.
    Behind it stands what is unusual.
    """
    total = classes.total or 1

    def row(name: str, values: Sequence[Value], pixels: int) -> tuple[str, ...]:
        # Masks in files of their own have no values that tell classes apart.
        shown = "" if labels.classes else first_of(map(word, values), 3)
        share = f"{pixels / total:.2%}"
        share = "under 0.01%" if pixels and share == "0.00%" else share
        # Nobody has counted the images of annotations.
        where = set().union(*(labels.shown_in.get(value, ()) for value in values))
        return name, shown, share, str(len(where)) if labels.shown_in else ""

    rows, notes = [_TITLES], [""]
    for class_info in classes.classes:
        rows.append(row(class_info.name, class_info.values, class_info.pixels))
        notes.append(_note(labels, class_info, len(classes.classes)))
    ignored: dict[str, list[Value]] = defaultdict(list)
    for value in classes.ignored:
        if value in labels.values and labels.values[value].pixels:
            ignored[classes.ignored_names.get(value, "-")].append(value)
    if not labels.values and classes.ignored_pixels:  # labels that were drawn
        rows.append(row("-", classes.ignored, classes.ignored_pixels))
        notes.append("ignored")
    for name, values in ignored.items():
        rows.append(row(name, values, sum(labels.values[value].pixels for value in values)))
        notes.append("ignored")
    lines = table_lines(list(zip(*rows, strict=True)))
    return [f"{line}  {note}".rstrip() for line, note in zip(lines, notes, strict=True)]


def _note(labels: LabelSet, class_info: Class, number: int) -> str:
    """What is unusual about a class: that no label shows it, or few, or its colour.

    number: of classes.
    """
    value = class_info.values[0]
    if not class_info.pixels:
        return "no label shows it"
    if value in labels.values and is_rare(labels, value):
        return f"{class_info.pixels} px, as in {labels.values[value].example}"
    # Without a name from anywhere.
    is_plain = value in _BLACK_AND_WHITE and class_info.name == default_names([value])[0]
    if is_plain and number > 2:  # a mask is black and white
        return f"may mean no data: {ignore_option([value])}"
    return ""
