"""Options of the optimizer and of the learning rate's schedule."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from segtrain.config.messages import show
from segtrain.config.plugin_names import PluginName, PluginOptions
from segtrain.config.section import (
    Fraction,
    FractionBelow1,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    option,
)

Name = Annotated[str, Field(min_length=1)]

# The share of the steps in which the rate of one_cycle rises: pct_start of torch's OneCycleLR.
CYCLE_RISE = 0.3

_SLICE = re.compile(r"([\w.]+)\[([^\[\]]+)\]", re.ASCII)
_INDEX = re.compile(r"(-?\d{1,9})|(-?\d{1,9})?:(-?\d{1,9})?(?::([1-9]\d{0,8}))?", re.ASCII)


def parse_slice(text: str) -> tuple[str, tuple[int | slice, ...]] | None:
    """The name of a weight and the index in `NAME[:, 2:4, -1]`; None: it has another form."""
    whole = _SLICE.fullmatch(text)
    parts = [_INDEX.fullmatch(index.strip()) for index in whole[2].split(",")] if whole else []
    if whole is None or None in parts:
        return None
    numbers = [[None if x is None else int(x) for x in part.groups()] for part in parts]
    return whole[1], tuple(slice(*rest) if index is None else index for index, *rest in numbers)


class LayerRule(Section):
    """What holds for chosen weights; where two rules set the same, the later one counts."""

    names: tuple[Name, ...] = option(
        (),
        "weights or modules by name, such as backbone.layer1 or '*.bn1'; * fits anything; not "
        "needed for zero",
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
        None,
        "instead of optim.weight_decay and optim.new_weight_decay; norm layers and biases follow "
        "decay_norm_and_bias still",
    )
    decay_toward: Literal["zero", "start"] | None = option(None, "instead of optim.decay_toward")
    keep_zeros: bool | None = option(
        None,
        "true: elements of these kernels that are 0 when training starts stay 0 (pruning); those "
        "of norm layers and biases, which often start at 0, move",
    )
    zero: tuple[Name, ...] = option(
        (),
        "slices of weights to set to 0 when training starts and to keep there, such as "
        "'backbone.layer1.0.conv2.weight[:, 29]'",
    )

    @property
    def prunes(self) -> bool:
        """Whether it says something about weights that stay 0."""
        return self.keep_zeros is not None or bool(self.zero)

    def _mistakes(self) -> Iterator[str]:
        said = self.model_dump(exclude_defaults=True).keys() - {"zero"}
        if said == {"names"} or not (said or self.zero):
            settings = ", ".join(key for key in type(self).model_fields if key != "names")
            yield f"names: nothing is said about these weights; set one of {settings}"
        elif said and not self.names:
            yield f"names: expected the weights that {', '.join(sorted(said))} is for"
        for text in self.zero:
            if parse_slice(text) is None:
                yield (
                    f"zero: {show(text)}: expected the name of a weight and a slice of it, such as "
                    "'backbone.layer1.0.conv2.weight[:, 29]'"
                )


class OptimConfig(Section):
    """How gradients change the weights."""

    kind: Annotated[Literal["sgd", "adamw", "muon"], PluginName("optimizer")] = option(
        "sgd",
        "how gradients change weights; muon: Muon for kernels of convolutions and of linear "
        "layers, but those that give the classes, AdamW for the rest; lr as for AdamW; or a "
        "plugin's",
    )
    options: Annotated[Any, PluginOptions("optimizer", "kind")] = option(
        None, "options of a plugin's kind", validate_default=True
    )
    lr: PositiveFloat = option(0.01, "learning rate after warmup")
    lr_batch_size: Positive | None = option(
        None, "lr is meant for this batch size and scaled linearly to batch_size; null: as is"
    )
    head_lr_mult: PositiveFloat = option(1.0, "learning rate factor outside the backbone")
    momentum: FractionBelow1 = option(0.9, "SGD")
    weight_decay: NonNegativeFloat = option(
        1e-4,
        "SGD: L2, decay * weight joins the gradient; AdamW and Muon: decoupled, lr * decay * "
        "weight is taken away",
    )
    decay_norm_and_bias: bool = option(
        True, "false: weight decay on the kernels of layers only, none on batch norm and biases"
    )
    decay_toward: Literal["zero", "start"] = option(
        "zero",
        "start: L2-SP, loaded weights decay toward the values that training starts from, others "
        "toward 0 (arXiv:1802.01483)",
    )
    new_weight_decay: NonNegativeFloat | None = option(
        None,
        "weight decay of layers that start from random numbers, also where only the rows of new "
        "classes in a classifier do; null: weight_decay",
    )
    layers: tuple[LayerRule, ...] = option(
        (),
        "rules for chosen weights: freeze, lr_mult, weight_decay, decay_toward, keep_zeros, zero",
    )
    clip_grad_norm: PositiveFloat | None = option(None, "largest norm of the gradient")
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = option(
        None, "keep an exponential moving average of the weights and evaluate it"
    )

    @property
    def prunes(self) -> bool:
        """Whether weights stay 0."""
        return any(rule.prunes for rule in self.layers)

    def _mistakes(self) -> Iterator[str]:
        rates = (self.weight_decay, self.new_weight_decay, *(r.weight_decay for r in self.layers))
        keys = "decay_norm_and_bias decay_toward"
        yield from self._no_effect(keys, any(rates), "weight_decay 0")


class ScheduleConfig(Section):
    """The learning rate over the steps."""

    kind: Literal["poly", "cosine", "one_cycle", "constant"] = option(
        "poly",
        "how the learning rate goes on after warmup; poly and cosine count from the first step, as "
        "detectron2's do; one_cycle rises in 0.3 of the steps, as torch's OneCycleLR",
    )
    poly_power: NonNegativeFloat = option(0.9, "lr * (1 - step / steps) ** power; 0: constant")
    min_lr: NonNegativeFloat = option(
        0.0, "learning rate that poly, cosine and finish_from end with"
    )
    warmup_steps: NonNegative = option(0, "steps of linear warmup")
    warmup_start: Fraction = option(0.1, "share of the learning rate at the first step")
    finish_from: Positive | None = option(
        None,
        "constant: after this step the rate falls, as 1 - sqrt(t), to the end of train.steps "
        "(arXiv:2405.18392); segtrain train --finish sets it; null: never",
    )

    def _mistakes(self) -> Iterator[str]:
        if self.finish_from is not None and self.finish_from < self.warmup_steps:
            yield (
                f"finish_from: {self.finish_from} must not be smaller than warmup_steps, "
                f"{self.warmup_steps}"
            )
        yield from self._no_effect("min_lr", self.poly_power > 0, "poly_power 0")
