"""What a run and its replay have in common: data, model and optimizer, up to the next step."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from segtrain import seed
from segtrain.checkpoint.experiment import parse_experiment
from segtrain.checkpoint.format import Checkpoint
from segtrain.checkpoint.initial import load_initial
from segtrain.checkpoint.same_data import Resumed
from segtrain.checkpoint.training_state import check_changes, loaded_names, restore
from segtrain.commands.train.preflight import check_experiment
from segtrain.config import Config
from segtrain.data import open_dataset
from segtrain.data.class_uniform import ClassUniform
from segtrain.data.classes import ignoring_as
from segtrain.data.dataset import SegDataset
from segtrain.data.mixing import Mixing
from segtrain.data.stream import TrainStream
from segtrain.data.transforms import TrainTransform
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.models import SegModel, build_model, timm_backbone
from segtrain.models.pretrained import load_backbone
from segtrain.norm import make_norm
from segtrain.training.optim import learning_rate, momentum, set_learning_rate, set_momentum
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
            set_momentum(state.optimizer, momentum(config.train, last_update))
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
