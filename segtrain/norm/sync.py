"""Synchronized batch norm as modules: a drop-in for nn.BatchNorm1d, 2d and 3d.

A module in training computes in one of three ways: by Triton's kernels; as nn.BatchNorm2d, which
moves the running statistics too, where it shares with no other rank; or by functional.py. After
the first and the last way the running statistics follow at once, together with those of other
layers (tracking.py), or, of groups of images, after the backward pass (running.py).
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.distributed import collectives as dist
from segtrain.distributed import virtual_ranks
from segtrain.distributed.collectives import ProcessGroup
from segtrain.distributed.passes import current
from segtrain.norm import fused
from segtrain.norm.cuda_kernels import takes as has_cuda_kernels
from segtrain.norm.functional import Moments, NormInput, sync_batch_norms
from segtrain.norm.group_sums import Running, SeenBatch
from segtrain.norm.groups import Groups, Sharing, groups_here
from segtrain.norm.kernels import unbiased
from segtrain.norm.tracking import is_tracked

GroupLike = ProcessGroup | Sequence[int] | Literal["node"] | None


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose training statistics are those of all ranks' values together, exactly.

    Any split of the batch over the ranks gives the same result: different numbers of images,
    different heights and widths, ranks without images. It runs on CPU and CUDA and has the
    state-dict keys of nn.BatchNorm2d, whose results it has on one rank. In training all ranks that
    share must call it, forward and backward. Evaluation never communicates: it uses the running
    statistics or, without any, those of this rank's batch.

    It does not derive from nn.SyncBatchNorm, which DistributedDataParallel refuses on CPU.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats: as in nn.BatchNorm2d; momentum None is the
            cumulative average.
        process_group: the ranks that share statistics: a process group, a sequence of ranks, "node"
            for the ranks of this machine, None for all. A process group is stored as the numbers of
            its ranks, so that the module can be copied and pickled.
        images: None: all. n: groups of n images have statistics of their own, the first n positions
            of the batch of all ranks, the next n, and so on. Which positions a rank has, the
            context segtrain.norm.placed tells.
        running: with `images`, what the running statistics follow: mean and variance of all values
            together (pooled); the mean over the groups of means and of unbiased variances (mean);
            the first group; or one group after the other (sequential), as if each were a batch.
            They follow when `sync_running_stats` is called, after every backward pass; evaluation
            before that is a RuntimeError.

    Four images of one value, 1 and 3 in the first group, 5 and 9 in the second. With a momentum of
    1 the running mean and variance are those of this batch:

    >>> from segtrain.norm import sync_running_stats
    >>> for running in get_args(Running):
    ...     norm = SyncBatchNorm(1, momentum=1.0, images=2, running=running)
    ...     y = norm(torch.tensor([[1.0], [3.0], [5.0], [9.0]]))
    ...     sync_running_stats(norm)
    ...     print(running, norm.running_mean.item(), round(norm.running_var.item(), 2))
    pooled 4.5 11.67
    mean 4.5 5.0
    first 2.0 2.0
    sequential 7.0 8.0

    Shape: (N, C, ...) to the same, with 2 to 5 dimensions. One value per channel in all that share
        has no variance: the result is the bias. A rank that shares with no other refuses it, as
        nn.BatchNorm2d does.
    """

    _dims: tuple[int, ...] = (2, 3, 4, 5)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: GroupLike = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        images: int | None = None,
        running: Running = "pooled",
    ) -> None:
        options = {"device": device, "dtype": dtype}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        if not bias:
            self.register_parameter("bias", None)  # older torch has no such option
        if images is not None and process_group is not None:
            raise TypeError("expected images or a process_group: groups of images find their ranks")
        if images is not None and (type(images) is not int or images < 1):
            raise ValueError(f"images: expected None or an int of at least 1, got {images!r}")
        if running not in get_args(Running):
            raise ValueError(f"running: expected one of {get_args(Running)}, got {running!r}")
        if running != "pooled" and images is None:
            raise ValueError(f"running: {running} is about groups of images; give images, too")
        self.process_group = as_ranks(process_group)
        self.images, self.running = images, running
        # With `images`: the batches that the running statistics have not followed yet, by slot: the
        # number of a virtual rank, 0 without them.
        self._seen: dict[int, list[SeenBatch]] = {}

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self._dims:
            wanted = " or ".join(f"{dim}D" for dim in self._dims)
            raise ValueError(f"expected {wanted} input, got {input.dim()}D {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """`input` (N, C, ...) normalized (collective in training)."""
        self._check_input_dim(input)
        if not self.training:
            return self._evaluate(input)
        # Ranks may differ in this: kernels send the same vectors as the last way below.
        if fit_kernels([(input, self)]):
            return by_kernels([(input, self)], "none")[0]
        if self.images is None and dist.group_size(self._group()) == 1:
            return self._normalize_alone(input)
        return synchronized([(input, self)])[0]

    def _normalize_alone(self, input: Tensor) -> Tensor:
        """What nn.BatchNorm2d computes in training, on a rank that shares with no other."""
        # Without values a batch does not count, as among several ranks.
        moves_buffers = is_tracked() and input.numel() > 0
        if self.running_mean is None or moves_buffers:
            return super().forward(input)
        # Untracked or empty: torch writes to the buffers that it gets, so these are copies. With
        # None for the running ones it would save other tensors than the first pass, which
        # checkpointing compares.
        buffers = self.running_mean.clone(), self.running_var.clone()
        return F.batch_norm(input, *buffers, self.weight, self.bias, True, 0.0, self.eps)

    def _evaluate(self, input: Tensor) -> Tensor:
        waiting = current().waiting
        if waiting is not None and any(layer is self for layer, _ in waiting):
            raise RuntimeError("a layer evaluates inside tracked_together()")
        self._check_followed()
        buffers = self.running_mean, self.running_var
        by_batch = self.running_mean is None
        return F.batch_norm(input, *buffers, self.weight, self.bias, by_batch, 0.0, self.eps)

    def _save_to_state_dict(self, *args: Any) -> None:
        self._check_followed()
        super()._save_to_state_dict(*args)

    def _check_followed(self) -> None:
        if self._seen:
            raise RuntimeError(
                "the running statistics have not followed the last batch: call "
                "sync_running_stats(model) on all ranks after every backward pass"
            )

    def _track(self, by_group: list[Moments], groups: Groups | None) -> None:
        """Lets the running statistics follow a batch, now or later.

        by_group: the statistics of each of its `groups` that has images here; if `groups` is None,
            one element, of all its images.
        """
        if self.running_mean is None or not is_tracked():
            return
        if groups is not None:
            self._remember(by_group, groups)
        elif virtual_ranks.slot() == 0:  # virtual ranks share the layer and see the same statistics
            self._follow(*by_group)

    def _remember(self, by_group: list[Moments], groups: Groups) -> None:
        """Keeps the statistics of the groups that begin here for `sync_running_stats`.

        Every rank, or virtual rank, with images of a group has found the same ones. The one with
        its first image leads the group: it alone adds them.
        """
        # `groups.first` is the number of by_group[0] in the batch; `groups.led`: places in it.
        led = {groups.first + i: by_group[i] for i in groups.led}
        # A list for each slot: threads of virtual ranks add to their own only.
        seen = SeenBatch(groups.count, led, self.momentum)
        self._seen.setdefault(virtual_ranks.slot(), []).append(seen)

    def _follow(self, moments: Moments) -> None:
        """Lets the running statistics follow: at once, or at the end of `tracked_together`."""
        waiting = current().waiting
        if waiting is not None and self.momentum is not None and has_cuda_kernels(moments.mean):
            waiting.append((self, moments))
            return
        mean, var, count = moments
        if count.device.type == "cpu" and not torch.compiler.is_compiling():
            # A Python number saves ten operations; on a GPU reading it would wait.
            count = count.item()
        # A batch without values on any rank changes nothing.
        self.move_running(mean, unbiased(var, count), count >= 1)

    @torch.no_grad()
    def move_running(
        self,
        mean: Tensor,
        unbiased_var: Tensor,
        batches: Tensor | bool,
        weight: Tensor | None = None,
    ) -> None:
        """Moves the running statistics toward `mean` and `unbiased_var`.

        batches: how many batches these are of; 0 or False: nothing changes.
        weight: how far to move, as a multiple of the momentum; None: `batches`. Three groups one
            after another (`running: sequential`) are 3 batches of weight 1 + 0.9 + 0.81, with a
            momentum of 0.1. The cumulative average (momentum None) counts batches instead.
        """
        self.num_batches_tracked.add_(batches)
        if self.momentum is None:
            count = self.num_batches_tracked.clamp(min=1).double()
            factor = (batches / count).to(mean.dtype)
        else:
            weight = batches if weight is None else weight
            weight = weight.to(mean.dtype) if isinstance(weight, Tensor) else weight
            factor = self.momentum * weight
        for buffer, batch in ((self.running_mean, mean), (self.running_var, unbiased_var)):
            # The buffers may be float16 (module.half()): compute in the wide type, round once.
            wide = buffer.to(batch.dtype).lerp_(batch, factor)
            if wide is not buffer:
                buffer.copy_(wide)

    def sharing_ranks(self) -> tuple[int, ...] | None:
        """The ranks that share statistics with this one; None: all. Without `images`."""
        return dist.node_ranks() if self.process_group == "node" else self.process_group

    def _group(self) -> dist.Group | None:
        return dist.group_of(self.sharing_ranks())

    def _sharing(self, num_images: int) -> Sharing:
        if self.images is None:
            return Sharing(self._group())
        groups = groups_here(self.images, num_images)
        return Sharing(dist.group_of(groups.ranks), groups)


class SyncBatchNorm1d(SyncBatchNorm):
    """SyncBatchNorm for (N, C) and (N, C, L)."""

    _dims = (2, 3)


class SyncBatchNorm2d(SyncBatchNorm):
    """SyncBatchNorm for (N, C, H, W)."""

    _dims = (4,)


class SyncBatchNorm3d(SyncBatchNorm):
    """SyncBatchNorm for (N, C, D, H, W)."""

    _dims = (5,)


def synchronized(pairs: Sequence[tuple[Tensor, SyncBatchNorm]]) -> list[Tensor]:
    """Each tensor through its own layer, with one all_reduce for all layers (collective).

    The layers are in training, with the same ranks and `images`. Their running statistics follow.

    Raises:
        ValueError: with `images`, the tensors have different numbers of images.
    """
    for x, layer in pairs:
        layer._check_input_dim(x)
    inputs = [NormInput(x, layer.weight, layer.bias, layer.eps) for x, layer in pairs]
    sharing, *others = (layer._sharing(len(x)) for x, layer in pairs)
    if any(other != sharing for other in others):
        raise ValueError(f"different numbers of images: {[len(x) for x, _ in pairs]}")
    outputs, moments = sync_batch_norms(inputs, sharing)
    for (_, layer), by_group in zip(pairs, moments, strict=True):
        layer._track(by_group, sharing.groups)
    return outputs


def by_kernels(
    pairs: Sequence[tuple[Tensor, SyncBatchNorm]], activation: str, **options: Any
) -> list[Tensor]:
    """Layers that `fit_kernels`, by Triton's kernels, with the activation after each (collective).

    options: those of `fused_norms`; with joined=True there is one output, of the sum of two layers.
    """
    for x, layer in pairs:
        layer._check_input_dim(x)
    inputs = [NormInput(x, layer.weight, layer.bias, layer.eps) for x, layer in pairs]
    ys, moments = fused.fused_norms(inputs, pairs[0][1]._group(), activation, **options)
    for (_, layer), batch in zip(pairs, moments, strict=True):
        layer._track([batch], None)  # `fit_kernels` takes no groups of images
    return ys


def fit_kernels(pairs: Sequence[tuple[Tensor, SyncBatchNorm]]) -> bool:
    """Whether `by_kernels` can compute these layers, which have the same ranks and `images`."""
    # On CUDA, if type and memory format fit.
    if not all(fused.takes(x) for x, _ in pairs):
        return False
    _, layer = pairs[0]
    # Groups of images are cut apart, and virtual ranks keep waiting tensors in the host's memory.
    if layer.images is not None or virtual_ranks.current() is not None:
        return False
    # One rank with one value a channel, or with none, is a case of its own.
    return dist.group_size(layer._group()) > 1 or all(x.numel() > x.shape[1] for x, _ in pairs)


def as_ranks(group: Any) -> tuple[int, ...] | Literal["node"] | None:
    """`process_group` as a layer stores it.

    Raises:
        ValueError: it is no group, or a process group without this process.
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
