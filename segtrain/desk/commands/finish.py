"""`segtrain train RUN --finish STEPS`: a branch, which goes on from a checkpoint of RUN to an end.

The branch is a run of its own. It begins with the checkpoint, and what it does from there on stands
in its config: train.steps, and a learning rate that falls from the rate of the checkpoint. So it is
resumed as any other run. RUN is only read, and may still be training.
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from segtrain import files
from segtrain.commands.run_target import CHECKPOINT, Target
from segtrain.config import Config, ScheduleConfig, load_config
from segtrain.config.loading import given_keys, override_config
from segtrain.errors import CheckpointError, ConfigError, ExecutionError
from segtrain.run import directory as run_directory
from segtrain.run.directory import RunLock
from segtrain.run.environment import ENVIRONMENT
from segtrain.training.optim.schedule import base_lr, describe_rates, learning_rate

# With less of the rate after warmup, a branch would change next to nothing, or little.
_LEAST_RATE, _LOW_RATE = 0.01, 0.1
_DECIDED = ("train.steps", "optim.lr_batch_size")


def branch_directory(text: str, output: Path | None) -> Path:
    """Where `segtrain train TEXT --finish` makes the branch; ConfigError if TEXT is no run."""
    run = run_directory.run_of(Path(text))
    if run is None:
        raise ConfigError(f"{text}: expected a run, or a checkpoint of one, to finish")
    beside = Path(os.path.normpath(run / os.pardir))
    return output or beside / f"{run.resolve().name}_finish"


def branch(args: argparse.Namespace, *, resume: bool, alone: bool) -> Target:
    """The run of --finish; it is made now, unless it is there and goes on.

    alone: no other process has this command line.
    """
    directory = branch_directory(args.config, args.output)
    config = directory / run_directory.CONFIG
    if not (resume and run_directory.has_saved(directory)):
        if not alone:
            raise ConfigError(
                "--finish: makes a run before the ranks start; with torchrun or srun, first, "
                f"alone: segtrain train {shlex.quote(args.config)} --finish {args.finish} "
                f"--until 1; then start all with {directory} --resume"
            )
        _begin_branch(args, directory)
    begun = load_config(config).schedule.finish_from
    if begun is None:
        raise ConfigError(f"{directory}: no branch (schedule.finish_from); choose another --output")
    # The steps count from the checkpoint that the branch began with, also when it is resumed.
    args.set = [f"train.steps={begun + args.finish}", *args.set]
    return Target(config, directory)


def _begin_branch(args: argparse.Namespace, directory: Path) -> None:
    """Makes the run of --finish, from the checkpoint that is named or the newest of the run."""
    named = Path(args.config)
    checkpoint = named if args.config.endswith(CHECKPOINT) else None
    run = run_directory.run_of(named)
    if (run / run_directory.CONFIG).is_file():
        load_config(run / run_directory.CONFIG)  # imports its plugins, as --resume does
    begin(run, checkpoint, directory, steps=args.finish, overrides=args.set)
    args.argv = [*args.argv, "--resume"]  # of the ranks


def begin(
    run: Path, checkpoint: Path | None, directory: Path, *, steps: int, overrides: Sequence[str]
) -> None:
    """Makes the branch of `run` in `directory`, ready to be resumed.

    Weights, optimizer and average are those of the checkpoint. The best score and what ends a run
    early begin anew; the curves of the training are those of `run` so far.

    checkpoint: None: the newest of `run`. steps: from there to the end.

    Raises:
        ConfigError: `directory` holds a run, an override cannot be meant, or the rate is too low.
        CheckpointError: there is no checkpoint with the state of the training.
    """
    from segtrain.checkpoint.format import config_field, load, parse_experiment
    from segtrain.checkpoint.manager import CheckpointManager
    from segtrain.run.log import RunLog, drop_later, say

    # 1. The checkpoint.
    problems = []
    if checkpoint is None:
        folder = run / run_directory.CHECKPOINTS
        checkpoint, problems = CheckpointManager(folder).newest()
    if checkpoint is None:
        raise CheckpointError(f"{run}: has saved no checkpoint yet")
    saved = load(checkpoint)
    if saved.optimizer is None:
        what = "holds no training state; name last.pt, or a step_N.pt (checkpoint.keep_every_steps)"
        raise CheckpointError(f"{checkpoint}: {what}")
    # 2. The config.
    before, _ = parse_experiment(saved, checkpoint)
    config = _branch_config(before, saved.step, steps, overrides, source=str(checkpoint))
    rates = describe_rates(config, saved.step)
    changes = run_directory.config_differences(before, config)
    lines = [
        *(f"warning: {problem}" for problem in (*problems, *_low_rate(before, config))),
        f"branch of {run} at step {saved.step}, {steps} more steps, lr {rates}",
        *(f"changed    {x}" for x in changes if not x.startswith(("train.steps:", "schedule."))),
    ]
    # 3. The run. Its config comes last: without the checkpoint, it would train from the beginning.
    checkpoints = CheckpointManager(directory / run_directory.CHECKPOINTS)
    with RunLock(directory), ExitStack() as stack:
        run_directory.check_directory(directory, config, resume=False)
        stack.enter_context(RunLog(directory, enabled=True))
        checkpoints.clean_up()
        checkpoints.check_space(saved)
        checkpoints.keep(saved._replace(config=config_field(config), best=None))
        with files.os_errors_as(ExecutionError, directory, "cannot be written"):
            for name in (ENVIRONMENT, run_directory.METRICS):
                with suppress(FileNotFoundError):
                    files.write_atomic(directory / name, files.read_bytes(run / name))
            # The run may have gone on since the checkpoint.
            drop_later(directory / run_directory.METRICS, saved.step, 0)
            run_directory.write_config(directory, config)
        for line in lines:
            say(line)


def _branch_config(
    before: Config, step: int, steps: int, overrides: Sequence[str], *, source: str
) -> Config:
    """The config of a branch at `step`; `before`: that of the checkpoint."""
    given = given_keys(overrides)
    for key in given:
        if key in _DECIDED or (key.startswith("schedule.") and key != "schedule.min_lr"):
            what = "the checkpoint decides this with --finish; choose optim.lr, schedule.min_lr"
            raise ConfigError(f"--set {key}: {what}")
    # After its last step a schedule is not defined.
    lr = learning_rate(before, min(step, before.train.steps - 1))
    if "optim.lr" not in given:
        _check_rate(before, step, lr)
    optim = before.optim.model_copy(update={"lr": lr, "lr_batch_size": None})
    # The floor of the rate must not lie above the rate with which the branch begins.
    min_lr = min(before.schedule.min_lr, lr)
    schedule = ScheduleConfig(kind="constant", finish_from=step, min_lr=min_lr)
    config = before.model_copy(update={"optim": optim, "schedule": schedule})
    return override_config(config, [f"train.steps={step + steps}", *overrides], source=source)


def _check_rate(before: Config, step: int, lr: float) -> None:
    """Refuses a branch that cannot begin at `lr`, the rate of the checkpoint."""
    usual = base_lr(before)
    repair = f"choose one by --set optim.lr={usual:g}, or name an earlier checkpoint"
    now = f"--finish: the learning rate after step {step} is {lr:.3g}, {100 * lr / usual:.2g} %"
    if lr < _LEAST_RATE * usual:
        raise ConfigError(f"{now} of {usual:g}, and would change next to nothing; {repair}")


def _low_rate(before: Config, config: Config) -> list[str]:
    """A warning if a branch trains with little of the usual rate, as after a short poly run."""
    usual = base_lr(before)
    part = config.optim.lr / usual
    if part >= _LOW_RATE:
        return []
    what = f"--set optim.lr={usual:g} lets it begin there"
    return [f"the learning rate begins at {part:.0%} of {usual:g}; {what}"]
