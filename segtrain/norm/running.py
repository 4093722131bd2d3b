"""Running statistics of all layers updated together, once a pass.

On a GPU an update is a dozen small kernels a layer, and they cost the host more than the device.
Here they are some twenty for a whole model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from segtrain.norm.functional import Moments, unbiased

_waiting: list[tuple[Any, Moments]] | None = None  # layers, with the statistics of a batch


@contextmanager
def tracked_together() -> Iterator[None]:
    """On exit, running statistics follow the batches that layers on CUDA have seen inside.

    Inside, these layers cannot evaluate, and their buffers are those from before. On a CPU, and in
    compiled code, a layer follows at once. After an exception the batches are dropped.

    Raises:
        RuntimeError: it is entered twice.
    """
    global _waiting
    if _waiting is not None:
        raise RuntimeError("tracked_together() inside tracked_together()")
    _waiting = []
    try:
        yield
        for batches in _rounds(_waiting):
            follow(list(batches), list(batches.values()))
    finally:
        _waiting = None


def wait(layer: Any, moments: Moments) -> bool:
    """Whether `layer` follows `moments` later; otherwise it must do so now."""
    if torch.compiler.is_compiling() or _waiting is None or not pays(moments.mean):
        return False
    _waiting.append((layer, moments))
    return True


def pays(mean: Tensor) -> bool:
    """Whether updating layers together is faster, for statistics on this device."""
    return mean.device.type == "cuda"


def is_waiting(layer: Any) -> bool:
    """Whether batches of `layer` have not reached its running statistics."""
    return _waiting is not None and any(one is layer for one, _ in _waiting)


def _rounds(batches: Sequence[tuple[Any, Moments]]) -> Iterator[dict[Any, Moments]]:
    """Batches in order, in rounds that have every layer at most once."""
    while batches:
        now: dict[Any, Moments] = {}
        later = []
        for layer, moments in batches:
            if layer in now:
                later.append((layer, moments))
            else:
                now[layer] = moments
        yield now
        batches = later


def follow(layers: Sequence[Any], batches: Sequence[Moments]) -> None:
    """Moves the running statistics of different `layers` toward a batch of each."""
    sizes = [len(moments.mean) for moments in batches]
    means, variances, counts = (list(tensors) for tensors in zip(*batches, strict=True))
    counts = torch.stack(counts)
    mean, var = torch.cat(means), torch.cat(variances)
    follow_unbiased(layers, mean, unbiased(var, along(counts, sizes)), seen=counts >= 1)


@torch.no_grad()
def follow_unbiased(
    layers: Sequence[Any], mean: Tensor, unbiased_var: Tensor, *, seen: Tensor
) -> None:
    """Moves the running statistics of different `layers` toward those of a batch.

    mean, unbiased_var: of all layers one after another, (sum of C,) floating point.
    seen: (layers,) bool, whether a layer has seen values.
    """
    torch._foreach_add_([layer.num_batches_tracked for layer in layers], list(seen.long()))
    sizes = [layer.num_features for layer in layers]
    momenta = {layer.momentum for layer in layers}
    factor = seen.to(mean.dtype)
    if len(momenta) == 1 and None not in momenta:
        factor *= momenta.pop()
    else:
        factor *= torch.stack([_factor(layer, seen.device) for layer in layers])
    weight = along(factor, sizes)
    for name, batch in (("running_mean", mean), ("running_var", unbiased_var)):
        running = [getattr(layer, name) for layer in layers]
        # The buffers may be float16 (module.half()): compute in the wide type, round once.
        moved = torch.cat(running).to(batch.dtype).lerp_(batch, weight)
        torch._foreach_copy_(running, list(moved.split(sizes)))


def along(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Each of `values` (layers,) once for every channel of its layer, (sum of sizes,)."""
    pairs = zip(values.unbind(), sizes, strict=True)
    return torch.cat([value.expand(size) for value, size in pairs])


def _factor(layer: Any, device: torch.device) -> Tensor:
    if layer.momentum is None:  # the cumulative average
        return layer.num_batches_tracked.clamp(min=1).double().reciprocal()
    return torch.full((), layer.momentum, dtype=torch.float64, device=device)
