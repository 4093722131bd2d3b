"""`segtrain population`: trains the members round by round, and exchanges between the rounds."""

import argparse
import csv
import io
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from segtrain import files
from segtrain.checkpoint.format import load
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.commands.config import show_warnings
from segtrain.commands.population import history as rules
from segtrain.commands.population import plan
from segtrain.commands.population.exchange import take_over
from segtrain.commands.population.history import History, Round, Row
from segtrain.commands.population.member import run_segtrain, score, train_arguments
from segtrain.commands.population.picture import write_picture
from segtrain.config import Config, config_to_yaml
from segtrain.config.warnings import config_warnings
from segtrain.errors import (
    EXIT_NON_FINITE,
    EXIT_OK,
    CheckpointError,
    ExecutionError,
    NonFiniteError,
)
from segtrain.run import directory as run_directory
from segtrain.run.claim import Claim
from segtrain.text import say

EXPERIMENT, TABLE, PICTURE = "experiment.yaml", "population.csv", "population.png"


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    plan.refuse_ranks(os.environ)
    directory, history = plan.resumed(args) if args.resume else plan.new(args)
    show_warnings(history.config)
    with Claim(directory):
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
