"""The members of a population: their training in pieces, and the exchange between two of them."""

import math
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

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


def run_segtrain(arguments: Sequence[str], show: Callable[[str], None]) -> int:
    """Runs `segtrain ARGUMENTS` and returns its exit code; `show` gets lines for the terminal.

    Stop signals are passed on: the run saves and ends. It also does if this process is killed.
    """
    process: subprocess.Popen | None = None
    received: list[int] = []

    def pass_on(number: int, _: object) -> None:
        received.append(number)
        if process is not None:
            process.send_signal(number)

    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    for number, handler in before.items():
        # nohup has SIGHUP ignored, so that the command outlives its terminal.
        if number != signal.SIGHUP or handler != signal.SIG_IGN:
            signal.signal(number, pass_on)
    try:
        process = subprocess.Popen(
            [sys.executable, *safe_path(), "-c", PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Ctrl-C reaches the run once, through this process: twice would end it unsaved.
            start_new_session=True,
        )
        if received:
            process.send_signal(received[-1])
        tail = _follow(process, show)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    # A signal may come before the run can handle it, or when it has come to its step.
    if received and code <= EXIT_OK:
        return exit_code(received[-1])
    code = EXIT_SYSTEM if code < 0 else code
    if code and not received:
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
        try:
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
        except OSError as error:
            where = error.filename2 or error.filename or loser
            what = f"cannot take over from {winner.name}: {error.strerror}"
            raise ExecutionError(f"{where}: {what}") from None


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
