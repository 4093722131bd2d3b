"""The decision: which of several sets of labels; a pure function of the survey."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from segtrain.desk.survey.class_words import differing_words
from segtrain.desk.survey.file_names import fits, split_of, words_of
from segtrain.desk.survey.label_set import MOST_CLASSES, LabelSet
from segtrain.desk.survey.questions import (
    Answers,
    Reading,
    UndecidedError,
    names_option,
)
from segtrain.desk.survey.survey import Survey
from segtrain.errors import ConfigError, DataError
from segtrain.text import first_of


def choose_labels(survey: Survey, answers: Answers) -> LabelSet:
    """The label set to train on.

    Raises:
        DataError: there are no labels.
        UndecidedError: several sets, which do not say the same.
    """
    sets = list(survey.sets)
    together: list[LabelSet] = []
    if answers.labels is not None:
        together = _named_wholly(sets, answers.labels)
        sets = together or [
            found for label_set in sets if (found := _restricted(label_set, answers.labels))
        ]
        if not sets:
            there = first_of(label_set.pattern for label_set in survey.sets) or "none"
            raise ConfigError(f"--labels {answers.labels}: no such labels; found {there}")
    if not sets:
        found = f"{survey.root}: {len(survey.images)} images, and no labels that belong to them"
        hint = "image and label share a part of their names: a.jpg with a.png or a_mask.png"
        raise DataError("\n  ".join([found, *survey.tried, *survey.notes, hint]))
    # Numbers of objects, as gtFine/*_instanceIds.png, where there are other labels, too.
    for is_other in (is_instances, _is_named_instances):
        sets = [label_set for label_set in sets if not is_other(label_set)] or sets
    for label_set in list(sets):
        # Of two that say the same, ids are exact whatever a palette looks like.
        others = [o for o in sets if frozenset((label_set.pattern, o.pattern)) in survey.equal_sets]
        if any(o.kind == "ids" or label_set.kind != "ids" for o in others):
            sets.remove(label_set)
    for i, label_set in enumerate(sets):
        # The colours of a set that was dropped still tell a known data set, as KITTI's
        # semantic_rgb/.
        colors = (found for pair, found in survey.equal_sets.items() if label_set.pattern in pair)
        sets[i] = replace(label_set, twin=next(filter(None, colors), {}))
    # train_masks/ and val_masks/ label different images: one set.
    sets = _joined(sets, always=answers.labels is not None, may_overlap=bool(together))
    if answers.labels is None:
        # Labels of test images alone cannot be trained on.
        test = {image.path for image in survey.images if image.split == "test"}
        sets = [label_set for label_set in sets if label_set.labels.keys() - test] or sets
    if len(sets) > 1:
        raise UndecidedError(f"{len(sets)} sets of labels fit the images", _ways(survey, sets))
    return sets[0]


def _ways(survey: Survey, sets: Sequence[LabelSet]) -> list[Reading]:
    """What may be made of several sets: each alone, all together, or classes."""
    ways = [
        Reading(
            f"{label_set.pattern} ({len(label_set.labels)} images, {len(label_set.values)} values)",
            f"--labels {shlex.quote(label_set.pattern)}",
            labels=label_set,
        )
        for label_set in sets
    ]
    if len({(label_set.kind, label_set.classes) for label_set in sets}) == 1:
        patterns = ", ".join(label_set.pattern for label_set in sets)
        which = f"all; of an image with several, that of {sets[0].pattern}"
        ways.append(Reading(which, f"--labels {shlex.quote(patterns)}", labels=sets[0]))
    # Those that `label_sets` would take together.
    words = differing_words(x.pattern for x in survey.sets if len(x.values) < 3)
    if words and all(len(label_set.values) < 3 for label_set in sets):
        one_each = "classes, whose masks show nearly the same; the smaller area counts"
        ways.append(Reading(one_each, names_option(words)))
        ways.append(Reading("classes, of which a pixel may have several", "--task multilabel"))
    return ways


def _named_wholly(sets: Sequence[LabelSet], wanted: str) -> list[LabelSet]:
    """The sets whose whole patterns stand in `wanted`, in its order; empty: other words do."""
    by_pattern = {label_set.pattern: label_set for label_set in sets}
    found, rest = [], wanted
    while rest:
        # A pattern may hold a comma itself.
        fitting = [x for x in by_pattern if f"{rest}, ".startswith(f"{x}, ")]
        if not fitting:
            return []
        longest = max(fitting, key=len)
        found.append(by_pattern[longest])
        rest = rest[len(longest) :].removeprefix(", ")
    return found


def _restricted(labels: LabelSet, wanted: str) -> LabelSet | None:
    """The part of a set that `wanted` names: a folder, a part of a name or a pattern; or None.

    Several stand beside each other: `train/*.png, val/*.png`.
    """
    parts = wanted.split(", ")
    kept = {
        image: fitting
        for image, files in labels.labels.items()
        if (fitting := tuple(file for file in files if any(fits(file, part) for part in parts)))
    }
    if not kept:
        return None
    # Still several files an image, for classes or objects.
    if any(len(files) > 1 for files in kept.values()):
        return replace(labels, labels=kept)
    # One file is left, as of masks/car/ alone: a plain mask, and no set of classes.
    pattern = wanted if len(labels.classes) > 1 else labels.pattern
    return replace(labels, pattern=pattern, labels=kept, classes=())


def _joined(sets: Sequence[LabelSet], *, always: bool, may_overlap: bool) -> list[LabelSet]:
    """The sets, those of one kind that label different images as one.

    always: even if their names are not alike. may_overlap: also where images are in several, of
    which the first one counts.
    """
    joined: list[LabelSet] = []
    # The largest first: its pattern leads the name. What is asked for has an order.
    for label_set in sets if may_overlap else sorted(sets, key=lambda x: -len(x.labels)):
        for i, other in enumerate(joined):
            alike = (label_set.kind, label_set.classes) == (other.kind, other.classes)
            alike = alike and (always or _have_alike_names(label_set, other))
            if alike and (may_overlap or not label_set.labels.keys() & other.labels.keys()):
                joined[i] = replace(
                    other,
                    pattern=f"{other.pattern}, {label_set.pattern}",
                    labels={**label_set.labels, **other.labels},
                    values={**label_set.values, **other.values},
                    class_of={**label_set.class_of, **other.class_of},
                )
                break
        else:
            joined.append(label_set)
    return joined


def _have_alike_names(*sets: LabelSet) -> bool:
    """Whether folders or names are the same without words of splits."""
    # train/masks/*.png and val/masks/*.png, or train_masks/*.png and val_masks/*.png.
    parts = []
    for one in sets:
        *folders, name = one.pattern.split(", ")[0].split("/")
        words = (
            [w for x in part for w in words_of(x) if not split_of(w)] for part in (folders, [name])
        )
        parts.append([*words])
    # Words of folders are compared with each other, and words of names.
    return any(one == other for one, other in zip(*parts, strict=True))


def _is_named_instances(labels: LabelSet) -> bool:
    # SegmentationObject/ of VOC, *_instanceIds.png of Cityscapes.
    words = re.findall("[a-z]+", labels.pattern.lower())
    other = {"segmentationobject", "object", "objects", "inst", "panoptic"}
    return any(word in other or word.startswith("instance") for word in words)


def is_instances(labels: LabelSet) -> bool:
    """Whether values look like `class * 1000 + number`, or numbers of objects."""
    # Cityscapes: 24003 is a person (class 24), the one with the number 3.
    ids = [value for value in labels.values if isinstance(value, int)]
    return len(ids) > MOST_CLASSES or sum(value >= 1000 for value in ids) > len(ids) / 2
