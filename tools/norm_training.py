"""What each kind of batch statistics costs in mIoU: one experiment, trained under all of them.

Everything but the norm layers is the same for one seed: initial weights, images, augmentation,
dropout, learning rate and the whole batch, which local statistics see as ranks of 1 or 2 images.

One process stands in for the ranks of `local` (`GhostBatchNorm2d`, exact). Statistics of the whole
batch (`sync`), constants (`frozen`) and statistics of an image (`group`) do not depend on how ranks
share a batch, so one run of each serves any number of images a rank.

Running statistics do not touch training: one run of `local` keeps all three kinds of them, and is
evaluated with each.
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ghost_norm import RUNNING, GhostBatchNorm2d, compare_running, take_running
from torch import nn

from segtrain.checkpoint.format import Checkpoint, experiment_fields, save
from segtrain.checkpoint.loading import load_initial
from segtrain.config import Config, override_config
from segtrain.data import open_dataset
from segtrain.data.read.dataset import SegDataset
from segtrain.data.sample.loader import (
    TrainStream,
    indices_of_rank,
    num_loader_workers,
    train_loader,
)
from segtrain.data.sample.transforms import TrainTransform
from segtrain.distributed.partition import partition
from segtrain.errors import ConfigError
from segtrain.evaluation.dataset import evaluate_dataset
from segtrain.evaluation.settings import InferenceSettings
from segtrain.files import write_atomic
from segtrain.models import build_model
from segtrain.models.blocks import Normalize
from segtrain.models.precision import autocast, autocast_dtype, dtype_of
from segtrain.norm import NormFactory, make_norm, precise_statistics
from segtrain.run.console import ProgressBar
from segtrain.seed import seed_everything
from segtrain.training.engine import train_steps
from segtrain.training.state import TrainState, make_state
from segtrain.training.step_sync import StepSync
from segtrain.types import Batch

# Training goes on from trained weights: a smaller step than from random ones.
CONTINUED_LR_FACTOR = 0.3
# ASPP's pooled branch then has 4 values a group, as batch norm has there over a batch of 4 images;
# with 32 groups of its 64 channels it would have 2, whose normalized values are 1 and -1.
NUM_GROUPS = 16
# The loss of a single step says little.
_LOSS_MEANS = 10


@dataclass(frozen=True)
class Treatment:
    """One way to normalize in training.

    images_per_rank: of local statistics; None: does not matter.
    whole_if_pooled: as in GhostBatchNorm2d.
    continues: trained on from the weights that `sync` ended with.
    """

    name: str
    kind: str
    images_per_rank: int | None = None
    whole_if_pooled: bool = False
    continues: bool = False

    def norm(self, config: Config) -> NormFactory:
        """Makes the layers."""
        if self.images_per_rank is None:
            return make_norm(config.norm)
        return partial(
            GhostBatchNorm2d,
            num_ranks=config.train.batch_size // self.images_per_rank,
            whole_if_pooled=self.whole_if_pooled,
            eps=config.norm.eps,
            momentum=config.norm.momentum,
        )

    @property
    def evaluations(self) -> tuple[str, ...]:
        """What it is evaluated with."""
        if self.images_per_rank is not None:
            return (*RUNNING, "precise")
        return {"sync": ("running", "precise"), "frozen": ("initial",), "group": ("none",)}[
            self.kind
        ]


TREATMENTS = (
    Treatment("sync", "sync"),
    Treatment("local_1", "local", images_per_rank=1, whole_if_pooled=True),
    Treatment("local_2", "local", images_per_rank=2, whole_if_pooled=True),
    Treatment("group", "group"),
    Treatment("sync_continued", "sync", continues=True),
    Treatment("frozen", "frozen", continues=True),
    # The same as `segtrain train --nproc 2` with norm.kind local does it.
    Treatment("local_2_strict", "local", images_per_rank=2),
)


@dataclass(frozen=True)
class Result:
    """What one run leaves behind.

    losses: the training loss, means over ten equal parts of the steps.
    mean_iou: by what it was evaluated with.
    running: `compare_running` after training.
    """

    treatment: str
    seed: int
    losses: list[float]
    mean_iou: dict[str, float]
    running: dict[str, list[float]]
    train_s: float
    eval_s: float


@dataclass(frozen=True)
class Study:
    """All runs of one experiment.

    config: with the steps of training from random weights; its seed and norm are not used.
    continued_steps: steps from the weights of `sync` on.
    precise_batches: batches after the last step that precise statistics are taken from.
    """

    config: Config
    continued_steps: int
    precise_batches: int
    output: Path

    def run(self, seed: int, treatments: Sequence[Treatment]) -> list[Result]:
        """The results of one seed; what is in `output` already is not run again.

        Raises:
            ConfigError: `output` holds results of other settings.
            CheckpointError: the weights of `sync` to go on from are not there.
        """
        self._check_settings()
        results = []
        for treatment in treatments:
            file = self._folder(seed) / f"{treatment.name}.json"
            if not file.exists():
                write_text(file, to_json(asdict(self._run_one(treatment, seed))))
            results.append(Result(**json.loads(file.read_text())))
            scores = ", ".join(f"{how} {iou:.4f}" for how, iou in results[-1].mean_iou.items())
            print(f"seed {seed}  {treatment.name}  mIoU {scores}", flush=True)
        return results

    def config_of(self, treatment: Treatment, seed: int) -> Config:
        """The experiment that one run trains."""
        options = [f"seed={seed}"]
        if treatment.kind != "local":
            options.append(f"norm.kind={treatment.kind}")
        if treatment.kind == "group":
            options.append(f"norm.num_groups={NUM_GROUPS}")
        if treatment.continues:
            train = self.config.train
            warmup = train.warmup_steps * self.continued_steps // train.steps
            options += [
                f"train.init_from={json.dumps(str(self._sync_weights(seed)))}",
                f"train.steps={self.continued_steps}",
                f"train.warmup_steps={warmup}",
                f"train.lr={train.lr * CONTINUED_LR_FACTOR!r}",
            ]
        return override_config(self.config, options, source="study")

    def _run_one(self, treatment: Treatment, seed: int) -> Result:
        config = self.config_of(treatment, seed)
        began = time.perf_counter()
        state, losses = train(config, treatment.norm(config), f"seed {seed} {treatment.name}")
        train_s = time.perf_counter() - began
        if treatment.name == "sync":
            save(self._sync_weights(seed), _record(state, config))
        running = compare_running(state.model)
        began = time.perf_counter()
        scores = {
            how: score(state.model, config, how, self.precise_batches)
            for how in treatment.evaluations
        }
        parts = [partition(len(losses), _LOSS_MEANS, part) for part in range(_LOSS_MEANS)]
        parts = [part for part in parts if part]  # there are fewer steps in a trial
        return Result(
            treatment=treatment.name,
            seed=seed,
            losses=[statistics.mean(losses[part.start : part.stop]) for part in parts],
            mean_iou=scores,
            running=running,
            train_s=train_s,
            eval_s=time.perf_counter() - began,
        )

    def _folder(self, seed: int) -> Path:
        return self.output / f"seed_{seed}"

    def _sync_weights(self, seed: int) -> Path:
        return self._folder(seed) / "sync.pt"

    def _check_settings(self) -> None:
        """Results of other settings beside these would look like a difference of treatments."""
        config = self.config.model_dump(mode="json")
        del config["seed"], config["data"]["root"]
        settings = {
            "config": config,
            "continued_steps": self.continued_steps,
            "continued_lr_factor": CONTINUED_LR_FACTOR,
            "num_groups": NUM_GROUPS,
            "precise_batches": self.precise_batches,
        }
        file = self.output / "settings.json"
        if not file.exists():
            write_text(file, to_json(settings))
            return
        before, now = flat(json.loads(file.read_text())), flat(json.loads(to_json(settings)))
        changed = [
            f"{key}: {before.get(key)!r} there, {now.get(key)!r} here"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if changed:
            raise ConfigError(
                f"{self.output}: holds results of other settings; use another --output\n  "
                + "\n  ".join(changed)
            )


def train(config: Config, norm: NormFactory, title: str) -> tuple[TrainState, list[float]]:
    """Trains as `segtrain train` does in one process; returns the state and the loss of each step.

    Args:
        norm: makes the norm layers, whatever `config` says of them.
    """
    seed_everything(config.seed)
    torch.use_deterministic_algorithms(config.train.deterministic)
    device = torch.device("cpu")
    train_set = open_dataset(config.data, config.data.train_split)
    model = build_model(config.model, num_classes=train_set.classes.num_classes, norm=norm)
    if config.train.init_from is not None:
        load_initial(model, config.train.init_from)
    state = make_state(model, config, device)
    step_sync = StepSync(lambda: False)
    losses = []
    with ProgressBar(config.train.steps, 0, title, enabled=True) as bar:
        for result in train_steps(
            state,
            batches(config, train_set, 0, config.train.steps),
            config,
            device=device,
            indices=indices_of_rank(config.train.batch_size, config.train.accumulate_steps, 0, 1),
            step_sync=step_sync,
        ):
            losses.append(result.loss.item())
            bar.describe(f"loss {losses[-1]:.4f}")
            bar.update()
    step_sync.check_finite()
    return state, losses


def batches(config: Config, train_set: SegDataset, start: int, stop: int) -> Iterator[Batch]:
    """The whole batches of steps `start` to `stop` - 1."""
    transform = TrainTransform(
        config.augment, mean=config.data.mean, short_side_px=config.data.short_side_px
    )
    size = config.train.batch_size
    return train_loader(
        TrainStream(train_set, transform, stream_seed=config.seed, batch_size=size),
        indices=indices_of_rank(size, config.train.accumulate_steps, 0, 1),
        start_step=start,
        steps=stop,
        num_workers=num_loader_workers(config.data),
        prefetch=config.data.prefetch,
        pin_memory=False,
        timeout_s=config.train.timeout_s,
    )


def score(model: nn.Module, config: Config, how: str, precise_batches: int) -> float:
    """The mIoU on the evaluation split of `model` with the statistics `how`."""
    if how in RUNNING:
        take_running(model, how)
    elif how == "precise":
        _take_precise(model, config, precise_batches)
    dataset = open_dataset(config.data, config.data.eval_split)
    matrix = evaluate_dataset(
        model,
        dataset,
        InferenceSettings.from_config(config),
        device=torch.device("cpu"),
        num_classes=dataset.classes.num_classes,
    )
    return matrix.scores().mean_iou


def _take_precise(model: nn.Module, config: Config, num_batches: int) -> None:
    train_set = open_dataset(config.data, config.data.train_split)
    normalize = Normalize(config.data.mean, config.data.std).to(dtype=dtype_of(config.train))

    def forward(batch: Batch) -> None:
        with autocast(autocast_dtype(config.train), torch.device("cpu")):
            model(normalize(batch.images))

    steps = config.train.steps
    precise_statistics(model, batches(config, train_set, steps, steps + num_batches), forward)


def _record(state: TrainState, config: Config) -> Checkpoint:
    classes = open_dataset(config.data, config.data.train_split).classes
    return Checkpoint(
        step=state.step,
        **experiment_fields(config, classes),
        model=state.model.state_dict(),
        average=None,
        optimizer=None,
        scaler=None,
        best=None,
    )


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts by dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, dict)
        leaves |= flat(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return leaves


def to_json(content: Any) -> str:
    """As it is written to files."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Writes the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text, durable=False)
