"""The arithmetic of a layer on CUDA, in few kernels: 10 forward, 6 backward, without collectives.

Launching a kernel takes the host some microseconds, however small the work, and a layer has much
small work on vectors of one value per channel. The input itself is read and written 3 + 5 times, by
the kernels of torch's own synchronized batch norm; they are in ATen/native/cuda/Normalization.cuh.

Here float32 vectors meet float64 ones: the kernels compute in float64 and round once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class NormInput(NamedTuple):
    """The input and the parameters of one layer."""

    x: Tensor  # (N, C, ...) floating point; N may differ between ranks and be 0
    weight: Tensor | None  # (C,)
    bias: Tensor | None  # (C,)
    eps: float


# Stands for no values in the place of a count. Sums of it vanish beside a real count, and it needs
# no kernel that protects a division.
_NO_VALUES = 1e-300


class LayerSums(NamedTuple):
    """This rank's sums for a backward pass, in the dtype of the statistics.

    parts: what the ranks add up, (2 C,) together.
    grad_weight, grad_bias: (C,).
    """

    parts: tuple[Tensor, ...]
    grad_weight: Tensor
    grad_bias: Tensor


def takes(x: Tensor) -> bool:
    """Whether the functions below are for `x`; a compiler fuses plain operations by itself."""
    return x.device.type == "cuda" and not torch.compiler.is_compiling()


def packed_moments(xs: Sequence[Tensor]) -> Tensor:
    """As in `kernels`."""
    one = constant([1.0], _wide(xs[0]), xs[0].device)
    pieces: list[Tensor] = []
    for x in xs:
        pieces += [*_local_moments(x), one]
    values = torch.cat(pieces)
    sizes = [2 * x.shape[1] + 1 for x in xs]
    whole = torch.empty_like(values, dtype=torch.float64)
    # Each vector is [mean, var, 1] of a layer; times the number of values it can be added up.
    for x, part, out in zip(
        xs, values.split_with_sizes(sizes), whole.split_with_sizes(sizes), strict=True
    ):
        channels = x.shape[1]
        num_values = x.numel() / channels or _NO_VALUES
        torch.mul(part, constant([num_values], torch.float64, x.device), out=out)
        # n var becomes n var + (n mean) mean.
        out[channels:-1].addcmul_(out[:channels], part[:channels])
    return whole


def _local_moments(x: Tensor) -> tuple[Tensor, ...]:
    """Mean and biased variance of this rank's values, (2 C,) in one or two tensors."""
    if x.numel() == 0:
        return (x.new_zeros(2 * x.shape[1], dtype=_wide(x)),)
    # Unlike the CPU's, this kernel returns float32 for narrow input.
    return torch.batch_norm_update_stats(x, None, None, 0.0)


def unpacked_moments(total: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """As in `kernels`."""
    count = total[-1]
    moments = total[:-1].view(2, -1) / count
    moments[1].addcmul_(moments[0], moments[0], value=-1)
    # Rounding can make the variance of a constant channel slightly negative.
    least = constant([-torch.inf, 0.0], torch.float64, total.device).view(2, 1)
    narrow = torch.empty_like(moments, dtype=dtype)
    mean, var = torch.maximum(moments, least, out=narrow)
    return mean, var, count


def normalized(layer: NormInput, mean: Tensor, var: Tensor, inv_std: Tensor) -> Tensor:
    """As in `kernels`."""
    x, weight, bias, eps = layer
    if x.numel() == 0:
        return torch.empty_like(x)
    weight = None if weight is None else weight.to(mean.dtype)
    bias = None if bias is None else bias.to(mean.dtype)
    return torch.batch_norm_elemt(x, weight, bias, mean, inv_std, eps)


def backward_sums(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inv_std: Tensor
) -> LayerSums:
    """The sums of dy and of dy (x - mean), and of this rank's gradients of the parameters."""
    if x.numel() == 0:
        zeros = torch.zeros_like(mean)
        return LayerSums((zeros, zeros), zeros, zeros)
    scale = None if weight is None else weight.to(mean.dtype)
    has_weight = weight is not None
    total, dot, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
        grad, x, mean, inv_std, scale, True, has_weight, has_weight
    )
    if not has_weight:
        grad_weight = grad_bias = total
    return LayerSums((total, dot), grad_weight, grad_bias)


def packed_sums(sums: Sequence[LayerSums]) -> Tensor:
    """As in `kernels`."""
    parts = [part for layer in sums for part in layer.parts]
    sizes = [part.numel() for part in parts]
    whole = parts[0].new_empty(sum(sizes), dtype=torch.float64)
    torch._foreach_copy_(whole.split_with_sizes(sizes), parts)
    return whole


def input_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    total: Tensor,
    count: Tensor,
) -> Tensor:
    """As in `kernels`."""
    if x.numel() == 0:
        return torch.empty_like(x)
    scale = None if weight is None else weight.to(mean.dtype)
    means = torch.div(total, count, out=torch.empty_like(total, dtype=mean.dtype))
    # The kernel would divide by an int32, which may be too small for the count of all ranks.
    divisor = constant([1.0], torch.int32, x.device)
    mean_grad, mean_dot = means.chunk(2)
    return torch.batch_norm_backward_elemt(
        grad, x, mean, inv_std, scale, mean_grad, mean_dot, divisor
    )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


_constants: dict[tuple[object, ...], Tensor] = {}
_MOST_CONSTANTS = 1024  # images of ever new sizes have ever new counts


def constant(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector that is made once, on the device: for a copy the host would wait."""
    key = (*values, dtype, device)
    if key not in _constants:
        made = torch.empty(len(values), dtype=dtype, device=device)
        for slot, value in zip(made.unbind(), values, strict=True):
            slot.fill_(value)
        # What is made while a graph is captured exists only in the graph, so it is not kept.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return made
        if len(_constants) >= _MOST_CONSTANTS:
            _constants.clear()
        _constants[key] = made
    return _constants[key]
