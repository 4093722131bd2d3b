"""Synchronized batch norm that can be differentiated any number of times, for gradient penalties.

Autograd does the backward pass, through an all_reduce whose derivative is an all_reduce: exact, but
slower than functional.py, and autograd keeps every intermediate tensor.
"""

from typing import Any

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.norm.functional import Moments, packed_moments, unpacked_moments


class _AllSum(torch.autograd.Function):
    """The sum over the ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.Group | None) -> Tensor:
        ctx.group = group
        return dist.all_reduce_sum(tensor.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllSum.apply(grad, ctx.group), None


def composite_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    group: dist.Group | None = None,
) -> tuple[Tensor, Moments]:
    """As `sync_batch_norm`, differentiable any number of times (collective).

    Every backward pass through it is collective too: all ranks must take the same derivatives in
    the same order.
    """
    channels = x.shape[1]
    over = [dim for dim in range(x.dim()) if dim != 1]
    shape = (1, channels, *[1] * (x.dim() - 2))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    num_values = x.numel() // channels
    divisor = max(num_values, 1)  # a rank without values has sums of 0

    mean = wide.sum(over) / divisor
    var = (wide - mean.view(shape)).square().sum(over) / divisor
    total = _AllSum.apply(packed_moments(mean, var, num_values), group)
    mean64, var64, count = unpacked_moments(total)
    moments = Moments(mean64.to(wide.dtype), var64.to(wide.dtype), count)
    y = (wide - moments.mean.view(shape)) * (moments.var + eps).rsqrt().view(shape)
    if weight is not None:
        y = y * weight.to(wide.dtype).view(shape)
    if bias is not None:
        y = y + bias.to(wide.dtype).view(shape)
    return y.to(x.dtype), Moments(*(t.detach() for t in moments))
