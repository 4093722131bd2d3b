"""The values of what is labelled, where they are few of those that deep grey images hold.

A lesion takes 85 of the 4,000 values of a CT, and a cell few of 16 bits beside a hot pixel. nnU-Net
clips CT to the percentiles 0.5 and 99.5 of the foreground (arXiv:1904.08128, Methods).
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from segtrain.desk.survey.class_ids import train_ids
from segtrain.desk.survey.class_table import Classes
from segtrain.desk.survey.contents import spread
from segtrain.desk.survey.image_facts import ImageFacts, middle_window, read_bands
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.survey import Survey
from segtrain.types import IGNORE_INDEX

_PERCENTILES = 0.5, 99.5
# Of the span of all values: a wider foreground shows on their scale, too.
_NARROW = 0.25
_SAMPLE, _LEAST_PX, _MOST_PX = 64, 50, 200_000


class Foreground(NamedTuple):
    """value_range: of the labelled values. facts: of the images, clipped to it."""

    value_range: tuple[float, float]
    facts: tuple[ImageFacts, ...]


def narrow_foreground(
    survey: Survey, labels: LabelSet, classes: Classes, images: Sequence[Image], drawn: Path
) -> Foreground | None:
    """The range of the labelled values; None: of 8 bits, of several channels, or not narrow.

    images: to train on. drawn: the folder of labels that were drawn from annotations.
    """
    if any(image.channels != 1 or image.dtype == "uint8" for image in images):
        return None
    if labels.kind == "annotations" and labels.overlapping:
        return None
    pixels, shown = [], defaultdict(list)
    by_path = {image.path: image for image in images}  # windows share a file
    for image in spread(list(by_path.values()), _SAMPLE):
        values = read_bands([survey.root / file for file in image.files])[..., 0]
        found = _foreground(survey.root, image, labels, classes, drawn)
        if found.shape == values.shape:
            # Percentiles need no more pixels than this.
            step = max(1, values.size // _MOST_PX)
            is_valid = ~np.isnan(values.ravel()[::step])
            pixels.append(values.ravel()[::step][is_valid].astype(np.float64))
            numbers = found.ravel()[::step][is_valid]
            for number in np.unique(numbers[numbers != IGNORE_INDEX]).tolist():
                shown[number].append(pixels[-1][numbers == number])
    # Each class for itself: a rare one beyond the values of all would be clipped to nothing.
    labelled = [np.concatenate(found) for found in shown.values()]
    if sum(map(len, labelled)) < _LEAST_PX:
        return None
    ends = np.array([np.percentile(values, _PERCENTILES) for values in labelled])
    low, high = float(f"{ends[:, 0].min():.6g}"), float(f"{ends[:, 1].max():.6g}")
    if not 0 < high - low < _NARROW * np.ptp(np.concatenate(pixels)):
        return None
    clipped = [of_image.clip(low, high) for of_image in pixels if of_image.size]
    facts = [ImageFacts((low,), (high,), (x.mean(),), (x.std(),), False) for x in clipped]
    return Foreground((low, high), tuple(facts))


def _foreground(
    root: Path, image: Image, labels: LabelSet, classes: Classes, drawn: Path
) -> np.ndarray:
    """(H, W): the position of the class, IGNORE_INDEX of none and of the background.

    Of a raster in its middle window.
    """
    folder = drawn if labels.kind == "annotations" else root
    ids = train_ids(folder, labels, classes, image, middle_window(root / image.path))
    names = [class_info.name.casefold().strip("_") for class_info in classes.classes]
    beside = [i for i, x in enumerate(classes.classes) if 0 in x.values or names[i] == "background"]
    return np.where(np.isin(ids, beside), IGNORE_INDEX, ids)
