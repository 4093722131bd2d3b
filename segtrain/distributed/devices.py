"""NVIDIA devices that torch cannot use; needs no library but torch."""

import os
from pathlib import Path

_FIRST_DEVICE = Path("/dev/nvidia0")


def unusable_devices() -> list[str]:
    """A line if this machine has an NVIDIA device that torch cannot use."""
    import torch

    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda is None or is_hidden or not _FIRST_DEVICE.exists():
        return []
    if torch.cuda.is_available():
        return []
    return [
        f"{_FIRST_DEVICE} exists, but torch {torch.__version__} finds no CUDA device: the driver "
        f"may be too old for CUDA {torch.version.cuda} (see nvidia-smi), or this user may not use "
        "the device"
    ]
