"""Signals ask the training loop to stop; the loop decides when.

A handler only sets a flag: a collective inside a handler would meet the other ranks at another
place of the program.
"""

import ctypes
import os
import signal
import sys
from types import FrameType

from segtrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

_PR_SET_PDEATHSIG = 1


class StopRequest:
    """Set by SIGTERM, SIGHUP or SIGINT; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def install(self) -> None:
        """Takes over the three signals; only in the main thread."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            os._exit(EXIT_INTERRUPTED)
        self.signal = number

    def requested(self) -> bool:
        """Whether one has arrived on this rank."""
        return self.signal is not None


def exit_code(number: int) -> int:
    """How a process ends that stopped in good order because of signal `number`."""
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED


def die_with_parent() -> None:
    """Has the kernel terminate this process when its parent dies, also by SIGKILL (Linux).

    Otherwise ranks would train on unseen after their launcher is gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
