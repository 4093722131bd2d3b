"""The classes of a label's pixels, as the decisions have them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from segtrain.data.read.decode import to_stored
from segtrain.data.read.find import Window
from segtrain.data.read.raster import is_tiff
from segtrain.desk.survey import contents
from segtrain.desk.survey.class_masks import painted
from segtrain.desk.survey.class_table import Classes
from segtrain.desk.survey.contents import packed
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.errors import DataError
from segtrain.types import IGNORE_INDEX


def class_ids_by_window(
    file: Path, labels: LabelSet, classes: Classes
) -> Callable[[Window], np.ndarray]:
    """Reads a part of a label as `class_ids` has it."""
    if is_tiff(file):
        return partial(class_ids, file, labels, classes)
    # Other files cannot be read in part: they are read once, and windows are cut from that.
    whole = class_ids(file, labels, classes)
    return lambda x: whole[x.top : x.top + x.height, x.left : x.left + x.width]


def class_ids(
    file: Path, labels: LabelSet, classes: Classes, window: Window | None = None
) -> np.ndarray:
    """(H, W) uint8: the position of the class of each pixel, 255 where there is none."""
    values = contents.values_of(file, labels.kind, window, labels.threshold)
    ids = {packed(v): i for i, class_info in enumerate(classes.classes) for v in class_info.values}
    ids |= {packed(v): IGNORE_INDEX for v in classes.ignored}
    # A search among the few known values: colours as numbers reach 2 ** 24, too many for a table.
    known = np.array(sorted(ids))
    at = np.searchsorted(known, values).clip(max=len(known) - 1)
    if (known[at] != values).any():
        raise DataError(f"{file}: its values have changed since they were counted")
    return np.array([ids[value] for value in known.tolist()], np.uint8)[at]


def train_ids(
    folder: Path, labels: LabelSet, classes: Classes, image: Image, window: Window | None = None
) -> np.ndarray:
    """(H, W) uint8: as `class_ids`, of the label of an image, whatever its files are.

    folder: of the label files. window: the part to read of a label in one file.
    """
    files = labels.labels[image.path]
    if labels.classes:
        class_files = labels.class_files(folder, image.path)
        numbers, _ = painted(class_files, image.size, labels.void, labels.threshold)
        positions = np.full(len(labels.classes) + 1, IGNORE_INDEX, np.uint8)
        for i, class_info in enumerate(classes.classes):
            positions[[*class_info.values]] = i
        return positions[numbers]
    if not files:  # background alone
        of_zero = (i for i, x in enumerate(classes.classes) if 0 in x.values)
        return np.full(image.size, next(of_zero, IGNORE_INDEX), np.uint8)
    part = None if labels.resized else window
    ids = class_ids(folder / files[0], labels, classes, part)
    ids = to_stored(ids, image.orientation) if labels.upright else ids
    if not labels.resized:
        return ids
    top, left, *size = window or (0, 0, *image.size)
    return contents.nearest_pixels(ids, image.size)[top : top + size[0], left : left + size[1]]
