"""How fast each rank computes: what `train.split: measured` goes by.

Ranks wait for each other in every batch norm, so the time of a step tells nothing about one of
them. Each computes its part of a microbatch alone instead, all at the same time: ranks may have one
machine in common.
"""

import time
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from segtrain.config import Config
from segtrain.data.read.image import ImageForm
from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import Split
from segtrain.training.local import local_microbatches
from segtrain.training.measure import synchronize
from segtrain.training.state import TrainState
from segtrain.training.step import compute_alone
from segtrain.types import Batch

# The first pass chooses kernels and gets memory; of the others there are at least so many.
_REPEATS, _LEAST_S = 3, 0.5
# Of what is free: the allocator cannot use all of it.
_USABLE = 0.9


class Speed(NamedTuple):
    """Of one rank, in units: images, or with train.shares shares.

    at_once: how many units it computes at the same time, in `seconds`.
    most: so many fit into its GPU's memory; None: not known.
    """

    at_once: int
    seconds: float
    most: int | None = None

    def time(self, units: int) -> float:
        """The seconds that this rank takes for so many."""
        return -(-units // self.at_once) * self.seconds


def step_time(counts: Split, speeds: list[Speed]) -> float:
    """The seconds of a microbatch of which each rank has so many units."""
    return max(speed.time(units) for units, speed in zip(counts, speeds, strict=True))


def fastest_split(total: int, speeds: list[Speed], *, least: int) -> Split:
    """The units of each rank, at least `least`, with which the slowest is done first."""
    counts = [least] * len(speeds)
    for _ in range(total - sum(counts)):
        fits = [i for i, one in enumerate(speeds) if one.most is None or counts[i] < one.most]
        after = {i: speeds[i].time(counts[i] + 1) for i in fits or range(len(speeds))}
        counts[min(after, key=after.__getitem__)] += 1
    return tuple(counts)


def measure_speed(
    state: TrainState, config: Config, form: ImageForm, num_classes: int, device: torch.device
) -> Speed:
    """That of this rank, with random images; the state stays as it is.

    Let all ranks measure at the same time.
    """
    together = 1 if config.norm.images == "all" else config.norm.images
    sizes = [-(-max(size, 1) // together) * together for size in state.layout.sizes(0, dist.rank())]
    batch = _random_batch(config, sum(sizes), form, num_classes)
    positions = [i % config.train.batch_size for i in range(sum(sizes))]
    (part,) = local_microbatches(state, [batch], config, device, [positions])
    is_cuda, base = device.type == "cuda", 0
    if is_cuda:
        base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    measured = []
    dist.barrier()
    while len(measured) <= _REPEATS or sum(measured[1:]) < _LEAST_S:
        began = time.perf_counter()
        compute_alone(state, part, sizes)
        dist.wait_for_device(device)  # nothing on one rank
        synchronize(device)
        measured.append(time.perf_counter() - began)
    seconds = median(measured[1:])
    units, at_once = sum(sizes), 1
    if state.shares is not None:
        units, at_once = len(sizes), state.shares.at_once
    most = None
    if is_cuda:
        needed = torch.cuda.max_memory_allocated(device) - base
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - base
        most = int(_USABLE * units * free / max(needed, 1))
    return Speed(at_once, seconds / -(-units // at_once), most)


def _random_batch(config: Config, images: int, form: ImageForm, num_classes: int) -> Batch:
    rng = np.random.default_rng(0)
    height, width = config.augment.crop_size
    pixels = rng.integers(256, size=(images, height, width, form.channels)).astype(form.dtype)
    labels = torch.from_numpy(rng.integers(num_classes, size=(images, height, width), dtype="u1"))
    partners = None if config.augment.mixup_alpha is None else labels
    return Batch(torch.from_numpy(pixels).permute(0, 3, 1, 2), labels, [], partners)
