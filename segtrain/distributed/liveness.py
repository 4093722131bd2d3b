"""Is every rank alive? What it is doing, how it ended, and what ends those that hang.

Exit codes do not tell a cause from its consequences: when a rank fails, the others lose their
connections to it and fail too, often before it has ended.

NCCL may wait there for ranks that in turn wait for this one. So the message and the exit status
come first, and the process ends in any case. Imports no torch.
"""

import atexit
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from segtrain.distributed import launcher_folder
from segtrain.distributed.launcher_folder import ensure_folder, last_attempt
from segtrain.distributed.machine import is_alive
from segtrain.errors import EXIT_INTERNAL

Phase = Literal["setup", "training", "evaluation", "checkpoint"]


class Heartbeat(NamedTuple):
    """The last heartbeat of a rank."""

    rank: int
    pid: int
    phase: str
    step: int  # updates done
    since: float  # by time.monotonic(), which all processes of a machine share


_last: tuple[str, int] = ("setup", 0)


def beat(phase: Phase, step: int) -> None:
    """Records that this rank is in `phase` after `step` updates, for a launcher if there is one."""
    global _last
    _last = phase, step
    if launcher_folder.has_launcher():
        launcher_folder.write_record(".now", os.getpid(), phase, step, time.monotonic())


def describe() -> str:
    """This rank's last heartbeat in words."""
    phase, step = _last
    return f"in {phase}, after step {step}"


def read_heartbeats(root: Path) -> list[Heartbeat]:
    """Those of the last attempt in the launcher's folder `root`, in the order of ranks."""
    return sorted(launcher_folder.read_records(root, ".now", Heartbeat))


class ExitStatus(NamedTuple):
    """The end of a rank."""

    rank: int
    code: int | None  # None from the start of training until it ends in good order
    consequence: bool  # it failed because another rank did
    time: float  # in seconds since the epoch


def write_exit_status(code: int | None, *, consequence: bool = False) -> None:
    """Writes or replaces the exit status of this rank."""
    launcher_folder.write_record(".json", code, consequence, time.time())


def read_exit_statuses(root: Path) -> list[ExitStatus]:
    """Those of the last attempt in the launcher's folder `root`, by time."""
    statuses = launcher_folder.read_records(root, ".json", ExitStatus)
    return sorted(statuses, key=lambda status: status.time)


def is_first_to_print(message: str) -> bool:
    """Whether no other rank of this machine has asked for `message`, so that it appears once."""
    try:
        launcher_folder.write_file(message_file(message), new=True)
    except FileExistsError:
        return False
    except OSError:
        pass  # better printed twice than never
    return True


def message_file(message: str) -> str:
    """The name of the file that marks `message` as printed."""
    return f"{zlib.crc32(message.encode()):08x}.said"


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
