"""The decision: which of several sets of labels; a pure function of the survey."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from segtrain.desk.survey.class_words import differing_words
from segtrain.desk.survey.contents import Color
from segtrain.desk.survey.file_names import LABEL_WORDS, fits, split_of, words_of
from segtrain.desk.survey.label_set import MOST_CLASSES, LabelSet, total_values
from segtrain.desk.survey.questions import (
    Answers,
    Reading,
    UndecidedError,
    names_option,
)
from segtrain.desk.survey.survey import Survey
from segtrain.errors import ConfigError, DataError
from segtrain.text import first_of

EqualSets = Mapping[frozenset[str], Mapping[int, Color]]
"""As `Survey.equal_sets`: the colours of ids by the patterns of two sets that say the same."""


def choose_labels(survey: Survey, answers: Answers) -> LabelSet:
    """The label set to train on.

    In this order:

    1. --labels keeps the sets, or the parts of sets, that it names.
    2. Numbers of objects are dropped where there are other labels.
    3. Of two sets that say the same, the one that adds nothing is dropped.
    4. Sets of one kind that label different images become one set.
    5. Labels of test images alone are dropped, unless --labels names them.
    6. If several sets are left, it is asked.

    Raises:
        ConfigError: --labels names no labels.
        DataError: there are no labels.
        UndecidedError: several sets, which do not say the same.
    """
    sets, are_named_wholly = list(survey.sets), False
    if answers.labels is not None:
        sets, are_named_wholly = _asked_for(sets, answers.labels)
    if not sets:
        found = f"{survey.root}: {len(survey.images)} images, and no labels that belong to them"
        hint = "image and label share a part of their names: a.jpg with a.png or a_mask.png"
        raise DataError("\n  ".join([found, *survey.tried, *survey.notes, hint]))
    # Numbers of objects, as gtFine/*_instanceIds.png: told by their values, or by their names.
    sets = [x for x in sets if not is_instances(x)] or sets
    sets = [x for x in sets if not _is_named_instances(x)] or sets
    sets = _without_equals(sets, survey.equal_sets)
    sets = [replace(x, twin=_colors_of_equal(x, survey.equal_sets)) for x in sets]
    # train_masks/ and val_masks/ label different images: one set.
    sets = _joined(sets, always=answers.labels is not None, may_overlap=are_named_wholly)
    if answers.labels is None:
        # Labels of test images alone cannot be trained on.
        test = {image.path for image in survey.images if image.split == "test"}
        sets = [x for x in sets if x.labels.keys() - test] or sets
    if len(sets) > 1:
        raise UndecidedError(f"{len(sets)} sets of labels fit the images", _ways(survey, sets))
    return sets[0]


def _asked_for(sets: Sequence[LabelSet], wanted: str) -> tuple[list[LabelSet], bool]:
    """The sets or parts of sets that --labels names, and whether it gives their whole patterns.

    ConfigError: it names none.
    """
    if whole := _named_wholly(sets, wanted):
        return whole, True
    parts = [part for label_set in sets if (part := _restricted(label_set, wanted))]
    if not parts:
        there = first_of(label_set.pattern for label_set in sets) or "none"
        raise ConfigError(f"--labels {wanted}: no such labels; found {there}")
    return parts, False


def _without_equals(sets: Sequence[LabelSet], equal_sets: EqualSets) -> list[LabelSet]:
    """The sets without those that only repeat another one: masks_color/ beside masks_ids/."""
    kept: list[LabelSet] = []
    for i, label_set in enumerate(sets):
        # Of two that repeat each other one must stay: those dropped before count no more.
        others = [*kept, *sets[i + 1 :]]
        equals = [x for x in others if frozenset((label_set.pattern, x.pattern)) in equal_sets]
        if not any(_repeats(label_set, other) for other in equals):
            kept.append(label_set)
    return kept


def _repeats(label_set: LabelSet, other: LabelSet) -> bool:
    """Whether a set adds nothing to one that says the same."""
    # Only images in common were compared: labels/ may have images that labels_old/ has not.
    has_no_more = label_set.labels.keys() <= other.labels.keys()
    # Ids are exact whatever a palette looks like.
    return has_no_more and (other.kind == "ids" or label_set.kind != "ids")


def _colors_of_equal(label_set: LabelSet, equal_sets: EqualSets) -> Mapping[int, Color]:
    """The colours of its ids in a set that says the same, which may be dropped; or empty.

    They tell a known data set, as those of KITTI's semantic_rgb/ do.
    """
    found = (colors for pair, colors in equal_sets.items() if label_set.pattern in pair)
    return next(filter(None, found), {})


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
    images = [image for label_set in sets for image in label_set.labels]
    are_apart = len({*images}) == len(images)
    if len({(label_set.kind, label_set.classes) for label_set in sets}) == 1:
        patterns = ", ".join(label_set.pattern for label_set in sets)
        which = "all of them, of one kind"
        if not are_apart:
            which = f"all; of an image with several, that of {sets[0].pattern}"
        ways.append(Reading(which, f"--labels {shlex.quote(patterns)}", labels=sets[0]))
    # Those that `label_sets` would take together.
    words = differing_words(x.pattern for x in survey.sets if len(x.values) < 3)
    if words and all(len(label_set.values) < 3 for label_set in sets):
        nearly = ", whose masks show nearly the same; the smaller area counts"
        one_each = f"classes{'' if are_apart else nearly}"
        ways.append(Reading(one_each, names_option(dict.fromkeys(words))))
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

    def is_part(label_set: LabelSet, other: LabelSet) -> bool:
        is_one_kind = (label_set.kind, label_set.classes) == (other.kind, other.classes)
        is_apart = label_set.labels.keys().isdisjoint(other.labels)
        is_alike = always or _have_alike_names(label_set, other)
        return is_one_kind and is_alike and (may_overlap or is_apart)

    joined: list[LabelSet] = []
    # The largest first: its pattern leads the name. What is asked for has an order.
    for label_set in sets if may_overlap else sorted(sets, key=lambda x: -len(x.labels)):
        place = next((i for i, x in enumerate(joined) if is_part(label_set, x)), None)
        if place is None:
            joined.append(label_set)
        else:
            joined[place] = _union(joined[place], label_set)
    return joined


def _union(first: LabelSet, other: LabelSet) -> LabelSet:
    """Both as one set; the label of the first counts where both have one."""
    return replace(
        first,
        pattern=f"{first.pattern}, {other.pattern}",
        labels={**other.labels, **first.labels},
        values=total_values([first.values, other.values]),
        class_of={**other.class_of, **first.class_of},
    )


def _have_alike_names(one: LabelSet, other: LabelSet) -> bool:
    """Whether words of folders and of names are the same, without those of splits and of labels.

    train/masks/*.png and val/labels/*.png are alike; forest/*.png and city/*.png are not.
    """
    return _words_of_place(one) == _words_of_place(other)


def _words_of_place(label_set: LabelSet) -> list[str]:
    """Words of the folders and of the name that may tell what is labelled."""
    place = PurePosixPath(label_set.pattern.split(", ")[0]).with_suffix("")
    words = (
        re.sub(r"\d", "", word)  # area1/ and area2/ are parts of one set
        for word in words_of(str(place))
        if not (split_of(word) or word in LABEL_WORDS)
    )
    return [*filter(None, words)]


def _is_named_instances(labels: LabelSet) -> bool:
    # SegmentationObject/ of VOC, *_instanceIds.png of Cityscapes; objects/ may be of classes.
    words = re.findall("[a-z]+", labels.pattern.lower())
    other = {"segmentationobject", "inst", "panoptic"}
    return any(word in other or word.startswith("instance") for word in words)


def is_instances(labels: LabelSet) -> bool:
    """Whether values look like `class * 1000 + number`, or numbers of objects."""
    # Cityscapes: 24003 is a person (class 24), the one with the number 3.
    ids = [value for value in labels.values if isinstance(value, int)]
    return len(ids) > MOST_CLASSES or sum(value >= 1000 for value in ids) > len(ids) / 2
