"""In which images a class is found: recall and false alarms by image, as for parts that are sorted.

An image shows the class if an object of it has `least_px` pixels that touch, also at corners; it is
called so from a threshold on if pixels of at least that probability make such an object.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.metrics import or_none, ratio
from segtrain.one_vs_rest import CURVE_BINS
from segtrain.task.contract import Task
from segtrain.text import printable
from segtrain.types import IGNORE_INDEX

# All right in so many images: the true share may still be 0.85 (the rule of three, at 95 %).
_FEW_IMAGES = 20


class ImageCalls:
    """Seeks the threshold of `recall` for class `k`, `name`; `add` watches an evaluation."""

    def __init__(self, k: int, name: str, recall: float, least_px: int) -> None:
        self._class, self._name, self._recall, self._least_px = k, name, recall, least_px
        # Of each image: whether it shows the class, and the bin of the highest threshold from
        # which it is called so; 0: none.
        self._found: dict[int, tuple[bool, int]] = {}

    def add(self, index: int, probability: Tensor, label: Tensor) -> None:
        """Counts an image, as `CurveCounts.update`, or none if all is ignored; the host waits."""
        own = (label if label.ndim == 2 else label[..., self._class]).cpu().numpy()
        bins = probability[self._class].float().nan_to_num(0).mul(CURVE_BINS).cpu().numpy()
        bins[own == IGNORE_INDEX] = 0

        def is_clean(mask: np.ndarray) -> bool:
            stats = cv2.connectedComponentsWithStats(mask.view(np.uint8), connectivity=8)[2]
            return stats[1:, cv2.CC_STAT_AREA].max(initial=0) < self._least_px

        # The higher the threshold the smaller each object: all up to one threshold find the image.
        top = bisect_left(range(1, CURVE_BINS), True, key=lambda bin: is_clean(bins >= bin))
        if not (own == IGNORE_INDEX).all():
            shows = own == (self._class if label.ndim == 2 else 1)
            self._found[index] = not is_clean(shows), top

    def sum_over_ranks(self) -> None:
        """Gives every rank the images of all ranks (collective; call it once)."""
        parts = dist.all_gather_object(list(self._found.items()))
        self._found = dict(sorted(pair for part in parts for pair in part))

    def answer(self, images: Sequence[str], task: Task) -> tuple[list[str], dict[str, Any]]:
        """The highest threshold with the recall: lines, and JSON; images: the names of all."""
        name = f"{printable(self._name)} by image"
        tops = [top for shows, top in self._found.values() if shows]
        shown, without = len(tops), len(self._found) - len(tops)
        lines = [f"{name}, objects from {self._least_px} px on: {shown} show it, {without} do not"]
        if min(shown, without) < _FEW_IMAGES:
            lines.append(f"warning: {name}: fewer than {_FEW_IMAGES} tell little about a share")
        json = {"class": self._name, "min_area_px": self._least_px, "threshold": None}
        json |= {"images_with": shown, "images_without": without}
        enough = (t for t in {*tops} if sum(top >= t for top in tops) / shown >= self._recall)
        if not (best := max(enough, default=0)):
            return [*lines, f"{name}: no threshold has a recall of {self._recall:.2%}"], json
        calls = {images[i]: (shows, top >= best) for i, (shows, top) in self._found.items()}
        missed = [image for image, call in calls.items() if call == (True, False)]
        alarms = [image for image, call in calls.items() if call == (False, True)]
        found, share = (shown - len(missed)) / shown, ratio(len(alarms), without)
        json |= {"threshold": best / CURVE_BINS, "recall": found, "missed": missed}
        json |= {"false_alarm_share": or_none(share), "false_alarms": alarms}
        wrong = f"false alarms {share:.2%} ({len(alarms)})" if without else "false alarms unknown"
        option = task.option_of(printable(self._name), best / CURVE_BINS)
        line = f"{name}: recall {found:.2%} ({shown - len(missed)}), {wrong} by {option}"
        return [*lines, line], json
