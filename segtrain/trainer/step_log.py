"""The log of the steps: means between two lines, a progress bar, a picture of the first batch."""

import time
from typing import Any

from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.run.console import ProgressBar, progress_words
from segtrain.run.pictures import training_picture
from segtrain.task.tasks import task_of
from segtrain.training.local import LocalStep
from segtrain.training.part import Part
from segtrain.training.receipt_meter import StepMeter
from segtrain.training.step import StepResult


class StepLog(Part):
    """Logs the steps of a run, from `begin` to `close`; `meter`: between two lines."""

    def __init__(self, config: Config, meter: StepMeter) -> None:
        self.meter, self._config = meter, config
        self._values: dict[str, float] = {}  # of the last line
        self._bar: ProgressBar | None = None

    def begin(self, step: int) -> None:
        """Training begins, or goes on, after `step`: starts the clock and the bar."""
        self.meter.start()
        steps = self._config.train.steps
        self._bar = ProgressBar(steps, step, "train", enabled=dist.is_main())

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()

    def after_step(self, run: Any, local: LocalStep, result: StepResult) -> None:
        """Counts the step; writes a line, if it is time to."""
        is_first = not self._values and not self.meter.num_steps
        run.log.begin()
        self.meter.update(result)
        if result.step % self._config.log.every_steps == 0 or result.step == run.config.train.steps:
            self.write(run)
        self._bar.update()
        if is_first:  # last: TensorBoard, which it imports, is not waited for to see a first step
            self._show(run, local, result.step - 1)

    def write(self, run: Any) -> None:
        """Logs the means over the steps since the line before."""
        # On all ranks, after the same steps: receipts are gathered from all of them.
        self._values = self.meter.read() | run.way.scalars()
        run.log.scalars(run.state.step, self._values)
        run.flush_receipts()
        self._bar.describe(*progress_words(self._values, run.best))

    def go_on(self, run: Any, began: float) -> None:
        """Training goes on after what `began`, by time.perf_counter(), and does not count."""
        if self._values:  # an evaluation may have found another best score
            self._bar.describe(*progress_words(self._values, run.best))
        self.meter.skip(time.perf_counter() - began)

    def _show(self, run: Any, local: LocalStep, step: int) -> None:
        """A wrong label file or augmentation is seen here within a minute."""
        batch = local.batches[0]
        if run.log.enabled and batch.names:
            value_range = self._config.data.value_range
            task = task_of(run.config.task)
            key = task.key(run.train_set.classes)
            picture = training_picture(batch, task.shown, key, value_range)
            run.log.picture(step, "train/batch", picture)
