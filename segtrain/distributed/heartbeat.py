"""What each rank is doing, written to a file: a rank that hangs or was killed cannot say it."""

import os
import time
from pathlib import Path
from typing import Literal, NamedTuple

from segtrain.distributed import launcher_folder

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
