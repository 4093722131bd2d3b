"""`segtrain verify`: steps of a run computed again, and compared with what the run left.

Every rank computes its shares; rank 0 compares, and all end together. Nothing is written into the
run directory and no lock is taken: the run may still be training.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from segtrain.checkpoint.dataset_guard import DatasetGuard, Resumed
from segtrain.checkpoint.format import Checkpoint, load, parse_experiment
from segtrain.checkpoint.manager import kept_checkpoints
from segtrain.commands.train.evaluate import take_precise_statistics
from segtrain.commands.train.setup import (
    DATA_PATIENCE_S,
    TrainContext,
    build_state,
    class_uniform_sampling,
    make_repeatable,
    open_data,
    other_arithmetic,
)
from segtrain.commands.verify_differences import (
    checkpoint_differences,
    receipt_differences,
    start_differences,
)
from segtrain.config import Config, load_config
from segtrain.data.sample.loader import worker_failures
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
from segtrain.text import first_of
from segtrain.training.engine import train_steps
from segtrain.training.receipts import ReceiptMeter, weights_lines
from segtrain.training.step_sync import StepSync


class Plan(NamedTuple):
    """What is computed again; JSON can hold it."""

    first: int  # the steps to verify, counted from 1
    last: int
    start: str | None  # the checkpoint to start from; None: the beginning
    start_step: int
    kept: list[tuple[int, str]]  # step and name of checkpoints of the replayed steps
    notes: list[str]


def read_run_receipts(run: Path, steps: int) -> dict[int, Receipt]:
    """The receipts of a run of so many steps, by step.

    Raises:
        ConfigError: there are none.
        CheckpointError: one is of a step that the run does not have.
    """
    path = run / run_directory.RECEIPTS
    with os_errors_as(
        ConfigError, path, "no receipts yet (the run writes them every log.every_steps)"
    ):
        receipts = read_receipts(path)
    if not receipts:
        what = "holds no whole receipt; the run writes them every log.every_steps"
        raise ConfigError(f"{path}: {what}")
    if foreign := [step for step in receipts if not 1 <= step <= steps]:
        raise CheckpointError(
            f"{path}: has a receipt of step {foreign[0]}, the run has the steps 1 to {steps} "
            "(train.steps): it did not write this line; remove it to verify the others"
        )
    return receipts


def make_plan(
    run: Path, steps: tuple[int | None, int | None], receipts: dict[int, Receipt]
) -> Plan:
    """The plan for the first and last of `steps`; writes nothing, loads the checkpoints on the way.

    Without a last step, it is that of the newest receipt; without a first one, that after the
    newest checkpoint before the last step.

    Raises:
        ConfigError: some of the steps have no receipt.
        CheckpointError: a checkpoint, or the manifest, is damaged.
    """
    first, last = steps
    newest = max(receipts)
    last = last or max(newest, first or 0)
    kept = kept_checkpoints(run / run_directory.CHECKPOINTS)
    # Where receipts begin later than the run, its config was changed: what came before was another.
    beginning = min(receipts) - 1
    kept = [(step, path) for step, path in kept if step >= beginning]
    start_step, start = _start(kept, before=first or last)
    if start is None and beginning > 0:
        raise ConfigError(
            f"{run}: its receipts begin with step {beginning + 1}, because its config was changed "
            "there or it had no train.shares before, and no checkpoint between that step and the "
            "steps to verify is kept; checkpoint.keep_every_steps keeps some"
        )
    first = first or start_step + 1
    # Not a list: there may be no end to the steps that are asked for.
    missing = next((step for step in range(first, last + 1) if step not in receipts), None)
    if missing is not None:
        raise ConfigError(
            f"--steps: {run} has receipts of {len(receipts)} steps, {min(receipts)} to {newest}, "
            f"but none of step {missing} (not done yet, or its line in "
            f"{run_directory.RECEIPTS} is missing or damaged); choose other steps by --steps A:B"
        )
    notes = []
    if start is None and steps[0] != 1:
        notes.append(
            f"note: no checkpoint from before step {first} is kept, so the replay starts at the "
            "beginning; checkpoint.keep_every_steps keeps some"
        )
    between = [(step, path) for step, path in kept if start_step < step <= last]
    # Now rather than hours later, when the replay comes to their step.
    found = [(step, path.name) for step, path in between if _load(path) is not None]
    return Plan(first, last, start, start_step, found, notes)


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
        if not os.path.lexists(path):
            return None
        raise CheckpointError(f"{error}; move it away to verify the run without it") from None


# These change no bit of a step.
_SETTABLE = (
    *("data.root", "data.classes", "data.pack", "data.num_workers", "data.prefetch"),
    "train.timeout_s",
)
_MAX_NAMES = 64  # images of a step that are listed


@dataclass(kw_only=True)
class Replay(TrainContext):
    """A run that is computed again on this rank."""

    directory: Path  # of the run
    plan: Plan
    receipts: dict[int, Receipt]  # of the run, on rank 0
    data: DatasetGuard | None  # None if no checkpoint says what the data were
    evaluated: bool  # whether the state is one after the evaluation of its step


def run_verify(args: argparse.Namespace) -> int:
    """Verifies as the command line says and returns the exit code (collective).

    args: run, steps (first and last, each may be None), set, device.

    Raises:
        CheckpointError: something differs from the run, or a checkpoint is damaged.
        ConfigError: these steps cannot be verified.
    """
    device = device_for(args.device)
    config = _config(args.run, args.set)
    if device.type == "cpu":
        keep_freed_memory()
    group = process_group(device, timeout_s=config.train.timeout_s)
    with group, float32_products(config.train), ExitStack() as stack:
        make_repeatable(config, device)
        receipts: dict[int, Receipt] = {}

        def plan_steps() -> Plan:
            receipts.update(read_run_receipts(args.run, config.train.steps))
            return make_plan(args.run, args.steps, receipts)

        plan = Plan(*dist.run_on_rank0(plan_steps))
        _replay(_set_up(args.run, config, device, plan, receipts, stack))
    return EXIT_OK


def _config(run: Path, overrides: Sequence[str]) -> Config:
    """The run's own config; ConfigError if it promises no bits."""
    foreign = [text for text in overrides if text.partition("=")[0].strip() not in _SETTABLE]
    if foreign:
        what = f"the run decides this; verify takes {', '.join(_SETTABLE)}"
        raise ConfigError("\n".join(f"--set {text}: {what}" for text in foreign))
    path = run / run_directory.CONFIG
    if not path.is_file():
        raise ConfigError(f"{run}: no run to verify: there is no {run_directory.CONFIG} in it")
    config = load_config(path, overrides)
    if config.train.shares is None:
        raise ConfigError(
            f"{run}: trained without train.shares: its steps can be repeated up to rounding only, "
            "and it has no receipts; to verify a run later, start it with --set train.shares=N"
        )
    return config


def _set_up(
    run: Path,
    config: Config,
    device: torch.device,
    plan: Plan,
    receipts: dict[int, Receipt],
    stack: ExitStack,
) -> Replay:
    """Brings data, model and optimizer to where the replay starts (collective)."""
    notes = list(plan.notes)
    checkpoints = run / run_directory.CHECKPOINTS
    # 1. The checkpoint to start from, and one that knows data and machine of the run.
    start = None
    if plan.start is not None:
        start = _load_alike(checkpoints / plan.start, plan.start_step)
    known = start
    if known is None and plan.kept:
        step, name = plan.kept[0]
        with suppress(CheckpointError):  # damaged, or replaced since; that is met again later
            known = _load_alike(checkpoints / name, step)
    # 2. The data and the state.
    train_set, eval_set = open_data(config, device, notes)
    state = build_state(config, device, start, train_set, notes)
    # 3. What differs from the run is told, not refused: perhaps it is what is looked for.
    notes += other_arithmetic(state, known and known.checkpoint, "expect differences")
    data = None
    if known is not None:
        before, _ = parse_experiment(*known)
        changes = run_directory.config_differences(before, config)
        where = f"warning: the config has changed since {known.path.name}"
        notes += [f"{where}: {line}" for line in changes]
        data = DatasetGuard((train_set, eval_set), config.data.root, known, accept_changes=True)
        stack.callback(data.close)
        data.start(DATA_PATIENCE_S)
        notes += data.pop_log_lines()
    class_uniform, others = class_uniform_sampling(config, train_set, run, known, device)
    notes += others
    _say(*notes)
    return Replay(
        config=config,
        directory=run,
        device=device,
        train_set=train_set,
        class_uniform=class_uniform,
        state=state,
        step_sync=StepSync(
            lambda: False,
            overflow_allowed=config.train.precision == "float16",
            timeout_s=config.train.timeout_s,
        ),
        plan=plan,
        receipts=receipts,
        data=data,
        evaluated=start is not None and start.checkpoint.evaluated == state.step,
    )


def _load_alike(path: Path, step: int) -> Resumed:
    """The checkpoint of `step`, which all ranks must find in this file (collective)."""
    loaded = []

    def load_here() -> int:
        loaded.append(load(path))
        return loaded[0].step

    if set(dist.run_on_all_ranks(load_here)) != {step}:
        raise CheckpointError(
            f"{path}: replaced while it was being loaded, because the run is still training; start "
            "again, or choose --steps that begin after a step_N.pt"
        )
    return Resumed(loaded[0], path)


def _replay(this: Replay) -> None:
    """Computes the steps again (collective).

    Raises:
        CheckpointError: at the first difference, on all ranks.
    """
    plan, config, state = this.plan, this.config, this.state
    ranks = f"{dist.world_size()} of at most {config.train.shares} ranks"
    start = plan.start or "the beginning"
    _say(f"verify     steps {plan.first}..{plan.last} of {this.directory}, from {start}, {ranks}")
    meter = None
    if dist.is_main():
        taken = {step for step, receipt in this.receipts.items() if receipt.weights is not None}
        meter = this.receipt_meter(taken.__contains__)
    _check_start(this)
    _follow_evaluation(this)
    stream = this.batches(state.step, plan.last)
    steps = train_steps(
        state,
        stream,
        config,
        device=this.device,
        indices=this.indices(),
        step_sync=this.step_sync,
    )
    bar = ProgressBar(plan.last, state.step, "verify", enabled=dist.is_main())
    liveness.beat("training", state.step)
    # The loader's workers end first.
    with worker_failures(), bar, closing(stream), closing(steps):
        while state.step < plan.last:
            result = next(steps)
            this.evaluated = False
            if meter is not None:
                meter.update(result)
            _compare(this, meter)
            bar.update()
            liveness.beat("training", state.step)
        this.step_sync.check_finite()
    if state.step == config.train.steps and dist.is_main():
        _say(*weights_lines(state))
    replayed = range(plan.start_step + 1, plan.last + 1)
    num_weights = sum(this.receipts[s].weights is not None for s in replayed if s in this.receipts)
    _say(
        f"verified steps {plan.first}..{plan.last} of {this.directory}: the names of samples, "
        "losses, gradient norms and the largest value of each gradient are equal in every bit, "
        f"and so are all weights in {num_weights} of these steps"
    )


def _compare(this: Replay, meter: ReceiptMeter | None) -> None:
    """Compares the newest steps, if it is time to, then follows the run's evaluation."""
    plan, step = this.plan, this.state.step
    names = [name for kept_step, name in plan.kept if kept_step == step]
    if names or step == plan.last or step % this.config.log.every_steps == 0:
        _end_if(this, lambda: _receipts_differ(this, meter))
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


def _check_start(this: Replay) -> None:
    """Compares the weights to start from with the receipt of their step (collective)."""
    # Precise statistics come after the receipt.
    comparable = not (this.evaluated and this.config.norm.precise_batches is not None)

    def differ() -> list[str]:
        receipt = this.receipts.get(this.state.step)
        if receipt is None or not comparable:
            return []
        lines = start_differences(receipt, this.state)
        what = f"{this.plan.start}: not what the receipt of its step, {receipt.step}, says"
        return [what, *lines] if lines else []

    _end_if(this, differ)


def _receipts_differ(this: Replay, meter: ReceiptMeter) -> list[str]:
    for here in meter.take_receipts():
        there = this.receipts.get(here.step)
        # Steps before the first one that was asked for may have none.
        if there is not None and (lines := receipt_differences(there, here, this.state)):
            if there.samples == here.samples and there.loss != here.loss:
                names = first_of(this.stream().names_of_step(here.step - 1), _MAX_NAMES)
                what = "perhaps pixels changed under the same name and size; it used"
                lines.append(f"{what} {names}")
            return [f"step {here.step} differs from its receipt", *lines]
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
        try:
            lines = checkpoint_differences(checkpoint, this.state)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            lines = [f"its state is none of this model: {error}"]
        if lines:
            return [f"{name} differs from the weights of its step, {step}", *lines]
    return []


def _end_if(this: Replay, differ: Callable[[], list[str]]) -> None:
    """Raises CheckpointError on all ranks if `differ` finds differences on rank 0 (collective)."""
    lines = dist.run_on_rank0(differ)
    if not lines:
        return
    if this.data is not None:
        this.data.wait_for_hashes(lambda seconds: seconds > DATA_PATIENCE_S)
        lines += this.data.pop_log_lines()
    raise CheckpointError("\n  ".join([f"{this.directory}: {lines[0]}", *lines[1:]]))


def _say(*lines: str) -> None:
    if dist.is_main():
        for line in lines:
            say(line)
