"""The decision: which labels, and which images to train on; a pure function of the survey.

Nothing is guessed where a guess could train wrong: `UndecidedError` shows the readings that fit,
each with the option of the command line that chooses it.
"""

import hashlib
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple

from segtrain.errors import ConfigError, DataError
from segtrain.survey.contents import Value
from segtrain.survey.images import Image
from segtrain.survey.label_sets import OWN, Comparison, LabelSet
from segtrain.survey.survey import Survey
from segtrain.text import counted, first_of

MOST_CLASSES = 255
# Edges along borders of labels, against those of the neighbours.
_SHIFTED = 0.3
_BLACK = 0.95
DEFAULT_VAL = 0.2


@dataclass(frozen=True)
class Answers:
    """What the command line decides; None leaves it to the survey.

    labels: a part of the pattern of a label set. names: of the classes, in the order of their
    values. ignore: values without a class. val: a fraction, or a list file. channels: of images.
    """

    labels: str | None = None
    names: tuple[str, ...] | None = None
    ignore: frozenset[Value] | None = None
    val: float | str | None = None
    channels: int | None = None


class Reading(NamedTuple):
    """One way to read the data: in words, by this option, with these values marked in pictures."""

    words: str
    option: str
    marked: tuple[Value, ...] = ()
    labels: LabelSet | None = None


class UndecidedError(ConfigError):
    """Two readings fit; `readings` says which."""

    def __init__(self, what: str, readings: Sequence[Reading]) -> None:
        ways = [f"  {one.words}: {one.option}" for one in readings]
        super().__init__("\n".join([what, *ways]))
        self.readings = tuple(readings)


# Which labels


def choose_labels(survey: Survey, answers: Answers) -> LabelSet:
    """The label set to train on.

    Raises:
        DataError: there are no labels.
        UndecidedError: several sets, which do not say the same.
    """
    sets = list(survey.sets)
    if answers.labels is not None:
        sets = [found for one in sets if (found := _restricted(one, answers.labels))]
        if not sets:
            there = first_of(one.pattern for one in survey.sets) or "none"
            raise ConfigError(f"--labels {answers.labels}: no such labels; found {there}")
    if not sets:
        raise DataError(_no_labels(survey))
    for is_other in (is_instances, _is_named_instances):
        sets = [one for one in sets if not is_other(one)] or sets
    for one in list(sets):
        # Of two that say the same, ids are exact whatever a palette looks like.
        others = [o for o in sets if o is not one and _equal(survey, one, o)]
        if any(o.kind == "ids" or one.kind != "ids" for o in others):
            sets.remove(one)
    sets = _joined(sets)
    most = max(len(one.labels) for one in sets)
    sets = [one for one in sets if 10 * len(one.labels) >= most]
    if len(sets) > 1:
        raise UndecidedError(
            f"{len(sets)} sets of labels fit the images",
            [
                Reading(
                    f"{one.pattern} ({len(one.labels)} images, {len(one.values)} values)",
                    f"--labels {shlex.quote(one.pattern)}",
                    labels=one,
                )
                for one in sets
            ],
        )
    return sets[0]


def _restricted(labels: LabelSet, wanted: str) -> LabelSet | None:
    """The part of a set that `wanted` names: a folder, a part of a name or a pattern; or None."""
    wanted = wanted.strip("/")
    if wanted == labels.pattern:
        return labels

    def fits(file: str) -> bool:
        below = file.startswith(f"{wanted}/") or f"/{wanted}/" in f"/{file}"
        return below or fnmatchcase(file, f"*{wanted}*" if "*" not in wanted else wanted)

    kept = {
        image: found
        for image, files in labels.labels.items()
        if (found := tuple(file for file in files if fits(file)))
    }
    several = any(len(files) > 1 for files in kept.values())
    classes = labels.classes if several else ()
    if len(labels.classes) > 1 and not several:
        return replace(labels, pattern=wanted, labels=kept, classes=()) if kept else None
    return replace(labels, labels=kept, classes=classes) if kept else None


def _joined(sets: Sequence[LabelSet]) -> list[LabelSet]:
    """The sets, those of one kind that label different images as one."""
    found: list[LabelSet] = []
    for one in sorted(sets, key=lambda one: -len(one.labels)):
        for i, other in enumerate(found):
            alike = one.kind == other.kind and bool(one.classes) == bool(other.classes)
            if alike and not one.labels.keys() & other.labels.keys():
                found[i] = replace(
                    other,
                    pattern=f"{other.pattern}, {one.pattern}",
                    labels={**other.labels, **one.labels},
                    values={**one.values, **other.values},
                    palette=other.palette or one.palette,
                )
                break
        else:
            found.append(one)
    return found


def _is_named_instances(labels: LabelSet) -> bool:
    words = set(re.findall("[a-z]+", labels.pattern.lower()))
    return bool(words & {"segmentationobject", "object", "objects", "instance", "instances"})


def _equal(survey: Survey, one: LabelSet, other: LabelSet) -> bool:
    pair = one.pattern, other.pattern
    return pair in survey.equal_sets or pair[::-1] in survey.equal_sets


def is_instances(labels: LabelSet) -> bool:
    """Whether values look like `class * 1000 + number`, or numbers of objects."""
    ids = [value for value in labels.values if isinstance(value, int)]
    return len(ids) > MOST_CLASSES or sum(value >= 1000 for value in ids) > len(ids) / 2


def _no_labels(survey: Survey) -> str:
    lines = [f"{survey.root}: {len(survey.images)} images, and no labels that belong to them"]
    if survey.alone:
        lines.append(
            f"  {len(survey.alone)} pictures look like labels, but have no image of their name: "
            f"{first_of(survey.alone, 3)}"
        )
    if survey.unclear:
        lines.append(
            f"  {len(survey.unclear)} labels fit several images: {first_of(survey.unclear, 3)}"
        )
    lines += [f"  {note}" for note in survey.notes]
    lines.append("  image and label share a part of their names: a.jpg with a.png or a_mask.png")
    return "\n".join(lines)


def check_pairs(survey: Survey, labels: LabelSet, found: Comparison, answers: Answers) -> None:
    """Stops where the images say something else than names and values.

    Raises:
        DataError: labels fit the images of their neighbours better than their own.
        UndecidedError: 0 lies where images are black.
    """
    own = found.scores.get(OWN, 1.0)
    words, best = max(found.scores.items(), key=lambda pair: pair[1], default=(OWN, own))
    if best > own + _SHIFTED:
        which = f"{words} image" if words.startswith("the ") else f"their image {words}"
        raise DataError(
            f"{labels.pattern}: labels fit {which} better than their own: edges are {best:.2f} "
            f"times as strong along their borders there, {own:.2f} times here; names, order or "
            "orientation were mixed up"
        )
    is_named = any(one.value == 0 for legend in survey.legends for one in legend.classes)
    if found.black > _BLACK and 0 in labels.values and answers.ignore is None and not is_named:
        raise UndecidedError(
            f"{labels.pattern}: 0 lies where images are black ({shares_of(labels, [0])}): no data, "
            "or a class?",
            [
                Reading("no data", "--ignore 0", (0,)),
                Reading("a class", "--ignore none", (0,)),
            ],
        )


def shares_of(labels: LabelSet, values: Sequence[Value]) -> str:
    """How much of the labels these values are, in words."""
    total = sum(facts.pixels for facts in labels.values.values())
    return ", ".join(
        f"{v}: {labels.values[v].pixels / total:.2%} of the pixels, in "
        f"{counted(labels.values[v].files, 'file', 'files')}"
        for v in values
    )


# Which images to train and to evaluate on


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
    images = [image for image in survey.images if image.files[0] in labels.labels]
    if len(images) < 2:
        raise DataError(
            f"{survey.root}: {counted(len(images), 'image has', 'images have')} a "
            "label; training and evaluation need one each at least"
        )
    by_split = defaultdict(list)
    for image in images:
        by_split[image.split].append(image)
    given = survey.split_source and not isinstance(answers.val, float)
    if given and by_split["train"]:
        val_name = "val" if by_split["val"] else "test"
        if by_split[val_name]:
            others = {k: len(v) for k, v in by_split.items() if k not in ("train", val_name)}
            unused = "".join(f"; {n} of {k or 'no split'} are not used" for k, n in others.items())
            warnings = [_leak(survey, by_split["train"], by_split[val_name])]
            return Splits(
                tuple(by_split["train"]),
                tuple(by_split[val_name]),
                f"the splits of {survey.split_source}: train and {val_name}{unused}",
                tuple(filter(None, warnings)),
            )
        images = by_split["train"]  # whose validation is hidden, perhaps
    elif given and by_split["test"] and by_split["val"]:
        images = by_split["val"]
    share = answers.val if isinstance(answers.val, float) else DEFAULT_VAL
    key, what = _grouping(survey, images)
    groups: dict[str, list[Image]] = defaultdict(list)
    for image in images:
        groups[key[image.files[0]]].append(image)
    order = sorted(groups, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    val: list[Image] = []
    for name in order[:-1]:
        if len(val) + len(groups[name]) / 2 <= max(share * len(images), 1):
            val += groups[name]
    val = val or groups[order[0]]
    chosen = {image.files[0] for image in val}
    train = [image for image in images if image.files[0] not in chosen]
    return Splits(
        tuple(train),
        tuple(image for image in images if image.files[0] in chosen),
        f"{len(val)} of {len(images)} images, {what}, chosen by a hash of the names (--val)",
        tuple(filter(None, [_leak(survey, train, val)])),
    )


def _grouping(survey: Survey, images: Sequence[Image]) -> tuple[dict[str, str], str]:
    """What stays together when images are divided: scene, sequence, or blocks of like images."""
    for attribute, what in (("scene", "scenes"), ("sequence", "sequences")):
        groups = Counter((i.scene, i.sequence)[: 1 + (attribute == "sequence")] for i in images)
        if 4 <= len(groups) <= len(images) / 2:
            key = {
                i.files[0]: "/".join((i.scene, i.sequence)[: 1 + (attribute == "sequence")])
                for i in images
            }
            return key, f"whole {what} ({len(groups)})"
    if survey.similar:
        key, block = {}, 0
        images = sorted(images, key=lambda image: image.place)
        for before, image in zip([None, *images[:-1]], images, strict=True):
            if before is not None and (before.files[0], image.files[0]) not in survey.similar:
                block += 1
            key[image.files[0]] = f"{block} {images[0].files[0]}"
        if len(set(key.values())) >= 4:
            return key, "like neighbours kept together"
    if survey.similar or survey.moving:
        images = sorted(images, key=lambda image: image.place)
        size = max(1, len(images) // 5)
        key = {image.files[0]: str(i // size) for i, image in enumerate(images)}
        return key, "a block of one sequence"
    return {image.files[0]: image.files[0] for image in images}, "single images"


def _leak(survey: Survey, train: Sequence[Image], val: Sequence[Image]) -> str:
    """A warning if many images to evaluate on have a near-duplicate among those to train on."""
    names = {image.files[0] for image in train}
    near = {b for pair in survey.similar for a, b in (pair, pair[::-1]) if a in names}
    if survey.moving:
        frames = [
            (one.files[0], other.files[0])
            for one, other in pairwise(sorted(survey.images, key=lambda image: image.place))
            if (one.scene, one.sequence) == (other.scene, other.sequence)
        ]
        near |= {b for pair in frames for a, b in (pair, pair[::-1]) if a in names}
    found = [image for image in val if image.files[0] in near]
    if len(found) * 3 < len(val):
        return ""
    return (
        f"{len(found)} of {len(val)} images to evaluate on have a near-duplicate among those to "
        f"train on, such as {found[0].files[0]}: scores will be too good; keep sequences together"
    )
