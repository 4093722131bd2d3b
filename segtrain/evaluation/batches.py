"""How many views or windows go through the network together.

A device that computes small views one by one is idle between them. On a CPU batches help small
windows only: PSPNet on ResNet-18 takes 0.6 of the time for windows of 64x96 in fours, 0.95 for
257x257, and 1.1 for whole images of 512x1024.
"""

import math
from typing import NamedTuple

import torch

from segtrain.evaluation.settings import InferenceSettings, Size
from segtrain.models.memory import memory_bytes

# More hardly help, and each image of a batch is decoded and kept.
_MOST_VIEWS = 8

# Of one image on a CPU, where neighbouring images share no batch.
_MOST_VIEWS_CPU, _MOST_PIXELS_CPU = 4, 300_000

# What one batch may take of the device's memory; weights and other programs need some too.
_MEMORY_PART = 1 / 4

# Bytes a pixel of a view: features in float32 (the recipes' models take up to 970 with 19 classes,
# which `tests/test_batches.py` counts; kernels take more for themselves); and for each class the
# logits, their probabilities, the same at the size of the label, and their sum over views.
_FEATURES, _CLASS = 1536, 16


class BatchLimits(NamedTuple):
    """The sizes of batches.

    num_images: neighbouring images whose views may share a batch.
    num_views: the most views or windows in a batch. num_pixels: the most of all of them together.
    """

    num_images: int
    num_views: int
    num_pixels: float = math.inf

    def of(self, size: Size) -> int:
        """The most views of `size`, (height, width), in a batch; one always goes."""
        return int(max(1, min(self.num_views, self.num_pixels // math.prod(size))))


def batch_limits(
    settings: InferenceSettings, device: torch.device, num_classes: int
) -> BatchLimits:
    """Those that `settings` ask for, or else what suits `device` and its memory."""
    if settings.batch_size is not None:
        return BatchLimits(settings.batch_size, settings.batch_size)
    if device.type == "cpu":
        return BatchLimits(1, _MOST_VIEWS_CPU, _MOST_PIXELS_CPU)
    bytes_a_pixel = _FEATURES + _CLASS * num_classes
    num_pixels = _MEMORY_PART * memory_bytes(device) // bytes_a_pixel
    return BatchLimits(_MOST_VIEWS, _MOST_VIEWS, num_pixels)
