"""The intake on one screen: each stage decides on what the stages before have found or decided.

A stage stops with a question (`UndecidedError`), a refusal (`DataError`) or an option that does not
fit (`ConfigError`); none guesses where a guess could train wrong.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from segtrain.data.read.cut_volumes import read_cut_volumes
from segtrain.desk.survey.balance import Balance, balance, check_left_out
from segtrain.desk.survey.check_pairs import check_drawn, check_pairs, choose_orientation
from segtrain.desk.survey.choose_set import choose_labels
from segtrain.desk.survey.class_files import by_class
from segtrain.desk.survey.class_ids import class_ids_by_window
from segtrain.desk.survey.class_lists import choose_classes
from segtrain.desk.survey.class_table import Classes
from segtrain.desk.survey.compared_pairs import read_pairs
from segtrain.desk.survey.decisions import Decisions
from segtrain.desk.survey.drawn_labels import draw_annotations
from segtrain.desk.survey.edges import turned_scores
from segtrain.desk.survey.experiment_before import with_classes_before
from segtrain.desk.survey.foreground import narrow_foreground
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.label_values import count_values
from segtrain.desk.survey.one_picture import choose_windows, is_one_picture
from segtrain.desk.survey.questions import Answers, UndecidedError
from segtrain.desk.survey.recipe import Machine, choose_options, choose_pixels
from segtrain.desk.survey.splits import Splits, choose_splits
from segtrain.desk.survey.survey import Survey, survey
from segtrain.desk.survey.wrong_folders import checked
from segtrain.errors import refuse_unused


def decide(
    folder: Path,
    answers: Answers,
    output: Path,
    machine: Callable[[], Machine],
    *,
    jobs: int | None,
) -> tuple[Decisions, Balance]:
    """All that is decided about a folder, and what becomes of each of its files.

    output: where labels are drawn that the folder has as outlines. machine: finds out what there is
    to train with, once nothing is left to ask. jobs: processes that read labels.

    Raises:
        UndecidedError: two readings fit; it knows the survey and the labels, as far as they came.
    """
    found = labels = None
    try:
        found = checked(survey(folder, answers), answers.labels)
        # `--labels coco` chooses outlines where there are pictures, too.
        kinds = {kind.lower(): kind for kind in found.annotations}
        said = kinds.get((answers.labels or "").lower())
        answers = replace(answers, labels=said) if said else answers
        if said or (found.annotations and not found.sets):
            labels, classes = draw_annotations(found, output, answers, jobs)
            if not labels.overlapping:  # else they are bands
                files = {k: tuple(str(output / x) for x in own) for k, own in labels.labels.items()}
                drawn = replace(labels, kind="ids", labels=files)
                check_drawn(drawn, read_pairs(folder, found.images, drawn), answers)
        else:
            refuse_unused(vars(answers), "attribute", "labels that are pictures")
            labels = choose_labels(found, answers)
            labels = by_class(found, labels, answers)
            labels = count_values(found, labels, answers, jobs)
            as_turned = turned_scores(folder, found.images, labels)
            labels = choose_orientation(labels, as_turned, answers)
            found = check_pairs(found, labels, read_pairs(folder, found.images, labels), answers)
            classes = choose_classes(found, labels, answers)
        classes = with_classes_before(classes, answers)
        splits = _splits(found, labels, classes, answers, output)
        files = balance(found, labels, splits)
        check_left_out(files, found, labels, answers)
        # How images are scaled is decided last: nothing else depends on it.
        here = machine()
        seen = narrow_foreground(found, labels, classes, splits.train, output)
        images = (*splits.train, *splits.val)
        pixels = choose_pixels(found, images, answers, here, seen)
    except UndecidedError as undecided:
        undecided.survey, undecided.labels = found, labels
        raise
    is_body = any(volume.stored for volume in read_cut_volumes(folder).values())
    options = choose_options(splits, classes, pixels, here, is_body=is_body)
    return Decisions(found, labels, classes, splits, here, options), files


def _splits(
    found: Survey, labels: LabelSet, classes: Classes, answers: Answers, output: Path
) -> Splits:
    """A single picture can be divided only by its windows."""
    if not is_one_picture(found, labels, answers):
        return choose_splits(found, labels, answers)
    ((path, files),) = labels.labels.items()
    file = (output if labels.kind == "annotations" else found.root) / files[0]
    class_ids = class_ids_by_window(file, labels, classes)
    return choose_windows(found, path, classes, answers, class_ids)
