"""Options of the optimizer and of the learning rate's schedule."""

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
        None, "learning rate factor, instead of 1 or optim.head_lr_mult"
    )
    weight_decay: NonNegativeFloat | None = option(
        None, "instead of optim.weight_decay and optim.new_weight_decay"
    )
    decay_toward: Literal["zero", "start"] | None = option(None, "instead of optim.decay_toward")
    hold_zeros: bool = option(
        False, "kernel elements that are 0 when training starts stay 0: pruned weights"
    )

    def _mistakes(self) -> Iterator[str]:
        if self.model_dump(exclude_defaults=True).keys() == {"names"}:
            settings = ", ".join(key for key in type(self).model_fields if key != "names")
            yield f"names: nothing is said about these weights; set one of {settings}"


class OptimConfig(Section):
    """How gradients change the weights."""

    kind: Literal["sgd", "adamw"] = option("sgd", "how gradients change weights")
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
    large_batch: bool = option(
        False,
        "the rules for large batches of arXiv:1706.02677: sets lr_batch_size, warmup_steps, "
        "warmup_start, decay_norm_and_bias, momentum_correction and model.zero_init_residual, "
        "where you do not",
    )

    def _mistakes(self) -> Iterator[str]:
        rates = (self.weight_decay, self.new_weight_decay, *(r.weight_decay for r in self.layers))
        keys = "decoupled_decay decay_norm_and_bias decay_toward"
        yield from self._no_effect(keys, any(rates) or self.large_batch, "weight_decay 0")
        if self.nesterov and self.momentum == 0:
            yield "nesterov: needs a momentum above 0"
        if self.large_batch and self.lr_batch_size is None:
            yield (
                "lr_batch_size: large_batch scales lr with the batch; say which batch size your "
                "lr is meant for"
            )


class ScheduleConfig(Section):
    """The learning rate over the steps."""

    kind: Literal["poly", "cosine", "step", "one_cycle"] = option(
        "poly", "how the learning rate goes on after warmup, over the steps"
    )
    poly_power: NonNegativeFloat = option(0.9, "lr * (1 - step / steps) ** power; 0: constant")
    min_lr: NonNegativeFloat = option(0.0, "learning rate that poly and cosine end with")
    milestones: Positives | None = option(
        None, "kind step: the steps after which the rate is multiplied by milestone_factor"
    )
    milestone_factor: PositiveFloat = option(0.1, "kind step: factor at each milestone")
    cycle_rise: Annotated[float, Field(gt=0, lt=1)] = option(
        0.3, "one_cycle: share of the steps in which the rate rises (torch: pct_start)"
    )
    warmup_steps: NonNegative = option(0, "steps of linear warmup")
    warmup_start: Fraction = option(0.1, "share of the learning rate at the first step")
    after_warmup: bool = option(
        False,
        "poly and cosine begin when warmup ends (mmsegmentation, torchvision); false: with the "
        "first step (detectron2)",
    )

    def _mistakes(self) -> Iterator[str]:
        marks = self.milestones
        if self.kind == "step" and marks is None:
            yield "milestones: kind step needs them, such as [60000, 75000]"
        if marks is not None and list(marks) != sorted(set(marks)):
            yield f"milestones: {list(marks)} must rise"


# PSPNet's learning rate of 0.01, the default, is meant for 16 images (arXiv:1612.01105, section 5).
_USUAL_BATCH_SIZE = 16


def with_large_batch(data: dict[str, Any]) -> dict[str, Any]:
    """An experiment, as written, with what optim.large_batch sets where it says nothing.

    Values may still be of any type: the options are checked later.
    """
    names = ("optim", "schedule", "train", "model")
    sections = [data.get(name, {}) for name in names]
    if not all(isinstance(section, dict) for section in sections):
        return data  # which is refused
    optim, schedule, train, model = sections
    if optim.get("large_batch") is not True:
        return data
    found: dict[str, Any] = {"decay_norm_and_bias": False, "momentum_correction": True}
    if "lr" not in optim:
        found["lr_batch_size"] = _USUAL_BATCH_SIZE
    warmup: dict[str, Any] = {}
    steps, size = train.get("steps", 40_000), train.get("batch_size", _USUAL_BATCH_SIZE)
    if type(steps) is int and schedule.get("kind") != "one_cycle":  # which is refused beside it
        warmup["warmup_steps"] = max(1, round(steps * 5 / 90))  # 5 epochs of 90, as in section 2.2
    reference = (found | optim).get("lr_batch_size")
    if type(size) is int and type(reference) is int and reference > 0 and size > 0:
        warmup["warmup_start"] = min(1.0, reference / size)
    data = {**data, "optim": found | optim, "schedule": warmup | schedule}
    if _starts_random_resnet(model, train):
        data["model"] = {"zero_init_residual": True, **model}
    return data


def _starts_random_resnet(model: dict[str, Any], train: dict[str, Any]) -> bool:
    random = model.get("pretrained") is None and train.get("init_from") is None
    return random and str(model.get("backbone", "resnet")).startswith("resnet")
