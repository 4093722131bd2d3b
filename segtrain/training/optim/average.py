"""Exponential moving average of the weights."""

import copy

import torch
from torch import nn


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
