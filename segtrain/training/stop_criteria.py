"""What ends a run before train.steps: hours that are used up, or a score that stays where it is.

Both leave the run as a normal end does: evaluated, saved, exit code 0. The learning rate is that of
the step where the run ends: its schedule follows train.steps alone, since a schedule that followed
the clock would train other weights on another machine, or after an interruption.
"""

import time
from collections.abc import Callable
from typing import Any

from segtrain.config import TrainConfig


class StopCriteria:
    """Counts hours, and evaluations without a better score, over all resumptions of a run.

    The hours are those of rank 0, which asks all ranks to end (`StepSync`): of training,
    evaluations and checkpoints, not of starting nor between interruptions. The evaluations are
    counted alike on all ranks, which have the same scores.

    saved: `fields` of a checkpoint; None: nothing was counted yet.
    score: which one must get better, in words (eval.best).
    clock: seconds, never running backwards.
    """

    def __init__(
        self,
        train: TrainConfig,
        saved: dict[str, Any] | None,
        *,
        score: str = "mIoU",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_hours, self._patience = train.max_hours, train.patience
        self._steps, self._score = train.steps, score
        self._hours_before = 0.0 if saved is None else saved["hours"]
        self.evaluations = 0 if saved is None else saved["evaluations"]
        self._clock = clock
        self._began: float | None = None

    def start(self) -> None:
        """Starts the clock."""
        self._began = self._clock()

    @property
    def hours(self) -> float:
        """Used so far, before the last interruption and since."""
        if self._began is None:
            return self._hours_before
        return self._hours_before + (self._clock() - self._began) / 3600

    def count(self, *, better: bool) -> None:
        """Takes in an evaluation."""
        self.evaluations = 0 if better else self.evaluations + 1

    def is_out_of_time(self) -> bool:
        """Whether train.max_hours are used up."""
        return self._max_hours is not None and self.hours >= self._max_hours

    def is_out_of_patience(self) -> bool:
        """Whether train.patience evaluations in a row brought no better score."""
        return self._patience is not None and self.evaluations >= self._patience

    def reason(self) -> str:
        """Why the run ends early, in words; empty if it does not."""
        if self.is_out_of_patience():
            return f"no better {self._score} in {self.evaluations} evaluations (train.patience)"
        if self.is_out_of_time():
            return f"{self._max_hours:g} hours of training are used up (train.max_hours)"
        return ""

    def completion(self, step: int, evaluated: int) -> str:
        """How far a run at `step` came if nothing is left to do; otherwise empty.

        evaluated: the step of its newest evaluation.
        """
        if step > self._steps:
            return f"{step} steps (train.steps {self._steps})"
        if evaluated == self._steps:
            return f"{step} steps"
        if evaluated == step and (reason := self.reason()):
            return f"{step} of {self._steps} steps: {reason}"
        return ""

    @property
    def key(self) -> str:
        """The option that ended the run, given that it ended early."""
        return "train.patience" if self.is_out_of_patience() else "train.max_hours"

    def fields(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"hours": self.hours, "evaluations": self.evaluations}
