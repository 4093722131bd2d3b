"""`segtrain verify`: steps of a run computed again, and compared with what the run left.

Every rank computes its shares; rank 0 compares, and all end together. Nothing is written into the
run directory and no lock is taken: the run may still be training.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from segtrain import plugins
from segtrain.checkpoint.dataset_guard import DatasetGuard, Resumed
from segtrain.checkpoint.format import Checkpoint, load, parse_experiment
from segtrain.checkpoint.manager import kept_checkpoints
from segtrain.config import Config
from segtrain.config.loading import given_key, parse_config
from segtrain.config.strict_yaml import read_text
from segtrain.data.sample.loader import worker_failures
from segtrain.desk.results.differences import checkpoint_differences, receipt_differences
from segtrain.distributed import collectives as dist
from segtrain.distributed import liveness
from segtrain.distributed.machine import keep_freed_memory
from segtrain.distributed.process_group import device_for, process_group
from segtrain.errors import EXIT_OK, CheckpointError, ConfigError
from segtrain.files import os_errors_as
from segtrain.models.precision import float32_products
from segtrain.run import directory as run_directory
from segtrain.run.console import ProgressBar, say
from segtrain.run.receipts import Receipt, read_receipts
from segtrain.text import counted
from segtrain.trainer.evaluation import take_precise_statistics
from segtrain.trainer.setup import DATA_PATIENCE_S, make_repeatable, prepare
from segtrain.trainer.training import Training, host_watch
from segtrain.training.receipt_meter import ReceiptMeter, weights_lines
from segtrain.training.state import TrainState
from segtrain.training.step_sync import StepSync

# These change no bit of a step.
_SETTABLE = (
    *("data.root", "data.classes", "data.pack", "data.num_workers"),
    "train.timeout_s",
)


class StepSpan(NamedTuple):
    """What is computed again; JSON can hold it."""

    first: int  # the steps to verify, counted from 1
    last: int
    start: str | None  # the checkpoint to start from; None: the beginning
    start_step: int
    kept: list[tuple[int, str]]  # step and name of checkpoints of the replayed steps


@dataclass(kw_only=True)
class Replay(Training):
    """A run that is computed again on this rank."""

    directory: Path  # of the run
    plan: StepSpan
    receipts: dict[int, Receipt]  # of the run, on rank 0
    data: DatasetGuard
    evaluated: bool  # whether the state is one after the evaluation of its step


def run_verify(args: argparse.Namespace) -> int:
    """Verifies as the command line says and returns the exit code (collective).

    Raises:
        CheckpointError: something differs from the run, a checkpoint is damaged, or a receipt is of
            a step that the run has not.
        ConfigError: these steps cannot be verified.
    """
    device, run = device_for(args.device), run_directory.named_run(args.run)
    config = _config(run, args.set)
    if device.type == "cpu":
        keep_freed_memory()
    group = process_group(device, timeout_s=config.train.timeout_s)
    with group, float32_products(config.train), ExitStack() as stack:
        make_repeatable(config, device)
        receipts: dict[int, Receipt] = {}
        # Rank 0 reads alone: the run may still write, and ranks could find different files.
        plan = dist.run_on_rank0(lambda: _plan(run, args.steps, config.train.steps, receipts))
        _replay(_set_up(run, config, device, StepSpan(*plan), receipts, stack))
    return EXIT_OK


def _config(run: Path, overrides: Sequence[str]) -> Config:
    """The run's own config; ConfigError if it promises no bits."""
    for text in overrides:
        if given_key(text) not in _SETTABLE:
            what = f"the run decides this; verify takes {', '.join(_SETTABLE)}"
            raise ConfigError(f"--set {text}: {what}")
    # As a checkpoint: who verifies a run of somebody else must not run their code.
    file = run / run_directory.CONFIG
    config = parse_config(read_text(file), source=str(file), overrides=overrides)
    if config.train.shares is None:
        what = "trained without train.shares, so it has no receipts"
        raise ConfigError(f"{run}: {what}; to verify a run, start it with --set train.shares=N")
    return config


def _plan(
    run: Path, steps: tuple[int | None, int | None], num_steps: int, receipts: dict[int, Receipt]
) -> StepSpan:
    """The plan for the first and last of `steps`; puts the receipts of the run into `receipts`.

    Without a last step, it is that of the newest receipt; without a first one, that after the
    newest checkpoint before the last step.

    Raises:
        CheckpointError: a checkpoint is damaged, or a receipt is of a step that the run has not.
        ConfigError: these steps cannot be verified.
    """
    path = run / run_directory.RECEIPTS
    none_yet = "no receipts yet (the run writes them every log.every_steps)"
    with os_errors_as(ConfigError, path, none_yet):
        receipts.update(read_receipts(path))
    foreign = [step for step in sorted(receipts) if not 1 <= step <= num_steps]
    if foreign:
        what = f"has receipts of {counted(len(foreign), 'step', 'steps')} that the run has not"
        raise CheckpointError(f"{path}: {what}, as {foreign[0]}: it ends at step {num_steps}")
    if not receipts:
        raise ConfigError(f"{path}: {none_yet}")
    first, last = steps
    oldest, newest = min(receipts), max(receipts)
    # A first step behind all receipts is reported as missing below, not taken for an empty span.
    last = last or max(newest, first or 0)
    # Where receipts begin later than the run, its config was changed: what came before was another.
    kept = kept_checkpoints(run / run_directory.CHECKPOINTS)
    kept = [(step, path) for step, path in kept if step >= oldest - 1]
    start_step, start = _start(kept, before=first or last)
    if start is None and oldest > 1:
        what = f"its config was changed at step {oldest}, where its receipts begin"
        raise ConfigError(f"{run}: {what}; no checkpoint lies between it and the steps to verify")
    first = first or start_step + 1
    # Not a list: there may be no end to the steps that are asked for.
    missing = next((step for step in range(first, last + 1) if step not in receipts), None)
    if missing is not None:
        there = f"{len(receipts)} steps, {oldest} to {newest}"
        raise ConfigError(f"--steps: {run} has receipts of {there}, but none of step {missing}")
    between = [(step, path) for step, path in kept if start_step < step <= last]
    # Now rather than hours later, when the replay comes to their step.
    readable = [(step, path.name) for step, path in between if _load(path) is not None]
    return StepSpan(first, last, start, start_step, readable)


def _start(kept: list[tuple[int, Path]], *, before: int) -> tuple[int, str | None]:
    """Step and name of the newest checkpoint before a step that holds training state."""
    # The sort is stable: step_N.pt comes first, which a run that still trains does not replace.
    earlier = sorted((pair for pair in kept if pair[0] < before), key=lambda pair: -pair[0])
    for _, path in earlier:
        checkpoint = _load(path)
        if checkpoint and checkpoint.optimizer is not None and checkpoint.step < before:
            return checkpoint.step, path.name
    return 0, None


def _load(path: Path) -> Checkpoint | None:
    """A checkpoint of the run; None if the run, which may still train, has removed it."""
    try:
        return load(path)
    except CheckpointError as error:
        if os.path.lexists(path):
            raise CheckpointError(f"{error}; move it away to verify the run without it") from None
        return None


def _set_up(
    run: Path,
    config: Config,
    device: torch.device,
    plan: StepSpan,
    receipts: dict[int, Receipt],
    stack: ExitStack,
) -> Replay:
    """Brings data, model and optimizer to where the replay starts (collective)."""
    notes: list[str] = []
    checkpoints = run / run_directory.CHECKPOINTS
    # 1. The checkpoint to start from, and one that knows data and machine of the run.
    start = plan.start and _load_alike(checkpoints / plan.start, plan.start_step)
    known = start
    if known is None and plan.kept:
        known = _load_alike(checkpoints / plan.kept[0][1], plan.kept[0][0])
    # 2. Data and state. What differs from the run is told, not refused: perhaps it is looked for.
    if known is not None:
        others = run_directory.config_differences(parse_experiment(*known)[0], config)
        notes += [f"warning: {run_directory.CONFIG} has been edited: {line}" for line in others]
        changed = plugins.changes(known.checkpoint.plugins or [])
        notes += [f"warning: {line}" for line in changed]
    ready = prepare(config, device, run, notes, stack, start=start, known=known)
    _say(*notes)
    step_sync = StepSync(
        lambda: False,
        overflow_allowed=config.train.precision == "float16",
        timeout_s=config.train.timeout_s,
    )
    replay = Replay(
        **ready.training(config, device, step_sync),
        last_step=plan.last,
        watch=host_watch(config, device, stack),
        directory=run,
        plan=plan,
        receipts=receipts,
        data=ready.data,
        evaluated=start is not None and start.checkpoint.evaluated == ready.state.step,
    )
    # Ends the loader and its workers, also after an error.
    stack.callback(replay.reopen)
    return replay


def _load_alike(path: Path, step: int) -> Resumed:
    """The checkpoint of `step`, which all ranks must find in this file (collective)."""
    loaded = []

    # Ranks exchange only the step; each keeps the checkpoint that it has read.
    def load_here() -> int:
        loaded.append(load(path))
        return loaded[0].step

    if set(dist.run_on_all_ranks(load_here)) != {step}:
        raise CheckpointError(f"{path}: the run, which still trains, has replaced it; start again")
    return Resumed(loaded[0], path)


def _replay(this: Replay) -> None:
    """Computes the steps again (collective).

    Raises:
        CheckpointError: at the first difference, on all ranks.
    """
    plan, config, state = this.plan, this.config, this.state
    steps = f"steps {plan.first}..{plan.last} of {this.directory}"
    ranks = f"{dist.world_size()} of at most {config.train.shares} ranks"
    _say(f"verify     {steps}, from {plan.start or 'the beginning'}, {ranks}")
    # Hashes of all weights take time: only where the run's receipts have them, too.
    with_weights = {step for step, receipt in this.receipts.items() if receipt.weights is not None}
    meter = this.receipt_meter(with_weights.__contains__)
    this.parts = (meter,)
    _follow_evaluation(this)
    # The receipt of the first step may hold the weights before it: they are gone after the step.
    following = this.receipts.get(state.step + 1)
    if following is not None and following.start is not None:
        meter.take_start()
    bar = ProgressBar(plan.last, state.step, "verify", enabled=dist.is_main())
    liveness.beat("training", state.step)
    with worker_failures(), bar:
        for local in this.batches():
            with this.around():
                left = this.step(local)
                result = this.step.done(local, left)
            # The step has made a new state, from before its evaluation.
            this.evaluated = False
            for part in this.parts:
                part.after_step(this, local, result)
            _compare(this, meter)
            bar.update()
            liveness.beat("training", state.step)
        # A step acts on the flags of the one before; those of the last step are still unread.
        this.step_sync.check_finite()
    if state.step == config.train.steps and dist.is_main():
        _say(*weights_lines(state))
    num_weights = len(with_weights.intersection(range(plan.start_step + 1, plan.last + 1)))
    # Older receipts do not hold them.
    pixels = "pixels, " if all(receipt.pixels for receipt in this.receipts.values()) else ""
    _say(
        f"verified {steps}: the names of samples, {pixels}losses, gradient norms and the largest "
        "value of each gradient are equal in every bit, and so are all weights in "
        f"{num_weights} of these steps"
    )


def _compare(this: Replay, meter: ReceiptMeter) -> None:
    """Compares the newest steps, if it is time to, then follows the run's evaluation."""
    plan, step = this.plan, this.state.step
    names = [name for kept_step, name in plan.kept if kept_step == step]
    # As often as the run has written its receipts.
    if names or step == plan.last or step % this.config.log.every_steps == 0:
        receipts = meter.take_receipts()
        _end_if(this, lambda: _receipts_differ(this, receipts))
    # Statistics of an evaluation change the model: a checkpoint is from before or after it.
    for _ in range(2):
        if names:
            _end_if(this, lambda: _checkpoints_differ(this, names))
        if not _follow_evaluation(this):
            return


def _follow_evaluation(this: Replay) -> bool:
    """Does what the run's evaluation after this step did to the model, if anything (collective)."""
    step, every_steps = this.state.step, this.config.eval.every_steps
    batches_to_take = this.config.norm.precise_batches
    due = step == this.config.train.steps or (every_steps is not None and step % every_steps == 0)
    if step == 0 or this.evaluated or not due or batches_to_take is None:
        return False
    take_precise_statistics(this, batches_to_take)
    this.evaluated = True
    return True


def _receipts_differ(this: Replay, receipts: Sequence[Receipt]) -> list[str]:
    state = this.state
    names = {
        "gradients": list(state.passes.gradients.exponents),
        "weights": list(state.model.state_dict()),
    }
    for here in receipts:
        there = this.receipts.get(here.step)
        # Steps before the first one that was asked for may have none.
        if there is not None and (lines := receipt_differences(there, here, names)):
            return [f"step {here.step} differs from its receipt", *lines.values()]
    return []


def _checkpoints_differ(this: Replay, names: Sequence[str]) -> list[str]:
    step, takes_statistics = this.state.step, this.config.norm.precise_batches is not None
    for name in names:
        # The run may have removed or replaced the file since.
        checkpoint = _load(this.directory / run_directory.CHECKPOINTS / name)
        if checkpoint is None or checkpoint.step != step:
            continue
        if takes_statistics and (checkpoint.evaluated == step) != this.evaluated:
            continue
        if lines := checkpoint_differences(checkpoint, _checkpoint_of(this.state)):
            return [f"{name} differs from the weights of its step, {step}", *lines]
    return []


def _checkpoint_of(state: TrainState) -> Checkpoint:
    """What of a state must be equal in a checkpoint of its step."""
    average = None if state.average is None else state.average.model.state_dict()
    parts = state.model.state_dict(), average, state.optimizer.state_dict()
    start = state.initial_weights.fields()
    return Checkpoint(state.step, "", "", *parts, scaler=None, best=None, start=start)


def _end_if(this: Replay, differ: Callable[[], list[str]]) -> None:
    """Raises CheckpointError on all ranks if `differ` finds differences on rank 0 (collective)."""
    lines = dist.run_on_rank0(differ)
    if not lines:
        return
    # Changed data may be the cause. Their hashes are made meanwhile, and get some time to end.
    this.data.wait_for_hashes(lambda seconds: seconds > DATA_PATIENCE_S)
    lines += this.data.pop_log_lines()
    raise CheckpointError("\n  ".join([f"{this.directory}: {lines[0]}", *lines[1:]]))


def _say(*lines: str) -> None:
    if dist.is_main():
        for line in lines:
            say(line)
