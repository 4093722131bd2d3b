"""`segtrain train --fit`: the way of computing the recipe's batch that this machine has memory for.

Ways are tried from the fastest to the one that needs least, each by `segtrain bench --memory` in
processes of its own: one that runs out of memory ends alone. What is chosen joins the config of the
run as --set would, so a resumed run keeps it.
"""

import argparse
import json
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from segtrain.commands.launch import interpreter
from segtrain.config import Config, load_config
from segtrain.distributed.machine import MEMORY_MARGIN, available_memory, process_memory
from segtrain.errors import (
    EXIT_MEMORY,
    EXIT_TERMINATED,
    ConfigError,
    ExecutionError,
    MemoryLimitError,
)
from segtrain.text import printable_lines, say

_LEVELS = ("none", "norm", "blocks")  # of model.recompute
_LOWER = "bfloat16"
_KEYS = ("model.recompute", "train.virtual_ranks", "train.precision")
_GIB = 2**30
_SPENT = "out of memory"

Way = dict[str, Any]  # options by their names; none: the config as it is


class Trial(NamedTuple):
    """What a few steps of a way took.

    step_s: None: they did not come to an end.
    problem: why the way does not fit; empty: it does.
    """

    step_s: float | None
    needed: str
    problem: str


def fitted(args: argparse.Namespace, source: Path, config: Config, num_ranks: int) -> list[str]:
    """The options, as `section.key=value`, with which `config` fits this machine.

    args: those of `segtrain train`: set, device, fit_precision. source: the file of `config`.

    Raises:
        ConfigError: the config is one whose steps cannot be tried.
        MemoryLimitError: no way fits.
        ExecutionError: a trial failed for another reason.
    """
    from segtrain.distributed.process_group import device_for

    if config.train.is_asynchronous:
        way = f"train.parallel: {config.train.parallel}"
        raise ConfigError(f"--fit: has no effect with {way}; remove one of them")
    device = device_for(args.device).type
    limit = process_memory()
    num_bytes = available_memory()
    # A limit of each process may be tighter than the memory of the machine.
    if limit is not None:
        num_bytes = min(num_bytes, num_ranks * limit)
    images = config.train.batch_size // config.train.accumulate_steps // num_ranks
    tried: list[Trial] = []
    for way in ways(config, images, on_cuda=device == "cuda", lower=args.fit_precision):
        overrides = [f"{key}={value}" for key, value in way.items()]
        if not _is_allowed(source, [*args.set, *overrides]):
            continue
        say(f"fit        trying {_words(way)}")
        trial = _try(args, source, overrides, num_ranks, device, num_bytes)
        tried.append(trial)
        if not trial.problem:
            for line in _choice(way, trial, tried[0], config.train.steps):
                say(line)
            return overrides
        say(f"fit        does not fit: {trial.problem}")
    height, width = config.augment.crop_size
    more = "" if args.fit_precision else ", --fit-precision"
    raise MemoryLimitError(
        f"--fit: no way was found to train with train.batch_size {config.train.batch_size} and "
        f"crops of {height}x{width} here, and the last one said: {tried[-1].problem}; use smaller "
        f"crops, a smaller batch, a smaller model{more}, or a machine with more memory; for images "
        "that are evaluated, a smaller eval.crop_size"
    )


def kept(directory: Path) -> list[str]:
    """The options that the run in `directory` was started with, for a run that goes on."""
    options = load_config(directory / "config.yaml")
    sections = [key.split(".") for key in _KEYS]
    values = (getattr(getattr(options, section), name) for section, name in sections)
    way = dict(zip(_KEYS, values, strict=True))
    say(f"fit        the run goes on as it was started: {_words(way)}")
    return [f"{key}={value}" for key, value in way.items()]


def ways(config: Config, images: int, *, on_cuda: bool, lower: bool) -> Iterator[Way]:
    """The config as it is, then what needs less memory and more time.

    On a CPU virtual ranks save nothing. Some ways may be refused beside other options.

    images: the fewest that a rank has in a microbatch. lower: another precision is allowed.
    """
    # Only levels that save more than that of the config.
    levels = _LEVELS[_LEVELS.index(config.model.recompute) + 1 :]
    exact: list[Way] = [{}, *({"model.recompute": level} for level in levels)]
    parts = config.train.virtual_ranks
    while on_cuda and parts < images:
        parts = min(2 * parts, images)
        exact.append({"train.virtual_ranks": parts})
    yield from exact
    if lower and config.train.precision in ("float32", "tf32"):
        yield from (way | {"train.precision": _LOWER} for way in exact)


def _is_allowed(source: Path, overrides: list[str]) -> bool:
    try:
        load_config(source, overrides)
    except ConfigError:
        return False
    return True


def _try(
    args: argparse.Namespace,
    source: Path,
    overrides: list[str],
    num_ranks: int,
    device: str,
    num_bytes: int,
) -> Trial:
    """Trains a few steps in other processes, which get at most `num_bytes` of host memory."""
    with tempfile.TemporaryDirectory() as folder:
        result, errors = Path(folder, "result.json"), Path(folder, "errors.txt")
        command = [*interpreter(), "-m", "segtrain", "bench", str(source)]
        command += ["--memory", "--json", str(result), "--device", device]
        command += ["--nproc", str(num_ranks)]
        for override in (*args.set, *overrides):
            command += ["--set", override]
        # On CUDA drivers reserve far more than they use.
        limit = num_bytes // num_ranks if device == "cpu" else None
        with errors.open("wb") as stderr:
            code = _run(command, stderr, partial(_lower_limits, limit))
        said = printable_lines(errors.read_text(errors="replace"))
        # Libraries that get no memory may crash, before this is said or after it.
        if code < 0 or code == EXIT_MEMORY or (code and any(_SPENT in line for line in said)):
            end = signal.Signals(-code).name if code < 0 else "an error"
            about = [line.removeprefix("segtrain: ") for line in said if "memory" in line]
            return Trial(None, "", (about or [f"ended by {end}"])[-1].partition(";")[0])
        if code:
            raise ExecutionError("\n".join([f"--fit: {' '.join(command)} failed:", *said[-20:]]))
        figures = json.loads(result.read_text())
    on_host, on_device = figures["host_bytes"], figures["device_bytes"]
    host = f"{on_host / _GIB:.2f} of {num_bytes / _GIB:.2f} GiB of host memory"
    needed = host if on_device is None else f"{on_device / _GIB:.2f} GiB of the GPU and {host}"
    spare = on_host <= (1 - MEMORY_MARGIN) * num_bytes
    problem = "" if spare else f"{host}, and {MEMORY_MARGIN:.0%} must stay free"
    return Trial(figures["step_s"], needed, problem)


def _run(command: list[str], stderr: Any, limit: Callable[[], None]) -> int:
    """The exit code of `command`, which ends with this process, also by SIGTERM."""
    # SIGTERM becomes SystemExit, so that `finally` ends the trial too.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, preexec_fn=limit)
    try:
        return process.wait()
    finally:
        # Without effect on a process that has ended by itself.
        process.terminate()
        process.wait()
        signal.signal(signal.SIGTERM, before)


def _lower_limits(num_bytes: int | None) -> None:
    """Lets this process have `num_bytes` of data, and leaves the margin of its own limits free."""
    # The address space is lowered only where it is limited already: libraries reserve far more than
    # they use.
    for kind, most in ((resource.RLIMIT_AS, None), (resource.RLIMIT_DATA, num_bytes)):
        soft, hard = resource.getrlimit(kind)
        limits = [] if soft == resource.RLIM_INFINITY else [int((1 - MEMORY_MARGIN) * soft)]
        if limits := [*limits, *([] if most is None else [most])]:
            resource.setrlimit(kind, (min(limits), hard))


def _words(way: Way) -> str:
    return ", ".join(f"{key} {value}" for key, value in way.items()) or "the config as it is"


def _choice(way: Way, trial: Trial, first: Trial, steps: int) -> Iterator[str]:
    """What is chosen, what it costs, and how long the run takes."""
    cost = ""
    if way:
        before = f"{trial.step_s / first.step_s:.2f} times that" if first.step_s else "not known"
        cost = f" (against the config as it is: {before})"
    yield f"fit        {_words(way)}: {trial.needed}"
    duration = timedelta(seconds=round(trial.step_s * steps))
    yield (
        f"fit        {trial.step_s:.3g} s a step{cost}; {steps:,} steps take {duration}, "
        "evaluations apart"
    )
    if "train.precision" in way:
        yield f"warning: --fit-precision: {_LOWER} gives another result than the config's precision"
