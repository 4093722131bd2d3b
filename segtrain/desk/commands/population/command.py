"""`segtrain population`: which population its arguments mean, new or resumed, and its result."""

import argparse
import re
import shlex
from pathlib import Path

from segtrain.commands.config import load_named, show_warnings
from segtrain.config import Config, load_config
from segtrain.config.messages import did_you_mean
from segtrain.desk.commands.population import history as record
from segtrain.desk.commands.population.history import FACTORS, FILE, History, times, with_options
from segtrain.desk.commands.population.members import Population
from segtrain.desk.commands.programs import (
    check_new,
    check_same,
    place_of,
    refuse_ranks,
    write_experiment,
)
from segtrain.errors import EXIT_OK, ConfigError
from segtrain.run.directory import LOCK, RunLock, config_differences, flat
from segtrain.run.division import EXPERIMENT, read_record, write_record
from segtrain.text import MAX_NAME, printable, say

MEMBERS, PERTURB = 4, ("optim.lr", "optim.weight_decay")


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    refuse_ranks()
    directory, history = _population(args)
    show_warnings(history.config)
    with RunLock(directory):
        write_experiment(directory, history.config)
        # Before the first member trains: from here on `--resume` finds a population.
        write_record(directory / FILE, history)
        code = Population(directory, history, args).train()
    if code == EXIT_OK:
        for line in record.table(history):
            print(line)
        member, value, step = history.best()
        run = directory / f"member_{member}"
        by = printable(history.config.eval.best_name, MAX_NAME)
        print(f"best: {run.name}, {by} {value:.4f} at step {step}")
        print(f"all scores of it: segtrain eval {shlex.quote(str(run))}")
        print(f"history {directory / FILE}")
    return code


def _population(args: argparse.Namespace) -> tuple[Path, History]:
    """The directory and the history to begin or to go on with; CONFIG may be the directory."""
    directory = Path(args.config)
    if args.resume and (directory / FILE).exists():
        history = read_record(directory / FILE, History)
        config = load_config(directory / EXPERIMENT, args.set)
        return directory, _resumed(directory, history, args, config)
    config = load_named(args)
    directory = place_of(args, "alone" if args.alone else "population")
    if args.resume and (directory / FILE).exists():
        history = read_record(directory / FILE, History)
        return directory, _resumed(directory, history, args, config)
    if args.resume:
        say(f"{directory}: nothing to resume; a new population starts")
    history = _new(args, config)
    check_new(directory, config, re.compile(f"{re.escape(LOCK)}|{re.escape(EXPERIMENT)}"))
    return directory, history


def _resumed(
    directory: Path, history: History, args: argparse.Namespace, config: Config
) -> History:
    """`history` with `config`, whose changes must be such that alter no weights, as data.root."""
    config = _with_cadences(config, history.every)
    differences = [
        f"--{name}: {getattr(history, name)} there, {value} now"
        for name in ("members", "every", "perturb", "alone")
        if (value := getattr(args, name)) and value != getattr(history, name)
    ]
    differences += config_differences(history.config, config)
    check_same("population", directory, differences)
    history.config = config
    return history


def _with_cadences(config: Config, every: int) -> Config:
    """`config`, evaluated at the end of each round, and saved at least then."""
    saved = min(every, config.checkpoint.every_steps)
    return with_options(config, {"eval.every_steps": every, "checkpoint.every_steps": saved})


def _new(args: argparse.Namespace, config: Config) -> History:
    """A new population; ConfigError if it cannot be one."""
    every, members = args.every or config.eval.every_steps, args.members or MEMBERS
    if every is None:
        raise ConfigError("--every: is needed where eval.every_steps is null")
    if every >= config.train.steps:
        raise ConfigError(f"--every: {every} must be smaller than train.steps")
    if members < 2:
        raise ConfigError(f"--members: expected at least 2, got {members}")
    if config.train.shares is not None:  # receipts know nothing of weights taken over
        raise ConfigError("train.shares: has no place in a population; set it to null")
    perturb = args.perturb or list(PERTURB)
    for key in perturb:
        if problem := _problem_of(key, config):
            raise ConfigError(f"--perturb {key}: {problem}")
    return History(
        members=members,
        every=every,
        perturb=perturb,
        alone=args.alone,
        config=_with_cadences(config, every),
    )


def _problem_of(key: str, config: Config) -> str | None:
    """Why an option cannot be searched, or would have no effect; None if it can."""
    options = flat(config)
    if key not in options:
        return f"no such option{did_you_mean(key, list(options))}"
    value = options[key]
    if type(value) is not float or value == 0:
        return f"is {value!r} here; expected a number with a fraction, not 0, such as optim.lr"
    # One step of the search only. A later product may be refused; the option then stays as it is.
    for factor in FACTORS:
        try:
            with_options(config, {key: times(value, factor)})
        except ConfigError as error:
            return f"{value:g} times {factor:g} is refused: {error}"
    return None
