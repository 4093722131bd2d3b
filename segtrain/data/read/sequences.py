"""What the names of images say about sequences: frames of a video, tiles of a scene."""

import os
import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from string import digits
from typing import NamedTuple

import numpy as np

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "trn", "tr", "trainval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "va", "vd"), "val"),
    **dict.fromkeys(("test", "testing", "tst", "ts", "te"), "test"),
}
# Frames are taken at a fixed distance, sometimes at two; photographs and ids are not.
_REGULAR, _LEAST_GAPS = 0.8, 3
# Of the range of a sequence: nearer numbers are of images that may show the same.
_NEAR = 0.02
_FRAME_WORDS = re.compile("frame|video|clip", re.IGNORECASE)


class FramePlace(NamedTuple):
    """Where an image is in its sequence: its last number, None if its name has none."""

    sequence: str
    number: int | None


def places_of(names: Sequence[str]) -> list[FramePlace]:
    """The place of each image, by its name without what all names end with.

    >>> places_of(["drive_007_left", "park_left"])
    [FramePlace(sequence='drive_', number=7), FramePlace(sequence='park', number=None)]
    """
    backwards = [name[::-1] for name in names]
    # Digits stay with the number: 10 and 20 have the 0 in common.
    common = os.path.commonprefix(backwards)[::-1].lstrip(digits)  # noqa: RUF071 - of letters
    places = []
    for name in names:
        stem = name.removesuffix(common)
        number = re.search(r"(\d+)\D*$", stem)
        sequence = stem[: number.start()] if number else stem
        places.append(FramePlace(sequence, int(number[1]) if number else None))
    return places


def sequences_of(names: Sequence[str]) -> list[str]:
    """The sequence of each image: its name without the last number and what all names end with."""
    return [place.sequence for place in places_of(names)]


def without_split(name: str) -> str:
    """`name` without folders such as train and val, in which a sequence may be divided."""
    *folders, last = PurePosixPath(name).parts
    return "/".join([*(folder for folder in folders if folder.lower() not in SPLIT_WORDS), last])


def show_sequences(names: Sequence[str]) -> bool:
    """Whether names show several sequences whose images follow each other regularly.

    The years and numbers of VOC do not, nor do photographs of one folder.
    """
    numbers = _numbers(places_of(names))
    regular = sum(len(each) for each in numbers.values() if _step(each))
    return 1 < len(numbers) <= len(names) / 2 and regular > len(names) / 2


class Shared(NamedTuple):
    """An image to evaluate on that continues a sequence of the training.

    index: of the image. nearest: of the training image with the nearest number.
    by_name: whether the names alone say that the sequence is of frames or tiles.
    """

    index: int
    nearest: int
    sequence: str
    by_name: bool


def shared_sequences(train: Sequence[str], evaluation: Sequence[str]) -> list[Shared]:
    """The images to evaluate on that have a near neighbour in the training split, by names alone.

    A sequence that has the same number in both splits is numbered anew in each, and is not shared.

    Frame 2 of `a` is missing in the training, and its neighbour 1 is there. `b` has a frame 1 in
    both, so these are two scenes.

    >>> train = ["train/a_1", "train/a_3", "train/a_4", "train/b_1"]
    >>> shared_sequences(train, ["val/a_2", "val/b_1"])
    [Shared(index=0, nearest=0, sequence='a_', by_name=False)]
    """
    places = places_of([without_split(name) for name in (*train, *evaluation)])
    of_train, of_evaluation = places[: len(train)], places[len(train) :]
    ours, theirs = _numbers(of_train), _numbers(of_evaluation)
    index = {place: i for i, place in enumerate(of_train)}
    reach, by_name = {}, {}
    for sequence in ours.keys() & theirs.keys():
        here, there = ours[sequence], theirs[sequence]
        joined = sorted({*here, *there})
        # A number that is in both splits says that each counts from its own start.
        if len(joined) == len(here) + len(there):
            step = _step(joined)
            reach[sequence] = max(1, step, _NEAR * (joined[-1] - joined[0]))
            by_name[sequence] = step > 1 or bool(_FRAME_WORDS.search(sequence))
    shared = []
    for i, (sequence, number) in enumerate(of_evaluation):
        if number is None or sequence not in reach:
            continue
        here = ours[sequence]
        at = bisect(here, number)
        # Numbers are sorted, so only those on both sides can be nearest.
        nearest = min(here[max(0, at - 1) : at + 1], key=lambda other: abs(other - number))
        if abs(nearest - number) <= reach[sequence]:
            shared.append(
                Shared(i, index[FramePlace(sequence, nearest)], sequence, by_name[sequence])
            )
    return shared


def _numbers(places: Sequence[FramePlace]) -> Mapping[str, list[int]]:
    """The numbers of each sequence, ascending."""
    by_sequence: dict[str, set[int]] = defaultdict(set)
    for sequence, number in places:
        if number is not None:
            by_sequence[sequence].add(number)
    return {sequence: sorted(numbers) for sequence, numbers in by_sequence.items()}


def _step(numbers: Sequence[int]) -> int:
    """The usual distance of neighbours, of two the smaller; 0: none, or too few to tell."""
    gaps = Counter(np.diff(numbers).tolist()).most_common(2)
    total = len(numbers) - 1
    if total < _LEAST_GAPS or sum(count for _, count in gaps) < _REGULAR * total:
        return 0
    return min(gap for gap, _ in gaps)
