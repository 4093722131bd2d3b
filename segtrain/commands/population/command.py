"""`segtrain population`: trains the members round by round, and exchanges between the rounds."""

import argparse
import csv
import io
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from segtrain import files
from segtrain.checkpoint.format import load
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.commands.config import load_named, show_warnings
from segtrain.commands.population import history as rules
from segtrain.commands.population.history import (
    FACTORS,
    FILE,
    History,
    Round,
    Row,
    option_value,
    read,
    times,
    with_options,
)
from segtrain.commands.population.members import run_segtrain, score, take_over, train_arguments
from segtrain.commands.population.picture import write_picture
from segtrain.config import Config, config_to_yaml, override_config
from segtrain.config.experiment import SECTIONS, config_warnings, wrong_units
from segtrain.config.messages import did_you_mean
from segtrain.data.read.protect import check_run_directory
from segtrain.distributed import slurm
from segtrain.errors import (
    EXIT_NON_FINITE,
    EXIT_OK,
    CheckpointError,
    ConfigError,
    ExecutionError,
    NonFiniteError,
)
from segtrain.files import check_utf8
from segtrain.run import directory as run_directory
from segtrain.run.directory import LOCK, RunLock, config_differences, has_saved
from segtrain.text import say

EXPERIMENT, TABLE, PICTURE = "experiment.yaml", "population.csv", "population.png"


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    refuse_ranks(os.environ)
    directory, history = resumed(args) if args.resume else new(args)
    show_warnings(history.config)
    with RunLock(directory):
        rules.write(directory, history)
        _write(directory / EXPERIMENT, config_to_yaml(history.config))
        code = _Population(directory, history, args.nproc, args.device).train()
    if code == EXIT_OK:
        _tell(directory, history)
    return code


class _Population:
    """The members in `directory`; `history` is written whenever it changes."""

    def __init__(self, directory: Path, history: History, nproc: str, device: str) -> None:
        self._directory, self._history = directory, history
        self._machine = ["--nproc", str(nproc), "--device", device]
        self._warned = {f"warning: {line}" for line in config_warnings(history.config)}

    def train(self) -> int:
        """Trains to the end; returns the exit code of the first member that could not."""
        history = self._history
        for number, step in enumerate(history.ends):
            if number == len(history.rounds):
                history.rounds.append(Round(step=step))
            this = history.rounds[number]
            if number:
                for member in range(len(this.rows), history.members):
                    self._check_checkpoints(member)
            while len(this.rows) < history.members:
                if code := self._train_member(len(this.rows), this):
                    return code
            if all(row.mean_iou is None for row in this.rows):
                what = f"no member has a score at step {step}; use a smaller train.lr"
                raise NonFiniteError(f"{self._directory}: {what}")
            if this.exchange is None:
                last = history.alone or step == history.config.train.steps
                this.exchange = [] if last else rules.decide(history, number)
                self._save()
            if not this.applied:
                self._exchange(this)
                this.applied = True
                self._save()
        return EXIT_OK

    def _check_checkpoints(self, member: int) -> None:
        """Refuses a member that would be trained anew, or from weights before its last takeover."""
        history, run = self._history, self._run(member)
        if history.has_diverged(member):
            return
        folder = run / run_directory.CHECKPOINTS
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

    def _train_member(self, member: int, this: Round) -> int:
        """Trains a member to the end of the round; an exit code if it could not."""
        history, run = self._history, self._run(member)
        options, value = history.options_of(member), None
        if not history.has_diverged(member):
            seed = history.config.seed + member
            arguments = train_arguments(self._directory / EXPERIMENT, run, this.step, options, seed)
            code = run_segtrain([*arguments, *self._machine], self._show(run.name))
            if code not in (EXIT_OK, EXIT_NON_FINITE):
                say(
                    f"{run}: ended with exit code {code} before step {this.step}; to go on: "
                    f"segtrain population {shlex.quote(str(self._directory))} --resume"
                )
                return code
            value = score(run, this.step) if code == EXIT_OK else None
        this.rows.append(Row(options=options, mean_iou=value))
        self._save()
        words = "has diverged" if value is None else f"mIoU {value:.4f}"
        values = "  ".join(f"{key} {option:g}" for key, option in options.items())
        say(f"step {this.step}  {run.name}  {words}  {values}")
        return EXIT_OK

    def _exchange(self, this: Round) -> None:
        for takeover in this.exchange or ():
            config = member_config(self._history.config, takeover.member, takeover.options)
            loser, winner = self._run(takeover.member), self._run(takeover.source)
            take_over(loser, winner, config, step=this.step)
            say(f"step {this.step}  {loser.name} takes over from {winner.name}")

    def _run(self, member: int) -> Path:
        return self._directory / f"member_{member}"

    def _save(self) -> None:
        rules.write(self._directory, self._history)
        _write(self._directory / TABLE, _csv(*rules.table(self._history)))

    def _show(self, name: str) -> Callable[[str], None]:
        def show(line: str) -> None:
            line = line.removeprefix("segtrain: ")
            # Every piece of a training begins with the same warnings.
            if line not in self._warned:
                say(f"{name}: {line}")
            if line.startswith("warning:"):
                self._warned.add(line)

        return show


def member_config(config: Config, member: int, options: rules.Options) -> Config:
    """The experiment of a member: a seed of its own, and `options`."""
    return rules.with_options(config, {"seed": config.seed + member} | options)


def _tell(directory: Path, history: History) -> None:
    """Prints the table, and writes the picture."""
    for line in rules.aligned(*rules.table(history)):
        print(line)
    write_picture(directory / PICTURE, history)
    member, value, step = history.best()
    run = directory / f"member_{member}"
    print(f"best: {run.name}, mIoU {value:.4f} at step {step}")
    print(f"all scores of it: segtrain eval {shlex.quote(str(run))}")
    print(f"table {directory / TABLE}, picture {directory / PICTURE}")


def _csv(titles: list[str], cells: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([titles, *cells])
    return text.getvalue()


def _write(path: Path, text: str) -> None:
    try:
        files.write_atomic(path, text)
    except OSError as error:
        raise ExecutionError(f"{path}: cannot be written: {error.strerror}") from None


MEMBERS, PERTURB = 4, ("train.lr", "train.weight_decay")

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


def new(args: argparse.Namespace) -> tuple[Path, History]:
    """The directory and the beginning of a new population; ConfigError if it cannot be."""
    if (Path(args.config) / FILE).exists():
        again = f"segtrain population {shlex.quote(args.config)} --resume"
        raise ConfigError(f"{args.config}: holds a population; to go on with it: {again}")
    return _new(args, load_named(args))


def _new(args: argparse.Namespace, config: Config) -> tuple[Path, History]:
    directory = _directory(args)
    if wrong := wrong_units(config):
        raise ConfigError("\n".join(wrong))
    every = args.every or config.eval.every_steps
    _check_train(config)
    if every is None:
        raise ConfigError("--every: is needed where eval.every_steps is null")
    history = History(
        members=args.members or MEMBERS,
        every=every,
        perturb=args.perturb or list(PERTURB),
        alone=args.alone,
        config=_with_cadences(config, every),
    )
    _check(history)
    check_utf8(directory)
    check_run_directory(directory, config.data)
    _check_empty(directory)
    return directory, history


def resumed(args: argparse.Namespace) -> tuple[Path, History]:
    """The directory and the history of the population to go on with; a new one if there is none.

    CONFIG may be that directory. What else is given must be what the population was started with;
    only options that change no weights, such as data.root, may differ.

    Raises:
        CheckpointError: population.json is damaged.
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
            return _new(args, config)
        history = read(directory)
    config = _with_cadences(config, history.every)
    given = {"--members": args.members, "--every": args.every, "--perturb": args.perturb}
    found = {"--members": history.members, "--every": history.every, "--perturb": history.perturb}
    differences = [
        f"{name}: {found[name]} there, {value} now"
        for name, value in given.items()
        if value not in (None, [], found[name])
    ]
    if args.alone != history.alone and (args.alone or not is_directory):
        differences.append(f"--alone: {history.alone} there, {args.alone} now".lower())
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
    rows = [row for past in history.rounds for row in past.rows]
    members = [directory / f"member_{member}" for member in range(history.members)]
    return any(row.mean_iou is not None for row in rows) or any(map(has_saved, members))


def _with_cadences(config: Config, every: int) -> Config:
    """`config`, evaluated at the end of each round, and saved at least then."""
    saved = min(every, config.checkpoint.every_steps)
    overrides = [f"eval.every_steps={every}", f"checkpoint.every_steps={saved}"]
    return override_config(config, overrides, source="the population")


def _check(history: History) -> None:
    """Refuses what cannot be a population."""
    config, every = history.config, history.every
    if history.members < 2:
        raise ConfigError(f"--members: expected at least 2, got {history.members}")
    if every >= config.train.steps:
        steps = config.train.steps
        raise ConfigError(f"--every: {every} must be smaller than train.steps, {steps}")
    for key in history.perturb:
        _check_option(config, key)
    if len(set(history.perturb)) < len(history.perturb):
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
        what = f"is {value!r} here; expected a number with a fraction, such as train.lr"
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
