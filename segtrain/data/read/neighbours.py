"""Slices before and after a slice, as further bands of it (2.5D).

A slice itself comes first, then those before and after it, the nearest first. At the ends of a
volume the slice itself takes the place of what is missing.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from segtrain.data.read.find import Pair
from segtrain.errors import DataError
from segtrain.text import printable

_NUMBER = re.compile(r"\d+$")


def steps_to_neighbours(number: int) -> list[int]:
    """How far away the slices are that follow a slice as its bands, `number` on each side.

    >>> steps_to_neighbours(2)
    [-1, 1, -2, 2]
    """
    return [step for i in range(1, number + 1) for step in (-i, i)]


def with_neighbours(pixels: np.ndarray, i: int, number: int) -> np.ndarray:
    """Slice `i` of (N, H, W, C) and `number` on each side, as bands: (H, W, C (2 number + 1))."""
    places = (i + step for step in (0, *steps_to_neighbours(number)))
    return np.concatenate([pixels[x if 0 <= x < len(pixels) else i] for x in places], axis=2)


def with_neighbour_files(pairs: Sequence[Pair], number: int) -> list[Pair]:
    """`pairs` with the files of slices before and after each as bands, by the number in its name.

    DataError: no image has a neighbour, or one is a window or has bands in other files.
    """

    @cache
    def names_in(folder: Path) -> set[str]:
        return {path.name for path in folder.iterdir()}

    with_bands, num_there = [], 0
    for pair in pairs:
        if pair.window is not None or pair.bands:
            what = "data.neighbours: expected whole images in one file each"
            raise DataError(f"{printable(pair.image)}: {what}")
        stem, bands = pair.image.stem, []
        last = _NUMBER.search(stem)
        for step in steps_to_neighbours(number):
            other = -1 if last is None else int(last[0]) + step
            name = stem if other < 0 else f"{stem[: last.start()]}{other:0{len(last[0])}d}"
            there = other >= 0 and f"{name}{pair.image.suffix}" in names_in(pair.image.parent)
            # Beyond the ends the slice itself stands in, so that all images have equally many
            # channels.
            bands.append(pair.image.with_stem(name) if there else pair.image)
            num_there += there
        with_bands.append(pair._replace(bands=tuple(bands)))
    if pairs and not num_there:
        what = "no image has a neighbour, as z0006 and z0007 are"
        raise DataError(f"data.neighbours: {what}: {printable(pairs[0].image)}")
    return with_bands
