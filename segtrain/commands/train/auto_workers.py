"""`data.num_workers: auto`: as many loader processes as keep ahead of the steps.

The first steps are measured where batches are handed over: how long the step keeps the loader
waiting, and how long a worker took for a batch. Which samples a batch has does not depend on the
number of workers, so a loader with another number takes over at the next step.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

from segtrain.commands.train.training import Training
from segtrain.config import Config
from segtrain.data.sample.loader import most_workers
from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import Layout
from segtrain.training.local import LocalStep
from segtrain.training.part import Part
from segtrain.training.step import StepResult

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
        """A step has its batches."""
        self._began = self._mark()

    def stop(self, made_s: float, images: int) -> None:
        """It is done; a process made the batches of its `images` in `made_s` seconds."""
        self._steps.append((self._began, self._mark(), made_s, images))

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return len(self._steps)

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


class WorkerChoice(Part):
    """Measures the first steps of a loader and gives it as many workers as keep ahead of them.

    tell: gets lines about it.
    """

    def __init__(self, tell: Callable[[list[str]], object]) -> None:
        self._tell = tell
        self._measurement: Measurement | None = None
        self._layout: Layout | None = None  # for which it was measured, or is

    @classmethod
    def of(cls, config: Config, tell: Callable[[list[str]], object]) -> "WorkerChoice | None":
        """One where the config asks for it."""
        measures = config.data.num_workers == "auto" and config.train.parallel != "server"
        return cls(tell) if measures else None

    @contextmanager
    def around(self, run: Training) -> Iterator[None]:
        """Times the step."""
        if self._layout is not run.state.layout:  # so many images may be others' now
            self._layout, self._measurement = run.state.layout, Measurement(run.device)
        if self._measurement is not None:
            self._measurement.start()
        yield

    def after_step(self, run: Training, local: LocalStep, result: StepResult) -> None:
        """Takes in the step; after the last one that is measured, opens another loader."""
        measurement = self._measurement
        if measurement is None:
            return
        images = sum(len(positions) or 1 for positions in run.state.layout.positions(dist.rank()))
        measurement.stop(sum(batch.made_s for batch in local.batches), images)
        if measurement.num_steps < MEASURED_STEPS:
            return
        self._measurement = None
        form, bands = run.train_set.form, run.train_set.label_bands
        most, before = most_workers(run.config, form, bands), run.num_workers()
        if most > 0 and run.state.step < run.last_step:
            run.auto_workers, line = measurement.choice(most)
            self._tell([line])
            if run.auto_workers != before:
                run.reopen()
