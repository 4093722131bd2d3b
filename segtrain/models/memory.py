"""Refuses an experiment that cannot fit into memory, before anything is allocated.

Only a lower bound is checked: the images, the scores of every class at their size, and what the
losses keep of these for the backward pass. Features and weights come on top.
"""

import os
from contextlib import suppress
from pathlib import Path

import torch

from segtrain.config import Config, LossConfig, LossTerm
from segtrain.errors import ConfigError

# Bytes a pixel: the image as stored and normalized, in float32; a label as stored and in int64.
_STORED, _NORMALIZED, _LABEL = 3, 12, 9
# Bytes a pixel and class: the scores of a head, in float32.
_SCORES = 4
# Bytes a pixel and class that a loss keeps of the scores of a head and one set of labels: in
# float32 the probabilities or their logarithms, for Lovasz also the growths and for boundary
# relaxation the masked logarithms, and as bool which class is true or near.
_KEPT = {
    "cross_entropy": 4,
    "ohem": 4,
    "focal": 4,
    "dice": 5,
    "boundary_relaxation": 9,
    "lovasz": 9,
}
# Bytes for each number that Lovasz sorts, in `_growth`: the order and a dividend in int64, the
# union and three terms of it in float64, two sums in int32, two bools.
_SORTED = 2 * 8 + 4 * 8 + 2 * 4 + 2
# The same over all ranks: in float32 what they sent, with and without its sign, and two bools.
_SORTED_OF_ALL = _SORTED + 2 * 4 + 2
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
    train, terms = config.train, config.loss.terms
    height, width = config.augment.crop_size
    label_sets = 1 if config.augment.mixup_alpha is None else 2
    needed = images * (_STORED + _NORMALIZED + label_sets * _LABEL)
    if train.compile:  # a compiled loss may never store the scores
        return height * width * needed
    heads = 2 if config.model.aux_head else 1
    kept = [_KEPT.get(term.kind, 0) for term in terms]
    # On CUDA, virtual ranks keep on the host what waits for the backward pass.
    waits_on_host = device.type == "cuda" and train.virtual_ranks > 1
    # The last head and label set: the losses before, the loss itself, and what it needs to sort.
    last = max(
        images * num_classes * sum(kept[i if waits_on_host else 0 : i + 1])
        + _bytes_to_sort(term, num_classes, train.batch_size // train.accumulate_steps)
        for i, term in enumerate(terms)
    )
    others = 0 if waits_on_host else (heads * label_sets - 1) * sum(kept)
    needed += images * num_classes * (heads * _SCORES + others) + last
    return height * width * needed


def _bytes_to_sort(term: LossConfig | LossTerm, num_classes: int, images_of_pass: int) -> int:
    """Bytes for each pixel of a crop while a loss sorts: one image, or one class of all ranks."""
    if term.kind != "lovasz":
        return 0
    if term.lovasz_per_image:
        return num_classes * (_SORTED - 4)  # the growths of this image are not there yet
    return images_of_pass * _SORTED_OF_ALL


def window_finding(
    config: Config, num_classes: int, device: torch.device, ranks: int
) -> str | None:
    """The same of an evaluation's sliding window; None also if it is not used."""
    if config.eval.mode != "slide":
        return None
    size = config.eval.crop_size or config.augment.crop_size
    together = config.eval.batch_size or 1
    needed = together * size[0] * size[1] * (_NORMALIZED + _SCORES * num_classes)
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
