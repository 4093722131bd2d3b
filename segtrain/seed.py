"""Random streams that know only (seed, step, position in the batch), never rank, worker or process.

So a run on other devices, or resumed in the middle, draws the same numbers.
"""

import random

import numpy as np
import torch
from torch import Tensor

# One number per use keeps two streams with the same key apart. Never reuse or renumber: a resumed
# run must meet the streams it was started with.
_ORDER, _AUGMENT, _DROPOUT = 1, 2, 3
_CLASS_UNIFORM, _CENTROIDS, _PARTNER = 10, 11, 12
_POPULATION = 30


def sample_order(seed: int, epoch: int, num_images: int) -> np.ndarray:
    """The permutation of `range(num_images)` of `epoch`, shared by all ranks: int64."""
    return np.random.default_rng((seed, _ORDER, epoch)).permutation(num_images)


def class_uniform_slots(seed: int, epoch: int, num_images: int) -> np.ndarray:
    """A second permutation of `range(num_images)` of `epoch`, for class-uniform samples: int64."""
    return np.random.default_rng((seed, _CLASS_UNIFORM, epoch)).permutation(num_images)


def centroid_order(seed: int, class_id: int, turn: int, num_centroids: int) -> np.ndarray:
    """The order in which the centroids of a class are taken when it is their `turn`: int64."""
    return np.random.default_rng((seed, _CENTROIDS, class_id, turn)).permutation(num_centroids)


def augment_rng(seed: int, step: int, position: int) -> np.random.Generator:
    """The generator for augmenting the sample at `position` of the batch of `step`."""
    return np.random.default_rng((seed, _AUGMENT, step, position))


def partner_rng(seed: int, step: int, position: int) -> np.random.Generator:
    """The generator that draws a partner of the sample at `position`, and augments it."""
    return np.random.default_rng((seed, _PARTNER, 0, step, position))


def population_rng(seed: int, round_number: int, member: int) -> np.random.Generator:
    """The generator for what `segtrain population` decides about a member after a round.

    Round 0: the options that it starts with.
    """
    return np.random.default_rng((seed, _POPULATION, round_number, member))


def dropout_mask(
    seed: int, step: int, layer: int, *, batch_size: int, channels: int, p: float
) -> Tensor:
    """The channel mask of the whole batch, (batch_size, channels, 1, 1) float32 on the CPU.

    Entries are 0 with probability `p` and 1 / (1 - p) otherwise; a rank takes its own part.
    """
    rng = np.random.default_rng((seed, _DROPOUT, step, layer))
    keep = rng.random((batch_size, channels, 1, 1), dtype=np.float32) >= p
    return torch.from_numpy(keep.astype(np.float32) / (1 - p))


def seed_everything(seed: int) -> None:
    """Seeds the global generators, which only weight initialization and user code draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
