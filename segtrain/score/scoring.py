"""Scores a model on a data set; the ranks divide the images so that each counts once.

The host asks for the work of the next images while the device computes. A stream of its own brings
these images, in parallel to the computation. Predictions come back late, once they are there.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from segtrain.data.read.concurrent import prefetch
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.inference.predictor import Predictor
from segtrain.inference.settings import BatchLimits, InferenceSettings, SettingsBySize
from segtrain.one_vs_rest import CurveCounts
from segtrain.run.console import ProgressBar, say
from segtrain.task.contract import ImageCounts, Outcome
from segtrain.task.prediction import LabelMap, Prediction
from segtrain.task.tasks import task_of
from segtrain.text import counted

Sample = tuple[np.ndarray, np.ndarray]
Watcher = Callable[[int, Tensor, Tensor], None]

# A data set is divided into at least so many groups if it has the images: eight ranks then have at
# most a quarter more than the mean.
_LEAST_GROUPS = 32


class StoppedError(Exception):
    """A rank was asked to stop; raised on all ranks, after the same collectives."""


@dataclass(frozen=True)
class Chosen(Sequence[Sample]):
    """Some images of a data set."""

    dataset: Sequence[Sample]
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> Sample:
        return self.dataset[self.indices[position]]

    def original(self, prediction: Prediction) -> Prediction:
        """A prediction with the index that its image has in the data set."""
        return prediction._replace(index=self.indices[prediction.index])


def group_size(num_images: int, settings: InferenceSettings, limits: BatchLimits) -> int:
    """The neighbouring images whose views may share a batch.

    Fewer than a batch holds if the data set is small, so that ranks still divide it evenly; but as
    many as `settings` ask for.
    """
    if settings.batch_size is not None:
        return settings.batch_size
    return max(1, min(limits.num_images, num_images // _LEAST_GROUPS))


def shard(num_images: int, rank: int, world_size: int, *, group: int = 1) -> list[range]:
    """The groups of `group` images that `rank` evaluates: rank, rank + world_size, ...

    Groups, and so batches, are the same on any number of ranks. Neighbouring images of a data set
    often have equal sizes, so this also divides the work evenly.

    Seven images in groups of 2, on three ranks:

    >>> [[list(group) for group in shard(7, rank, 3, group=2)] for rank in range(3)]
    [[[0, 1], [6]], [[2, 3]], [[4, 5]]]
    """
    groups = [range(i, min(i + group, num_images)) for i in range(0, num_images, group)]
    return groups[rank::world_size]


def evaluate_dataset(
    predictor: Predictor,
    dataset: Sequence[Sample],
    *,
    progress: bool = False,
    num_threads: int = 2,
    at_once: int = 1,
    callbacks: Sequence[Callable[[Prediction], None]] = (),
    watchers: Sequence[Watcher] = (),
    stop: Callable[[], bool] = lambda: False,
    curves: CurveCounts | None = None,
) -> Outcome:
    """What is right and wrong in all of `dataset`, the same on every rank (collective).

    Labels are compared at their own resolution. The model runs in evaluation mode and then gets its
    modes back, also after an error. Images are decoded, and `callbacks` called, while the device
    computes. At most `num_threads` + 6 images are in memory at a time, or `at_once` + 6; on CUDA
    three times `group_size` more.

    Args:
        predictor: `for_scores` makes one. A warning says how many images went by windows because
            there was no memory for them as a whole.
        dataset: item i is (image, label), as `segtrain.data.open_dataset` returns it.
        progress: draw a bar on rank 0.
        num_threads: threads that decode images ahead of the model.
        at_once: images that the model works on at the same time, each in a thread of its own with
            one thread of torch (`Shares.of_this_rank`).
        callbacks: each is called with every prediction of this rank, in the order of the data set,
            all in one thread beside the caller's.
        watchers: each is called with index, probabilities of all classes and label of an image, on
            the device.
        stop: asked before each group and each batch of windows; true: this rank leaves its images.
            It may be true on some ranks only.
        curves: counts the probabilities of all classes, which takes time and memory; None: nobody
            asks. `Outcome.curves` are they, or, where classes overlap, others that are counted
            anyway.

    Raises:
        StoppedError: a rank has left its images.
        MemoryLimitError: the memory does not suffice for an image.
    """
    settings = predictor.settings.usual
    about = len(dataset), predictor.num_classes, predictor.device
    counts = task_of(settings.task).counts(*about, curves)
    images = _Images(predictor, dataset, counts, stop, watchers)
    size = group_size(len(dataset), settings, predictor.limits)
    groups = shard(len(dataset), dist.rank(), dist.world_size(), group=size)
    mine, whole = sum(map(len, groups)), len(dataset)
    bar = ProgressBar(whole, 0, "evaluate", enabled=progress and dist.is_main(), unit="image")

    def call(prediction: Prediction) -> None:
        for callback in callbacks:
            callback(prediction)

    has_left = False
    with suppress(StoppedError), bar, _evaluation_mode(predictor.model), ExitStack() as stack:
        # True until all images are done: StoppedError leaves the block before its last line.
        has_left = True
        if at_once > 1:
            predicted = images.predicted_in_threads(groups, at_once)
        else:
            predicted = images.predicted(groups, num_threads)
        # Closed in reverse order, also after an error: no thread may go on with images that nobody
        # takes.
        finished = images.finished(stack.enter_context(closing(predicted)))
        stack.enter_context(closing(finished))
        done = stack.enter_context(closing(prefetch(call, finished, 1))) if callbacks else finished
        for i, _ in enumerate(done):  # the other ranks are about as far
            bar.update(whole * (i + 1) // mine - whole * i // mine)
        has_left = False
    # Every rank comes here, whether it has left or not: none may wait for another.
    if any(dist.all_gather_object(has_left)):
        raise StoppedError
    num_by_windows = _warn_of_windows(images.num_by_windows, predictor.settings)
    outcome = counts.sum_over_ranks(num_by_windows)
    _warn_of_infinite(counts.num_infinite, settings)
    return outcome


class _Decoded(NamedTuple):
    """An image (H, W, C) and its label (h, w) on the host."""

    index: int
    image: Tensor
    label: Tensor


_Predicted = tuple[list[_Decoded], list[LabelMap]]


@dataclass
class _Images:
    """The images of this rank on their way: files, host, device, matrix, host."""

    predictor: Predictor
    dataset: Sequence[Sample]
    counts: ImageCounts
    stop: Callable[[], bool]
    watchers: Sequence[Watcher]
    num_by_windows: int = 0  # images that do not fit into memory as a whole

    def predicted(self, groups: Sequence[range], num_threads: int) -> Iterator[_Predicted]:
        """Decodes in threads and predicts in this one; on CUDA it only asks for the work."""
        indices = [i for group in groups for i in group]
        with closing(prefetch(self._decode, indices, num_threads)) as decoded:
            for group in groups:
                yield self._predict([next(decoded) for _ in group])

    def predicted_in_threads(self, groups: Sequence[range], at_once: int) -> Iterator[_Predicted]:
        """Decodes and predicts in threads, with one thread of torch each."""

        def predict_alone(group: range) -> _Predicted:
            torch.set_num_threads(1)  # a new thread would begin with as many as there are cores
            return self._predict([self._decode(i) for i in group])

        return prefetch(predict_alone, groups, at_once)

    def finished(self, predicted: Iterator[_Predicted]) -> Iterator[Prediction]:
        """Counts the pixels; yields the predictions once they are on the host."""
        for group, maps in self.predictor.transfer.late_to_host(map(self._count, predicted)):
            for decoded, label_map in zip(group, maps, strict=True):
                pixels = (x.numpy() for x in (decoded.image, decoded.label, label_map.label))
                yield Prediction(decoded.index, *pixels)

    def _decode(self, index: int) -> _Decoded:
        image, label = self.dataset[index]
        # Pinning is a copy, so the thread that decodes does it.
        pinned = (self.predictor.transfer.pinned(torch.from_numpy(x)) for x in (image, label))
        return _Decoded(index, *pinned)

    def _leave_if_asked(self, _: int = 0) -> None:
        if self.stop():
            raise StoppedError

    def _predict(self, group: list[_Decoded]) -> _Predicted:
        self._leave_if_asked()
        images, by_size = [item.image for item in group], self.predictor.settings
        chosen = [by_size.of(tuple(image.shape[:2])) for image in images]
        self.num_by_windows += sum(item.mode != by_size.usual.mode for item in chosen)
        sizes = [tuple(item.label.shape[:2]) for item in group]
        # Calibration needs the highest probability only; all of them take K times the memory.
        wanted = "all" if self.watchers or self.counts.curves is not None else "highest"
        asked = {"probabilities": wanted, "on_windows": self._leave_if_asked}
        return group, self.predictor.label_maps(images, sizes, place="evaluation", **asked)

    def _count(self, predicted: _Predicted) -> _Predicted:
        group, maps = predicted
        for decoded, label_map in zip(group, maps, strict=True):
            shapes = [tuple(x.shape) for x in (label_map.label, decoded.label)]
            # Subtracted from each other, (H, W) and (H, W, 1) would be (H, H, W), and no error.
            # More numbers of a pixel than the label has are the task's own affair.
            is_alike = math.prod(shapes[0]) == math.prod(shapes[1])
            if shapes[0][:2] != shapes[1][:2] or (is_alike and shapes[0] != shapes[1]):
                what = f"predicts {shapes[0]} where the label is {shapes[1]}"
                name = self.predictor.settings.usual.task
                raise ConfigError(f"task {name}: {what}; see Decoding.bands")
            label = self.predictor.transfer.to_device(decoded.label)
            self.counts.add(decoded.index, label_map, label)
            for watch in self.watchers:
                watch(decoded.index, label_map.probability, label)
        return group, [
            label_map._replace(probability=None) for label_map in maps
        ]  # not for the host


def _warn_of_infinite(of_this_rank: Tensor, settings: InferenceSettings) -> None:
    """Says how many images have scores that are not finite (collective)."""
    num_images = sum(dist.all_gather_object(int(of_this_rank)))
    if num_images == 0 or not dist.is_main():
        return
    reason = "the weights, or their statistics, are not"
    if settings.autocast == torch.float16:
        reason = "float16 ends at 65504; use --set eval.precision=bfloat16, or float32"
    what = counted(num_images, "image", "images")
    say(f"warning: the scores of {what} are not finite numbers: {reason}")


def _warn_of_windows(of_this_rank: int, settings: SettingsBySize) -> int:
    """Says and returns how many images were too large for the memory as a whole (collective)."""
    num_images = sum(dist.all_gather_object(of_this_rank))
    if num_images and dist.is_main():
        say(
            f"warning: {counted(num_images, 'image', 'images')} did not fit into memory as a whole "
            f"and went by {settings.large.describe().partition(';')[0]}, whose scores differ "
            "slightly; eval.mode=slide does so for all"
        )
    return num_images


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
