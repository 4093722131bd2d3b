"""How fast each rank computes: what `train.split: measured` goes by.

Ranks wait for each other in every batch norm, so the time of a step tells nothing about one of
them. For a measurement each computes its part of a microbatch alone, without any sum over ranks.
All do so at the same time, because ranks on one machine slow each other down.
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
from segtrain.training.local import LocalMicrobatch, local_microbatches
from segtrain.training.measure import synchronize
from segtrain.training.state import TrainState
from segtrain.training.step import compute_alone
from segtrain.types import Batch

# The least number of passes that are timed, and the least seconds that they take together.
_LEAST_PASSES, _LEAST_S = 3, 0.5
# The fraction of the free memory to count on: the allocator cannot use all of it.
_USABLE = 0.9


class Speed(NamedTuple):
    """How fast one rank computes units: images, or shares with train.shares.

    at_once: how many units it computes at the same time, in `seconds`.
    most: so many fit into its GPU's memory; None: not known.

    Four units at a time in 2 seconds: five units take two rounds.

    >>> Speed(at_once=4, seconds=2.0).time(5)
    4.0
    """

    at_once: int
    seconds: float
    most: int | None = None

    def time(self, units: int) -> float:
        """The seconds that this rank takes for so many."""
        return _rounds(units, self.at_once) * self.seconds


def _rounds(units: int, at_once: int) -> int:
    """How many rounds `units` take, with `at_once` of them in each: rounded up."""
    return -(-units // at_once)


def step_time(counts: Split, speeds: list[Speed]) -> float:
    """The seconds of a microbatch that is split so: those of the slowest rank."""
    return max(speed.time(units) for units, speed in zip(counts, speeds, strict=True))


def fastest_split(total: int, speeds: list[Speed], *, least: int) -> Split:
    """The units of each rank, at least `least`, with which the slowest is done soonest.

    Each unit goes to the rank that is done first with one more. Ranks whose memory is full get
    none, unless it is full everywhere.

    Rank 1 takes twice as long for a unit as rank 0; then rank 0 has memory for five only:

    >>> fastest_split(9, [Speed(1, 1.0), Speed(1, 2.0)], least=0)
    (6, 3)
    >>> fastest_split(9, [Speed(1, 1.0, most=5), Speed(1, 2.0)], least=0)
    (5, 4)
    """
    counts = [least] * len(speeds)
    for _ in range(total - sum(counts)):
        fits = [i for i, one in enumerate(speeds) if one.most is None or counts[i] < one.most]
        after = {i: speeds[i].time(counts[i] + 1) for i in fits or range(len(speeds))}
        first_done = min(after, key=after.__getitem__)
        counts[first_done] += 1
    return tuple(counts)


def measure_speed(
    state: TrainState, config: Config, form: ImageForm, num_classes: int, device: torch.device
) -> Speed:
    """The speed of this rank, with random images; the state stays as it is (collective).

    Let all ranks measure at the same time.
    """
    sizes = _sizes_alone(state, config)
    num_images = sum(sizes)
    batch = _random_batch(config, num_images, form, num_classes)
    # For the dropout masks. There may be more images than positions, as sizes are rounded up.
    positions = [i % config.train.batch_size for i in range(num_images)]
    (part,) = local_microbatches(state, [batch], config, device, [positions])
    if state.shares is None:
        units, at_once = num_images, 1
    else:
        units, at_once = len(sizes), state.shares.at_once

    is_cuda = device.type == "cuda"
    if is_cuda:
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    seconds = _seconds_alone(state, part, sizes, device)
    most = _most_units(units, device, before=before) if is_cuda else None
    return Speed(at_once, seconds / _rounds(units, at_once), most)


def _sizes_alone(state: TrainState, config: Config) -> list[int]:
    """The images in each part that this rank computes apart, as it can compute them alone.

    At least one, for a rank that has none now; and whole groups, where groups of images share
    statistics: 3 and 0 images become 4 and 2 with groups of 2.
    """
    together = 1 if config.norm.images == "all" else config.norm.images
    sizes = state.layout.sizes(0, dist.rank())
    return [-(-max(size, 1) // together) * together for size in sizes]


def _seconds_alone(
    state: TrainState, part: LocalMicrobatch, sizes: list[int], device: torch.device
) -> float:
    """The median seconds of a forward and backward pass of `part` (collective)."""
    measured: list[float] = []  # the first pass, then those that count
    dist.barrier()
    while len(measured) <= _LEAST_PASSES or sum(measured[1:]) < _LEAST_S:
        began = time.perf_counter()
        compute_alone(state, part, sizes)
        dist.wait_for_device(device)  # nothing on one rank
        synchronize(device)
        measured.append(time.perf_counter() - began)
    # The first pass chooses kernels and gets memory.
    return median(measured[1:])


def _most_units(units: int, device: torch.device, *, before: int) -> int:
    """How many units fit into the memory of a GPU, on which the passes of `units` have just run.

    before: the bytes that were allocated before these passes.
    """
    needed = torch.cuda.max_memory_allocated(device) - before
    # What is free on the GPU, and what torch holds there beyond the bytes from before.
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - before
    return int(_USABLE * units * free / max(needed, 1))


def _random_batch(config: Config, images: int, form: ImageForm, num_classes: int) -> Batch:
    """A batch of random images (N, C, H, W) and labels of the size of crops."""
    rng = np.random.default_rng(0)
    height, width = config.augment.crop_size
    pixels = rng.integers(256, size=(images, height, width, form.channels)).astype(form.dtype)
    size, values = (images, height, width), num_classes
    if config.is_multilabel:
        size, values = (*size, num_classes), 2
    labels = torch.from_numpy(rng.integers(values, size=size, dtype="u1"))
    partners = None if config.augment.mixup_alpha is None else labels
    return Batch(torch.from_numpy(pixels).permute(0, 3, 1, 2), labels, [], partners)
