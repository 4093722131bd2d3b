"""Sections of loss, evaluation, log and checkpoints; all sections together, an experiment; and
options that probably do not do what is meant.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from segtrain import plugins
from segtrain.config.data import AugmentConfig, DataConfig, OwnFormat
from segtrain.config.messages import did_you_mean, show
from segtrain.config.model import ModelConfig, NormConfig
from segtrain.config.optim import CYCLE_RISE, Name, OptimConfig, ScheduleConfig
from segtrain.config.plugin_names import PluginName, PluginOptions, named_plugins
from segtrain.config.section import (
    NEEDS,
    Fraction,
    FractionBelow1,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Scale,
    Section,
    Size,
    option,
)
from segtrain.config.train import TrainConfig
from segtrain.text import MAX_NAME, counted, first_of, printable

_OwnLoss = Literal[
    "cross_entropy",
    "ohem",
    "dice",
    "dice_linear",
    "focal",
    "lovasz",
    "lovasz_batch",
    "boundary_relaxation",
    "tversky",
]
# What serves classes that overlap, each class against all else.
_MULTILABEL_LOSSES = ("cross_entropy", "focal", "dice", "dice_linear", "tversky", "lovasz")
LossKind = Annotated[_OwnLoss, PluginName("loss")]
_OwnTask = Literal["semantic", "multilabel"]


class BaseLoss(Section):
    """What one loss is: loss itself, or a term of loss.also."""

    kind: LossKind = option(
        "cross_entropy",
        "ohem: cross entropy over the hardest pixels only; dice: soft Dice of squared "
        "probabilities (V-Net), mean over the classes that the labels of a microbatch show; "
        "dice_linear: without the squares, as MONAI and MosaicML's Composer; focal: cross entropy "
        "times (1 - p) ** 2; lovasz: Lovasz-Softmax, a surrogate of the IoU, mean over the images "
        "(of microbatches: by their pixels); lovasz_batch: over the pixels of all ranks, which are "
        "all sent to every rank and sorted there, class by class; boundary_relaxation: along "
        "boundaries the classes of the pixels beside it are right too. With task multilabel each "
        "class is one of its own, against all else: binary cross entropy and focal loss, Dice of "
        "sigmoids, Lovasz hinge; and tversky, Dice that weighs what is missed by 0.7, and what is "
        "found wrongly by 0.3. Or a plugin's",
    )
    options: Annotated[Any, PluginOptions("loss", "kind")] = option(
        None, "options of a plugin's kind", validate_default=True
    )
    weight: PositiveFloat = option(1.0, "factor of this loss in the sum with those of loss.also")
    class_weights: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] | None = option(
        None,
        "one weight a class, in the order of the class file; null: all 1; "
        "'segtrain data stats' prints some",
    )
    logit_adjustment: Fraction = option(
        0.0,
        "how much of class_weights is undone in the predictions. 0: classes of large weights are "
        "predicted more often than they occur; 1: as often. All pixels train the model with their "
        "weights either way (arXiv:2007.07314)",
    )
    positive_weights: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None = option(
        None,
        "task multilabel: what a pixel of a class weighs in its cross_entropy beside one that is "
        "none, a number a class; null: all 1; 'segtrain data stats' prints some",
    )
    label_smoothing: FractionBelow1 = option(
        0.0, "cross_entropy: this part of each label is spread over all classes, as in torch"
    )
    ohem_threshold: Fraction = option(
        0.7, "keep pixels whose probability of the true class is below this"
    )
    ohem_min_kept: Positive = option(
        100_000,
        "keep at least this many of the hardest pixels, counted over all ranks; mmsegmentation "
        "counts for each image",
    )
    ohem_fraction: Annotated[float, Field(gt=0, le=1)] | None = option(
        None,
        "ohem: keep this part of the valid pixels, the hardest of all ranks, whatever their "
        "probability; detectron2's DeepLab uses 0.2; null: ohem_threshold and ohem_min_kept decide",
    )

    def _mistakes(self) -> Iterator[str]:
        if self.class_weights is not None and not any(self.class_weights):
            yield "class_weights: all weights are 0"

    @property
    def takes_class_weights(self) -> bool:
        """Whether this kind of loss uses its class_weights: what NEEDS says."""
        used = {key for _, plugin in named_plugins(self) for key in plugin.uses}
        known = NEEDS["BaseLoss"]["class_weights"].split()
        return f"kind={self.kind}" in known or "class_weights" in used


class LossTerm(BaseLoss):
    """A further loss that is added to the first."""

    kind: LossKind = option(
        ..., "the loss to add, as loss.kind; the other keys too are those of the loss section"
    )


class LossConfig(BaseLoss):
    """What is minimized, over the valid pixels of all ranks together."""

    also: tuple[LossTerm, ...] = option(
        (),
        "further losses to add, each with options of its own, class_weights too: "
        "[{kind: dice, weight: 3.0}]; both heads have the sum",
    )
    aux_weight: NonNegativeFloat = option(0.4, "weight of the auxiliary head's loss")

    @property
    def terms(self) -> tuple["LossConfig | LossTerm", ...]:
        """This loss and those of `also`."""
        return (self, *self.also)


_SCORES = {"miou": "mIoU", "mdice": "mDice"}
_MetricScore = Annotated[str, Field(pattern=r"^[^/]+/.")]  # METRIC/SCORE


class Metric(Section):
    """A further score of an evaluation."""

    name: Annotated[str, PluginName("metric", "none")] = option(..., "that of a plugin")
    options: Annotated[Any, PluginOptions("metric", "name")] = option(
        None, "its options", validate_default=True
    )


class Callback(Section):
    """What goes along with the steps of a training."""

    name: Annotated[str, PluginName("callback", "none")] = option(..., "that of a plugin")
    options: Annotated[Any, PluginOptions("callback", "name")] = option(
        None, "its options", validate_default=True
    )


class EvalConfig(Section):
    """How an image is turned into a prediction, and when training does it."""

    every_steps: Positive | None = option(4000, "evaluate this often; null: at the end only")
    best: (
        Literal["miou", "mdice"] | _MetricScore | Annotated[tuple[Name, ...], Field(min_length=1)]
    ) = option(
        "miou",
        "the score whose highest value chooses best.pt: mIoU, mDice, the mean IoU of these "
        "classes, such as [person, rider], or a score of eval.metrics, such as holes/area",
    )
    mode: Literal["whole", "slide"] = option(
        "whole", "the image at once, or windows of crop_size whose results are averaged"
    )
    crop_size: Size | None = option(
        None,
        "sliding window; null: the training crop, and for images too large to go as a whole at "
        "least 1024 px a side",
    )
    overlap: FractionBelow1 = option(1 / 3, "share of a window that its neighbour repeats")
    scales: tuple[Scale, ...] = option((1.0,), "image scales to average", min_length=1)
    flip: bool = option(False, "average with the mirrored image")
    thresholds: Annotated[tuple[Fraction, ...], Field(min_length=1)] | None = option(
        None,
        "task multilabel: the probability from which a class is predicted, one for all or one a "
        "class; null: those of the best IoU on eval_split, which each evaluation of a training "
        "finds, and the checkpoint keeps for eval, predict and export",
    )
    precision: Literal["float32", "tf32", "bfloat16", "float16"] | None = option(
        None,
        "of the evaluation, as train.precision; null: that of the training; half precision is "
        "faster on a GPU, and scores change a little",
    )
    batch_size: Positive | None = option(
        None,
        "images of equal size, or sliding windows, that go through the network together; null: "
        "up to 8, in a quarter of the GPU's memory; on a CPU 1 image, up to 4 windows",
    )
    metrics: tuple[Metric, ...] = option(
        (), "further scores of evaluations, of plugins: [{name: holes, options: {}}]"
    )
    without: tuple[Name, ...] = option(
        (), "also the mIoU of all classes but these, such as [background]: eval/mIoU_without"
    )

    def _mistakes(self) -> Iterator[str]:
        if len(set(self.best_classes)) < len(self.best_classes):
            yield "best: expected each class once"
        if len({metric.name for metric in self.metrics}) < len(self.metrics):
            yield "metrics: expected each name once"

    @property
    def best_classes(self) -> tuple[str, ...]:
        """Those whose mean IoU chooses best.pt; empty if another score does."""
        return () if isinstance(self.best, str) else self.best

    @property
    def best_metric(self) -> str | None:
        """The one of `metrics` of which a score chooses best.pt; None: none."""
        name, slash, _ = "".join(self.best).partition("/")
        return name if slash and not self.best_classes else None

    def thresholds_of(self, num_classes: int) -> tuple[float, ...]:
        """Those of each class; 0.5 where none are known."""
        known = self.thresholds or (0.5,)
        return known * num_classes if len(known) == 1 else known

    @property
    def best_name(self) -> str:
        """The score that chooses best.pt, in words."""
        if self.best_classes:
            return f"IoU of {', '.join(self.best)}"
        return _SCORES.get(self.best, self.best)

    @property
    def best_tag(self) -> str:
        """The same in metrics.jsonl."""
        if self.best_metric is not None:
            return f"metric/{self.best}"
        return f"eval/{'IoU_of_best' if self.best_classes else _SCORES[self.best]}"

    def unknown_classes(self, known: Sequence[str]) -> list[str]:
        """A line for each class that a score is of, or without, and that is not one of `known`."""
        lines = [
            f"eval.{key}: no class {printable(name, MAX_NAME)}{did_you_mean(name, known)}; "
            f"the classes are {first_of(known, 30)}"
            for key, names in (("best", self.best_classes), ("without", self.without))
            for name in names
            if name not in known
        ]
        none_is_left = self.without and {*known} <= {*self.without}
        return [*lines, "eval.without: no class is left"] if none_is_left else lines


class LogConfig(Section):
    """What is written while training."""

    every_steps: Positive = option(20, "scalars this often")
    charts: bool = option(
        True,
        "draw the confusion matrix in TensorBoard; write report.html and results.csv at the end",
    )
    trackers: tuple[Literal["wandb", "mlflow"], ...] = option(
        (), "send curves, config, scores and report there, too; needs pip install '.[trackers]'"
    )
    callbacks: tuple[Callback, ...] = option(
        (), "what is called after each step, of plugins: [{name: tell, options: {}}]"
    )

    def _mistakes(self) -> Iterator[str]:
        if len(set(self.trackers)) < len(self.trackers):
            yield "log.trackers: expected each tracker once"


class CheckpointConfig(Section):
    """When the training state is saved. last.pt and best.pt are always kept."""

    every_steps: Positive = option(1000, "write last.pt this often")
    keep_every_steps: Positive | None = option(
        None, "also keep a checkpoint of its own this often, the newest five; null: none"
    )


class Config(Section):
    """One experiment."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = option(
        0, "decides weights, sample order, augmentation and dropout"
    )
    task: Annotated[_OwnTask, PluginName("task")] = option(
        "semantic",
        "semantic: a pixel has one class; multilabel: any number of them, each found by itself "
        "(needs data.label_format bands); or a plugin's",
    )
    plugins: tuple[Name, ...] = option(
        (),
        "modules, and files by their paths from the folder of this one, to import for names of "
        "your own: [my_pkg.losses, ./my_loss.py] (segtrain/EXTENDING.md)",
    )
    data: DataConfig
    augment: AugmentConfig = AugmentConfig()
    model: ModelConfig = ModelConfig()
    norm: NormConfig = NormConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def is_multilabel(self) -> bool:
        """Whether a pixel may have several classes."""
        return self.task == "multilabel"

    @property
    def any_best(self) -> str:
        """A value of eval.best that needs no metric."""
        return f"{self.task}/score" if self.has_own_task else "miou"

    @property
    def has_own_task(self) -> bool:
        """Whether the task is that of a plugin."""
        return self.task not in get_args(_OwnTask)

    def _mistakes(self) -> Iterator[str]:
        train, norm = self.train, self.norm
        yield from self._task_mistakes()
        yield from self._start_mistakes()
        yield from self._schedule_mistakes()
        yield from self._best_mistakes()
        by_batch = self.model.recompute != "norm" or norm.is_batch_norm
        yield from self._no_effect("model.recompute", by_batch, f"norm.kind {norm.kind}")
        yield from self._norm_mistakes()
        for term in self.loss.terms if train.is_asynchronous else ():
            if term.kind in ("ohem", "lovasz_batch"):
                yield (
                    f"loss: {term.kind} is about the pixels of the whole batch, which no process "
                    f"has with train.parallel {train.parallel}; choose another loss"
                )
        weights = {term.class_weights for term in self.loss.terms if term.takes_class_weights}
        if (train.accumulate_steps > 1 or train.staleness == 0) and len(weights) > 1:
            yield (
                "loss.also: with train.accumulate_steps microbatches are weighed by class weights, "
                "and parts with train.staleness 0, and those of the terms differ; give all terms "
                "the same class_weights, or use train.virtual_ranks instead"
            )

    def _task_mistakes(self) -> Iterator[str]:
        """What serves only one task, beside the table of CONFLICTS."""
        layout, is_plain = self.data.layout, self.data.label_format in get_args(OwnFormat)
        labels = plugins.registered("label_format", self.data.label_format)
        if labels is not None and labels.is_here and labels.made.task != self.task:
            yield f"data.label_format: {labels.name} is of task {labels.made.task}; set both"
        elif labels is not None and labels.is_here and not labels.made.keeps:
            yield from self._moves(labels.name)
        elif is_plain and self.has_own_task:
            yield f"data.label_format: task {self.task} needs a plugin's, of its labels"
        elif is_plain and self.is_multilabel != (self.data.label_format == "bands"):
            yield "data.label_format: bands and task multilabel go together; set both, or neither"
        if self.task != "semantic" and layout not in ("folders", "list"):
            yield f"data.layout: {layout} has one class a pixel; use folders or list"
        elif not is_plain and layout not in ("folders", "list"):
            yield f"data.layout: {layout} has labels of its own format; use folders or list"
        for term in self.loss.terms:
            is_own = term.kind in get_args(_OwnLoss)
            if self.has_own_task and is_own:
                yield f"loss: {term.kind} is for classes; task {self.task} needs a plugin's loss"
            if self.is_multilabel and is_own and term.kind not in _MULTILABEL_LOSSES:
                yield (
                    f"loss: {term.kind} is for classes of which a pixel has one; with task "
                    f"multilabel use one of {', '.join(_MULTILABEL_LOSSES)}"
                )
            if self.is_multilabel and (term.label_smoothing or term.logit_adjustment):
                yield "loss: label_smoothing and logit_adjustment cannot go with task multilabel"
            if not self.is_multilabel and (term.kind == "tversky" or term.positive_weights):
                yield "loss: tversky and positive_weights are for task multilabel"

    def _moves(self, labels: str) -> Iterator[str]:
        """What would give an image and its labels other sizes or directions."""
        augment, evaluation = self.augment, self.eval
        without = {
            "augment.flip_prob": (augment.flip_prob, 0),
            "augment.scale_range": (augment.scale_range, (1, 1)),
            "augment.rotate_deg": (augment.rotate_deg, 0),
            "augment.quarter_turn_prob": (augment.quarter_turn_prob, 0),
            "eval.flip": (evaluation.flip, False),
            "eval.scales": (evaluation.scales, (1,)),
            "data.short_side_px": (self.data.short_side_px, None),
        }
        for key, (value, neutral) in without.items():
            if value != neutral:
                what = f"{show(value)} changes numbers of {labels} labels"
                yield f"{key}: {what}; set {show(neutral)}"

    def _best_mistakes(self) -> Iterator[str]:
        """A score of a plugin that no evaluation of the training finds."""
        name, metrics = self.eval.best_metric, self.eval.metrics
        # Scores of a plugin's task go by the name of the task.
        known = [metric.name for metric in metrics] + [self.task] * self.has_own_task
        if name is not None and name not in known:
            yield f"eval.best: no metric {printable(name, MAX_NAME)} in eval.metrics; name it there"
        if name is None and self.has_own_task:
            yield f"eval.best: task {self.task} has no IoU; name a score of it: {self.task}/SCORE"
        if self.eval.without and self.has_own_task:
            yield f"eval.without: task {self.task} has no IoU; leave it out"
        if self.is_multilabel and metrics:
            yield "eval.metrics: they take one class a pixel; with task multilabel it has several"

    def _norm_mistakes(self) -> Iterator[str]:
        """Images that share statistics beside those of a microbatch."""
        train, norm = self.train, self.norm
        if not norm.is_batch_norm:
            return
        # A microbatch: its images share statistics unless norm.images says otherwise.
        images = train.batch_size // train.accumulate_steps
        if 1 in (images, norm.images) and self.model.pools_globally:
            yield (
                f"{'train.batch_size' if images == 1 else 'norm.images'}: one image has one value "
                "a channel after global pooling, and batch norm needs two; use at least 2 images a "
                "microbatch (batch_size / accumulate_steps) and group"
            )
        if norm.images != "all" and train.batch_size % (train.accumulate_steps * norm.images):
            yield (
                f"norm.images: the {train.batch_size} images of a batch cannot be divided into "
                f"{counted(train.accumulate_steps, 'microbatch', 'microbatches')} with groups of "
                f"{norm.images}; choose another number of images, train.batch_size or "
                "train.accumulate_steps"
            )

    def _schedule_mistakes(self) -> Iterator[str]:
        """Numbers of the schedule beside the steps and the learning rate."""
        optim, schedule, steps = self.optim, self.schedule, self.train.steps
        if schedule.warmup_steps >= steps:
            yield (
                f"schedule.warmup_steps: {schedule.warmup_steps} must be smaller than train.steps, "
                f"{steps}; set both, such as schedule.warmup_steps={steps // 20}"
            )
        # min_lr is compared with the rate that the training really has.
        scale = 1.0 if optim.lr_batch_size is None else self.train.batch_size / optim.lr_batch_size
        if schedule.min_lr > optim.lr * scale:
            words = "" if optim.lr_batch_size is None else " as scaled to train.batch_size"
            yield (
                f"schedule.min_lr: {schedule.min_lr} must not be larger than optim.lr{words}, "
                f"{optim.lr * scale:g}"
            )
        start = schedule.finish_from
        if start is not None and start >= steps:
            yield f"schedule.finish_from: {start} must be smaller than train.steps, {steps}"
        if schedule.kind == "one_cycle" and CYCLE_RISE * steps <= 1:
            yield (
                f"schedule.kind: one_cycle rises in {CYCLE_RISE} of the steps, and of {steps} "
                "steps that is not more than one step"
            )

    def _start_mistakes(self) -> Iterator[str]:
        """Options that are about the weights that training starts from."""
        model, train, optim = self.model, self.train, self.optim
        if train.init_from is None and self.norm.kind == "frozen":
            yield (
                "norm.kind: frozen statistics come with the weights that training starts from; "
                "name a run or checkpoint in train.init_from"
            )
        if model.pretrained is not None or train.init_from is not None:
            return
        needs = {
            "decay_toward": any(x.decay_toward == "start" for x in (optim, *optim.layers)),
            "new_weight_decay": optim.new_weight_decay is not None,
            "layers": any(rule.freeze or rule.keep_zeros for rule in optim.layers),
        }
        for key in (key for key, needed in needs.items() if needed):
            yield (
                f"optim.{key}: is about weights that are loaded, and all start from random "
                "numbers here; name some in model.pretrained or train.init_from"
            )


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


def config_schema() -> dict[str, Any]:
    """JSON Schema of an experiment file, for completion and checks in editors."""
    schema = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def wrong_units(config: Config) -> list[str]:
    """One line for `data.mean` and for `data.std` where it is in torchvision's units of 0..1.

    `Config` accepts them: a run that was started with such numbers must be resumed with them. One
    line too where they are left out and the images are not RGB, which `data stats` accepts.
    """
    mean, std, channels = config.data.mean, config.data.std, config.data.channels
    if len(mean) != channels or len(std) != channels:
        return [
            f"data.mean: it and data.std are needed, {channels} numbers each, where data.channels "
            f"is {channels}; 'segtrain data stats' prints them"
        ]
    # A mean of zeros says nothing about units.
    wrong = {"mean": any(mean) and max(map(abs, mean)) <= 1, "std": max(std) < 1}
    return [
        f"data.{key}: {list(values)} is in units of 0..1, and pixels are 0..255 here; "
        f"write [{', '.join(f'{255 * value:.6g}' for value in values)}]"
        for key, values in (("mean", mean), ("std", std))
        if wrong[key]
    ]


def changed_normalization(trained: Config, config: Config) -> list[str]:
    """Notes and warnings about `data.mean` and `data.std` that differ from the training's."""
    before, now = trained.data, config.data
    keys = ("mean", "std", "value_range", "clip")
    changed = [key for key in keys if getattr(before, key) != getattr(now, key)]
    wrong = {line.partition(":")[0]: line for line in wrong_units(config)}
    lines = []
    for key in changed:
        here, there = (show(getattr(section, key)) for section in (now, before))
        line = wrong.get(f"data.{key}")
        note = f"note: data.{key}: {here} here, {there} in the training"
        lines.append(f"warning: {line}" if line else note)
    return lines + [f"warning: {line}" for line in _raw_pixels(config) if changed]


def window_warnings(config: Config) -> list[str]:
    """A line for each option of windows that few images or none go by."""
    default = EvalConfig()
    return [
        f"eval.{key}: with eval.mode whole, only images that are too large as a whole are cut into "
        "windows; eval.mode=slide cuts all"
        for key in ("crop_size", "overlap")
        if config.eval.mode == "whole" and getattr(config.eval, key) != getattr(default, key)
    ]


def config_warnings(config: Config) -> list[str]:
    """What is allowed, and probably not meant."""
    return [*_raw_pixels(config), *window_warnings(config)]


def _raw_pixels(config: Config) -> list[str]:
    """A line if pretrained weights get pixels of 0..255 as they are."""
    mean, std = config.data.mean, config.data.std
    if config.model.pretrained is None or max(std) > 1 or min(std) < 1 or max(map(abs, mean)) > 1:
        return []
    return [
        f"data.std: {list(std)} leaves pixels at 0..255, and the weights of model.pretrained "
        "expect about -2..2; leave data.mean and data.std out for the numbers of ImageNet"
    ]
