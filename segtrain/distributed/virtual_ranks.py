"""Several threads of one process that advance in lockstep: virtual ranks.

Each thread works on its share of a batch. One is at work at a time; where they need a sum over all
shares, each hands in its part and lets the next one go on, and the last combines the parts. So a
device holds the workspace of one share, and whatever the shares add up to is the same as if they
were one batch.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_this_thread = threading.local()


class _LeftError(Exception):
    """Raised in a thread that waits while another one has failed."""


class VirtualRanks:
    """A group of threads that take turns; made anew for every run of them."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._turn = 0
        self._changed = threading.Condition()
        self._parts: list[Any] = [None] * num_slots
        self._done = [False] * num_slots
        self._combined: Any = None
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """What the functions return, one in each slot, run side by side.

        Raises:
            the first exception of any of them, after all threads have ended.
        """
        results: list[Any] = [None] * self.num_slots

        def work(slot: int) -> None:
            _this_thread.lockstep, _this_thread.slot = self, slot
            try:
                self._wait(slot)
                results[slot] = functions[slot]()
                self._leave(slot)
            except _LeftError:
                pass
            except BaseException as error:  # `run` raises it in the thread that waits for all
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
        except BaseException as error:  # an interrupt of the main thread ends all of them
            self._fail(error)
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        return results

    def meet(self, part: Any, combine: Callable[[list[Any]], T]) -> T:
        """`combine` of all slots' parts in the order of slots, called once, in every slot."""
        slot = _this_thread.slot
        with self._changed:
            self._parts[slot] = part
        if slot == self.num_slots - 1:
            if any(self._done):
                ended = [i for i, done in enumerate(self._done) if done]
                raise RuntimeError(f"virtual ranks {ended} have ended, rank {slot} waits for them")
            # Outside the lock: an interrupt must get through while other processes are waited for.
            self._combined = combine(self._parts)
        self._pass_on(slot)
        self._wait(slot)
        return self._combined

    def _pass_on(self, slot: int) -> None:
        with self._changed:
            self._turn = (slot + 1) % self.num_slots
            self._changed.notify_all()

    def _wait(self, slot: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == slot or self._error is not None)
            if self._error is not None:
                raise _LeftError

    def _leave(self, slot: int) -> None:
        self._done[slot] = True
        if slot == self.num_slots - 1 and not all(self._done):
            waiting = [i for i, done in enumerate(self._done) if not done]
            raise RuntimeError(f"virtual rank {slot} has ended, {waiting} wait for it")
        self._pass_on(slot)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()


def current() -> VirtualRanks | None:
    """The lockstep this thread belongs to."""
    return getattr(_this_thread, "lockstep", None)


def slot() -> int:
    """This thread's number in its lockstep; 0 outside."""
    return getattr(_this_thread, "slot", 0)
