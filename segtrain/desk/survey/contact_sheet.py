"""The contact sheet: what training will see of ten images."""

import cv2
import numpy as np

from segtrain.data.read.dataset import SegDataset
from segtrain.desk.survey.contents import spread, word
from segtrain.desk.survey.decisions import Decisions
from segtrain.run.pictures import as_rgb, legend, overlay
from segtrain.text import MAX_NAME, first_of, printable

_SIDE_PX, _SHOWN = 256, 10


def contact_sheet(plan: Decisions, training: SegDataset) -> np.ndarray:
    """Images above the same under their labels, and the legend; (H, W, 3) uint8.

    training: the data set of the images to train on.
    """
    palette = training.classes.palette
    columns = []
    for i in _shown(plan, training):
        image, label = training[i]
        pixels = as_rgb(image, training.form.value_range)
        columns.append(np.vstack([cell(pixels), cell(overlay(pixels, label, palette, 0.6))]))
    row = np.hstack(columns)
    classes = plan.classes.classes
    names = [printable(class_info.name, MAX_NAME) for class_info in classes]
    if not (plan.labels.classes or plan.labels.kind == "annotations"):
        values = [first_of(map(word, class_info.values), 1) for class_info in classes]
        names = [f"{name} ({value})" for name, value in zip(names, values, strict=True)]
    return np.vstack([row, legend(names, palette, row.shape[1])])


def cell(picture: np.ndarray) -> np.ndarray:
    """The picture on a white square."""
    scale = _SIDE_PX / max(picture.shape[:2])
    size = [max(1, round(side * scale)) for side in picture.shape[1::-1]]
    kind = cv2.INTER_AREA if scale < 1 else cv2.INTER_NEAREST
    square = np.full((_SIDE_PX + 4, _SIDE_PX + 4, 3), 255, np.uint8)
    square[: size[1], : size[0]] = cv2.resize(picture, size, interpolation=kind)
    return square


def _shown(plan: Decisions, training: SegDataset) -> list[int]:
    """Positions in `training`, evenly spread; one at least shows the rarest class."""
    shown = spread(range(len(training)), _SHOWN)
    values, labels = plan.labels.values, plan.labels.labels
    shown_in = {value for value, facts in values.items() if facts.example}
    rare = [x for x in plan.classes.classes if x.pixels and x.values[0] in shown_in]
    if not rare:
        return shown
    example = values[min(rare, key=lambda class_info: class_info.pixels).values[0]].example
    owner = next(path for path, files in labels.items() if example in files)
    image = plan.survey.root.resolve() / owner
    at = next((i for i, pair in enumerate(training.pairs) if pair.image == image), None)
    # It takes the place of the last one.
    return shown if at in (None, *shown) else [at, *shown[:-1]]
