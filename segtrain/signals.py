"""Signals ask the training loop to stop; the loop decides when.

A handler only sets a flag: a collective inside a handler would meet the other ranks at another
place of the program.
"""

import os
import signal
import sys
from types import FrameType

from segtrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

_PR_SET_PDEATHSIG = 1


class StopRequest:
    """Set by SIGTERM, SIGHUP or SIGINT; after SIGINT, a second signal ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def install(self) -> None:
        """Takes over the three signals; only in the main thread."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if number != signal.SIGHUP or not hangup_is_ignored():
                signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        # The launcher passes a second Ctrl-C on as SIGTERM.
        if self.signal == signal.SIGINT:
            os._exit(EXIT_INTERRUPTED)
        self.signal = number

    def requested(self) -> bool:
        """Whether one has arrived on this rank."""
        return self.signal is not None


def hangup_is_ignored() -> bool:
    """Whether the command was started by nohup, which is to outlive its terminal."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def exit_code(number: int) -> int:
    """How a process ends that stopped in good order because of signal `number`."""
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED


def follow_launcher() -> None:
    """Has this rank end with its launcher, and quietly while there is nothing to save yet.

    Without a handler in Python a signal also ends a rank that waits inside a library.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Has the kernel send signal `number` when this process's parent dies, even by SIGKILL (Linux).

    Otherwise ranks would train on unseen after their launcher is gone, and loader workers would
    hold their dead rank's connections open, so that the others wait for it.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
