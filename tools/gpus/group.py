"""Starts the ranks of a check, each in a process of its own, watches them and ends all of them.

A rank tells by a file what it is doing. Without news for too long the check hangs: then the stacks
of all ranks are taken, and they are killed, by their numbers.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from commands import ROOT

from gpus.report import CUT, ENDED, FAILED, HANG, PASSED, Outcome
from segtrain.distributed.machine import descendants, is_alive

POLL_S = 0.05
# After the first death in a check, for the others to say what they have seen.
_GRACE_S = 5.0
_START_S = 60.0  # at most, of Python, torch and the device
_STACK_S = 3.0  # for a process to write its stack
_TAIL = 6000  # characters of what a process has said


class Place(NamedTuple):
    """Which ranks this process starts, and with which variables.

    environ: of all. ranks: the variables of each.
    """

    environ: Mapping[str, str]
    ranks: Mapping[int, Mapping[str, str]]


def environment(**more: str) -> dict[str, str]:
    """The environment of the processes of checks."""
    paths = [str(ROOT), str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONFAULTHANDLER": "1",  # SIGABRT writes the stacks of all threads
        "PYTHONUNBUFFERED": "1",
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
        **more,
    }


def run(
    name: str,
    module: str,
    place: Place,
    options: dict[str, Any],
    folder: Path,
    limit_s: float,
    end: float = float("inf"),
) -> tuple[Outcome, str]:
    """Runs `items` of `module` on the ranks; also what the first rank began last.

    limit_s: without news, from the start of Python on. end: of all checks, by time.monotonic().
    """
    began = time.monotonic()
    ranks = {
        rank: _Rank(rank, module, place.environ | own, options, folder)
        for rank, own in place.ranks.items()
    }
    try:
        status = _watch(list(ranks.values()), limit_s, end)
    finally:
        stacks = {rank: one.end() for rank, one in ranks.items()}
    problems = [
        f"rank {rank}, {line['item']}: {problem}"
        for rank, one in ranks.items()
        for line in one.lines()
        for problem in line.get("problems", ())
    ]
    if status == HANG:
        at = ", ".join(f"rank {rank} in {one.doing()}" for rank, one in ranks.items())
        problems.append(f"hang after {limit_s:.0f} s without news: {at}")
    elif status == CUT:
        problems.append(f"no time was left, in {next(iter(ranks.values())).doing()}")
    elif status == ENDED:
        codes = {rank: one.code for rank, one in ranks.items() if one.code}
        at = ", ".join(f"rank {rank} with {code}" for rank, code in codes.items())
        problems.append(f"ended: {at}, in {next(iter(ranks.values())).doing()}")
    elif problems:
        status = FAILED
    words = [f"rank {rank}:\n{stack}" for rank, stack in stacks.items()]
    said = "" if status in (PASSED, CUT) else "\n".join(words)
    first = next(iter(ranks.values()))
    figures = {line["item"]: line["figures"] for line in first.lines() if "figures" in line}
    outcome = Outcome(name, status, time.monotonic() - began, figures, problems, said)
    return outcome, first.doing()


class _Rank:
    """A process of a check, with the files that it writes."""

    def __init__(
        self, rank: int, module: str, environ: dict[str, str], options: Any, folder: Path
    ) -> None:
        self._notes, self.output = folder / f"{rank}.jsonl", folder / f"{rank}.txt"
        self.code: int | None = None  # where it ended by itself
        command = [sys.executable, "-m", "gpus.rank", module, json.dumps(options), self._notes]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,
            )

    def lines(self) -> list[dict[str, Any]]:
        """What it has noted."""
        lines = self._notes.read_text().splitlines(True) if self._notes.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def doing(self) -> str:
        """What it began last."""
        begun = [line["begun"] for line in self.lines() if "begun" in line]
        return begun[-1] if begun else "its start"

    def end(self) -> str:
        """Ends it; the end of what it said, with its stack if it was running."""
        if self.process.poll() is None:
            take_stack(self.process.pid)
        kill_all(self.process.pid)
        self.process.wait()
        return self.output.read_text(errors="replace")[-_TAIL:]


def _watch(ranks: Sequence[_Rank], limit_s: float, end: float) -> str:
    """Waits for them; passed, hang, ended or cut off."""
    size, news, first_death = 0, time.monotonic() + _START_S, None
    while True:
        for one in ranks:
            one.code = one.process.poll()
        if all(one.code is not None for one in ranks):
            return ENDED if any(one.code for one in ranks) else PASSED
        now, size_now = time.monotonic(), sum(len(one.lines()) for one in ranks)
        if size_now > size:
            size, news = size_now, now
        if any(one.code for one in ranks):
            first_death = first_death or now
            if now - first_death > _GRACE_S:
                return ENDED
        if now - news > limit_s:
            return HANG
        if now > end:
            return CUT
        time.sleep(POLL_S)


def take_stack(pid: int) -> None:
    """Lets Python write the stacks of process `pid`, which ends by that."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGABRT)
    until(lambda: not is_alive(pid), _STACK_S)


def kill_all(pid: int) -> None:
    """Kills a process and all that it has started."""
    for one in descendants(pid):
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Waits for `condition`; whether it came within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
