"""Batch norm with its ReLU and shortcut in one pass each way, channels-last: (pixels, C) values.

    packed_moments -> the sum over ranks -> finished -> normalized
    backward_sums -> the sum over ranks -> input_gradient

Ranks add up the vectors of `segtrain.norm.cuda_kernels`, so each may go either way.
Sums are float32 inside a program, about the mean of its first pixels, and float64 between programs.
How pixels are cut depends on their number and on C alone: the same bits on every device.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from segtrain.kernels import LAUNCH

Activation = Literal["none", "relu", "relu6"]

_VALUES = 2048  # of a tile
_MOST_CHANNELS = 64  # of a tile
# Of a kernel, where there is enough to do: 8 for each of the 132 processors of an H100, and for
# elementwise kernels four times as many: measured on an H200.
_SUMMING, _ELEMENTWISE = 1056, 4224
_COLUMNS = 8  # of a program that adds up what others left
# Tiles that a kernel which only reads has under way: 3 are a sixth to a fifth faster than 1 there.
_STAGES = tl.constexpr(3)
# They change from batch to batch, and nothing is gained by compiling for them.
_FREE = ["pixels", "rows"]


class Layer(NamedTuple):
    """A batch norm whose statistics are known, and what follows it.

    output: for the backward pass what came out, if a shortcut was added; None: where the activation
        cut is computed again from `x`.
    """

    x: Tensor  # (N, C, H, W), float32, bfloat16 or float16, channels-last
    mean: Tensor  # (C,) float32
    inv_std: Tensor  # (C,) float32
    weight: Tensor | None  # (C,)
    bias: Tensor | None  # (C,)
    activation: Activation
    output: Tensor | None = None


@triton.jit
def _tile(
    pixels, channels, rows, BY_EIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Of this program: the channels, C, the first pixel's place, how many there are, and places."""
    if BY_EIGHT:
        # Triton knows multiples of 16 by itself; of 24 channels it would load one at a time.
        channels = channels // 8 * 8
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(1) * rows
    count = tl.minimum(pixels - first, rows)
    r = tl.arange(0, BLOCK_M)
    place = r[:, None] * channels + c[None, :]
    return c, channels, first.to(tl.int64) * channels, count, r, place


@triton.jit
def _store_sums(parts, c, channels, first, second):
    """In this program's row of parts, (programs, 2 C) float64."""
    at = parts + tl.program_id(1).to(tl.int64) * (2 * channels) + c
    tl.store(at, first, mask=c < channels)
    tl.store(at + channels, second, mask=c < channels)


@triton.jit(do_not_specialize=_FREE)
def _statistics_kernel(
    x, parts, pixels, channels, rows,
    BY_EIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of x and of x^2."""
    c, channels, base, count, r, place = _tile(pixels, channels, rows, BY_EIGHT, BLOCK_M, BLOCK_C)
    in_c = (c < channels)[None, :]
    x += base
    v = tl.load(x + place, mask=(r < count)[:, None] & in_c, other=0.0).to(tl.float32)
    shift = tl.sum(v, 0) / tl.minimum(count, BLOCK_M).to(tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    square = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    whole = count // BLOCK_M * BLOCK_M
    for start in tl.range(0, whole, BLOCK_M, num_stages=_STAGES):
        v = tl.load(x + start * channels + place, mask=in_c, other=0.0).to(tl.float32)
        d = v - shift[None, :]
        total += d
        square += d * d
    if whole < count:
        mask = (r < count - whole)[:, None] & in_c
        v = tl.load(x + whole * channels + place, mask=mask, other=0.0).to(tl.float32)
        d = tl.where(mask, v - shift[None, :], 0.0)
        total += d
        square += d * d
    n = count.to(tl.float64)
    a = shift.to(tl.float64)
    s1 = tl.sum(total, 0).to(tl.float64)
    s2 = tl.sum(square, 0).to(tl.float64)
    _store_sums(parts, c, channels, n * a + s1, s2 + (2.0 * a) * s1 + n * a * a)


@triton.jit(do_not_specialize=["num", "size", "count"])
def _column_sums_kernel(
    parts, out, num, size, count, inv_std, gradients, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The sums of the `num` rows of parts, (num, size) float64.

    count: comes after them; None: nothing does.
    gradients: (size,) float32, of [sum dy, sum dy (x - mean)] those of bias and weight; or None.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    in_c = c < size
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float64)
    for start in range(0, num, BLOCK_R):
        mask = (start + r < num)[:, None] & in_c[None, :]
        at = (start + r)[:, None].to(tl.int64) * size + c[None, :]
        total += tl.load(parts + at, mask=mask, other=0.0)
    sums = tl.sum(total, 0)
    tl.store(out + c, sums, mask=in_c)
    if count is not None:
        tl.store(out + size, count.to(tl.float64), mask=tl.program_id(0) == 0)
    if gradients is not None:
        of_weight = c >= size // 2
        inv = tl.load(inv_std + c - size // 2, mask=in_c & of_weight, other=1.0)
        tl.store(gradients + c, (sums * inv).to(tl.float32), mask=in_c)


@triton.jit
def _finish_kernel(sums, statistics, channels, eps, BLOCK_C: tl.constexpr):
    """Mean, biased variance and 1 / sqrt(var + eps), (3, C) float32, of [sum x, sum x^2, n]."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < channels
    # No values on any rank: all sums are 0, and so are the moments.
    n = tl.maximum(tl.load(sums + 2 * channels), 1.0)
    mean = tl.load(sums + c, mask=in_c, other=0.0) / n
    var = tl.load(sums + channels + c, mask=in_c, other=0.0) / n - mean * mean
    # Rounding can make the variance of a constant channel slightly negative. This keeps NaN.
    var = tl.where(var < 0.0, 0.0, var)
    tl.store(statistics + c, mean.to(tl.float32), mask=in_c)
    tl.store(statistics + channels + c, var.to(tl.float32), mask=in_c)
    inv = 1.0 / tl.sqrt(var + eps)
    tl.store(statistics + 2 * channels + c, inv.to(tl.float32), mask=in_c)


@triton.jit
def _vectors(mean, inv_std, weight, bias, c, in_c):
    """Mean, inverse deviation, its product with the weight, and bias of the channels, in a row."""
    m = tl.load(mean + c, mask=in_c, other=0.0)
    inv = tl.load(inv_std + c, mask=in_c, other=0.0)
    scale = inv
    if weight is not None:
        scale = inv * tl.load(weight + c, mask=in_c, other=0.0).to(tl.float32)
    b = tl.zeros_like(m)
    if bias is not None:
        b = tl.load(bias + c, mask=in_c, other=0.0).to(tl.float32)
    return m[None, :], inv[None, :], scale[None, :], b[None, :]


@triton.jit(do_not_specialize=_FREE)
def _normalize_kernel(
    x, shortcut, y, mean, inv_std, weight, bias, pixels, channels, rows,
    ACTIVATION: tl.constexpr, BY_EIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c, channels, base, count, r, place = _tile(pixels, channels, rows, BY_EIGHT, BLOCK_M, BLOCK_C)
    in_c = c < channels
    m, _, scale, b = _vectors(mean, inv_std, weight, bias, c, in_c)
    x += base
    y += base
    if shortcut is not None:
        shortcut += base
    for start in range(0, count, BLOCK_M):
        mask = (r < count - start)[:, None] & in_c[None, :]
        at = start * channels + place
        v = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - m) * scale + b
        if shortcut is not None:
            v += tl.load(shortcut + at, mask=mask, other=0.0).to(tl.float32)
        # Comparisons, not maximum and minimum: NaN stays, as in torch.
        if ACTIVATION != "none":
            v = tl.where(v <= 0.0, 0.0, v)
        if ACTIVATION == "relu6":
            v = tl.where(v >= 6.0, 6.0, v)
        tl.store(y + at, v.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _through(grad, x, output, at, mask, m, scale, b, ACTIVATION: tl.constexpr):
    """The gradient before the activation, and x - mean."""
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - m
    if ACTIVATION != "none":
        v = d * scale + b
        if output is not None:
            v = tl.load(output + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.where(v <= 0.0, 0.0, g)
        if ACTIVATION == "relu6":
            g = tl.where(v >= 6.0, 0.0, g)
    return g, d


@triton.jit(do_not_specialize=_FREE)
def _backward_sums_kernel(
    grad, x, output, mean, inv_std, weight, bias, parts, pixels, channels, rows,
    ACTIVATION: tl.constexpr, BY_EIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of dy and of dy (x - mean)."""
    c, channels, base, count, r, place = _tile(pixels, channels, rows, BY_EIGHT, BLOCK_M, BLOCK_C)
    in_c = c < channels
    m, _, scale, b = _vectors(mean, inv_std, weight, bias, c, in_c)
    x += base
    grad += base
    if output is not None:
        output += base
    total = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    dot = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in tl.range(0, count, BLOCK_M, num_stages=_STAGES):
        # Where nothing is loaded dy is 0, and so is its share of both sums.
        mask = (r < count - start)[:, None] & in_c[None, :]
        at = start * channels + place
        g, d = _through(grad, x, output, at, mask, m, scale, b, ACTIVATION)
        total += g
        dot += g * d
    s1, s2 = tl.sum(total, 0).to(tl.float64), tl.sum(dot, 0).to(tl.float64)
    _store_sums(parts, c, channels, s1, s2)


@triton.jit(do_not_specialize=_FREE)
def _input_gradient_kernel(
    grad, x, output, mean, inv_std, weight, bias, sums, num_values, grad_x, grad_shortcut,
    pixels, channels, rows,
    ACTIVATION: tl.constexpr, BY_EIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c, channels, base, count, r, place = _tile(pixels, channels, rows, BY_EIGHT, BLOCK_M, BLOCK_C)
    in_c = c < channels
    m, inv, scale, b = _vectors(mean, inv_std, weight, bias, c, in_c)
    n = tl.load(num_values)
    mean_grad = (tl.load(sums + c, mask=in_c, other=0.0) / n).to(tl.float32)[None, :]
    mean_dot = (tl.load(sums + channels + c, mask=in_c, other=0.0) / n).to(tl.float32)[None, :]
    constant = scale * mean_grad
    slope = scale * (inv * (inv * mean_dot))
    x += base
    grad += base
    grad_x += base
    if output is not None:
        output += base
    if grad_shortcut is not None:
        grad_shortcut += base
    for start in range(0, count, BLOCK_M):
        mask = (r < count - start)[:, None] & in_c[None, :]
        at = start * channels + place
        g, d = _through(grad, x, output, at, mask, m, scale, b, ACTIVATION)
        dx = scale * g - constant - slope * d
        tl.store(grad_x + at, dx.to(grad_x.dtype.element_ty), mask=mask)
        if grad_shortcut is not None:
            tl.store(grad_shortcut + at, g.to(grad_shortcut.dtype.element_ty), mask=mask)


def _cut(x: Tensor, most_programs: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid over channels and pixels of `x`, and what a kernel has to know of it."""
    assert x.is_contiguous(memory_format=torch.channels_last)
    channels = x.shape[1]
    pixels = x.numel() // channels
    block_c = min(max(triton.next_power_of_2(channels), 8), _MOST_CHANNELS)
    block_m = _VALUES // block_c
    blocks = triton.cdiv(channels, block_c)
    chunks = max(1, min(triton.cdiv(pixels, block_m), most_programs // blocks))
    rows = triton.cdiv(triton.cdiv(pixels, chunks), block_m) * block_m
    assert rows * channels < 2**31  # places within a program are int32
    sizes = {"pixels": pixels, "channels": channels, "rows": rows}
    tile = {"BY_EIGHT": channels % 8 == 0, "BLOCK_M": block_m, "BLOCK_C": block_c, "num_warps": 4}
    return (blocks, triton.cdiv(pixels, rows)), sizes | tile | LAUNCH


def _column_sums(parts: Tensor, out: Tensor, *others: Any) -> None:
    num, size = parts.shape
    tile = {"BLOCK_R": 256, "BLOCK_C": _COLUMNS, "num_warps": 8}
    grid = (triton.cdiv(size, _COLUMNS),)
    _column_sums_kernel[grid](parts, out, num, size, *others, **tile, **LAUNCH)


def packed_moments(xs: Sequence[Tensor]) -> Tensor:
    """[sum x, sum x^2, n] of every input, float64, to be added over ranks."""
    sizes = [2 * x.shape[1] + 1 for x in xs]
    whole = torch.empty(sum(sizes), dtype=torch.float64, device=xs[0].device)
    for x, out in zip(xs, whole.split_with_sizes(sizes), strict=True):
        if x.numel() == 0:
            out.zero_()
            continue
        grid, cut = _cut(x, _SUMMING)
        parts = whole.new_empty(grid[1], 2 * x.shape[1])
        _statistics_kernel[grid](x, parts, **cut)
        _column_sums(parts, out, x.numel() // x.shape[1], None, None)
    return whole


def finished(sums: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Mean, biased variance and 1 / sqrt(var + eps), (C,) float32, of one layer's moments."""
    channels = sums.numel() // 2
    statistics = torch.empty(3, channels, dtype=torch.float32, device=sums.device)
    grid = (triton.cdiv(channels, 128),)
    _finish_kernel[grid](sums, statistics, channels, eps, BLOCK_C=128, **LAUNCH)
    return statistics.unbind()


def normalized(layer: Layer, shortcut: Tensor | None = None) -> Tensor:
    """The activation of (x - mean) inv_std weight + bias + shortcut, like `x`."""
    x, *vectors = layer[:5]
    y = torch.empty_like(x)
    if x.numel():
        grid, cut = _cut(x, _ELEMENTWISE)
        _normalize_kernel[grid](x, shortcut, y, *vectors, ACTIVATION=layer.activation, **cut)
    return y


def backward_sums(grads: Sequence[Tensor], layers: Sequence[Layer]) -> tuple[Tensor, list[Tensor]]:
    """[sum dy, sum dy (x - mean)] of every layer, float64, dy before the activation.

    Also this rank's gradients of each layer's bias and weight, (2, C) float32.

    grads: of the outputs.
    """
    sizes, device = [2 * layer.x.shape[1] for layer in layers], grads[0].device
    whole = torch.empty(sum(sizes), dtype=torch.float64, device=device)
    gradients = torch.empty(sum(sizes), dtype=torch.float32, device=device).split_with_sizes(sizes)
    sums = whole.split_with_sizes(sizes)
    for grad, layer, out, mine in zip(grads, layers, sums, gradients, strict=True):
        x, *vectors = layer[:5]
        if x.numel() == 0:
            out.zero_()
            mine.zero_()
            continue
        grid, cut = _cut(x, _SUMMING)
        parts = whole.new_empty(grid[1], 2 * x.shape[1])
        _backward_sums_kernel[grid](
            grad, x, layer.output, *vectors, parts, ACTIVATION=layer.activation, **cut
        )
        _column_sums(parts, out, None, layer.inv_std, mine)
    return whole, [mine.view(2, -1) for mine in gradients]


def input_gradient(
    grad: Tensor, layer: Layer, total: Tensor, count: Tensor, *, shortcut: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of `x`, like it, and that of the shortcut if `shortcut` asks for it.

    total: (2 C,) float64, of `backward_sums` over all ranks. count: () float64, of all ranks.
    """
    x, *vectors = layer[:5]
    grad_x, grad_shortcut = torch.empty_like(x), torch.empty_like(x) if shortcut else None
    if x.numel():
        grid, cut = _cut(x, _ELEMENTWISE)
        outputs = total, count, grad_x, grad_shortcut
        _input_gradient_kernel[grid](
            grad, x, layer.output, *vectors, *outputs, ACTIVATION=layer.activation, **cut
        )
    return grad_x, grad_shortcut
