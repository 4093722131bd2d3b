"""For training loops of your own: ranks with different numbers of batches or different branches."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from segtrain.distributed import collectives as dist
from segtrain.norm.sync import SyncBatchNorm

T = TypeVar("T")


def until_all_end(
    batches: Iterable[T],
    empty: T,
    *,
    group: dist.Group | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[T]:
    """Yields this rank's `batches`, then `empty` until all ranks have no more (collective).

    If a rank just stopped, the others would wait for it in the next batch norm. An empty batch adds
    zeros to the statistics. Divide a sum of losses by a count over all ranks: the mean over no
    pixels is NaN.

    Args:
        empty: a batch with N = 0, such as images of shape (0, 3, H, W).
        device: that of the process group, so a GPU for NCCL.
    """
    iterator, end = iter(batches), object()
    while True:
        batch = next(iterator, end)
        if not dist.all_reduce_sum(torch.tensor(float(batch is not end), device=device), group):
            return
        yield empty if batch is end else batch


@contextmanager
def watch_ranks(module: nn.Module) -> Iterator[dict[str, float]]:
    """Compares, before each collective of `module`'s batch norms, which layer each rank is in.

    If a model branches differently on two ranks, they communicate in different layers. Without the
    watch that is a hang, an error about sizes or, for equal sizes, a wrong result. It is slow: use
    it on all ranks for a step or two.

    Yields:
        the seconds this rank has waited for the others, by layer, forward and backward together.

    Raises:
        ValueError: the module or a part of it is compiled, so its hooks would not run.
        RuntimeError: the ranks are in different layers, or a rank did not come before the timeout
            of the process group.
    """
    waits: dict[str, float] = defaultdict(float)

    def before(name: str, layer: nn.Module, args: tuple[Tensor]) -> None:
        if layer.training:
            _meet(waits, name, layer, "forward")

    def after(name: str, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        # The gradient of the output is computed just before the backward pass of the layer.
        if layer.training and output.requires_grad:
            output.register_hook(lambda grad: _meet(waits, name, layer, "backward"))

    with ExitStack() as handles:
        for path, layer in module.named_modules():
            name = path or "the module"
            if isinstance(layer, torch._dynamo.OptimizedModule) or layer._compiled_call_impl:
                raise ValueError(f"{name} is compiled: watch it before compiling it")
            if isinstance(layer, SyncBatchNorm):
                handles.enter_context(layer.register_forward_pre_hook(partial(before, name)))
                handles.enter_context(layer.register_forward_hook(partial(after, name)))
        yield waits


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
