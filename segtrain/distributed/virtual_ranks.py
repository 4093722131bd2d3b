"""Virtual ranks: threads of one process that take turns, each with its part of a batch.

Only one thread runs at a time. Where they need a sum over all parts, each hands in its own and lets
the next run; the last combines them. So the device holds the workspace of one part at a time, and
the statistics are those of the whole batch.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_this_thread = threading.local()


class _OtherFailedError(Exception):
    """Raised in a waiting thread when another thread has failed."""


class VirtualRanks:
    """A group of `num_slots` threads that take turns; make a new group for every `run`."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._turn = 0
        self._changed = threading.Condition()
        self._parts: list[Any] = [None] * num_slots
        self._done = [False] * num_slots
        self._combined: Any = None
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """What the functions return, each called in its thread; raises the first exception."""
        results: list[Any] = [None] * self.num_slots

        def work(slot: int) -> None:
            _this_thread.group, _this_thread.slot = self, slot
            try:
                self._wait_for_turn(slot)
                results[slot] = functions[slot]()
                self._finish(slot)
            except BaseException as error:  # the first of all threads is raised below
                self._fail(error)

        threads = [
            threading.Thread(target=work, args=(slot,), name=f"virtual rank {slot}", daemon=True)
            for slot in range(self.num_slots)
        ]
        for thread in threads:
            thread.start()
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

    def meet(self, part: Any, combine: Callable[[list[Any]], T]) -> T:
        """`combine` of all threads' parts in the order of slots, called once, in every thread."""
        slot = _this_thread.slot
        self._parts[slot] = part
        if slot == self.num_slots - 1:
            if any(self._done):
                ended = [i for i, done in enumerate(self._done) if done]
                raise RuntimeError(f"virtual ranks {ended} have ended, rank {slot} waits for them")
            # Not under the lock: Ctrl-C must get through while this waits for other processes.
            self._combined = combine(self._parts)
        self._next_turn(slot)
        self._wait_for_turn(slot)
        return self._combined

    def _next_turn(self, slot: int) -> None:
        with self._changed:
            self._turn = (slot + 1) % self.num_slots
            self._changed.notify_all()

    def _wait_for_turn(self, slot: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == slot or self._error is not None)
            if self._error is not None:
                raise _OtherFailedError

    def _finish(self, slot: int) -> None:
        self._done[slot] = True
        if slot == self.num_slots - 1 and not all(self._done):
            waiting = [i for i, done in enumerate(self._done) if not done]
            raise RuntimeError(f"virtual rank {slot} has ended, {waiting} wait for it")
        self._next_turn(slot)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()


def current() -> VirtualRanks | None:
    """The group this thread belongs to; None outside of virtual ranks."""
    return getattr(_this_thread, "group", None)


def slot() -> int:
    """This thread's number in its group; 0 outside of virtual ranks."""
    return getattr(_this_thread, "slot", 0)
