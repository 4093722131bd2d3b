"""Is every rank alive? What it is doing, how it ended, and what ends those that hang.

Exit codes do not tell a cause from its consequences: when a rank fails, the others lose their
connections to it and fail too, often before it has ended. So ranks tell the launcher that started
them by files in its private folder, which has a subfolder for each attempt. Imports no torch.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

from segtrain.distributed.machine import children, is_alive
from segtrain.errors import EXIT_INTERNAL, EXIT_OK, EXIT_SYSTEM
from segtrain.text import say

T = TypeVar("T")

# Names the launcher's folder, in the environment of the ranks.
FOLDER_VARIABLE = "SEGTRAIN_OUTCOMES"

# How often the launcher has started its ranks before, in their environment.
ATTEMPT_VARIABLE = "SEGTRAIN_ATTEMPT"

# Set for ranks that are started again because a CUDA graph did not come back.
WITHOUT_GRAPHS = "SEGTRAIN_WITHOUT_GRAPHS"

_MAX_BYTES = 128  # of a file in the folder, which is written by one system call


def has_launcher() -> bool:
    """Whether segtrain's own launcher started this process as a rank."""
    return FOLDER_VARIABLE in os.environ and "RANK" in os.environ


def store_file() -> Path | None:
    """Through which the ranks of this attempt meet; None without a launcher of segtrain."""
    return _attempt_folder() / "store" if has_launcher() else None


def _attempt_folder() -> Path:
    """This attempt's folder, created if missing; only the launcher creates the one around it."""
    folder = Path(os.environ[FOLDER_VARIABLE]) / os.environ.get(ATTEMPT_VARIABLE, "0")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _last_attempt(root: Path) -> Path:
    """The folder of the last attempt, which may not exist yet."""
    numbers = (int(path.name) for path in root.glob("*") if path.name.isdecimal())
    return root / str(max(numbers, default=0))


def _write_record(suffix: str, *values: Any) -> None:
    """Writes or replaces this rank's file with this suffix: its number and `values`, as JSON."""
    rank = int(os.environ["RANK"])
    # If the launcher is gone or its disk full, only the exit code of the process is left.
    with suppress(OSError):
        path = _attempt_folder() / f"{rank}{suffix}"
        # Not truncated first: the launcher reads at any time.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(file, "wb", buffering=0) as opened:
            opened.write(json.dumps([rank, *values]).encode().ljust(_MAX_BYTES))


def _read_records(root: Path, suffix: str, kind: Callable[..., T]) -> list[T]:
    """`kind` of each rank's values in the last attempt; skips what is no record."""
    records = []
    with suppress(OSError):  # a cleaner of /tmp may remove the folder meanwhile
        for path in _last_attempt(root).glob(f"*{suffix}"):
            with suppress(OSError, ValueError, TypeError):
                records.append(kind(*json.loads(path.read_bytes())))
    return records


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
    if has_launcher():
        _write_record(".now", os.getpid(), phase, step, time.monotonic())


def describe() -> str:
    """This rank's last heartbeat in words."""
    phase, step = _last
    return f"in {phase}, after step {step}"


def read_heartbeats(root: Path) -> list[Heartbeat]:
    """Those of the last attempt in the launcher's folder `root`, in the order of ranks."""
    return sorted(_read_records(root, ".now", Heartbeat))


class ExitStatus(NamedTuple):
    """The end of a rank."""

    rank: int
    code: int | None  # None from the start of training until it ends in good order
    consequence: bool  # it failed because another rank did
    time: float  # in seconds since the epoch


def write_exit_status(code: int | None, *, consequence: bool = False) -> None:
    """Writes or replaces the exit status of this rank."""
    _write_record(".json", code, consequence, time.time())


def read_exit_statuses(root: Path) -> list[ExitStatus]:
    """Those of the last attempt in the launcher's folder `root`, by time."""
    return sorted(_read_records(root, ".json", ExitStatus), key=lambda status: status.time)


def ask_without_graphs() -> None:
    """Asks the launcher to start the ranks again if they fail, without CUDA graphs."""
    _write_record(".graphs")


def asked_without_graphs(root: Path) -> bool:
    """Whether a rank of the last attempt has done so, in the launcher's folder `root`."""
    return bool(_read_records(root, ".graphs", lambda rank: rank))


def is_first_to_print(message: str) -> bool:
    """Whether no other rank of this machine has asked for `message`, so that it appears once."""
    # Creating a file is atomic: of several ranks only one succeeds.
    try:
        (_attempt_folder() / f"{zlib.crc32(message.encode()):08x}.said").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass  # better printed twice than never
    return True


class Watch:
    """Inside, a thread calls `_look` again and again."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            self._look()


# From the first rank that times out to SIGKILL for those that have not ended.
PATIENCE_S = 10.0


class Watchdog(Watch):
    """In the launcher: kills ranks that hang, once others have missed them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(interval_s=0.2)
        self.killed: list[Heartbeat] = []  # of the last attempt, with what they were doing
        self._folder = folder
        self._attempt: Path | None = None
        self._timed_out_at: float | None = None

    def _look(self) -> None:
        with suppress(OSError):  # a cleaner of /tmp may have removed it
            self._folder.mkdir(mode=0o700, exist_ok=True)
        # Another attempt has other processes: what is known of the last one's no longer counts.
        current = _last_attempt(self._folder)
        if current != self._attempt:
            self._attempt, self._timed_out_at, self.killed = current, None, []
        # A rank that failed as a consequence has missed another one; the clock starts with it.
        statuses = read_exit_statuses(self._folder)
        if self._timed_out_at is None and any(status.consequence for status in statuses):
            self._timed_out_at = time.monotonic()
        if self._timed_out_at is None or time.monotonic() - self._timed_out_at < PATIENCE_S:
            return
        done = {status.rank for status in statuses if status.code is not None}
        done |= {killed.rank for killed in self.killed}
        ours = children(os.getpid())
        for rank in read_heartbeats(self._folder):
            # Of a rank that is gone, another process may have the number.
            if rank.rank not in done and rank.pid in ours and is_alive(rank.pid):
                self.killed.append(rank)
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)


# After what is raised as an error where the host is not stuck, before NCCL aborts the process.
_HOST_FACTOR = 1.25


class HostWatch(Watch):
    """In a rank: ends the process if a step gets stuck in the driver.

    The driver queues about a thousand kernels. Behind one of NCCL that waits, the host soon waits
    too, in C: there no error can be raised and no signal is handled.

    timeout_s: train.timeout_s. In a step, this rank must start an exchange with the others within
        1.25 times that, counted from the last one.
    last_exchange: when that was, by time.monotonic().
    """

    def __init__(self, timeout_s: float, last_exchange: Callable[[], float]) -> None:
        self._limit_s = _HOST_FACTOR * timeout_s
        super().__init__(interval_s=min(1.0, self._limit_s / 10))
        self._last_exchange = last_exchange
        self._since: float | None = None  # when the step began; None between steps

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around what a step does on the device."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def _look(self) -> None:
        since = self._since  # read once: the main thread may end the step meanwhile
        if since is not None:
            waited_s = time.monotonic() - max(since, self._last_exchange())
            if waited_s > self._limit_s:
                _give_up(waited_s)


def _give_up(waited_s: float) -> None:
    """Ends this process as one that has lost the others; nothing else can end the wait."""
    # The launcher speaks for its ranks, and blames the one that hangs.
    if has_launcher():
        write_exit_status(EXIT_SYSTEM, consequence=True)
    else:
        where = f"waited {waited_s:.0f} s for the device, which waits for another rank"
        say(f"rank {os.environ.get('RANK', '0')}: {where}, {describe()}")
    os._exit(EXIT_SYSTEM)


# How long leaving the group after an error may take: NCCL may wait there for ranks that in turn
# wait for this one.
ABORT_LIMIT_S = 10.0


_deferred: Callable[[int | None], None] | None = None


def defer_abort(abort: Callable[[], None], code: int = EXIT_INTERNAL) -> None:
    """Lets `abort` run when this process ends, after its traceback, or in `deferred_abort`.

    code: with which the process ends if `abort` does not, unless `deferred_abort` knows it.
    """
    global _deferred
    deferred_abort()  # only one is kept, so an earlier one runs now
    begun, done, exit_code = threading.Event(), threading.Event(), [code]

    def limit() -> None:
        begun.wait()
        if not done.wait(ABORT_LIMIT_S):
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(exit_code[0])

    def run(code: int | None) -> None:
        exit_code[0] = exit_code[0] if code is None else code
        begun.set()
        # What fails here has been told already, or follows from it.
        with suppress(Exception):
            abort()
        done.set()

    # Started now: from version 3.12 on Python starts no threads while it ends.
    threading.Thread(target=limit, daemon=True).start()
    atexit.unregister(deferred_abort)
    atexit.register(deferred_abort)
    _deferred = run


def deferred_abort(code: int | None = None) -> None:
    """Runs what is deferred; if it takes over ABORT_LIMIT_S, ends the process.

    code: its exit code; None: that of `defer_abort`.
    """
    global _deferred
    run, _deferred = _deferred, None
    if run is not None:
        run(code)


def left_within(limit_s: float, leave: Callable[[], None]) -> bool:
    """Whether `leave` comes back within `limit_s`; raises what it raises.

    If not, it is left to itself, and this process will end without it.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            leave()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        # When Python ends, it gets ABORT_LIMIT_S more; then the process ends all the same.
        defer_abort(thread.join, EXIT_OK)
        return False
    if errors:
        raise errors[0]
    return True
