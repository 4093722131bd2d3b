"""Labels of one kind, with what is known of them: it grows from the survey to the decisions."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from segtrain.data.read.classes import says_no_class
from segtrain.desk.survey.contents import Color, Kind, Value, ValueFacts, word
from segtrain.text import counted

MOST_CLASSES = 255
# The classes of files that all show the same, whose name nothing tells: masks or their objects.
ONE_CLASS = ("foreground",)


@dataclass(frozen=True)
class LabelSet:
    """Labels of the same kind: one file for each image, or several.

    pattern: of their names, such as `masks/*_mask.png`. labels: by the path of the image; none
        where an image shows background alone.
    values: of the sample; after `count_values`, of all files.
    classes: the words that files of one class each stand for. class_of: by file, the place of its
        word among these, from 1; empty if there is one word.
    palette: the colours of ids, known after `count_values`.
    twin: the colours of ids in a set that divides the images alike, in a sample; or by `palette`.
    no_data, shown_in, claimed: values that files mark as none; the images that show each value;
        pixels that the files of several classes show. All are known after `count_values`.
    numbered: whether values number objects, all of the one class.
    upright: whether labels follow the EXIF orientation of their images, as `count_values` finds;
        unclear: images that EXIF turns, if no size tells.
    overlapping: whether a pixel may have several of `classes`.
    threshold: of the grey levels of its files, from which on they show their class.
    resized: whether files are of another size than their images, at which they are drawn anew.
    has_alpha: whether any file has an alpha channel, as `count_values` finds.
    """

    pattern: str
    kind: Kind
    labels: Mapping[str, tuple[str, ...]]
    values: Mapping[Value, ValueFacts]
    classes: tuple[str, ...] = ()
    class_of: Mapping[str, int] = field(default_factory=dict)
    palette: tuple[Color, ...] = ()
    twin: Mapping[int, Color] = field(default_factory=dict)
    no_data: frozenset[float] = frozenset()
    shown_in: Mapping[Value, Set[str]] = field(default_factory=dict)
    claimed: int = 0
    numbered: bool = False
    upright: bool = False
    unclear: Set[str] = frozenset()
    overlapping: bool = False
    threshold: float | None = None
    resized: bool = False
    has_alpha: bool = False

    @property
    def is_one_class(self) -> bool:
        """Whether files show one class, whose name nothing tells."""
        return self.classes == ONE_CLASS

    @property
    def void(self) -> list[int]:
        """The numbers of classes whose name says that there is none."""
        return [i for i, name in enumerate(self.classes, start=1) if says_no_class(name)]

    @property
    def has_background(self) -> bool:
        """Whether an image that shows nothing can have a label: 0, or no file of any class."""
        return bool(self.classes) or self.kind == "annotations" or 0 in self.values

    def class_files(self, folder: Path, image: str) -> list[tuple[Path, int]]:
        """The files of an image in `folder` and the number of the class of each, from 1."""
        return [(folder / file, self.class_of.get(file, 1)) for file in self.labels[image]]


def total_values(found: Iterable[Mapping[Value, ValueFacts]]) -> dict[Value, ValueFacts]:
    """The facts of several files added up."""
    sums: dict[Value, ValueFacts] = {}
    for values in found:
        for value, facts in values.items():
            sums[value] = sums[value].added(facts) if value in sums else facts
    return sums


def shares_of(labels: LabelSet, values: Sequence[Value]) -> str:
    """How much of the labels these values are, in words."""
    total = sum(facts.pixels for facts in labels.values.values())
    shown = [(word(v), labels.values[v]) for v in values]
    return ", ".join(
        f"{value}: {facts.pixels / total:.2%} of the pixels, in "
        f"{counted(facts.files, 'file', 'files')}"
        for value, facts in shown
    )
