"""Everything before the first step of `segtrain train`, as numbered stages."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import torch

from segtrain.checkpoint.format import load, parse_experiment
from segtrain.checkpoint.manager import CheckpointManager, restore_config
from segtrain.checkpoint.same_data import Resumed, RunData
from segtrain.commands.train.preflight import (
    hogwild_line,
    learning_rate_lines,
    start_lines,
)
from segtrain.commands.train.stages import (
    Ending,
    Training,
    build_state,
    centroid_changes,
    check_fields,
    class_uniform_lines,
    class_uniform_sampling,
    computes_otherwise,
    make_repeatable,
    open_data,
    receipt_meter,
    unequal_ranks,
)
from segtrain.config import Config, config_to_yaml
from segtrain.data.read.dataset import SegDataset
from segtrain.data.sample.centroids import Centroids
from segtrain.distributed import collectives as dist
from segtrain.distributed.signals import SignalFlags
from segtrain.errors import CheckpointError
from segtrain.models.precision import for_evaluation, precision_warnings
from segtrain.run import directory as run_directory
from segtrain.run.directory import Claim
from segtrain.run.environment import changed_versions
from segtrain.run.log import RunLog
from segtrain.training.hogwild import Meeting, share_model
from segtrain.training.receipts import ReceiptMeter
from segtrain.training.state import TrainState
from segtrain.training.step_sync import StepSync

# How long a resumed run waits for the hashes of the labels before its first step.
DATA_PATIENCE_S = 5.0
# A receipt has hashes of all weights this often, where a checkpoint is kept, and at the end.
_DIGEST_STEPS = 100


@dataclass(frozen=True)
class Order:
    """What the command line asks for; the same on all ranks."""

    config: Config
    directory: Path
    device: torch.device
    resume: bool
    accept_changes: bool
    requeue: bool
    until: int | None = None  # pause after this step; None: train to the end


@dataclass(kw_only=True)
class Run(Training):
    """An experiment on this rank, ready for the next step, and what it leaves behind."""

    directory: Path
    last_step: int  # of this process: train.steps, or the step of --until
    eval_set: SegDataset
    data: RunData
    devices: list[str]  # of every rank, by name
    checkpoints: CheckpointManager
    log: RunLog
    signal_flags: SignalFlags
    best: dict[str, Any] | None
    evaluated: int  # the step of the newest evaluation, 0: none
    ending: Ending
    changes: list[str]  # of config and centroids since the checkpoint, which were accepted
    mean_iou: float = nan  # of the newest evaluation in this process
    receipts: ReceiptMeter | None = None  # on rank 0 with train.shares
    meeting: Meeting | None = None  # with train.parallel hogwild


def set_up(order: Order, stack: ExitStack) -> Run:
    """Brings an experiment to its first step, or to where it was left (collective).

    `stack` closes what stays open. What there is to tell is gathered in `notes` for the log.
    """
    config, directory, device = order.config, order.directory, order.device
    make_repeatable(config, device)

    # 1. The run directory belongs to this run alone.
    claim = Claim(directory)
    notes, changes = dist.run_on_rank0(lambda: _take_directory(order, claim, stack))
    checkpoints = CheckpointManager(
        directory / run_directory.CHECKPOINTS,
        keep_limit=config.checkpoint.keep_limit,
        before_write=claim.renew,
    )
    # 2. The checkpoint to go on from, if there is one.
    resumed = _find_checkpoint(checkpoints, order, notes)
    # 3. The data; does it fit the config and this machine?
    train_set, eval_set = open_data(config, device, resumed, notes)
    lines = precision_warnings(config.train, device)
    if config.eval.precision is not None:
        lines += precision_warnings(for_evaluation(config), device, key="eval.precision")
    notes += [f"warning: {line}" for line in lines]
    # 4. The weights: those of the checkpoint, else train.init_from, else model.pretrained, else
    #    random ones.
    state = build_state(config, device, resumed, train_set, notes)
    if state.shares is not None:
        notes += _other_arithmetic(state, resumed)
    if config.train.parallel == "hogwild":
        share_model(state.model)
        notes.append(hogwild_line(dist.world_size()))
    best, evaluated, ending = None, 0, Ending(config.train, None)
    if resumed is not None:
        best, evaluated = resumed.checkpoint.best, resumed.checkpoint.evaluated
        ending = Ending(config.train, check_fields(resumed.checkpoint.ending, resumed.path))
        before, _ = parse_experiment(*resumed)
        notes += learning_rate_lines(before.train, config.train, state.step)
    # 5. Is the data that of the checkpoint? Labels are hashed while training runs.
    data = RunData(
        (train_set, eval_set), config.data.root, resumed, accept_changes=order.accept_changes
    )
    stack.callback(data.close)
    if evaluated < config.train.steps:
        data.start(DATA_PATIENCE_S)
    notes += data.take_news()
    # 6. Where each class is to be found, if samples are drawn by class.
    class_uniform = class_uniform_sampling(
        config, train_set, directory, device, keep=lambda found: _is_known(found, resumed)
    )
    if class_uniform is not None:
        notes += class_uniform_lines(class_uniform, train_set.classes)
    others = centroid_changes(class_uniform, resumed, accept_changes=order.accept_changes)
    notes += others
    changes += others
    # 7. Directory and log say what this run is.
    devices = dist.all_gather_object(_device_name(device))
    describe = _describe(order, resumed, bool(changes), devices, notes)
    log = RunLog(
        directory,
        enabled=dist.is_main(),
        start_step=state.step,
        evaluated_step=evaluated,
        changed=bool(changes),
        describe=describe,
    )
    log.lines(start_lines(config, directory, state.model, train_set, eval_set, devices, state.step))
    log.lines(notes)
    if state.step == 0:
        log.text("config", config_to_yaml(config))
    # 8. Signals and errors, on which all ranks act after the same step.
    signal_flags = SignalFlags(stop_on_usr1=order.requeue)
    step_sync, meeting = _keeping_together(config, state, signal_flags, data, ending)
    run = Run(
        config=config,
        directory=directory,
        last_step=min(config.train.steps, order.until or config.train.steps),
        device=device,
        devices=devices,
        train_set=train_set,
        eval_set=eval_set,
        data=data,
        state=state,
        step_sync=step_sync,
        checkpoints=checkpoints,
        log=log,
        signal_flags=signal_flags,
        class_uniform=class_uniform,
        best=best,
        evaluated=evaluated,
        ending=ending,
        meeting=meeting,
        changes=changes,
    )
    if state.shares is not None and dist.is_main():
        run.receipts = receipt_meter(run, partial(_has_weights_digest, config))
    return run


def _keeping_together(
    config: Config, state: TrainState, signal_flags: SignalFlags, data: RunData, ending: Ending
) -> tuple[StepSync, Meeting | None]:
    """What lets all ranks stop, save and end after the same step (collective)."""
    requests = {
        "stop_requested": signal_flags.stop_requested,
        # Labels that turn out to differ stop the run when it saves.
        "save_requested": lambda: signal_flags.pop_save_request() or data.has_failed(),
        "end_requested": lambda: dist.is_main() and ending.is_out_of_time(),
    }
    timeout_s = config.train.timeout_s
    if config.train.parallel == "sync":
        overflow_allowed = config.train.precision == "float16"
        limits = {"overflow_allowed": overflow_allowed, "timeout_s": timeout_s}
        return StepSync(**requests, **limits), None
    step_sync = StepSync(lambda: False)
    return step_sync, Meeting(step_sync, step=state.step, timeout_s=timeout_s, **requests)


def _has_weights_digest(config: Config, step: int) -> bool:
    every = (_DIGEST_STEPS, config.checkpoint.keep_every_steps or _DIGEST_STEPS, config.train.steps)
    return any(step % steps == 0 for steps in every)


def _take_directory(order: Order, claim: Claim, stack: ExitStack) -> tuple[list[str], list[str]]:
    """Locks the directory on rank 0; returns notes, and what differs from the run's own config."""
    stack.enter_context(claim)
    restored = restore_config(order.directory) if order.resume else []
    changes = run_directory.check_directory(
        order.directory, order.config, resume=order.resume, accept_changes=order.accept_changes
    )
    return [*restored, *(f"changed    {change}" for change in changes)], changes


def _find_checkpoint(
    checkpoints: CheckpointManager, order: Order, notes: list[str]
) -> Resumed | None:
    """The newest checkpoint that is whole; None where training begins (collective)."""

    def newest() -> tuple[str | None, list[str], list[str]]:
        checkpoints.clean_up()
        path, problems = checkpoints.newest() if order.resume else (None, [])
        if path is None and run_directory.has_evaluated(order.directory):
            what = f"{run_directory.METRICS} holds the scores of checkpoints that have been removed"
            raise CheckpointError(
                f"{order.directory}: {what}; put one back, or start anew by --output"
            )
        return path and path.name, problems, checkpoints.warnings

    name, problems, warnings = dist.run_on_rank0(newest)
    notes += [f"warning: {problem}" for problem in problems] + warnings
    if name is None:
        return None
    path = checkpoints.directory / name
    resumed = Resumed(load(path), path)
    if problems:
        notes.append(f"warning: going on from {path} instead, step {resumed.checkpoint.step}")
    return resumed


def _other_arithmetic(state: TrainState, resumed: Resumed | None) -> list[str]:
    """Warnings that bits may differ although train.shares is set (collective)."""
    warnings = unequal_ranks(state)
    if resumed is not None and computes_otherwise(state, resumed.checkpoint):
        warnings.append(
            "warning: this machine computes other bits than the one that saved the checkpoint "
            "(another processor, device or version): the weights will not be bit for bit those of "
            "the run without the interruption"
        )
    return warnings


def _is_known(centroids: Centroids, resumed: Resumed | None) -> bool:
    """Whether a run may keep them: those of a change may yet be refused, or come to no step."""
    return resumed is None or centroids.sha256() == resumed.checkpoint.centroids


def _describe(
    order: Order,
    resumed: Resumed | None,
    changed: bool,
    devices: list[str],
    notes: list[str],
) -> Callable[[], None]:
    """Writes what is run, and where, into the run directory (collective).

    A resumed run does so when the function that is returned is called, on rank 0: until a step is
    done, the files tell what the run was.
    """
    directory = order.directory

    def write() -> None:
        run_directory.write_description(directory, order.config, devices)

    def begin() -> list[str]:
        if resumed is not None:
            others = changed_versions(directory)
            found = [f"warning: the run had {other}: numbers may differ" for other in others]
        elif (directory / run_directory.CONFIG).exists():
            found = [
                "warning: a run began in this directory and there is no checkpoint of it: "
                f"{run_directory.METRICS} begins anew, {run_directory.LOG} goes on"
            ]
        else:
            found = [f"{directory}: nothing to resume; a new run starts"] if order.resume else []
        if resumed is None:
            write()
        return found

    found = dist.run_on_rank0(begin)
    notes += found
    return write if resumed is not None and (changed or found) else lambda: None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
