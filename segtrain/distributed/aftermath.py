"""What a failed rank does after its message: it cuts its connections to the others.

NCCL may wait there for ranks that in turn wait for this one. So the message and the exit status
come first, and the process ends in any case. Imports no torch.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from segtrain.errors import EXIT_INTERNAL

# How long cutting the connections may take.
LIMIT_S = 10.0


class _Aftermath:
    """One cut that is due."""

    def __init__(self, cut: Callable[[], None]) -> None:
        self._cut = cut
        self._code = EXIT_INTERNAL
        self._begun, self._done = threading.Event(), threading.Event()
        # Started now: from version 3.12 on Python starts no threads while it ends.
        threading.Thread(target=self._limit, daemon=True).start()

    def run(self, code: int) -> None:
        self._code = code
        self._begun.set()
        # What fails here has been told already, or follows from it.
        with suppress(Exception):
            self._cut()
        self._done.set()

    def _limit(self) -> None:
        self._begun.wait()
        if not self._done.wait(LIMIT_S):
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(self._code)


_due: _Aftermath | None = None


def cut_at_the_end(cut: Callable[[], None]) -> None:
    """Lets `cut` run when this process ends, after its traceback, or in `cut_now`."""
    global _due
    cut_now()
    atexit.unregister(cut_now)
    atexit.register(cut_now)
    _due = _Aftermath(cut)


def cut_now(code: int = EXIT_INTERNAL) -> None:
    """Cuts what is due; if that takes longer than LIMIT_S, ends the process with `code`."""
    global _due
    due, _due = _due, None
    if due is not None:
        due.run(code)
