"""Lines and pictures about a run, for its log."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from segtrain.data.classes import ClassFile
from segtrain.run.pictures import legend, overlay
from segtrain.types import Batch

_GAP_PX = 4


def score_line(best: dict[str, Any] | None) -> str:
    """`best mIoU 0.7123 at step 4000`."""
    if best is None:
        return "not evaluated yet"
    return f"best mIoU {best['mean_iou']:.4f} at step {best['step']}"


def progress_words(values: Mapping[str, float], best: dict[str, Any] | None) -> list[str]:
    """What stands behind the progress bar of a training, the most important first.

    values: by tag, as StepMeter reads them.
    """
    digits, exponent = f"{values['train/lr']:.1e}".split("e")
    return [
        f"loss {values['train/loss']:.4f}",
        *([] if best is None else [f"best mIoU {best['mean_iou']:.3f}"]),
        f"lr {digits}e{int(exponent)}",
        f"{values['images_per_s']:.1f} img/s",
    ]


def training_picture(batch: Batch, classes: ClassFile, num_images: int) -> np.ndarray:
    """The first crops of a batch over their labels, with the legend: (H, W, 3) uint8 RGB."""
    columns = []
    for image, label in zip(batch.images[:num_images], batch.labels[:num_images], strict=True):
        pixels = image.permute(1, 2, 0).numpy()
        covered = overlay(pixels, label.numpy(), classes.palette, alpha=0.6)
        columns.append(np.pad(np.vstack([pixels, covered]), ((0, _GAP_PX), (0, _GAP_PX), (0, 0))))
    row = np.hstack(columns)
    return np.vstack([row, legend(classes.names, classes.palette, row.shape[1])])
