"""Virtual ranks: threads of one process, each with its part of a batch.

At most `at_once` threads run at a time, by default one. Where they need a sum over all parts, each
hands in its own and lets another run; the last combines them. So the statistics are those of the
whole batch, and the device holds the workspace of few parts at a time.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_this_thread = threading.local()


class _OtherFailedError(Exception):
    """Raised in a waiting thread when another thread has failed."""


class VirtualRanks:
    """A group of `num_slots` threads; make a new group for every `run`.

    Between two meetings they start in the order of their slots: with `at_once` 1 one after another.

    Args:
        at_once: how many may run at the same time.
    """

    def __init__(self, num_slots: int, *, at_once: int = 1) -> None:
        self.num_slots = num_slots
        self._at_once = min(at_once, num_slots)
        # A thread waits by acquiring its gate; who opens it releases it, once between two meetings.
        self._gates = [threading.Lock() for _ in range(num_slots)]
        for gate in self._gates:
            gate.acquire()
        self._lock = threading.Lock()
        self._arrived = 0  # threads that have reached the next meeting, or have ended
        self._parts: list[Any] = [None] * num_slots
        self._done = [False] * num_slots
        self._combined: Any = None
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """What the functions return, each called in its thread; raises the first exception."""
        results: list[Any] = [None] * self.num_slots

        def work(slot: int) -> None:
            _this_thread.group, _this_thread.slot = self, slot
            # Waits, runs up to a meeting or its end, and there lets the next thread start.
            try:
                self._wait(slot)
                results[slot] = functions[slot]()
                self._done[slot] = True
                self._arrive()
            except BaseException as error:  # the first of all threads is raised below
                self._fail(error)

        threads = [
            threading.Thread(target=work, args=(slot,), name=f"virtual rank {slot}", daemon=True)
            for slot in range(self.num_slots)
        ]
        for thread in threads:
            thread.start()
        self._open_first()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C in the caller's thread ends all of them
            self._fail(error)
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        return results

    def size(self, processes: int) -> int:
        """The threads of so many processes."""
        return processes * self.num_slots

    def number(self, process: int) -> int:
        """This thread's among those of all processes; `process`: the number of this one."""
        return process * self.num_slots + slot()

    def add_up(
        self,
        parts: Sequence[Tensor],
        over_processes: Callable[[Tensor], Tensor],
        in_order: Callable[[Tensor, Sequence[int]], Tensor],
    ) -> Tensor:
        """The sum of all threads' parts, of which this process has `parts` (collective).

        over_processes: adds up a tensor of each process. in_order: adds up rows, of which each
            process has so many, in their order.
        """
        return over_processes(reduce(torch.add, parts))

    def gather(
        self,
        parts: Sequence[Tensor],
        of_processes: Callable[[Tensor], Tensor],
        in_order: Callable[[Tensor, Sequence[int]], Tensor],
    ) -> Tensor:
        """All threads' parts, stacked, of which this process has `parts` (collective).

        of_processes: concatenates equally many rows of each process. in_order: so many of each.
        """
        return of_processes(torch.stack(parts))

    def meet(self, part: Any, combine: Callable[[list[Any]], T]) -> T:
        """`combine` of all threads' parts in the order of slots, called once, in every thread."""
        slot = _this_thread.slot
        self._parts[slot] = part
        if self._arrive():
            # Not under the lock: Ctrl-C must get through while this waits for other processes.
            # Nor needed: all other threads wait at their gates until the first ones are opened.
            self._combined = combine(self._parts)
            self._arrived = 0
            self._open_first()
        self._wait(slot)
        return self._combined

    def _arrive(self) -> bool:
        """Lets the next thread start; whether this one is the last to arrive."""
        with self._lock:
            self._arrived += 1
            last, following = self._arrived == self.num_slots, self._arrived - 1 + self._at_once
        # `at_once` threads began; each that arrives hands its place to the next one in order.
        if following < self.num_slots:
            self._gates[following].release()
        # All end, or all meet. Otherwise some call a sum that others do not: ranks would hang.
        ended = [i for i, done in enumerate(self._done) if done]
        if last and 0 < len(ended) < self.num_slots:
            raise RuntimeError(f"virtual ranks {ended} have ended, the others wait for them")
        return last

    def _open_first(self) -> None:
        for gate in self._gates[: self._at_once]:
            gate.release()

    def _wait(self, slot: int) -> None:
        self._gates[slot].acquire()
        if self._error is not None:
            raise _OtherFailedError

    def _fail(self, error: BaseException) -> None:
        # First the error, then the gates: a thread that wakes must see why.
        with self._lock:
            if self._error is None:
                self._error = error
        for gate in self._gates:
            # One that is open already belongs to a thread that sees the error by itself.
            with suppress(RuntimeError):
                gate.release()


def current() -> VirtualRanks | None:
    """The group this thread belongs to; None outside of virtual ranks."""
    return getattr(_this_thread, "group", None)


def slot() -> int:
    """This thread's number in its group; 0 outside of virtual ranks."""
    return getattr(_this_thread, "slot", 0)
