"""Commands of segtrain as programs of their own, for a command that trains several runs."""

import argparse
import os
import re
import shlex
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch

from segtrain import files
from segtrain.commands.launch import interpreter
from segtrain.config import Config, config_to_yaml
from segtrain.config.experiment import config_warnings, wrong_units
from segtrain.data.read.protect import check_run_directory
from segtrain.distributed import signals, slurm
from segtrain.errors import EXIT_OK, EXIT_SYSTEM, ConfigError, ExecutionError
from segtrain.run.directory import CONFIG, is_run
from segtrain.run.division import EXPERIMENT
from segtrain.text import printable, say

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


def refuse_ranks() -> None:
    """ConfigError if torchrun or srun has started this: each rank would train all of the runs."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ or slurm.is_task(os.environ):
        what = "torchrun or srun has started this as one of several ranks"
        raise ConfigError(f"environment: {what}; start it once, --nproc gives each training ranks")


def place_of(args: argparse.Namespace, ending: str) -> Path:
    """The directory of the runs to begin: --output, or named after the config."""
    path = Path(args.config)
    name = path.parent.name if path.name == CONFIG else path.stem
    return args.output or Path("runs") / f"{name}_{ending}"


def check_new(directory: Path, config: Config, left: re.Pattern[str]) -> None:
    """ConfigError if runs of `config` cannot begin in `directory`.

    left: the names of what a killed process may leave there.
    """
    if wrong := wrong_units(config):
        raise ConfigError("\n".join(wrong))
    files.check_utf8(directory)
    check_run_directory(directory, config.data)
    if directory.is_dir() and not all(left.fullmatch(path.name) for path in directory.iterdir()):
        repair = "go on by --resume, or choose another --output"
        raise ConfigError(f"{directory}: is not empty; {repair}")


def check_same(command: str, directory: Path, differences: Sequence[str]) -> None:
    """ConfigError if options differ from those that `directory` was started with."""
    if differences:
        again = f"segtrain {command} {shlex.quote(str(directory))} --resume"
        again = f"to go on as it was: {again} (if {EXPERIMENT} or data changed, undo that first)"
        lines = [f"{directory}: was started otherwise", *differences]
        raise ConfigError("\n".join(["\n  ".join(lines), again]))


def write_experiment(directory: Path, config: Config) -> None:
    """Writes the config of all runs; ExecutionError if it cannot."""
    with files.os_errors_as(ExecutionError, directory / EXPERIMENT, "cannot be written"):
        files.write_atomic(directory / EXPERIMENT, config_to_yaml(config))


class Programs:
    """Runs `segtrain` commands, several at once if threads ask for it.

    From its construction on, stop signals are passed on to all of them: the runs save and end.

    gpus: for each that runs at the same time, CUDA_VISIBLE_DEVICES; None: as it is.
    """

    def __init__(self, gpus: Sequence[str | None]) -> None:
        # A program takes a slot and puts it back; while there is none it waits.
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
            # Under the lock: a signal either prevents this start, or reaches the process.
            with self._lock:
                if self._received:
                    return signals.exit_code(self._received[-1])
                process = subprocess.Popen(
                    [*interpreter(), "-c", PROGRAM, *arguments],
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
                # Read to the end: a full pipe would stop the run.
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
        # A run that was stopped has no failure to show.
        if code and not self._received:
            for line in tail:
                show(line)
        # Killed by a signal that was not sent from here, such as where memory ran out.
        return EXIT_SYSTEM if code < 0 else code


def gpus_of_slots(at_once: int, device: str) -> list[str | None]:
    """The GPUs, for CUDA_VISIBLE_DEVICES, of each of so many members that train at once.

    Each gets its part of the GPUs, or shares one with others; None: whatever there is.
    """
    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if at_once == 1 or not count:
        return [None] * at_once
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # By the names that this process was given: its device 0 may be another one of the machine.
    names = visible.split(",")[:count] if visible else [str(i) for i in range(count)]
    return [",".join(names[i::at_once]) or names[i % count] for i in range(at_once)]


class News:
    """Says what runs report, each warning once; those about `config` are said already."""

    def __init__(self, config: Config) -> None:
        self._warned = {f"warning: {line}" for line in config_warnings(config)}

    def say(self, run: str, line: str) -> None:
        """Says a line of the run of this name."""
        line = line.removeprefix("segtrain: ")
        # Every piece of a training begins with the same warnings.
        if line not in self._warned:
            say(f"{run}: {line}")
        if line.startswith("warning:"):
            self._warned.add(line)


@contextmanager
def in_turn(
    args: argparse.Namespace, config: Config
) -> Iterator[Callable[[str, Sequence[str]], int]]:
    """Lets the main thread run `segtrain` commands one after another, each in its own process.

    Yields a function of the name of a run and of the words of a command: it says what the command
    reports of the run, and returns its exit code.
    """
    programs, news = Programs([None]), News(config)
    machine = ["--nproc", str(args.nproc), "--device", args.device]
    # Programs run in a thread: the main one handles signals.
    with ThreadPoolExecutor(1) as pool:

        def run(name: str, words: Sequence[str]) -> int:
            show = partial(news.say, name)
            return pool.submit(programs.run, [*words, *machine], show).result()

        yield run
    # Nothing is left to save.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signals.exit_at_once)


def training_of(directory: Path, run: str, options: Sequence[str]) -> list[str]:
    """The words that train a run below `directory`, or go on; options: for --set."""
    words = ["train", str(directory / EXPERIMENT), "--output", str(directory / run)]
    words += [f"--set={text}" for text in options]
    return [*words, "--resume"] if is_run(directory / run) else words
