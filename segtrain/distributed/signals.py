"""Signals ask the training loop to stop; the loop decides when.

A handler only sets a flag: a collective inside a handler would meet the other ranks at another
place of the program.
"""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from segtrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

# Names the launcher's process, in the environment of the ranks that it starts.
LAUNCHER = "SEGTRAIN_LAUNCHER"

_PR_SET_PDEATHSIG = 1

# How long a rank may take to stop in good order when nobody is left to wait for it.
_ORPHAN_S = 8

_launcher: int | None = None


class SignalFlags:
    """What signals have asked this rank for.

    SIGTERM, SIGHUP and SIGINT ask to stop; after SIGINT, a second signal ends the process at once.
    SIGUSR1 asks to save and go on or, with `stop_on_usr1`, to stop as well.
    """

    def __init__(self, *, stop_on_usr1: bool = False) -> None:
        self.signal: int | None = None  # the one to stop
        self._stop_on_usr1 = stop_on_usr1
        self._save = False

    def install(self) -> None:
        """Takes over the signals; only in the main thread."""
        signal.signal(signal.SIGUSR1, self._handle if self._stop_on_usr1 else self._handle_save)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if number != signal.SIGHUP or not hangup_is_ignored():
                signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        # The launcher passes a second Ctrl-C on as SIGTERM.
        if self.signal == signal.SIGINT:
            os._exit(EXIT_INTERRUPTED)
        self.signal = number
        if _launcher is not None and os.getppid() != _launcher:
            signal.alarm(_ORPHAN_S)  # unhandled, it ends the process

    def _handle_save(self, _: int, __: FrameType | None) -> None:
        self._save = True

    def stop_requested(self) -> bool:
        """Whether this rank is to stop."""
        return self.signal is not None

    def pop_save_request(self) -> bool:
        """Whether this rank has been asked to save since the last call."""
        due, self._save = self._save, False
        return due


class LauncherSignals:
    """The signals of the launcher: the first one has it stop the ranks in good order.

    Later ones are ignored, since schedulers repeat themselves while the checkpoint is being
    written; but after SIGINT, as in the ranks, a second signal ends everything at once.

    Args:
        error: what the first signal raises, given its number.
        kill: ends the ranks that would not end with this process by themselves.
    """

    def __init__(self, error: Callable[[int], Exception], kill: Callable[[], None]) -> None:
        self._error = error
        self._kill = kill
        self._first: int | None = None
        self._over = False

    def install(self) -> None:
        """Takes over the signals; only in the main thread."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if number != signal.SIGHUP or not hangup_is_ignored():
                signal.signal(number, self._handle)

    def ignore(self) -> None:
        """For when the ranks have ended: what is left to do takes no time."""
        self._over = True

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._over:
            return
        if self._first is None:
            self._first = number
            raise self._error(number)
        if self._first == signal.SIGINT:
            self._kill()
            os._exit(EXIT_INTERRUPTED)


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
    global _launcher
    _launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != _launcher:  # it was gone before the kernel was asked
        os._exit(EXIT_TERMINATED)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Has the kernel send signal `number` when this process's parent dies, even by SIGKILL (Linux).

    Otherwise ranks would train on unseen after their launcher is gone, and loader workers would
    hold their dead rank's connections open, so that the others wait for it.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
