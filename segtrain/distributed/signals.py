"""Signals ask the training loop to stop; the loop decides when.

A handler only sets a flag: a collective inside it would not match those of the other ranks.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from segtrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

# Holds the launcher's process id, in the environment of the ranks that it starts.
LAUNCHER = "SEGTRAIN_LAUNCHER"

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_PR_SET_PDEATHSIG = 1

AT_ONCE = "stopped at once by a second signal, without saving"
STOPPING = "stopping after this step, which is saved; a second Ctrl-C ends at once, without saving"

# How long a rank may take to save and stop after its launcher has died.
_ORPHAN_S = 8

_launcher: int | None = None


class SignalFlags:
    """What signals have asked this rank to do.

    SIGTERM, SIGHUP and SIGINT ask to stop; after SIGINT, a second signal ends the process at once.
    SIGUSR1 asks to save and go on or, with `stop_on_usr1`, to stop as well.
    """

    def __init__(self, *, stop_on_usr1: bool = False) -> None:
        self.signal: int | None = None  # the last that asked to stop
        self._stop_on_usr1 = stop_on_usr1
        self._save = False

    def install(self) -> None:
        """Installs the handlers; only in the main thread."""
        signal.signal(signal.SIGUSR1, self._stop if self._stop_on_usr1 else self._request_save)
        handle_stop_signals(self._stop)

    def _stop(self, number: int, _: FrameType | None) -> None:
        is_first = os.environ.get("RANK", "0") == "0"
        # The launcher passes a second Ctrl-C on as SIGTERM.
        if self.signal == signal.SIGINT:
            # Ranks of a launcher leave the word to it.
            _exit(EXIT_INTERRUPTED, AT_ONCE if is_first and LAUNCHER not in os.environ else "")
        self.signal = number
        if number == signal.SIGINT and is_first:
            _tell(STOPPING)
        # The launcher is dead, and the other ranks may be too: saving together may never end.
        if _launcher is not None and os.getppid() != _launcher:
            signal.alarm(_ORPHAN_S)  # SIGALRM has no handler, so it ends the process

    def _request_save(self, _: int, __: FrameType | None) -> None:
        self._save = True

    def stop_requested(self) -> bool:
        """Whether this rank has been asked to stop."""
        return self.signal is not None

    def pop_save_request(self) -> bool:
        """Whether this rank has been asked to save since the last call."""
        requested, self._save = self._save, False
        return requested


def raise_on_stop_signal(error: Callable[[int], Exception], kill: Callable[[], None]) -> None:
    """For the launcher: the first stop signal raises, so that the ranks are asked to stop.

    Later signals are ignored, since schedulers repeat them while the ranks save; but after SIGINT a
    second signal calls `kill` and ends this process.
    """
    first: int | None = None

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = number
            raise error(number)
        if first == signal.SIGINT:
            kill()
            _exit(EXIT_INTERRUPTED, AT_ONCE)

    handle_stop_signals(handle)


def ignore_stop_signals() -> None:
    """For the launcher after its ranks have ended: the rest takes no time."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def handle_stop_signals(handler: Callable[[int, FrameType | None], Any]) -> None:
    """Installs a handler of the signals that ask to stop; only in the main thread."""
    for number in _STOP_SIGNALS:
        # nohup has SIGHUP ignored, so that the command outlives its terminal.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def exit_code(number: int) -> int:
    """The exit code of a process that stopped in good order because of signal `number`."""
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED


def word_for(number: int) -> str:
    """What to say of a process that had nothing to save when signal `number` ended it."""
    return "interrupted" if number == signal.SIGINT else "terminated"


def exit_at_once(number: int, _: FrameType | None) -> None:
    """A handler that ends the process with a word instead of a traceback."""
    _exit(exit_code(number), word_for(number))


def _exit(code: int, message: str) -> None:
    if message:
        _tell(message)
    os._exit(code)


def _tell(message: str) -> None:
    """For handlers, where print may be in the midst of another message."""
    new_line = "\n" if os.isatty(2) else ""  # below a progress bar
    with suppress(OSError):
        os.write(2, f"{new_line}segtrain: {message}\n".encode())


def follow_launcher() -> None:
    """Lets this rank end together with what started it, without a traceback while it is set up.

    The default handlers also end a rank that waits inside a library; handlers in Python do not.
    """
    global _launcher
    _launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent()
    # In this order: a death after the call sends the signal, one before it shows here.
    if os.getppid() != _launcher:  # the launcher died before the kernel was asked
        os._exit(EXIT_TERMINATED)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Asks the kernel to send `number` when this process's parent dies, even by SIGKILL (Linux).

    Otherwise ranks would train on after their launcher has died, and loader workers would keep the
    connections of their dead rank open, so that the other ranks wait for it.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
