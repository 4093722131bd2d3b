"""Synchronized batch norm by each published way of communicating, over one compute backend.

Local statistics, normalization, backward sums and the gradient of x are segtrain's own functions in
all of them, as is the update of the running statistics: what differs is what the ranks send. A name
counts the collectives of one layer, forward + backward. The scheme
that takes a plain mean over the ranks (2+2) is exact only where all hold the same number of values.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from segtrain.norm import SyncBatchNorm2d
from segtrain.norm.functional import Moments, NormInput, dense_like
from segtrain.norm.kernels import (
    backward_sums,
    input_gradient,
    local_moments,
    normalized,
    packed,
    unpacked_moments,
)


class Scheme(NamedTuple):
    """One way to share statistics.

    used_by: projects that communicate like this.
    moments: this rank's mean (C,), biased variance (C,) and number of values, to those of all
        ranks (collective).
    means: this rank's sum(dy) and sum(dy xhat), (2 C,), its number of values and that of all ranks
        (), to both means over all values, (2 C,) (collective).
    sends_float64: whether `moments` gets float64; otherwise the type of the statistics.
    """

    used_by: str
    moments: Callable[[Tensor, Tensor, int], Moments]
    means: Callable[[Tensor, int, Tensor], Tensor]
    sends_float64: bool = False


class SchemeBatchNorm2d(SyncBatchNorm2d):
    """Batch norm over all ranks in training, by a scheme; also in a group of one rank."""

    def __init__(self, num_features: int, scheme: Scheme) -> None:
        super().__init__(num_features)
        self.scheme = scheme

    def forward(self, input: Tensor) -> Tensor:
        y, *moments = _SchemeFunction.apply(input, self.weight, self.bias, self.eps, self.scheme)
        self._track([Moments(*moments)], None)
        return y


class _SchemeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, scheme: Scheme
    ) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean, var = local_moments(x)
        if not scheme.sends_float64:
            mean, var = mean.to(dtype), var.to(dtype)
        mean, var, count = scheme.moments(mean, var, x.numel() // x.shape[1])
        mean, var = mean.to(dtype), var.to(dtype)
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.eps, ctx.scheme = eps, scheme
        ctx.mark_non_differentiable(mean, var, count)
        inv_std = (var + eps).rsqrt_()
        return normalized(NormInput(x, weight, bias, eps), mean, var, inv_std), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, count = ctx.saved_tensors
        grad = dense_like(grad, x)
        inv_std = (var + ctx.eps).rsqrt_()
        total, dot = backward_sums(grad, x, weight, mean, inv_std).parts
        sums = torch.cat([total, dot])
        means = ctx.scheme.means(sums, x.numel() // x.shape[1], count).to(mean.dtype)
        one = means.new_ones(())  # `means` are divided by the count already
        grad_x = input_gradient(grad, x, weight, mean, inv_std, means, one)
        return grad_x, dot, total, None, None


def _packed_float64(mean: Tensor, var: Tensor, num_values: int) -> Moments:
    total = packed(mean, var, num_values)
    torch_dist.all_reduce(total)
    return Moments(*unpacked_moments(total))


def _one_float64(sums: Tensor, num_values: int, count: Tensor) -> Tensor:
    total = sums.to(torch.float64, copy=True)
    torch_dist.all_reduce(total)
    return total / count


def _gathered(mean: Tensor, var: Tensor, num_values: int) -> Moments:
    """Every rank's [mean, variance, n], merged by Chan's formula."""
    part = torch.cat([mean, var, mean.new_tensor([num_values])])
    parts = part.new_empty(torch_dist.get_world_size() * len(part))
    torch_dist.all_gather_into_tensor(parts, part)
    means, variances, counts = parts.view(-1, len(part)).split([len(mean), len(mean), 1], dim=1)
    count = counts.sum()
    merged = (means * counts).sum(0) / count
    spread = variances + (means - merged).square()
    return Moments(merged, (spread * counts).sum(0) / count, count)


def _one_sum(sums: Tensor, num_values: int, count: Tensor) -> Tensor:
    total = sums.clone()
    torch_dist.all_reduce(total)
    return total / count


def _mean_then_variance(mean: Tensor, var: Tensor, num_values: int) -> Moments:
    """The mean over ranks, then that of the variances about it."""
    ones = mean.new_ones(1)
    total = torch.cat([mean, ones])
    torch_dist.all_reduce(total)
    ranks = total[-1]
    merged = total[:-1] / ranks
    spread = var + (mean - merged).square()
    torch_dist.all_reduce(spread)
    return Moments(merged, spread / ranks, ranks * num_values)


def _two_sums(sums: Tensor, num_values: int, count: Tensor) -> Tensor:
    parts = [part.clone() for part in sums.chunk(2)]
    for part in parts:
        torch_dist.all_reduce(part)
    return torch.cat(parts) / count


SCHEMES = {
    "1+1 all_reduce": Scheme(
        "segtrain: one float64 vector", _packed_float64, _one_float64, sends_float64=True
    ),
    "1+1 all_gather": Scheme("torch.nn.SyncBatchNorm, NVIDIA apex", _gathered, _one_sum),
    "2+2": Scheme("mmcv; tensorpack and torch_xla likewise", _mean_then_variance, _two_sums),
}
"""By the number of collectives a layer, forward + backward."""
