"""How far the borders of predicted classes lie from those of the label.

Of each class in each image that label and prediction show:

- Hausdorff distance, 95 %: 95 % of the border pixels of one mask lie at most so far from the border
  of the other; the larger one of both directions. In pixels.
- surface Dice: the part of both borders that lies within a tolerance of the other
  (arXiv:1809.04430).

MONAI computes both; the mean is that of images. Where only one of both shows the class, the surface
Dice is 0 and there is no distance. The boundary IoU (arXiv:2103.16562) is the IoU of pixels near
the border inside of masks, up to 2 % of the diagonal of the image, over all images.

Ignored pixels belong to no class in either, so both have the same border there.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch

from segtrain.data.read.image import shows
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.evaluation.scoring import Prediction
from segtrain.metrics import mean_of_present, or_none, percent, ratio
from segtrain.text import table_lines
from segtrain.types import IGNORE_INDEX

# Of the diagonal of the image, as in arXiv:2103.16562.
_NEAR = 0.02
_KERNEL = np.ones((3, 3), np.uint8)
# Of the label's border, from which on a warning says that it is that of ignored pixels.
_MUCH = 0.01


class SurfaceScores:
    """Measures borders; `add` is a callback of `evaluate_dataset`.

    tolerance_px: of the surface Dice.

    Raises:
        ConfigError: MONAI is not installed.
    """

    def __init__(self, names: Sequence[str], tolerance_px: float) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from monai.metrics import compute_hausdorff_distance, compute_surface_dice
        except ImportError:
            raise ConfigError(
                "--surface: borders are measured by MONAI, which is not installed; in the checkout "
                "of segtrain: pip install '.[surface]'"
            ) from None
        self._names, self._tolerance = tuple(names), tolerance_px
        self._distance, self._dice = compute_hausdorff_distance, compute_surface_dice
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
        self._found = {(i, k): (*pair,) for part in measured for i, k, *pair in part}
        self._near, self._edges = (np.sum(one, axis=0) for one in (near, edges))

    def lines(self) -> list[str]:
        """A table of the classes."""
        rows = self._rows()
        means = {"name": "mean", "num_images": "", "num_one_sided": ""} | self._means(rows)
        columns = [["class", *(row["name"] for row in [*rows, means])]]
        for title, key in (("images", "num_images"), ("one-sided", "num_one_sided")):
            columns.append([title, *(str(row[key]) for row in [*rows, means])])
        for title, key in (
            ("HD95 px", "HD95_px"),
            ("surface Dice", "surface_dice"),
            ("boundary IoU", "boundary_IoU"),
        ):
            show = _pixels if key == "HD95_px" else percent
            columns.append([title, *(show(row[key]) for row in [*rows, means])])
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
        rows = self._rows()

        def clean(row: dict[str, Any]) -> dict[str, Any]:
            return {k: or_none(x) if isinstance(x, float) else x for k, x in row.items()}

        means = clean({f"mean_{key}": value for key, value in self._means(rows).items()})
        return {"tolerance_px": self._tolerance, **means, "classes": list(map(clean, rows))}

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for k, name in enumerate(self._names):
            pairs = [pair for (_, own), pair in sorted(self._found.items()) if own == k]
            distances, dices = ([pair[i] for pair in pairs] for i in (0, 1))
            one_sided = sum(map(math.isnan, distances))
            both, either = self._near[k].tolist()
            rows.append(
                {
                    "name": name,
                    "num_images": len(pairs),
                    "num_one_sided": one_sided,
                    "HD95_px": mean_of_present(distances),
                    "surface_dice": mean_of_present(dices),
                    "boundary_IoU": ratio(both, either),
                }
            )
        return rows

    def _means(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        keys = "HD95_px", "surface_dice", "boundary_IoU"
        return {key: mean_of_present([row[key] for row in rows]) for key in keys}

    def _measure(self, label: np.ndarray, pred: np.ndarray) -> tuple[float, float]:
        """Distance and surface Dice of two masks that are not empty."""
        x, y, width, height = cv2.boundingRect(label | pred)
        masks = (mask[y : y + height, x : x + width] for mask in (pred, label))
        pair = [torch.from_numpy(np.pad(mask, 1))[None, None] for mask in masks]
        with warnings.catch_warnings():  # of MONAI's own arguments
            warnings.simplefilter("ignore", FutureWarning)
            distance = self._distance(*pair, include_background=True, percentile=95)
            dice = self._dice(*pair, [self._tolerance], include_background=True)
        return float(distance), float(dice)


def near_border(mask: np.ndarray) -> np.ndarray:
    """The pixels of a mask (H, W) uint8 near its border or that of the image, of the same kind."""
    iterations = max(1, round(_NEAR * math.hypot(*mask.shape)))
    padded = cv2.copyMakeBorder(mask, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    return mask - cv2.erode(padded, _KERNEL, iterations=iterations)[1:-1, 1:-1]


def _pixels(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
