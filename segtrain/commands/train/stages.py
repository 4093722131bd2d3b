"""What a run and its replay have in common: data, model and optimizer, up to the next step.

Both leave the run as a normal end does: evaluated, saved, exit code 0. The learning rate is that of
the step where the run ends: its schedule follows train.steps alone, since a schedule that followed
the clock would train other weights on another machine, or after an interruption.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from segtrain import seed
from segtrain.checkpoint.format import Checkpoint, parse_experiment
from segtrain.checkpoint.loading import load_initial
from segtrain.checkpoint.restore import check_changes, loaded_names, restore
from segtrain.checkpoint.same_data import Resumed
from segtrain.commands.train.preflight import check_experiment
from segtrain.config import Config, TrainConfig
from segtrain.data import open_dataset
from segtrain.data.read.classes import ClassFile, ignoring_as
from segtrain.data.read.dataset import SegDataset
from segtrain.data.sample.centroids import TILE_PX, Centroids, measure_centroids
from segtrain.data.sample.stream import ClassUniform, Mixing, TrainStream
from segtrain.data.sample.transforms import TrainTransform
from segtrain.distributed import collectives as dist
from segtrain.errors import CheckpointError, ConfigError
from segtrain.models import SegModel, build_model, timm_backbone
from segtrain.models.pretrained import load_backbone
from segtrain.norm import make_norm
from segtrain.run import directory as run_directory
from segtrain.run.console import say
from segtrain.text import printable
from segtrain.training.optim import learning_rate, set_learning_rate
from segtrain.training.receipts import ReceiptMeter
from segtrain.training.state import TrainState, make_state
from segtrain.training.step_sync import StepSync


@dataclass(kw_only=True)
class Training:
    """What the steps of an experiment need on this rank."""

    config: Config
    device: torch.device
    train_set: SegDataset
    state: TrainState
    step_sync: StepSync
    class_uniform: ClassUniform | None = None  # data.class_uniform
    auto_workers: int | None = None  # what data.num_workers auto has come to


# With these cuBLAS computes the same bits in every run.
_WORKSPACES = (":4096:8", ":16:8")


def make_repeatable(config: Config, device: torch.device) -> None:
    """Seeds all generators and chooses the kernels that the config asks for."""
    seed.seed_everything(config.seed)
    # Shares promise bits. On a CPU the kernels that they run keep that promise by themselves.
    if config.train.deterministic or (config.train.shares is not None and device.type == "cuda"):
        workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
        if device.type == "cuda" and workspace not in _WORKSPACES:
            raise ConfigError(
                "environment: CUBLAS_WORKSPACE_CONFIG: expected "
                f"{' or '.join(_WORKSPACES)}, got {workspace!r}: with train.deterministic and "
                "train.shares torch refuses others; unset it"
            )
        torch.use_deterministic_algorithms(True)
    else:
        torch.use_deterministic_algorithms(False)


def open_data(
    config: Config, device: torch.device, resumed: Resumed | None, notes: list[str]
) -> tuple[SegDataset, SegDataset]:
    """The splits to train and to evaluate on, checked (collective)."""
    train_set = open_dataset(config.data, config.data.train_split)
    eval_set = open_dataset(config.data, config.data.eval_split)
    sets = (train_set, eval_set)
    if resumed is not None and config.data.label_format == "colors":
        # Older versions ignored the default colour; a run goes on by the rule it began with.
        _, before = parse_experiment(*resumed)
        if ignoring_as(before, train_set.classes).ignores_color:
            for one in sets:
                one.classes = replace(one.classes, ignores_color=True)
    oddities = check_experiment(config, *sets, device=device)
    warnings = dict.fromkeys((*train_set.warnings, *eval_set.warnings, *oddities))
    notes += [f"warning: {warning}" for warning in warnings]
    return sets


def build_state(
    config: Config,
    device: torch.device,
    resumed: Resumed | None,
    train_set: SegDataset,
    notes: list[str],
) -> TrainState:
    """Model, optimizer and the rest, with their values (collective)."""
    classes = train_set.classes
    model = build_model(config.model, num_classes=classes.num_classes, norm=make_norm(config.norm))
    # A checkpoint brings all weights; fetching others first would only cost time.
    if resumed is not None:
        check_changes(model, *resumed, config, classes)
        loaded = loaded_names(*resumed)
    else:
        lines, loaded = _load_initial(model, config, classes.names)
        notes += lines
    # One answer for all: a machine with another file would decay other weights.
    loaded = dist.broadcast_object(loaded)
    state = make_state(model, config, device, loaded=loaded, resumed=resumed is not None)
    if resumed is not None:
        restore(state, *resumed)
        # Without another step, the next checkpoint would hold the rates of the config.
        last_update = min(state.step, config.train.steps) - 1
        if last_update >= 0:
            set_learning_rate(state.optimizer, learning_rate(config.train, last_update))
    notes += _layer_lines(state)
    return state


def _layer_lines(state: TrainState) -> list[str]:
    """Log lines about what is not trained."""
    lines = []
    parameters = list(state.model.parameters())
    frozen = [p.numel() for p in parameters if not p.requires_grad]
    if frozen:
        lines.append(f"frozen     {sum(frozen)} weights in {len(frozen)} tensors (train.layers)")
    masks = list(state.start.held.values())
    if masks:
        held = sum(int(mask.sum()) for mask in masks)
        lines.append(f"held       {held} weights in {len(masks)} tensors keep their value")
    return lines


def unequal_ranks(state: TrainState) -> list[str]:
    """A warning if the ranks of a run with shares do not compute the same bits (collective)."""
    digits = dist.all_gather_object(state.arithmetic)
    others = [rank for rank, other in enumerate(digits) if other != digits[0]]
    if not others:
        return []
    ranks = ", ".join(map(str, others))
    return [
        f"warning: ranks {ranks} compute other bits than rank 0 (another processor, device or "
        "version): weights depend on which rank has which share"
    ]


def computes_otherwise(state: TrainState, checkpoint: Checkpoint) -> bool:
    """Whether rank 0 of a run with shares has other arithmetic than that of the checkpoint.

    The same on all ranks. False if the checkpoint does not say (collective).
    """
    saved, mine = checkpoint.shares, dist.broadcast_object(state.arithmetic)
    return bool(saved) and saved.get("arithmetic") != mine


def _load_initial(
    model: SegModel, config: Config, class_names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Fills the model or its backbone, as the config asks (collective).

    Returns notes, and the names of the weights that were loaded.
    """
    names = [name for name, _ in model.named_parameters()]
    if config.train.init_from is not None:
        initial = load_initial(model, config.train.init_from, class_names, config)
        return initial.lines, [name for name in names if name not in initial.random]
    if config.model.pretrained is None:
        return [], []
    # The first rank of each machine downloads the file, then the others find it.
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
    if not config.model.backbone.startswith(timm_backbone.PREFIX):
        return []
    used = {"mean": config.data.mean, "std": config.data.std}
    expected = timm_backbone.expected_normalization(config.model.backbone, config.model.pretrained)
    words = [
        f"data.{key} is {[*used[key]]}, timm's weights expect {[round(x, 3) for x in numbers]}"
        for key, numbers in zip(used, expected, strict=True)
        if any(abs(x - y) > 0.01 for x, y in zip(used[key], numbers, strict=True))
    ]
    return [f"warning: {'; '.join(words)}"] if words else []


def receipt_meter(this: Training, weights_due: Callable[[int], bool]) -> ReceiptMeter:
    """What gathers the receipts of its steps; `weights_due` as there."""
    stream = train_stream(this)

    def names(step: int) -> list[str]:
        return stream.names_of_step(step - 1)

    return ReceiptMeter(this.state, names=names, weights_due=weights_due)


def train_stream(this: Training) -> TrainStream:
    """The augmented samples of all steps."""
    config = this.config
    return TrainStream(
        this.train_set,
        TrainTransform(
            config.augment, mean=config.data.mean, short_side_px=config.data.short_side_px
        ),
        stream_seed=config.seed,
        batch_size=config.train.batch_size,
        class_uniform=this.class_uniform,
        mixing=Mixing(config.augment.mixup_alpha, config.augment.class_mix_prob),
    )


def class_uniform_sampling(
    config: Config,
    train_set: SegDataset,
    directory: Path,
    device: torch.device,
    *,
    keep: Callable[[Centroids], bool],
) -> ClassUniform | None:
    """What `data.class_uniform` asks for; None without it. Says what it does (collective).

    directory: of the run, which keeps the centroids; keep: whether these may be written there.

    Raises:
        DataError: a label cannot be read, or none shows a class.
    """
    data = config.data
    if not data.class_uniform:
        return None
    if dist.is_main():
        say(f"looking for the classes in {len(train_set)} labels (data.class_uniform)")
    path = directory / run_directory.CENTROIDS
    centroids = measure_centroids(train_set, TILE_PX, path, device=device, keep=keep)
    return ClassUniform(centroids, fraction=data.class_uniform, steps=data.class_uniform_steps)


def class_uniform_lines(sampling: ClassUniform, classes: ClassFile) -> list[str]:
    """Lines for the log: how many centroids there are, and which classes have none."""
    by_class = sampling.centroids.by_class
    numbers = [len(rows) for rows in by_class.values()]
    until = "" if sampling.steps is None else f" up to step {sampling.steps}"
    lines = [
        f"sampling   {100 * sampling.fraction:g}% class-uniform{until}: {len(numbers)} classes "
        f"with {min(numbers):,} to {max(numbers):,} centroids each, {sum(numbers):,} in all"
    ]
    absent = [name for i, name in enumerate(classes.names) if i not in by_class]
    if absent:
        lines.append(
            "warning: data.class_uniform: no training label shows "
            f"{printable(', '.join(absent))}: such a class is left out"
        )
    return lines


def centroid_changes(
    sampling: ClassUniform | None, resumed: Resumed | None, *, accept_changes: bool
) -> list[str]:
    """How the centroids differ from those of the checkpoint, for the log.

    Raises:
        ConfigError: they do, and `accept_changes` is not set.
    """
    before = None if resumed is None else resumed.checkpoint.centroids
    if sampling is None or before in (None, sampling.centroids.sha256()):
        return []
    what = "the centroids of the classes (data.class_uniform) are not those of the checkpoint"
    if not accept_changes:
        raise ConfigError(
            f"{resumed.path}: {what}: a label or the class file has changed, or another version of "
            "segtrain measures them otherwise; give the run what it was started with, start a new "
            "run by --output, or, if the change is meant, add --accept-changes"
        )
    return [f"changed    {what}"]


class Ending:
    """Counts hours, and evaluations without a better mIoU, over all resumptions of a run.

    The hours are those of rank 0, which asks all ranks to end (`StepSync`): of training,
    evaluations and checkpoints, not of starting nor between interruptions. The evaluations are
    counted alike on all ranks, which have the same scores.

    saved: `fields` of a checkpoint; None: nothing was counted yet.
    clock: seconds, never running backwards.
    """

    def __init__(
        self,
        train: TrainConfig,
        saved: dict[str, Any] | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_hours, self._patience = train.max_hours, train.patience
        self._hours_before = 0.0 if saved is None else saved["hours"]
        self.evaluations = 0 if saved is None else saved["evaluations"]
        self._clock = clock
        self._began: float | None = None

    def start(self) -> None:
        """Starts the clock."""
        self._began = self._clock()

    @property
    def hours(self) -> float:
        """Used so far, before the last interruption and since."""
        if self._began is None:
            return self._hours_before
        return self._hours_before + (self._clock() - self._began) / 3600

    def count(self, *, better: bool) -> None:
        """Takes in an evaluation."""
        self.evaluations = 0 if better else self.evaluations + 1

    def is_out_of_time(self) -> bool:
        """Whether train.max_hours are used up."""
        return self._max_hours is not None and self.hours >= self._max_hours

    def is_out_of_patience(self) -> bool:
        """Whether train.patience evaluations in a row brought no better score."""
        return self._patience is not None and self.evaluations >= self._patience

    def reason(self) -> str:
        """Why the run ends early, in words; empty if it does not."""
        if self.is_out_of_patience():
            return f"no better mIoU in {self.evaluations} evaluations (train.patience)"
        if self.is_out_of_time():
            return f"{self._max_hours:g} hours of training are used up (train.max_hours)"
        return ""

    @property
    def key(self) -> str:
        """The option that ended the run, given that it ended early."""
        return "train.patience" if self.is_out_of_patience() else "train.max_hours"

    def fields(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"hours": self.hours, "evaluations": self.evaluations}


def check_fields(saved: dict[str, Any] | None, path: Path) -> dict[str, Any] | None:
    """`saved` as it came from a checkpoint; CheckpointError if it is damaged."""
    if saved is None:
        return None
    hours, evaluations = saved.get("hours"), saved.get("evaluations")
    if not (
        (type(hours), type(evaluations)) == (float, int)
        and math.isfinite(hours)
        and hours >= 0
        and 0 <= evaluations < 2**53
    ):
        raise CheckpointError(f"{path}: damaged: the hours or evaluations of the run make no sense")
    return {"hours": hours, "evaluations": evaluations}
