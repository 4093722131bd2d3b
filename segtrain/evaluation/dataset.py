"""Scores a model on a data set; the ranks divide the images so that each counts once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from segtrain.data.prefetch import prefetch
from segtrain.distributed import collectives as dist
from segtrain.evaluation.inference import predict_label
from segtrain.evaluation.settings import InferenceSettings
from segtrain.metrics import ConfusionMatrix
from segtrain.run.progress import ProgressBar

Sample = tuple[np.ndarray, np.ndarray]


class Prediction(NamedTuple):
    """One evaluated image, on the host.

    index: in the data set.
    image: (H, W, 3) uint8 RGB. label, pred: (h, w) uint8 train ids; label may be IGNORE_INDEX.
    """

    index: int
    image: np.ndarray
    label: np.ndarray
    pred: np.ndarray


def shard(num_images: int, rank: int, world_size: int) -> range:
    """The images that `rank` evaluates: rank, rank + world_size, ...

    Neighbouring images of a data set often have equal sizes, so this also divides the work evenly.
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
    at_once: int = 1,
    callbacks: Sequence[Callable[[Prediction], None]] = (),
) -> ConfusionMatrix:
    """The confusion matrix over all of `dataset`, the same on every rank (collective).

    Labels are compared at their own resolution. The model runs in evaluation mode and then gets its
    modes back, also after an error. At most `num_threads` + 3 images are in memory at a time, or
    `at_once` + 3.

    Args:
        model: returns SegLogits; not wrapped for data parallelism.
        dataset: item i is (image, label), as `segtrain.data.open_dataset` returns it.
        progress: draw a bar on rank 0.
        num_threads: threads that decode images ahead of the model.
        at_once: images that the model works on at the same time, each in a thread of its own with
            one thread of torch (`Shares.of_this_rank`).
        callbacks: each is called with every prediction of this rank, in the order of the data set.
    """
    matrix = ConfusionMatrix(num_classes, device)
    indices = shard(len(dataset), dist.rank(), dist.world_size())
    bar = ProgressBar(
        len(indices), 0, "evaluate", enabled=progress and dist.is_main(), unit="image"
    )

    def predict(sample: Sample) -> tuple[np.ndarray, np.ndarray, Tensor]:
        image, label = sample
        pixels = torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0).to(device)
        return image, label, predict_label(model, pixels, settings, label.shape)

    def predict_alone(index: int) -> tuple[np.ndarray, np.ndarray, Tensor]:
        torch.set_num_threads(1)  # a new thread would begin with as many as there are cores
        return predict(dataset[index])

    with bar, _evaluation_mode(model), ExitStack() as stack:
        if at_once > 1:
            predicted = stack.enter_context(closing(prefetch(predict_alone, indices, at_once)))
        else:
            decoded = closing(prefetch(dataset.__getitem__, indices, num_threads))
            predicted = map(predict, stack.enter_context(decoded))
        for index, (image, label, pred) in zip(indices, predicted, strict=True):
            matrix.update(pred, torch.from_numpy(label).to(device))
            if callbacks:
                prediction = Prediction(index, image, label, pred.cpu().numpy())
                for callback in callbacks:
                    callback(prediction)
            bar.update()
    matrix.sum_over_ranks()
    return matrix


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts every module into evaluation mode, then back into its own mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
