"""Kills ranks that hang, by SIGKILL once the others time out: a hung rank ignores SIGTERM."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from segtrain.distributed.exit_status import read_exit_statuses
from segtrain.distributed.heartbeat import Heartbeat, read_heartbeats
from segtrain.distributed.launcher_folder import ensure_folder, last_attempt
from segtrain.distributed.machine import is_alive

# From the first rank that times out to SIGKILL for those that have not ended.
PATIENCE_S = 10.0
_INTERVAL_S = 0.2


class Watchdog:
    """Watches the ranks from a thread, by the launcher's `folder`; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.killed: list[Heartbeat] = []  # of the last attempt, with what they were doing
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        timed_out_at = attempt = None
        while not self._over.wait(_INTERVAL_S):
            if not ensure_folder(self._folder):
                continue  # another user's: its content cannot be trusted
            current = last_attempt(self._folder)
            if current != attempt:
                attempt, timed_out_at, self.killed = current, None, []
            statuses = read_exit_statuses(self._folder)
            if timed_out_at is None and any(status.consequence for status in statuses):
                timed_out_at = time.monotonic()
            if timed_out_at is not None and time.monotonic() - timed_out_at >= PATIENCE_S:
                self._kill_others({status.rank for status in statuses if status.code is not None})

    def _kill_others(self, ended: set[int]) -> None:
        done = ended | {killed.rank for killed in self.killed}
        for rank in read_heartbeats(self._folder):
            if rank.rank not in done and is_alive(rank.pid):
                self.killed.append(rank)
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
