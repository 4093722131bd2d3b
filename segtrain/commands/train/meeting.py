"""With train.parallel hogwild: where processes that do not wait for each other meet."""

from collections.abc import Callable, Iterator

import torch

from segtrain.distributed import collectives as dist
from segtrain.distributed.shared_memory import shared_copies
from segtrain.training.engine import StepResult
from segtrain.training.step_sync import StepSync


class Meeting:
    """Brings the processes to the same step, where a run evaluates, saves or stops (collective).

    A process that is asked for it tells the others through shared memory. All then go on to the
    step of the one that is farthest.

    step_sync: of this process alone; gets what all agree on.
    stop_requested, save_requested, end_requested: as for `StepSync`.
    """

    def __init__(
        self,
        step_sync: StepSync,
        *,
        stop_requested: Callable[[], bool],
        save_requested: Callable[[], bool],
        end_requested: Callable[[], bool],
    ) -> None:
        self._step_sync = step_sync
        self._requests = stop_requested, save_requested, end_requested
        (self._asked,) = shared_copies([torch.zeros(1, dtype=torch.int64)])
        self._wishes = [False] * 3  # to stop, save and end
        self._next: int | None = None  # the step after which all meet, once it is agreed

    def steps(self, steps: Iterator[StepResult]) -> Iterator[StepResult]:
        """The same steps, each of this process alone."""
        while True:
            with dist.alone():
                result = next(steps, None)
            if result is None:
                return
            yield result

    def has_begun(self, step: int, *, due: bool) -> bool:
        """Whether all processes have done `step` and wait for each other here.

        due: all processes meet after this step.

        Raises:
            NonFiniteError: a loss or gradient of this process was not finite.
        """
        requests = zip(self._requests, self._wishes, strict=True)
        self._wishes = [requested() or wish for requested, wish in requests]
        if any(self._wishes):
            self._asked.fill_(1)
        is_here = step == self._next if self._next is not None else due or self._asked.item()
        if not is_here:
            return False
        with dist.alone():
            self._step_sync.settle()
        while True:
            steps, *wishes = zip(*dist.all_gather_object([step, *self._wishes]), strict=True)
            self._next = max(steps)
            if step < self._next:
                return False
            if min(steps) == step:
                break  # nobody is on the way any more
        self._next, self._wishes = None, [False] * 3
        if dist.is_main():
            self._asked.zero_()  # who has another wish meanwhile says so again after its next step
        self._step_sync.ask(*map(any, wishes))
        return True
