"""`segtrain runs`: a table of runs, and the end of what a finished one no longer needs."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from segtrain.checkpoint.format import load, parse_experiment
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.desk.results.runs import State, Summary, find_runs, summarize
from segtrain.errors import EXIT_OK, ConfigError, ExecutionError, UserError
from segtrain.files import check_output, os_errors_as, write_output
from segtrain.run import directory as run_directory
from segtrain.run.console import completion
from segtrain.run.division import FOLDS, SEEDS
from segtrain.text import counted, printable

_COLUMNS = ("run", "best", "at step", "steps", "hours", "GB", "state")


def main(args: argparse.Namespace) -> int:
    """Lists or clears runs and returns the exit code.

    args: directories (folders of runs; with clear the runs), clear, json (a file or None).

    Raises:
        ConfigError: no such folder; or runs that are not cleared, after all others were.
    """
    if args.clear:
        return _clear_all(args.directories, args.json)
    if args.json:
        with os_errors_as(ConfigError, f"--json {args.json}", "cannot be written"):
            check_output(args.json, '[\n  {\n    "directory": ', "[]")
    folders = args.directories or [Path("runs")]
    summaries = [summarize(directory) for directory in find_runs(folders)]
    rows = [_COLUMNS, *map(_row, summaries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for name, *numbers, state in rows if summaries else ():
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
        print("  ".join([name.ljust(widths[0]), *cells, state]))
    total = sum(summary.num_bytes for summary in summaries) / 1e9
    print(f"{counted(len(summaries), 'run', 'runs')}, {total:.2f} GB")
    if args.json:
        with os_errors_as(ExecutionError, args.json, "the list cannot be written"):
            records = [
                {**asdict(summary), "directory": str(summary.directory)} for summary in summaries
            ]
            write_output(args.json, json.dumps(records, indent=2) + "\n")
    return EXIT_OK


def _row(run: Summary) -> tuple[str, ...]:
    step, score = "-", "-"
    if run.best is not None:
        step, score = str(run.best[0]), f"{printable(run.best_by, 30)} {run.best[1]:.4f}"
    steps = f"{run.step}/{'?' if run.steps is None else run.steps}"
    words = [run.state.value, *filter(None, [run.why])]
    if run.state in (State.STOPPED, State.FAILED):
        parent, what, where = run.directory.parent, "train", run.directory
        # Runs of folds or seeds are resumed by that command, which trains the others and joins
        # them.
        for command, file in (("folds", FOLDS), ("seeds", SEEDS)):
            if (parent / file).is_file():
                what, where = command, parent
        once = "once that is mended, " if run.state is State.FAILED else ""
        words.append(f"{once}segtrain {what} {run_directory.word_for(where)} --resume")
    numbers = f"{run.training_s / 3600:.1f}", f"{run.num_bytes / 1e9:.2f}"
    return printable(run.directory), score, step, steps, *numbers, ": ".join(words)


def _clear_all(runs: list[Path], json_file: Path | None) -> int:
    if json_file is not None:
        raise ConfigError("--json: serves only the list of runs")
    if not runs:
        raise ConfigError("--clear: expected the directories of runs")
    refused = []
    for directory in dict.fromkeys(runs):
        try:
            freed = _clear(directory)
        except UserError as error:
            refused.append(str(error))
        else:
            print(f"{printable(directory)}: freed {freed / 1e9:.2f} GB; it cannot be trained on")
    if refused:
        raise ConfigError("\n".join(refused))
    return EXIT_OK


def _clear(directory: Path) -> int:
    """Removes the checkpoints that only training needs; returns their bytes.

    Raises:
        UserError: there is no run, it is in use or not complete, or its checkpoints are damaged.
    """
    directory = run_directory.named_run(directory)
    # First without the lock, which takes away the file of a killed run: a refusal changes nothing.
    if not run_directory.is_locked(directory):
        _check_complete(directory)
    with run_directory.RunLock(directory, elsewhere=""):
        _check_complete(directory)
        checkpoints = CheckpointManager(directory / run_directory.CHECKPOINTS)
        # `clear` removes only files that `clean_up` has found to be the run's own.
        checkpoints.clean_up()
        return 0 if checkpoints.is_cleared() else checkpoints.clear()


def _check_complete(directory: Path) -> None:
    """UserError: there is something left to train; or checkpoints are damaged. Nothing is written.

    A run that has been cleared is complete.
    """
    checkpoints = CheckpointManager(directory / run_directory.CHECKPOINTS)
    if checkpoints.is_cleared():
        return
    path, _ = checkpoints.newest()
    if path is None:
        raise ConfigError(f"{printable(directory)}: has no checkpoint to clear")
    checkpoint = load(path)
    config, _ = parse_experiment(checkpoint, path, needed=())
    if not completion(config.train.steps, checkpoint.step, checkpoint.evaluated):
        done = f"step {checkpoint.step} of {config.train.steps}"
        again = f"segtrain train {run_directory.word_for(directory)} --resume"
        raise ConfigError(f"{printable(directory)}: not complete, {done}; go on with {again}")
