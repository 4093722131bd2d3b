"""Ends ranks that hang: the launcher's watch over them.

The others notice one that does not come, by their timeout, and leave; it is deaf to SIGTERM too.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from segtrain.distributed import exit_status, heartbeat
from segtrain.distributed.heartbeat import Heartbeat
from segtrain.distributed.processes import is_alive

# From the first rank that gives up waiting to SIGKILL for those that have not.
PATIENCE_S = 10.0


class Watchdog:
    """Watches the notes in the launcher's `directory` from a thread, as a context manager."""

    def __init__(self, directory: Path, *, patience_s: float = PATIENCE_S) -> None:
        self.ended: list[Heartbeat] = []  # of the last attempt, with what they were doing
        self._directory = directory
        self._patience_s = patience_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        noticed = attempt = None
        while not self._over.wait(0.2):
            if not exit_status.keep_root(self._directory):
                continue  # somebody else's: what stands there is not to be believed
            current = exit_status.last_attempt(self._directory)
            if current != attempt:
                attempt, noticed, self.ended = current, None, []
            notes = exit_status.read(self._directory)
            if noticed is None and any(note.consequence for note in notes):
                noticed = time.monotonic()
            if noticed is None or time.monotonic() - noticed < self._patience_s:
                continue
            left = {note.rank for note in notes if note.code is not None}
            known = {one.rank for one in self.ended}
            for rank in heartbeat.read(self._directory):
                if rank.rank not in left | known and is_alive(rank.pid):
                    self.ended.append(rank)
                    with suppress(ProcessLookupError):
                        os.kill(rank.pid, signal.SIGKILL)
