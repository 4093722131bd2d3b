"""Questions that a folder raises, and the answers that the command line gives.

Nothing is guessed where a guess could train wrong: `UndecidedError` shows the readings that fit,
each with the option of the command line that chooses it.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from segtrain.desk.survey.contents import Value, word
from segtrain.errors import ConfigError

if TYPE_CHECKING:
    from segtrain.desk.survey.label_set import LabelSet
    from segtrain.desk.survey.survey import Survey


@dataclass(frozen=True)
class Answers:
    """What the command line decides; None leaves it to the survey.

    images: a folder or a pattern of the images. labels: of a label set, or several after commas.
    names: of the classes, in the order of their values. ignore: values without a class. val: a
    fraction, or a list file. like: an experiment whose images stay on their sides. channels: of
    images. attribute: of VIA's regions, the one that names the class. group: what in the path of an
    image tells with which others it stays together.
    pairs: words after commas: named: labels belong to the images that names say, whatever edges
    say; and the convention that says which label is whose, a key of `pairs.CONVENTIONS`.
    exif: whether labels lie on the pixels as stored, or as EXIF turns them.
    missing: what images without a label show: background, or background:FOLDER,FOLDER.
    instances: binary: ids number objects of one class.
    task: multilabel: a pixel may have several classes. threshold: the grey level from which on
    masks show their class. resize: labels: they are drawn anew at the size of images.
    taken: which of these are those of `like`, and not said now.
    leave_out: what is no data: images (without a label), labels (without an image, or unlike
    labels), lists (of images).
    """

    images: str | None = None
    labels: str | None = None
    names: tuple[str, ...] | None = None
    ignore: frozenset[Value] | None = None
    val: float | str | None = None
    like: Path | None = None
    group: re.Pattern[str] | None = None
    channels: int | None = None
    attribute: str | None = None
    pairs: str | None = None
    exif: Literal["stored", "turned"] | None = None
    missing: str | None = None
    instances: Literal["binary"] | None = None
    task: Literal["multilabel"] | None = None
    threshold: float | None = None
    resize: Literal["labels"] | None = None
    leave_out: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()

    @property
    def trusts_pairs(self) -> bool:
        """Whether labels fit their images, whatever edges say."""
        return "named" in (self.pairs or "").split(",")

    @property
    def empty_folders(self) -> list[str]:
        """Folders whose images without a label show background; none: all images do."""
        folders = (self.missing or "").partition(":")[2].split(",")
        return [x.strip("/") for x in folders if x]

    @property
    def convention(self) -> str | None:
        """What says which label is whose; None: the survey finds out."""
        said = [word for word in (self.pairs or "").split(",") if word not in ("", "named")]
        return said[0] if said else None


class Reading(NamedTuple):
    """One way to read the data: in words, and by this option.

    marked: values that it is about. leaves_out: whether they have no class then.
    labels: which it is about, where that is the question. files: an image and the file of its
        label by this reading, where that is the question.
    """

    words: str
    option: str
    marked: tuple[Value, ...] = ()
    leaves_out: bool = False
    labels: "LabelSet | None" = None
    files: tuple[str, ...] = ()


class UndecidedError(ConfigError):
    """Two readings fit; `readings` says which.

    survey, labels: what was known when it was raised, for pictures; None before there was any.
    """

    survey: "Survey | None" = None
    labels: "LabelSet | None" = None

    def __init__(self, what: str, readings: Sequence[Reading]) -> None:
        ways = [f"  {reading.words}: {reading.option}" for reading in readings]
        super().__init__("\n".join([what, *ways]))
        self.readings = tuple(readings)


def names_option(names: Iterable[str]) -> str:
    """The option that gives the classes these names."""
    return f"--names {shlex.quote(','.join(names))}"


def ignore_option(values: Sequence[Value]) -> str:
    """The option that leaves out these values, and no others."""
    return f"--ignore {shlex.quote(','.join(map(word, values)) or 'none')}"


def default_names(values: Sequence[Value]) -> list[str]:
    """Names for the classes of these values, where no file and nobody names them."""
    if len(values) == 2 and values[0] == 0:
        return ["background", "foreground"]
    return [f"class_{v}" if isinstance(v, int) else f"color_{word(v)[1:]}" for v in values]
