"""The gradient of bilinear resizing, channels-last, by gathering: no atomics, any ratio.

Along one axis after the other. A program owns a part of one row of the result, and adds the rows
that have drawn from it, times their weights. Positions are exact fractions of integers, so weights
are right to the rounding of float32 at any size.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from segtrain.kernels import LAUNCH

# The most rows that are added at a time, and the most columns of them.
_ROWS, _COLUMNS = 8, 512


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
    # Row y of the resized axis lies at num / den; those within 1 of i count. Nothing negative is
    # divided, which would round toward zero.
    if ALIGNED:
        den = tl.maximum(length - 1, 1)
        gaps = tl.maximum(size - 1, 1)
        first = tl.where(i > 0, tl.maximum(i - 1, 0) * den // gaps + 1, 0)
        last = tl.where(
            i < size - 1, tl.minimum(((i + 1) * den + gaps - 1) // gaps, length), length
        )
    else:
        den = 2 * length
        first = tl.maximum((2 * i - 1) * length + size, 0) // (2 * size)
        last = tl.minimum(((2 * i + 3) * length + size - 1) // (2 * size), length)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    grad += a.to(tl.int64) * length * width
    for start in range(first, last, BLOCK_ROWS):
        y = start + tl.arange(0, BLOCK_ROWS)
        num = y * (size - 1) if ALIGNED else tl.maximum((2 * y + 1) * size - length, 0)
        low = num // den
        share = (num - low * den).to(tl.float32) / den.to(tl.float32)
        high = tl.minimum(low + 1, size - 1)
        weight = tl.where(low == i, 1.0 - share, 0.0) + tl.where(high == i, share, 0.0)
        mask = (y < last)[:, None] & inside[None, :]
        at = y[:, None].to(tl.int64) * width + column[None, :]
        values = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(y < last, weight, 0.0)[:, None] * values
    at = out + line.to(tl.int64) * width + column
    tl.store(at, tl.sum(total, 0).to(out.dtype.element_ty), mask=inside)


def resize_gradient(
    grad: Tensor, size: Sequence[int], dtype: torch.dtype, *, align_corners: bool
) -> Tensor:
    """The gradient (N, C, h, w) of what was resized bilinearly, channels-last, of `dtype`.

    grad: of the result, (N, C, H, W). No side may be longer than 23,000: positions are products of
        two, in 32 bits.
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
