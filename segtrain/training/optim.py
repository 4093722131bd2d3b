"""What moves the weights: parameter groups, learning rate and exponential moving average."""

import copy

import torch
from torch import Tensor, nn

from segtrain.config import TrainConfig


def poly(step: int, total: int, power: float = 0.9) -> float:
    """Fraction of the base learning rate at `step`, in [0, 1].

    (1 - step / total) ** power, as in PSPNet (arXiv:1612.01105, section 5).

    Raises:
        ValueError: `step` outside [0, total].
    """
    if not 0 <= step <= total:
        raise ValueError(f"step {step} is outside [0, {total}]")
    return (1 - step / total) ** power


def base_lr(train: TrainConfig) -> float:
    """The backbone's learning rate after warmup, scaled with the batch size if the config says so.

    Linear scaling as in arXiv:1706.02677, section 2.1.
    """
    scale = 1.0 if train.lr_batch_size is None else train.batch_size / train.lr_batch_size
    return train.lr * scale


def learning_rate(train: TrainConfig, step: int) -> float:
    """The backbone's learning rate of update `step`, 0 .. steps - 1.

    Linear warmup from warmup_start times the rate, multiplied with poly from the first step on;
    min_lr is what poly ends with.
    """
    lr = base_lr(train)
    decayed = train.min_lr + (lr - train.min_lr) * poly(step, train.steps, train.poly_power)
    if step >= train.warmup_steps:
        return decayed
    done = step / train.warmup_steps
    return decayed * (train.warmup_start + (1 - train.warmup_start) * done)


def parameter_groups(model: nn.Module, train: TrainConfig) -> list[dict]:
    """The trainable parameters in at most four groups, each with `lr_mult` and `weight_decay`.

    Every parameter is in exactly one group, also one shared by two modules.
    """
    groups: dict[tuple[bool, bool], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Norm layers are recognized by their shape, whatever their class: a number a channel.
            norm_or_bias = parameter.dim() <= 1 or name.split(".")[-1] == "bias"
            key = (name.startswith("backbone."), norm_or_bias and not train.decay_norm_and_bias)
            groups.setdefault(key, []).append(parameter)
    result = []
    for (in_backbone, undecayed), parameters in groups.items():
        lr_mult = 1.0 if in_backbone else train.head_lr_mult
        decay = 0.0 if undecayed else train.weight_decay
        result.append({"params": parameters, "lr_mult": lr_mult, "weight_decay": decay})
    return result


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of the config; `set_learning_rate` gives it a rate before every step."""
    groups, lr = parameter_groups(model, train), base_lr(train)
    if train.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr, betas=train.betas)
    return torch.optim.SGD(groups, lr, momentum=train.momentum, nesterov=train.nesterov)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets every group's rate to `lr` times its multiplier."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]


class WeightAverage:
    """Exponential moving average of a model's parameters and running statistics.

    The decay is min(decay, (1 + t) / (10 + t)) at update t, so that the random weights of the start
    are forgotten (as tf.train.ExponentialMovingAverage does with num_updates). The statistics are
    averaged too: the newest ones belong to weights that the average has not reached yet.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Takes in the weights of `model` after update number `step`, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        # Not the state dict, which lists a tensor that two modules share twice.
        average = [*self.model.parameters(), *self.model.buffers()]
        newest = [*model.parameters(), *model.buffers()]
        pairs = list(zip(average, newest, strict=True))
        mine, theirs = zip(*(pair for pair in pairs if pair[0].is_floating_point()), strict=True)
        torch._foreach_lerp_(mine, theirs, 1 - decay)
        for counter, value in pairs:
            if not counter.is_floating_point():
                counter.copy_(value)  # num_batches_tracked
