"""Bilinear resizing, channels-last, and its gradient by gathering: no atomics, any ratio.

The gradient goes along one axis after the other. A program owns a part of one row of the result,
and adds the rows that have drawn from it, times their weights. Positions are exact fractions of
integers, so weights are right to the rounding of float32 at any size.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from segtrain.kernels import LAUNCH

# The most rows that are added at a time, and the most columns of them.
_ROWS, _COLUMNS = 8, 512
# Values of a tile of the result, and the most channels of it.
_VALUES, _CHANNELS = 2048, 128


@triton.jit
def _source(y, length, size, ALIGNED: tl.constexpr):
    """Of a place on an axis of `length` that `size` values are resized to: the value before it, and
    the weight of the one after that."""
    if ALIGNED:
        num, den = y * (size - 1), tl.maximum(length - 1, 1)
    else:
        # Nothing negative is divided, which would round toward zero.
        num, den = tl.maximum((2 * y + 1) * size - length, 0), 2 * length
    low = num // den
    return low, (num - low * den).to(tl.float32) / den.to(tl.float32)


@triton.jit(do_not_specialize=["h", "w", "H", "W"])
def _resize_kernel(
    x, y, h, w, H, W, channels,
    ALIGNED: tl.constexpr, BY_EIGHT: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """(N, h, w, C) to (N, H, W, C)."""
    if BY_EIGHT:
        channels = channels // 8 * 8  # as in norm.py
    row, n = tl.program_id(0), tl.program_id(0) // H
    top, down = _source(row % H, H, h, ALIGNED)
    column = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    left, across = _source(column, W, w, ALIGNED)
    right = tl.minimum(left + 1, w - 1)
    c = (tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    mask = (column < W)[:, None] & (c < channels)
    across = across[:, None]
    above = x + (n.to(tl.int64) * h + top) * w * channels
    below = x + (n.to(tl.int64) * h + tl.minimum(top + 1, h - 1)) * w * channels
    left, right = left[:, None] * channels + c, right[:, None] * channels + c
    a = tl.load(above + left, mask=mask, other=0.0).to(tl.float32) * (1.0 - across)
    a += tl.load(above + right, mask=mask, other=0.0).to(tl.float32) * across
    b = tl.load(below + left, mask=mask, other=0.0).to(tl.float32) * (1.0 - across)
    b += tl.load(below + right, mask=mask, other=0.0).to(tl.float32) * across
    at = y + row.to(tl.int64) * W * channels + column[:, None] * channels + c
    tl.store(at, (a * (1.0 - down) + b * down).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["length", "size", "blocks"])
def _axis_kernel(
    grad,
    out,
    length,
    size,
    width,
    blocks,
    ALIGNED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """(A, length, width) to (A, size, width)."""
    line = tl.program_id(0) // blocks  # a * size + i
    a = line // size
    i = line % size
    column = tl.program_id(0) % blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = column < width
    # Of the rows of the resized axis those within 1 of i count.
    if ALIGNED:
        den = tl.maximum(length - 1, 1)
        gaps = tl.maximum(size - 1, 1)
        first = tl.where(i > 0, tl.maximum(i - 1, 0) * den // gaps + 1, 0)
        last = tl.where(
            i < size - 1, tl.minimum(((i + 1) * den + gaps - 1) // gaps, length), length
        )
    else:
        first = tl.maximum((2 * i - 1) * length + size, 0) // (2 * size)
        last = tl.minimum(((2 * i + 3) * length + size - 1) // (2 * size), length)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    grad += a.to(tl.int64) * length * width
    for start in range(first, last, BLOCK_ROWS):
        y = start + tl.arange(0, BLOCK_ROWS)
        low, share = _source(y, length, size, ALIGNED)
        high = tl.minimum(low + 1, size - 1)
        weight = tl.where(low == i, 1.0 - share, 0.0) + tl.where(high == i, share, 0.0)
        mask = (y < last)[:, None] & inside[None, :]
        at = y[:, None].to(tl.int64) * width + column[None, :]
        values = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(y < last, weight, 0.0)[:, None] * values
    at = out + line.to(tl.int64) * width + column
    tl.store(at, tl.sum(total, 0).to(out.dtype.element_ty), mask=inside)


def resized(x: Tensor, size: Sequence[int], *, align_corners: bool) -> Tensor:
    """`x` (N, C, h, w) interpolated bilinearly to `size` (H, W), channels-last, in its dtype.

    No side may be longer than 23,000: positions are products of two, in 32 bits.
    """
    pixels = x.permute(0, 2, 3, 1).contiguous()  # (N, h, w, C)
    n, h, w, c = pixels.shape
    out = pixels.new_empty(n, *size, c)
    if out.numel():
        block_c = min(max(triton.next_power_of_2(c), 8), _CHANNELS)
        block_x = _VALUES // block_c
        height, width = size
        _resize_kernel[(n * height, triton.cdiv(width, block_x), triton.cdiv(c, block_c))](
            pixels, out, h, w, height, width, c,
            ALIGNED=align_corners, BY_EIGHT=c % 8 == 0, BLOCK_X=block_x, BLOCK_C=block_c,
            num_warps=4, **LAUNCH,
        )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def resize_gradient(
    grad: Tensor, size: Sequence[int], dtype: torch.dtype, *, align_corners: bool
) -> Tensor:
    """The gradient (N, C, h, w) of what was resized bilinearly, channels-last, of `dtype`.

    grad: of the result, (N, C, H, W). No side may be longer than 23,000, as in `resized`.
    size: (h, w).
    """
    pixels = grad.permute(0, 2, 3, 1).contiguous()  # (N, H, W, C)
    n, height, width, c = pixels.shape
    h, w = size
    rows = pixels.view(n, height, width * c)
    rows = _along_axis(rows, h, torch.float32, align_corners=align_corners)
    both = _along_axis(rows.view(n * h, width, c), w, dtype, align_corners=align_corners)
    return both.view(n, h, w, c).permute(0, 3, 1, 2)


def _along_axis(grad: Tensor, size: int, dtype: torch.dtype, *, align_corners: bool) -> Tensor:
    """(A, length, width) to (A, size, width) of `dtype`; both contiguous."""
    a, length, width = grad.shape
    out = grad.new_empty(a, size, width, dtype=dtype)
    if out.numel() == 0 or grad.numel() == 0:
        return out.zero_()
    support = triton.next_power_of_2(triton.cdiv(2 * length, size))
    columns = min(_COLUMNS, max(16, triton.next_power_of_2(width)))
    # A narrow row leaves threads for more of them.
    rows = min(support, _ROWS * _COLUMNS // columns, 32)
    blocks = triton.cdiv(width, columns)
    _axis_kernel[(a * size * blocks,)](
        grad,
        out,
        length,
        size,
        width,
        blocks,
        ALIGNED=align_corners,
        BLOCK_ROWS=rows,
        BLOCK_COLUMNS=columns,
        num_warps=max(1, min(4, rows * columns // 256)),
        **LAUNCH,
    )
    return out
