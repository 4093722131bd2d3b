"""Everything before the first step of `segtrain train`, as numbered stages."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from segtrain import seed
from segtrain.checkpoint.experiment import parse_experiment
from segtrain.checkpoint.format import load
from segtrain.checkpoint.initial import load_initial
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.checkpoint.recovery import restore_config
from segtrain.checkpoint.same_data import Resumed, RunData
from segtrain.checkpoint.training_state import restore
from segtrain.commands.train.preflight import check_experiment, start_lines
from segtrain.config import Config, config_to_yaml
from segtrain.data import open_dataset
from segtrain.data.classes import ignoring_as
from segtrain.data.dataset import SegDataset
from segtrain.distributed import collectives as dist
from segtrain.distributed.signals import SignalFlags
from segtrain.models import SegModel, build_model
from segtrain.models.pretrained import load_backbone
from segtrain.norm import make_norm
from segtrain.run import directory as run_directory
from segtrain.run.claim import Claim
from segtrain.run.environment import changed_versions
from segtrain.run.log import RunLog
from segtrain.training.engine import TrainState, make_state
from segtrain.training.step_sync import StepSync

# How long a resumed run waits for the hashes of the labels before its first step.
DATA_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Order:
    """What the command line asks for; the same on all ranks."""

    config: Config
    directory: Path
    device: torch.device
    resume: bool
    accept_changes: bool
    requeue: bool


@dataclass
class Run:
    """One experiment on this rank, ready for the next step."""

    config: Config
    directory: Path
    device: torch.device
    devices: list[str]  # of every rank, by name
    train_set: SegDataset
    eval_set: SegDataset
    data: RunData
    state: TrainState
    step_sync: StepSync
    checkpoints: CheckpointManager
    log: RunLog
    signal_flags: SignalFlags
    best: dict[str, Any] | None
    evaluated: int  # the step of the newest evaluation, 0: none


def set_up(order: Order, stack: ExitStack) -> Run:
    """Brings an experiment to its first step, or to where it was left (collective).

    `stack` closes what stays open. What there is to tell is gathered in `notes` for the log.
    """
    config, directory, device = order.config, order.directory, order.device
    seed.seed_everything(config.seed)
    # Shares promise bits. On a CPU the kernels that they run keep that promise by themselves.
    if config.train.deterministic or (config.train.shares is not None and device.type == "cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    else:
        torch.use_deterministic_algorithms(False)

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
    train_set, eval_set = _open_data(order, resumed, notes)
    # 4. The weights: those of the checkpoint, else train.init_from, else model.pretrained, else
    #    random ones.
    state = _build_state(order, resumed, train_set, notes)
    best, evaluated = None, 0
    if resumed is not None:
        best, evaluated = resumed.checkpoint.best, resumed.checkpoint.evaluated
    # 5. Is the data that of the checkpoint? Labels are hashed while training runs.
    data = RunData(
        (train_set, eval_set), config.data.root, resumed, accept_changes=order.accept_changes
    )
    stack.callback(data.close)
    if evaluated < config.train.steps:
        data.start(DATA_PATIENCE_S)
    notes += data.take_news()
    # 6. Directory and log say what this run is.
    devices = dist.all_gather_object(_device_name(device))
    _describe(order, changes, devices, notes)
    log = RunLog(directory, enabled=dist.is_main(), start_step=state.step, evaluated_step=evaluated)
    log.lines(start_lines(config, directory, state.model, train_set, eval_set, devices, state.step))
    log.lines(notes)
    if state.step == 0:
        log.text("config", config_to_yaml(config))
    # 7. Signals and errors, on which all ranks act after the same step.
    signal_flags = SignalFlags(stop_on_usr1=order.requeue)
    step_sync = StepSync(
        signal_flags.stop_requested,
        # Labels that turn out to differ stop the run when it saves.
        save_requested=lambda: signal_flags.pop_save_request() or data.has_failed(),
        overflow_allowed=config.train.precision == "float16",
    )
    return Run(
        config=config,
        directory=directory,
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
        best=best,
        evaluated=evaluated,
    )


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
        return path and path.name, problems, checkpoints.warnings

    name, problems, warnings = dist.run_on_rank0(newest)
    notes += [f"warning: {problem}" for problem in problems] + warnings
    if name is None:
        if order.resume:
            notes.append(f"warning: no checkpoint in {checkpoints.directory}: training begins anew")
        return None
    path = checkpoints.directory / name
    resumed = Resumed(load(path), path)
    if problems:
        notes.append(f"warning: going on from {path} instead, step {resumed.checkpoint.step}")
    return resumed


def _open_data(
    order: Order, resumed: Resumed | None, notes: list[str]
) -> tuple[SegDataset, SegDataset]:
    """The splits to train and to evaluate on, checked (collective)."""
    config = order.config
    train_set = open_dataset(config.data, config.data.train_split)
    eval_set = open_dataset(config.data, config.data.eval_split)
    sets = (train_set, eval_set)
    if resumed is not None and config.data.label_format == "colors":
        # Older versions ignored the default colour; a run goes on by the rule it began with.
        _, before = parse_experiment(*resumed)
        if ignoring_as(before, train_set.classes).ignores_color:
            for one in sets:
                one.classes = replace(one.classes, ignores_color=True)
    oddities = check_experiment(config, *sets, device=order.device)
    warnings = dict.fromkeys((*train_set.warnings, *eval_set.warnings, *oddities))
    notes += [f"warning: {warning}" for warning in warnings]
    return sets


def _build_state(
    order: Order, resumed: Resumed | None, train_set: SegDataset, notes: list[str]
) -> TrainState:
    """Model, optimizer and the rest, with their values (collective)."""
    config, classes = order.config, train_set.classes
    model = build_model(config.model, num_classes=classes.num_classes, norm=make_norm(config.norm))
    # A checkpoint brings all weights; fetching others first would only cost time.
    if resumed is None:
        notes += _load_initial(model, config, classes.names)
    state = make_state(model, config, order.device)
    if resumed is not None:
        restore(state, *resumed)
    if state.shares is not None:
        notes += _other_arithmetic(state, resumed)
    return state


def _other_arithmetic(state: TrainState, resumed: Resumed | None) -> list[str]:
    """Warnings that bits may differ although train.shares is set (collective)."""
    digits = dist.all_gather_object(state.arithmetic)
    others = [rank for rank, other in enumerate(digits) if other != digits[0]]
    warnings = []
    if others:
        ranks = ", ".join(map(str, others))
        warnings.append(
            f"warning: ranks {ranks} compute other bits than rank 0 (another processor, device or "
            "version): weights depend on which rank has which share"
        )
    saved = resumed and resumed.checkpoint.shares
    if saved and saved.get("arithmetic") != digits[0]:
        warnings.append(
            "warning: this machine computes other bits than the one that saved the checkpoint "
            "(another processor, device or version): the weights will not be bit for bit those of "
            "the run without the interruption"
        )
    return warnings


def _load_initial(model: SegModel, config: Config, class_names: Sequence[str]) -> list[str]:
    """Fills the model or its backbone, as the config asks; returns notes (collective)."""
    if config.train.init_from is not None:
        return load_initial(model, config.train.init_from, class_names)
    if config.model.pretrained is None:
        return []
    # The first rank of each machine downloads the file, then the others find it.
    if dist.local_rank() != 0:
        dist.barrier()
    report = load_backbone(model.backbone, config.model.pretrained, progress=dist.is_main())
    if dist.local_rank() == 0:
        dist.barrier()
    return report.lines()


def _describe(order: Order, changes: list[str], devices: list[str], notes: list[str]) -> None:
    """Writes what is run, and where, into the run directory (collective)."""
    directory = order.directory

    def write() -> list[str]:
        if order.resume:
            others = changed_versions(directory)
            found = [f"warning: the run had {other}: numbers may differ" for other in others]
        elif (directory / run_directory.CONFIG).exists():
            found = [
                "warning: the run before in this directory had saved no checkpoint: "
                f"{run_directory.METRICS} begins anew, {run_directory.LOG} goes on"
            ]
        else:
            found = []
        if changes or found or not order.resume:
            run_directory.write_description(directory, order.config, devices)
        return found

    notes += dist.run_on_rank0(write)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
