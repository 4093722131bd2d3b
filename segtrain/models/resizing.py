"""Bilinear resizing with a backward pass of its own: bits that never change, and speed.

torch's own backward pass on CUDA adds with atomics, slowly and in an order that changes from run to
run; ours is a kernel that gathers. Its forward pass of many channels takes five times as long as
the bytes need, so that is a kernel too. With `torch.use_deterministic_algorithms` F.interpolate
takes another, slow way, with other bits in the forward pass. On a CPU it goes value by value,
unless channels lie side by side and are many. Along each axis resizing is a product with a matrix
of two values a row, so where there is no kernel the gradient is two products with the transposed
ones.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain import kernels
from segtrain.models.blocks import is_channels_last


def resize(x: Tensor, size: Sequence[int], *, align_corners: bool) -> Tensor:
    """`x` (N, C, h, w) interpolated bilinearly to `size` (H, W), in the dtype of `x`.

    Bit for bit F.interpolate, but to rounding with a kernel. Its gradient is the same in every run
    on CPUs, with a kernel, and where deterministic algorithms are asked for.
    """
    height, width = size
    if _takes_kernel(x, size) or _has_own_gradient(x):
        y = _Resize.apply(x, height, width, align_corners)
    else:
        y = F.interpolate(x, size=(height, width), mode="bilinear", align_corners=align_corners)
    # Autocast resizes in float32; what follows would be concatenated in float32.
    return y.to(x.dtype)


def enlarge(x: Tensor, size: Sequence[int], stride: int | None, *, align_corners: bool) -> Tensor:
    """`x` (N, C, h, w), which a network has made of something of `size` (H, W), at that size.

    stride: of the network, so that h = ceil(H / stride). Each value is placed over `stride` pixels
        a side, and what lies beyond the border is cut off. None: `x` is stretched over the size,
        which moves the last values by stride * h - H pixels.

    Raises:
        ValueError: h or w is that of another stride.
    """
    if stride is None:
        return resize(x, size, align_corners=align_corners)
    whole = [stride * side for side in x.shape[-2:]]
    y = resize(x, whole, align_corners=False)
    if torch.compiler.is_exporting():
        # After a slice the graph would refuse sizes that need none. This is a copy.
        return F.pad(y, (0, size[1] - whole[1], 0, size[0] - whole[0]))
    if not torch.jit.is_tracing():
        if not all(0 <= w - s < stride for w, s in zip(whole, size, strict=True)):
            shapes = "x".join(map(str, x.shape[-2:])), "x".join(map(str, size))
            raise ValueError("{} values for {}: the stride is not {}".format(*shapes, stride))
        if whole == [*size]:
            return y  # the gradient of a slice would be a copy
    return y[..., : size[0], : size[1]]


# The kernel multiplies two sides in 32 bits.
_LONGEST_SIDE = 23_000
# The products take time in proportion to the columns of the input, torch's way does not.
_MOST_COLUMNS = 256


def _has_own_gradient(x: Tensor) -> bool:
    """Where no kernel computes."""
    return _is_faster(x) if x.is_cpu else torch.are_deterministic_algorithms_enabled()


def _takes_kernel(x: Tensor, size: Sequence[int]) -> bool:
    """Whether `x` is resized to `size` by kernels, or its gradient is."""
    return kernels.takes(x) and max(*x.shape[-2:], *size) <= _LONGEST_SIDE


def _is_faster(x: Tensor) -> bool:
    """Whether a gradient of `x`, on a CPU, is going to be asked for, and ours is faster."""
    if not (torch.is_grad_enabled() and x.requires_grad) or x.dtype == torch.float64:
        return False
    # They know what to make of torch's operations.
    transformed = torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling()
    return x.shape[-1] <= _MOST_COLUMNS and not transformed and not torch.jit.is_tracing()


class _Resize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, height: int, width: int, align_corners: bool) -> Tensor:
        ctx.shape, ctx.dtype, ctx.align_corners = x.shape, x.dtype, align_corners
        ctx.takes_kernel = _takes_kernel(x, (height, width))
        if ctx.takes_kernel and is_channels_last(x):
            from segtrain.kernels import bilinear  # imports Triton

            return bilinear.resized(x, (height, width), align_corners=align_corners)
        # Autocast would have half precision resized in float32, twice the bytes for the same bits.
        with torch.autocast(x.device.type, enabled=False) if ctx.takes_kernel else nullcontext():
            # Not F.interpolate, which would choose its deterministic way.
            return torch._C._nn.upsample_bilinear2d(x, (height, width), align_corners, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        size, align_corners = ctx.shape[-2:], ctx.align_corners
        if ctx.takes_kernel:
            return _gathered(grad, size, ctx.dtype, align_corners=align_corners), None, None, None
        if grad.is_cpu and grad.stride(1) == 1:
            # torch knows a fast way for whole pixels, which a slice of channels does not have.
            whole = grad.contiguous(memory_format=torch.channels_last)
            grad_x = torch.ops.aten.upsample_bilinear2d_backward(
                whole, grad.shape[-2:], ctx.shape, align_corners
            )
        else:
            # On a device neither autocast nor TF32 shortens the numbers of float64.
            wide = torch.promote_types(grad.dtype, torch.float32) if grad.is_cpu else torch.float64
            with torch.autocast(grad.device.type, enabled=False):
                grad_x = resize_gradient(grad.to(wide), size, align_corners=align_corners)
        return grad_x.to(ctx.dtype), None, None, None


def _gathered(
    grad: Tensor, size: Sequence[int], dtype: torch.dtype, *, align_corners: bool
) -> Tensor:
    from segtrain.kernels import bilinear  # imports Triton

    if torch.is_grad_enabled() and grad.requires_grad:  # it is linear: nothing else asks for more
        return resize_gradient(grad.double(), size, align_corners=align_corners).to(dtype)
    return bilinear.resize_gradient(grad, size, dtype, align_corners=align_corners)


def resize_gradient(grad: Tensor, size: Sequence[int], *, align_corners: bool) -> Tensor:
    """The gradient (N, C, h, w) of the input of `resize`, of `size` (h, w), like `grad`.

    grad: of its output, (N, C, H, W).
    """
    rows, columns = (
        _weights(n_out, n_in, grad.device, align_corners=align_corners).to(grad.dtype)
        for n_out, n_in in zip(grad.shape[-2:], size, strict=True)
    )
    return rows.mT @ (grad.contiguous() @ columns)


def _weights(out: int, size: int, device: torch.device, *, align_corners: bool) -> Tensor:
    """(out, size) float64: how much each value along an axis counts in each resized one."""
    position = torch.arange(out, dtype=torch.float64, device=device)
    if align_corners:
        position = position * ((size - 1) / (out - 1) if out > 1 else 0.0)
    else:
        position = ((position + 0.5) * (size / out) - 0.5).clamp(0, size - 1)
    source = torch.arange(size, dtype=torch.float64, device=device)
    return (1 - (position.unsqueeze(1) - source).abs()).clamp(min=0)
