"""Cross entropy of bilinearly enlarged logits, which never reach full size: forward and backward.

The output pixels between four neighbouring small pixels form a cell: stride x stride of them, with
the same weights in every cell. Cell i of an axis lies between the small pixels i and i + 1, both
clamped, for i = -1 .. h - 1. A program has one row of cells and some columns: each thread has one
column of output pixels, with all classes in registers. It interpolates along x once and steps down
the rows. In the backward pass each cell writes a partial gradient for each of its four corners, and
a second kernel adds the four that belong to a small pixel: no atomics, the same bits in every run.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from segtrain.autograd import differentiable_once
from segtrain.kernels import LAUNCH
from segtrain.types import IGNORE_INDEX

# A thread has all classes of a pixel in the forward pass.
_MOST_CLASSES = 255
_MOST_STRIDE = 128
# Values of a tile in the forward pass; output pixels of a row, and classes, in the backward pass,
# where 19 classes fit into one tile, and of more a wide one would leave no registers.
_TILE, _COLUMNS, _CLASSES, _OF_MANY_CLASSES = 4096, 128, 32, 16
_GATHERED = 512

_SIZES = ["h", "w", "H", "W", "stride_n", "stride_h", "stride_w"]
_IGNORE = tl.constexpr(IGNORE_INDEX)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _columns(
    block, w, W, SX: tl.constexpr, OFFX: tl.constexpr, FX: tl.constexpr,
    CELLS: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Of each thread: its column, whether that exists, the small columns beside it, the weight of
    the right one."""
    c = tl.arange(0, CELLS * SP)
    cell = block * CELLS + c // SP - 1
    t = c % SP
    column = cell * SX + OFFX + t
    inside = (t < SX) & (column >= 0) & (column < W)
    weight = (t.to(tl.float32) + FX) * (1.0 / SX)
    weight = tl.where(cell < 0, 1.0, tl.where(cell >= w - 1, 0.0, weight))
    left = tl.minimum(tl.maximum(cell, 0), w - 1)
    right = tl.minimum(cell + 1, w - 1)
    return column, inside, left, right, weight


@triton.jit
def _blended(row, left, right, places, weight, kept):
    """A row of logits, (columns, BLOCK_K), in units of log 2; places: of the classes of a pixel."""
    # The hint, which nothing else follows from where rows are not aligned, makes the columns the
    # dimension of the threads.
    a = tl.load(tl.max_contiguous((row + left)[:, None] + places, [2, 1]), mask=kept, other=0.0)
    b = tl.load(tl.max_contiguous((row + right)[:, None] + places, [2, 1]), mask=kept, other=0.0)
    a, b = a.to(tl.float32), b.to(tl.float32)
    return (a + weight[:, None] * (b - a)) * _LOG2E


@triton.jit
def _top_and_step(
    logits, n, i, left, right, fx, k, kept, h, stride_n, stride_k, stride_h, stride_w
):
    """The logits at the small row above a row of cells, and how far it is to the row below."""
    image = logits + n.to(tl.int64) * stride_n
    # Times 5, by 5: else Triton sees that classes lie side by side and gives each thread a class
    # instead of a pixel.
    places = k * 5 // 5 * stride_k
    left, right = left * stride_w, right * stride_w
    top = _blended(image + tl.maximum(i, 0) * stride_h, left, right, places, fx, kept)
    below = image + tl.minimum(i + 1, h - 1) * stride_h
    return top, _blended(below, left, right, places, fx, kept) - top


@triton.jit(do_not_specialize=_SIZES)
def _loss_kernel(
    logits, labels, table, losses, lse, parts,
    h, w, H, W, stride_n, stride_k, stride_h, stride_w,
    K: tl.constexpr, SY: tl.constexpr, OFFY: tl.constexpr, FY: tl.constexpr,
    SX: tl.constexpr, OFFX: tl.constexpr, FX: tl.constexpr,
    BY_PIXEL: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr,
    BLOCK_K: tl.constexpr, CELLS: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """lse: (N, H, W) float32, of each pixel the logarithm, base 2, of the sum of exponentials.

    parts: (programs, 2) float64, sums of the losses and weights; or else losses, (N, H, W) float32.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    n = row // (h + 1)
    i = row % (h + 1) - 1
    column, inside, left, right, fx = _columns(block, w, W, SX, OFFX, FX, CELLS, SP)
    k = tl.arange(0, BLOCK_K)[None, :]
    kept = k < K
    top, step = _top_and_step(
        logits, n, i, left, right, fx, k, kept, h, stride_n, stride_k, stride_h, stride_w
    )
    if SMOOTHED:
        share = tl.load(table + 2 * K + k, mask=kept, other=0.0)
    y0 = i * SY + OFFY
    loss_sum = tl.zeros([CELLS * SP], tl.float64)
    # A number of pixels is exact in float32.
    weight_sum = tl.zeros([CELLS * SP], tl.float64 if WEIGHTED else tl.float32)
    for t in range(tl.maximum(-y0, 0), tl.minimum(H - y0, SY)):
        fy = (t + FY) * (1.0 / SY)
        pixel = (n.to(tl.int64) * H + (y0 + t)) * W + column
        label = tl.load(labels + pixel, mask=inside, other=_IGNORE).to(tl.int32)
        counts = label != _IGNORE
        is_class = (label >= 0) & (label < K)
        z = tl.where(kept, top + fy * step, float("-inf"))
        largest = tl.max(z, 1)
        # Where `kept` is false at compile time there is no exponential.
        e = tl.where(kept, tl.exp2(z - largest[:, None]), 0.0)
        log_sum = largest + tl.log2(tl.sum(e, 1))
        tl.store(lse + pixel, log_sum, mask=inside)
        loss = log_sum - tl.sum(tl.where(k == label[:, None], z, 0.0), 1)
        loss = tl.where(loss < 0, 0.0, loss)  # by rounding; not `maximum`, which would lose NaN
        if WEIGHTED:
            weight = tl.load(table + label, mask=is_class, other=0.0)
            if SMOOTHED:
                loss *= tl.load(table + K + label, mask=is_class, other=0.0)
                loss += tl.sum(share * tl.where(kept, log_sum[:, None] - z, 0.0), 1)
            else:
                loss *= weight
        else:
            weight = tl.where(counts, 1.0, 0.0)
        # Of a label that is no class: the plain way raises an error there.
        loss = tl.where(is_class, loss * _LN2, float("nan"))
        loss = tl.where(counts, loss, 0.0)
        if BY_PIXEL:
            tl.store(losses + pixel, loss, mask=inside)
        else:
            loss_sum += loss.to(tl.float64)
            weight_sum += weight.to(weight_sum.dtype)
    if not BY_PIXEL:
        at = parts + (row.to(tl.int64) * tl.num_programs(1) + block) * 2
        tl.store(at, tl.sum(loss_sum, 0))
        tl.store(at + 1, tl.sum(weight_sum, 0))


@triton.jit(do_not_specialize=_SIZES)
def _label_kernel(
    logits, found, probability,
    h, w, H, W, stride_n, stride_k, stride_h, stride_w,
    K: tl.constexpr, SY: tl.constexpr, OFFY: tl.constexpr, FY: tl.constexpr,
    SX: tl.constexpr, OFFX: tl.constexpr, FX: tl.constexpr,
    BLOCK_K: tl.constexpr, CELLS: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """found: (N, H, W) uint8, the lowest of the most probable classes; probability: its own."""
    row, block = tl.program_id(0), tl.program_id(1)
    n = row // (h + 1)
    i = row % (h + 1) - 1
    column, inside, left, right, fx = _columns(block, w, W, SX, OFFX, FX, CELLS, SP)
    k = tl.arange(0, BLOCK_K)[None, :]
    kept = k < K
    top, step = _top_and_step(
        logits, n, i, left, right, fx, k, kept, h, stride_n, stride_k, stride_h, stride_w
    )
    y0 = i * SY + OFFY
    for t in range(tl.maximum(-y0, 0), tl.minimum(H - y0, SY)):
        pixel = (n.to(tl.int64) * H + (y0 + t)) * W + column
        z = tl.where(kept, top + (t + FY) * (1.0 / SY) * step, float("-inf"))
        largest = tl.max(z, 1)
        # What is not finite makes the sum NaN.
        e = tl.where(kept, tl.exp2(z - largest[:, None]), 0.0)
        # A class all the same where no logit is a number.
        best = tl.min(tl.where(z == largest[:, None], k, K - 1), 1)
        tl.store(found + pixel, best.to(tl.uint8), mask=inside)
        tl.store(probability + pixel, 1.0 / tl.sum(e, 1), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def _cell_kernel(
    logits, labels, table, scale, lse, parts,
    h, w, H, W, stride_n, stride_k, stride_h, stride_w,
    K: tl.constexpr, SY: tl.constexpr, OFFY: tl.constexpr, FY: tl.constexpr,
    SX: tl.constexpr, OFFX: tl.constexpr, FX: tl.constexpr,
    BY_PIXEL: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr,
    BLOCK_K: tl.constexpr, CELLS: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """parts: (4, N, h + 1, w + 1, K) float32, the gradients of the four corners of each cell.

    scale: float32, the gradient of the sum of losses, (1,), or of each loss, (N, H, W).
    """
    row, block = tl.program_id(0), tl.program_id(1)
    n = row // (h + 1)
    i = row % (h + 1) - 1
    column, inside, left, right, fx = _columns(block, w, W, SX, OFFX, FX, CELLS, SP)
    k = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    if K <= BLOCK_K:
        k = tl.arange(0, BLOCK_K)[None, :]  # known to the compiler
    kept = k < K
    top, step = _top_and_step(
        logits, n, i, left, right, fx, k, kept, h, stride_n, stride_k, stride_h, stride_w
    )
    y0 = i * SY + OFFY
    above = tl.zeros([CELLS * SP, BLOCK_K], tl.float32)
    below = tl.zeros([CELLS * SP, BLOCK_K], tl.float32)
    if not BY_PIXEL:
        whole = tl.load(scale)
    if SMOOTHED:
        share = tl.load(table + 2 * K + k, mask=kept, other=0.0)
        all_shares = tl.load(table + 3 * K)
    for t in range(tl.maximum(-y0, 0), tl.minimum(H - y0, SY)):
        fy = (t + FY) * (1.0 / SY)
        fy = tl.where(i < 0, 1.0, tl.where(i >= h - 1, 0.0, fy))
        pixel = (n.to(tl.int64) * H + (y0 + t)) * W + column
        label = tl.load(labels + pixel, mask=inside, other=_IGNORE).to(tl.int32)
        valid = inside & (label != _IGNORE) & (label >= 0) & (label < K)
        # Infinite: the probability of what does not exist is 0, not something to overflow.
        log_sum = tl.load(lse + pixel, mask=inside, other=float("inf"))
        if BY_PIXEL:
            factor = tl.load(scale + pixel, mask=valid, other=0.0)
        else:
            factor = tl.where(valid, whole, 0.0)
        own = factor
        if WEIGHTED:
            own *= tl.load(table + SMOOTHED * K + label, mask=valid, other=0.0)
        p = tl.exp2(top + fy * step - log_sum[:, None])
        if SMOOTHED:
            g = p * (own + factor * all_shares)[:, None] - factor[:, None] * share
        else:
            g = p * own[:, None]
        g -= tl.where(k == label[:, None], own[:, None], 0.0)
        g = tl.where(kept, g, 0.0)
        above += g * (1.0 - fy)
        below += g * fy
    cell = block * CELLS + tl.arange(0, CELLS)[:, None]
    at = parts + (row.to(tl.int64) * (w + 1) + cell) * K + k
    corner = (tl.num_programs(0).to(tl.int64) * (w + 1)) * K
    mask = kept & (cell <= w)
    for side in tl.static_range(2):
        part = fx if side == 1 else 1.0 - fx
        a = tl.sum(tl.reshape(above * part[:, None], [CELLS, SP, BLOCK_K]), 1)
        tl.store(at + side * corner, a, mask=mask)
        b = tl.sum(tl.reshape(below * part[:, None], [CELLS, SP, BLOCK_K]), 1)
        tl.store(at + (2 + side) * corner, b, mask=mask)


@triton.jit(do_not_specialize=["size", "h", "w", "stride_n", "stride_k", "stride_h", "stride_w"])
def _gather_kernel(
    parts, grad, size, h, w, stride_n, stride_k, stride_h, stride_w,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the four partial gradients of each of the `size` values, in the order of `parts`."""
    v = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = v < size
    pixel, k = v // K, v % K
    line, j = pixel // w, pixel % w
    n, i = line // h, line % h
    # The cell above on the left, whose bottom right corner this is.
    at = parts + ((n * (h + 1) + i) * (w + 1) + j) * K + k
    corner = (size // K // h // w) * (h + 1) * (w + 1) * K
    g = tl.load(at + 3 * corner, mask=mask, other=0.0)
    g += tl.load(at + 2 * corner + K, mask=mask, other=0.0)
    g += tl.load(at + corner + (w + 1) * K, mask=mask, other=0.0)
    g += tl.load(at + (w + 2) * K, mask=mask, other=0.0)
    place = n * stride_n + k * stride_k + i * stride_h + j * stride_w
    tl.store(grad + place, g.to(grad.dtype.element_ty), mask=mask)


class Axis(NamedTuple):
    """Output pixel t of cell i is at stride * i + offset + t, (t + shift) / stride of the way."""

    stride: int
    offset: int
    shift: float


Axes = tuple[Axis, Axis]
"""Of the rows and of the columns."""


def axes_of(small: Tensor, size: Sequence[int], stride: int | None) -> Axes | None:
    """How `small`, (N, K, h, w), lies over `size`, (H, W); None: kernels cannot compute that.

    stride: as in `models.resizing.enlarge`; None: corners are aligned, and between two small pixels
        there has to be a whole number of large ones.
    """
    if not 0 < small.shape[1] <= _MOST_CLASSES:
        return None
    y, x = (_axis(*pair, stride) for pair in zip(small.shape[2:], size, strict=True))
    return None if y is None or x is None else (y, x)


def _axis(small: int, large: int, stride: int | None) -> Axis | None:
    if min(small, large) < 1:
        return None
    if stride is not None:
        fits = 0 <= stride * small - large < stride
        axis = Axis(stride, stride // 2, 0.0 if stride % 2 else 0.5)
    else:
        steps = max(small - 1, 1)
        fits = small == 1 or (large > 1 and (large - 1) % steps == 0)
        axis = Axis(large if small == 1 else (large - 1) // steps, 0, 0.0)
    return axis if fits and axis.stride <= _MOST_STRIDE else None


def losses(small: Tensor, labels: Tensor, axes: Axes) -> Tensor:
    """The cross entropy of each pixel, (N, H, W) float32, 0 where it is ignored; differentiable.

    small: (N, K, h, w). labels: (N, H, W) uint8 or int64; of one that is no class it is NaN.
    """
    return _CrossEntropy.apply(small, labels.contiguous(), axes, None, True)


def sums(
    small: Tensor,
    labels: Tensor,
    axes: Axes,
    *,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The sums of weighted losses and of weights, (2, 1) float64, as `losses.CrossEntropy` has."""
    table, classes = class_weights, small.shape[1]
    if class_weights is not None:
        if class_weights.shape != (classes,):
            raise ValueError(f"{tuple(class_weights.shape)} class weights for {classes} classes")
        table = class_weights.to(torch.float32).contiguous()[None]
    if label_smoothing > 0:
        weights = small.new_ones(classes, dtype=torch.float32) if table is None else table[0]
        shares = weights * (label_smoothing / classes)
        rows = weights, weights * (1 - label_smoothing), shares, shares.sum().expand(classes)
        table = torch.stack(rows)
    return _CrossEntropy.apply(small, labels.contiguous(), axes, table, False)


def labels_of(small: Tensor, size: Sequence[int], axes: Axes) -> tuple[Tensor, Tensor]:
    """The most probable class of each pixel, (N, H, W) uint8, and its probability, float32.

    The probability is NaN where a logit beside the pixel is no finite number.
    """
    shape = len(small), *size
    found = torch.empty(shape, dtype=torch.uint8, device=small.device)
    probability = torch.empty(shape, dtype=torch.float32, device=small.device)
    block_k, columns = _whole_tile(small.shape[1])
    grid, sizes, constants = _launch(small, size, axes, columns)
    if small.numel() > 0:
        _label_kernel[grid](small, found, probability, *sizes, **constants, BLOCK_K=block_k)
    return found, probability


class _CrossEntropy(torch.autograd.Function):
    """table: the weights, (1, K) float32; with smoothing (4, K): the weights; what the label has of
    them; what each class has; and the sum of that."""

    @staticmethod
    def forward(
        ctx: Any, small: Tensor, labels: Tensor, axes: Axes, table: Tensor | None, by_pixel: bool
    ) -> Tensor:
        lse = torch.empty(labels.shape, dtype=torch.float32, device=small.device)
        ctx.save_for_backward(small, labels, lse, table)
        ctx.axes, ctx.by_pixel = axes, by_pixel
        block_k, columns = _whole_tile(small.shape[1])
        grid, sizes, constants = _launch(small, labels.shape[1:], axes, columns)
        constants |= _weighing(table)
        parts = torch.empty(grid[0] * grid[1], 2, dtype=torch.float64, device=small.device)
        found = torch.empty_like(lse) if by_pixel else lse
        if small.numel() > 0:
            given = small, labels, lse if table is None else table, found, lse, parts
            _loss_kernel[grid](*given, *sizes, **constants, BY_PIXEL=by_pixel, BLOCK_K=block_k)
        return found if by_pixel else parts.sum(0).unsqueeze(1)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        small, labels, lse, table = ctx.saved_tensors
        found, size = torch.empty_like(small), small.numel()
        if size == 0:
            return found, None, None, None, None
        n, classes, h, w = small.shape
        # Of the sums only the first is of logits.
        scale = (grad if ctx.by_pixel else grad[0]).to(torch.float32).contiguous()
        most = _CLASSES if classes <= _CLASSES else _OF_MANY_CLASSES
        block_k = min(most, max(2, triton.next_power_of_2(classes)))
        grid, sizes, constants = _launch(small, labels.shape[1:], ctx.axes, _COLUMNS)
        constants |= _weighing(table)
        shape = 4, n, h + 1, w + 1, classes
        parts = torch.empty(shape, dtype=torch.float32, device=small.device)
        given = small, labels, lse if table is None else table, scale, lse, parts
        grid = (*grid, triton.cdiv(classes, block_k))
        _cell_kernel[grid](*given, *sizes, **constants, BY_PIXEL=ctx.by_pixel, BLOCK_K=block_k)
        grid = (triton.cdiv(size, _GATHERED),)
        about = size, h, w, *found.stride()
        _gather_kernel[grid](parts, found, *about, K=classes, BLOCK=_GATHERED, **LAUNCH)
        return found, None, None, None, None


def _whole_tile(classes: int) -> tuple[int, int]:
    """The classes and columns of a tile that has all classes of a pixel."""
    block_k = max(2, triton.next_power_of_2(classes))
    return block_k, max(16, min(_COLUMNS, _TILE // block_k))


def _weighing(table: Tensor | None) -> dict[str, bool]:
    return {"WEIGHTED": table is not None, "SMOOTHED": table is not None and len(table) > 1}


def _launch(
    small: Tensor, size: Sequence[int], axes: Axes, columns: int
) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """The grid, the sizes and the constants of a kernel whose programs have so many columns."""
    n, classes, h, w = small.shape
    y, x = axes
    padded = triton.next_power_of_2(x.stride)
    cells = max(1, columns // padded)
    constants = LAUNCH | {"K": classes, "CELLS": cells, "SP": padded, "num_warps": 4}
    constants |= {"SY": y.stride, "OFFY": y.offset, "FY": y.shift}
    constants |= {"SX": x.stride, "OFFX": x.offset, "FX": x.shift}
    return (n * (h + 1), triton.cdiv(w + 1, cells)), (h, w, *size, *small.stride()), constants
