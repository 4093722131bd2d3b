"""The optimizer of the config: torch's, and what torch's does not do as hooks around its step.

Hooks run with the step: where a float16 step overflows and is left out, they are left out too. Only
torch's fused kernels, which CUDA has, are called in such a step all the same, and change nothing;
so they are not used with hooks that change weights or velocities by themselves.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from segtrain.config import Config
from segtrain.training.optim.layers import InitialWeights, parameter_groups
from segtrain.training.optim.muon import Muon
from segtrain.training.optim.schedule import base_lr


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
        counters = [pair for pair in pairs if not pair[0].is_floating_point()]
        if counters:  # num_batches_tracked
            torch._foreach_copy_(*zip(*counters, strict=True))


def build_optimizer(
    model: nn.Module, config: Config, *, start: InitialWeights | None = None
) -> torch.optim.Optimizer:
    """The optimizer of the config; `set_learning_rate` gives it a rate before every step.

    start: from `make_initial_weights`; None: decay pulls toward 0, and no weight is held there.
    """
    optim, lr = config.optim, base_lr(config)
    groups = parameter_groups(model, optim, None if start is None else start.loaded)
    fused = _may_be_fused(model, config, groups) or None  # None: as torch chooses
    if optim.kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr, betas=optim.betas, fused=fused)
    elif optim.kind == "muon":
        optimizer = Muon(groups, lr, betas=optim.betas)
    else:
        options = {"momentum": optim.momentum, "nesterov": optim.nesterov, "fused": fused}
        optimizer = torch.optim.SGD(groups, lr, **options)
        if fused:
            optimizer.register_step_pre_hook(_make_velocities)
    if any(group["pull"] for group in groups):
        points = {} if start is None else start.points(model)
        optimizer.register_step_pre_hook(partial(_pull, config, points))
    if start is not None and optim.prunes:
        optimizer.register_step_post_hook(lambda *_: start.hold_weights(model))
    return optimizer


def _may_be_fused(model: nn.Module, config: Config, groups: list[dict[str, Any]]) -> bool:
    """Whether one kernel may do the whole step; on CPUs other kernels stay, and their bits."""
    if next(model.parameters()).device.type != "cuda":
        return False
    return config.train.precision != "float16" or not any(group["pull"] for group in groups)


@torch.no_grad()
def _make_velocities(optimizer: torch.optim.SGD, *_: Any) -> None:
    """Gives weights without a velocity one of 0.

    The fused kernel makes them itself, all or none, from memory that it does not fill if the first
    step overflows.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None:
                state = optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets every group's rate to `lr` times its multiplier."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]


@torch.no_grad()
def _pull(
    config: Config, points: dict[nn.Parameter, Tensor], optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    """The decay that torch's `weight_decay` cannot do; s is 0 or the starting weight.

        SGD:                    gradient += decay * (w - s)            L2, L2-SP (arXiv:1802.01483)
        AdamW, Muon:            w -= decay * lr * (w - s)              arXiv:1711.05101
        optim.decoupled_decay:  w -= decay * lr / base_lr * (w - s)    arXiv:1711.05101, as composer

    base_lr is the rate after warmup, so the last form follows the schedule and not the rate.
    """
    optim = config.optim
    for group in optimizer.param_groups:
        rate = group["pull"]
        weights = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not rate or not weights:
            continue
        targets = [points[weight] for weight in weights] if group["toward_start"] else None
        if optim.kind == "sgd" and not optim.decoupled_decay:
            away = weights if targets is None else torch._foreach_sub(weights, targets)
            torch._foreach_add_([weight.grad for weight in weights], away, alpha=rate)
            continue
        lr = group["lr"]
        if optim.decoupled_decay:
            lr /= group["lr_mult"] * base_lr(config)
        if targets is None:
            torch._foreach_mul_(weights, 1 - rate * lr)
        else:
            torch._foreach_lerp_(weights, targets, rate * lr)
