"""`segtrain verify`: steps of a run computed again, and compared with what the run left.

Every rank computes its shares; rank 0 compares, and all end together. Nothing is written into the
run directory and no lock is taken: the run may still be training.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segtrain.checkpoint.dataset_guard import DatasetGuard, Resumed
from segtrain.checkpoint.format import Checkpoint, load
from segtrain.checkpoint.manager import kept_checkpoints
from segtrain.checkpoint.restore import initial_weights_fields
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
from segtrain.config import Config, load_config
from segtrain.config.loading import given_key
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
from segtrain.run.receipts import GRADIENT, WEIGHT, Receipt, read_receipts, unpack
from segtrain.text import MAX_NAME, printable
from segtrain.training.engine import train_steps
from segtrain.training.receipts import ReceiptMeter, hash_tensor, weights_lines
from segtrain.training.state import TrainState
from segtrain.training.step_sync import StepSync

# These change no bit of a step.
_SETTABLE = (
    *("data.root", "data.classes", "data.pack", "data.num_workers", "data.prefetch"),
    "train.timeout_s",
)


class Plan(NamedTuple):
    """What is computed again; JSON can hold it."""

    first: int  # the steps to verify, counted from 1
    last: int
    start: str | None  # the checkpoint to start from; None: the beginning
    start_step: int
    kept: list[tuple[int, str]]  # step and name of checkpoints of the replayed steps


@dataclass(kw_only=True)
class Replay(TrainContext):
    """A run that is computed again on this rank."""

    directory: Path  # of the run
    plan: Plan
    receipts: dict[int, Receipt]  # of the run, on rank 0
    data: DatasetGuard
    evaluated: bool  # whether the state is one after the evaluation of its step


def run_verify(args: argparse.Namespace) -> int:
    """Verifies as the command line says and returns the exit code (collective).

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
        plan = dist.run_on_rank0(lambda: _plan(args.run, args.steps, config.train.steps, receipts))
        _replay(_set_up(args.run, config, device, Plan(*plan), receipts, stack))
    return EXIT_OK


def _config(run: Path, overrides: Sequence[str]) -> Config:
    """The run's own config; ConfigError if it promises no bits."""
    for text in overrides:
        if given_key(text) not in _SETTABLE:
            what = f"the run decides this; verify takes {', '.join(_SETTABLE)}"
            raise ConfigError(f"--set {text}: {what}")
    config = load_config(run / run_directory.CONFIG, overrides)
    if config.train.shares is None:
        what = "trained without train.shares, so it has no receipts"
        raise ConfigError(f"{run}: {what}; to verify a run, start it with --set train.shares=N")
    return config


def _plan(
    run: Path, steps: tuple[int | None, int | None], num_steps: int, receipts: dict[int, Receipt]
) -> Plan:
    """The plan for the first and last of `steps`; puts the receipts of the run into `receipts`.

    Without a last step, it is that of the newest receipt; without a first one, that after the
    newest checkpoint before the last step.
    """
    path = run / run_directory.RECEIPTS
    none_yet = "no receipts yet (the run writes them every log.every_steps)"
    with os_errors_as(ConfigError, path, none_yet):
        found = read_receipts(path)
    receipts.update({step: found[step] for step in found if 1 <= step <= num_steps})
    if not receipts:
        raise ConfigError(f"{path}: {none_yet}")
    first, last = steps
    oldest, newest = min(receipts), max(receipts)
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
    return Plan(first, last, start, start_step, readable)


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
    plan: Plan,
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
    # 2. The data and the state.
    train_set, eval_set = open_data(config, device, notes)
    state = build_state(config, device, start, train_set, notes)
    # 3. What differs from the run is told, not refused: perhaps it is what is looked for.
    notes += other_arithmetic(state, known and known.checkpoint)
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
    with_weights = {step for step, receipt in this.receipts.items() if receipt.weights is not None}
    meter = this.receipt_meter(with_weights.__contains__) if dist.is_main() else None
    _follow_evaluation(this)
    stream = this.batches(state.step, plan.last)
    results = train_steps(
        state, stream, config, device=this.device, indices=this.indices(), step_sync=this.step_sync
    )
    bar = ProgressBar(plan.last, state.step, "verify", enabled=dist.is_main())
    liveness.beat("training", state.step)
    # The loader's workers end first.
    with worker_failures(), bar, closing(stream), closing(results):
        while state.step < plan.last:
            result = next(results)
            this.evaluated = False
            if meter is not None:
                meter.update(result)
            _compare(this, meter)
            bar.update()
            liveness.beat("training", state.step)
        this.step_sync.check_finite()
    if state.step == config.train.steps and dist.is_main():
        _say(*weights_lines(state))
    num_weights = len(with_weights.intersection(range(plan.start_step + 1, plan.last + 1)))
    _say(
        f"verified {steps}: the names of samples, losses, gradient norms and the largest value of "
        "each gradient are equal in every bit, and so are all weights in "
        f"{num_weights} of these steps"
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


def _receipts_differ(this: Replay, meter: ReceiptMeter) -> list[str]:
    for here in meter.take_receipts():
        there = this.receipts.get(here.step)
        # Steps before the first one that was asked for may have none.
        if there is not None and (lines := _receipt_differences(there, here, this.state)):
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
        if lines := _checkpoint_differences(checkpoint, this.state):
            return [f"{name} differs from the weights of its step, {step}", *lines]
    return []


def _end_if(this: Replay, differ: Callable[[], list[str]]) -> None:
    """Raises CheckpointError on all ranks if `differ` finds differences on rank 0 (collective)."""
    lines = dist.run_on_rank0(differ)
    if not lines:
        return
    this.data.wait_for_hashes(lambda seconds: seconds > DATA_PATIENCE_S)
    lines += this.data.pop_log_lines()
    raise CheckpointError("\n  ".join([f"{this.directory}: {lines[0]}", *lines[1:]]))


def _say(*lines: str) -> None:
    if dist.is_main():
        for line in lines:
            say(line)


def _receipt_differences(there: Receipt, here: Receipt, state: TrainState) -> list[str]:
    """A line for each field in which two receipts of a step differ, in the order of computation."""
    lines = []
    if there.samples != here.samples:
        lines.append("samples: other names or another order: the data or their order changed")
    for field in ("loss", "aux_loss", "grad_norm"):
        values = getattr(there, field), getattr(here, field)
        if values[0] != values[1]:
            texts = [x and f"{float.fromhex(x):.9g} ({x})" for x in values]
            lines.append(f"{field}: {texts[0]} there, {texts[1]} now")
    # What is nearest to the loss comes first in the backward pass.
    names = list(state.gradients.exponents)[::-1]
    unpacked = (unpack(receipt.gradients, GRADIENT)[::-1] for receipt in (there, here))
    # A number too many, without a name, differs as well.
    lines += _tensors("gradients", *(dict(zip_longest(names, one)) for one in unpacked))
    names = list(state.model.state_dict())
    for field in ("weights", "average") if there.weights is not None else ():
        unpacked = (unpack(getattr(receipt, field), WEIGHT) for receipt in (there, here))
        lines += _tensors(field, *(dict(zip_longest(names, one)) for one in unpacked))
    return lines


def _checkpoint_differences(checkpoint: Checkpoint, state: TrainState) -> list[str]:
    """A line for each part of a checkpoint that differs from `state` in any bit."""
    average = {} if state.average is None else state.average.model.state_dict()
    lines = _tensors("model", checkpoint.model, state.model.state_dict())
    lines += _tensors("average", checkpoint.average or {}, average)
    if checkpoint.optimizer is not None:
        saved = checkpoint.optimizer, state.optimizer.state_dict()
        lines += _tensors("optimizer", *(_moments(one, state) for one in saved))
        started = (checkpoint.start or {}, initial_weights_fields(state) or {})
        lines += _tensors("start", *(one.get("weights", {}) for one in started))
    return lines


def _moments(saved: dict[str, Any], state: TrainState) -> dict[str, Any]:
    """What an optimizer's state dict holds for each weight, by name."""
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    order = [names[p] for group in state.optimizer.param_groups for p in group["params"]]
    return {
        f"{kind} of {order[number]}": value
        for number, values in saved["state"].items()
        for kind, value in values.items()
    }


def _tensors(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line if the values of any names differ."""
    names = list(dict.fromkeys([*now, *before]))
    differing = [name for name in names if not _is_equal(before.get(name), now.get(name))]
    if not differing:
        return []
    first = printable(differing[0], 2 * MAX_NAME)
    return [f"{what}: {len(differing)} of {len(names)} tensors differ; the first is {first}"]


def _is_equal(before: object, now: object) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        # Not torch.equal, for which -0.0 is 0.0.
        return hash_tensor("", before) == hash_tensor("", now)
    return type(before) is type(now) and before == now
