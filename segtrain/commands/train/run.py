"""`segtrain train`: from a config to a trained, evaluated and saved model, wired top to bottom.

Every rank runs this. Rank 0 alone writes files; all ranks train and evaluate.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from pathlib import Path
from signal import SIGUSR1, Signals
from typing import Any

import torch

from segtrain import seed
from segtrain.checkpoint import contents as checkpoint
from segtrain.checkpoint.contents import Checkpoint
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.checkpoint.recovery import restore_config
from segtrain.checkpoint.same_data import Resumed, RunData
from segtrain.commands.train.preflight import check_experiment, start_lines
from segtrain.config import Config, config_to_yaml
from segtrain.data import open_dataset
from segtrain.data.classes import ignoring_as
from segtrain.data.dataset import SegDataset
from segtrain.data.loader import (
    TrainStream,
    indices_of_rank,
    num_loader_workers,
    train_loader,
    worker_failures,
)
from segtrain.data.transforms import TrainTransform
from segtrain.distributed import collectives as dist
from segtrain.distributed import exit_status, heartbeat, slurm
from segtrain.distributed.signals import SignalFlags, exit_code
from segtrain.errors import EXIT_OK
from segtrain.evaluation.dataset import Prediction, evaluate_dataset
from segtrain.evaluation.inference import InferenceSettings
from segtrain.metrics import Scores
from segtrain.models import SegModel, build_model
from segtrain.models.normalize import Normalize
from segtrain.models.pretrained import load_backbone
from segtrain.norm import make_norm, precise_statistics
from segtrain.run import directory as run_directory
from segtrain.run.claim import Claim
from segtrain.run.log import ProgressBar, RunLog
from segtrain.run.pictures import confusion_picture, panel
from segtrain.run.report import progress_words, score_line, training_picture
from segtrain.training.engine import TrainState, make_state, train_steps
from segtrain.training.malloc import keep_freed_memory
from segtrain.training.meter import StepMeter
from segtrain.training.step_sync import StepSync
from segtrain.training.wrap import autocast, dtype_of
from segtrain.types import Batch

# How long a resumed run waits for the hashes of the labels before its first step, and a run that
# was asked to stop before it saves.
_DATA_PATIENCE_S = 5.0
_STOP_PATIENCE_S = 15.0


@dataclass
class Run:
    """One experiment on this rank, at its first step or where it was left."""

    config: Config
    directory: Path
    device: torch.device
    devices: list[str]  # of every rank, by name
    train_set: SegDataset
    eval_set: SegDataset
    data: RunData
    state: TrainState
    step_sync: StepSync
    store: CheckpointManager
    log: RunLog
    requests: SignalFlags
    best: dict[str, Any] | None
    evaluated: int  # the step of the newest evaluation, 0: none


def run(
    config: Config,
    directory: Path,
    *,
    device: torch.device,
    resume: bool,
    accept_changes: bool = False,
    restarted: bool = False,
    requeue: bool = False,
) -> int:
    """Trains `config` into `directory` and returns the exit code (collective).

    Args:
        resume: go on with the run in `directory`, which must be there.
        accept_changes: go on even if it was started with another config or other data.
        restarted: go on with it if it is there.
        requeue: SIGUSR1 has SLURM start the job once more, instead of a checkpoint only.
    """
    if device.type == "cpu":
        keep_freed_memory()
    heartbeat.at("setup", 0)
    with dist.process_group(device, timeout_s=config.train.timeout_s), ExitStack() as stack:
        # Of several machines, one that was started anew knows what the others do not.
        wishes = dist.all_gather_object((resume, restarted))
        resume = any(one for one, _ in wishes)
        if any(one for _, one in wishes) and not resume:
            resume = dist.run_on_rank0((directory / run_directory.CONFIG).exists)

        claim = Claim(directory)
        check = partial(
            run_directory.check_directory,
            directory,
            config,
            resume=resume,
            accept_changes=accept_changes,
        )
        restored, changes = dist.run_on_rank0(lambda: _open(directory, check, stack, claim, resume))
        this = _prepare(
            config,
            directory,
            stack,
            device=device,
            resume=resume,
            accept_changes=accept_changes,
            changes=changes,
            requeue=requeue,
            before_write=claim.renew,
        )
        with this.log:
            this.log.lines(restored)
            _train(this)
            if not this.step_sync.stopped:
                return EXIT_OK
            # The signal may have reached one rank only; all of them leave the same way.
            numbers = dist.all_gather_object(this.requests.signal)
            number = next(number for number in numbers if number is not None)
            this.log.lines(
                [
                    f"stopped by {Signals(number).name} after step {this.state.step}, which is "
                    "saved; go on with --resume"
                ]
            )
            if number == SIGUSR1:
                dist.run_on_rank0(slurm.requeue)
    return exit_code(number)


def _open(
    directory: Path,
    check: Callable[[], list[str]],
    stack: ExitStack,
    claim: Claim,
    resume: bool,
) -> tuple[list[str], list[str]]:
    """Takes `directory` for this run; returns what was restored there, and what `check` does."""
    check()
    stack.enter_context(claim)
    restored = restore_config(directory) if resume else []
    # Once more: another run may have come and gone in between.
    return restored, check()


def _prepare(
    config: Config,
    directory: Path,
    stack: ExitStack,
    *,
    device: torch.device,
    resume: bool,
    accept_changes: bool,
    changes: list[str],
    requeue: bool,
    before_write: Callable[[], None],
) -> Run:
    """Opens the data, builds the model and brings the state to where training goes on.

    Args:
        stack: closes what is left open.
        changes: what the run's config said before.
        before_write: see CheckpointManager.
    """
    seed.seed_everything(config.seed)
    torch.use_deterministic_algorithms(config.train.deterministic)
    train_set = open_dataset(config.data, config.data.train_split)
    eval_set = open_dataset(config.data, config.data.eval_split)
    store = CheckpointManager(
        directory / run_directory.CHECKPOINTS,
        keep_limit=config.checkpoint.keep_limit,
        before_write=before_write,
    )
    if resume and config.data.label_format == "colors" and not train_set.classes.ignores_color:
        _ignore_as_before(store, (train_set, eval_set))
    odd = check_experiment(config, train_set, eval_set, device=device)

    model = build_model(
        config.model, num_classes=train_set.classes.num_classes, norm=make_norm(config.norm)
    )
    dist.run_on_rank0(store.tidy)
    # A run that ended before its first checkpoint goes on at step 0.
    name, problems = dist.run_on_rank0(lambda: _newest(store)) if resume else (None, [])
    path = None if name is None else store.directory / name
    record = None if path is None else checkpoint.load(path)
    # The record brings all weights along; fetching others first would only cost time.
    loaded = _load_initial(model, config, train_set.classes.names) if record is None else []
    state = make_state(model, config, device)
    evaluated = 0 if record is None else record.evaluated
    sets, resumed = (train_set, eval_set), None if record is None else Resumed(record, path)
    data = RunData(sets, config.data.root, resumed, accept_changes=accept_changes)
    stack.callback(data.close)
    if record is not None:
        checkpoint.restore(state, record, path)
    if evaluated < config.train.steps:
        data.start(_DATA_PATIENCE_S)

    devices = dist.all_gather_object(_device_name(device))
    others = dist.run_on_rank0(lambda: run_directory.other_versions(directory)) if resume else []
    anew = not resume and dist.run_on_rank0((directory / run_directory.CONFIG).exists)
    if changes or others or not resume:
        dist.run_on_rank0(lambda: run_directory.write_description(directory, config, devices))
    log = RunLog(directory, enabled=dist.is_main(), start_step=state.step, evaluated_step=evaluated)
    log.lines(start_lines(config, directory, model, train_set, eval_set, devices, state.step))
    oddities = dict.fromkeys((*train_set.warnings, *eval_set.warnings, *odd))
    log.lines([f"warning: {oddity}" for oddity in oddities])
    log.lines(loaded)
    if anew:
        said = "the run before in this directory had saved no checkpoint"
        log.lines(
            [f"warning: {said}: {run_directory.METRICS} begins anew, {run_directory.LOG} goes on"]
        )
    log.lines([f"changed    {change}" for change in changes])
    log.lines(data.take_news())
    log.lines([f"warning: the run had {other}: numbers may differ" for other in others])
    log.lines([f"warning: {problem}" for problem in problems] + store.warnings)
    if problems:
        log.lines([f"warning: going on from {path} instead, step {state.step}"])
    if resume and path is None:
        log.lines([f"warning: no checkpoint in {store.directory}: training begins anew"])
    if state.step == 0:
        log.text("config", config_to_yaml(config))
    requests = SignalFlags(stop_on_usr1=requeue)
    return Run(
        config=config,
        directory=directory,
        device=device,
        devices=devices,
        train_set=train_set,
        eval_set=eval_set,
        data=data,
        state=state,
        step_sync=StepSync(
            requests.stop_requested,
            # A difference in the labels is told by the saving that it forbids.
            save_requested=lambda: requests.pop_save_request() or data.has_failed(),
            overflow_allowed=config.train.precision == "float16",
        ),
        store=store,
        log=log,
        requests=requests,
        best=record.best if record is not None else None,
        evaluated=evaluated,
    )


def _newest(store: CheckpointManager) -> tuple[str | None, list[str]]:
    """As `store.newest`, by the name of the file."""
    path, problems = store.newest()
    return None if path is None else path.name, problems


def _ignore_as_before(store: CheckpointManager, sets: tuple[SegDataset, SegDataset]) -> None:
    """Ignores the default colour in labels if the run was started when that was the rule."""

    def look() -> bool:
        path, _ = store.newest()
        if path is None:
            return False
        _, before = checkpoint.parse_experiment(checkpoint.load(path), path)
        return ignoring_as(before, sets[0].classes).ignores_color

    if dist.run_on_rank0(look):
        for one in sets:
            one.classes = replace(one.classes, ignores_color=True)


def _load_initial(model: SegModel, config: Config, class_names: Sequence[str]) -> list[str]:
    """Fills the model or its backbone, as the config asks; returns what to tell about it."""
    if config.train.init_from is not None:
        return checkpoint.load_initial(model, config.train.init_from, class_names)
    if config.model.pretrained is None:
        return []
    lines = []
    # One rank of a machine fetches the file, the others find it.
    for turn in (True, False):
        if (dist.local_rank() == 0) == turn:
            report = load_backbone(model.backbone, config.model.pretrained, progress=dist.is_main())
            lines = report.lines()
        dist.barrier()
    return lines


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _train(run: Run) -> None:
    """Trains, evaluates and saves until the end or until asked to stop."""
    config, state = run.config, run.state
    if state.step > config.train.steps or run.evaluated == config.train.steps:
        beyond = "" if state.step == config.train.steps else f" (train.steps {config.train.steps})"
        run.log.lines([f"already complete: {state.step} steps{beyond}, {score_line(run.best)}"])
        return
    dist.run_on_rank0(lambda: run.store.check_space(_record(run)))
    # From here on there is something to save.
    run.requests.install()
    if exit_status.is_wanted():
        exit_status.tell(None)
    if _is_due(state.step, config.eval.every_steps, config) and run.evaluated < state.step:
        _evaluate(run)  # it was cut short
    if state.step < config.train.steps:
        with worker_failures():
            _train_steps(run)
    # Before the last evaluation, so that a long one is nothing to lose.
    _save(run)
    if state.step == config.train.steps and not run.step_sync.stopped:
        scores = _evaluate(run)
        _save(run)
        options, first = run_directory.flat(config), run_directory.MAIN_OPTIONS
        run.log.hparams(options, {"mIoU": scores.mean_iou}, state.step, first=first)


def _train_steps(run: Run) -> None:
    config, state = run.config, run.state
    rows = indices_of_rank(
        config.train.batch_size, config.train.accumulate_steps, dist.rank(), dist.world_size()
    )
    batches = _batches(run, rows)
    meter = StepMeter(config.train.batch_size, run.device)

    heartbeat.at("training", state.step)
    with ProgressBar(config.train.steps, state.step, "train", enabled=dist.is_main()) as bar:
        for result in train_steps(
            state, batches, config, device=run.device, rows=rows, step_sync=run.step_sync
        ):
            meter.update(result)
            if result.step % config.log.every_steps == 0 or result.step == config.train.steps:
                values = meter.read()
                run.log.scalars(result.step, values)
                bar.describe(*progress_words(values, run.best))
            bar.update()
            with _apart(meter):
                _keep_cadences(run)
            heartbeat.at("training", run.state.step)


def _keep_cadences(run: Run) -> None:
    """Evaluates and saves, where the config asks for it after this step."""
    step, config = run.state.step, run.config
    asked = run.step_sync.pop_save_request()
    evaluate = _is_due(step, config.eval.every_steps, config)
    keep = _is_due(step, config.checkpoint.keep_every_steps, config)
    if evaluate:
        # First: an evaluation may outlast the patience of whoever wants the run to stop.
        _save(run)
        _evaluate(run)
    if asked or evaluate or keep or _is_due(step, config.checkpoint.every_steps, config):
        _save(run)
    if asked:
        run.log.lines([f"saved step {step}, as SIGUSR1 asked for"])
    if keep and dist.is_main():
        run.store.keep(_record(run))


def _is_due(step: int, every: int | None, config: Config) -> bool:
    """Whether a cadence falls on `step`; what the last step needs happens after the loop."""
    return every is not None and step % every == 0 and step < config.train.steps


@contextmanager
def _apart(meter: StepMeter) -> Iterator[None]:
    """Leaves the time inside out of the time of the steps."""
    began = time.perf_counter()
    yield
    meter.skip(time.perf_counter() - began)


def _batches(run: Run, rows: Sequence[Sequence[int]]) -> Iterator[Batch]:
    """This rank's batches from the current step on; the first one is shown in TensorBoard."""
    for i, batch in enumerate(_loader(run, rows, run.config.train.steps)):
        if i == 0:
            # A wrong label file or augmentation is seen here within a minute.
            picture = training_picture(batch, run.train_set.classes, run.config.log.num_images)
            run.log.picture(run.state.step, "train/batch", picture)
        yield batch


def _loader(run: Run, rows: Sequence[Sequence[int]], steps: int) -> Iterable[Batch]:
    """This rank's batches from the current step to `steps`."""
    config = run.config
    stream = TrainStream(
        run.train_set,
        TrainTransform(
            config.augment, mean=config.data.mean, short_side_px=config.data.short_side_px
        ),
        stream_seed=config.seed,
        batch_size=config.train.batch_size,
    )
    return train_loader(
        stream,
        rows=rows,
        start_step=run.state.step,
        steps=steps,
        num_workers=num_loader_workers(config.data),
        prefetch=config.data.prefetch,
        pin_memory=run.device.type == "cuda",
        # The other ranks begin to wait at the same time. Who gives up first says why, and that is
        # to be the one that knows it.
        timeout_s=0.8 * config.train.timeout_s,
    )


def _evaluate(run: Run) -> Scores:
    """Scores the model on the evaluation split, logs it, and keeps it if it is the best so far."""
    run.step_sync.settle()
    _settle_data(run)
    heartbeat.at("evaluation", run.state.step)
    step, classes, log = run.state.step, run.eval_set.classes, run.log

    def show(prediction: Prediction) -> None:
        if log.enabled and prediction.index < config.log.num_images * dist.world_size():
            picture = panel(
                prediction.image,
                prediction.label,
                prediction.pred,
                palette=classes.palette,
                names=classes.names,
                title=run.eval_set.name(prediction.index),
            )
            log.picture(step, f"eval/{prediction.index}", picture)

    config = run.config
    if config.norm.precise_batches is not None:
        _take_precise_statistics(run)
    matrix = evaluate_dataset(
        run.state.eval_model,
        run.eval_set,
        InferenceSettings.from_config(config),
        device=run.device,
        num_classes=classes.num_classes,
        progress=True,
        callbacks=[show],
    )
    scores = matrix.scores()
    run.evaluated = step
    log.scalars(step, scores.scalars(classes.names))
    log.picture(
        step, "eval/confusion", confusion_picture(matrix.counts.cpu().numpy(), classes.names)
    )
    if _is_better(scores.mean_iou, run.best):
        run.best = {"step": step, "mean_iou": scores.mean_iou}
        if dist.is_main():
            run.store.save_best(_record(run))
    log.lines([f"step {step}  mIoU {scores.mean_iou:.4f}  {score_line(run.best)}"])
    return scores


def _is_better(mean_iou: float, best: dict[str, Any] | None) -> bool:
    """Whether a score is above the best one; any number is better than NaN."""
    if best is None:
        return True
    return mean_iou > best["mean_iou"] or (isnan(best["mean_iou"]) and not isnan(mean_iou))


def _take_precise_statistics(run: Run) -> None:
    """Replaces the running statistics of the model to evaluate (collective).

    The batches are those of the steps to come, whichever ranks train them, so that the result, like
    the steps, depends on nothing but the config and the step.
    """
    config, train = run.config, run.config.train
    rows = indices_of_rank(train.batch_size, train.accumulate_steps, dist.rank(), dist.world_size())
    normalize = Normalize(config.data.mean, config.data.std).to(run.device, dtype_of(train))
    model = run.state.eval_model

    def forward(batch: Batch) -> None:
        with autocast(train, run.device):
            model(normalize(batch.images.to(run.device)))

    steps = run.state.step + config.norm.precise_batches
    precise_statistics(model, _loader(run, rows, steps), forward)


def _save(run: Run) -> None:
    """Replaces last.pt."""
    run.step_sync.settle()
    heartbeat.at("checkpoint", run.state.step)
    _settle_data(run)
    if dist.is_main():
        run.store.save_last(_record(run))
        if not (
            run.directory / run_directory.CONFIG
        ).exists():  # deleted; without it there is no --resume
            run_directory.write_description(run.directory, run.config, run.devices)


def _settle_data(run: Run) -> None:
    """Lets nothing be saved before the labels have been compared (collective)."""

    def stops(seconds: float) -> bool:
        asked = run.step_sync.stopped or run.requests.stop_requested()
        return asked and seconds > _STOP_PATIENCE_S

    if not run.data.settle(lambda seconds: seconds > _DATA_PATIENCE_S):
        run.log.lines(["the labels are still being hashed; training goes on when that is done"])
        if not run.data.settle(stops):
            run.log.lines(
                [
                    "warning: stopped before all labels were hashed: whether they have changed is "
                    "not known yet"
                ]
            )
    run.log.lines(run.data.take_news())


def _record(run: Run) -> Checkpoint:
    state = run.state
    return Checkpoint(
        step=state.step,
        **checkpoint.experiment_record(run.config, run.train_set.classes),
        model=state.model.state_dict(),
        average=None if state.average is None else state.average.model.state_dict(),
        optimizer=state.optimizer.state_dict(),
        scaler=state.scaler.state_dict(),
        best=run.best,
        evaluated=run.evaluated,
        data=run.data.record(),
    )
