"""A clock for the parts of a training step."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from segtrain.distributed import collectives as dist
from segtrain.training.spans import BACKWARD, FORWARD, UPDATE

COMMUNICATION = "communication"
# Where several run at the same time, the time is the first one's.
PARTS = (COMMUNICATION, BACKWARD, FORWARD, UPDATE)

# The functions of `collectives` through which everything is sent.
_SENDERS = ("_sum_processes", "_gather_processes")


class PartClock:
    """Adds up the seconds of each part; together they are not more than the time that passed.

    Parts may run in several threads, and within each other: sums over ranks, within a forward pass.
    On a device the clock waits for it at every border, so nothing overlaps.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device = device
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._since = time.perf_counter()

    def enter(self, name: str) -> None:
        """A part begins."""
        self._turn(name, +1)

    def leave(self, name: str) -> None:
        """It ends."""
        self._turn(name, -1)

    def _turn(self, name: str, change: int) -> None:
        synchronize(self._device)
        with self._lock:
            now = time.perf_counter()
            current = next((part for part in PARTS if self._running[part]), None)
            if current is not None:
                self.seconds[current] += now - self._since
            self._running[name] += change
            self._since = now

    @contextmanager
    def of_collectives(self) -> Iterator[None]:
        """Inside, what is sent between ranks counts as communication."""
        senders = {name: getattr(dist, name) for name in _SENDERS}
        start_sum = dist.start_sum

        def timed_start(tensor: torch.Tensor) -> Callable[[], object]:
            return self._timed(self._timed(start_sum)(tensor))

        for name, function in senders.items():
            setattr(dist, name, self._timed(function))
        dist.start_sum = timed_start
        try:
            yield
        finally:
            for name, function in senders.items():
                setattr(dist, name, function)
            dist.start_sum = start_sum

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(COMMUNICATION)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave(COMMUNICATION)

        return timed


def synchronize(device: torch.device) -> None:
    """Waits until `device` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
