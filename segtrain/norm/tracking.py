"""Whether a forward pass moves running statistics, and those of many layers moved together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.distributed.passes import current, passing
from segtrain.norm.cuda_kernels import constant
from segtrain.norm.functional import Moments
from segtrain.norm.kernels import unbiased


@contextmanager
def untracked() -> Iterator[None]:
    """Inside, running statistics stay as they are, for a step that is computed a second time."""
    with passing(tracked=False):
        yield


def is_tracked() -> bool:
    """Whether batches move the running statistics: not inside `untracked`, and not a second time.

    Activation checkpointing repeats the forward pass inside the backward pass, where the batch has
    been tracked already.
    """
    # -1: no backward pass runs on this thread.
    recomputing = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
    return current().tracked and not recomputing


@contextmanager
def tracked_together() -> Iterator[None]:
    """On exit, running statistics follow the batches that layers on CUDA have seen inside.

    There the update of one layer is a dozen small kernels, which cost the host more than the
    device; of a whole model together it is some twenty. Inside, these layers cannot evaluate, and
    their buffers are those from before. On a CPU, in compiled code and with momentum None
    a layer follows at once. After an exception the batches are dropped.

    Raises:
        RuntimeError: it is entered twice.
    """
    if current().waiting is not None:
        raise RuntimeError("tracked_together() inside tracked_together()")
    waiting: list[tuple[_BatchNorm, Moments]] = []  # layers, each with a batch's moments
    with passing(waiting=waiting):
        yield
    # Not in a `finally`: after an exception the moments may be of half a pass.
    while waiting:
        # A layer that was called twice follows its batches one after another.
        now: dict[_BatchNorm, Moments] = {}
        later = []
        for layer, moments in waiting:
            if layer in now:
                later.append((layer, moments))
            else:
                now[layer] = moments
        _follow(list(now), list(now.values()))
        waiting = later


@torch.no_grad()
def _follow(layers: Sequence[_BatchNorm], batches: Sequence[Moments]) -> None:
    """Moves the running statistics of different `layers` toward a batch of each.

    The channels of all layers lie in one tensor, so that an operation serves all of them.
    """
    sizes = [layer.num_features for layer in layers]

    def along(values: Tensor) -> Tensor:
        """Each of `values` (layers,) once for every channel of its layer, (channels of all,)."""
        pairs = zip(values.unbind(), sizes, strict=True)
        return torch.cat([value.expand(size) for value, size in pairs])

    means, variances, counts = (list(tensors) for tensors in zip(*batches, strict=True))
    counts = torch.stack(counts)  # (layers,)
    mean = torch.cat(means)  # (channels of all,)
    has_values = counts >= 1
    torch._foreach_add_([layer.num_batches_tracked for layer in layers], list(has_values.long()))
    momenta = constant([layer.momentum for layer in layers], mean.dtype, mean.device)
    # A weight of 0 leaves a layer as it is whose batch had no values on any rank.
    weight = along(momenta * has_values)
    var = unbiased(torch.cat(variances), along(counts))
    for name, batch in (("running_mean", mean), ("running_var", var)):
        running = [getattr(layer, name) for layer in layers]
        # The buffers may be float16 (module.half()): compute in the wide type, round once.
        moved = torch.cat(running).to(batch.dtype).lerp_(batch, weight)
        torch._foreach_copy_(running, list(moved.split(sizes)))
