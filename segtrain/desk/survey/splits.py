"""The decision: which images to train and to evaluate on; a pure function of the survey."""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from segtrain.desk.survey.contents import Value
from segtrain.desk.survey.groupings import DEFAULT_VAL, Groups, groupings, shared_pixels
from segtrain.desk.survey.grown import continued
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.leaks import check_groups, leak
from segtrain.desk.survey.questions import Answers
from segtrain.desk.survey.reasons import SPLIT_NAMES
from segtrain.desk.survey.split_questions import ask_about_unlisted, ask_which_lists
from segtrain.desk.survey.survey import Survey
from segtrain.errors import DataError, refuse_unused
from segtrain.text import counted, first_of

# Of the images that lists name: fewer without a label are no surprise.
_MOST_WITHOUT_LABEL = 0.05


@dataclass(frozen=True)
class Splits:
    """Images with labels; reason: of the division."""

    train: tuple[Image, ...]
    val: tuple[Image, ...]
    reason: str
    warnings: tuple[str, ...] = ()


class _Sides(NamedTuple):
    """Images to train on and to evaluate on, either perhaps none yet; reason: what to say."""

    train: Sequence[Image] = ()
    val: Sequence[Image] = ()
    reason: str = ""


def choose_splits(survey: Survey, labels: LabelSet, answers: Answers) -> Splits:
    """The images to train on and those to evaluate on; only images with a label.

    Raises:
        DataError: fewer than two images have labels.
        UndecidedError: lists contradict each other, or leave out many images.
    """
    images = [image for image in survey.images if image.path in labels.labels]
    if len(images) < 2:
        raise DataError(
            f"{survey.root}: {counted(len(images), 'image has', 'images have')} a "
            "label; training and evaluation need one each at least"
        )
    sides, warnings = _Sides(), []
    # Splits that are there count, unless --val is a fraction, by which all are divided anew.
    if survey.split_source and not isinstance(answers.val, float):
        if answers.val is None:
            ask_which_lists(survey, labels)
            ask_about_unlisted(survey, labels, images, answers)
        sides = _given(survey, images)
        # Good parts alone, as MVTec's.
        if sides.train and not any(labels.labels[x.path] for x in sides.train):
            sides = _Sides()
            images = [replace(image, split=None) for image in images]
        warnings = _without_labels(survey, labels)
    if sides.train and sides.val:
        refuse_unused(
            vars(answers), "like", f"the splits of {survey.split_source}; or add --val 0.2"
        )
    elif answers.like is not None:
        *found, gone = continued(survey, sides.train or sides.val or images, answers)
        sides, warnings = _Sides(*found), warnings + gone
    else:
        # Labels of one side may be hidden: the other one is divided.
        divided = _divided(survey, labels, sides.train or sides.val or images, answers)
        sides = divided._replace(reason=divided.reason + sides.reason)
    if answers.group is not None:
        check_groups(answers.group, sides.train, sides.val)
    leaked = leak(survey, sides.train, sides.val, answers.group)
    warnings += [leaked] if leaked else []
    return Splits(tuple(sides.train), tuple(sides.val), sides.reason, tuple(warnings))


def _given(survey: Survey, images: Sequence[Image]) -> _Sides:
    """The splits of the folder or its lists; one side may be empty."""
    by_split: dict[str | None, list[Image]] = defaultdict(list)
    for image in images:
        by_split[image.split].append(image)
    train, source = by_split.pop("train", []), survey.split_source
    val_name = "val" if by_split["val"] else "test"
    # Labels of val and test alone: val is divided, and test stays apart.
    if not train and by_split["val"] and by_split["test"]:
        reason = f"; of the splits of {source} train has no labels"
        return _Sides(val=by_split["val"], reason=reason)
    val = by_split.pop(val_name, []) if train else []
    if not val:
        which = "train" if train else val_name
        return _Sides(train, reason=f"; of the splits of {source} only {which} has labels")
    unused = "".join(
        f"; {len(left)} of {SPLIT_NAMES.get(name, name)} are not used"
        for name, left in by_split.items()
        if left
    )
    return _Sides(train, val, f"the splits of {source}: train and {val_name}{unused}")


def _without_labels(survey: Survey, labels: LabelSet) -> list[str]:
    """Warnings about lists that name more than a few images without a label."""
    warnings = []
    for split in ("train", "val") if survey.split_source != "folders" else ():
        listed = [image.path for image in survey.images if image.split == split]
        lost = [path for path in listed if path not in labels.labels]
        # Of none: a hidden test, of which the reason speaks.
        if _MOST_WITHOUT_LABEL * len(listed) < len(lost) < len(listed):
            warnings.append(
                f"{survey.split_source}: {len(lost)} of {len(listed)} images of {split} have no "
                f"label, and are not used: {first_of(lost, 3)}"
            )
    return warnings


class _Division(NamedTuple):
    """A way to divide the images.

    how: in words. left_out: tiles that show what is evaluated on. num_lost: values that images
    show, and none to train on. cost: shares of values that are not trained on, half of those that
    are not evaluated, and of images that are not trained on.
    """

    train: list[Image]
    val: list[Image]
    how: str
    left_out: set[str]
    num_lost: int
    cost: float

    @classmethod
    def of(
        cls,
        labels: LabelSet,
        images: Sequence[Image],
        how: str,
        is_val: Sequence[bool],
        pairs: Sequence[tuple[str, str]],
    ) -> Self:
        """is_val: whether each image is to be evaluated on. pairs: tiles that overlap."""
        val = [image for image, there in zip(images, is_val, strict=True) if there]
        others = [image for image, there in zip(images, is_val, strict=True) if not there]
        left_out = _overlapping(pairs, others, val)
        train = [image for image in others if image.path not in left_out]
        num_lost, not_evaluated = (len(_lost(labels, images, part)) for part in (train, val))
        cost = (num_lost + not_evaluated / 2) / max(1, len(labels.shown_in))
        cost += 1 - len(train) / len(images)
        # Tiles that overlap are better than nothing to train on.
        return cls(train or others, val, how, left_out, num_lost, cost)


def _divided(survey: Survey, labels: LabelSet, images: Sequence[Image], answers: Answers) -> _Sides:
    """A division by a hash of names; what belongs together stays together.

    Unless training would lose a class by it, as where a folder of images is one.
    """
    share = answers.val if isinstance(answers.val, float) else DEFAULT_VAL
    # A test split of the folder is kept for the test, if anything else is left.
    rest = [image for image in images if image.split != "test"]
    unused = len(images) - len(rest) if len(rest) > 1 else 0
    images = rest if unused else images
    pairs = shared_pixels(survey, images)
    tried: list[_Division] = []
    for group_of, how in groupings(survey, images, answers.group):
        groups = [group_of[image.path] for image in images]
        few = chosen_groups(_replaceable(labels, images, groups), share)
        more = few | _with_rare_classes(labels, images, group_of, few)
        # Each tile to evaluate on costs those that overlap it: fewer groups may lose less.
        for chosen in (more, few) if pairs else (more,):
            is_val = [group in chosen for group in groups]
            tried.append(_Division.of(labels, images, how, is_val, pairs))
        if not (pairs or tried[-1].num_lost):  # the first that costs no class is the best
            tried = tried[-1:]
            break
    best = min(tried, key=lambda division: division.cost)
    reason = f"{len(best.val)} of {len(images)} images, {best.how}, chosen by a hash of the names"
    reason += " (--val)"
    reason += f"; {unused} of test are not used" if unused else ""
    if best.left_out and len(best.train) + len(best.val) < len(images):
        which = counted(len(best.left_out), "tile that overlaps", "tiles that overlap")
        reason += f"; {which} them left out"
    return _Sides(best.train, best.val, reason)


def _replaceable(labels: LabelSet, images: Sequence[Image], groups: Sequence[str]) -> Sequence[str]:
    """The groups without those that alone show a value; all, if fewer than two are left."""
    alone = set()
    for where in labels.shown_in.values():
        showing = {x for image, x in zip(images, groups, strict=True) if image.path in where}
        alone |= showing if len(showing) == 1 else set()
    others = [group for group in groups if group not in alone]
    return others if len({*others}) > 1 else groups


def chosen_groups(groups: Sequence[str], share: float) -> set[str]:
    """The groups to evaluate on: about this share of the images; groups: that of each image."""
    sizes = Counter(groups)
    # By a hash, so that no order of names decides, and equal names give equal splits.
    order = sorted(sizes, key=lambda name: hashlib.sha256(os.fsencode(name)).hexdigest())
    chosen, size = set(), 0
    # The last group is always left to train on.
    for name in order[:-1]:
        if size + sizes[name] / 2 <= max(share * len(groups), 1):
            chosen.add(name)
            size += sizes[name]
    return chosen or {order[0]}


def _lost(labels: LabelSet, images: Sequence[Image], train: Sequence[Image]) -> list[Value]:
    """The values that images show, and none to train on."""
    here, kept = ({image.path for image in part} for part in (images, train))
    return [value for value, where in labels.shown_in.items() if where & here and not where & kept]


def _with_rare_classes(
    labels: LabelSet, images: Sequence[Image], group_of: Groups, chosen: set[str]
) -> set[str]:
    """Groups to evaluate on beside those `chosen`, so that each class is evaluated.

    Of each class that at least two groups show, and none of the chosen, the first group by name, if
    all that the group shows can be trained on without it.
    """
    added: set[str] = set()
    # The rarest class first: it has the fewest groups to choose from.
    by_count = sorted(labels.shown_in.items(), key=lambda item: (len(item[1]), str(item[0])))
    for _, where in by_count:
        groups = sorted({group_of[image.path] for image in images if image.path in where})
        if len(groups) < 2 or (chosen | added).intersection(groups):
            continue
        for group in groups:
            out = chosen | added | {group}
            if not _lost(labels, images, [x for x in images if group_of[x.path] not in out]):
                added.add(group)
                break
    return added


def _overlapping(
    pairs: Sequence[tuple[str, str]], train: Sequence[Image], val: Sequence[Image]
) -> set[str]:
    """The tiles to train on that show what tiles to evaluate on show, too; pairs: that overlap."""
    trained, evaluated = ({image.path for image in part} for part in (train, val))
    both = {two for pair in pairs for two in (pair, pair[::-1])}
    return {tile for tile, other in both if tile in trained and other in evaluated}
