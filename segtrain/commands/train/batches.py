"""The batches that this rank trains on.

The first steps are measured where batches are handed over: how long the step keeps the loader
waiting, and how long a worker took for a batch. Which samples a batch has does not depend on the
number of workers, so a loader with another number takes over at the next step.
"""

import math
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch

from segtrain.commands.train.setup import Run
from segtrain.commands.train.stages import Training, train_stream
from segtrain.data.sample.loader import first_workers, indices_of_rank, most_workers, train_loader
from segtrain.distributed import collectives as dist
from segtrain.run.pictures import training_picture
from segtrain.types import Batch

# In the first steps libraries choose kernels, and files are read for the first time.
_WARMUP = 3
MEASURED_STEPS = _WARMUP + 8
# How much faster than the steps the loader has to be: samples and steps vary.
_MARGIN = 1.5


class Choice(NamedTuple):
    """What was measured and chosen.

    workers, most: loader processes, and how many there may be. images: of this rank in a step.
    sample_s: a sample in one process. step_s: without waiting for the loader.
    """

    workers: int
    most: int
    images: int
    sample_s: float
    step_s: float

    @property
    def keeps_ahead(self) -> bool:
        """Whether so many workers are as fast as the steps."""
        return self.images * self.sample_s <= self.workers * self.step_s

    def line(self) -> str:
        """What to log."""
        line = (
            f"loader     {self.workers} of at most {self.most} workers a rank "
            f"(data.num_workers auto): a sample takes one {self.sample_s * 1e3:.1f} ms, a step of "
            f"{self.images} images {self.step_s * 1e3:.1f} ms"
        )
        if not self.keeps_ahead:
            line += "; they are slower than the step: segtrain data pack makes reading faster"
        return line


class Measurement:
    """Takes in the first MEASURED_STEPS steps of a process; the median of those after a warm-up.

    On a device a step lasts until the device is done. The host does not wait for it before the
    choice: the marks lie in the queue of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: _Mark | None = None
        self._steps: list[tuple[_Mark, _Mark, float, int]] = []

    def start(self) -> None:
        """A step has its last batch."""
        self._began = self._mark()

    def stop(self, made_s: float, images: int) -> None:
        """It asks for the next one. One process takes `made_s` seconds for its images."""
        self._steps.append((self._began, self._mark(), made_s, images))

    def choice(self, most: int) -> Choice:
        """How many workers keep ahead of the steps, 1 .. `most`."""
        dist.wait_for_device(self._device)  # which may wait for a rank that is gone
        measured = self._steps[_WARMUP:]
        sample_s = median(made_s / images for _, _, made_s, images in measured)
        step_s = median(_seconds(began, ended) for began, ended, _, _ in measured)
        images = max(images for *_, images in measured)
        needed = math.ceil(_MARGIN * images * sample_s / step_s)
        return Choice(max(1, min(most, needed)), most, images, sample_s, step_s)

    def _mark(self) -> "_Mark":
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_Mark = float | torch.cuda.Event


def _seconds(began: _Mark, ended: _Mark) -> float:
    if isinstance(began, float):
        return ended - began
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def indices(run: Training) -> list[range]:
    """For each pass of a step, the positions in the whole batch that this rank trains on."""
    train = run.config.train
    return indices_of_rank(
        train.batch_size,
        train.accumulate_steps,
        dist.rank(),
        dist.world_size(),
        train.shares,
    )


def num_workers(run: Training) -> int:
    """The loader processes of this rank."""
    return first_workers(run.config) if run.auto_workers is None else run.auto_workers


def until(run: Training, step: int) -> Iterator[Batch]:
    """This rank's batches from the current step to `step`."""
    return _between(run, run.state.step, step)


def with_chosen_workers(run: Training, step: int, tell: Callable[[str], None]) -> Iterator[Batch]:
    """As `until`; with data.num_workers auto, the number is chosen in the first steps.

    tell: gets a line about it.
    """
    start, most = run.state.step, most_workers(run.config)
    chosen = start + MEASURED_STEPS
    if run.config.data.num_workers != "auto" or most == 0 or chosen >= step:
        return until(run, step)
    return _measured(run, start, chosen, step, most, tell)


def _measured(
    run: Training, start: int, chosen: int, step: int, most: int, tell: Callable[[str], None]
) -> Iterator[Batch]:
    """The batches of the steps `start` to `step` - 1; those before `chosen` are measured."""
    measurement, before = Measurement(run.device), num_workers(run)
    batches = _between(run, start, step)
    try:
        for _ in range(start, chosen):
            made_s, images = 0.0, 0
            for positions in indices(run):
                batch = next(batches)
                made_s, images = made_s + batch.made_s, images + len(positions)
                # The step takes the batches of all passes, then computes.
                measurement.start()
                yield batch
            measurement.stop(made_s, images)
        choice = measurement.choice(most)
        tell(choice.line())
        run.auto_workers = choice.workers
        if choice.workers != before:
            batches.close()
            batches = _between(run, chosen, step)
        yield from batches
    finally:
        batches.close()


def _between(run: Training, start: int, stop: int) -> Iterator[Batch]:
    """This rank's batches of the steps `start` to `stop` - 1."""
    config = run.config
    return train_loader(
        train_stream(run),
        indices=indices(run),
        start_step=start,
        steps=stop,
        num_workers=num_workers(run),
        prefetch=config.data.prefetch,
        pin_memory=run.device.type == "cuda",
        # Time out before the other ranks do, so that the error names the loader.
        timeout_s=0.8 * config.train.timeout_s,
    )


def shown(run: Run) -> Iterator[Batch]:
    """This rank's batches from the current step to the last; TensorBoard shows the first one."""
    batches = with_chosen_workers(run, run.last_step, lambda line: run.log.lines([line]))
    for i, batch in enumerate(batches):
        if i == 0:
            # A wrong label file or augmentation is seen here within a minute.
            picture = training_picture(batch, run.train_set.classes)
            run.log.picture(run.state.step, "train/batch", picture)
        yield batch
