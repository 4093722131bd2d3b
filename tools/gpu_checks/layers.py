"""The layer alone, beside cuDNN's, torch's SyncBatchNorm and a prototype of torch's kernels."""

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from bench_sync_bn import TABLE_SHAPES, LocalBatchNorm2d, TorchSyncBatchNorm2d
from rounds import estimate, measure, ratios
from torch import Tensor, nn

from gpu_checks.findings import Findings
from gpu_checks.stepping import as_among_two, one_rank
from gpu_checks.watching import work_of
from segtrain.norm import SyncBatchNorm2d, untracked

LOCAL, OWN, TORCH, PROTOTYPE = "F.batch_norm", "segtrain", "torch's SyncBatchNorm", "prototype"
# What the issue of speed asks of a layer.
MOST_FORWARD, MOST_BACKWARD = 10, 8


class _Elementwise(torch.autograd.Function):
    """Synchronized batch norm by the CUDA kernels of torch, for one rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        mean, inv_std = torch.batch_norm_stats(x, eps)
        # In place of the moments of all ranks: what has to be sent costs the same.
        sums = torch.cat([mean, inv_std])
        torch_dist.all_reduce(sums)
        mean, inv_std = sums.chunk(2)
        ctx.save_for_backward(x, weight, mean, inv_std)
        return torch.batch_norm_elemt(x, weight, bias, mean, inv_std, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inv_std = ctx.saved_tensors
        needed = (True, True, True)
        sum_dy, sum_dy_xmu, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            grad, x, mean, inv_std, weight, *needed
        )
        sums = torch.cat([sum_dy, sum_dy_xmu])
        torch_dist.all_reduce(sums)
        sum_dy, sum_dy_xmu = sums.chunk(2)
        count = torch.full((1,), x.numel() // x.shape[1], dtype=torch.int32, device=x.device)
        grad_x = torch.batch_norm_backward_elemt(
            grad, x, mean, inv_std, weight, sum_dy, sum_dy_xmu, count
        )
        return grad_x, grad_weight, grad_bias, None


class ElementwiseBatchNorm2d(nn.BatchNorm2d):
    """The prototype as a layer; it tracks no statistics."""

    def forward(self, input: Tensor) -> Tensor:
        return _Elementwise.apply(input, self.weight, self.bias, self.eps)


def check(findings: Findings, device: torch.device, folder: Path) -> None:
    """Times all layers on the shapes of PSPNet-R50, in float32 and bfloat16."""
    is_cuda = device.type == "cuda"
    shapes = TABLE_SHAPES if is_cuda else ((2, 64, 23, 30), (2, 16, 6, 6))
    with one_rank(device):
        for dtype in (torch.float32, torch.bfloat16):
            for shape in shapes:
                _one_shape(findings, device, shape, dtype)
            if is_cuda:
                _prototype_is_right(findings, device, dtype)
                _kernels(findings, device, shapes[0], dtype)
    if not is_cuda:
        findings.needs_cuda(f"{TORCH} and {PROTOTYPE}; kernels of a layer")


def layers(channels: int, device: torch.device) -> dict[str, nn.Module]:
    """The contenders for tensors of so many channels."""
    kinds = {LOCAL: LocalBatchNorm2d, OWN: SyncBatchNorm2d}
    if device.type == "cuda":
        kinds |= {TORCH: TorchSyncBatchNorm2d, PROTOTYPE: ElementwiseBatchNorm2d}
    return {name: kind(channels).to(device).train() for name, kind in kinds.items()}


def _one_shape(
    findings: Findings, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, grad = _tensors(shape, dtype, device)
    calls = {
        name: partial(_both_ways, layer, x, grad)
        for name, layer in layers(shape[1], device).items()
    }
    times = measure(calls, device=device, rounds=8, block_ms=10, warmup=5)
    parts = []
    for name, values in times.items():
        ratio = estimate(ratios(values, times[LOCAL])).median
        parts.append(f"{name} {statistics.median(values):.3f} ({ratio:.2f})")
    what = f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}: ms, ratio"
    findings.measured(what, "; ".join(parts), times_ms=times)


def _both_ways(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    with as_among_two():
        return torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), grad)


def _prototype_is_right(findings: Findings, device: torch.device, dtype: torch.dtype) -> None:
    """Whether the figures are those of batch norm."""
    x, grad = _tensors((2, 64, 23, 30), dtype, device)
    kinds = layers(64, device)
    got, wanted = (_both_ways(kinds[name], x, grad) for name in (PROTOTYPE, LOCAL))
    error = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, wanted, strict=True)
    )
    atol = 1e-4 if dtype == torch.float32 else 2e-2
    what = f"prototype, {str(dtype).removeprefix('torch.')}: error of the gradients"
    findings.judged(what, error <= atol, f"{error:.1e}", f"at most {atol}", error=error)


def _kernels(
    findings: Findings, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """A line for each layer with the kernels and copies of both passes."""
    x, grad = _tensors(shape, dtype, device)
    for name, layer in layers(shape[1], device).items():
        forward, backward = count_passes(layer, x, grad)
        what = f"{name}, {str(dtype).removeprefix('torch.')}: kernels and copies forward, backward"
        found, figures = f"{forward}, {backward}", {"forward": forward, "backward": backward}
        if not forward:
            findings.not_measured(what, "the driver does not let torch count kernels")
        elif name == OWN:
            is_good = forward <= MOST_FORWARD and backward <= MOST_BACKWARD
            wanted = f"at most {MOST_FORWARD}, {MOST_BACKWARD}"
            findings.judged(what, is_good, found, wanted, **figures)
        else:
            findings.measured(what, found, **figures)


def count_passes(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[int, int]:
    """What the device does in the forward pass and in the backward pass.

    Running statistics, where segtrain's layer has them, are not counted: they are of a step.
    """
    outputs: list[Tensor] = []
    inputs = [x, *layer.parameters()]
    with as_among_two(), untracked():
        layer(x)  # makes what is made once
        forward = work_of(lambda: outputs.append(layer(x)))
        backward = work_of(lambda: torch.autograd.grad(outputs[0], inputs, grad))
    return sum(forward), sum(backward)


def _tensors(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, grad = (
        torch.randn(shape, device=device).to(dtype).to(memory_format=torch.channels_last)
        for _ in range(2)
    )
    return x.requires_grad_(), grad
