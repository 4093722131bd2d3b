"""The decision: which images to train and to evaluate on; a pure function of the survey."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from segtrain.errors import DataError
from segtrain.survey.decide import Answers
from segtrain.survey.image_kinds import Image
from segtrain.survey.label_sets import LabelSet
from segtrain.survey.survey import Survey
from segtrain.text import counted

DEFAULT_VAL = 0.2
# Fewer groups are no division: all of one would be missing from training.
_MIN_GROUPS = 4


@dataclass(frozen=True)
class Splits:
    """Images with labels; reason: of the division."""

    train: tuple[Image, ...]
    val: tuple[Image, ...]
    reason: str
    warnings: tuple[str, ...] = ()


def choose_splits(survey: Survey, labels: LabelSet, answers: Answers) -> Splits:
    """The images to train on and those to evaluate on; only images with a label.

    Raises:
        DataError: fewer than two images have labels.
    """
    images = [image for image in survey.images if image.path in labels.labels]
    if len(images) < 2:
        raise DataError(
            f"{survey.root}: {counted(len(images), 'image has', 'images have')} a "
            "label; training and evaluation need one each at least"
        )
    train, val, reason = [], [], ""
    if survey.split_source and not isinstance(answers.val, float):
        train, val, reason = _given(survey, images)
        images = train or val or images  # the other one is hidden, perhaps
    if not (train and val):
        train, val, reason = _divided(survey, images, answers)
    leak = _leak(survey, train, val)
    return Splits(tuple(train), tuple(val), reason, (leak,) if leak else ())


def _given(survey: Survey, images: Sequence[Image]) -> tuple[list[Image], list[Image], str]:
    """The splits of the folder or its lists; one may be empty."""
    by_split: dict[str | None, list[Image]] = defaultdict(list)
    for image in images:
        by_split[image.split].append(image)
    train = by_split.pop("train", [])
    val_name = "val" if by_split["val"] else "test"
    if not train and by_split["val"] and by_split["test"]:
        return [], by_split["val"], ""
    val = by_split.pop(val_name, []) if train else []
    unused = "".join(
        f"; {len(found)} of {name or 'no split'} are not used"
        for name, found in by_split.items()
        if found
    )
    return train, val, f"the splits of {survey.split_source}: train and {val_name}{unused}"


def _divided(
    survey: Survey, images: Sequence[Image], answers: Answers
) -> tuple[list[Image], list[Image], str]:
    """A division by a hash of names; what belongs together stays together."""
    share = answers.val if isinstance(answers.val, float) else DEFAULT_VAL
    rest = [image for image in images if image.split != "test"]
    unused = len(images) - len(rest) if len(rest) > 1 else 0
    images = rest if unused else images
    key, what = _grouping(survey, images)
    groups: dict[str, list[Image]] = defaultdict(list)
    for image in images:
        groups[key(image)].append(image)
    order = sorted(groups, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    chosen, size = set(), 0
    for name in order[:-1]:
        if size + len(groups[name]) / 2 <= max(share * len(images), 1):
            chosen.add(name)
            size += len(groups[name])
    chosen = chosen or {order[0]}
    train = [image for image in images if key(image) not in chosen]
    val = [image for image in images if key(image) in chosen]
    reason = f"{len(val)} of {len(images)} images, {what}, chosen by a hash of the names (--val)"
    reason += f"; {unused} of test are not used" if unused else ""
    return train, val, reason


def _grouping(survey: Survey, images: Sequence[Image]) -> tuple[Callable[[Image], str], str]:
    """What stays together when images are divided: scene, sequence, or blocks of like images."""
    keys: dict[str, Callable[[Image], str]] = {
        "scenes": lambda image: image.scene,
        "sequences": lambda image: f"{image.scene}/{image.sequence}",
    }
    for what, key in keys.items():
        number = len(set(map(key, images)))
        if _MIN_GROUPS <= number <= len(images) / 2:
            return key, f"whole {what} ({number})"
    ordered = sorted(images, key=lambda image: image.place)
    blocks, block = {ordered[0].path: 0}, 0
    for before, image in pairwise(ordered):
        block += (before.path, image.path) not in survey.similar
        blocks[image.path] = block
    if survey.similar and block + 1 >= _MIN_GROUPS:
        return (
            lambda image: f"{blocks[image.path]} {ordered[0].path}",
            "like neighbours kept together",
        )
    if survey.similar or survey.moving:
        size = max(1, len(images) // 5)
        blocks = {image.path: i // size for i, image in enumerate(ordered)}
        return lambda image: str(blocks[image.path]), "a block of one sequence"
    return lambda image: image.path, "single images"


def _leak(survey: Survey, train: Sequence[Image], val: Sequence[Image]) -> str:
    """A warning if many images to evaluate on have a near-duplicate among those to train on."""
    pairs = set(survey.similar)
    if survey.moving:
        frames = pairwise(sorted(survey.images, key=lambda image: image.place))
        pairs |= {(a.path, b.path) for a, b in frames if a.place[:2] == b.place[:2]}
    names = {image.path for image in train}
    near = {b for pair in pairs for a, b in (pair, pair[::-1]) if a in names}
    found = [image for image in val if image.path in near]
    if len(found) * 3 < len(val):
        return ""
    return (
        f"{len(found)} of {len(val)} images to evaluate on have a near-duplicate among those to "
        f"train on, such as {found[0].path}: scores will be too good; keep sequences together"
    )
