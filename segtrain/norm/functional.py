"""Batch norm over the pixels of several ranks: the arithmetic, without modules or buffers.

Forward. Each rank takes the mean m and the biased variance v of its own n values a channel with a
stable kernel and sends one float64 vector [n m, n (v + m^2), n]; one all_reduce later every rank
holds the moments of the whole batch. E[x^2] - E[x]^2 is safe here, and only here, because the sums
are in float64 and v was computed about the local mean: the error of the variance stays at float32
rounding for |mean| / std up to 1e4, where the same sums in float32 have lost every digit. A rank
without values sends zeros, which is exact, and different heights and widths need no special case.

Backward. With xhat = (x - mean) / std, S1 = sum(dy) and S2 = sum(dy xhat) over all ranks,

    dx = weight / std * (dy - S1 / n - xhat * S2 / n)

(Ioffe and Szegedy, arXiv:1502.03167, section 3), so one all_reduce of [S1, S2] is enough. The
gradients of weight and bias stay local sums, as every parameter's do under DistributedDataParallel.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from segtrain import dist
from segtrain.dist import ProcessGroup

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`x` normalized with the statistics of all ranks in `group`, and these (collective).

    Args:
        x: (N, C, ...) floating point; N may differ between ranks and be 0.
        weight, bias: (C,) or None.

    Returns:
        y like `x`, also in memory format; mean (C,) and biased variance (C,) in float32, or float64
        for float64 `x`; count () float64, the number of values a channel over all ranks. Mean and
        variance are 0 if it is 0. Only y is differentiable, once.
    """
    return _SyncBatchNorm.apply(x, weight, bias, eps, group)


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = _dense(x)
        mean, var, count = _global_moments(x, group)
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.eps, ctx.group = eps, group
        ctx.bias_dtype = bias.dtype if bias is not None else None
        ctx.mark_non_differentiable(mean, var, count)
        # A parameter may be float16 (module.half()); the kernels want it in the statistics' type.
        y = F.batch_norm(x, mean, var, _like(weight, mean), _like(bias, mean), eps=eps)
        return y, mean, var, count

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, var, count = ctx.saved_tensors
        grad = _dense_like(grad, x)
        local = _backward_sums(grad, x, mean, var, ctx.eps)  # (2, C)
        # All ranks reduce whenever this runs, even if this one needs no gradient of x: a rank that
        # stays away would leave the others waiting.
        total = dist.all_sum(local.to(torch.float64, copy=True), ctx.group)

        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = (total / count.clamp(min=1)).to(mean.dtype)
            grad_x = _input_gradient(grad, x, weight, mean, var, sums, ctx.eps)
        grad_weight = local[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = local[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None


def _global_moments(x: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (C,), biased variance (C,) and float64 count () over all ranks."""
    channels = x.shape[1]
    mean, var = local_moments(x)
    mean64, num_values = mean.double(), x.numel() // channels
    payload = torch.cat([mean64, var.double() + mean64 * mean64, mean64.new_ones(1)])
    payload = dist.all_sum(payload.mul_(num_values), group)
    count = payload[-1]
    first, second = (payload[:-1] / count.clamp(min=1)).view(2, channels)
    # Rounding can leave a constant channel a hair below zero.
    var64 = (second - first * first).clamp_(min=0)
    return first.to(mean.dtype), var64.to(mean.dtype), count.clone()


def local_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (C,) of this rank's values, float32 or wider; zeros without any."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    zeros = torch.zeros(2, x.shape[1], dtype=dtype, device=x.device)
    if x.numel() == 0:
        return zeros[0], zeros[1]
    # Running buffers of the wide type make the kernel return it too: for bfloat16 input alone it
    # would round the statistics to bfloat16.
    return torch.batch_norm_update_stats(x, zeros[0], zeros[1], 0.0)


def _backward_sums(grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """This rank's [sum(dy), sum(dy xhat)], (2, C), about the statistics of all ranks."""
    if x.numel() == 0:
        return torch.zeros(2, x.shape[1], dtype=mean.dtype, device=x.device)
    # In evaluation mode the gradients of weight and bias are these sums about given statistics.
    _, dot, total = torch.ops.aten.native_batch_norm_backward(
        grad, x, torch.ones_like(mean), mean, var, None, None, False, eps, [False, True, True]
    )
    return torch.stack([total, dot])


def _input_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    var: Tensor,
    sums: Tensor,
    eps: float,
) -> Tensor:
    """weight / std * (dy - sums[0] - xhat * sums[1]), like `x`."""
    inv_std = (var + eps).rsqrt()
    scale = inv_std if weight is None else inv_std * weight.to(inv_std.dtype)
    # The terms without dy are an affine function of x a channel, for which batch norm has a kernel.
    grad_x = F.batch_norm(
        x,
        mean,
        torch.ones_like(var),
        weight=-scale * inv_std * sums[1],
        bias=-scale * sums[0],
        eps=0.0,
    )
    return grad_x.addcmul_(grad, scale.view(-1, *[1] * (x.dim() - 2)))


def _like(parameter: Tensor | None, statistics: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.to(statistics.dtype)


def _dense(x: Tensor) -> Tensor:
    """`x` without gaps, in the memory format it has."""
    return x.contiguous(memory_format=_memory_format(x))


def _dense_like(grad: Tensor, x: Tensor) -> Tensor:
    """`grad` in the memory format of `x`: the kernels pair elements by their place in memory."""
    return grad.contiguous(memory_format=_memory_format(x))


def _memory_format(x: Tensor) -> torch.memory_format:
    # The stride of the channels tells, also for a slice, which is contiguous in neither format.
    if x.is_contiguous() or x.stride(1) != 1:
        return torch.contiguous_format
    return _CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
