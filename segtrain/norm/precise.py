"""Running statistics over a whole data set instead of a moving average over batches."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.distributed import collectives as dist
from segtrain.distributed import virtual_ranks
from segtrain.distributed.rank_sums import RANKS, RankSums
from segtrain.norm.kernels import local_moments, packed, unbiased, unpacked_moments
from segtrain.norm.kinds import FrozenBatchNorm2d
from segtrain.norm.tracking import untracked

T = TypeVar("T")


@torch.no_grad()
def precise_statistics(
    module: nn.Module,
    batches: Iterable[T] | Iterable[Sequence[T]],
    forward: Callable[[T], Any] | None = None,
    *,
    parts: RankSums = RANKS,
) -> int:
    """Sets every running mean and variance to that of all values in all `batches` (collective).

    The moving average of training weighs the newest batches most, and the weights changed meanwhile
    (Wu and Johnson, arXiv:2105.07576, section 3). Here the weights are fixed, batch norm normalizes
    by the batch as in training, and other layers are in evaluation mode. The moments of all batches
    of all ranks are pooled exactly, each value counts once, and the variance is unbiased. Every
    layer is set, even if it was in evaluation mode, but those with frozen statistics; modes and
    `num_batches_tracked` do not change.

    Args:
        batches: this rank's; layers that share statistics need as many on every rank. Those whose
            statistics are over some `images` need `placed` around this.
        forward: runs the model on a batch; None: module(batch).
        parts: of each batch. With `Shares` it is a list, one for each share of this rank.

    Returns:
        the number of layers that were set; without any, nothing runs.
    """
    run = forward or module
    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    tracking = [layer for layer in norms if layer.running_mean is not None]
    layers = [layer for layer in tracking if not isinstance(layer, FrozenBatchNorm2d)]
    if not layers:
        return 0

    def run_part(part: T) -> None:
        with torch.no_grad():  # each thread has a mode of its own
            run(part)

    sums = [{} for _ in range(parts.slots(1))]
    with untracked(), ExitStack() as after:
        for child in module.modules():
            after.callback(setattr, child, "training", child.training)
        module.eval()
        for layer in layers:
            hook = layer.register_forward_pre_hook(partial(_accumulate, sums), with_kwargs=True)
            after.callback(hook.remove)
            counter = layer.num_batches_tracked
            after.callback(counter.copy_, counter.clone())
            layer.train()
        for batch in batches:
            parts.each(run_part, batch)
    _set(layers, sums, parts)
    return len(layers)


_Sums = list[dict[nn.Module, Tensor]]  # of each part of this rank


def _accumulate(
    sums: _Sums, layer: nn.Module, args: tuple[Tensor], kwargs: dict[str, Tensor]
) -> None:
    x = args[0] if args else kwargs["input"]
    payload = packed(*local_moments(x), x.numel() // x.shape[1])
    # Without shares, virtual ranks take turns and add to the same sums.
    mine = sums[virtual_ranks.slot() if len(sums) > 1 else 0]
    mine[layer] = mine[layer] + payload if layer in mine else payload


def _set(layers: list[_BatchNorm], sums: _Sums, parts: RankSums) -> None:
    """One collective for all layers; those that saw no value on any rank keep what they had."""
    sizes = [2 * layer.num_features + 1 for layer in layers]
    # All ranks must send equally many numbers, also for a layer that no batch here has reached.
    for mine in sums:
        for layer, size in zip(layers, sizes, strict=True):
            mine.setdefault(layer, layer.running_mean.new_zeros(size, dtype=torch.float64))
    whole = parts.sum([torch.cat([mine[layer] for layer in layers]) for mine in sums])
    # The host reads the counts below, and without a limit would wait for a lost rank for ever.
    dist.wait_for_device(whole.device)
    for layer, part in zip(layers, whole.split(sizes), strict=True):
        mean, var, count = unpacked_moments(part)
        if count > 0:
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(unbiased(var, count))
