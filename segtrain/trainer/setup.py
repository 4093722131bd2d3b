"""Everything before the first step: data, model and optimizer of a run, or of its replay."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from segtrain import plugins, seed
from segtrain.checkpoint.dataset_guard import DatasetGuard, Resumed
from segtrain.checkpoint.format import (
    experiment_fields,
    load,
    parse_experiment,
    plugin_fields,
)
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.checkpoint.restore import check_changes, restore
from segtrain.config import Config, config_to_yaml
from segtrain.config.model import TIMM
from segtrain.data import open_dataset
from segtrain.data.check.channels import channels_to_json, measure_channels
from segtrain.data.read.dataset import SegDataset
from segtrain.data.sample.centroids import TILE_PX, measure_centroids
from segtrain.data.sample.stream import ClassUniform
from segtrain.distributed import collectives as dist
from segtrain.distributed.signals import SignalFlags
from segtrain.errors import CheckpointError, ConfigError
from segtrain.models import SegModel, build_model
from segtrain.models.norms import make_norm
from segtrain.models.precision import offers, precision_warnings
from segtrain.models.pretrained import load_backbone
from segtrain.run import directory as run_directory
from segtrain.run.console import say
from segtrain.run.directory import RunLock
from segtrain.run.environment import changed_versions
from segtrain.run.log import RunLog
from segtrain.run.trackers import Trackers, senders
from segtrain.text import counted
from segtrain.trainer.preflight import (
    check_alike,
    check_experiment,
    class_uniform_lines,
    device_lines,
    start_lines,
)
from segtrain.trainer.step_log import StepLog
from segtrain.trainer.training import Training, host_watch
from segtrain.training.graph import GraphPlan, GraphStep, plan_graphs
from segtrain.training.optim.optimizer import set_learning_rate
from segtrain.training.optim.schedule import learning_rate
from segtrain.training.receipt_meter import ReceiptMeter, StepMeter
from segtrain.training.state import TrainState, make_state, passes_of
from segtrain.training.step import TrainStep
from segtrain.training.step_sync import StepSync
from segtrain.training.ways import Requests, Way, way_of

# How long a resumed run waits for the hashes of the labels before its first step.
DATA_PATIENCE_S = 5.0
# A receipt has hashes of all weights this often, where a checkpoint is kept, and at the end.
_DIGEST_STEPS = 100
# With these cuBLAS computes the same bits in every run; with others, torch refuses to.
_WORKSPACE, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def make_repeatable(config: Config, device: torch.device) -> None:
    """Seeds all generators and chooses the kernels that the config asks for."""
    seed.seed_everything(config.seed)
    # On a CPU the kernels that shares run keep their promise by themselves.
    on_device = passes_of(config.train).promises_bits and device.type == "cuda"
    is_deterministic = config.train.deterministic or on_device
    if is_deterministic and os.environ.get(_WORKSPACE) not in _WORKSPACES:
        os.environ[_WORKSPACE] = _WORKSPACES[0]
    # The call imports torch's compiler, which takes a second.
    if is_deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(is_deterministic)


@dataclass(kw_only=True)
class Prepared:
    """Data, weights and samples: what `segtrain train`, `verify` and `bench` begin with."""

    train_set: SegDataset
    eval_set: SegDataset
    state: TrainState
    data: DatasetGuard
    class_uniform: ClassUniform | None
    changes: list[str]  # of the centroids since the checkpoint, which were accepted
    graphs: GraphPlan

    def training(self, config: Config, device: torch.device, step_sync: StepSync) -> dict[str, Any]:
        """The fields of a `Training` but for those about its run."""
        own = way_of(config.train).config_of_update(config, dist.world_size())
        step = TrainStep(self.state, own, device, step_sync)
        return {
            "config": config,
            "device": device,
            "train_set": self.train_set,
            "state": self.state,
            "step_sync": step_sync,
            "step": step if self.graphs.why_not is not None else self._replayed(step),
            "class_uniform": self.class_uniform,
        }

    def _replayed(self, step: TrainStep) -> GraphStep:
        return GraphStep(step, self.state, self.graphs.trial)


def prepare(
    config: Config,
    device: torch.device,
    directory: Path,
    notes: list[str],
    stack: ExitStack,
    *,
    start: Resumed | None = None,
    known: Resumed | None = None,
    keep: bool = False,
    accept_changes: bool = True,
    hashes: bool = True,
) -> Prepared:
    """Opens the data and makes the state, as a checkpoint has them if there is one (collective).

    Args:
        directory: of the run, which keeps the centroids if `keep` is set.
        notes: get what there is to tell. stack: closes what stays open.
        start: the checkpoint to start from; None: the weights of the config.
        known: one whose data this should be; None: `start`.
        hashes: whether labels are hashed while training runs.
    """
    known = known or start
    # 1. The data; does it fit the config and this machine?
    train_set, eval_set = open_data(config, device, notes)
    notes += [f"warning: {line}" for line in precision_warnings(config.train, device)]
    # 2. The weights: those of the checkpoint, else train.init_from, else model.pretrained, else
    #    random ones.
    state = build_state(config, device, start, train_set, notes)
    saved = None if known is None else known.checkpoint.shares
    notes += [f"warning: {finding}" for finding in state.passes.findings(saved)]
    way = way_of(config.train)
    # After the weights are there and before the first step: some ways move them to shared memory.
    way.prepare(state.model)
    notes += way.lines(config.train, dist.world_size())
    graphs = plan_graphs(config, state, device)
    notes += device_lines(config, graphs, device)
    notes += offers(config.train, device, state.model)
    # 3. Is the data that of the checkpoint? Labels are hashed while training runs.
    splits = train_set, eval_set
    data = DatasetGuard(splits, config.data.root, known, accept_changes=accept_changes)
    stack.callback(data.close)
    if hashes:
        data.start(DATA_PATIENCE_S)
    notes += data.pop_log_lines()
    # 4. Where each class is to be found, if samples are drawn by class.
    options = {"keep": keep, "accept_changes": accept_changes}
    class_uniform, changes = class_uniform_sampling(
        config, train_set, directory, known, device, **options
    )
    if class_uniform is not None:
        notes += class_uniform_lines(class_uniform, train_set.classes)
    notes += changes
    return Prepared(
        train_set=train_set,
        eval_set=eval_set,
        state=state,
        data=data,
        class_uniform=class_uniform,
        changes=changes,
        graphs=graphs,
    )


def open_data(
    config: Config, device: torch.device, notes: list[str]
) -> tuple[SegDataset, SegDataset]:
    """The splits to train and to evaluate on, checked (collective)."""
    train_set = open_dataset(config.data, config.data.train_split)
    eval_set = open_dataset(config.data, config.data.eval_split)
    oddities = check_experiment(config, train_set, eval_set, device=device)
    warnings = dict.fromkeys((*train_set.warnings, *eval_set.warnings, *oddities))
    notes += [f"warning: {warning}" for warning in warnings]
    return train_set, eval_set


def build_state(
    config: Config,
    device: torch.device,
    resumed: Resumed | None,
    train_set: SegDataset,
    notes: list[str],
) -> TrainState:
    """Model, optimizer and the rest, with their values (collective)."""
    classes = train_set.classes
    model = build_model(
        config.model,
        num_classes=classes.num_classes,
        in_channels=config.data.channels,
        norm=make_norm(config.norm),
    )
    # A checkpoint brings all weights; fetching others first would only cost time.
    if resumed is not None:
        check_changes(model, *resumed, config, classes)
        loaded = (resumed.checkpoint.start or {}).get("loaded")
    else:
        lines, loaded = _load_initial(model, config, classes.names)
        notes += lines
    # One answer for all: a machine with another file would decay other weights.
    loaded = dist.run_on_rank0(lambda: loaded)
    state = make_state(model, config, device, loaded=loaded, resumed=resumed is not None)
    if resumed is not None:
        restore(state, *resumed)
        # Without another step, the next checkpoint would hold the rates of the config.
        last_update = min(state.step, config.train.steps) - 1
        if last_update >= 0:
            set_learning_rate(state.optimizer, learning_rate(config, last_update))
    notes += state.initial_weights.lines(model)
    return state


def _load_initial(
    model: SegModel, config: Config, class_names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Fills the model or its backbone, as the config asks (collective).

    Returns notes, and the names of the weights that were loaded.
    """
    names = [name for name, _ in model.named_parameters()]
    if config.train.init_from is not None:
        from segtrain.checkpoint.trained import load_initial

        initial = load_initial(model, config.train.init_from, class_names, config)
        return initial.lines, [name for name in names if name not in initial.random]
    if config.model.pretrained is None:
        return [], []
    # The first rank of each machine downloads the file, then the others find it. Every rank comes
    # to one barrier: the first ones after they have loaded, the others before.
    if dist.local_rank() != 0:
        dist.barrier()
    report = load_backbone(model.backbone, config.model.pretrained, progress=dist.is_main())
    if dist.local_rank() == 0:
        dist.barrier()
    random = {f"backbone.{key}" for key in report.random}
    loaded = [name for name in names if name.startswith("backbone.") and name not in random]
    return report.lines() + _other_normalization(config), loaded


def _other_normalization(config: Config) -> list[str]:
    """A warning if data.mean or data.std are not those of timm's weights."""
    if not config.model.backbone.startswith(TIMM) or config.data.channels != 3:
        return []
    used = {"mean": config.data.mean, "std": config.data.std}
    from segtrain.models import timm_backbone

    expected = timm_backbone.expected_normalization(config.model.backbone, config.model.pretrained)
    words = [
        f"data.{key} is {[*used[key]]}, timm's weights expect {[round(x, 3) for x in numbers]}"
        for key, numbers in zip(used, expected, strict=True)
        if any(abs(x - y) > 0.01 for x, y in zip(used[key], numbers, strict=True))
    ]
    return [f"warning: {'; '.join(words)}"] if words else []


def class_uniform_sampling(
    config: Config,
    train_set: SegDataset,
    directory: Path,
    resumed: Resumed | None,
    device: torch.device,
    *,
    keep: bool = False,
    accept_changes: bool = True,
) -> tuple[ClassUniform | None, list[str]]:
    """What `data.class_uniform` asks for, None without it; and a line about a change (collective).

    directory: of the run, which keeps the centroids; keep: whether these may be written there.
    resumed: the checkpoint whose centroids these should be. Others are not kept: the change may yet
        be refused, or come to no step.

    Raises:
        ConfigError: they are others, and `accept_changes` is not set.
        DataError: a label cannot be read, or none shows a class.
    """
    data = config.data
    if not data.class_uniform:
        return None, []
    if dist.is_main():
        say(f"looking for the classes in {len(train_set)} labels (data.class_uniform)")
    before = None if resumed is None else resumed.checkpoint.centroids
    centroids = measure_centroids(
        train_set,
        TILE_PX,
        directory / run_directory.CENTROIDS,
        device=device,
        keep=lambda measured: keep and (resumed is None or measured.sha256() == before),
    )
    sampling = ClassUniform(centroids, fraction=data.class_uniform)
    if before in (None, centroids.sha256()):
        return sampling, []
    what = "the centroids of the classes (data.class_uniform) are not those of the checkpoint"
    if not accept_changes:
        raise ConfigError(
            f"{resumed.path}: {what}: a label, the class file or segtrain has changed; undo that, "
            "start a new run by --output, or, if the change is meant, add --accept-changes"
        )
    return sampling, [f"changed    {what}"]


@dataclass(frozen=True)
class TrainRequest:
    """What the command line asks for.

    resume: go on with the run in `directory` if it has saved a checkpoint. One rank may ask for
        all: of several machines, only one that was started anew knows that this is a restart.
    accept_changes: go on even if it was started with another config or other data.
    requeue: on SIGUSR1 save, requeue the SLURM job and stop; otherwise only save.
    until: save after this step, at most train.steps, and stop; None: train to the end.
    report: called with directory and device when the run is complete, on rank 0.
    saved: called after each checkpoint, on rank 0.
    lock_patience_s: how long another machine may hold the directory that was in this run and died.
    """

    config: Config
    directory: Path
    device: torch.device
    resume: bool = False
    accept_changes: bool = False
    requeue: bool = False
    until: int | None = None
    report: Callable[[Path, torch.device], None] | None = None
    saved: Callable[[], None] = lambda: None
    lock_patience_s: float = 0.0


@dataclass(kw_only=True)
class TrainRun(Training):
    """An experiment on this rank, ready for the next step, and what it leaves behind."""

    directory: Path
    eval_set: SegDataset
    data: DatasetGuard
    checkpoints: CheckpointManager
    log: RunLog
    signal_flags: SignalFlags
    best: dict[str, Any] | None
    evaluated: int  # the step of the newest evaluation, 0: none
    changes: list[str]  # of config and centroids since the checkpoint, which were accepted
    step_log: StepLog
    channels: str  # of the training images, for the checkpoint
    receipts: ReceiptMeter | None = None  # with train.shares
    way: Way
    thresholds: Sequence[float] | None = None  # of the newest evaluation, with task multilabel

    def fields(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: the experiment, and what evaluations have found."""
        return experiment_fields(self.config, self.train_set.classes) | {
            "plugins": plugin_fields(self.config),
            "channels": self.channels,
            "best": self.best,
            "evaluated": self.evaluated,
            "thresholds": self.thresholds and list(self.thresholds),
        }

    def is_due(self, step: int) -> bool:
        """Whether the config asks for an evaluation or a checkpoint after `step`."""
        config, saving = self.config, self.config.checkpoint
        cadences = config.eval.every_steps, saving.every_steps, saving.keep_every_steps
        return any(self.falls_on(every_steps, step) for every_steps in cadences)

    def falls_on(self, every_steps: int | None, step: int | None = None) -> bool:
        """Whether a cadence falls on `step` (None: this one); the last has its own after it."""
        step = self.state.step if step is None else step
        is_last = step >= self.config.train.steps
        return every_steps is not None and step % every_steps == 0 and not is_last

    def flush_receipts(self) -> None:
        """Writes the receipts of the steps since the last call (collective)."""
        if self.receipts is not None:
            self.log.receipts(self.receipts.take_receipts())


def set_up(request: TrainRequest, stack: ExitStack) -> TrainRun:
    """Brings an experiment to its first step, or to where it was left (collective).

    `stack` closes what stays open. What there is to tell is gathered in `notes` for the log.
    """
    request = replace(request, resume=any(dist.all_gather_object(request.resume)))
    config, directory, device = request.config, request.directory, request.device
    # Before anything else: ranks with other configs could differ in the collectives that follow.
    check_alike(config)
    make_repeatable(config, device)

    # 1. The run directory belongs to this run alone.
    lock, notes = RunLock(directory, patience_s=request.lock_patience_s), []
    # `run_on_rank0` lets a refusal of rank 0 end all ranks, with its message.
    dist.run_on_rank0(lambda: _take_directory(request, lock, stack))
    folder = directory / run_directory.CHECKPOINTS
    hooks = {"check_lock": lock.check, "saved": request.saved}
    checkpoints = CheckpointManager(folder, **hooks)
    # 2. The checkpoint to go on from, if there is one; is it one of this config?
    resumed = _find_checkpoint(checkpoints, request, notes)
    saved = resumed and resumed.checkpoint
    changes = dist.run_on_rank0(lambda: _config_changes(request, resumed))
    notes += [f"changed    {change}" for change in changes]
    # 3. Data, weights and samples, as the checkpoint has them.
    evaluated = 0 if saved is None else saved.evaluated
    ready = prepare(
        config,
        device,
        directory,
        notes,
        stack,
        start=resumed,
        keep=True,
        accept_changes=request.accept_changes,
        hashes=evaluated < config.train.steps,
    )
    state = ready.state
    changes += ready.changes
    # 4. Directory and log say what this run is; a resumed run changes them at its first step.
    log = _open_log(request, resumed, ready, notes, changes, evaluated=evaluated)
    # 5. Signals and errors, on which all ranks act after the same step.
    signal_flags = SignalFlags(stop_on_usr1=request.requeue)
    way = way_of(config.train).begin(state, config, _requests(signal_flags, ready.data))
    steps = {} if way.step is None else {"step": way.step}
    run = TrainRun(
        **ready.training(config, device, way.step_sync) | steps,
        last_step=min(config.train.steps, request.until or config.train.steps),
        directory=directory,
        eval_set=ready.eval_set,
        data=ready.data,
        checkpoints=checkpoints,
        log=log,
        signal_flags=signal_flags,
        best=saved and saved.best,
        evaluated=evaluated,
        channels=dist.run_on_rank0(lambda: channels_to_json(measure_channels(ready.train_set))),
        changes=changes,
        watch=host_watch(config, device, stack),
        step_log=StepLog(config, StepMeter(config.train.batch_size, device)),
        way=way,
        thresholds=saved and saved.thresholds,
    )
    # The stack ends in reverse order: the bar first, then the loader, then data and lock.
    stack.callback(run.reopen), stack.callback(run.step_log.close)
    # 6. What goes along with the steps.
    _add_parts(run)
    return run


def _open_log(
    request: TrainRequest,
    resumed: Resumed | None,
    ready: Prepared,
    notes: list[str],
    changes: Sequence[str],
    *,
    evaluated: int,
) -> RunLog:
    """The log, with the first lines and `notes` in it (collective)."""
    config, directory, state = request.config, request.directory, ready.state
    devices = dist.all_gather_object(device_name(request.device))
    # Before the description is written, which would hide how the directory was edited.
    earlier = dist.run_on_rank0(lambda: _lines_on_earlier_run(request, resumed, changes))
    describe = partial(run_directory.write_description, directory, config, devices)
    if resumed is None:
        dist.run_on_rank0(describe)
    trackers = senders(directory, config, resumes=resumed is not None) if dist.is_main() else ()
    log = RunLog(
        directory,
        enabled=dist.is_main(),
        start_step=state.step,
        evaluated_step=evaluated,
        changed=bool(changes),
        describe=describe if resumed and (changes or earlier) else lambda: None,
        trackers=Trackers(trackers),
    )
    sets = ready.train_set, ready.eval_set
    log.lines(start_lines(config, directory, state.model, *sets, devices, state.step))
    log.lines([*notes, *earlier])
    if state.step == 0:
        log.text("config", config_to_yaml(config))
    return log


def _add_parts(run: TrainRun) -> None:
    """The way comes first, as hogwild waits before a step; the log writes the receipts."""
    if run.state.passes.promises_bits:
        every = (_DIGEST_STEPS, run.config.checkpoint.keep_every_steps, run.config.train.steps)
        run.receipts = run.receipt_meter(
            lambda step: any(steps and step % steps == 0 for steps in every)
        )
    chosen = run.config.log.callbacks
    callbacks = (plugins.choose("callback", x.name, {})(x.options) for x in chosen)
    parts = run.way, run.receipts, run.step_log, *callbacks
    run.parts = tuple(part for part in parts if part is not None)


def _requests(signal_flags: SignalFlags, data: DatasetGuard) -> Requests:
    """Labels that turn out to differ stop the run when it saves."""
    return signal_flags.stop_requested, lambda: signal_flags.pop_save_request() or data.has_failed()


def _take_directory(request: TrainRequest, lock: RunLock, stack: ExitStack) -> None:
    """Locks the directory; on rank 0."""
    stack.enter_context(lock)
    run_directory.check_directory(request.directory, request.config, resume=request.resume)


def _find_checkpoint(
    checkpoints: CheckpointManager, request: TrainRequest, notes: list[str]
) -> Resumed | None:
    """The newest checkpoint that is whole; None where training begins (collective)."""

    def newest() -> tuple[str | None, list[str]]:
        checkpoints.clean_up()
        path, problems = checkpoints.newest() if request.resume else (None, [])
        if path is None and run_directory.has_evaluated(request.directory):
            what = f"{run_directory.METRICS} holds the scores of checkpoints that have been removed"
            raise CheckpointError(
                f"{request.directory}: {what}; put one back, or start anew by --output"
            )
        return path and path.name, problems

    # Rank 0 looks, and all load what it names, so that none goes on from another checkpoint.
    name, problems = dist.run_on_rank0(newest)
    notes += [f"warning: {problem}" for problem in problems]
    if name is None:
        return None
    path = checkpoints.directory / name
    resumed = Resumed(load(path), path)
    if problems:
        notes.append(f"warning: going on from {path} instead, step {resumed.checkpoint.step}")
    return resumed


def _config_changes(request: TrainRequest, resumed: Resumed | None) -> list[str]:
    """How the config differs from that of the checkpoint; ConfigError if that is not accepted."""
    if resumed is None:
        return []
    before, _ = parse_experiment(*resumed)
    return run_directory.check_config(
        request.directory,
        before,
        request.config,
        accept_changes=request.accept_changes,
        others=plugins.changes(resumed.checkpoint.plugins or []),
    )


def _lines_on_earlier_run(
    request: TrainRequest, resumed: Resumed | None, changes: Sequence[str]
) -> list[str]:
    """What there is to say about the run that `directory` held before; `changes`: of its config."""
    if resumed is not None:
        others = changed_versions(request.directory)
        lines = [f"warning: the run had {other}: numbers may differ" for other in others]
        edited = [] if changes else run_directory.edits(request.directory, request.config)
        what = f"{run_directory.CONFIG} is not what the checkpoint says, and is written anew"
        return lines + [f"warning: {what}: {line}" for line in edited]
    if (request.directory / run_directory.CONFIG).exists():
        return [
            "warning: a run began in this directory and there is no checkpoint of it: "
            f"{run_directory.METRICS} begins anew, {run_directory.LOG} goes on"
        ]
    return [f"{request.directory}: nothing to resume; a new run starts"] if request.resume else []


def device_name(device: torch.device) -> str:
    """The product name of a CUDA device; of a CPU, what its rounding depends on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = counted(torch.get_num_threads(), "thread", "threads")
    return f"cpu ({torch.backends.cpu.get_cpu_capability()}, {threads})"
