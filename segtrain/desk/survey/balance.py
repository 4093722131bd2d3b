"""The balance of a folder: what becomes of each of its files, and which could be data."""

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import PurePosixPath
from typing import NamedTuple

from segtrain.desk.survey import reasons
from segtrain.desk.survey.class_files import copies_of_labelled
from segtrain.desk.survey.file_names import split_of
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.list_names import unread_splits
from segtrain.desk.survey.listings import unused_lists
from segtrain.desk.survey.questions import Answers, Reading, UndecidedError
from segtrain.desk.survey.splits import Splits
from segtrain.desk.survey.survey import Survey
from segtrain.desk.survey.wrong_folders import NOT_READ
from segtrain.text import counted, first_of

IMAGES, LABELS, LISTS, CLASSES = "images", "labels", "lists", "class tables"
ANNOTATIONS = "annotation files"
USED = IMAGES, LABELS, ANNOTATIONS, LISTS, CLASSES
# Lists, and folders of images, that a question offers: more would hide the first readings.
_MOST_OFFERED = 3
# What may be meant as data, by the word that --leave-out has for it.
_COULD_BE_DATA = {
    reasons.WITHOUT_LABEL: "images",
    reasons.WITHOUT_IMAGE: "labels",
    reasons.OF_SEVERAL_IMAGES: "labels",
    reasons.UNLIKE: "labels",
    reasons.UNUSED_LISTS: "lists",
    reasons.UNREAD_LISTS: "lists",
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
            counted(number, kind.removesuffix("s"), kind)
            for kind in USED
            if (number := sum(fate == kind for fate in self.used.values()))
        ]
        if self.left_out:
            numbers = Counter(self.left_out.values())
            why = ", ".join(f"{reason}: {number}" for reason, number in numbers.items())
            parts.append(f"{len(self.left_out)} left out ({why})")
        return f"{counted(total, 'file', 'files')}: {', '.join(parts)}"


def balance(survey: Survey, labels: LabelSet, splits: Splits) -> Balance:
    """What the decision makes of each file that the survey has found."""
    used = _used(survey, labels, splits)
    left_out: dict[str, str] = {}
    # The first reason of a file wins. The chosen labels are a set of the survey, too: those of
    # test images are "labels of test", and not "labels of another kind".
    for reason, files in _reasons(survey, labels):
        for file in files:
            if file not in used:
                left_out.setdefault(file, reason)
    return Balance(used, left_out)


def _used(survey: Survey, labels: LabelSet, splits: Splits) -> dict[str, str]:
    """As `Balance.used`."""
    chosen = [*splits.train, *splits.val]
    used = dict.fromkeys(chain.from_iterable(image.files for image in chosen), IMAGES)
    # Labels that were drawn from annotations lie elsewhere.
    if labels.kind != "annotations":
        shown = (labels.labels.get(image.path, ()) for image in chosen)
        used |= dict.fromkeys(chain.from_iterable(shown), LABELS)
    else:
        # The pattern ends with the format, of which one is read.
        kind = labels.pattern.rpartition("(")[2].removesuffix(")")
        files = survey.annotations[kind]
        used |= dict.fromkeys((x.relative_to(survey.root).as_posix() for x in files), ANNOTATIONS)
    used |= dict.fromkeys(survey.lists, LISTS)
    used |= dict.fromkeys(survey.tables, CLASSES)
    return used


def _reasons(survey: Survey, labels: LabelSet) -> Iterator[tuple[str, Iterable[str]]]:
    """Each reason and its files, the used ones as well. The reasons that say most come first."""
    with_labels = {image.split for image in survey.images if image.path in labels.labels}
    for image in survey.images:
        # A split to evaluate on is often published without labels.
        is_hidden = image.split == "test" or (image.split == "val" and "val" not in with_labels)
        is_alone = image.path not in labels.labels and not is_hidden
        of_split = f"of {reasons.SPLIT_NAMES.get(image.split, image.split)}"
        yield reasons.WITHOUT_LABEL if is_alone else f"images {of_split}", image.files
        if labels.kind != "annotations":
            yield f"labels {of_split}", labels.labels.get(image.path, ())
    for other in survey.sets:
        yield reasons.OF_ANOTHER_KIND, chain.from_iterable(other.labels.values())
    yield from survey.left_out.items()
    outlines = chain.from_iterable(survey.annotations.values())
    paths = (file.relative_to(survey.root).as_posix() for file in outlines)
    yield reasons.UNUSED_ANNOTATIONS, paths
    # All files of the folder: those without a reason so far.
    yield reasons.UNKNOWN, survey.pictures
    yield reasons.OTHERS, survey.others


def check_left_out(found: Balance, survey: Survey, labels: LabelSet, answers: Answers) -> None:
    """Stops where files that may be data would be left out, and nobody has said so.

    Raises:
        UndecidedError: there are such files.
    """
    by_reason = _doubtful(found, survey, labels, answers)
    by_reason |= _lists(found, survey, answers)
    if not by_reason:
        return
    what = "; ".join(f"{why} ({len(x)}): {first_of(x, 3)}" for why, x in by_reason.items())
    words = {_COULD_BE_DATA[reason] for reason in by_reason} | answers.leave_out
    readings = [Reading("left out, and no data", _option(words))]
    if reasons.WITHOUT_LABEL in by_reason:
        # An image without a label may show nothing: then it teaches what the background is. But
        # not where labels are there, and only whose they are is open.
        is_open = answers.missing is None and reasons.OF_SEVERAL_IMAGES not in by_reason
        if is_open and labels.has_background:
            empty = "images without a label show background alone"
            also = _option(words - {"images"})
            readings.append(Reading(empty, f"--missing background {also}".strip()))
            folders, others = _empty_folders(by_reason[reasons.WITHOUT_LABEL], labels)
            # Of annotations none is chosen by folders.
            drawn = labels.kind == "annotations"
            if folders and not drawn and (others or len(folders) <= _MOST_OFFERED):
                option = shlex.quote(f"background:{','.join(folders)}")
                left = "others are left out" if others else "others, if any come, are asked about"
                empty = f"those of {first_of(folders)} do, and {left}"
                also = _option(words if others else words - {"images"})
                readings.append(Reading(empty, f"--missing {option} {also}".strip()))
        for kind in survey.annotations if labels.kind != "annotations" else ():
            readings.append(Reading(f"{kind} has the labels", f"--labels {shlex.quote(kind)}"))
        for folder in _without_any_label(survey, labels):
            option = f"--images {shlex.quote(folder)}"
            readings.append(Reading(f"the images are in {folder}", option))
    for path in by_reason.get(reasons.UNUSED_LISTS, [])[:_MOST_OFFERED]:
        option = f"--val {shlex.quote(str(survey.root / path))} {_option(words - {'lists'})}"
        readings.append(Reading(f"{path} names images to evaluate on", option.strip()))
    # Their labels may be in files of a format that is not read.
    notes = [note for note in survey.notes if note.startswith(NOT_READ)]
    copies = copies_of_labelled(survey, labels) & {*by_reason.get(reasons.WITHOUT_LABEL, ())}
    notes += [f"{len(copies)} of these images are copies of images with a label"] if copies else []
    if reasons.UNREAD_LISTS in by_reason:
        notes.append("write the names of each split into train.txt and val.txt")
    raise UndecidedError("; ".join([f"not used would be {what}", *notes]), readings)


def _doubtful(
    found: Balance, survey: Survey, labels: LabelSet, answers: Answers
) -> dict[str, list[str]]:
    """The files that may be data and would be left out, by the reason; without --leave-out's."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for file, reason in found.left_out.items():
        word = _COULD_BE_DATA.get(reason)
        if word is None or word in answers.leave_out:
            continue
        # A picture of colours beside a label of ids says no more than this.
        if reason == reasons.UNLIKE and survey.unlike.get(file) in labels.labels:
            continue
        by_reason[reason].append(file)
    return by_reason


def _option(words: Iterable[str]) -> str:
    """The option that leaves out these kinds of files; empty for none."""
    return f"--leave-out {','.join(sorted(words))}" if words else ""


def _lists(found: Balance, survey: Survey, answers: Answers) -> dict[str, list[str]]:
    """Lists that are not used or not read, by the reason; none where --val says the division."""
    if "lists" in answers.leave_out or answers.val is not None:
        return {}
    unused = sorted(unused_lists(survey.root, survey.others, found.used, survey.images))
    unread = [] if survey.split_source else unread_splits(survey.others)
    by_reason = {reasons.UNUSED_LISTS: unused, reasons.UNREAD_LISTS: unread}
    return {why: files for why, files in by_reason.items() if files}


def _empty_folders(without: Iterable[str], labels: LabelSet) -> tuple[list[str], bool]:
    """Folders without any labelled image, and whether images without a label lie elsewhere, too.

    without: images without a label. Of folders in each other it is the uppermost.
    """
    above = {str(x) for path in labels.labels for x in PurePosixPath(path).parents}
    found = set()
    for path in without:
        parents = [str(x) for x in PurePosixPath(path).parents]
        found.add(next((x for x in reversed(parents) if x not in above), ""))
    return sorted(found - {""}), "" in found


def _without_any_label(survey: Survey, labels: LabelSet) -> list[str]:
    """Folders whose images have no label, though images of the same names elsewhere have one.

    None where labels lie in folders of such names as images: good/ is no version of scratch/ then.
    """
    for path, files in labels.labels.items():
        own = PurePosixPath(path).parent.name
        if not split_of(own) and any(own in PurePosixPath(file).parent.parts for file in files):
            return []
    labelled = {(x.split, _first_word(x)) for x in survey.images if x.path in labels.labels}
    there: dict[str, list[Image]] = defaultdict(list)
    for image in survey.images:
        if image.split != "test":
            there[PurePosixPath(image.path).parent.name].append(image)
    return [
        folder
        for folder, images in sorted(there.items())
        if folder
        and not any(x.path in labels.labels for x in images)
        and all((x.split, _first_word(x)) in labelled for x in images)
        # `part` of part_001.png tells no image.
        and len({(x.split, _first_word(x)) for x in images}) == len(images)
    ][:_MOST_OFFERED]


def _first_word(image: Image) -> str:
    """`b1-09517` of `b1-09517_Clipped.jpg`."""
    return re.split(r"[_. ]", PurePosixPath(image.path).name)[0].lower()
