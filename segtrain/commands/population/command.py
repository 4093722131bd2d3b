"""`segtrain population`: trains the members round by round, and exchanges between the rounds."""

import argparse
import os
import queue
import shlex
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from segtrain import files
from segtrain.checkpoint.format import load
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.commands.config import load_named, show_warnings
from segtrain.commands.population import history as record
from segtrain.commands.population.history import (
    FACTORS,
    FILE,
    Event,
    Exchange,
    History,
    Row,
    Start,
    option_value,
    read,
    times,
    with_options,
)
from segtrain.commands.population.members import (
    Programs,
    gpus_of_slots,
    score,
    take_over,
    train_arguments,
)
from segtrain.config import Config, config_to_yaml, override_config
from segtrain.config.experiment import SECTIONS, config_warnings, wrong_units
from segtrain.config.messages import did_you_mean
from segtrain.data.read.protect import check_run_directory
from segtrain.distributed import slurm
from segtrain.errors import (
    EXIT_NON_FINITE,
    EXIT_OK,
    EXIT_SYSTEM,
    CheckpointError,
    ConfigError,
    ExecutionError,
    NonFiniteError,
)
from segtrain.files import check_utf8
from segtrain.run import directory as run_directory
from segtrain.run.directory import LOCK, RunLock, config_differences, has_saved
from segtrain.text import say

EXPERIMENT = "experiment.yaml"


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    refuse_ranks(os.environ)
    directory, history = resumed(args) if args.resume else new(args)
    show_warnings(history.config)
    with RunLock(directory):
        record.write(directory, history)
        with files.os_errors_as(ExecutionError, directory / EXPERIMENT, "cannot be written"):
            files.write_atomic(directory / EXPERIMENT, config_to_yaml(history.config))
        with Programs() as programs:
            code = _Population(directory, history, programs, args).train()
    if code == EXIT_OK:
        for line in record.table(history):
            print(line)
        member, value, step = history.best()
        run = directory / f"member_{member}"
        print(f"best: {run.name}, mIoU {value:.4f} at step {step}")
        print(f"all scores of it: segtrain eval {shlex.quote(str(run))}")
        print(f"history {directory / FILE}")
    return code


class _Population:
    """The members in `directory`; `history` is written whenever it changes."""

    def __init__(
        self, directory: Path, history: History, programs: Programs, args: argparse.Namespace
    ) -> None:
        self._directory, self._history, self._programs = directory, history, programs
        self._machine = ["--nproc", str(args.nproc), "--device", args.device]
        self._slots: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for gpus in gpus_of_slots(min(args.at_once, history.members), args.device):
            self._slots.put(gpus)
        self._code = EXIT_OK
        self._warned = {f"warning: {line}" for line in config_warnings(history.config)}

    def train(self) -> int:
        """Trains to the end; returns the exit code of the first member that could not."""
        history = self._history
        for number, this in enumerate(history.rounds):
            if self._train_round(number):
                return self._code
            if all(row.mean_iou is None for row in this.rows.values()):
                what = f"no member has a score at step {this.step}; use a smaller optim.lr"
                raise NonFiniteError(f"{self._directory}: {what}")
            if this.exchange is None:
                last = history.start.alone or this is history.rounds[-1]
                takeovers = [] if last else record.decide(history, number)
                for one in takeovers:
                    config = member_config(history.config, one.member, one.options)
                    loser, winner = self._run(one.member), self._run(one.source)
                    take_over(loser, winner, config, step=this.step)
                    say(f"step {this.step}  {loser.name} takes over from {winner.name}")
                self._add(Exchange(step=this.step, exchange=takeovers))
        return EXIT_OK

    def _train_round(self, number: int) -> int:
        """Trains the members that are not at the end of the round; the exit code of a failure.

        Those that train beside a member that fails come to their ends; no further one begins.
        """
        history, this = self._history, self._history.rounds[number]
        members = [member for member in range(history.members) if member not in this.rows]
        going_on = [member for member in members if not history.has_diverged(member, number)]
        for member in going_on if number else ():
            self._check_checkpoints(member)
        for member in set(members) - set(going_on):
            self._record(this.step, member, number, EXIT_NON_FINITE)
        with ThreadPoolExecutor(self._slots.qsize()) as pool:
            futures = {pool.submit(self._train, member, number): member for member in going_on}
            try:
                for future in as_completed(futures):
                    if (code := future.result()) is not None:
                        self._record(this.step, futures[future], number, code)
            except BaseException:
                self._code = EXIT_SYSTEM  # no further one begins
                raise
        return self._code

    def _train(self, member: int, number: int) -> int | None:
        """Trains a member to the end of the round; returns the exit code, None if it did not begin.

        Runs in a thread of its own.
        """
        if self._code:
            return None
        history, run = self._history, self._run(member)
        arguments = train_arguments(
            self._directory / EXPERIMENT,
            run,
            history.rounds[number].step,
            history.options_of(member, number),
            history.config.seed + member,
        )
        gpus = self._slots.get()
        code = self._programs.run([*arguments, *self._machine], self._show(run.name), gpus)
        self._slots.put(gpus)
        if code not in (EXIT_OK, EXIT_NON_FINITE):
            self._code = code
        return code

    def _record(self, step: int, member: int, number: int, code: int) -> None:
        """Adds the result of a member to the history, and says it."""
        run, options = self._run(member), self._history.options_of(member, number)
        if code not in (EXIT_OK, EXIT_NON_FINITE):
            say(
                f"{run}: ended with exit code {code} before step {step}; to go on: "
                f"segtrain population {shlex.quote(str(self._directory))} --resume"
            )
            return
        value = score(run, step) if code == EXIT_OK else None
        self._add(Row(step=step, member=member, mean_iou=value, options=options))
        words = "has diverged" if value is None else f"mIoU {value:.4f}"
        values = "  ".join(f"{key} {option:g}" for key, option in options.items())
        say(f"step {step}  {run.name}  {words}  {values}")

    def _check_checkpoints(self, member: int) -> None:
        """Refuses a member that would be trained anew, or from weights before its last takeover."""
        history = self._history
        folder = self._run(member) / run_directory.CHECKPOINTS
        path, _ = CheckpointManager(folder, keep_limit=1).newest()
        found = 0 if path is None else load(path).step
        exchanges = [(past.step, one) for past in history.rounds for one in past.exchange or ()]
        wanted = max((step for step, one in exchanges if one.member == member), default=1)
        if found < wanted:
            raise CheckpointError(
                f"{folder}: expected a checkpoint of step {wanted} or later, found "
                f"{f'step {found}' if found else 'none'}; put it back, or start a new population "
                "by --output"
            )

    def _run(self, member: int) -> Path:
        return self._directory / f"member_{member}"

    def _add(self, event: Event) -> None:
        record.append(self._directory, self._history, event)

    def _show(self, name: str) -> Callable[[str], None]:
        def show(line: str) -> None:
            line = line.removeprefix("segtrain: ")
            # Every piece of a training begins with the same warnings.
            if line not in self._warned:
                say(f"{name}: {line}")
            if line.startswith("warning:"):
                self._warned.add(line)

        return show


def member_config(config: Config, member: int, options: record.Options) -> Config:
    """The experiment of a member: a seed of its own, and `options`."""
    return with_options(config, {"seed": config.seed + member} | options)


MEMBERS, PERTURB = 4, ("optim.lr", "optim.weight_decay")

# They decide how a run is watched and scored, not what it learns.
_NO_SEARCH = ("data.mean", "data.std", "eval.", "log.", "checkpoint.")
_NO_SEARCH += ("train.max_hours", "train.timeout_s")


def refuse_ranks(environ: Mapping[str, str]) -> None:
    """Raises ConfigError where torchrun or srun has started this process as one of several."""
    if "RANK" in environ or "WORLD_SIZE" in environ or slurm.is_task(environ):
        raise ConfigError(
            "environment: torchrun or srun has started this as one of several ranks, and each "
            "would train the whole population; start it once, and --nproc gives each member ranks"
        )


def new(args: argparse.Namespace, config: Config | None = None) -> tuple[Path, History]:
    """The directory and the beginning of a new population; ConfigError if it cannot be."""
    if (Path(args.config) / FILE).exists():
        again = f"segtrain population {shlex.quote(args.config)} --resume"
        raise ConfigError(f"{args.config}: holds a population; to go on with it: {again}")
    config, directory = config or load_named(args), _directory(args)
    if wrong := wrong_units(config):
        raise ConfigError("\n".join(wrong))
    every = args.every or config.eval.every_steps
    _check_train(config)
    if every is None:
        raise ConfigError("--every: is needed where eval.every_steps is null")
    start = Start(
        members=args.members or MEMBERS,
        every=every,
        perturb=args.perturb or list(PERTURB),
        alone=args.alone,
        config=_with_cadences(config, every),
    )
    _check(start)
    check_utf8(directory)
    check_run_directory(directory, config.data)
    _check_empty(directory)
    return directory, History(start)


def resumed(args: argparse.Namespace) -> tuple[Path, History]:
    """The directory and the history of the population to go on with; a new one if there is none.

    CONFIG may be that directory. What else is given must be what the population was started with;
    only options that change no weights, such as data.root, may differ.

    Raises:
        CheckpointError: population.jsonl is damaged.
        ConfigError: the arguments are others.
    """
    is_directory = (Path(args.config) / FILE).exists()
    if is_directory:
        directory = args.output or Path(args.config)
        history = read(directory)
        config = override_config(history.config, args.set, source=str(directory / FILE))
    else:
        config = load_named(args)
        directory = _directory(args)
        if not _has_saved(directory):
            say(f"{directory}: nothing to resume; a new population starts")
            return new(args, config)
        history = read(directory)
    start, config = history.start, _with_cadences(config, history.start.every)
    differences = [
        f"--{name}: {getattr(start, name)} there, {value} now"
        for name in ("members", "every", "perturb")
        if (value := getattr(args, name)) not in (None, [], getattr(start, name))
    ]
    if args.alone != start.alone and (args.alone or not is_directory):
        differences.append(f"--alone: {start.alone} there, {args.alone} now".lower())
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
    overrides = [f"eval.every_steps={every}", f"checkpoint.every_steps={saved}"]
    return override_config(config, overrides, source="the population")


def _check(start: Start) -> None:
    """Refuses what cannot be a population."""
    config, every = start.config, start.every
    if start.members < 2:
        raise ConfigError(f"--members: expected at least 2, got {start.members}")
    if every >= config.train.steps:
        steps = config.train.steps
        raise ConfigError(f"--every: {every} must be smaller than train.steps, {steps}")
    for key in start.perturb:
        _check_option(config, key)
    if len(set(start.perturb)) < len(start.perturb):
        raise ConfigError("--perturb: names an option twice")


def _check_train(config: Config) -> None:
    """Refuses options that cannot go with an exchange."""
    train = config.train
    if train.shares is not None:
        raise ConfigError(
            "train.shares: receipts tell how a run came to its weights, and those of a member "
            "that takes over others would not; set train.shares to null"
        )
    for key in ("patience", "max_hours"):
        if getattr(train, key) is not None:
            raise ConfigError(
                f"train.{key}: a member that ends before the others cannot be compared with "
                f"them; set train.{key} to null"
            )


def _check_option(config: Config, key: str) -> None:
    """Refuses an option that cannot be searched, or would have no effect."""
    known = [f"{name}.{field}" for name in SECTIONS for field in SECTIONS[name].model_fields]
    if key not in known:
        raise ConfigError(f"--perturb {key}: no such option{did_you_mean(key, known)}")
    if key.startswith(_NO_SEARCH):
        raise ConfigError(f"--perturb {key}: does not change what a member learns")
    value = option_value(config, key)
    if type(value) is not float:
        what = f"is {value!r} here; expected a number with a fraction, such as optim.lr"
        raise ConfigError(f"--perturb {key}: {what}")
    if value == 0:
        raise ConfigError(f"--perturb {key}: is 0 here, and stays so times any factor")
    for factor in FACTORS:
        changed = times(value, factor)
        try:
            with_options(config, {key: changed})
        except ConfigError as error:
            what = f"{value:g} times {factor:g} is refused: {error}"
            raise ConfigError(f"--perturb {key}: {what}") from None


def _check_empty(directory: Path) -> None:
    """Refuses a directory in which there is more than a population that has saved nothing."""
    if os.path.lexists(directory) and not directory.is_dir():
        raise ConfigError(f"{directory}: a file stands where the directory should be")
    if _has_saved(directory):
        raise ConfigError(
            f"{directory}: holds a population already; go on with it by --resume, or choose "
            "another directory by --output"
        )
    if (directory / FILE).exists():
        return
    # A killed process may leave its lock.
    if directory.is_dir() and any(path.name != LOCK for path in directory.iterdir()):
        raise ConfigError(f"{directory}: is not empty; choose another directory by --output")
