"""Questions about lists of splits: which of several counts, and what of images in none."""

import shlex
from collections.abc import Sequence
from dataclasses import replace

from segtrain.desk.survey.groupings import DEFAULT_VAL
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.list_files import read_list
from segtrain.desk.survey.listed_images import ImageNames, named_images
from segtrain.desk.survey.questions import Answers, Reading, UndecidedError
from segtrain.desk.survey.survey import Survey
from segtrain.text import counted, first_of

# So many images in no list are no accident.
_MOST_UNLISTED = 0.1


def ask_which_lists(survey: Survey, labels: LabelSet) -> None:
    """UndecidedError: lists of the folder say different splits, as those of folds do."""
    names = ImageNames(survey.images)
    # A list of the test, which has no labels, is no rival.
    rivals = [x for x in survey.rival_lists if _has_labels(survey, labels, names, x)]
    if len(rivals) < 2 and rivals == [*survey.rival_lists[:1]]:
        return
    shown = _with_files(labels, survey.images)
    options = [(path, f"--val {shlex.quote(str(survey.root / path))}") for path in rivals]
    raise UndecidedError(
        f"{survey.root}: {len(options)} lists say different images to evaluate on, as of folds",
        [Reading(f"evaluate on {path}", option, labels=shown) for path, option in options],
    )


def _has_labels(survey: Survey, labels: LabelSet, names: ImageNames, path: str) -> bool:
    """Whether any image that a list names has a label."""
    rows = named_images(read_list(survey.root / path), names)
    return any(survey.images[i].path in labels.labels for row in rows for i in row)


def ask_about_unlisted(
    survey: Survey, labels: LabelSet, images: Sequence[Image], answers: Answers
) -> None:
    """UndecidedError: many images with a label are in no list, while others are."""
    # None: in a folder of no split, beside train/ and val/.
    unlisted = [image for image in images if image.split in ("unlisted", None)]
    is_accepted = "images" in answers.leave_out
    if is_accepted or len(unlisted) <= _MOST_UNLISTED * len(images):
        return
    shown = _with_files(labels, unlisted)
    what = counted(len(unlisted), "image with a label is", "images with a label are")
    raise UndecidedError(
        f"{survey.split_source}: {what} in none of these {_what(survey)}: "
        f"{first_of((image.path for image in unlisted), 3)}",
        [
            Reading("divide all images anew", f"--val {DEFAULT_VAL}", labels=shown),
            Reading("leave them out", "--leave-out images", labels=shown),
        ],
    )


def _what(survey: Survey) -> str:
    return "splits" if survey.split_source == "folders" else "lists"


def _with_files(labels: LabelSet, images: Sequence[Image]) -> LabelSet:
    """The labels of these images for the picture of a question, where there are any files."""
    files_of = {x.path: files for x in images if (files := labels.labels.get(x.path))}
    return replace(labels, labels=files_of) if files_of else labels
