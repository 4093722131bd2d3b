"""A watch over the ranks' meetings, for finding out who stays away and who is waited for."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from segtrain.distributed import collectives as dist
from segtrain.norm.sync import SyncBatchNorm


@contextmanager
def watch_ranks(module: nn.Module) -> Iterator[dict[str, float]]:
    """Inside, every synchronized batch norm of `module` first compares notes with the other ranks.

    A model that branches differently on two ranks makes them meet in different layers. Without the
    watch that is a hang, an error about sizes or, where the widths happen to agree, a wrong result.
    Slow: an exchange of names before every collective, and no shared ones. Use it on all ranks for
    a step or two.

    Yields:
        the seconds this rank has waited for the others, by layer, forward and backward together.

    Raises:
        ValueError: the module, or a part of it, is compiled, and would not call the watch.
        RuntimeError: the ranks are in different layers, by name, or one does not come at all until
            the timeout of the process group.
    """
    waits: dict[str, float] = defaultdict(float)
    handles = []
    for name, layer in module.named_modules():
        if isinstance(layer, torch._dynamo.OptimizedModule) or layer._compiled_call_impl:
            raise ValueError(f"{name or 'the module'} is compiled: watch it before compiling it")
        if isinstance(layer, SyncBatchNorm):
            meet = partial(_meet, waits, name or "the module", layer)
            handles.append(layer.register_forward_pre_hook(partial(_before_forward, meet)))
            handles.append(layer.register_forward_hook(partial(_after_forward, meet)))
    try:
        yield waits
    finally:
        for handle in handles:
            handle.remove()


def _before_forward(meet: Any, layer: nn.Module, args: tuple[Tensor]) -> None:
    if layer.training:
        meet("forward")


def _after_forward(meet: Any, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    # The gradient of the output is there just before the backward pass of the layer begins.
    if layer.training and output.requires_grad:
        output.register_hook(lambda grad: meet("backward"))


def _meet(waits: dict[str, float], name: str, layer: SyncBatchNorm, direction: str) -> None:
    group = layer._group()
    mine = (dist.rank(), f"{direction} of {name} ({layer.num_features} channels)")
    began = time.perf_counter()
    try:
        everyone = dist.all_gather_object(mine, group)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {mine[0]} waits in {mine[1]}: another rank does not come; it has skipped this "
            "layer, stands in another collective, or is gone"
        ) from error
    waits[name] += time.perf_counter() - began
    if len({place for _, place in everyone}) > 1:
        places = "; ".join(f"rank {rank}: {place}" for rank, place in everyone)
        raise RuntimeError(f"the ranks are in different batch norms: {places}")
