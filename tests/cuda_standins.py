"""The CUDA kernels that a batch norm calls, by their documented formulas in float64 on a CPU.

They refuse what the kernels refuse or read wrongly: other dtypes and layouts than the templates of
torch (ATen/native/cuda/Normalization.cuh) are written for. Each counts how often it was called.
"""

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import torch

from segtrain.norm import cuda_kernels

calls = Counter()


def _columns(x):
    """The values (C, N...) in float64."""
    return x.double().transpose(0, 1).reshape(x.shape[1], -1)


def _along(x, vector):
    return vector.double().view(-1, *[1] * (x.dim() - 2))


def _accumulates_in(x):
    """The dtype of statistics in the kernels."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check(x, *vectors, grad=None, dtype=None):
    assert x.numel() > 0  # a grid without blocks is an error of CUDA
    for vector in vectors:
        assert vector.shape == (x.shape[1],)
        assert vector.dtype == (dtype or _accumulates_in(x))
        assert vector.is_contiguous()
    if grad is not None:
        assert (grad.dtype, grad.shape) == (x.dtype, x.shape)
        # They are read side by side in memory.
        pairs = zip(grad.stride(), x.stride(), x.shape, strict=True)
        assert all(a == b for a, b, size in pairs if size > 1)


def _parameters(x, *parameters):
    for parameter in parameters:
        if parameter is not None:
            _check(x, parameter)


def batch_norm_update_stats(x, running_mean, running_var, momentum):
    calls["statistics"] += 1
    assert running_mean is running_var is None
    _check(x)
    var, mean = torch.var_mean(_columns(x), dim=1, correction=0)
    return mean.to(_accumulates_in(x)), var.to(_accumulates_in(x))


def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    calls["elementwise"] += 1
    _check(x, mean, invstd)
    _parameters(x, weight, bias)
    y = (x.double() - _along(x, mean)) * _along(x, invstd)
    y = y if weight is None else y * _along(x, weight)
    y = y if bias is None else y + _along(x, bias)
    return torch.empty_like(x).copy_(y)


def batch_norm_backward_reduce(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
    calls["sums"] += 1
    _check(x, mean, invstd, grad=grad)
    _parameters(x, weight)
    assert weight is not None or not (weight_g or bias_g)  # they take its options
    dy = _columns(grad)
    total, dot = dy.sum(1), (dy * (_columns(x) - mean.double().view(-1, 1))).sum(1)
    dtype = _accumulates_in(x)
    grad_weight = (dot * invstd).to(weight.dtype) if weight_g else None
    grad_bias = total.to(weight.dtype) if bias_g else None
    return total.to(dtype), dot.to(dtype), grad_weight, grad_bias


def batch_norm_backward_elemt(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    calls["gradient"] += 1
    _check(x, mean, invstd, sum_dy, sum_dy_xmu, grad=grad)
    _parameters(x, weight)
    assert count.dtype == torch.int32
    norm = 1 / count.sum().double()
    slope = invstd.double().square() * sum_dy_xmu.double() * norm
    scale = invstd.double() if weight is None else invstd.double() * weight.double()
    dx = grad.double() - _along(x, sum_dy.double() * norm)
    dx = dx - (x.double() - _along(x, mean)) * _along(x, slope)
    return torch.empty_like(x).copy_(dx * _along(x, scale))


def _takes(x):
    calls["asked"] += 1
    return True


_STAND_INS = [
    batch_norm_update_stats,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
]


@contextmanager
def cuda_arithmetic():
    """Inside, batch norms of CPU tensors compute as on CUDA."""
    patches = [mock.patch.object(torch, f.__name__, f) for f in _STAND_INS]
    patches.append(mock.patch.object(cuda_kernels, "takes", _takes))
    calls.clear()
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def as_on_cuda(function, *args, **kwargs):
    """What `function` returns if batch norms compute as on CUDA."""
    with cuda_arithmetic():
        result = function(*args, **kwargs)
    assert calls, "no batch norm computed as on CUDA"
    return result


def ranks_as_on_cuda(run_ranks):
    """`run_ranks` whose ranks compute as on CUDA."""

    def run(world_size, function, *args, **kwargs):
        return run_ranks(world_size, as_on_cuda, function, *args, **kwargs)

    return run
