"""One rank's passes over its values: statistics, normalization, and two for the backward pass.

For a CPU, wherever a compiler sees the model, and for CUDA where Triton's kernels do not serve. On
a CPU the kernel of torch is chosen by the layout. Its batch norm reads contiguous input value by
value, and adds channels-last input in one float32 sum over all pixels: of a million pixels whose
mean is 10,000 standard deviations, it finds a thousand times their variance.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain.norm.cuda_kernels import LayerSums, NormInput


def packed_moments(xs: Sequence[Tensor]) -> Tensor:
    """[n mean, n (var + mean^2), n] of every layer's input, float64, to be added over ranks."""
    return torch.cat([packed(*local_moments(x), x.numel() // x.shape[1]) for x in xs])


def packed(mean: Tensor, var: Tensor, num_values: int) -> Tensor:
    """[n mean, n (var + mean^2), n] in float64, (2 C + 1,)."""
    mean = mean.double()
    square = torch.addcmul(var.double(), mean, mean)
    return torch.cat([mean, square, mean.new_ones(1)]).mul_(num_values)


def unpacked_moments(
    total: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (C,) and biased variance (C,) in `dtype`, count () float64, from sums of `packed`."""
    count = total[-1]
    mean, square = (total[:-1] / count.clamp(min=1)).chunk(2)
    # Rounding can make the variance of a constant channel slightly negative.
    var = torch.addcmul(square, mean, mean, value=-1).clamp_(min=0)
    return mean.to(dtype), var.to(dtype), count.clone()


def unbiased(var: Tensor, count: Tensor | float) -> Tensor:
    """A biased variance (C,) times Bessel's factor for `count` () values; of one value as it is."""
    if isinstance(count, Tensor):
        return var * (count / (count - 1).clamp_(min=1)).to(var.dtype)
    return var * (count / max(count - 1, 1))


def local_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (C,) of this rank's values, float64; zeros without any."""
    if x.numel() == 0:
        return torch.zeros(2, x.shape[1], dtype=torch.float64, device=x.device).unbind()
    mean, var = _moments(x)
    # On a CPU reading the answer costs nothing; CUDA's kernels are exact enough.
    if x.device.type == "cuda" or torch.compiler.is_compiling():
        return mean, var
    # A mean over 100 standard deviations from 0 is too far for sums in float32.
    if torch.addcmul(var, mean, mean, value=-1e-4).min().item() < 0:
        # x - center has no rounding error where both are close (Sterbenz lemma).
        center = mean.to(x.dtype)
        offset, var = _moments(x - _along(x, center))
        mean = center.double() + offset
    return mean, var


# The most values that one float32 accumulator adds up.
_RUN = 2048


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """`local_moments` by the fastest kernel for layout and dtype; float32 or wider."""
    length = x.numel() // x.shape[1]
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        if x.is_contiguous() and length >= 256 * len(x):
            return _moments_by_rows(x)
        if length > _RUN and _is_channels_last(x):
            return _moments_by_runs(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.device.type == "cuda" and torch.compiler.is_compiling():
        # A compiler has no rule for the kernel below, but one for this.
        over = [dim for dim in range(x.dim()) if dim != 1]
        var, mean = torch.var_mean(x.to(wide), over, correction=0)
        return mean.double(), var.double()
    # The kernel returns the dtype of the running buffers. Without any it would round the
    # statistics of bfloat16 input to bfloat16.
    buffers = [None, None] if x.dtype == wide else list(x.new_zeros(2, x.shape[1], dtype=wide))
    mean, var = torch.batch_norm_update_stats(x, *buffers, 0.0)
    return mean.double(), var.double()


def _moments_by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """For a contiguous tensor on a CPU, several times as fast as batch norm's own kernel.

    Uses torch's group norm, one group per channel: its CPU kernel is vectorized.
    """
    rows, channels = x.shape[:2]
    sizes = (rows, channels, x[0, 0].numel(), channels)
    _, means, inv_stds = torch.native_group_norm(x, None, None, *sizes, 0.0)
    # A constant row has an infinite inverse, so its variance becomes 0.
    return _merged(means, inv_stds.double().pow_(-2))


def _moments_by_runs(x: Tensor) -> tuple[Tensor, Tensor]:
    """For a channels-last tensor on a CPU, ten times as exact as one run over all pixels.

    The kernel adds up pixels one by one in float32. Here it sees the channels of `num_runs`
    neighbouring pixels as separate channels, and the runs are merged in float64.
    """
    pixels = x.movedim(1, -1).reshape(-1, x.shape[1])
    # At least so many runs; rather some more, if then no pixels are left over.
    fewest = -(-len(pixels) // _RUN)
    equal = (num for num in range(fewest, 8 * fewest) if len(pixels) % num == 0)
    num_runs = next(equal, fewest)
    height = len(pixels) // num_runs
    whole, rest = pixels[: height * num_runs], pixels[height * num_runs :]
    # (1, C', height, 1) with the channels innermost: for this layout the kernel is vectorized.
    wide = whole.view(1, height, 1, -1).movedim(-1, 1)
    mean, var = torch.batch_norm_update_stats(wide, None, None, 0.0)
    mean, var = _merged(mean.view(num_runs, -1), var.view(num_runs, -1))
    if not len(rest):
        return mean, var
    share = len(rest) / len(pixels)
    rest_var, rest_mean = torch.var_mean(rest.double(), dim=0, correction=0)
    # Two parts of different sizes (Chan et al.): the gap of their means adds to the variance.
    gap = rest_mean - mean
    return mean + share * gap, torch.lerp(var, rest_var, share) + share * (1 - share) * gap * gap


def _merged(means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (C,) float64 of n equally large parts, from those of the parts (n, C)."""
    mean = means.mean(0, dtype=torch.float64)
    gaps = means - mean
    return mean, torch.addcmul(variances, gaps, gaps).mean(0)


def normalized(layer: NormInput, mean: Tensor, var: Tensor, inv_std: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias; inv_std: 1 / sqrt(var + eps)."""
    x, weight, bias, eps = layer
    # A parameter may be float16 (module.half()); the kernels expect the dtype of the statistics.
    weight, bias = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
    if not _is_pixelwise(x, mean):
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)
    scale = inv_std if weight is None else inv_std * weight
    shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    return torch.addcmul(_along(x, shift), x, _along(x, scale))


def backward_sums(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inv_std: Tensor
) -> LayerSums:
    """sum(dy) and sum(dy xhat) about the statistics of all ranks: the parameters' gradients too."""
    if x.numel() == 0:
        total, dot = torch.zeros(2, x.shape[1], dtype=mean.dtype, device=x.device).unbind()
    else:
        mask = [False, True, True]  # the gradient of x is not computed
        _, dot, total = torch.ops.aten.native_batch_norm_backward(
            grad, x, torch.ones_like(mean), None, None, mean, inv_std, True, 0.0, mask
        )
    return LayerSums((total, dot), grad_weight=dot, grad_bias=total)


def packed_sums(sums: Sequence[LayerSums]) -> Tensor:
    """The parts of every layer in one float64 vector."""
    return torch.cat([part for layer in sums for part in layer.parts]).double()


def input_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    total: Tensor,
    count: Tensor,
) -> Tensor:
    """weight / std * (dy - mean(dy) - xhat * mean(dy xhat)), like `x`.

    total: (2 C,) float64, the `parts` of `backward_sums`, summed over the ranks.
    count: () float64, of all ranks.
    """
    mean_grad, mean_dot = (total / count.clamp(min=1)).to(mean.dtype).chunk(2)
    scale = inv_std if weight is None else inv_std * weight.to(inv_std.dtype)
    # The terms without dy are shift - slope * x, with one shift and slope per channel.
    slope = (inv_std * mean_dot).mul_(scale)
    if _is_pixelwise(x, mean):
        shift = (slope * mean).addcmul_(mean_grad, scale, value=-1)
        grad_x = torch.addcmul(_along(x, shift), x, _along(x, slope), value=-1)
    else:
        ones, shift = torch.ones_like(mean), -mean_grad * scale
        # Not that of torch.nn.functional, which in older torch refuses an eps of 0.
        grad_x = torch.batch_norm(x, slope.neg_(), shift, mean, ones, False, 0.0, 0.0, False)
    return grad_x.addcmul_(grad, _along(x, scale))


def _is_pixelwise(x: Tensor, statistics: Tensor) -> bool:
    """Whether to normalize by elementwise functions: faster here, with the same rounding."""
    return x.device.type == "cpu" and x.dtype == statistics.dtype and _is_channels_last(x)


def _is_channels_last(x: Tensor) -> bool:
    """Whether the channels of a pixel lie side by side."""
    return x.stride(1) == 1 and x.shape[1] > 1


def _along(x: Tensor, per_channel: Tensor) -> Tensor:
    """(C,) shaped to be broadcast over `x` (N, C, ...)."""
    return per_channel.view(-1, *[1] * (x.dim() - 2))
