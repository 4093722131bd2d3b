"""Refuses an experiment that cannot fit into memory, before anything is allocated.

Only a lower bound is checked: the images, the scores of every class at their size, and what the
losses keep of these for the backward pass. Features, weights and what a loss needs for a moment
come on top.
"""

import os
from contextlib import suppress
from pathlib import Path

import torch

from segtrain.config import Config
from segtrain.errors import ConfigError

# Bytes a sample of an image as stored, at least, and normalized, in float32.
_STORED, _NORMALIZED = 1, 4
# Bytes a pixel of a label as stored and in int64.
_LABEL = 9
# Bytes a pixel and class: the scores of a head, in float32.
_SCORES = 4
# What every loss keeps of the scores of a head and one set of labels, at least: the probabilities
# or their logarithms, in float32.
_KEPT = 4
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
    needed = training_bytes(config, num_classes, images, device)
    what = f"augment.crop_size: {images} crops"
    repair = "use smaller crops or a smaller train.batch_size"
    return _finding(what, size, needed, device, ranks, repair)


def training_bytes(config: Config, num_classes: int, images: int, device: torch.device) -> int:
    """The least memory that a step takes beside features and weights.

    images: crops that a rank holds at a time.
    """
    train = config.train
    height, width = config.augment.crop_size
    label_sets = 1 if config.augment.mixup_alpha is None else 2
    needed = images * (config.data.channels * (_STORED + _NORMALIZED) + label_sets * _LABEL)
    if train.compile:  # a compiled loss may never store the scores
        return height * width * needed
    heads = 2 if config.model.aux_head else 1
    # On CUDA, virtual ranks keep on the host what waits for the backward pass.
    waits_on_host = device.type == "cuda" and train.virtual_ranks > 1
    kept = _KEPT if waits_on_host else _KEPT * heads * label_sets * len(config.loss.terms)
    return height * width * (needed + images * num_classes * (heads * _SCORES + kept))


def window_finding(
    config: Config, num_classes: int, device: torch.device, ranks: int
) -> str | None:
    """The same of an evaluation's sliding window; None also if it is not used."""
    if config.eval.mode != "slide":
        return None
    size = config.eval.crop_size or config.augment.crop_size
    together = config.eval.batch_size or 1
    needed = (
        together * size[0] * size[1] * (config.data.channels * _NORMALIZED + _SCORES * num_classes)
    )
    what, repair = "eval.crop_size: sliding windows", "use smaller windows"
    if together > 1:
        what, repair = f"eval.batch_size: {together} windows", f"{repair} or batches"
    return _finding(what, size, needed, device, ranks, repair)


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
    bytes_a_rank: int,
    device: torch.device,
    ranks: int,
    repair: str,
) -> str | None:
    needed, there = ranks * bytes_a_rank, memory_bytes(device)
    if needed <= there:
        return None
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    return (
        f"{what} of {size[0]}x{size[1]}{each} take at least {needed / 1e9:,.1f} GB of memory, and "
        f"{device} has {there / 1e9:,.1f} GB; {repair}"
    )
