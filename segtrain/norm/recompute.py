"""Batch norm, ReLU and the convolution after them as one function that keeps one tensor, not two.

Autograd keeps the input of the batch norm and the output of the ReLU for the backward pass. The
output follows from the input and the statistics: computing it again costs one elementwise pass and
no communication (as in In-Place ABN, arXiv:1712.02616, but with an exact ReLU and no inversion).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from segtrain.distributed import collectives as dist
from segtrain.distributed.collectives import ProcessGroup
from segtrain.distributed.offload import offload, reload
from segtrain.norm.functional import Moments, dense_like, global_moments
from segtrain.norm.kernels import backward_sums, input_gradient, normalized
from segtrain.norm.sync import SyncBatchNorm, has_hooks


def norm_relu_conv(x: Tensor, norm: nn.Module, conv: nn.Conv2d) -> Tensor:
    """conv(relu(norm(x))), keeping `x` alone for the backward pass (collective in training).

    Outputs, gradients and running statistics are those of the three modules; differentiable once.
    Other layers than synchronized batch norms in training run as they are, and so do those with
    hooks or `double_backward`. The convolution must have no bias.
    """
    if not (isinstance(norm, SyncBatchNorm) and norm.shares_calls()) or has_hooks(conv):
        return conv(F.relu(norm(x), inplace=True))
    norm._check_input_dim(x)
    assert conv.bias is None
    assert conv.padding_mode == "zeros"
    geometry = (conv.stride, conv.padding, conv.dilation, conv.groups)
    shared = norm._sharing_size() > 1
    group = norm._group() if shared else None
    y, *moments = _NormReLUConv.apply(
        x, norm.weight, norm.bias, conv.weight, norm.eps, shared, group, geometry
    )
    norm._track(x, Moments(*moments), group)
    return y


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
        x = dense_like(x, x)
        (moments,) = global_moments([x], group, shared=shared)
        ctx.eps, ctx.shared, ctx.group, ctx.geometry = eps, shared, group, geometry
        device, dtype = x.device.type, kernel.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        ctx.compute_dtype = dtype
        ctx.save_for_backward(x, weight, bias, kernel, *moments)
        ctx.mark_non_differentiable(*moments)
        z = _activated(x, weight, bias, moments, eps)
        y = F.conv2d(z.to(dtype), kernel.to(dtype), None, *geometry)
        return (y, *moments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        x, weight, bias, kernel, mean, var, count = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        z = _activated(x, weight, bias, Moments(mean, var, count), ctx.eps)
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
        grad_weight = dot.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = total.to(bias.dtype) if ctx.needs_input_grad[2] else None
        grad_kernel = None if grad_kernel is None else grad_kernel.to(kernel.dtype)
        return grad_x, grad_weight, grad_bias, grad_kernel, None, None, None, None


def _activated(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, moments: Moments, eps: float
) -> Tensor:
    return F.relu_(normalized(x, weight, bias, moments.mean, moments.var, eps))
