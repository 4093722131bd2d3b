"""How far the borders of predicted classes lie from those of the label.

Of each class in each image that label and prediction show:

- Hausdorff distance, 95 %: 95 % of the border pixels of one mask lie at most so far from the border
  of the other; the larger one of both directions. In pixels.
- surface Dice: the part of both borders that lies within a tolerance of the other
  (arXiv:1809.04430).

The mean is that of images. Where only one of both shows the class, the surface
Dice is 0 and there is no distance. The boundary IoU (arXiv:2103.16562) is the IoU of pixels near
the border inside of masks, up to 2 % of the diagonal of the image, over all images.

Ignored pixels belong to no class in either, so both have the same border there.
"""

import math
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from scipy import ndimage
from scipy.spatial import cKDTree

from segtrain.data.read.image import shows
from segtrain.distributed import collectives as dist
from segtrain.metrics import mean_of_present, or_none, percent, ratio
from segtrain.task.prediction import Prediction
from segtrain.text import table_lines
from segtrain.types import IGNORE_INDEX

# Of the diagonal of the image, as in arXiv:2103.16562.
_NEAR = 0.02
_KERNEL = np.ones((3, 3), np.uint8)
_TITLES = {
    "num_images": "images",
    "num_one_sided": "one-sided",
    "HD95_px": "HD95 px",
    "surface_dice": "surface Dice",
    "boundary_IoU": "boundary IoU",
}
# Of the label's border, from which on a warning says that it is that of ignored pixels.
_MUCH = 0.01


class SurfaceScores:
    """Measures borders; `add` is a callback of `evaluate_dataset`.

    tolerance_px: of the surface Dice.
    """

    def __init__(self, names: Sequence[str], tolerance_px: float) -> None:
        self._names, self._tolerance = tuple(names), tolerance_px
        # (image, class) -> distance, or NaN, and surface Dice.
        self._found: dict[tuple[int, int], tuple[float, float]] = {}
        # Pixels near borders, in both masks and in any; of the labels' borders, all and at ignored.
        self._near = np.zeros((len(names), 2), np.int64)
        self._edges = np.zeros(2, np.int64)

    def add(self, prediction: Prediction) -> None:
        """Measures one image."""
        unknown = prediction.label == IGNORE_INDEX
        for k in range(len(self._names)):
            ignored = unknown if unknown.ndim == 2 else unknown[..., k]
            # The border of ignored pixels is the same in label and prediction. How much of it there
            # is decides on a warning.
            beside_ignored = cv2.dilate(ignored.astype(np.uint8), _KERNEL)
            label = shows(prediction.label, k).astype(np.uint8)
            pred = (shows(prediction.pred, k) & ~ignored).astype(np.uint8)
            near = [near_border(mask) for mask in (label, pred)]
            self._near[k] += [int((near[0] & near[1]).sum()), int((near[0] | near[1]).sum())]
            edge = label - cv2.erode(label, _KERNEL)
            self._edges += [int(edge.sum()), int((edge & beside_ignored).sum())]
            is_there = label.any(), pred.any()
            if all(is_there):
                self._found[prediction.index, k] = self._measure(label, pred)
            elif any(is_there):
                self._found[prediction.index, k] = math.nan, 0.0

    def sum_over_ranks(self) -> None:
        """Gathers what all ranks have measured (collective; call it once)."""
        rows = [[*key, *pair] for key, pair in self._found.items()]
        parts = dist.all_gather_object([rows, self._near.tolist(), self._edges.tolist()])
        measured, near, edges = zip(*parts, strict=True)
        # Each image is on one rank only, so no key comes twice.
        self._found = {(i, k): (*pair,) for part in measured for i, k, *pair in part}
        self._near, self._edges = (np.sum(counts, axis=0) for counts in (near, edges))

    def lines(self) -> list[str]:
        """A table of the classes, and what to know about it."""
        columns = [["class", *self._names, "mean"]]
        for key, values in self._by_class().items():
            if key.startswith("num_"):
                cells = [*map(str, values), ""]
            else:
                show = "{:.2f}".format if key == "HD95_px" else percent
                shown = (*values, mean_of_present(values))
                cells = ["-" if math.isnan(x) else show(x) for x in shown]
            columns.append([_TITLES[key], *cells])
        lines = [
            f"borders: surface Dice within {self._tolerance:g} px; one-sided: images where only "
            "label or prediction shows the class, with surface Dice 0 and without HD95",
            *table_lines(columns),
        ]
        all_px, at_ignored = self._edges.tolist()
        if at_ignored > _MUCH * all_px:
            what = f"{at_ignored / all_px:.1%} of the borders in labels are those of ignored pixels"
            lines.append(f"warning: {what}, where predictions have the same: scores are too good")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The scores for a JSON file; NaN becomes None."""
        columns = self._by_class()
        scores = {key: x for key, x in columns.items() if not key.startswith("num_")}
        means = {f"mean_{key}": or_none(mean_of_present(x)) for key, x in scores.items()}
        rows = [
            {"name": name} | dict(zip(columns, map(or_none, values), strict=True))
            for name, *values in zip(self._names, *columns.values(), strict=True)
        ]
        return {"tolerance_px": self._tolerance, **means, "classes": rows}

    def _by_class(self) -> dict[str, list[float]]:
        """Images and scores of each class, by their keys in JSON."""
        pairs: list[list[tuple[float, float]]] = [[] for _ in self._names]
        # Sorted: the mean of floats depends on their order, which must not be that of the ranks.
        for (_, k), pair in sorted(self._found.items()):
            pairs[k].append(pair)
        distances, dices = ([[pair[i] for pair in own] for own in pairs] for i in (0, 1))
        return {
            "num_images": list(map(len, pairs)),
            "num_one_sided": [sum(map(math.isnan, own)) for own in distances],
            "HD95_px": list(map(mean_of_present, distances)),
            "surface_dice": list(map(mean_of_present, dices)),
            "boundary_IoU": [ratio(*pixels) for pixels in self._near.tolist()],
        }

    def _measure(self, label: np.ndarray, pred: np.ndarray) -> tuple[float, float]:
        """Distance and surface Dice of two masks that are not empty."""
        borders = _borders(label > 0, pred > 0)
        far = [ndimage.distance_transform_edt(~border) for border in borders]
        distances = far[1][borders[0]], far[0][borders[1]]  # of the pixels of both borders
        near = np.concatenate(distances) <= self._tolerance
        return max(float(np.percentile(x, 95)) for x in distances), float(near.mean())


def hausdorff_95(label: np.ndarray, pred: np.ndarray, spacing: Sequence[float]) -> float:
    """The distance of two masks (bool) that are not empty, in the unit of `spacing`."""
    # Trees of border points: maps of all distances in a body would take gigabytes.
    points = [np.argwhere(border) * spacing for border in _borders(label, pred)]
    trees = [cKDTree(x) for x in points]
    pairs = zip(trees, points[::-1], strict=True)
    return max(float(np.percentile(tree.query(x)[0], 95)) for tree, x in pairs)


def _borders(label: np.ndarray, pred: np.ndarray) -> list[np.ndarray]:
    """The borders of both masks (bool), within the box around both; no border lies beyond it."""
    (box,) = ndimage.find_objects((label | pred).view(np.uint8))
    masks = [mask[box] for mask in (label, pred)]
    return [mask & ~ndimage.binary_erosion(mask) for mask in masks]


def near_border(mask: np.ndarray) -> np.ndarray:
    """The pixels of a mask (H, W) uint8 near its border or that of the image, of the same kind."""
    iterations = max(1, round(_NEAR * math.hypot(*mask.shape)))
    padded = cv2.copyMakeBorder(mask, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    return mask - cv2.erode(padded, _KERNEL, iterations=iterations)[1:-1, 1:-1]
