"""Synchronized batch norm as modules: a drop-in for nn.BatchNorm1d, 2d and 3d."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.distributed import collectives as dist
from segtrain.distributed import virtual_ranks
from segtrain.distributed.collectives import ProcessGroup
from segtrain.norm import running
from segtrain.norm.functional import (
    Moments,
    NormInput,
    composite_batch_norm,
    sync_batch_norm,
    sync_batch_norms,
    unbiased,
)

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
        on_one_value: if the whole group has one value per channel, its variance means nothing:
            "normalize" returns the bias, "raise" raises a ValueError. The check reads the count
            from the device, in layers where this rank has at most one value.
        double_backward: allow second derivatives, as for gradient penalties; slower.

    Shape: (N, C, ...) to the same, with 2 to 5 dimensions.
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
        on_one_value: Literal["normalize", "raise"] = "normalize",
        double_backward: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if affine and not bias:
            self.register_parameter("bias", None)
        if on_one_value not in ("normalize", "raise"):
            raise ValueError(f'on_one_value: expected "normalize" or "raise", got {on_one_value!r}')
        self.process_group = as_ranks(process_group)
        self.on_one_value = on_one_value
        self.double_backward = double_backward

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
            again = recomputing() or not _tracked
            return self._recompute(input) if again else super().forward(input)
        function = composite_batch_norm if self.double_backward else sync_batch_norm
        y, moments = function(input, self.weight, self.bias, eps=self.eps, group=group)
        self._track(input, moments, group)
        return y

    def _recompute(self, input: Tensor) -> Tensor:
        # Copies, not None: checkpointing compares the saved tensors with those of the first time.
        buffers = [None if b is None else b.clone() for b in (self.running_mean, self.running_var)]
        return F.batch_norm(input, *buffers, self.weight, self.bias, True, 0.0, self.eps)

    def _evaluate(self, input: Tensor) -> Tensor:
        if running.is_waiting(self):
            raise RuntimeError("a layer evaluates inside tracked_together()")
        buffers = self.running_mean, self.running_var
        by_batch = self.running_mean is None
        return F.batch_norm(input, *buffers, self.weight, self.bias, by_batch, 0.0, self.eps)

    def _track(self, input: Tensor, moments: Moments, group: dist.Group | None) -> None:
        """Checks and tracks the statistics of a batch, whose part on this rank is `input`."""
        few = self.on_one_value == "raise" and input.numel() <= input.shape[1]
        if few and moments.count == 1:
            got = f"one value per channel over {dist.group_size(group)} ranks"
            shape = tuple(input.shape)
            raise ValueError(f"batch norm in training got {got}; this rank's input is {shape}")
        # Virtual ranks share the layer and see the same statistics.
        if _tracked and not recomputing() and virtual_ranks.slot() == 0:
            if self.running_mean is None or running.wait(self, moments):
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

    def shares_calls(self) -> bool:
        """Whether one function may compute this layer with others; hooks need a call of it."""
        return self.training and not self.double_backward and not has_hooks(self)

    def _sharing_size(self) -> int:
        return dist.group_size(self._group())

    def _sharing_key(self) -> Any:
        """Layers with equal keys may share a collective."""
        return self.process_group

    def sharing_ranks(self) -> tuple[int, ...] | None:
        """The ranks that share statistics with this one; None: all."""
        return dist.node_ranks() if self.process_group == "node" else self.process_group

    def _group(self) -> dist.Group | None:
        return dist.group_of(self.sharing_ranks())

    def extra_repr(self) -> str:
        """As nn.BatchNorm2d, and the group where it is not all ranks."""
        group = "" if self.process_group is None else f", process_group={self.process_group}"
        return super().extra_repr() + group


def normalize_together(pairs: Iterable[tuple[Tensor, nn.Module]]) -> list[Tensor]:
    """Each tensor through its own norm layer, with one all_reduce for all layers (collective).

    For independent branches: no input may depend on another's result. The numbers are bit for bit
    those of one layer after another. If a layer is in evaluation mode, has hooks, or is of another
    kind or group, the layers run one by one.
    """
    pairs = list(pairs)
    first = pairs[0][1]
    if not all(_can_share(layer, first) for _, layer in pairs) or first._sharing_size() == 1:
        return [layer(x) for x, layer in pairs]
    for x, layer in pairs:
        layer._check_input_dim(x)
    inputs = [NormInput(x, layer.weight, layer.bias, layer.eps) for x, layer in pairs]
    group = first._group()
    outputs, moments = sync_batch_norms(inputs, group=group)
    for (x, layer), statistics in zip(pairs, moments, strict=True):
        layer._track(x, statistics, group)
    return outputs


def make_groups(module: nn.Module) -> None:
    """Makes the process groups of all norm layers of `module` (collective over all ranks).

    Without it the first forward pass makes them, which it cannot if it is compiled, or if NCCL has
    a device of its own.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]
    wanted = {layer.sharing_ranks() for layer in layers}
    dist.make_groups(sorted(wanted - {None}))


def _can_share(layer: nn.Module, first: nn.Module) -> bool:
    if not (isinstance(layer, SyncBatchNorm) and isinstance(first, SyncBatchNorm)):
        return False
    return layer.shares_calls() and layer._sharing_key() == first._sharing_key()


class SyncBatchNorm1d(SyncBatchNorm):
    """SyncBatchNorm for (N, C) and (N, C, L)."""

    _dims = (2, 3)


class SyncBatchNorm2d(SyncBatchNorm):
    """SyncBatchNorm for (N, C, H, W)."""

    _dims = (4,)


class SyncBatchNorm3d(SyncBatchNorm):
    """SyncBatchNorm for (N, C, D, H, W)."""

    _dims = (5,)


def has_hooks(module: nn.Module) -> bool:
    """Whether `module` has hooks, which need every call of it."""
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
    """Whether batches move the running statistics: not inside `untracked`."""
    return _tracked


def recomputing() -> bool:
    """Whether activation checkpointing repeats the forward pass, inside the backward pass.

    Then all ranks repeat the collective, but the batch has been tracked already.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


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
