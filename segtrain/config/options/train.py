"""Options of the optimization."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from segtrain.config.options.section import (
    Fraction,
    FractionBelow1,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    option,
)


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
