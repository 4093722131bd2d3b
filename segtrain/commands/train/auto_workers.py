"""`data.num_workers: auto`: as many loader processes as keep ahead of the steps.

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

from segtrain.commands.train.setup import TrainContext
from segtrain.data.sample.loader import most_workers
from segtrain.distributed import collectives as dist
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

    def line(self) -> str:
        """What to log."""
        line = (
            f"loader     {self.workers} of at most {self.most} workers a rank "
            f"(data.num_workers auto): a sample takes one {self.sample_s * 1e3:.1f} ms, a step of "
            f"{self.images} images {self.step_s * 1e3:.1f} ms"
        )
        if self.images * self.sample_s > self.workers * self.step_s:
            line += "; they are slower than the step: segtrain data pack makes reading faster"
        return line


class Measurement:
    """Takes in the first MEASURED_STEPS steps of a process; the median of those after a warm-up.

    On a device a step lasts until the device is done. The host does not wait for it before the
    choice: the marks lie in the queue of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: float | torch.cuda.Event = 0.0
        self._steps: list[tuple] = []  # began, ended, made_s, images

    def start(self) -> None:
        """A step has a batch; that of its last microbatch counts."""
        self._began = self._mark()

    def stop(self, made_s: float, images: int) -> None:
        """It asks for the next one. One process takes `made_s` seconds for its images."""
        self._steps.append((self._began, self._mark(), made_s, images))

    def choice(self, most: int) -> Choice:
        """How many workers keep ahead of the steps, 1 .. `most`."""
        dist.wait_for_device(self._device)  # which may wait for a rank that is gone
        measured = self._steps[_WARMUP:]
        sample_s = median(made_s / images for *_, made_s, images in measured)
        if self._device.type == "cuda":
            measured[-1][1].synchronize()
            step_s = median(began.elapsed_time(ended) / 1e3 for began, ended, *_ in measured)
        else:
            step_s = median(ended - began for began, ended, *_ in measured)
        images = max(images for *_, images in measured)
        needed = math.ceil(_MARGIN * images * sample_s / step_s)
        return Choice(max(1, min(most, needed)), most, images, sample_s, step_s)

    def _mark(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def with_chosen_workers(
    run: TrainContext, stop: int, tell: Callable[[str], None]
) -> Iterator[Batch]:
    """This rank's batches from the current step to `stop`.

    With data.num_workers auto, the number is chosen in the first steps, and `tell` gets a line.
    """
    start, most, before = run.state.step, most_workers(run.config), run.num_workers()
    chosen = start + MEASURED_STEPS
    batches = run.batches(start, stop)
    try:
        if run.config.data.num_workers == "auto" and most > 0 and chosen < stop:
            measurement = Measurement(run.device)
            for _ in range(start, chosen):
                made_s, images = 0.0, 0
                for positions in run.indices():
                    batch = next(batches)
                    made_s, images = made_s + batch.made_s, images + len(positions)
                    # The step takes the batches of all microbatches, then computes.
                    measurement.start()
                    yield batch
                measurement.stop(made_s, images)
            choice = measurement.choice(most)
            tell(choice.line())
            run.auto_workers = choice.workers
            if choice.workers != before:
                batches.close()
                batches = run.batches(chosen, stop)
        yield from batches
    finally:
        batches.close()
