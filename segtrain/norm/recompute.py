"""Batch norm, ReLU and the convolution after them as one function that keeps one tensor.

Autograd keeps the input of the batch norm for its backward pass and the output of the ReLU for that
of the convolution. The second follows from the first and the statistics at hand: computing it again
costs one elementwise pass and no communication (as In-Place ABN does, arXiv:1712.02616, but with an
exact ReLU and nothing inverted).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from segtrain.distributed import collectives as dist
from segtrain.distributed.collectives import ProcessGroup
from segtrain.distributed.offload import offload, reload
from segtrain.norm.functional import (
    Moments,
    dense,
    dense_like,
    global_moments,
)
from segtrain.norm.kernels import backward_sums, input_gradient, normalized
from segtrain.norm.sync import SyncBatchNorm, has_hooks


def norm_relu_conv(x: Tensor, norm: nn.Module, conv: nn.Conv2d) -> Tensor:
    """conv(relu(norm(x))), keeping `x` alone for the backward pass (collective in training).

    Outputs, gradients and running statistics are those of the three modules; differentiable once.
    Layers that are not synchronized batch norms in training run as they are, and so do those with
    hooks or `double_backward`. Convolutions have no bias.
    """
    if not (isinstance(norm, SyncBatchNorm) and norm.shares_calls()) or has_hooks(conv):
        return conv(F.relu(norm(x), inplace=True))
    norm._check_input_dim(x)
    shared = norm._sharing_size() > 1
    group = norm._group() if shared else None
    y, *moments = _NormReLUConv.apply(
        x, norm.weight, norm.bias, conv.weight, norm.eps, shared, group, _geometry(conv)
    )
    norm._track(x, Moments(*moments), group)
    return y


def _geometry(conv: nn.Conv2d) -> tuple[Any, ...]:
    assert conv.bias is None
    assert conv.padding_mode == "zeros"
    return conv.stride, conv.padding, conv.dilation, conv.groups


class _NormReLUConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        kernel: Tensor,
        eps: float,
        shared: bool,
        group: ProcessGroup | None,
        geometry: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        x = dense(x)
        (moments,) = global_moments([x], group, shared=shared)
        ctx.eps, ctx.shared, ctx.group, ctx.geometry = eps, shared, group, geometry
        device = x.device.type
        ctx.compute_dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else kernel.dtype
        )
        ctx.save_for_backward(x, weight, bias, kernel, *moments)
        ctx.mark_non_differentiable(*moments)
        z = _activated(x, weight, bias, moments, eps)
        stride, padding, dilation, groups = geometry
        y = F.conv2d(
            z.to(ctx.compute_dtype),
            kernel.to(ctx.compute_dtype),
            None,
            stride,
            padding,
            dilation,
            groups,
        )
        return (y, *moments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        x, weight, bias, kernel, *statistics = ctx.saved_tensors
        moments = Moments(*statistics)
        stride, padding, dilation, groups = ctx.geometry
        z = _activated(x, weight, bias, moments, ctx.eps)
        grad_z, grad_kernel, _ = torch.ops.aten.convolution_backward(
            grad.to(ctx.compute_dtype),
            z.to(ctx.compute_dtype),
            kernel.to(ctx.compute_dtype),
            None,
            stride,
            padding,
            dilation,
            False,
            [0] * len(stride),
            groups,
            [True, ctx.needs_input_grad[3], False],
        )
        grad_z = dense_like(grad_z.to(x.dtype), x).masked_fill_(z <= 0, 0)
        mean, var, count = moments
        inv_std = (var + ctx.eps).rsqrt_()
        local = backward_sums(grad_z, x, mean, inv_std)
        totals = local.to(torch.float64, copy=True)
        parked = offload(x)
        del x, z
        if ctx.shared:
            totals = dist.all_reduce_sum(totals, ctx.group)
        grad_x = None
        if ctx.needs_input_grad[0]:
            x = reload(parked)
            means = (totals / count.clamp(min=1)).to(mean.dtype)
            grad_x = input_gradient(grad_z, x, weight, mean, inv_std, means)
        total, dot = local.chunk(2)
        return (
            grad_x,
            dot.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            total.to(bias.dtype) if ctx.needs_input_grad[2] else None,
            None if grad_kernel is None else grad_kernel.to(kernel.dtype),
            None,
            None,
            None,
            None,
        )


def _activated(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, moments: Moments, eps: float
) -> Tensor:
    mean, var, _ = moments
    return F.relu_(normalized(x, weight, bias, mean, var, eps))
