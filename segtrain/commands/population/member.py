"""One piece of the training of a member: `segtrain train --until` in a process of its own."""

import math
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from segtrain import files
from segtrain.commands.launch import safe_path
from segtrain.config.loading import yaml_value
from segtrain.distributed.signals import exit_code
from segtrain.errors import EXIT_OK, EXIT_SYSTEM, ExecutionError
from segtrain.run import directory as run_directory
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
