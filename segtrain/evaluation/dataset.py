"""Scores a model on a data set; the ranks divide the images so that each counts once.

The host asks for the work of the next images while the device computes. A stream of its own brings
these images, in parallel to the computation. Predictions come back late, once they are there.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from segtrain.data.read.concurrent import delayed_by_one, prefetch
from segtrain.distributed import collectives as dist
from segtrain.distributed.collectives import wait_for_event
from segtrain.distributed.copies import CopyStream
from segtrain.evaluation.inference import LabelMap, predict_labels
from segtrain.evaluation.settings import (
    BatchLimits,
    InferenceSettings,
    SettingsBySize,
    batch_limits,
    fitting_pixels,
)
from segtrain.metrics import Calibration, ConfusionMatrix
from segtrain.models.memory import memory_failures
from segtrain.run.console import ProgressBar, say
from segtrain.text import counted

T = TypeVar("T")


class Transfer:
    """Copies to and from `device`; on a CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._stream = CopyStream(device)

    def pinned(self, tensor: Tensor) -> Tensor:
        """`tensor` in memory from which a copy to the device needs no wait; for any thread."""
        return tensor.pin_memory() if self.is_cuda else tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        """A pinned tensor on the device, for the work that is asked for from here on."""
        with self._stream.copying() as arrived:
            arrived.append(tensor.to(self.device, non_blocking=True))
        return arrived[0]

    def late_to_host(
        self, predicted: Iterable[tuple[T, Sequence[LabelMap]]]
    ) -> Iterator[tuple[T, list[LabelMap]]]:
        """`predicted` with its label maps on the host, each while the device works on the next.

        Handlers of signals run while the host waits.
        """
        if not self.is_cuda:
            yield from predicted
            return
        for item, maps, copied in delayed_by_one(map(self._ask_for_copy, predicted)):
            wait_for_event(copied, math.inf)  # no other rank takes part in this work
            yield item, maps

    def _ask_for_copy(
        self, predicted: tuple[T, Sequence[LabelMap]]
    ) -> tuple[T, list[LabelMap], "torch.cuda.Event"]:
        item, maps = predicted
        copies = [LabelMap(*(x if x is None else self._copy(x) for x in found)) for found in maps]
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))
        return item, copies, copied

    def _copy(self, tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


Sample = tuple[np.ndarray, np.ndarray]

# A data set is divided into at least so many groups if it has the images: eight ranks then have at
# most a quarter more than the mean.
_LEAST_GROUPS = 32


class StoppedError(Exception):
    """A rank was asked to stop; raised on all ranks, after the same collectives."""


class Prediction(NamedTuple):
    """One evaluated image, on the host.

    index: in the data set.
    image: (H, W, C) as stored. label, pred: (h, w) uint8 train ids; label may be IGNORE_INDEX.
    """

    index: int
    image: np.ndarray
    label: np.ndarray
    pred: np.ndarray


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


class Outcome(NamedTuple):
    """What an evaluation counts, the same on every rank.

    matrix, calibration: of all pixels that are not ignored.
    images: (N, K, 3) int64: of each image and class the pixels that are right, labelled and
        predicted as this class.
    num_by_windows: images for which there was no memory as a whole.
    """

    matrix: ConfusionMatrix
    calibration: Calibration
    images: Tensor
    num_by_windows: int


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
    """
    groups = [range(i, min(i + group, num_images)) for i in range(0, num_images, group)]
    return groups[rank::world_size]


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
    mode_is_given: bool = False,
    callbacks: Sequence[Callable[[Prediction], None]] = (),
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """What is right and wrong in all of `dataset`, the same on every rank (collective).

    Labels are compared at their own resolution. The model runs in evaluation mode and then gets its
    modes back, also after an error. Images are decoded, and `callbacks` called, while the device
    computes. At most `num_threads` + 6 images are in memory at a time, or `at_once` + 6; on CUDA
    three times `group_size` more.

    Args:
        model: returns SegLogits; not wrapped for data parallelism.
        dataset: item i is (image, label), as `segtrain.data.open_dataset` returns it.
        progress: draw a bar on rank 0.
        num_threads: threads that decode images ahead of the model.
        at_once: images that the model works on at the same time, each in a thread of its own with
            one thread of torch (`Shares.of_this_rank`).
        mode_is_given: the mode of `settings` holds for all images. Otherwise images for which there
            is no memory as a whole go by windows, and a warning says so.
        callbacks: each is called with every prediction of this rank, in the order of the data set,
            all in one thread beside the caller's.
        stop: asked before each group and each batch of windows; true: this rank leaves its images.
            It may be true on some ranks only.

    Raises:
        StoppedError: a rank has left its images.
        MemoryLimitError: the memory does not suffice for an image.
    """
    by_size = SettingsBySize.that_fit(settings, math.inf)
    if not mode_is_given:
        by_size = settings_by_size(model, settings, device, num_classes, at_once)
    limits = batch_limits(settings, device, num_classes)
    counts = _Counts(len(dataset), num_classes, device)
    images = _Images(model, dataset, by_size, limits, Transfer(device), counts, stop)
    size = group_size(len(dataset), settings, limits)
    groups = shard(len(dataset), dist.rank(), dist.world_size(), group=size)
    mine, whole = sum(map(len, groups)), len(dataset)
    bar = ProgressBar(whole, 0, "evaluate", enabled=progress and dist.is_main(), unit="image")

    def call(prediction: Prediction) -> None:
        for callback in callbacks:
            callback(prediction)

    has_left = False
    with suppress(StoppedError), bar, _evaluation_mode(model), ExitStack() as stack:
        has_left = True
        if at_once > 1:
            predicted = images.predicted_in_threads(groups, at_once)
        else:
            predicted = images.predicted(groups, num_threads)
        finished = images.finished(stack.enter_context(closing(predicted)))
        stack.enter_context(closing(finished))
        done = stack.enter_context(closing(prefetch(call, finished, 1))) if callbacks else finished
        for i, _ in enumerate(done):  # the other ranks are about as far
            bar.update(whole * (i + 1) // mine - whole * i // mine)
        has_left = False
    if any(dist.all_gather_object(has_left)):
        raise StoppedError
    num_by_windows = _warn_of_windows(images.num_by_windows, by_size)
    outcome = counts.sum_over_ranks(num_by_windows)
    _warn_of_infinite(counts.num_infinite, settings)
    return outcome


class _Counts:
    """What this rank has counted."""

    def __init__(self, num_images: int, num_classes: int, device: torch.device) -> None:
        self.num_infinite = torch.zeros((), dtype=torch.int64, device=device)
        self._matrix = ConfusionMatrix(num_classes, device)
        self._calibration = Calibration(device)
        self._images = torch.zeros(num_images, num_classes, 3, dtype=torch.int64, device=device)

    def add(self, index: int, found: LabelMap, label: Tensor) -> None:
        """Counts image `index`; nothing waits for the device."""
        table = self._matrix.update(found.label, label)
        self._images[index] = torch.stack([table.diagonal(), table.sum(1), table.sum(0)], dim=1)
        self._calibration.update(found.probability, found.label, label)
        self.num_infinite += ~found.is_finite

    def sum_over_ranks(self, num_by_windows: int) -> Outcome:
        """Those of all ranks (collective)."""
        self._matrix.sum_over_ranks()
        self._calibration.sum_over_ranks()
        dist.all_reduce_sum(self._images)
        return Outcome(self._matrix, self._calibration, self._images, num_by_windows)


def settings_by_size(
    model: nn.Module,
    settings: InferenceSettings,
    device: torch.device,
    num_classes: int,
    at_once: int = 1,
) -> SettingsBySize:
    """How `evaluate_dataset` chooses windows by memory."""
    ranks = dist.local_world_size() * at_once
    return SettingsBySize.that_fit(settings, fitting_pixels(model, device, num_classes, ranks))


class _Decoded(NamedTuple):
    """An image (H, W, C) and its label (h, w) on the host."""

    index: int
    image: Tensor
    label: Tensor


_Predicted = tuple[list[_Decoded], list[LabelMap]]


@dataclass
class _Images:
    """The images of this rank on their way: files, host, device, matrix, host."""

    model: nn.Module
    dataset: Sequence[Sample]
    settings: SettingsBySize
    limits: BatchLimits
    transfer: Transfer
    counts: _Counts
    stop: Callable[[], bool]
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
        for group, maps in self.transfer.late_to_host(map(self._count, predicted)):
            for one, found in zip(group, maps, strict=True):
                pixels = (x.numpy() for x in (one.image, one.label, found.label))
                yield Prediction(one.index, *pixels)

    def _decode(self, index: int) -> _Decoded:
        image, label = self.dataset[index]
        pinned = (self.transfer.pinned(torch.from_numpy(x)) for x in (image, label))
        return _Decoded(index, *pinned)

    def _leave_if_asked(self, _: int = 0) -> None:
        if self.stop():
            raise StoppedError

    def _predict(self, group: list[_Decoded]) -> _Predicted:
        self._leave_if_asked()
        chosen = [self.settings.of(tuple(one.image.shape[:2])) for one in group]
        self.num_by_windows += sum(one.mode != self.settings.usual.mode for one in chosen)
        maps: list[LabelMap] = []
        for settings, alike in groupby(zip(chosen, group, strict=True), lambda pair: pair[0]):
            maps += self._predict_alike([one for _, one in alike], settings)
        return group, maps

    def _predict_alike(self, group: list[_Decoded], settings: InferenceSettings) -> list[LabelMap]:
        sizes = [tuple(one.label.shape) for one in group]
        height, width = max((one.image.shape[:2] for one in group), key=math.prod)
        message = (
            f"out of memory: an image of {height}x{width} px, evaluated by {settings.describe()}; "
            "use eval.batch_size 1, eval.mode slide, or a smaller eval.crop_size"
        )
        with memory_failures(lambda: message):
            moved = [self.transfer.to_device(one.image) for one in group]
            images = [image.permute(2, 0, 1).unsqueeze(0) for image in moved]
            how = settings, sizes, self.limits
            asked = {"probabilities": "highest", "on_windows": self._leave_if_asked}
            return predict_labels(self.model, images, *how, **asked)

    def _count(self, predicted: _Predicted) -> _Predicted:
        group, maps = predicted
        for one, found in zip(group, maps, strict=True):
            self.counts.add(one.index, found, self.transfer.to_device(one.label))
        return group, [found._replace(probability=None) for found in maps]  # not for the host


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
