"""The warning before training that the evaluation split continues sequences of the other one."""

import numpy as np
import pytest

from segtrain.data.read.sequences import shared_sequences, show_sequences
from segtrain.trainer.leak import leak_warning

RNG = np.random.default_rng(0)


def numbers(pattern, values):
    return [pattern.format(i) for i in values]


def at_random(names, part=5):
    """Every fifth at random, so that neighbours are in both splits."""
    order = np.random.default_rng(1).permutation(len(names)) % part == 0
    return [n for n, val in zip(names, order, strict=True) if not val], [
        n for n, val in zip(names, order, strict=True) if val
    ]


CAMVID = (
    numbers("0001TP_{:06d}", range(6690, 8550, 30))
    + numbers("0016E5_{:05d}", [*range(390, 7950, 30), *range(8190, 8640, 30)]),
    numbers("0016E5_{:05d}", range(7959, 8160, 2)),
)
VOC = [
    f"{year}_{i:06d}"
    for year in range(2007, 2012)
    for i in sorted(RNG.choice(9999, 200, replace=False))
]
CITIES = [f"{city}/{city}_{i:06d}_000019" for city in ("aachen", "ulm") for i in range(40)]
PHOTOS = numbers("IMG_{:04d}", range(500))


@pytest.mark.parametrize(
    ("train", "evaluation", "silent"),
    [
        (*CAMVID, False),
        (CITIES, numbers("bonn/bonn_{:06d}_000019", range(20)), True),
        (numbers("ADE_train_{:08d}", range(99)), numbers("ADE_val_{:08d}", range(30)), True),
        (*at_random(VOC), None),
        (*at_random(PHOTOS), None),
        (*at_random(numbers("img_{:03d}", range(1, 501))), None),
        (*at_random(numbers("{:012d}", RNG.choice(600_000, 300, replace=False))), None),
        (*at_random(numbers("clip1/{:04d}", range(90))), False),
        (*at_random(numbers("frame_{:05d}", range(90))), False),
        (*at_random(numbers("drive_{:06d}", range(0, 900, 10))), False),
        (numbers("train/0016E5_{:05d}", range(0, 900, 30)), ["val/0016E5_00900"], False),
        # Blocks far from each other; numbers that begin anew in each split; names without numbers.
        (numbers("frame_{:05d}", range(400)), numbers("frame_{:05d}", range(450, 500)), True),
        (numbers("{}", range(8)), numbers("{}", range(3)), True),
        (numbers("{}", range(0, 20, 2)), numbers("{}", range(1, 14, 2)), True),  # too few to tell
        (["a", "b"], ["c"], True),
    ],
)
@pytest.mark.parametrize("alike", [False, True])
def test_the_warning_comes_where_names_count_frames_or_pixels_are_alike(
    train, evaluation, silent, alike
):
    """silent: None: names alone cannot tell, so the pixels do."""
    order = {name: i for i, name in enumerate(sorted([*train, *evaluation]))}
    splits = [Split(*each, order, alike) for each in (("train", train), ("val", evaluation))]
    found = leak_warning(*splits)
    assert bool(found) == (not silent if silent is not None else alike)
    read = sum(split.read for split in splits)
    assert (read > 0) == (silent is None)
    if found:
        assert found[0].startswith(f"{len(shared_sequences(train, evaluation))} of ")
        assert "segtrain folds --by sequence" in found[0]


class Split:
    """Images that are single photographs, or, of ten neighbours in `order`, nearly the same."""

    def __init__(self, split, names, order, alike):
        self.split, self.names, self.order, self.alike = split, names, order, alike
        self.read = 0

    def __len__(self):
        return len(self.names)

    def name(self, index):
        return self.names[index]

    def view(self, index):
        self.read += 1
        place = self.order[self.names[index]]
        rng = np.random.default_rng(place // 10 if self.alike else place)
        noise = np.random.default_rng(place).integers(0, 60, (32, 48, 3))
        return (rng.integers(0, 196, (4, 6, 3)).repeat(8, 0).repeat(8, 1) + noise), None


def test_folds_go_by_sequences_where_names_show_several():
    assert show_sequences(CAMVID[0])
    assert show_sequences([*CAMVID[0], *CAMVID[1]])
    assert show_sequences([f"c{clip}/{i:04d}" for clip in range(5) for i in range(20)])
    for names in (VOC, PHOTOS, ["a", "b", "c"], numbers("{}", range(8))):
        assert not show_sequences(names)
