"""Labels in a file for each organ, as TotalSegmentator writes them: names, and what they make.

Where two organs share a voxel the later name counts, as in nnU-Net's converters: a few voxels at
a border may, and more is refused.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

import numpy as np

from segtrain.data.read.volumes import Stack, VolumeFile
from segtrain.desk.survey.file_names import LABEL_WORDS, ROLE_WORDS, FileName, split_of, words_of
from segtrain.errors import DataError
from segtrain.text import counted, first_of, printable

BACKGROUND = "background"
_MOST_ORGANS = 254  # an id is a byte, and 255 means that nothing is labelled
_MOST_SHARED = 0.1  # of the smaller one of two organs
_WORDS = re.compile(r"[\W_]+")
# A lesion may be called target or l (left).
_ROLES = {word for word in LABEL_WORDS - {"target", "targets"} if len(word) > 1}


def organs_of(labels: Mapping[str, Sequence[str]], names: Mapping[str, FileName]) -> dict[str, str]:
    """The organ of each label; empty: their paths do not tell those of an image apart.

    labels: of each image, by paths. names: of all of these.

    >>> from segtrain.desk.survey.affixes import parse_names
    >>> paths = ["a/ct.nii", "a/segmentations/rib_1.nii", "a/segmentations/rib_2.nii"]
    >>> organs_of({paths[0]: paths[1:]}, {name.path: name for name in parse_names(paths)})
    {'a/segmentations/rib_1.nii': 'rib_1', 'a/segmentations/rib_2.nii': 'rib_2'}
    """
    said = {x: _said(names[x], names[image]) for image, own in labels.items() for x in own}
    for number in (1, 99):  # liver of liver/a.nii and of seg/liver.nii; else with all folders
        organs = {label: "_".join(parts[-number:]) for label, parts in said.items()}
        told = [{organs[x].lower() for x in own} - {""} for own in labels.values()]
        # What no two images have is no organ.
        is_shared = len(labels) < 2 or len({*organs.values()}) < len(organs)
        if is_shared and list(map(len, told)) == list(map(len, labels.values())):
            return organs
    return {}


def _said(label: FileName, image: FileName) -> list[str]:
    """What the folders and the name of a label say beside its image and words for labels."""
    *above, _ = PurePosixPath(image.path).parts
    *folders, _ = PurePosixPath(label.path).parts
    stem = PurePosixPath(label.path).stem
    if label.core == image.core:  # no s of s0001 where the image is s0001_0000
        starts = _WORDS.split(PurePosixPath(image.pattern).stem)
        words = _WORDS.split(PurePosixPath(label.pattern).stem)
        stem = "_".join(x for x in words if x not in starts)
    said = []
    for part in (*(x for x in folders if x not in above), stem):
        for own in filter(None, (image.stem, image.core, *above)):
            part = re.sub(rf"(?<![^\W_]){re.escape(own)}(?![^\W_])", "_", part, flags=re.I)
        if not all(word in ROLE_WORDS or split_of(word) for word in words_of(part)):
            said.append("_".join(x for x in _WORDS.split(part) if x and x.lower() not in _ROLES))
    return [*filter(None, said)]


def class_order(organs: Mapping[str, str]) -> tuple[str, ...]:
    """The classes in the order of their ids, from 1; DataError: ids do not suffice."""
    names = tuple(sorted({*organs.values()} - {BACKGROUND}))
    if len(names) > _MOST_ORGANS:
        what = f"{len(names)} organs, of which a label can hold {_MOST_ORGANS}"
        raise DataError(f"{first_of(organs, 3)}: {what}; leave out some")
    return names


def is_mask(stack: Stack) -> bool:
    """Whether there is one number at most beside 0."""
    return len({0, *np.unique(stack.pixels).tolist()}) <= 2


def joined(
    names: Sequence[str],
    masks: Mapping[str, VolumeFile],
    image: Stack,
    read: Callable[[VolumeFile], Stack],
) -> tuple[Stack, Counter[str]]:
    """The label that the masks of organs make, and how many voxels of which pairs they share.

    names: as of `class_order`. read: gives a label on the voxels of `image`, or refuses it.

    DataError: a file is no mask, or two are of one place.
    """
    label = np.zeros((*image.pixels.shape[:3], 1), np.uint16)
    sizes, shared = Counter[int](), Counter[str]()
    for k, name in enumerate(names, 1):
        if (file := masks.get(name)) is None:
            continue
        place, mask = printable(file.path), read(file)
        if not is_mask(mask):
            found = first_of((f"{x:g}" for x in np.unique(mask.pixels)), 4)
            what = "of several labels of a volume each has to be the mask of an organ"
            raise DataError(f"{place}: found {found}, expected 0 and one number: {what}")
        where = mask.pixels > 0
        sizes[k] = int(where.sum())
        counts = np.bincount(label[where], minlength=2)
        for j in (np.flatnonzero(counts[1:]) + 1).tolist():
            other, number = names[j - 1], int(counts[j])
            share = number / min(sizes[j], sizes[k])
            if share > _MOST_SHARED:
                what = f"{number} voxels are in {printable(masks[other].path)} too, {share:.0%}"
                repair = "cut the one out of the other, or leave one out"
                raise DataError(f"{place}: {what} of the smaller one; {repair}")
            shared[f"{printable(name)} over {printable(other)}"] += number
        label[where] = k
    return image._replace(pixels=label), shared


def shared_lines(shared: Counter[str]) -> list[str]:
    """What to say of voxels of two organs."""
    if not shared:
        return []
    pairs = first_of((f"{pair} ({number})" for pair, number in shared.most_common()), 5)
    what = counted(shared.total(), "voxel is", "voxels are")
    return [f"warning: {what} of two organs, and the later name counts: {pairs}"]


def missing_lines(names: Sequence[str], cases: Mapping[str, Mapping[str, VolumeFile]]) -> list[str]:
    """Which volumes have no mask of an organ; cases: the masks of each, by its name."""
    by_cases: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in names:
        by_cases[tuple(case for case, masks in cases.items() if name not in masks)].append(name)
    return [
        f"warning: {counted(len(without), 'volume has', 'volumes have')} no file of "
        f"{first_of(organs, 5)}, absent there: {first_of(without, 3)}"
        for without, organs in by_cases.items()
        if without
    ]
