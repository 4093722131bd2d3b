"""Scores a model on a data set, the images shared by the ranks so that each counts once."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from segtrain.distributed import collectives as dist
from segtrain.evaluation.inference import InferenceSettings, predict_label
from segtrain.metrics import ConfusionMatrix
from segtrain.run.log import ProgressBar

Sample = tuple[np.ndarray, np.ndarray]


class Prediction(NamedTuple):
    """One evaluated image, on the host.

    index: its place in the data set.
    image: (H, W, 3) uint8 RGB. label, pred: (h, w) uint8 train ids; label may be IGNORE_INDEX.
    """

    index: int
    image: np.ndarray
    label: np.ndarray
    pred: np.ndarray


def shard(num_images: int, rank: int, world_size: int) -> range:
    """The images that `rank` evaluates: rank, rank + world_size, ...; some ranks have one less.

    Neighbouring images of a data set tend to have one size, so turns share the work evenly too.
    """
    return range(rank, num_images, world_size)


def evaluate_dataset(
    model: nn.Module,
    dataset: Sequence[Sample],
    settings: InferenceSettings,
    *,
    device: torch.device,
    num_classes: int,
    progress: bool = False,
    num_threads: int = 2,
    callbacks: Sequence[Callable[[Prediction], None]] = (),
) -> ConfusionMatrix:
    """The confusion matrix over all of `dataset`, the same on every rank (collective).

    Labels are compared at their own resolution. The model is put into evaluation mode and left as
    it was, also when an image cannot be read. The number of images does not matter to memory: at
    most `num_threads` + 3 are held at a time, and nothing but integers is kept of them.

    Args:
        model: returns SegLogits; not wrapped for data parallelism.
        dataset: item i is (image, label), as `segtrain.data.open_dataset` returns it.
        progress: draw a bar on rank 0.
        num_threads: how many threads decode images ahead of the model.
        callbacks: called with every prediction of this rank, in the order of the data set.
    """
    matrix = ConfusionMatrix(num_classes, device)
    indices = shard(len(dataset), dist.rank(), dist.world_size())
    bar = ProgressBar(
        len(indices), 0, "evaluate", enabled=progress and dist.is_main(), unit="image"
    )
    with bar, _evaluation_mode(model), closing(_read(dataset, indices, num_threads)) as samples:
        for index, (image, label) in samples:
            pixels = torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0).to(device)
            pred = predict_label(model, pixels, settings, label.shape)
            matrix.update(pred, torch.from_numpy(label).to(device))
            if callbacks:
                prediction = Prediction(index, image, label, pred.cpu().numpy())
                for receive in callbacks:
                    receive(prediction)
            bar.update()
    matrix.sum_over_ranks()
    return matrix


def _read(
    dataset: Sequence[Sample], indices: range, num_threads: int
) -> Iterator[tuple[int, Sample]]:
    """(index, sample) in the order of `indices`, decoded ahead by threads.

    Threads, not processes: decoding happens outside the interpreter lock, and there is nothing to
    start, pickle or share memory with. Errors surface where their image is due.
    """
    with ThreadPoolExecutor(num_threads, thread_name_prefix="decode") as pool:
        ahead = iter(indices)
        waiting = deque(
            (i, pool.submit(dataset.__getitem__, i)) for i in islice(ahead, num_threads + 1)
        )
        try:
            while waiting:
                index, future = waiting.popleft()
                sample = future.result()
                del future  # it would keep the sample until the next one is due
                waiting.extend((i, pool.submit(dataset.__getitem__, i)) for i in islice(ahead, 1))
                yield index, sample
                del sample
        finally:
            for _, future in waiting:
                future.cancel()


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts every module into evaluation mode, and each back into the mode it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
