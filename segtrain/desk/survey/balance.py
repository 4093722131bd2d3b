"""The balance of a folder: what becomes of each of its files, once and of all."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from segtrain.desk.survey.label_sets import LabelSet
from segtrain.desk.survey.splits import Splits
from segtrain.desk.survey.survey import Survey
from segtrain.text import counted

IMAGES, LABELS, LISTS, CLASSES = "images", "labels", "lists", "class tables"
ANNOTATIONS, OTHERS = "annotation files", "other files"
# No rule has a reason for these: a rule is missing.
UNKNOWN = "pictures that nothing names"
USED = IMAGES, LABELS, ANNOTATIONS, LISTS, CLASSES
_ONE = {
    IMAGES: "image",
    LABELS: "label",
    ANNOTATIONS: "annotation file",
    LISTS: "list",
    CLASSES: "class table",
}


class Balance(NamedTuple):
    """What became of each file, by its path relative to the folder.

    used: images and labels that are trained or evaluated on, and what says which they are.
    left_out: all others, by the reason.
    """

    used: Mapping[str, str]
    left_out: Mapping[str, str]

    def line(self) -> str:
        """The numbers, on one line: they add up to the files of the folder."""
        total = len(self.used) + len(self.left_out)
        parts = [
            counted(number, _ONE[kind], kind)
            for kind in USED
            if (number := sum(fate == kind for fate in self.used.values()))
        ]
        if self.left_out:
            reasons = Counter(self.left_out.values())
            why = ", ".join(f"{reason}: {number}" for reason, number in reasons.items())
            parts.append(f"{len(self.left_out)} left out ({why})")
        return f"{counted(total, 'file', 'files')}: {', '.join(parts)}"


def balance(survey: Survey, labels: LabelSet, splits: Splits) -> Balance:
    """What the decision makes of each file that the survey has found."""
    used: dict[str, str] = {}
    left_out: dict[str, str] = {}

    def leave_out(files: Iterable[str], reason: str) -> None:
        for file in files:
            if file not in used:
                left_out.setdefault(file, reason)

    chosen = [*splits.train, *splits.val]
    used |= dict.fromkeys(chain.from_iterable(image.files for image in chosen), IMAGES)
    # Labels that were drawn from annotations lie elsewhere.
    if labels.kind != "annotations":
        shown = (labels.labels.get(image.path, ()) for image in chosen)
        used |= dict.fromkeys(chain.from_iterable(shown), LABELS)
    else:
        files = chain.from_iterable(survey.annotations.values())
        used |= dict.fromkeys((str(file.relative_to(survey.root)) for file in files), ANNOTATIONS)
    used |= dict.fromkeys(survey.lists, LISTS)
    used |= dict.fromkeys(survey.tables, CLASSES)
    # Every other image has a reason, and so have its labels.
    for image in survey.images:
        has_label = image.path in labels.labels
        why = f"of {image.split or 'no split'}" if has_label else "without a label"
        leave_out(image.files, f"images {why}")
        if labels.kind != "annotations":
            leave_out(labels.labels.get(image.path, ()), f"labels {why}")
    for other in survey.sets:
        leave_out(chain.from_iterable(other.labels.values()), "labels of another kind")
    for reason, files in survey.left_out.items():
        leave_out(files, reason)
    leave_out(survey.pictures, UNKNOWN)
    leave_out(survey.others, OTHERS)
    return Balance(used, left_out)
