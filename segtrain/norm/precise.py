"""Running statistics over a whole data set instead of a moving average over batches."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.distributed import collectives as dist
from segtrain.norm.functional import packed_moments, unbiased, unpacked_moments
from segtrain.norm.kernels import local_moments
from segtrain.norm.partial import PartialBatchNorm2d

T = TypeVar("T")


@torch.no_grad()
def precise_statistics(
    module: nn.Module,
    batches: Iterable[T],
    forward: Callable[[T], Any] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Sets every running mean and variance to that of all values in all `batches` (collective).

    The moving average of training weighs the newest batches most, and the weights changed meanwhile
    (Wu and Johnson, arXiv:2105.07576, section 3). Here the weights are fixed, batch norm normalizes
    by the batch as in training, and other layers are in evaluation mode. The moments of all batches
    of all ranks are pooled exactly, each value counts once, and the variance is unbiased. Every
    layer is set, even if it was in evaluation mode; modes and `num_batches_tracked` do not change.

    Args:
        batches: this rank's; layers that share statistics need as many on every rank.
        forward: runs the model on a batch; None: module(batch).

    Returns:
        the number of layers that were set; without any, nothing runs.
    """
    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    layers = [layer for layer in norms if layer.running_mean is not None]
    if not layers:
        return 0
    sums: dict[nn.Module, Tensor] = {}
    modes = {child: child.training for child in module.modules()}
    counters = [layer.num_batches_tracked.clone() for layer in layers]
    hook = partial(_accumulate, sums)
    handles = []
    try:
        module.eval()
        for layer in layers:
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            layer.train()
        for batch in batches:
            (forward or module)(batch)
    finally:
        for handle in handles:
            handle.remove()
        for child, training in modes.items():
            child.training = training
        for layer, counter in zip(layers, counters, strict=True):
            layer.num_batches_tracked.copy_(counter)
            if isinstance(layer, PartialBatchNorm2d):
                layer._seen.clear()
    _set(layers, sums, group)
    return len(layers)


def _accumulate(
    sums: dict[nn.Module, Tensor], layer: nn.Module, args: tuple[Tensor], kwargs: dict[str, Tensor]
) -> None:
    x = args[0] if args else kwargs["input"]
    payload = packed_moments(*local_moments(x), x.numel() // x.shape[1])
    sums[layer] = sums[layer] + payload if layer in sums else payload


def _set(
    layers: list[_BatchNorm], sums: dict[nn.Module, Tensor], group: dist.ProcessGroup | None
) -> None:
    """One all_reduce for all layers; those that saw no value on any rank keep what they had."""
    sizes = [2 * layer.num_features + 1 for layer in layers]
    for layer, size in zip(layers, sizes, strict=True):
        sums.setdefault(layer, layer.running_mean.new_zeros(size, dtype=torch.float64))
    whole = dist.all_reduce_sum(torch.cat([sums[layer] for layer in layers]), group)
    for layer, part in zip(layers, whole.split(sizes), strict=True):
        mean, var, count = unpacked_moments(part)
        if count > 0:
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(unbiased(var, count))
