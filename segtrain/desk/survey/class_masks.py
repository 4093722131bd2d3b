"""Masks in a file for each class, or for each object: what they make together."""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from segtrain.data.read.thumbnails import LOSSY
from segtrain.desk.survey.contents import label_values, nearest_pixels, read_label, single_channel
from segtrain.types import IGNORE_INDEX


def shows_object(path: Path, threshold: float | None = None) -> np.ndarray:
    """(H, W) bool: where a file of two values, or with a threshold, shows what it stands for."""
    stored = read_label(path)
    if path.suffix.lower() in LOSSY or threshold is not None:
        return label_values(stored, "two", threshold) > 0
    channel = single_channel(stored)
    return stored[..., :3].any(axis=2) if channel is None else channel > 0


def painted(
    files: Sequence[tuple[Path, int]],
    size: tuple[int, int],
    void: Collection[int],
    threshold: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The class of each pixel, and which pixels several classes claim, (H, W) int32 and bool.

    Smaller areas lie on larger ones, as a lesion on its liver; 0 is where no file shows anything.
    Files of another size, which only `--resize labels` allows, become `size`.

    files: of two values each, and the number of its class. void: numbers that mean no class, and
        lie on all. threshold: as of `label_facts`.
    """
    shown = [(nearest_pixels(shows_object(path, threshold), size), k) for path, k in files]
    label, claimed = np.zeros(size, np.int32), np.zeros(size, bool)
    # Larger areas first, so that smaller ones lie on them; what means no class comes last.
    for where, number in sorted(shown, key=lambda x: (x[1] in void, -np.count_nonzero(x[0]))):
        if number not in void:
            claimed |= where & (label != 0) & (label != number)
        label[where] = number
    return label, claimed


def presence(
    files: Sequence[tuple[Path, int]],
    size: tuple[int, int],
    num_classes: int,
    void: Collection[int],
    threshold: float | None = None,
) -> np.ndarray:
    """Where each class is, of classes that may overlap: (H, W, K) uint8 of 0, 1 and 255.

    files, void, threshold: as of `painted`; what is void is 255 for all classes.
    """
    bands = np.zeros((*size, num_classes), np.uint8)
    for path, number in sorted(files, key=lambda x: x[1] in void):
        shown = nearest_pixels(shows_object(path, threshold), size)
        if number in void:
            bands[shown] = IGNORE_INDEX
        else:
            bands[..., number - 1][shown] = 1
    return bands
