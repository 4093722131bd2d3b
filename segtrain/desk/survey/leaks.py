"""What is wrong with a division: images of both sides that show the same, classes of one side."""

import re
from collections.abc import Sequence
from itertools import pairwise

from segtrain.data.read.cut_volumes import read_cut_volumes
from segtrain.data.read.sources import groups_of, sources_of
from segtrain.desk.survey.class_table import Classes
from segtrain.desk.survey.groupings import DEFAULT_VAL, named_groups, shared_pixels
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.survey import Survey
from segtrain.errors import ConfigError
from segtrain.text import counted, first_of

# Fewer near-duplicates among the images to evaluate on are in any data.
_FEW_LEAKED = 1 / 3


def check_groups(group: re.Pattern[str], train: Sequence[Image], val: Sequence[Image]) -> None:
    """ConfigError: the given splits divide a group, of --group."""
    trained, evaluated = (groups_of(group, [x.path for x in part]) for part in (train, val))
    if both := {*trained} & {*evaluated}:
        what = counted(len(both), "group is", "groups are")
        raise ConfigError(
            f"--group {group.pattern}: {what} on both sides of the splits that are there: "
            f"{first_of(sorted(both))}; --val {DEFAULT_VAL} divides anew"
        )


def leak(
    survey: Survey, train: Sequence[Image], val: Sequence[Image], group: re.Pattern[str] | None
) -> str:
    """A warning if many images to evaluate on have a near-duplicate among those to train on."""
    trained = {image.path for image in train}
    pairs = {*survey.similar, *shared_pixels(survey, [*train, *val])}
    if survey.moving:
        # Neighbours in a video are nearly alike, whether the sample of thumbnails shows it or not.
        frames = pairwise(sorted(survey.images, key=lambda image: image.place))
        pairs |= {(a.path, b.path) for a, b in frames if a.place[:2] == b.place[:2]}
    near = {b for pair in pairs for a, b in (pair, pair[::-1]) if a in trained}
    sources = sources_of([image.name for image in (*train, *val)])
    of_train, of_val = {*sources[: len(train)]}, sources[len(train) :]
    near |= {image.path for image, source in zip(val, of_val, strict=True) if source in of_train}
    near |= (divided := _of_divided_groups(train, val))
    leaked = [image for image in val if image.path in near]
    if len(leaked) < _FEW_LEAKED * len(val):
        return ""
    # `data import` has kept the slices of a patient together.
    are_apart = group is not None or (not divided and read_cut_volumes(survey.root))
    return (
        f"{len(leaked)} of {len(val)} images to evaluate on have a near-duplicate or a neighbour "
        f"among those to train on, such as {leaked[0].path}: scores will be too good"
    ) + ("" if are_apart else "; keep sequences together (--group)")


def _of_divided_groups(train: Sequence[Image], val: Sequence[Image]) -> set[str]:
    """The images to evaluate on of scenes, sequences or patients that are trained on, too."""
    for group_of, _, _ in named_groups([*train, *val]):
        trained = {group_of[image.path] for image in train}
        return {image.path for image in val if group_of[image.path] in trained}
    return set()


def one_sided(
    labels: LabelSet, classes: Classes, train: Sequence[Image], val: Sequence[Image]
) -> list[str]:
    """Warnings about classes that only images to train on show, or only images to evaluate on."""
    shown = {
        side: {value for value, where in labels.shown_in.items() if where & {x.path for x in part}}
        for side, part in (("train", train), ("evaluate", val))
    }
    warnings = []
    for side, values in shown.items():
        lost = [x.name for x in classes.classes if x.pixels and values.isdisjoint(x.values)]
        if lost and labels.shown_in:
            warnings.append(f"no image to {side} on shows {first_of(lost)}")
    return warnings
