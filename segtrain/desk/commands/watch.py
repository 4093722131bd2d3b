"""`segtrain watch`: what runs do now, on one screen that refreshes itself; it reads files alone."""

import argparse
import math
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from segtrain.checkpoint.format import LAST
from segtrain.desk.results.runs import (
    State,
    Summary,
    find_runs,
    options_of,
    points_of,
    summarize,
    tail,
)
from segtrain.errors import EXIT_OK, CheckpointError
from segtrain.files import read_bytes
from segtrain.files.manifest import read_entries
from segtrain.run import directory as run_directory
from segtrain.text import counted, printable, table_lines

# A run is stuck that has written nothing in so many times the seconds between its last two lines,
# but at least so many seconds; before its second line, such as while it compiles, in so many.
_TIMES, _LEAST_S, _AT_FIRST_S = 10, 120.0, 900.0
_TAIL_BYTES = 1 << 18
_STEP_S = "time/step_s"
_TAGS = (_STEP_S, "images_per_s", "train/loss")
_TITLES = ("run", "step", "steps/s", "img/s", "to go", "saved", "ago", "best", "at step", "loss")
_BLOCKS, _ROWS = " ▁▂▃▄▅▆▇█", 4
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def main(args: argparse.Namespace) -> int:
    """Shows the screen until Ctrl-C, or once if nobody could see it change; returns the exit code.

    args: directories (runs, or folders of them), every (seconds), once.

    Raises:
        ConfigError: no such folder.
    """
    folders = args.directories or [Path("runs")]
    with suppress(KeyboardInterrupt):
        while True:
            size = shutil.get_terminal_size((100, 40))
            lines = screen(folders, time.time(), size.columns)
            if args.once or not sys.stdout.isatty():
                print(*lines, sep="\n")
                break
            # Cut to the terminal: a line that wraps would push all others down.
            shown = [f"{line[: size.columns]}{_END_OF_LINE}\n" for line in lines[: size.lines - 1]]
            # Written over the last screen, and only the rest is cleared: to clear first would
            # flicker.
            print(_HOME, *shown, _BELOW, sep="", end="", flush=True)
            time.sleep(args.every)
    return EXIT_OK


class Signs(NamedTuple):
    """What the files of a run tell about its present.

    values: the newest by tag. silence_s: how long it may write nothing. written, saved: when any
    file, and last.pt, was written last; 0: none. saved_step: of last.pt; 0: unknown. evaluates: an
    evaluation is due at its newest step. holder: the host that its lock file names; empty: there is
    none.
    """

    values: dict[str, float]
    silence_s: float
    written: float
    saved: float
    saved_step: int
    evaluates: bool
    holder: str


def screen(folders: Sequence[Path], now: float, width: int) -> list[str]:
    """The lines about the runs in `folders` at the time `now`; of a single run also its curves."""
    runs = [summarize(directory) for directory in find_runs(folders)]
    signs = [read_signs(run) for run in runs]
    states = [state_of(*pair, now) for pair in zip(runs, signs, strict=True)]
    kinds = Counter(states)
    what = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    number = counted(len(runs), "run", "runs")
    lines = [f"{_clock(now, now)}  {number}{': ' if runs else ''}{what}"]
    rows = [_row(*entry, now) for entry in zip(runs, signs, states, strict=True)]
    if rows:
        table = table_lines(zip(_TITLES, *rows, strict=True))
        words = [_state_words(*entry, now) for entry in zip(runs, signs, states, strict=True)]
        lines += map("  ".join, zip(table, ["state", *words], strict=True))
    # The run itself was named, not a folder that holds only one.
    if len(folders) == 1 and [run.directory for run in runs] == [*folders]:
        (directory,) = folders
        metrics = tail(directory / run_directory.METRICS, sys.maxsize)
        for tag in ("train/loss", options_of(directory)[1].best_tag):
            points = [
                entry for entry in points_of(metrics, tag.encode()) if math.isfinite(entry[1])
            ]
            if points:
                lines += ["", *chart(printable(tag), points, width)]
    return lines


def read_signs(run: Summary) -> Signs:
    """Those of a run; a line that is cut off is left out."""
    here, folder = run.directory, run.directory / run_directory.CHECKPOINTS
    lines = tail(here / run_directory.METRICS, _TAIL_BYTES)
    newest = {tag: [*points_of(lines, tag.encode())] for tag in _TAGS}
    values = {tag: points[-1][1] for tag, points in newest.items() if points}
    silence_s = _AT_FIRST_S
    if len(steps := newest[_STEP_S]) > 1:
        # The steps between the last two lines of the log, times the seconds of a step.
        silence_s = max(_LEAST_S, _TIMES * (steps[-1][0] - steps[-2][0]) * values[_STEP_S])
    saved, saved_step = _newest([folder / LAST]), 0
    logs = (run_directory.METRICS, run_directory.LOG, run_directory.RECEIPTS, run_directory.CONFIG)
    written = _newest([*folder.glob("*.pt"), *(here / name for name in logs)])
    at = max([step for points in newest.values() for step, _ in points], default=0)
    with suppress(OSError, CheckpointError):
        entries = read_entries(folder)
        saved_step = max((entry.step for entry in entries.get(LAST, ())), default=0)
        # A step may be saved before it is logged.
        at = max([at, *(entry.step for name in entries for entry in entries[name])])
    total, by = run.steps, options_of(here)[1]
    every, tag = by.every_steps, by.best_tag.encode()
    evaluated = max([step for step, _ in points_of(lines, tag)], default=0)
    evaluates = at > evaluated and (at == total or (every is not None and at % every == 0))
    holder = ""
    with suppress(OSError):
        holder = read_bytes(here / run_directory.LOCK, 1000).decode(errors="replace").strip()
    # The lock file says `process PID on HOST`.
    host = holder.rpartition(" on ")[2]
    return Signs(values, silence_s, written, saved, saved_step, evaluates, host)


def state_of(run: Summary, signs: Signs, now: float) -> State:
    """The state of a run, as its files and the time tell it.

    A file system without locks does not tell what another machine does: there a run trains as long
    as it writes.
    """
    if not signs.written or run.state not in (State.TRAINING, State.STOPPED):
        return run.state
    silent = now - signs.written > signs.silence_s
    elsewhere = bool(signs.holder) and signs.holder != socket.gethostname()
    if run.state is State.TRAINING or (elsewhere and not silent):
        if signs.evaluates:
            return State.EVALUATING
        return State.STUCK if silent else State.TRAINING
    # A run that ends removes its lock file.
    return State.KILLED if signs.holder else State.STOPPED


def chart(title: str, points: Sequence[tuple[int, float]], width: int) -> list[str]:
    """Values by step in `width` columns, each the mean of its steps, or that of the one before.

    >>> print(*chart("loss", [(1, 8.0), (2, 4.0), (3, 2.0), (4, 1.0)], 4)[1:], sep="|")
    █|█|█▆|██▅▁
    """
    first, steps = points[0][0], points[-1][0] - points[0][0] + 1
    width = min(width, steps)
    columns: list[list[float]] = [[] for _ in range(width)]
    for step, value in points:
        columns[min(width - 1, max(0, (step - first) * width // steps))].append(value)
    means = list(
        accumulate((mean(x) if x else None for x in columns), lambda a, b: a if b is None else b)
    )
    low, high = min(means), max(means)
    # In eighths of a row; the lowest value still shows one.
    eighths = [1 + round((x - low) / ((high - low) or 1) * (8 * _ROWS - 1)) for x in means]
    rows = [
        "".join(_BLOCKS[min(8, max(0, x - 8 * row))] for x in eighths).rstrip()
        for row in reversed(range(_ROWS))
    ]
    ends = f"steps {first} to {points[-1][0]}"
    return [f"{title}  now {points[-1][1]:.4g}, {low:.4g} to {high:.4g}, {ends}", *rows]


def _state_words(run: Summary, signs: Signs, state: State, now: float) -> str:
    """A state, since when, and why."""
    timeless = (State.TRAINING, State.COMPLETE, State.CLEARED, State.UNREADABLE)
    is_timed = signs.written and state not in timeless
    since = f" since {_clock(signs.written, now)}" if is_timed else ""
    return f"{state}{since}{run.why and f': {run.why}'}"


def _row(run: Summary, signs: Signs, state: State, now: float) -> list[str]:
    is_alive = state in (State.TRAINING, State.EVALUATING)
    step_s, images = signs.values.get(_STEP_S), signs.values.get("images_per_s")
    speed = [f"{1 / step_s:.2f}", f"{images or 0:.1f}"] if step_s and is_alive else ["-", "-"]
    left = "-"
    if step_s and is_alive and run.steps:
        left = _duration((run.steps - run.step) * step_s)
    ago = _duration(now - signs.saved) if signs.saved else "-"
    saved = str(signs.saved_step or "?") if signs.saved else "-"
    best = (
        [f"{printable(run.best_by, 30)} {run.best[1]:.4f}", str(run.best[0])] if run.best else "--"
    )
    loss = signs.values.get("train/loss")
    steps = f"{run.step}/{run.steps or '?'}"
    shown = "-" if loss is None else f"{loss:.4f}"
    return [printable(run.directory), steps, *speed, left, saved, ago, *best, shown]


def _newest(files: Iterable[Path]) -> float:
    """When the newest of these was written; 0 if none is there."""
    times = [0.0]
    for path in files:
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _clock(at: float, now: float) -> str:
    """A time of day, with its date if it is another one than now."""
    there, here = map(datetime.fromtimestamp, (at, now))
    return there.strftime("%H:%M:%S" if there.date() == here.date() else "%Y-%m-%d %H:%M")


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(max(0.0, seconds))))
