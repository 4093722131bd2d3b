"""The optimizer of the config: torch's, and what torch's does not do as hooks around its step.

Hooks run with the step: where a float16 step overflows and is left out, they are left out too. Only
torch's fused kernels, which CUDA has, are called in such a step all the same, and change nothing;
so they are not used with hooks that change weights or velocities by themselves.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from segtrain import plugins
from segtrain.config import Config
from segtrain.errors import ConfigError
from segtrain.training.optim.layers import InitialWeights, parameter_groups
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

    def toward(self, step: int) -> float:
        """How far the average goes to the weights after update number `step`, counted from 1."""
        return 1 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, model: nn.Module, toward: float | Tensor) -> None:
        """Takes in the weights of `model`; `toward`, 0 .. 1: how far to go."""
        # Not the state dict, which lists a tensor that two modules share twice.
        average = [*self.model.parameters(), *self.model.buffers()]
        newest = [*model.parameters(), *model.buffers()]
        pairs = list(zip(average, newest, strict=True))
        mine, theirs = zip(*(pair for pair in pairs if pair[0].is_floating_point()), strict=True)
        foreach_lerp_(mine, theirs, toward)
        # Counts of batches have no mean: the newest is kept.
        counters = [pair for pair in pairs if not pair[0].is_floating_point()]
        if counters:  # num_batches_tracked
            torch._foreach_copy_(*zip(*counters, strict=True))


def foreach_lerp_(
    tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float | Tensor
) -> None:
    """Moves `tensors` by `weight` toward `ends`; a tensor () is not read by the host."""
    if not isinstance(weight, Tensor):
        torch._foreach_lerp_(tensors, ends, weight)
        return
    ways = torch._foreach_sub(ends, tensors)
    torch._foreach_mul_(ways, weight)
    torch._foreach_add_(tensors, ways)


def build_optimizer(
    model: nn.Module,
    config: Config,
    *,
    start: InitialWeights | None = None,
    capturable: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer of the config; `set_learning_rate` gives it a rate before every step.

    start: from `make_initial_weights`; None: no decay toward it, and no weight is held at 0.
    capturable: rates are tensors and one kernel of torch's does a whole step, so that its
        operations have the same numbers in each (see `may_be_captured`).
    """
    optim, lr = config.optim, base_lr(config)
    groups = parameter_groups(model, optim, None if start is None else start.loaded)
    fused = capturable or None  # None: as torch chooses; on CPUs other kernels stay, and their bits
    if optim.kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr, fused=fused, capturable=capturable)
    elif optim.kind == "muon":
        from segtrain.training.optim.muon import Muon

        optimizer = Muon(groups, lr, fused=fused)
    elif optim.kind == "sgd":
        optimizer = torch.optim.SGD(groups, lr, momentum=optim.momentum, fused=fused)
        if fused:
            optimizer.register_step_pre_hook(_make_velocities)
    else:
        optimizer = plugins.choose("optimizer", optim.kind, {})(groups, lr, optim.options)
        is_one = isinstance(optimizer, torch.optim.Optimizer)
        if not is_one or any("lr" not in group for group in optimizer.param_groups):
            what = "expected a torch.optim.Optimizer whose groups have lr, found"
            raise ConfigError(f"optim.kind: {optim.kind}: {what} {type(optimizer).__name__}")
    for group in optimizer.param_groups if capturable else ():
        # Not before: making an optimizer reads the rate. In the type that kernels read.
        rate = torch.full((), group["lr"], dtype=torch.float32, device=group["params"][0].device)
        group["lr"] = rate
    if any(group["pull"] for group in groups):
        points = {} if start is None else start.points(model)
        optimizer.register_step_pre_hook(partial(_pull, config, points))
    if start is not None and optim.prunes:
        optimizer.register_step_post_hook(lambda *_: start.hold_weights(model))
    return optimizer


def moments_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes that its moments will take from the first step on; 0 if they are there.

    Of an optimizer of a plugin nothing is known: 0, too.
    """
    total = 0
    for group in () if optimizer.state else optimizer.param_groups:
        number = 0
        if isinstance(optimizer, torch.optim.SGD):
            number = int(group["momentum"] > 0)
        elif isinstance(optimizer, torch.optim.AdamW):
            number = 2
        elif isinstance(group.get("muon"), bool):  # Muon takes AdamW for the other groups
            number = 1 if group["muon"] else 2
        total += number * sum(parameter.nbytes for parameter in group["params"])
    return total


def may_be_captured(model: nn.Module, config: Config, device: torch.device) -> bool:
    """Whether updates on `device` are `capturable`: no number of theirs changes with the step.

    In float16, a step that overflows is left out. torch's kernel for the whole step sees that on
    the device; hooks around it, and Muon, are left out by the host, which waits for the number.
    """
    if device.type != "cuda" or plugins.registered("optimizer", config.optim.kind):
        return False
    pulls = any(group["pull"] for group in parameter_groups(model, config.optim, None))
    by_host = pulls or config.optim.kind == "muon"
    return config.train.precision != "float16" or not by_host


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


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float | Tensor) -> None:
    """Sets every group's rate to `lr` times its multiplier."""
    for group in optimizer.param_groups:
        rate = lr * group["lr_mult"]
        # A tensor is written to, not replaced: a CUDA graph reads it where it was.
        if not isinstance(group["lr"], Tensor):
            group["lr"] = rate
        elif isinstance(rate, Tensor):
            group["lr"].copy_(rate)
        else:
            group["lr"].fill_(rate)


@torch.no_grad()
def _pull(
    config: Config, points: dict[nn.Parameter, Tensor], optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    """Decay toward the weight s that training started from, which torch's `weight_decay` cannot.

    SGD:          gradient += decay * (w - s)    L2-SP (arXiv:1802.01483)
    AdamW, Muon:  w -= decay * lr * (w - s)      arXiv:1711.05101
    """
    optim = config.optim
    for group in optimizer.param_groups:
        rate = group["pull"]
        # As torch's own decay: a weight without a gradient stays where it is.
        weights = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not rate or not weights:
            continue
        targets = [points[weight] for weight in weights]
        if optim.kind == "sgd":
            away = torch._foreach_sub(weights, targets)
            torch._foreach_add_([weight.grad for weight in weights], away, alpha=rate)
        else:
            foreach_lerp_(weights, targets, rate * group["lr"])
