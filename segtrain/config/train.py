"""Options of the optimization."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from segtrain.config.section import (
    Fraction,
    FractionBelow1,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Positives,
    Section,
    option,
)

Name = Annotated[str, Field(min_length=1)]


class LayerRule(Section):
    """What holds for chosen weights; where two rules set the same, the later one counts."""

    names: Annotated[tuple[Name, ...], Field(min_length=1)] = option(
        ..., "weights or modules by name, such as backbone.layer1 or '*.bn1'; * fits anything"
    )
    freeze: bool | None = option(
        None,
        "true: these weights stay as they are; a batch norm that is frozen altogether "
        "normalizes by its running statistics, which stay too",
    )
    lr_mult: PositiveFloat | None = option(
        None, "learning rate factor, instead of 1 or train.head_lr_mult"
    )
    weight_decay: NonNegativeFloat | None = option(
        None, "instead of train.weight_decay and train.new_weight_decay"
    )
    decay_toward: Literal["zero", "start"] | None = option(None, "instead of train.decay_toward")
    hold_zeros: bool = option(
        False, "kernel elements that are 0 when training starts stay 0: pruned weights"
    )

    def _mistakes(self) -> Iterator[str]:
        if self.model_dump(exclude_defaults=True).keys() == {"names"}:
            settings = ", ".join(key for key in type(self).model_fields if key != "names")
            yield f"names: nothing is said about these weights; set one of {settings}"


# PSPNet's learning rate of 0.01, the default, is meant for 16 images (arXiv:1612.01105, section 5).
_USUAL_BATCH_SIZE = 16


def with_large_batch(data: dict[str, Any]) -> dict[str, Any]:
    """An experiment, as written, with what train.large_batch sets where it says nothing.

    Values may still be of any type: the options are checked later.
    """
    train, model = data.get("train"), data.get("model", {})
    if not (isinstance(train, dict) and train.get("large_batch") is True):
        return data
    found: dict[str, Any] = {"decay_norm_and_bias": False, "momentum_correction": True}
    if "lr" not in train:
        found["lr_batch_size"] = _USUAL_BATCH_SIZE
    steps, size = train.get("steps", 40_000), train.get("batch_size", _USUAL_BATCH_SIZE)
    if type(steps) is int and train.get("schedule") != "one_cycle":  # which is refused beside it
        found["warmup_steps"] = max(1, round(steps * 5 / 90))  # 5 epochs of 90, as in section 2.2
    reference = (found | train).get("lr_batch_size")
    if type(size) is int and type(reference) is int and reference > 0 and size > 0:
        found["warmup_start"] = min(1.0, reference / size)
    data = {**data, "train": found | train}
    if isinstance(model, dict) and _starts_random_resnet(model, train):
        data["model"] = {"zero_init_residual": True, **model}
    return data


def _starts_random_resnet(model: dict[str, Any], train: dict[str, Any]) -> bool:
    random = model.get("pretrained") is None and train.get("init_from") is None
    return random and str(model.get("backbone", "resnet")).startswith("resnet")


class TrainConfig(Section):
    """The optimization. A step is one update of the weights; sizes count over all ranks."""

    steps: Positive = option(40_000, "length of the training")
    batch_size: Positive = option(16, "images a step, over all ranks")
    accumulate_steps: Positive = option(
        1,
        "split each batch into this many microbatches; batch statistics are then those of one "
        "microbatch, so the result differs from a whole batch; virtual_ranks is exact",
    )
    virtual_ranks: Positive = option(
        1,
        "GPU memory for time: this many virtual ranks take turns on each rank's images; what their "
        "backward passes need waits in host memory, so that a CPU saves nothing; the result is "
        "that of as many times the ranks",
    )
    shares: Positive | None = option(
        None,
        "cut each microbatch into this many parts, computed apart and summed in a fixed order: "
        "equal bits on any number of ranks up to this one; null: equal to rounding only",
    )
    parallel: Literal["sync", "hogwild"] = option(
        "sync",
        "hogwild: CPU processes change the same weights without waiting for each other; the "
        "result depends on their number and on chance",
    )
    precision: Literal["float32", "tf32", "bfloat16", "float16", "float64"] = option(
        "float32",
        "bfloat16 and float16: automatic mixed precision; tf32: float32, but CUDA rounds the "
        "factors in convolutions and matrix products to TF32, of 11 bits, as torch itself does in "
        "convolutions",
    )
    compile: bool = option(
        False,
        "torch.compile the model with its loss, into one graph; the first step takes "
        "minutes, and a C++ compiler is needed",
    )
    channels_last: bool = option(True, "NHWC memory format for images and convolutions")
    init_from: str | None = option(
        None,
        "run or checkpoint whose weights training starts from, instead of model.pretrained; "
        "classifiers of another number of classes stay random",
    )
    optimizer: Literal["sgd", "adamw"] = option("sgd", "how gradients change weights")
    lr: PositiveFloat = option(0.01, "learning rate after warmup")
    lr_batch_size: Positive | None = option(
        None, "lr is meant for this batch size and scaled linearly to batch_size; null: as is"
    )
    head_lr_mult: PositiveFloat = option(1.0, "learning rate factor outside the backbone")
    momentum: FractionBelow1 = option(0.9, "SGD")
    nesterov: bool = option(False, "SGD: Nesterov's momentum")
    momentum_correction: bool = option(
        True,
        "SGD: momentum adds up gradients and a new rate acts on all of them, which is the momentum "
        "correction of arXiv:1706.02677, section 3; false: each keeps the rate of its step, as in "
        "Caffe",
    )
    betas: tuple[FractionBelow1, FractionBelow1] = option(
        (0.9, 0.999), "AdamW: decay of the averages of gradient and squared gradient"
    )
    weight_decay: NonNegativeFloat = option(
        1e-4,
        "SGD: L2, decay * weight joins the gradient; AdamW: decoupled, lr * decay * weight is "
        "taken away",
    )
    decoupled_decay: bool = option(
        False,
        "decay * lr / (lr after warmup) * weight is taken away in each step, by SGD and AdamW "
        "(arXiv:1711.05101; MosaicML's DecoupledSGDW and DecoupledAdamW)",
    )
    decay_norm_and_bias: bool = option(
        True, "false: weight decay on convolution weights only, none on batch norm and biases"
    )
    decay_toward: Literal["zero", "start"] = option(
        "zero",
        "start: L2-SP, loaded weights decay toward the values that training starts from, others "
        "toward 0 (arXiv:1802.01483)",
    )
    new_weight_decay: NonNegativeFloat | None = option(
        None, "weight decay of layers that start from random numbers; null: weight_decay"
    )
    schedule: Literal["poly", "cosine", "step", "one_cycle"] = option(
        "poly", "how the learning rate goes on after warmup, over the steps"
    )
    poly_power: NonNegativeFloat = option(0.9, "lr * (1 - step / steps) ** power; 0: constant")
    min_lr: NonNegativeFloat = option(0.0, "learning rate that poly and cosine end with")
    milestones: Positives | None = option(
        None, "schedule step: the steps after which the rate is multiplied by milestone_factor"
    )
    milestone_factor: PositiveFloat = option(0.1, "schedule step: factor at each milestone")
    cycle_rise: Annotated[float, Field(gt=0, lt=1)] = option(
        0.3, "one_cycle: share of the steps in which the rate rises (torch: pct_start)"
    )
    warmup_steps: NonNegative = option(0, "steps of linear warmup")
    warmup_start: Fraction = option(0.1, "share of the learning rate at the first step")
    schedule_after_warmup: bool = option(
        False,
        "poly and cosine begin when warmup ends (mmsegmentation, torchvision); false: with the "
        "first step (detectron2)",
    )
    large_batch: bool = option(
        False,
        "the rules for large batches of arXiv:1706.02677: sets lr_batch_size, warmup_steps, "
        "warmup_start, decay_norm_and_bias, momentum_correction and model.zero_init_residual, "
        "where you do not",
    )
    layers: tuple[LayerRule, ...] = option(
        (), "rules for chosen weights: freeze, lr_mult, weight_decay, decay_toward, hold_zeros"
    )
    hold_mask: str | None = option(
        None,
        "a .safetensors file with a bool tensor for each of some weights; where true, the weight "
        "keeps the value it starts with",
    )
    clip_grad_norm: PositiveFloat | None = option(None, "largest norm of the gradient")
    sam_rho: PositiveFloat | None = option(
        None,
        "sharpness aware minimization: the gradient is taken this far uphill, as a distance "
        "between all weights; null: off",
    )
    sam_every: Positive = option(1, "2: SAM in every second step; such a step takes twice as long")
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = option(
        None, "keep an exponential moving average of the weights and evaluate it"
    )
    max_hours: PositiveFloat | None = option(
        None,
        "end after so many hours of training, over all resumptions; the learning rate does not "
        "follow: it is that of steps; null: no limit",
    )
    patience: Positive | None = option(
        None, "end after so many evaluations in a row without a better mIoU; null: never"
    )
    deterministic: bool = option(
        False,
        "kernels that compute the same bits in every run, and an error where torch has none; on "
        "CUDA without it runs differ in the last bits, on CPUs they do not; slower",
    )
    timeout_s: PositiveFloat = option(
        600.0, "how long a rank waits for the others before it gives up"
    )

    def _mistakes(self) -> Iterator[str]:
        steps, batch, images = self.steps, self.batch_size, self.batch_size // self.accumulate_steps
        rates = (self.weight_decay, self.new_weight_decay, *(r.weight_decay for r in self.layers))
        keys = "decoupled_decay decay_norm_and_bias decay_toward"
        yield from self._no_effect((keys, any(rates) or self.large_batch, "weight_decay 0"))
        if self.warmup_steps >= steps:
            yield f"warmup_steps: {self.warmup_steps} must be smaller than steps, {steps}"
        if self.sam_rho is not None and self.sam_every > steps:
            yield f"sam_every: {self.sam_every} must not be larger than steps, {steps}"
        if images == 0:
            yield (
                f"accumulate_steps: {self.accumulate_steps} must not be larger than batch_size, "
                f"{batch}"
            )
        if self.shares is not None and images < self.shares:
            yield (
                f"shares: {self.shares} shares of a microbatch of {images} images "
                "(batch_size / accumulate_steps) would leave some empty; use fewer shares or a "
                "larger batch"
            )
        scaled = self.lr if self.lr_batch_size is None else self.lr * batch / self.lr_batch_size
        if self.min_lr > scaled:
            words = "" if scaled == self.lr else " as scaled to batch_size"
            yield f"min_lr: {self.min_lr} must not be larger than lr{words}, {scaled:g}"
        if self.nesterov and self.momentum == 0:
            yield "nesterov: needs a momentum above 0"
        marks = self.milestones
        if self.schedule == "step" and marks is None:
            yield "milestones: schedule step needs them, such as [60000, 75000]"
        if marks is not None and (list(marks) != sorted(set(marks)) or marks[-1] >= steps):
            yield f"milestones: {list(marks)} must rise and end before the last step, {steps}"
        if self.schedule == "one_cycle" and self.cycle_rise * steps <= 1:
            yield f"cycle_rise: {self.cycle_rise} of {steps} steps is not more than one step"
        if self.large_batch and self.lr_batch_size is None:
            yield (
                "lr_batch_size: large_batch scales lr with the batch; say which batch size your "
                "lr is meant for"
            )
        if self.large_batch and self.warmup_steps == 0 and self.schedule != "one_cycle":
            yield "warmup_steps: 0 contradicts large_batch, which warms up; remove one of them"
