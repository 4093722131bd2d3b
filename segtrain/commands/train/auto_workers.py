"""`data.num_workers: auto`: as many loader processes as keep ahead of the steps.

The first steps are measured where batches are handed over: how long the step keeps the loader
waiting, and how long a worker took for a batch. Which samples a batch has does not depend on the
number of workers, so a loader with another number takes over at the next step.
"""

import math
import time
from collections.abc import Callable, Iterator
from statistics import median

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


class Measurement:
    """Of the first MEASURED_STEPS steps of a process; the median of those after a warm-up counts.

    On a device a step lasts until the device is done; the host does not wait for it meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: float | torch.cuda.Event = 0.0
        self._steps: list[tuple] = []  # began, ended, made_s, images

    def start(self) -> None:
        """A step has its last batch."""
        self._began = self._mark()

    def stop(self, made_s: float, images: int) -> None:
        """It asks for the next one; a process made those of its `images` in `made_s` seconds."""
        self._steps.append((self._began, self._mark(), made_s, images))

    def choice(self, most: int) -> tuple[int, str]:
        """How many workers keep ahead of the steps, 1 .. `most`, and a line for the log."""
        dist.wait_for_device(self._device)  # which may wait for a rank that is gone
        measured = self._steps[_WARMUP:]
        sample_s = median(made_s / images for *_, made_s, images in measured)
        if self._device.type == "cuda":
            measured[-1][1].synchronize()
            step_s = median(began.elapsed_time(ended) / 1e3 for began, ended, *_ in measured)
        else:
            step_s = median(ended - began for began, ended, *_ in measured)
        images = max(images for *_, images in measured)
        workers = max(1, min(most, math.ceil(_MARGIN * images * sample_s / step_s)))
        return workers, (
            f"loader     {workers} of at most {most} workers a rank (data.num_workers auto): a "
            f"sample takes one {sample_s * 1e3:.1f} ms, a step of {images} images "
            f"{step_s * 1e3:.1f} ms"
        )

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
    start, most, before = (
        run.state.step,
        most_workers(run.config, run.train_set.form),
        run.num_workers(),
    )
    chosen = start + MEASURED_STEPS
    batches = run.batches(start, stop)
    try:
        if run.config.data.num_workers == "auto" and most > 0 and chosen < stop:
            measurement = Measurement(run.device)
            for _ in range(start, chosen):
                made_s, images = 0.0, 0
                for positions in run.indices():
                    batch = next(batches)
                    made_s, images = made_s + batch.made_s, images + (len(positions) or 1)
                    # The step takes the batches of all microbatches, then computes.
                    measurement.start()
                    yield batch
                measurement.stop(made_s, images)
            run.auto_workers, line = measurement.choice(most)
            tell(line)
            if run.auto_workers != before:
                batches.close()
                batches = run.batches(chosen, stop)
        yield from batches
    finally:
        batches.close()
