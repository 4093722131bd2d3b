"""What this rank is doing, for whoever has to say where it was lost.

A rank that hangs or was killed cannot say so itself. So each writes its phase and step into a file
of the launcher's directory, in place: a system call, a few times a step.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from segtrain.distributed import exit_status

Phase = Literal["setup", "training", "evaluation", "checkpoint"]

_NUM_BYTES = 80


class Heartbeat(NamedTuple):
    """The last word of one rank.

    step: updates done.
    since: when it came there, by time.monotonic(), which all processes of a machine share.
    """

    rank: int
    pid: int
    phase: str
    step: int
    since: float


_here: tuple[str, int] = ("setup", 0)
_file: int | None = None


def at(phase: Phase, step: int) -> None:
    """Says that this rank is in `phase` after `step` updates."""
    global _here
    _here = phase, step
    if exit_status.is_wanted():
        _write(f"{os.getpid()} {phase} {step} {time.monotonic():.3f}")


def _write(words: str) -> None:
    global _file
    try:
        if _file is not None and os.fstat(_file).st_nlink == 0:  # removed: begin a new one
            os.close(_file)
            _file = None
        if _file is None:
            _file = exit_status.create(f"{os.environ['RANK']}.now", os.O_WRONLY)
        os.pwrite(_file, words.ljust(_NUM_BYTES - 1).encode() + b"\n", 0)
    except OSError:
        pass  # the launcher is gone, or its disk full


def where() -> str:
    """The same in words."""
    phase, step = _here
    return f"in {phase}, after step {step}"


def read(directory: Path) -> list[Heartbeat]:
    """The last words of the ranks of the last attempt, in the order of ranks."""
    found = []
    for name, text in exit_status.notes(directory, ".now").items():
        words = text.split()
        with suppress(ValueError):  # else it is being written for the first time
            pid, phase, step, since = words
            found.append(Heartbeat(int(name), int(pid), phase, int(step), float(since)))
    return sorted(found)
