"""Which slices to train and to evaluate on: whole patients, or a span of the only volume."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from segtrain.data.read.cut_volumes import CutVolume
from segtrain.desk.survey.groupings import DEFAULT_VAL
from segtrain.desk.survey.one_picture import best_span
from segtrain.desk.survey.splits import chosen_groups
from segtrain.desk.volumes.cases import VolumeCase
from segtrain.errors import DataError
from segtrain.text import counted, first_of

# Of one volume: slices are left out on both sides of those to evaluate on.
_GAP = 1 / 40


class Written(NamedTuple):
    """The slices of a case, how many pixels of each show each value, (N, K), and what to say.

    shared: voxels of two organs, as of `organ_masks.joined`.
    """

    case: VolumeCase
    ids: tuple[str, ...]
    counts: np.ndarray
    spacing: tuple[float, float, float] | None
    unit: str
    note: str
    place: CutVolume
    shared: Counter[str]


def divide_slices(written: Sequence[Written]) -> tuple[list[str], list[str], str]:
    """Slices to train and to evaluate on, and why; all of a patient are on one side."""
    names = [[f"{volume.case.name}/{x}" for x in volume.ids] for volume in written]
    said = [volume.case.split for volume in written]
    groups = [volume.case.group for volume in written]
    evaluated = "val" if "val" in said else "test"
    # The folders' own splits, else whole patients, else a part of the only volume.
    if "train" in said and evaluated in said:
        sides, reason = said, f"the folders' train and {evaluated}"
        others = [
            volume.case.name for volume in written if volume.case.split not in ("train", evaluated)
        ]
        if others:
            what = counted(len(others), "volume is", "volumes are")
            reason += f"; {what} in no list: {first_of(others, 3)}"
    elif len({*groups}) > 1:
        chosen = chosen_groups(
            [x for x, volume in zip(groups, names, strict=True) for _ in volume], DEFAULT_VAL
        )
        sides = [evaluated if x in chosen else "train" for x in groups]
        what = counted(len(chosen), "patient or volume", "patients or volumes")
        reason = f"whole {what} of {len({*groups})}, chosen by a hash of the names (--group)"
    elif len(written) > 1:
        raise DataError("all volumes are of one patient, so there is nothing to evaluate on")
    else:
        return _split_one(written[0], names[0])
    train, val = (
        [x for side, volume in zip(sides, names, strict=True) if side == wanted for x in volume]
        for wanted in ("train", evaluated)
    )
    return train, val, reason


def _split_one(one: Written, names: Sequence[str]) -> tuple[list[str], list[str], str]:
    """A span of slices of the only volume, with a gap on both sides."""
    width, gap = max(1, round(DEFAULT_VAL * len(names))), max(1, round(_GAP * len(names)))
    if len(names) < width + gap + 1:
        raise DataError(f"{one.case.name}: too few slices to train and evaluate: {len(names)}")
    _, first = best_span(one.counts, width, gap)
    last = first + width
    train = [*names[: max(0, first - gap)], *names[last + gap :]]
    apart = f"{gap + 1} slices"
    if one.spacing is not None and one.unit and one.spacing[0] > 0:  # not NaN
        apart += f" ({(gap + 1) * one.spacing[0]:.4g} {one.unit})"
    span = f"slices {one.ids[first]} to {one.ids[last - 1]}"
    return train, list(names[first:last]), f"{span}, {apart} from the nearest to train on"
