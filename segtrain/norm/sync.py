"""Synchronized batch norm as modules: a drop-in for nn.BatchNorm1d, 2d and 3d.

Below them: layers that share a collective, and running statistics that are updated together.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.distributed import collectives as dist
from segtrain.distributed import virtual_ranks
from segtrain.distributed.collectives import ProcessGroup
from segtrain.norm.cuda_kernels import constant, takes
from segtrain.norm.functional import Moments, NormInput, norm_relu_conv2d, sync_batch_norms
from segtrain.norm.kernels import unbiased

T = TypeVar("T")
Group = ProcessGroup | Sequence[int] | Literal["node"] | None


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose training statistics are those of all ranks' values together, exactly.

    Any split of the batch over the ranks gives the same result: different numbers of images,
    different heights and widths, ranks without images. It runs on CPU and CUDA and has the
    state-dict keys of nn.BatchNorm2d; on one rank it is nn.BatchNorm2d. In training all ranks of
    the group must call it, forward and backward. Evaluation never communicates: it uses the
    running statistics or, without any, those of this rank's batch.

    It does not derive from nn.SyncBatchNorm, which DistributedDataParallel refuses on CPU.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats: as in nn.BatchNorm2d; momentum None is the
            cumulative average.
        process_group: the ranks that share statistics: a process group, a sequence of ranks, "node"
            for the ranks of this machine, None for all. It is stored as rank numbers, so that the
            module can be copied and pickled.

    Shape: (N, C, ...) to the same, with 2 to 5 dimensions. One value per channel in the whole group
        has no variance: the result is the bias.
    """

    _dims: tuple[int, ...] = (2, 3, 4, 5)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Group = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
    ) -> None:
        options = {"device": device, "dtype": dtype, "bias": bias}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self.process_group = as_ranks(process_group)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self._dims:
            wanted = " or ".join(f"{dim}D" for dim in self._dims)
            raise ValueError(f"expected {wanted} input, got {input.dim()}D {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """`input` (N, C, ...) normalized (collective in training)."""
        self._check_input_dim(input)
        if not self.training:
            return self._evaluate(input)
        group = self._group()
        if dist.group_size(group) == 1:
            if is_tracked() or self.running_mean is None:
                return super().forward(input)
            # Copies, not None: checkpointing compares the saved tensors with the first pass's.
            buffers = self.running_mean.clone(), self.running_var.clone()
            return F.batch_norm(input, *buffers, self.weight, self.bias, True, 0.0, self.eps)
        return synchronized([(input, self)], group)[0]

    def _evaluate(self, input: Tensor) -> Tensor:
        if _waiting is not None and any(layer is self for layer, _ in _waiting):
            raise RuntimeError("a layer evaluates inside tracked_together()")
        buffers = self.running_mean, self.running_var
        by_batch = self.running_mean is None
        return F.batch_norm(input, *buffers, self.weight, self.bias, by_batch, 0.0, self.eps)

    def _track(self, moments: Moments) -> None:
        """Tracks the statistics of a batch."""
        # Virtual ranks share the layer and see the same statistics.
        if self.running_mean is None or not is_tracked() or virtual_ranks.slot() != 0:
            return
        if _waiting is not None and self.momentum is not None and takes(moments.mean):
            _waiting.append((self, moments))
            return
        mean, var, count = moments
        if count.device.type == "cpu" and not torch.compiler.is_compiling():
            # A Python number saves ten operations; on a GPU reading it would wait.
            count = count.item()
        # A batch without values on any rank changes nothing.
        self._update(mean, unbiased(var, count), seen=count >= 1)

    @torch.no_grad()
    def _update(self, mean: Tensor, unbiased_var: Tensor, *, seen: Tensor | bool) -> None:
        """Moves the running statistics toward a batch's, if `seen`."""
        self.num_batches_tracked.add_(seen)
        if self.momentum is None:
            factor = (seen / self.num_batches_tracked.clamp(min=1).double()).to(mean.dtype)
        else:
            factor = self.momentum * (seen.to(mean.dtype) if isinstance(seen, Tensor) else seen)
        for buffer, batch in ((self.running_mean, mean), (self.running_var, unbiased_var)):
            # The buffers may be float16 (module.half()): compute in the wide type, round once.
            wide = buffer.to(batch.dtype).lerp_(batch, factor)
            if wide is not buffer:
                buffer.copy_(wide)

    def sharing_ranks(self) -> tuple[int, ...] | None:
        """The ranks that share statistics with this one; None: all."""
        return dist.node_ranks() if self.process_group == "node" else self.process_group

    def _group(self) -> dist.Group | None:
        return dist.group_of(self.sharing_ranks())


def normalize_together(pairs: Iterable[tuple[Tensor, nn.Module]]) -> list[Tensor]:
    """Each tensor through its own norm layer, with one all_reduce for all layers (collective).

    For independent branches: no input may depend on another's result. The numbers are bit for bit
    those of one layer after another. If a layer is in evaluation mode, has hooks, or is of another
    kind or group, the layers run one by one.
    """
    pairs = list(pairs)
    layers = [layer for _, layer in pairs]
    if all(map(_computes_freely, layers)) and len({*map(type, layers)}) == 1:
        groups = {layer.sharing_ranks() for layer in layers}
        if len(groups) == 1 and dist.group_size(group := layers[0]._group()) > 1:
            return synchronized(pairs, group)
    return [layer(x) for x, layer in pairs]


def synchronized(
    pairs: Sequence[tuple[Tensor, SyncBatchNorm]], group: dist.Group | None
) -> list[Tensor]:
    """As `normalize_together` for layers in training of one group (collective)."""
    for x, layer in pairs:
        layer._check_input_dim(x)
    inputs = [NormInput(x, layer.weight, layer.bias, layer.eps) for x, layer in pairs]
    outputs, moments = sync_batch_norms(inputs, group=group)
    for (_, layer), statistics in zip(pairs, moments, strict=True):
        layer._track(statistics)
    return outputs


def norm_relu_conv(x: Tensor, norm: nn.Module, conv: nn.Conv2d) -> Tensor:
    """conv(relu(norm(x))), keeping `x` alone for the backward pass (collective in training).

    Outputs, gradients and running statistics are those of the three modules; differentiable once.
    Other layers than synchronized batch norms in training run as they are, and so do those with
    hooks. The convolution must have no bias.
    """
    if not _computes_freely(norm) or _has_hooks(conv):
        return conv(F.relu(norm(x), inplace=True))
    norm._check_input_dim(x)
    assert conv.bias is None
    assert conv.padding_mode == "zeros"
    geometry = (conv.stride, conv.padding, conv.dilation, conv.groups)
    layer = NormInput(x, norm.weight, norm.bias, norm.eps)
    y, moments = norm_relu_conv2d(layer, conv.weight, geometry, group=norm._group())
    norm._track(moments)
    return y


def make_groups(module: nn.Module) -> None:
    """Makes the process groups of all norm layers of `module` (collective over all ranks).

    Without it the first forward pass makes them, which it cannot if it is compiled, or if NCCL has
    a device of its own.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]
    dist.make_groups(sorted({layer.sharing_ranks() for layer in layers} - {None}))


class SyncBatchNorm1d(SyncBatchNorm):
    """SyncBatchNorm for (N, C) and (N, C, L)."""

    _dims = (2, 3)


class SyncBatchNorm2d(SyncBatchNorm):
    """SyncBatchNorm for (N, C, H, W)."""

    _dims = (4,)


class SyncBatchNorm3d(SyncBatchNorm):
    """SyncBatchNorm for (N, C, D, H, W)."""

    _dims = (5,)


def _computes_freely(layer: nn.Module) -> bool:
    """Whether one function may compute this layer with others; hooks need a call of it."""
    return isinstance(layer, SyncBatchNorm) and layer.training and not _has_hooks(layer)


def _has_hooks(module: nn.Module) -> bool:
    forward, backward = module._forward_hooks, module._backward_hooks
    return any([forward, backward, module._forward_pre_hooks, module._backward_pre_hooks])


_tracked = True


@contextmanager
def untracked() -> Iterator[None]:
    """Inside, running statistics stay as they are, for a step that is computed a second time."""
    global _tracked
    before, _tracked = _tracked, False
    try:
        yield
    finally:
        _tracked = before


def is_tracked() -> bool:
    """Whether batches move the running statistics: not inside `untracked`, and not a second time.

    Activation checkpointing repeats the forward pass inside the backward pass. Then all ranks
    repeat the collective, but the batch has been tracked already.
    """
    recomputing = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
    return _tracked and not recomputing


def as_ranks(group: Any) -> tuple[int, ...] | Literal["node"] | None:
    """`process_group` as a layer stores it.

    Raises:
        ValueError: it is no group, or this process is not in it.
    """
    if group is None or group == "node":
        return group
    if isinstance(group, ProcessGroup):
        return dist.group_ranks(group)
    if isinstance(group, Sequence) and not isinstance(group, str) and group:
        return tuple(sorted(int(rank) for rank in group))
    raise ValueError(
        'process_group: expected a process group that this process is in, ranks, "node" or None, '
        f"got {group!r}"
    )


def until_all_end(
    batches: Iterable[T], empty: T, *, device: torch.device | str = "cpu"
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
        if not dist.all_reduce_sum(torch.tensor(float(batch is not end), device=device)):
            return
        yield empty if batch is end else batch


_waiting: list[tuple[SyncBatchNorm, Moments]] | None = None  # layers, each with a batch's moments


@contextmanager
def tracked_together() -> Iterator[None]:
    """On exit, running statistics follow the batches that layers on CUDA have seen inside.

    There the update of one layer is a dozen small kernels, which cost the host more than the
    device; of a whole model together it is some twenty. Inside, these layers cannot evaluate, and
    their buffers are those from before. On a CPU, and in compiled code, a layer follows at once.
    After an exception the batches are dropped.

    Raises:
        RuntimeError: it is entered twice.
    """
    global _waiting
    if _waiting is not None:
        raise RuntimeError("tracked_together() inside tracked_together()")
    _waiting = waiting = []
    try:
        yield
        while waiting:
            # A layer that was called twice follows its batches one after another.
            now: dict[SyncBatchNorm, Moments] = {}
            waiting = [pair for pair in waiting if now.setdefault(*pair) is not pair[1]]
            _follow(list(now), list(now.values()))
    finally:
        _waiting = None


@torch.no_grad()
def _follow(layers: Sequence[SyncBatchNorm], batches: Sequence[Moments]) -> None:
    """Moves the running statistics of different `layers` toward a batch of each."""
    sizes = [layer.num_features for layer in layers]

    def along(values: Tensor) -> Tensor:
        """Each of `values` (layers,) once for every channel of its layer, (sum of sizes,)."""
        pairs = zip(values.unbind(), sizes, strict=True)
        return torch.cat([value.expand(size) for value, size in pairs])

    means, variances, counts = (list(tensors) for tensors in zip(*batches, strict=True))
    counts = torch.stack(counts)
    mean = torch.cat(means)
    seen = counts >= 1
    torch._foreach_add_([layer.num_batches_tracked for layer in layers], list(seen.long()))
    momenta = constant([layer.momentum for layer in layers], mean.dtype, mean.device)
    weight = along(momenta * seen)
    var = unbiased(torch.cat(variances), along(counts))
    for name, batch in (("running_mean", mean), ("running_var", var)):
        running = [getattr(layer, name) for layer in layers]
        # The buffers may be float16 (module.half()): compute in the wide type, round once.
        moved = torch.cat(running).to(batch.dtype).lerp_(batch, weight)
        torch._foreach_copy_(running, list(moved.split(sizes)))
