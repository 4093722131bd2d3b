"""Ends a rank whose host is stuck in the driver, behind an exchange with a rank that is dead.

The driver queues about a thousand kernels. Behind one of NCCL that waits, the host soon waits too,
in C: there no error can be raised and no signal is handled. So a thread looks whether training gets
on.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from segtrain.distributed import collectives as dist
from segtrain.distributed.exit_status import write_exit_status
from segtrain.distributed.heartbeat import describe
from segtrain.distributed.launcher_folder import has_launcher
from segtrain.errors import EXIT_SYSTEM
from segtrain.text import say

# After what is raised as an error where the host is not stuck, before NCCL aborts the process.
_FACTOR = 1.25


class HostWatch:
    """Watches the steps of one rank from a thread; a context manager.

    timeout_s: train.timeout_s. In a step, this rank must start an exchange with the others within
        1.25 times that, counted from the last one.
    """

    def __init__(self, timeout_s: float) -> None:
        self._limit_s = _FACTOR * timeout_s
        self._since: float | None = None  # when the step began; None between steps
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "HostWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around what a step does on the device."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._limit_s / 10)):
            since = self._since
            if since is None:
                continue
            waited_s = time.monotonic() - max(since, dist.last_exchange())
            if waited_s > self._limit_s:
                _give_up(waited_s)


def _give_up(waited_s: float) -> None:
    """Ends this process as one that has lost the others; nothing else can end the wait."""
    if has_launcher():
        write_exit_status(EXIT_SYSTEM, consequence=True)
    else:
        where = f"waited {waited_s:.0f} s for the device, which waits for another rank"
        say(f"rank {dist.rank()}: {where}, {describe()}")
    os._exit(EXIT_SYSTEM)
