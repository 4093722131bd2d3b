"""The members of a population: their training in pieces, and the exchange between two of them."""

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Self

import torch

from segtrain import files
from segtrain.checkpoint.format import LAST
from segtrain.commands.launch import safe_path
from segtrain.config import Config
from segtrain.config.loading import yaml_value
from segtrain.distributed.signals import exit_code
from segtrain.errors import EXIT_OK, EXIT_SYSTEM, CheckpointError, ExecutionError
from segtrain.files import manifest
from segtrain.files.manifest import Entry
from segtrain.run import directory as run_directory
from segtrain.run.directory import RunLock
from segtrain.text import printable

# `python -m segtrain`, which also stops in good order when this process is killed.
PROGRAM = """\
import sys
from segtrain.distributed.signals import die_with_parent
die_with_parent()
from segtrain.cli import main
sys.exit(main())
"""
# What is shown of a failure: the last lines of a traceback, or more than any message.
_TAIL = 20
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def train_arguments(
    experiment: Path, run: Path, until: int, options: dict[str, float], seed: int
) -> list[str]:
    """The command line that trains the member in `run`, from where it is, to the step `until`."""
    settings = [f"{key}={yaml_value(value)}" for key, value in ({"seed": seed} | options).items()]
    words = ["train", str(experiment), "--output", str(run), "--until", str(until)]
    words += [word for setting in settings for word in ("--set", setting)]
    return [*words, "--resume"] if run_directory.is_run(run) else words


class Programs:
    """Runs `segtrain` commands, several at once if threads ask for it.

    In its context stop signals are passed on to all of them: the runs save and end. They also do if
    this process is killed.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
        for number, handler in self._before.items():
            # nohup has SIGHUP ignored, so that the command outlives its terminal.
            if number != signal.SIGHUP or handler != signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, _: object) -> None:
        with self._lock:
            self.received.append(number)
            for process in self._running:
                process.send_signal(number)

    def run(
        self, arguments: Sequence[str], show: Callable[[str], None], gpus: str | None = None
    ) -> int:
        """Runs `segtrain ARGUMENTS` and returns its exit code; `show` gets lines for the terminal.

        Not for the main thread: a signal that arrives while it starts a program would wait forever.
        gpus: for CUDA_VISIBLE_DEVICES; None: as it is.
        """
        with self._lock:
            if self.received:
                return exit_code(self.received[-1])
            process = subprocess.Popen(
                [sys.executable, *safe_path(), "-c", PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=os.environ | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}),
                # Ctrl-C reaches the run once, through this process: twice would end it unsaved.
                start_new_session=True,
            )
            self._running.add(process)
        tail = _follow(process, show)
        code = process.wait()
        with self._lock:
            self._running.remove(process)
        # A signal may come before the run can handle it, or when it has come to its step.
        if self.received and code <= EXIT_OK:
            return exit_code(self.received[-1])
        code = EXIT_SYSTEM if code < 0 else code
        if code and not self.received:
            for line in tail:
                show(line)
        return code


def _follow(process: subprocess.Popen, show: Callable[[str], None]) -> deque[str]:
    """Shows progress and warnings until the process closes its output; returns its last lines."""
    tail: deque[str] = deque(maxlen=_TAIL)
    with process.stdout as output:
        for raw in output:
            line = printable(raw.rstrip("\n"))
            if line.startswith(("train ", "warning:", "segtrain: warning:")):
                show(line)
            else:
                tail.append(line)
    return tail


def gpus_of_slots(at_once: int, device: str) -> list[str | None]:
    """The GPUs, for CUDA_VISIBLE_DEVICES, of each of so many members that train at once.

    Each gets its part of the GPUs, or shares one with others; None: whatever there is.
    """
    if at_once == 1 or device == "cpu" or not (count := torch.cuda.device_count()):
        return [None] * at_once
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",")[:count] if visible else [str(i) for i in range(count)]
    return [",".join(names[i::at_once]) or names[i % count] for i in range(at_once)]


def score(run: Path, step: int) -> float | None:
    """The mIoU of a run's evaluation at `step`; None if it is not a number.

    ExecutionError if metrics.jsonl has none, as after a full disk.
    """
    path, found = run / run_directory.METRICS, []
    try:
        lines = files.read_bytes(path).decode(errors="replace").splitlines()
        values = [files.parse_json(line) for line in lines if '"eval/mIoU"' in line]
        found = [one["eval/mIoU"] for one in values if one["step"] == step]
    except (OSError, ValueError, KeyError, TypeError):
        found = []
    if not found or not isinstance(found[-1], float | int | None):
        raise ExecutionError(f"{path}: has no eval/mIoU of step {step}: nothing to compare by")
    return None if found[-1] is None or not math.isfinite(found[-1]) else float(found[-1])


def take_over(loser: Path, winner: Path, config: Config, *, step: int) -> None:
    """Gives the run in `loser` the checkpoints of the run in `winner`, and `config`.

    The winner is only read, so after an interruption the same call completes the exchange. Files
    in `loser` that no run has written stay. config.yaml is replaced, rather than given by
    --accept-changes, because the run must still refuse data that have changed.

    step: that of the winner's last.pt.

    Raises:
        CheckpointError: a checkpoint of the winner is not as it was written, or of another step.
        ConfigError: one of both is in use.
        ExecutionError: the files cannot be written.
    """
    source, target = (run / run_directory.CHECKPOINTS for run in (winner, loser))
    with ExitStack() as stack:
        for run in (loser, winner):
            stack.enter_context(RunLock(run))
        known = manifest.read_entries(source)
        if step not in [entry.step for entry in known.get(LAST, ())]:
            raise CheckpointError(f"{source / LAST}: expected the checkpoint of step {step}")
        with files.os_errors_as(ExecutionError, loser, f"cannot take over from {winner.name}"):
            target.mkdir(exist_ok=True)
            # Before the manifest is replaced, which says which files are the run's own.
            for name in manifest.read_entries(target).keys() - known.keys():
                (target / name).unlink(missing_ok=True)
            copied = {
                name: [_copy(source / name, target / name, entries)]
                for name, entries in known.items()
                if os.path.lexists(source / name)
            }
            manifest.write(target, copied)
            run_directory.write_config(loser, config)
            _log(loser, f"changed    all weights: those of {winner.name} at step {step}")


def _copy(source: Path, target: Path, entries: list[Entry]) -> Entry:
    """Copies a checkpoint; returns the one of `entries` that it is."""
    with files.temporary(target) as draft:
        shutil.copyfile(source, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        sha256 = manifest.sha256_of(draft)
        matching = [entry for entry in entries if entry.sha256 == sha256]
        if not matching:
            raise CheckpointError(f"{source}: damaged: these are not the bytes that were saved")
        draft.replace(target)
    return matching[-1]


def _log(run: Path, line: str) -> None:
    time = datetime.now().isoformat(" ", "milliseconds").replace(".", ",")
    with files.open_regular(run / run_directory.LOG, "a", encoding="utf-8") as file:
        file.write(f"{time} INFO {line}\n")
