"""The training of a population: its members round by round, and the exchange between them."""

import argparse
import os
import shlex
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from segtrain import files
from segtrain.checkpoint.format import BEST, LAST, config_field, load, write_temporary
from segtrain.config import Config
from segtrain.config.loading import yaml_value
from segtrain.desk.commands.population import history as record
from segtrain.desk.commands.population.history import FILE, History, Row, with_options
from segtrain.desk.commands.programs import News, Programs, gpus_of_slots
from segtrain.errors import (
    EXIT_NON_FINITE,
    EXIT_OK,
    EXIT_SYSTEM,
    CheckpointError,
    ExecutionError,
    NonFiniteError,
)
from segtrain.files import manifest
from segtrain.run import directory as run_directory
from segtrain.run.console import log_only
from segtrain.run.directory import RunLock
from segtrain.run.division import EXPERIMENT, write_record
from segtrain.run.log import RunLog
from segtrain.text import say


class Population:
    """The members in `directory`; `history` is written whenever it changes."""

    def __init__(self, directory: Path, history: History, args: argparse.Namespace) -> None:
        self._directory, self._history = directory, history
        self._machine = ["--nproc", str(args.nproc), "--device", args.device]
        self._gpus = gpus_of_slots(min(args.at_once, history.members), args.device)
        self._code = EXIT_OK
        self._news = News(history.config)

    def train(self) -> int:
        """Trains to the end; returns the exit code of the first member that could not."""
        programs = Programs(self._gpus)
        for number in range(len(self._history.rounds)):
            self._train_round(number, programs)
            if self._code:
                break
            self._exchange(number)
        return self._code

    def _train_round(self, number: int, programs: Programs) -> None:
        """Trains the members that are not at the end of the round.

        Those that train beside a member that fails come to their ends; no further one begins.
        """
        history, this = self._history, self._history.rounds[number]
        members = [member for member in range(history.members) if member not in this.rows]
        going_on = [member for member in members if not history.has_diverged(member, number)]
        for member in going_on if number else ():
            if not run_directory.has_saved(run := self._run(member)):  # it would be trained anew
                what = "its checkpoints have been removed; put them back"
                raise CheckpointError(f"{run}: {what}, or start a new population by --output")
        # These have diverged and taken nothing over: the round has no score of them.
        for member in set(members) - set(going_on):
            self._record(member, number, EXIT_NON_FINITE)

        def train(member: int) -> int | None:
            """Runs in a thread; the exit code, None if the member did not begin."""
            if self._code:
                return None
            show = partial(self._news.say, self._run(member).name)
            code = programs.run(self._arguments(member, number), show)
            if code not in (EXIT_OK, EXIT_NON_FINITE):
                self._code = code
            return code

        with ThreadPoolExecutor(len(self._gpus)) as pool:
            futures = {pool.submit(train, member): member for member in going_on}
            try:
                # Only this thread writes the history, as members come to their ends.
                for future in as_completed(futures):
                    if (code := future.result()) is not None:
                        self._record(futures[future], number, code)
            except BaseException:
                self._code = EXIT_SYSTEM  # no further one begins
                raise

    def _arguments(self, member: int, number: int) -> list[str]:
        """The command line that trains a member, from where it is, to the end of the round."""
        run, history = self._run(member), self._history
        words = ["train", str(self._directory / EXPERIMENT), "--output", str(run)]
        words += ["--until", str(history.rounds[number].step), *self._machine]
        for key, value in history.seeded(member, history.options_of(member, number)).items():
            words += ["--set", f"{key}={yaml_value(value)}"]
        return [*words, "--resume"] if run_directory.is_run(run) else words

    def _record(self, member: int, number: int, code: int) -> None:
        """Adds the result of a member to the history, and says it."""
        run, step = self._run(member), self._history.rounds[number].step
        if code not in (EXIT_OK, EXIT_NON_FINITE):
            say(
                f"{run}: ended with exit code {code} before step {step}; to go on: "
                f"segtrain population {shlex.quote(str(self._directory))} --resume"
            )
            return
        options = self._history.options_of(member, number)
        by = self._history.config.eval
        value = score(run, step, by.best_tag) if code == EXIT_OK else None
        self._history.rounds[number].rows[member] = Row(score=value, options=options)
        write_record(self._directory / FILE, self._history)
        words = "has diverged" if value is None else f"{by.best_name} {value:.4f}"
        values = "  ".join(f"{key} {option:g}" for key, option in options.items())
        say(f"step {step}  {run.name}  {words}  {values}")

    def _exchange(self, number: int) -> None:
        """The exchange after a round, unless it was done before an interruption."""
        history, this = self._history, self._history.rounds[number]
        if all(row.score is None for row in this.rows.values()):
            what = f"no member has a score at step {this.step}; use a smaller optim.lr"
            raise NonFiniteError(f"{self._directory}: {what}")
        if this.exchange is not None:
            return
        last = history.alone or this is history.rounds[-1]
        takeovers = [] if last else record.decide(history, number)
        for takeover in takeovers:
            config = with_options(history.config, history.seeded(takeover.member, takeover.options))
            loser, winner = self._run(takeover.member), self._run(takeover.source)
            take_over(loser, winner, config, step=this.step)
            say(f"step {this.step}  {loser.name} takes over from {winner.name}")
        # Only when all is done: an exchange that is interrupted is decided again, with the same
        # result.
        this.exchange = takeovers
        write_record(self._directory / FILE, history)

    def _run(self, member: int) -> Path:
        return self._directory / f"member_{member}"


def score(run: Path, step: int, tag: str = "eval/mIoU") -> float | None:
    """That of a run's evaluation at `step`; None: no number. ExecutionError: there is none."""
    path = run / run_directory.METRICS
    try:
        lines = map(files.parse_json, files.read_bytes(path).splitlines())
        scores = [line[tag] for line in lines if line["step"] == step and tag in line]
        return scores[-1]
    except (OSError, ValueError, LookupError, TypeError):
        raise ExecutionError(f"{path}: has no {tag} of step {step}") from None


def take_over(loser: Path, winner: Path, config: Config, *, step: int) -> None:
    """Gives the run in `loser` the checkpoints of the run in `winner`, and `config`.

    The winner is only read, so after an interruption the same call completes the exchange. Files
    in `loser` that no run has written stay. Its checkpoints say `config`, rather than that it is
    given by --accept-changes, because the run must still refuse data that have changed.

    step: that of the winner's last.pt; CheckpointError if it is of another.
    """
    source, target = (run / run_directory.CHECKPOINTS for run in (winner, loser))
    # Neither of the two may train meanwhile.
    with RunLock(loser), RunLock(winner):
        known = manifest.read_entries(source)
        if step not in [entry.step for entry in known.get(LAST, ())]:
            raise CheckpointError(f"{source / LAST}: expected the checkpoint of step {step}")
        known = {name: known[name] for name in known if os.path.lexists(source / name)}
        with files.os_errors_as(ExecutionError, loser, f"cannot take over from {winner.name}"):
            target.mkdir(exist_ok=True)
            # Before the manifest is replaced, which says which files are the run's own.
            for name in manifest.read_entries(target).keys() - known.keys():
                (target / name).unlink(missing_ok=True)
            for name in known:
                if name == BEST:  # nothing goes on from it
                    files.write_atomic(target / name, (source / name).read_bytes())
                    continue
                saved = load(source / name)._replace(config=config_field(config))
                with write_temporary(target / name, saved) as (temporary, entry):
                    temporary.replace(target / name)
                known[name] = [entry]
            manifest.write(target, known)
            run_directory.write_config(loser, config)
        with RunLog(loser, enabled=True):
            log_only(f"changed    all weights: those of {winner.name} at step {step}")
