"""Semantic segmentation training whose result does not depend on the number of devices."""

import importlib
import os
from typing import Any

__version__ = "0.3.0"

# Both are read by the libraries at import time, so they are set before anything can import them:
# albumentations would otherwise ask the network for a newer version of itself, and OpenCV would
# decode an image of a billion pixels.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(200_000_000))


def __getattr__(name: str) -> Any:
    """`Predictor` and `train` of `segtrain.api`, which imports torch, at their first use."""
    if name in ("Predictor", "train"):
        return getattr(importlib.import_module("segtrain.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
