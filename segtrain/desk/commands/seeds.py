"""`segtrain seeds`: trainings of one config with several seeds, and how far its scores vary."""

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from segtrain.commands.config import load_named, show_warnings
from segtrain.config import Config, load_config
from segtrain.desk.commands.programs import (
    check_new,
    check_same,
    in_turn,
    place_of,
    refuse_ranks,
    training_of,
    write_experiment,
)
from segtrain.desk.results.report import evaluated, report_page
from segtrain.desk.results.runs import read_run
from segtrain.distributed.process_group import device_for
from segtrain.errors import EXIT_OK, ExecutionError
from segtrain.files import os_errors_as, write_output
from segtrain.run.directory import LOCK, REPORT, RunLock, config_differences
from segtrain.run.division import EXPERIMENT, SEEDS, SeedRun, Seeds, read_seeds, write_record
from segtrain.task.tasks import task_of
from segtrain.text import MAX_NAME, printable, say, table_lines

NUMBER = 5


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code.

    args: config, number (n), set, output, resume, nproc, device.
    """
    refuse_ranks()
    directory, config, seeds = _begin_or_resume(args)
    show_warnings(config)
    with RunLock(directory):
        write_experiment(directory, config)
        write_record(directory / SEEDS, seeds)
        if code := _train(args, directory, config, seeds):
            say(f"to go on: segtrain seeds {shlex.quote(str(directory))} --resume")
            return code
        print(*_table(config, seeds.runs), sep="\n")
        # The report is of classes, which another task does not have.
        if config.log.charts and task_of(config.task).has_classes:
            device = device_for(args.device)
            page = report_page([evaluated(directory / x.run, device) for x in seeds.runs], device)
            with os_errors_as(ExecutionError, directory / REPORT, "cannot be written"):
                write_output(directory / REPORT, page)
            print(f"report     {printable(directory / REPORT)}")
    return EXIT_OK


def _begin_or_resume(args: argparse.Namespace) -> tuple[Path, Config, Seeds]:
    """The directory, the config and the runs to begin, or to go on with.

    Raises:
        ConfigError: the options are not those that the runs were started with; more seeds are
            taken, though.
        CheckpointError: seeds.json is damaged.
    """
    directory = Path(args.config)
    seeds = read_seeds(directory) if args.resume else None
    if seeds is not None:
        config = load_config(directory / EXPERIMENT, args.set)
    else:
        config, directory = load_named(args), place_of(args, "seeds")
        # CONFIG may be the directory of the runs, or the config that they were started with.
        seeds = read_seeds(directory) if args.resume else None
    if seeds is not None:
        there = len(seeds.runs)
        # Further seeds may join; with fewer, runs that are there would not count.
        fewer = args.number is not None and args.number < there
        differences = [f"-n: {there} there, {args.number} now"] if fewer else []
        differences += config_differences(load_config(directory / EXPERIMENT), config)
        check_same("seeds", directory, differences)
        return directory, config, _with_runs(config, seeds.runs, args.number or there)
    if args.resume:
        say(f"{directory}: nothing to resume; new runs start")
    check_new(directory, config, re.compile(f"{re.escape(LOCK)}|{re.escape(EXPERIMENT)}"))
    return directory, config, _with_runs(config, [], args.number or NUMBER)


def _with_runs(config: Config, runs: Sequence[SeedRun], number: int) -> Seeds:
    """These runs, and further ones up to `number`; the seeds count up from that of the config."""
    new = range(config.seed + len(runs), config.seed + number)
    return Seeds(runs=[*runs, *(SeedRun(run=f"seed_{seed}", seed=seed) for seed in new)])


def _train(args: argparse.Namespace, directory: Path, config: Config, seeds: Seeds) -> int:
    """Trains the runs one after another; the first exit code that is not 0.

    Finished ones are started too: `train` refuses a run of another config or of other data.
    """
    with in_turn(args, config) as run:
        for seed_run in seeds.runs:
            if code := run(
                seed_run.run, training_of(directory, seed_run.run, [f"seed={seed_run.seed}"])
            ):
                return code
            trained = read_run(directory / seed_run.run)
            seed_run.step, seed_run.best = trained.best or (None, None)
            # The last value of the curve; None where nothing was evaluated.
            seed_run.last = trained.curves.get(config.eval.best_tag, ([], [None]))[1][-1]
            seed_run.finished = True
            # After each run, so that an interruption loses none of the scores.
            write_record(directory / SEEDS, seeds)
    return EXIT_OK


def _table(config: Config, runs: Sequence[SeedRun]) -> list[str]:
    """The scores of all runs, their mean and the standard deviation of a sample."""
    by = printable(config.eval.best_name, MAX_NAME)
    return table_lines(
        [
            ("run", *(run.run for run in runs), "mean ± sd"),
            (f"best {by}", *_scores([run.best for run in runs])),
            ("at step", *("-" if run.step is None else str(run.step) for run in runs), ""),
            (f"last {by}", *_scores([run.last for run in runs])),
        ]
    )


def _scores(values: Sequence[float | None]) -> list[str]:
    """Each score, and their mean and deviation; a dash where there is no number."""
    known = [value for value in values if value is not None]
    spread = "-"
    if len(known) == len(values):
        spread = f"{mean(known):.4f} ± {stdev(known):.4f}"
    return ["-" if value is None else f"{value:.4f}" for value in values] + [spread]
