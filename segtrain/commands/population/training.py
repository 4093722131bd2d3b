"""The training of a population: its members round by round, and the exchange between them."""

import argparse
import os
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch

from segtrain import files
from segtrain.checkpoint.format import LAST
from segtrain.commands.launch import safe_path
from segtrain.commands.population import history as record
from segtrain.commands.population.history import History, Row, with_options
from segtrain.config import Config
from segtrain.config.experiment import config_warnings
from segtrain.config.loading import yaml_value
from segtrain.distributed import signals
from segtrain.errors import (
    EXIT_NON_FINITE,
    EXIT_OK,
    EXIT_SYSTEM,
    CheckpointError,
    ExecutionError,
    NonFiniteError,
)
from segtrain.files import manifest
from segtrain.run import directory as run_directory
from segtrain.run.console import log_only
from segtrain.run.directory import RunLock
from segtrain.run.log import RunLog
from segtrain.text import printable, say

EXPERIMENT = "experiment.yaml"

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


class Population:
    """The members in `directory`; `history` is written whenever it changes."""

    def __init__(self, directory: Path, history: History, args: argparse.Namespace) -> None:
        self._directory, self._history = directory, history
        self._machine = ["--nproc", str(args.nproc), "--device", args.device]
        self._gpus = gpus_of_slots(min(args.at_once, history.members), args.device)
        self._code = EXIT_OK
        self._warned = {f"warning: {line}" for line in config_warnings(history.config)}

    def train(self) -> int:
        """Trains to the end; returns the exit code of the first member that could not."""
        programs = Programs(self._gpus)
        for number in range(len(self._history.rounds)):
            self._train_round(number, programs)
            if self._code:
                break
            self._exchange(number)
        return self._code

    def _train_round(self, number: int, programs: "Programs") -> None:
        """Trains the members that are not at the end of the round.

        Those that train beside a member that fails come to their ends; no further one begins.
        """
        history, this = self._history, self._history.rounds[number]
        members = [member for member in range(history.members) if member not in this.rows]
        going_on = [member for member in members if not history.has_diverged(member, number)]
        for member in going_on if number else ():
            if not run_directory.has_saved(run := self._run(member)):  # it would be trained anew
                what = "its checkpoints have been removed; put them back"
                raise CheckpointError(f"{run}: {what}, or start a new population by --output")
        for member in set(members) - set(going_on):
            self._record(member, number, EXIT_NON_FINITE)

        def train(member: int) -> int | None:
            """Runs in a thread; the exit code, None if the member did not begin."""
            if self._code:
                return None
            show = partial(self._show, self._run(member).name)
            code = programs.run(self._arguments(member, number), show)
            if code not in (EXIT_OK, EXIT_NON_FINITE):
                self._code = code
            return code

        with ThreadPoolExecutor(len(self._gpus)) as pool:
            futures = {pool.submit(train, member): member for member in going_on}
            try:
                for future in as_completed(futures):
                    if (code := future.result()) is not None:
                        self._record(futures[future], number, code)
            except BaseException:
                self._code = EXIT_SYSTEM  # no further one begins
                raise

    def _arguments(self, member: int, number: int) -> list[str]:
        """The command line that trains a member, from where it is, to the end of the round."""
        run, history = self._run(member), self._history
        words = ["train", str(self._directory / EXPERIMENT), "--output", str(run)]
        words += ["--until", str(history.rounds[number].step), *self._machine]
        for key, value in history.seeded(member, history.options_of(member, number)).items():
            words += ["--set", f"{key}={yaml_value(value)}"]
        return [*words, "--resume"] if run_directory.is_run(run) else words

    def _record(self, member: int, number: int, code: int) -> None:
        """Adds the result of a member to the history, and says it."""
        run, step = self._run(member), self._history.rounds[number].step
        if code not in (EXIT_OK, EXIT_NON_FINITE):
            say(
                f"{run}: ended with exit code {code} before step {step}; to go on: "
                f"segtrain population {shlex.quote(str(self._directory))} --resume"
            )
            return
        options = self._history.options_of(member, number)
        value = score(run, step) if code == EXIT_OK else None
        self._history.rounds[number].rows[member] = Row(mean_iou=value, options=options)
        record.write(self._directory, self._history)
        words = "has diverged" if value is None else f"mIoU {value:.4f}"
        values = "  ".join(f"{key} {option:g}" for key, option in options.items())
        say(f"step {step}  {run.name}  {words}  {values}")

    def _exchange(self, number: int) -> None:
        """The exchange after a round, unless it was done before an interruption."""
        history, this = self._history, self._history.rounds[number]
        if all(row.mean_iou is None for row in this.rows.values()):
            what = f"no member has a score at step {this.step}; use a smaller optim.lr"
            raise NonFiniteError(f"{self._directory}: {what}")
        if this.exchange is not None:
            return
        last = history.alone or this is history.rounds[-1]
        takeovers = [] if last else record.decide(history, number)
        for one in takeovers:
            config = with_options(history.config, history.seeded(one.member, one.options))
            loser, winner = self._run(one.member), self._run(one.source)
            take_over(loser, winner, config, step=this.step)
            say(f"step {this.step}  {loser.name} takes over from {winner.name}")
        this.exchange = takeovers
        record.write(self._directory, history)

    def _run(self, member: int) -> Path:
        return self._directory / f"member_{member}"

    def _show(self, member: str, line: str) -> None:
        line = line.removeprefix("segtrain: ")
        # Every piece of a training begins with the same warnings.
        if line not in self._warned:
            say(f"{member}: {line}")
        if line.startswith("warning:"):
            self._warned.add(line)


class Programs:
    """Runs `segtrain` commands, several at once if threads ask for it.

    From its construction on, stop signals are passed on to all of them: the runs save and end.

    gpus: for each that runs at the same time, CUDA_VISIBLE_DEVICES; None: as it is.
    """

    def __init__(self, gpus: Sequence[str | None]) -> None:
        self._slots: SimpleQueue[str | None] = SimpleQueue()
        for slot in gpus:
            self._slots.put(slot)
        self._received: list[int] = []
        self._started: list[subprocess.Popen] = []
        # Reentrant, because a second signal may come while the first is passed on.
        self._lock = threading.RLock()
        signals.handle_stop_signals(self._pass_on)

    def _pass_on(self, number: int, _: object) -> None:
        with self._lock:
            self._received.append(number)
            for process in self._started:
                process.send_signal(number)  # nothing happens to one that has ended

    def run(self, arguments: Sequence[str], show: Callable[[str], None]) -> int:
        """Runs `segtrain ARGUMENTS` and returns its exit code; waits for a free slot first.

        Not for the main thread, which handles the signals.

        show: gets the progress and the warnings, and the last lines if it fails.
        """
        gpus = self._slots.get()
        try:
            with self._lock:
                if self._received:
                    return signals.exit_code(self._received[-1])
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
                self._started.append(process)
            tail: deque[str] = deque(maxlen=_TAIL)
            with process:
                for raw in process.stdout:
                    line = printable(raw.rstrip("\n"))
                    is_news = line.startswith(("train ", "warning:", "segtrain: warning:"))
                    (show if is_news else tail.append)(line)
        finally:
            self._slots.put(gpus)
        code = process.returncode
        # A signal may come before the run can handle it, or when it has come to its step.
        if self._received and code <= EXIT_OK:
            return signals.exit_code(self._received[-1])
        if code and not self._received:
            for line in tail:
                show(line)
        return EXIT_SYSTEM if code < 0 else code


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
    """The mIoU of a run's evaluation at `step`; None: no number. ExecutionError: there is none."""
    path = run / run_directory.METRICS
    try:
        lines = map(files.parse_json, files.read_bytes(path).splitlines())
        scores = [one["eval/mIoU"] for one in lines if one["step"] == step and "eval/mIoU" in one]
        return scores[-1]
    except (OSError, ValueError, LookupError, TypeError):
        raise ExecutionError(f"{path}: has no eval/mIoU of step {step}") from None


def take_over(loser: Path, winner: Path, config: Config, *, step: int) -> None:
    """Gives the run in `loser` the checkpoints of the run in `winner`, and `config`.

    The winner is only read, so after an interruption the same call completes the exchange. Files
    in `loser` that no run has written stay. config.yaml is replaced, rather than given by
    --accept-changes, because the run must still refuse data that have changed.

    step: that of the winner's last.pt; CheckpointError if it is of another.
    """
    source, target = (run / run_directory.CHECKPOINTS for run in (winner, loser))
    with RunLock(loser), RunLock(winner):
        known = manifest.read_entries(source)
        if step not in [entry.step for entry in known.get(LAST, ())]:
            raise CheckpointError(f"{source / LAST}: expected the checkpoint of step {step}")
        known = {name: known[name] for name in known if os.path.lexists(source / name)}
        with files.os_errors_as(ExecutionError, loser, f"cannot take over from {winner.name}"):
            target.mkdir(exist_ok=True)
            # Before the manifest is replaced, which says which files are the run's own.
            for name in manifest.read_entries(target).keys() - known.keys():
                (target / name).unlink(missing_ok=True)
            for name in known:
                files.write_atomic(target / name, (source / name).read_bytes())
            manifest.write(target, known)
            run_directory.write_config(loser, config)
        with RunLog(loser, enabled=True):
            log_only(f"changed    all weights: those of {winner.name} at step {step}")
