"""Whether the evaluation split shows what the model is trained on: frames of one sequence.

Names find the neighbours. Where names could as well be of single photographs, as IMG_0001, the
pixels of a sample decide.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.sequences import Shared, shared_sequences
from segtrain.data.read.thumbnails import thumbnail_of
from segtrain.text import first_of

# Fewer images to evaluate on with such a neighbour change the score little.
_LEAST_PART = 1 / 3
_SAMPLES, _LEAST_SAMPLES, _THREADS = 16, 8, 4
# How far thumbnails are from their neighbours, against others: 0.05 to 0.35 in 300 random splits of
# CamVid, and 0.67 to 1.66 after its images had been renamed in a random order.
_CLOSER = 0.5


def leak_warning(train: SegDataset, evaluation: SegDataset) -> list[str]:
    """A line if the score would be too good for sequences that nobody has trained on.

    Raises:
        DataError: an image of the sample cannot be read.
    """
    if train.split == evaluation.split:  # said elsewhere
        return []
    shared = shared_sequences(train.names, evaluation.names)
    least = max(1, _LEAST_PART * len(evaluation))
    named = [pair for pair in shared if pair.by_name]
    if len(named) >= least:
        shared = named
    elif len(shared) < least or not _are_alike(shared, train, evaluation):
        return []
    images = first_of((evaluation.name(pair.index) for pair in shared), 1)
    return [
        f"{len(shared)} of {len(evaluation)} images to evaluate on ({images}) continue sequences "
        f"of the training split, such as {train.name(shared[0].nearest)}: the score will be too "
        "good for other sequences; segtrain folds --by sequence keeps them whole"
    ]


def _are_alike(shared: Sequence[Shared], train: SegDataset, evaluation: SegDataset) -> bool:
    """Whether neighbours by number are much more alike than other pairs, by a sample."""
    chosen = [shared[i] for i in np.linspace(0, len(shared) - 1, _SAMPLES).astype(int)]
    chosen = list(dict.fromkeys(chosen))
    if len(chosen) < _LEAST_SAMPLES:
        return False

    def thumbnails(dataset: SegDataset, indices: Sequence[int]) -> np.ndarray:
        small = pool.map(lambda i: thumbnail_of(dataset.view(i)[0]), indices)
        return np.stack(list(small))  # (S, 256), rows of length 1

    with ThreadPoolExecutor(_THREADS) as pool:
        images = thumbnails(evaluation, [each.index for each in chosen])
        nearest = thumbnails(train, [each.nearest for each in chosen])
    # Rows of length 1: their products are cosines. Half the sample away there is no neighbour.
    beside = np.median((images * nearest).sum(1))
    apart = np.median((images * np.roll(nearest, len(nearest) // 2, axis=0)).sum(1))
    return bool(1 - beside < _CLOSER * (1 - apart))
