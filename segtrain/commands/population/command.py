"""`segtrain population`: which population its arguments mean, new or resumed, and its result."""

import argparse
import os
import shlex
from pathlib import Path

from segtrain import files
from segtrain.commands.config import load_named, show_warnings
from segtrain.commands.population import history as record
from segtrain.commands.population.history import (
    FACTORS,
    FILE,
    History,
    Start,
    read,
    times,
    with_options,
)
from segtrain.commands.population.training import EXPERIMENT, Population
from segtrain.config import Config, config_to_yaml, override_config
from segtrain.config.experiment import wrong_units
from segtrain.config.messages import did_you_mean
from segtrain.data.read.protect import check_run_directory
from segtrain.distributed import slurm
from segtrain.errors import EXIT_OK, ConfigError, ExecutionError
from segtrain.run.directory import LOCK, RunLock, config_differences, flat, has_saved
from segtrain.text import say

MEMBERS, PERTURB = 4, ("optim.lr", "optim.weight_decay")

# They decide how a run is watched and scored, not what it learns.
_NO_SEARCH = ("data.mean", "data.std", "eval.", "log.", "checkpoint.")
_NO_SEARCH += ("train.max_hours", "train.timeout_s")

_NO_EXCHANGE = {
    "shares": "receipts could not tell of weights that a member takes over",
    "patience": "members that end at different steps cannot be compared",
    "max_hours": "members that end at different steps cannot be compared",
}


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ or slurm.is_task(os.environ):
        raise ConfigError(
            "environment: torchrun or srun has started this as one of several ranks, and each "
            "would train the whole population; start it once, and --nproc gives each member ranks"
        )
    directory, history = _resumed(args) if args.resume else _new(args)
    show_warnings(history.config)
    with RunLock(directory):
        record.write(directory, history)
        with files.os_errors_as(ExecutionError, directory / EXPERIMENT, "cannot be written"):
            files.write_atomic(directory / EXPERIMENT, config_to_yaml(history.config))
        code = Population(directory, history, args).train()
    if code == EXIT_OK:
        for line in record.table(history):
            print(line)
        member, value, step = history.best()
        run = directory / f"member_{member}"
        print(f"best: {run.name}, mIoU {value:.4f} at step {step}")
        print(f"all scores of it: segtrain eval {shlex.quote(str(run))}")
        print(f"history {directory / FILE}")
    return code


def _new(args: argparse.Namespace, config: Config | None = None) -> tuple[Path, History]:
    """The directory and the beginning of a new population; ConfigError if it cannot be."""
    if (Path(args.config) / FILE).exists():
        again = f"segtrain population {shlex.quote(args.config)} --resume"
        raise ConfigError(f"{args.config}: holds a population; to go on with it: {again}")
    config, directory = config or load_named(args), _directory(args)
    if wrong := wrong_units(config):
        raise ConfigError("\n".join(wrong))
    every = args.every or config.eval.every_steps
    if every is None:
        raise ConfigError("--every: is needed where eval.every_steps is null")
    for key, why in _NO_EXCHANGE.items():
        if getattr(config.train, key) is not None:
            raise ConfigError(f"train.{key}: {why}; set train.{key} to null")
    start = Start(
        members=args.members or MEMBERS,
        every=every,
        perturb=args.perturb or list(PERTURB),
        alone=args.alone,
        config=_with_cadences(config, every),
    )
    _check(start)
    files.check_utf8(directory)
    check_run_directory(directory, config.data)
    if _has_saved(directory):
        raise ConfigError(
            f"{directory}: holds a population already; go on with it by --resume, or choose "
            "another directory by --output"
        )
    # A killed process may leave its lock.
    foreign = directory.is_dir() and any(path.name != LOCK for path in directory.iterdir())
    if foreign and not (directory / FILE).exists():
        raise ConfigError(f"{directory}: is not empty; choose another directory by --output")
    return directory, History(start)


def _resumed(args: argparse.Namespace) -> tuple[Path, History]:
    """The directory and the history of the population to go on with; a new one if there is none.

    CONFIG may be that directory. What else is given must be what the population was started with;
    only options that change no weights, such as data.root, may differ.

    Raises:
        CheckpointError: population.jsonl is damaged.
        ConfigError: the arguments are others.
    """
    if (Path(args.config) / FILE).exists():
        directory = args.output or Path(args.config)
        history = read(directory)
        config = override_config(history.config, args.set, source=str(directory / FILE))
    else:
        config, directory = load_named(args), _directory(args)
        if not _has_saved(directory):
            say(f"{directory}: nothing to resume; a new population starts")
            return _new(args, config)
        history = read(directory)
    start, config = history.start, _with_cadences(config, history.start.every)
    differences = [
        f"--{name}: {getattr(start, name)} there, {value} now"
        for name in ("members", "every", "perturb", "alone")
        if (value := getattr(args, name)) and value != getattr(start, name)
    ]
    differences += config_differences(history.config, config)
    if differences:
        listed = "\n  ".join(differences)
        raise ConfigError(
            f"{directory}: the population was started otherwise\n  {listed}\nto go on as it was "
            f"started: segtrain population {shlex.quote(str(directory))} --resume"
        )
    history.config = config
    return directory, history


def _directory(args: argparse.Namespace) -> Path:
    ending = "alone" if args.alone else "population"
    return args.output or Path("runs") / f"{Path(args.config).stem}_{ending}"


def _has_saved(directory: Path) -> bool:
    """Whether a member of the population in `directory` ever saved a checkpoint."""
    if not (directory / FILE).exists():
        return False
    history = read(directory)
    rows = [row for past in history.rounds for row in past.rows.values()]
    members = [directory / f"member_{member}" for member in range(history.members)]
    return any(row.mean_iou is not None for row in rows) or any(map(has_saved, members))


def _with_cadences(config: Config, every: int) -> Config:
    """`config`, evaluated at the end of each round, and saved at least then."""
    saved = min(every, config.checkpoint.every_steps)
    return with_options(config, {"eval.every_steps": every, "checkpoint.every_steps": saved})


def _check(start: Start) -> None:
    """Refuses what cannot be a population."""
    if start.members < 2:
        raise ConfigError(f"--members: expected at least 2, got {start.members}")
    if start.every >= (steps := start.config.train.steps):
        raise ConfigError(f"--every: {start.every} must be smaller than train.steps, {steps}")
    if len(set(start.perturb)) < len(start.perturb):
        raise ConfigError("--perturb: names an option twice")
    for key in start.perturb:
        if problem := _problem_of(key, start.config):
            raise ConfigError(f"--perturb {key}: {problem}")


def _problem_of(key: str, config: Config) -> str | None:
    """Why an option cannot be searched, or would have no effect; None if it can."""
    options = flat(config)
    if key not in options:
        return f"no such option{did_you_mean(key, list(options))}"
    if key.startswith(_NO_SEARCH):
        return "does not change what a member learns"
    value = options[key]
    if type(value) is not float or value == 0:
        return f"is {value!r} here; expected a number with a fraction, not 0, such as optim.lr"
    for factor in FACTORS:
        try:
            with_options(config, {key: times(value, factor)})
        except ConfigError as error:
            return f"{value:g} times {factor:g} is refused: {error}"
    return None
