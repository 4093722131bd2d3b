"""A process with a time limit, of which nothing is left afterwards: not its children either."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from segtrain.distributed.machine import is_alive

_MARK = "SEGTRAIN_GPU_CHECK"
_GONE_S = 10.0


class Ending(NamedTuple):
    """How a process ended; code is None if it was killed because its time was over."""

    code: int | None
    seconds: float


def run_limited(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    environment: Mapping[str, str],
    *,
    mark: str,
) -> Ending:
    """Runs `command` with its output in `log`, and kills it after `limit_s` seconds.

    Whatever it has started and left is killed too: a loader worker or a rank would keep the memory
    of the device. Such processes are known by `mark`, a variable in their environment; so those are
    found that an earlier call has left, if it was killed itself.
    """
    kill_marked(mark)
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, _MARK: mark},
            # Ctrl-C is for the driver, which then ends them all.
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            seconds = time.monotonic() - began
            kill_marked(mark)
            process.wait()
    return Ending(code, seconds)


def kill_marked(mark: str) -> None:
    """Kills all processes with this mark, those too that they start meanwhile."""
    deadline = time.monotonic() + _GONE_S
    while (pids := _marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: str) -> list[int]:
    wanted, found = f"{_MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with suppress(OSError):  # another user's, or gone
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if is_alive(pid)]
