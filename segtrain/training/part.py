"""What goes along with a training's steps: counting, logging, keeping ranks together."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from segtrain.training.local import LocalStep
from segtrain.training.step import StepResult


class Part:
    """One of them, on each rank; it has those of these methods that it needs.

    run: the training (`trainer.training.Training`).
    """

    def around(self, run: Any) -> AbstractContextManager[object]:
        """Around what a step computes."""
        return nullcontext()

    def after_step(self, run: Any, local: LocalStep, result: StepResult) -> None:
        """Takes in a step; `run.state` is the one after it.

        Keep tensors of `result` and read them later: reading one waits for the device. A resumed
        process begins with a new part. With train.parallel hogwild, the loss is this process's.
        """

    def scalars(self) -> dict[str, float]:
        """What a log line has of this part about the steps since the line before, by tag."""
        return {}
