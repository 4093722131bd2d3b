"""Questions about lists of splits: which of several counts, and what of images in none."""

import shlex
from collections.abc import Sequence
from dataclasses import replace

from segtrain.desk.survey.groupings import DEFAULT_VAL
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.questions import Answers, Reading, UndecidedError
from segtrain.desk.survey.survey import Survey
from segtrain.text import counted, first_of

# So many images in no list are no accident.
_MOST_UNLISTED = 0.1


def ask_which_lists(survey: Survey, labels: LabelSet) -> None:
    """UndecidedError: lists of the folder say different splits, as those of folds do."""
    if not survey.rival_lists:
        return
    shown = _with_files(labels, survey.images)
    options = [
        (path, f"--val {shlex.quote(str(survey.root / path))}") for path in survey.rival_lists
    ]
    raise UndecidedError(
        f"{survey.root}: {len(options)} lists say different images to evaluate on, as of folds",
        [Reading(f"evaluate on {path}", option, labels=shown) for path, option in options],
    )


def ask_about_unlisted(
    survey: Survey, labels: LabelSet, images: Sequence[Image], answers: Answers
) -> None:
    """UndecidedError: many images with a label are in no list, while others are."""
    unlisted = [image for image in images if image.split == "unlisted"]
    is_accepted = "images" in answers.leave_out
    if is_accepted or len(unlisted) <= _MOST_UNLISTED * len(images):
        return
    shown = _with_files(labels, unlisted)
    what = counted(len(unlisted), "image with a label is", "images with a label are")
    raise UndecidedError(
        f"{survey.split_source}: {what} in none of these lists: "
        f"{first_of((image.path for image in unlisted), 3)}",
        [
            Reading("divide all images anew", f"--val {DEFAULT_VAL}", labels=shown),
            Reading("leave them out", "--leave-out images", labels=shown),
        ],
    )


def _with_files(labels: LabelSet, images: Sequence[Image]) -> LabelSet:
    """The labels of these images for the picture of a question, where there are any files."""
    files_of = {x.path: files for x in images if (files := labels.labels.get(x.path))}
    return replace(labels, labels=files_of) if files_of else labels
