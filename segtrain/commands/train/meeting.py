"""With train.parallel hogwild: where processes that do not wait for each other meet."""

import time
from collections.abc import Callable, Iterator

import torch

from segtrain.distributed import collectives as dist
from segtrain.distributed.shared_memory import shared_copies
from segtrain.errors import LostRanksError
from segtrain.training.engine import StepResult
from segtrain.training.step_sync import StepSync

# Steps by which a process may be ahead of the slowest. Each has its share of the images, so whoever
# runs farther ahead only waits at the next meeting, where a stop would have to wait with it.
_MAX_LEAD = 4
_SLEEP_S = 1e-3


class Meeting:
    """Brings the processes to the same step, where a run evaluates, saves or stops (collective).

    A process that is asked for it tells the others through shared memory. All then go on to the
    step of the one that is farthest.

    step: updates done so far. timeout_s: how long to wait for a slower process.
    step_sync: of this process alone; gets what all agree on.
    stop_requested, save_requested, end_requested: as for `StepSync`.
    """

    def __init__(
        self,
        step_sync: StepSync,
        *,
        step: int,
        timeout_s: float,
        stop_requested: Callable[[], bool],
        save_requested: Callable[[], bool],
        end_requested: Callable[[], bool],
    ) -> None:
        self._step_sync = step_sync
        self._requests = stop_requested, save_requested, end_requested
        self._timeout_s = timeout_s
        # Of all processes: whether one asked for a meeting, and the updates that each has done.
        self._asked, self._steps = shared_copies(
            [torch.zeros(1, dtype=torch.int64), torch.full((dist.world_size(),), step)]
        )
        self._wishes = [False] * 3  # to stop, save and end
        self._next: int | None = None  # the step after which all meet, once it is agreed

    def steps(self, steps: Iterator[StepResult]) -> Iterator[StepResult]:
        """The same steps, each of this process alone.

        Raises:
            LostRanksError: another process stands still.
        """
        while True:
            self._wait_for_slowest()
            with dist.alone():
                result = next(steps, None)
            if result is None:
                return
            self._steps[dist.rank()] = result.step
            yield result

    def _wait_for_slowest(self) -> None:
        began = time.monotonic()
        while self._steps[dist.rank()] - self._steps.min() >= _MAX_LEAD:
            if self._asked.item():
                return  # that process waits at a meeting, which is after the next step
            if time.monotonic() - began > self._timeout_s:
                raise LostRanksError(
                    f"rank {dist.rank()}: waited {self._timeout_s:.0f} s for rank "
                    f"{self._steps.argmin()}, which is alive but does not come"
                )
            time.sleep(_SLEEP_S)

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
