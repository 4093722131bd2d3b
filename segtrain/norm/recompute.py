"""Batch norm, ReLU and the convolution after them as one function that keeps one tensor, not two.

Autograd keeps the input of the batch norm and the output of the ReLU. Computing the output again
costs one elementwise pass and no communication (as in In-Place ABN, arXiv:1712.02616, but with an
exact ReLU and no inversion).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from segtrain.distributed import collectives as dist
from segtrain.norm.functional import (
    Moments,
    NormInput,
    dense_like,
    global_moments,
    norm_gradients,
    normalized_layer,
)
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
    layer = (x, norm.weight, norm.bias, norm.eps)
    y, *moments = _NormReLUConv.apply(*layer, conv.weight, shared, group, geometry)
    norm._track(x, Moments(*moments), group)
    return y


class _NormReLUConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        kernel: Tensor,
        shared: bool,
        group: dist.Group | None,
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
        z = F.relu_(normalized_layer(NormInput(x, weight, bias, eps), moments))
        y = F.conv2d(z.to(dtype), kernel.to(dtype), None, *geometry)
        return (y, *moments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        x, weight, bias, kernel, *statistics = ctx.saved_tensors
        moments = Moments(*statistics)
        layers = [NormInput(x, weight, bias, ctx.eps)]
        z = F.relu_(normalized_layer(layers[0], moments))
        stride, padding, dilation, groups = ctx.geometry
        grad, z_low, kernel_low = (t.to(ctx.compute_dtype) for t in (grad, z, kernel))
        outputs = [True, ctx.needs_input_grad[4], False]
        geometry = (stride, padding, dilation, False, [0] * len(stride), groups)
        grad_z, grad_kernel, _ = torch.ops.aten.convolution_backward(
            grad, z_low, kernel_low, None, *geometry, outputs
        )
        grad_z = dense_like(grad_z.to(x.dtype), x).masked_fill_(z <= 0, 0)
        del x, z, z_low
        grads = norm_gradients(
            layers, [grad_z], [moments], ctx.group, ctx.needs_input_grad[:3], shared=ctx.shared
        )
        grad_kernel = None if grad_kernel is None else grad_kernel.to(kernel.dtype)
        return *grads, None, grad_kernel, None, None, None
