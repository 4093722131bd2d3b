"""What each rank is doing, written to a file: a rank that hangs or was killed cannot say it."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from segtrain.distributed import launcher_folder

Phase = Literal["setup", "training", "evaluation", "checkpoint"]


class Heartbeat(NamedTuple):
    """The last heartbeat of a rank.

    step: updates done.
    since: when it was written, by time.monotonic(), which all processes of a machine share.
    """

    rank: int
    pid: int
    phase: str
    step: int
    since: float


_last: tuple[str, int] = ("setup", 0)


def beat(phase: Phase, step: int) -> None:
    """Records that this rank is in `phase` after `step` updates, for a launcher if there is one."""
    global _last
    _last = phase, step
    if launcher_folder.has_launcher():
        text = f"{os.getpid()} {phase} {step} {time.monotonic():.3f}"
        with suppress(OSError):  # the launcher is gone, or its disk full
            launcher_folder.write_file(f"{os.environ['RANK']}.now", text)


def describe() -> str:
    """This rank's last heartbeat in words."""
    phase, step = _last
    return f"in {phase}, after step {step}"


def read_heartbeats(root: Path) -> list[Heartbeat]:
    """Those of the last attempt in the launcher's folder `root`, in the order of ranks."""
    found = []
    for name, text in launcher_folder.read_files(root, ".now").items():
        with suppress(ValueError):  # the rank is writing its first
            pid, phase, step, since = text.split()
            found.append(Heartbeat(int(name), int(pid), phase, int(step), float(since)))
    return sorted(found)
