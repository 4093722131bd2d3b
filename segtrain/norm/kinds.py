"""The norm layers that a config can name."""

import math
from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.config import NormConfig
from segtrain.norm.partial import PartialBatchNorm2d
from segtrain.norm.sync import SyncBatchNorm2d

NormFactory = Callable[[int], nn.Module]
"""Makes the norm layer for a number of channels; an argument of the models."""

_EXTENT_WORDS = {
    "local": "local batch norm",
    "world": "synchronized batch norm",
    "node": "batch norm synchronized within each machine",
}
_RUNNING_WORDS = {
    "rank0": "of rank 0",
    "mean": "the mean over the groups",
    "pooled": "pooled over all ranks",
}


def make_norm(config: NormConfig) -> NormFactory:
    """The layers that `config` asks for; call `settle_statistics` after every backward pass."""
    if config.kind == "group":
        return partial(_group_norm, config.num_groups, eps=config.eps)
    options = {"eps": config.eps, "momentum": config.momentum}
    if config.kind == "frozen":
        return partial(FrozenBatchNorm2d, **options)
    extent = 1 if config.kind == "local" else config.extent
    if extent == "world":
        return partial(SyncBatchNorm2d, **options)
    return partial(PartialBatchNorm2d, extent=extent, running=config.running, **options)


def make_inference_norm(config: NormConfig) -> NormFactory:
    """torch's own layers with the same keys and the same results in evaluation mode."""
    if config.kind == "group":
        return make_norm(config)
    return partial(nn.BatchNorm2d, eps=config.eps)


def describe_norm(config: NormConfig) -> str:
    """`config` in words: whose statistics are used in training, and which in evaluation."""
    if config.kind == "group":
        return f"group norm, at most {config.num_groups} groups"
    if config.kind == "frozen":
        return "frozen batch norm, statistics of the initial weights"
    extent = "local" if config.kind == "local" else config.extent
    groups = f"batch norm synchronized within groups of {extent} ranks"
    words = _EXTENT_WORDS.get(extent, groups)
    if extent != "world":
        words += f", running statistics {_RUNNING_WORDS[config.running]}"
    if config.precise_batches is not None:
        words += f", precise over {config.precise_batches} batches"
    return words


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with constant running statistics, in training too; weight and bias are trained.

    The statistics come with the weights that training starts from. With random weights they are 0
    and 1, which normalizes nothing.
    """

    def forward(self, input: Tensor) -> Tensor:
        """`input` (N, C, H, W) normalized by the running statistics."""
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


def freeze_statistics(layer: _BatchNorm) -> FrozenBatchNorm2d:
    """`layer` with constant statistics; parameters and buffers are the same tensors."""
    frozen = FrozenBatchNorm2d(layer.num_features)
    # All of a module is there: hooks too, and the activation that timm's networks have inside.
    frozen.__dict__.update(layer.__dict__)
    return frozen


def _group_norm(num_groups: int, channels: int, *, eps: float) -> nn.GroupNorm:
    # 48 channels cannot be divided into 32 groups, but into gcd(32, 48) = 16.
    return nn.GroupNorm(math.gcd(num_groups, channels), channels, eps=eps)
