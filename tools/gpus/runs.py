"""Whole `segtrain train` commands: how they end, by themselves, asked to, killed, out of memory."""

import itertools
import math
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from commands import DEMO, command, draw_scenes, logged, settings

from gpus import group
from gpus.report import FAILED, HANG, PASSED, Outcome
from segtrain.distributed.machine import children, descendants, is_alive, resident_bytes
from segtrain.errors import EXIT_OK, EXIT_SYSTEM, EXIT_TERMINATED

# Each way out has so long, from what asks for it until no process is left.
GONE_WITHIN_S = 30.0
_TIMEOUT_S = 12  # train.timeout_s: with what launcher and watchdog add, less than that
_STEPS = 12
_HOOKS = Path(__file__).with_name("hooks.py")
_NOT_RECORDED = "recorded as a CUDA graph"

Figures = dict[str, Any]


class HangError(Exception):
    """A run did not come to something in time; its message says to what."""


class Lab:
    """Runs commands on `ranks` ranks, in `folder`.

    environ: for all of them. limit_s: for the start of a run, until its first step.
    """

    def __init__(
        self, folder: Path, ranks: int, device: str, environ: Mapping[str, str], limit_s: float
    ) -> None:
        self.ranks, self.limit_s = ranks, limit_s
        self._folder, self._device, self._environ = folder, device, environ
        size, scenes = ((64, 128), 32) if device == "cuda" else ((32, 64), 8)
        self._data = draw_scenes(folder / "scenes", scenes, 4, size)
        self._size, self._numbers = size, itertools.count()

    def start(
        self, name: str, *words: object, steps: int = _STEPS, full: int | None = None, **more: Any
    ) -> "Run":
        """Starts the run `name`; full: the rank without memory for a graph."""
        replays = self._folder / f"{next(self._numbers)}.replays"
        replays.mkdir()
        environ = self._environ | {"GPUS_REPLAYS": str(replays)}
        if self._device == "cpu":
            environ |= {"GPUS_RECORDER": "1"}
        if full is not None:
            environ |= {"GPUS_FULL_RANK": str(full)}
        options = {"train__graph": True, "train__steps": steps, "eval__every_steps": None} | more
        same = settings(
            plugins=[str(_HOOKS)],
            data__root=self._data,
            augment__crop_size=self._size,
            model__num_stages=2,
            model__output_stride=8,
            train__batch_size=2 * self.ranks,
            train__timeout_s=_TIMEOUT_S,
            schedule__warmup_steps=2,
            log__every_steps=1,
            log__charts=False,
            **options,
        )
        where = ["--device", self._device, "--nproc", self.ranks, "--output", self._folder / name]
        words = command("train", DEMO, *where, *same, *words)
        return Run(self._folder / name, words, environ, replays, self.limit_s)


class Run:
    """One command, running in a session of its own.

    output: what it has said. replays: the folder of `hooks.count_replays`.
    """

    def __init__(
        self,
        directory: Path,
        words: list[str],
        environ: Mapping[str, str],
        replays: Path,
        limit_s: float,
    ) -> None:
        self.directory, self._replays, self._limit_s = directory, replays, limit_s
        self._before = len(logged(directory, "train/loss"))
        self._output = replays.with_suffix(".txt")
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environ),
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def ranks(self) -> list[int]:
        """The process ids of the ranks, in their order."""
        return [pid for pid in children(self.process.pid) if _is_rank(pid)]

    def wait_for_steps(self, count: int) -> None:
        """Returns when it has logged so many steps, of this command."""

        def is_there() -> bool:
            num = len(logged(self.directory, "train/loss")) - self._before
            return num >= count or self.process.poll() is not None

        if not group.until(is_there, self._limit_s):
            raise HangError(f"not at its step {count} after {self._limit_s:.0f} s")

    def wait(self, what: str) -> tuple[int, float]:
        """The exit code, and the seconds until no process of it was left."""
        began, everyone = time.monotonic(), descendants(self.process.pid)
        if not group.until(lambda: self.process.poll() is not None, GONE_WITHIN_S):
            raise HangError(f"not ended {GONE_WITHIN_S:.0f} s after {what}")
        left_s = began + GONE_WITHIN_S - time.monotonic()
        if not group.until(lambda: not any(map(is_alive, everyone)), left_s):
            raise HangError(f"processes are left {GONE_WITHIN_S:.0f} s after {what}")
        return self.process.returncode, time.monotonic() - began

    def replays(self) -> list[int]:
        """How many steps each rank has replayed, of those that ended by themselves."""
        return [int(file.read_text()) for file in sorted(self._replays.iterdir())]

    def kill(self) -> None:
        """Kills what is left, after the stacks of the ranks are taken."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGSTOP)  # or the launcher would end the ranks
            for rank in self.ranks():
                group.take_stack(rank)
        group.kill_all(self.process.pid)
        self.process.wait()


def outcome(name: str, lab: Lab, check: Callable[[Lab, list[Run]], Figures]) -> Outcome:
    """What became of `check`, which appends the runs that it starts and asserts what must be."""
    began, started, figures, problems, status = time.monotonic(), [], {}, [], PASSED
    try:
        figures = check(lab, started)
    except HangError as error:
        status, problems = HANG, [str(error)]
    except AssertionError as error:
        status, problems = FAILED, [str(error)]
    finally:
        for run in started:
            run.kill()
    said = "" if status == PASSED else "\n".join(run.output[-6000:] for run in started[-2:])
    return Outcome(name, status, time.monotonic() - began, {name: figures}, problems, said)


def ends_by_itself(lab: Lab, started: list[Run]) -> Figures:
    """From the last step to the end of all processes, with the last evaluation."""
    started.append(run := lab.start("whole"))
    run.wait_for_steps(_STEPS)
    code, seconds = run.wait("its last step")
    _expect(code, EXIT_OK, run)
    replays = run.replays()
    assert len(replays) == lab.ranks, f"steps were replayed on {len(replays)} ranks: {replays}"
    assert min(replays) > 0, f"steps were replayed on the ranks: {replays}"
    return {"s to the end": seconds, "replays": replays}


def pauses_and_resumes(lab: Lab, started: list[Run]) -> Figures:
    """--until, --resume, SIGTERM in replayed steps, and --resume to the end."""
    figures = {}
    started.append(run := lab.start("parts", "--until", 6, steps=200))
    run.wait_for_steps(6)
    code, figures["pause, s"] = run.wait("the step of --until")
    _expect(code, EXIT_OK, run)
    assert "paused after step 6" in run.output, "it did not say that it paused"
    started.append(run := lab.start("parts", "--resume", steps=200))
    run.wait_for_steps(6)
    run.process.send_signal(signal.SIGTERM)
    code, figures["SIGTERM, s"] = run.wait("SIGTERM")
    _expect(code, EXIT_TERMINATED, run)
    steps = len(logged(run.directory, "train/loss"))
    assert "stopped by SIGTERM" in run.output, "it did not say that it stopped"
    started.append(run := lab.start("parts", "--resume", "--until", steps + 5, steps=200))
    run.wait_for_steps(5)
    code, figures["end of the resumed run, s"] = run.wait("its last step")
    _expect(code, EXIT_OK, run)
    return figures


def survives_a_kill(lab: Lab, started: list[Run]) -> Figures:
    """kill -9 of the last rank in replayed steps: a message, and nothing is left."""
    started.append(run := lab.start("killed", steps=100_000))
    run.wait_for_steps(8)
    with suppress(ProcessLookupError):
        os.kill(run.ranks()[-1], signal.SIGKILL)
    code, seconds = run.wait("kill -9 of a rank")
    _expect(code, EXIT_SYSTEM, run)
    said = [line for line in run.output.splitlines() if "SIGKILL" in line]
    assert said, "no line names SIGKILL"
    return {"s to the end": seconds, "said": said[-1]}


def goes_on_without_memory(lab: Lab, started: list[Run]) -> Figures:
    """One rank cannot record: all go on eagerly, and one line says so."""
    started.append(run := lab.start("full", full=lab.ranks - 1))
    run.wait_for_steps(_STEPS)
    code, seconds = run.wait("its last step")
    _expect(code, EXIT_OK, run)
    lines = [line for line in run.output.splitlines() if _NOT_RECORDED in line]
    lines = [line for line in lines if "from step" not in line]  # the plan, said at the start
    assert len(lines) == 1, f"{len(lines)} lines say that a step cannot be recorded: {lines}"
    replays = run.replays()
    assert not any(replays), f"ranks went on with graphs beside one without: {replays} replays"
    return {"s to the end": seconds, "said": lines[0]}


def proves_its_graph(lab: Lab, started: list[Run]) -> Figures:
    """What a run with train.graph: auto says of its graph."""
    started.append(run := lab.start("auto", train__graph="auto"))
    run.wait_for_steps(_STEPS)
    code, seconds = run.wait("its last step")
    _expect(code, EXIT_OK, run)
    log = (run.directory / "train.log").read_text()
    said = [line for line in log.splitlines() if "graph" in line.lower()]
    return {"s to the end": seconds, "replays": run.replays(), "said": said[:8]}


def endures(lab: Lab, started: list[Run], seconds: float, every: int) -> Figures:
    """Trains for so long, with an evaluation every so many steps, and stops by SIGTERM."""
    options = {"steps": 10**6, "eval__every_steps": every}
    started.append(run := lab.start("soak", **options))
    run.wait_for_steps(8)
    ranks, early = run.ranks(), sum(map(resident_bytes, run.ranks()))
    ended = group.until(lambda: run.process.poll() is not None, seconds)
    assert not ended, f"ended with {run.process.returncode} before it was asked to"
    late = sum(map(resident_bytes, ranks))
    run.process.send_signal(signal.SIGTERM)
    code, gone_s = run.wait("SIGTERM")
    _expect(code, EXIT_TERMINATED, run)
    losses, times = logged(run.directory, "train/loss"), logged(run.directory, "time/step_s")
    assert all(map(math.isfinite, losses)), "a loss is not finite"
    part = max(1, len(times) // 4)
    return {
        "s": seconds,
        "steps": len(losses),
        "evaluations": len(logged(run.directory, "eval/mIoU")),
        "ms a step, first and last quarter": [
            1e3 * statistics.median(some) for some in (times[:part], times[-part:])
        ],
        "memory of the ranks, late / early": late / early,
        "SIGTERM, s": gone_s,
    }


def _expect(code: int, expected: int, run: Run) -> None:
    assert code == expected, f"exit code {code} instead of {expected}: {run.output[-300:]}"


def _is_rank(pid: int) -> bool:
    try:
        return b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone
        return False
