"""Refuses an experiment that cannot fit into memory, before anything is allocated.

Only a lower bound is checked: the images, and the scores of every class at their size.
"""

import os
from contextlib import suppress
from pathlib import Path

import torch

from segtrain.config import Config
from segtrain.errors import ConfigError

# Bytes a pixel: image and label, one byte a channel; and the normalized image in float32.
_STORED, _NORMALIZED = 4, 12
# The limit of a container, which may be less than the memory of the machine.
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes(device: torch.device) -> int:
    """The memory of `device`; for a CPU what the machine has or the container may use of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limits.append(int(_CGROUP_LIMIT.read_text()))
    return min(limits)


def training_finding(
    config: Config, num_classes: int, images: int, device: torch.device, ranks: int
) -> str | None:
    """Why training crops cannot fit into the memory of `device`; None: they may.

    images: the most that a rank holds at a time.
    ranks: how many share the device's memory.
    """
    size = config.augment.crop_size
    # A compiled loss may never store the scores.
    scores = 0 if config.train.compile else 4 * num_classes
    what = f"augment.crop_size: {images} crops"
    repair = "use smaller crops or a smaller train.batch_size"
    return _finding(what, size, images * (_STORED + _NORMALIZED + scores), device, ranks, repair)


def window_finding(
    config: Config, num_classes: int, device: torch.device, ranks: int
) -> str | None:
    """The same of an evaluation's sliding window; None also if it is not used."""
    if config.eval.mode != "slide":
        return None
    size = config.eval.crop_size or config.augment.crop_size
    what, bytes_a_pixel = "eval.crop_size: sliding windows", _NORMALIZED + 4 * num_classes
    return _finding(what, size, bytes_a_pixel, device, ranks, "use smaller windows")


def check_windows(config: Config, num_classes: int, device: torch.device, ranks: int = 1) -> None:
    """Raises ConfigError with what `window_finding` finds, for the ranks of this machine."""
    sharing = ranks if device.type == "cpu" else 1
    if finding := window_finding(config, num_classes, device, sharing):
        raise ConfigError(finding)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that an allocation failed; torch has no class for that on a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _finding(
    what: str,
    size: tuple[int, int],
    bytes_a_pixel: int,
    device: torch.device,
    ranks: int,
    repair: str,
) -> str | None:
    needed, there = ranks * size[0] * size[1] * bytes_a_pixel, memory_bytes(device)
    if needed <= there:
        return None
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    return (
        f"{what} of {size[0]}x{size[1]}{each} take at least {needed / 1e9:,.1f} GB of memory, and "
        f"{device} has {there / 1e9:,.1f} GB; {repair}"
    )
