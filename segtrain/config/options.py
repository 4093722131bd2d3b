"""The experiment: every option with its type, range, default and meaning.

The defaults are the common recipe of the field (PSPNet, arXiv:1612.01105, section 5); an experiment
file says only what differs. Nothing here imports torch: a wrong file is refused at once.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

# torch counts in 64 bits.
Positive = Annotated[int, Field(gt=0, lt=2**63)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelow1 = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
# Beyond these the arithmetic of sizes overflows, long after the memory of any machine.
Pixels = Annotated[int, Field(gt=0, le=100_000)]
Scale = Annotated[float, Field(gt=0, le=100)]
Size = tuple[Pixels, Pixels]
Positives = Annotated[tuple[Positive, ...], Field(min_length=1)]


class Section(BaseModel):
    """Unknown keys, wrong types, infinities and later changes are all refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def without_effect(self, *rules: tuple[str, bool, str]) -> Iterator[tuple[str, str]]:
        """(key, reason) of each option that has no effect although it differs from its default.

        rules: keys, separated by blanks; whether they have an effect; the reason why not.
        """
        for keys, effective, reason in rules:
            for key in keys.split():
                if not effective and getattr(self, key) != type(self).model_fields[key].default:
                    yield key, reason

    @model_validator(mode="after")
    def _check(self) -> Self:
        if mistakes := list(self._mistakes()):
            raise ValueError("\n".join(mistakes))
        return self

    def _mistakes(self) -> Iterator[str]:
        """A line `key: message` for each option that does not fit the others."""
        yield from ()

    def _no_effect(self, *rules: tuple[str, bool, str]) -> Iterator[str]:
        """A mistake for each option without effect: ignored silently, it would change a recipe."""
        for key, reason in self.without_effect(*rules):
            yield f"{key}: has no effect with {reason}; remove it"


def option(default: Any, description: str, **limits: Any) -> Any:
    """An option of a section; `...` as default: it is required."""
    return Field(default, description=description, **limits)


class DataConfig(Section):
    """Where images and labels lie and how they are read."""

    layout: Literal["cityscapes", "camvid", "voc", "ade20k", "folders", "list"] = option(
        ..., "directory layout of the data set"
    )
    root: str = option(..., "data set directory", min_length=1)
    classes: str = option(
        ...,
        "class file: a name from data/classes (cityscapes, camvid, ...) or a YAML path",
        min_length=1,
    )
    train_split: str = option("train", "split to train on; a file for layout 'list'")
    eval_split: str = option("val", "split to evaluate on; a file for layout 'list'")
    images_dir: str = option("images", "layout 'folders': images/<split>/**")
    labels_dir: str = option("labels", "layout 'folders': labels/<split>/**.png")
    label_format: Literal["ids", "colors"] = option(
        "ids", "labels hold raw class ids (grey or palette PNG) or the class colours (RGB)"
    )
    short_side_px: Pixels | None = option(
        None, "image size that scale_range refers to, by its short side; null: as stored"
    )
    mean: tuple[float, float, float] = option(
        (123.675, 116.28, 103.53), "RGB mean subtracted, in units of 0..255"
    )
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = option(
        (58.395, 57.12, 57.375), "RGB standard deviation divided by, in units of 0..255"
    )
    num_workers: NonNegative | None = option(
        None, "loader processes a rank; null: the cores divided by the ranks, at most 8"
    )
    prefetch: Positive = option(4, "batches each loader worker prepares ahead")


class ExtraTransform(Section):
    """One further albumentations transform, by class name, that changes pixels but not geometry."""

    name: str = option(..., "class name in albumentations", pattern=r"^[A-Z][A-Za-z0-9]*$")
    args: dict[str, Any] = Field(default_factory=dict, description="its keyword arguments")


class AugmentConfig(Section):
    """Random changes of the training images, in the order they happen: geometry, then the crop."""

    crop_size: Size = option((512, 512), "height and width of a training crop")
    scale_range: tuple[Scale, Scale] = option(
        (0.5, 2.0), "uniform random scale of the image; [1, 1]: none"
    )
    rotate_deg: Annotated[float, Field(ge=0, le=180)] = option(
        0.0, "rotation uniform in [-x, x] degrees; semseg uses 10"
    )
    rotate_prob: Fraction = option(0.5, "probability of a rotation")
    flip_prob: Fraction = option(0.5, "probability of a horizontal flip")
    max_class_share: Annotated[float, Field(gt=0, le=1)] = option(
        1.0, "draw the crop again while one class covers more; mmsegmentation uses 0.75"
    )
    blur_prob: Fraction = option(0.0, "probability of a 5x5 Gaussian blur")
    color_prob: Fraction = option(
        0.0,
        "probability of each change of colour: brightness, contrast, saturation, hue; "
        "mmsegmentation uses 0.5",
    )
    brightness: Fraction = option(0.125, "largest change of brightness, as a share of 255")
    contrast: Fraction = option(0.5, "contrast factor drawn from [1 - x, 1 + x]")
    saturation: Fraction = option(0.5, "saturation factor drawn from [1 - x, 1 + x]")
    hue: Annotated[float, Field(ge=0, le=0.5)] = option(
        0.1, "largest rotation of the hue, as a share of the circle"
    )
    extra: tuple[ExtraTransform, ...] = option(
        (), "further albumentations transforms, applied to the crop last"
    )

    def _mistakes(self) -> Iterator[str]:
        low, high = self.scale_range
        if low > high:
            yield f"scale_range: the first number, {low}, is larger than {high}"


Backbone = Literal[
    "resnet18", "resnet34", "resnet50", "resnet101", "mobilenet_v2", "mobilenet_v3_large"
]


class ModelConfig(Section):
    """The network."""

    arch: Literal["pspnet", "deeplabv3", "deeplabv3plus"] = option(
        "pspnet", "pyramid pooling, ASPP, or ASPP with a decoder"
    )
    backbone: Backbone = option("resnet50", "feature extractor, as in torchvision")
    pretrained: str | None = option(
        None,
        "torchvision weights by name (IMAGENET1K_V1, DEFAULT), a file in torchvision's "
        "layout, or null: random weights",
    )
    output_stride: Literal[8, 16, 32] = option(8, "input pixels per feature pixel")
    stem: Literal["7x7", "64-64-128", "32-32-64"] = option(
        "7x7", "ResNet stem: torchvision's, semseg's or mmsegmentation's (ResNetV1c)"
    )
    contract_dilation: bool = option(
        True,
        "the first block of a dilated stage keeps the dilation of the stage before it "
        "(torchvision, mmsegmentation); false: all blocks of a stage alike (semseg)",
    )
    multi_grid: Positives | None = option(
        None, "dilation multipliers of the last stage's blocks, such as [1, 2, 4]"
    )
    align_corners: bool = option(False, "how logits are resized; semseg uses true")
    head_channels: Positive | None = option(
        None, "width of the head; null: 512 for PSPNet, 256 for DeepLab"
    )
    ppm_bins: Positives = option((1, 2, 3, 6), "pyramid pooling grid sizes")
    aspp_rates: Positives | None = option(
        None, "ASPP dilations; null: [12, 24, 36] at stride 8, [6, 12, 18] at 16, [3, 6, 9] at 32"
    )
    separable: bool = option(False, "depthwise separable 3x3 convolutions in DeepLab's head")
    low_level_channels: Positive = option(
        48, "DeepLabV3+: width of the projected low-level features"
    )
    aux_head: bool = option(True, "auxiliary classifier, used in training only")
    aux_channels: Positive = option(256, "width of the auxiliary head")
    recompute_norm: bool = option(
        False,
        "memory for time: batch norm, ReLU and the convolution after them keep one "
        "tensor for the backward pass instead of two, and compute the other again",
    )
    dropout: FractionBelow1 = option(0.1, "channel dropout before each classifier")

    def _mistakes(self) -> Iterator[str]:
        resnet, deeplab = self.backbone.startswith("resnet"), self.arch.startswith("deeplab")
        backbone, arch = f"backbone {self.backbone}", f"arch {self.arch}"
        yield from self._no_effect(
            ("stem multi_grid recompute_norm", resnet, backbone),
            ("contract_dilation", self.output_stride < 32, "output_stride 32"),
            ("ppm_bins", self.arch == "pspnet", arch),
            ("aspp_rates separable", deeplab, arch),
            ("low_level_channels", self.arch == "deeplabv3plus", arch),
            ("aux_channels", self.aux_head, "aux_head false"),
        )
        blocks = 2 if self.backbone == "resnet18" else 3
        if resnet and self.multi_grid is not None and len(self.multi_grid) != blocks:
            yield (
                f"multi_grid: expected {blocks} numbers, one for each block of the last stage of "
                f"{backbone}, got {list(self.multi_grid)}"
            )


class NormConfig(Section):
    """Normalization: whose pixels make the statistics, and which ones are kept for evaluation."""

    kind: Literal["sync", "local", "frozen", "group"] = option(
        "sync",
        "sync: batch norm over all ranks together, exactly; local: every rank its own "
        "images; frozen: the running statistics of the weights training starts from, as constants; "
        "group: GroupNorm, which knows no batch",
    )
    extent: Literal["world", "node"] | Positive = option(
        "world",
        "sync: the ranks that share statistics: all, those of one machine, or groups of this many",
    )
    running: Literal["rank0", "mean", "pooled"] = option(
        "pooled",
        "running statistics where not all ranks share theirs: of rank 0; the mean of "
        "means and variances; or mean and variance of all values together",
    )
    precise_batches: Positive | None = option(
        None,
        "before an evaluation, take the running statistics anew from this many "
        "training batches, with the weights standing still",
    )
    num_groups: Positive = option(
        32, "group: at most this many groups; the largest common divisor with the width"
    )
    momentum: Annotated[float, Field(gt=0, le=1)] | None = option(
        0.1, "share of the new batch in the running statistics; null: cumulative average"
    )
    eps: PositiveFloat = option(1e-5, "added to the variance")

    def _mistakes(self) -> Iterator[str]:
        kind = f"kind {self.kind}"
        parted = self.kind == "local" or (self.kind == "sync" and self.extent != "world")
        yield from self._no_effect(
            ("extent", self.kind == "sync", kind),
            ("running", parted, f"{kind} over {self.extent}"),
            ("precise_batches momentum", self.is_batch_norm, kind),
            ("num_groups", self.kind == "group", kind),
        )

    @property
    def is_batch_norm(self) -> bool:
        """Whether batches are normalized by their own statistics."""
        return self.kind in ("sync", "local")


def takes_class_weights(kind: str) -> bool:
    """Whether the loss `kind` uses loss.class_weights."""
    return kind != "dice"


class LossConfig(Section):
    """What is minimized, over the valid pixels of all ranks together."""

    kind: Literal["cross_entropy", "ohem", "dice"] = option(
        "cross_entropy",
        "ohem: cross entropy over the hardest pixels only; dice: soft Dice (V-Net), "
        "mean over the classes that the labels of a pass show",
    )
    aux_weight: NonNegativeFloat = option(0.4, "weight of the auxiliary head's loss")
    class_weights: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] | None = option(
        None, "one weight a class, in the order of the class file; null: all 1"
    )
    ohem_threshold: Fraction = option(
        0.7, "keep pixels whose probability of the true class is below this"
    )
    ohem_min_kept: Positive = option(
        100_000, "keep at least this many of the hardest pixels, counted over all ranks"
    )

    def _mistakes(self) -> Iterator[str]:
        yield from self._no_effect(
            ("class_weights", takes_class_weights(self.kind), f"kind {self.kind}")
        )
        if self.class_weights is not None and not any(self.class_weights):
            yield "class_weights: all weights are 0"


class TrainConfig(Section):
    """The optimization. A step is one update of the weights; sizes count over all ranks."""

    steps: Positive = option(40_000, "length of the training")
    batch_size: Positive = option(16, "images a step, over all ranks")
    accumulate_steps: Positive = option(
        1,
        "split each batch into this many passes; batch statistics are then those of "
        "one pass, so the result differs from a whole batch; virtual_ranks is exact",
    )
    virtual_ranks: Positive = option(
        1,
        "memory for time: this many virtual ranks take turns on each rank's images; what their "
        "backward passes need waits in host memory; the result is that of as many times the ranks",
    )
    shares: Positive | None = option(
        None,
        "cut each pass into this many parts, computed apart and added up in an order of their own, "
        "so that weights are equal bit for bit on any number of ranks up to this one; null: equal "
        "to rounding only",
    )
    precision: Literal["float32", "bfloat16", "float16", "float64"] = option(
        "float32", "bfloat16 and float16: automatic mixed precision"
    )
    compile: bool = option(
        False,
        "torch.compile the model with its loss, into one graph; the first step takes "
        "minutes, and a C++ compiler is needed",
    )
    channels_last: bool = option(True, "NHWC memory format for images and convolutions")
    init_from: str | None = option(
        None,
        "run or checkpoint whose weights training starts from; classifiers of another "
        "number of classes stay random",
    )
    optimizer: Literal["sgd", "adamw"] = option("sgd", "how gradients change weights")
    lr: PositiveFloat = option(0.01, "learning rate after warmup")
    lr_batch_size: Positive | None = option(
        None, "lr is meant for this batch size and scaled linearly to batch_size; null: as is"
    )
    head_lr_mult: PositiveFloat = option(1.0, "learning rate factor outside the backbone")
    momentum: FractionBelow1 = option(0.9, "SGD")
    nesterov: bool = option(False, "SGD: Nesterov's momentum")
    betas: tuple[FractionBelow1, FractionBelow1] = option(
        (0.9, 0.999), "AdamW: decay of the averages of gradient and squared gradient"
    )
    weight_decay: NonNegativeFloat = option(1e-4, "SGD: L2; AdamW: decoupled")
    decay_norm_and_bias: bool = option(True, "false: no weight decay on batch norm and biases")
    poly_power: NonNegativeFloat = option(0.9, "lr * (1 - step / steps) ** power; 0: constant")
    min_lr: NonNegativeFloat = option(0.0, "learning rate the schedule ends with")
    warmup_steps: NonNegative = option(0, "steps of linear warmup")
    warmup_start: Fraction = option(0.1, "share of the learning rate at the first step")
    clip_grad_norm: PositiveFloat | None = option(None, "largest norm of the gradient")
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = option(
        None, "keep an exponential moving average of the weights and evaluate it"
    )
    deterministic: bool = option(False, "refuse kernels whose result may vary")
    timeout_s: PositiveFloat = option(
        600.0, "how long a rank waits for the others before it gives up"
    )

    def _mistakes(self) -> Iterator[str]:
        batch, passes = self.batch_size, self.accumulate_steps
        if self.shares is not None:
            yield from self._share_mistakes(self.shares)
        if self.warmup_steps >= self.steps:
            yield f"warmup_steps: {self.warmup_steps} must be smaller than steps, {self.steps}"
        if passes > batch:
            yield f"accumulate_steps: {passes} must not be larger than batch_size, {batch}"
        if self.min_lr > self.lr:
            yield f"min_lr: {self.min_lr} must not be larger than lr, {self.lr}"
        if self.nesterov and self.momentum == 0:
            yield "nesterov: needs a momentum above 0"
        if self.compile and self.virtual_ranks > 1:
            yield (
                f"compile: cannot go with virtual_ranks, {self.virtual_ranks}: they wait for each "
                "other inside the model, and a compiled graph cannot; set virtual_ranks to 1 or "
                "compile to false"
            )

    def _share_mistakes(self, shares: int) -> Iterator[str]:
        smallest_pass = self.batch_size // self.accumulate_steps
        if smallest_pass < shares:
            yield (
                f"shares: {shares} shares of a pass of {smallest_pass} images "
                "(batch_size / accumulate_steps) would leave some empty; use fewer shares or a "
                "larger batch"
            )
        if self.virtual_ranks > 1:
            yield (
                f"shares: cannot go with virtual_ranks, {self.virtual_ranks}: both cut the batch, "
                "and virtual ranks would cut it differently on another number of ranks; set "
                "virtual_ranks to 1 or shares to null"
            )
        if self.compile:
            yield (
                "shares: cannot go with compile: shares wait for each other inside the model, and "
                "a compiled graph cannot; what is compiled may also add up in another order; set "
                "compile to false or shares to null"
            )


class EvalConfig(Section):
    """How an image is turned into a prediction, and when training does it."""

    every_steps: Positive | None = option(4000, "evaluate this often; null: at the end only")
    mode: Literal["whole", "slide"] = option(
        "whole", "the image at once, or windows of crop_size whose results are averaged"
    )
    crop_size: Size | None = option(None, "sliding window; null: the training crop")
    overlap: FractionBelow1 = option(1 / 3, "share of a window that its neighbour repeats")
    scales: tuple[Scale, ...] = option((1.0,), "image scales to average", min_length=1)
    flip: bool = option(False, "average with the mirrored image")


class LogConfig(Section):
    """What is written while training."""

    every_steps: Positive = option(20, "scalars this often")
    num_images: Positive = option(4, "pictures of image, label and prediction at an evaluation")
    weights_digest_every_steps: Positive = option(
        100, "with train.shares: receipts.jsonl has hashes of all weights this often"
    )


class CheckpointConfig(Section):
    """When the training state is saved. last.pt and best.pt are always kept."""

    every_steps: Positive = option(1000, "write last.pt this often")
    keep_every_steps: Positive | None = option(
        None, "also keep a checkpoint of its own this often; null: none"
    )
    keep_limit: Positive = option(5, "how many of those to keep")


class Config(Section):
    """One experiment."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = option(
        0, "decides weights, sample order, augmentation and dropout"
    )
    data: DataConfig
    augment: AugmentConfig = AugmentConfig()
    model: ModelConfig = ModelConfig()
    norm: NormConfig = NormConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def _mistakes(self) -> Iterator[str]:
        norm, train = self.norm, self.train
        if norm.is_batch_norm and train.batch_size // train.accumulate_steps == 1:
            yield (
                "train.batch_size: a pass of one image has one value a channel after global "
                "pooling, and batch norm needs two; use at least 2 images a pass "
                "(batch_size / accumulate_steps)"
            )
        if train.virtual_ranks > 1 and (norm.kind, norm.extent) != ("sync", "world"):
            yield (
                "train.virtual_ranks: need norm.kind sync over the world; with other statistics "
                "train.accumulate_steps is as good"
            )
        if train.shares is not None and norm.is_batch_norm:
            extent = "each rank alone" if norm.kind == "local" else f"extent {norm.extent}"
            if (norm.kind, norm.extent) != ("sync", "world"):
                yield (
                    f"train.shares: with batch norm over {extent} the result depends on the "
                    "number of ranks; use norm.kind sync over the world, or set train.shares to "
                    "null"
                )
        if self.model.recompute_norm and not norm.is_batch_norm:
            yield f"model.recompute_norm: has no effect with norm.kind {norm.kind}; remove it"
        if norm.kind == "frozen" and train.init_from is None:
            yield (
                "norm.kind: frozen statistics come with the weights that training starts from; "
                "name a run or checkpoint in train.init_from"
            )


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}

# What to write instead of keys of semseg, mmsegmentation, torchvision and others.
_FOREIGN_KEYS = {
    "the class file in data.classes decides it": "num_classes class_names ignore_index",
    "the length is train.steps; an epoch is images / train.batch_size steps": "epochs num_epochs",
    "did you mean train.steps?": "max_iters iters",
    "did you mean train.lr?": "learning_rate base_lr",
    "train.batch_size counts over all ranks": "batch_size_per_gpu samples_per_gpu",
    "did you mean data.num_workers?": "workers",
    "did you mean train.precision?": "amp fp16",
    "did you mean norm.kind?": "sync_bn",
    "the number of processes is an option of the command: --nproc": "gpus",
    "the run directory is an option of the command: --output": "output_dir work_dir",
    "resuming is an option of the command: --resume": "resume",
    "did you mean model.backbone?": "layers encoder",
    "there is no inheritance; a file says what differs from the defaults": "_base_ defaults",
}
FOREIGN_KEYS = {key: text for text, keys in _FOREIGN_KEYS.items() for key in keys.split()}


def config_schema() -> dict[str, Any]:
    """JSON Schema of an experiment file, for completion and checks in editors."""
    schema = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
