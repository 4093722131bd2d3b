"""Batch norm over the pixels of several ranks: the arithmetic, without modules or buffers.

Forward. Each rank takes the mean m and biased variance v of its own n values per channel and sends
one float64 vector [n m, n (v + m^2), n]; a rank without values sends zeros. One all_reduce makes
the moments of the whole batch. E[x^2] - E[x]^2 is safe because the sums are in float64 and v was
computed about the local mean: the variance is exact to float32 rounding for |mean| / std up to 1e4.

Backward. With xhat = (x - mean) / std, S1 = sum(dy) and S2 = sum(dy xhat) over all ranks,

    dx = weight / std * (dy - S1 / n - xhat * S2 / n)

(Ioffe and Szegedy, arXiv:1502.03167, section 3), so one all_reduce of [S1, S2] is enough. The
gradients of weight and bias stay local sums, like those of all parameters:
`segtrain.training.gradients` or DistributedDataParallel adds them up.

Autograd does the backward pass, through an all_reduce whose derivative is an all_reduce: exact, but
slower than functional.py, and autograd keeps every intermediate tensor.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from segtrain.distributed import collectives as dist
from segtrain.distributed.offload import offload, reload
from segtrain.norm import cuda_kernels
from segtrain.norm.cuda_kernels import LayerSums
from segtrain.norm.kernels import backward_sums, input_gradient, local_moments, normalized

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Moments(NamedTuple):
    """The statistics of one layer over all ranks; mean and variance are 0 if count is 0."""

    mean: Tensor  # (C,) float32, or float64 for float64 input
    var: Tensor  # the same, biased
    count: Tensor  # () float64, the number of values per channel; below 1: none


class NormInput(NamedTuple):
    """The input and the parameters of one layer."""

    x: Tensor  # (N, C, ...) floating point; N may differ between ranks and be 0
    weight: Tensor | None  # (C,)
    bias: Tensor | None  # (C,)
    eps: float


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    group: dist.Group | None = None,
) -> tuple[Tensor, Moments]:
    """`x` normalized with the statistics of all ranks in `group`, and these (collective).

    The arguments are those of NormInput.

    Returns:
        y like `x`, also in memory format, and the statistics. Only y is differentiable, once.
    """
    ((y,), (moments,)) = sync_batch_norms([NormInput(x, weight, bias, eps)], group=group)
    return y, moments


def sync_batch_norms(
    inputs: Sequence[NormInput], *, group: dist.Group | None = None
) -> tuple[list[Tensor], list[Moments]]:
    """As `sync_batch_norm` for several independent layers, with one all_reduce (collective).

    The backward pass runs when the gradients of all outputs are there, again with one all_reduce.
    The numbers are bit for bit those of separate calls. All ranks must pass the same layers in the
    same order.
    """
    tensors = [t for layer in inputs for t in layer[:3]]
    results = _SyncBatchNorms.apply([layer.eps for layer in inputs], group, *tensors)
    return list(results[: len(inputs)]), _as_moments(results[len(inputs) :])


class _SyncBatchNorms(torch.autograd.Function):
    """x, weight and bias of every layer in turn, to every y and then every mean, var and count."""

    @staticmethod
    def forward(
        ctx: Any, eps: list[float], group: dist.Group | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        layers = _as_layers(tensors, eps)
        layers = [layer._replace(x=dense_like(layer.x, layer.x)) for layer in layers]
        moments = global_moments([layer.x for layer in layers], group)
        statistics = [t for layer in moments for t in layer]
        ctx.save_for_backward(*(t for layer in layers for t in layer[:3]), *statistics)
        ctx.eps, ctx.group = eps, group
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*statistics)
        return (*map(normalized_layer, layers, moments), *statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved, num = ctx.saved_tensors, len(ctx.eps)
        layers, moments = _as_layers(saved, ctx.eps), _as_moments(saved[3 * num :])
        del saved
        # An output that nobody used has no gradient; its sums are zeros like a rank's without x.
        dense_grads = [
            torch.zeros_like(layer.x) if grad is None else dense_like(grad, layer.x)
            for grad, layer in zip(grads[:num], layers, strict=True)
        ]
        needed = ctx.needs_input_grad[2:]
        return None, None, *norm_gradients(layers, dense_grads, moments, ctx.group, needed)


def normalized_layer(layer: NormInput, moments: Moments) -> Tensor:
    """The output of a layer under these statistics."""
    function = cuda_kernels.normalized if cuda_kernels.takes(layer.x) else normalized
    return function(layer.x, layer.weight, layer.bias, moments.mean, moments.var, layer.eps)


def norm_gradients(
    layers: list[NormInput],
    grads: Sequence[Tensor],
    moments: Sequence[Moments],
    group: dist.Group | None,
    needed: Sequence[bool],
    *,
    shared: bool = True,
) -> list[Tensor | None]:
    """The gradients of x, weight and bias of every layer in turn, by one all_reduce if `shared`.

    layers: is emptied, so that the inputs can be freed.
    grads: of the outputs, dense like the inputs.
    """
    on_cuda = cuda_kernels.takes(layers[0].x)
    inv_stds, sums, parked = [], [], []
    for (x, weight, _, eps), grad, (mean, var, _) in zip(layers, grads, moments, strict=True):
        inv_stds.append((var + eps).rsqrt_())
        sums.append(_layer_sums(grad, x, weight, mean, inv_stds[-1]))
        # A virtual rank does not keep its input on the device while it waits for the others.
        parked.append(offload(x))
    parameters = [(layer.weight, layer.bias) for layer in layers]
    layers.clear()
    del x
    if on_cuda:
        whole = cuda_kernels.packed_sums(sums)
    else:
        whole = _joined([layer.parts[0] for layer in sums]).to(torch.float64, copy=True)
    if shared:
        # Also if this rank needs no gradient of x: the others would wait for it.
        whole = dist.all_reduce_sum(whole, group)
    results: list[Tensor | None] = []
    for i, total in enumerate(whole.split([2 * len(layer.mean) for layer in moments])):
        (mean, _, count), (weight, bias) = moments[i], parameters[i]
        needs_x, needs_weight, needs_bias = needed[3 * i : 3 * i + 3]
        grad_x = None
        if needs_x:
            layer = (grads[i], reload(parked[i]), weight, mean, inv_stds[i])
            if on_cuda:
                grad_x = cuda_kernels.input_gradient(*layer, total, count)
            else:
                grad_x = input_gradient(*layer, (total / count.clamp(min=1)).to(mean.dtype))
        results.append(grad_x)
        results.append(sums[i].grad_weight.to(weight.dtype) if needs_weight else None)
        results.append(sums[i].grad_bias.to(bias.dtype) if needs_bias else None)
    return results


def _layer_sums(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inv_std: Tensor
) -> LayerSums:
    if cuda_kernels.takes(x):
        return cuda_kernels.backward_sums(grad, x, weight, mean, inv_std)
    sums = backward_sums(grad, x, mean, inv_std)
    grad_bias, grad_weight = sums.chunk(2)
    return LayerSums((sums,), grad_weight, grad_bias)


def _as_layers(tensors: Sequence[Tensor | None], eps: Sequence[float]) -> list[NormInput]:
    return [NormInput(*tensors[3 * i : 3 * i + 3], e) for i, e in enumerate(eps)]


def _as_moments(tensors: Sequence[Tensor]) -> list[Moments]:
    return [Moments(*tensors[i : i + 3]) for i in range(0, len(tensors), 3)]


def global_moments(
    xs: Sequence[Tensor], group: dist.Group | None, *, shared: bool = True
) -> list[Moments]:
    """The moments of every layer over all ranks, by one all_reduce; this rank's if not `shared`."""
    if cuda_kernels.takes(xs[0]):
        whole = cuda_kernels.packed_moments(xs)
    else:
        whole = _joined([packed_moments(*local_moments(x), x.numel() // x.shape[1]) for x in xs])
    if shared:
        whole = dist.all_reduce_sum(whole, group)
    result = []
    for x, part in zip(xs, whole.split([2 * x.shape[1] + 1 for x in xs]), strict=True):
        wide = torch.promote_types(x.dtype, torch.float32)
        if cuda_kernels.takes(x):
            result.append(Moments(*cuda_kernels.unpacked_moments(part, wide)))
        else:
            mean, var, count = unpacked_moments(part)
            result.append(Moments(mean.to(wide), var.to(wide), count.clone()))
    return result


def _joined(vectors: Sequence[Tensor]) -> Tensor:
    """One vector for one all_reduce; a copy only if there are several."""
    return torch.cat(list(vectors)) if len(vectors) > 1 else vectors[0]


def packed_moments(mean: Tensor, var: Tensor, num_values: int) -> Tensor:
    """[n mean, n (var + mean^2), n] in float64, (2 C + 1,), which may be added over ranks."""
    mean = mean.double()
    square = torch.addcmul(var.double(), mean, mean)
    return torch.cat([mean, square, mean.new_ones(1)]).mul_(num_values)


def unpacked_moments(total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (C,), biased variance (C,) and count () in float64, from summed `packed_moments`."""
    count = total[-1]
    mean, square = (total[:-1] / count.clamp(min=1)).chunk(2)
    # Rounding can make the variance of a constant channel slightly negative.
    return mean, torch.addcmul(square, mean, mean, value=-1).clamp_(min=0), count


def unbiased(var: Tensor, count: Tensor | float) -> Tensor:
    """A biased variance (C,) times Bessel's factor for `count` () values; of one value as it is."""
    if isinstance(count, Tensor):
        return var * (count / (count - 1).clamp_(min=1)).to(var.dtype)
    return var * (count / max(count - 1, 1))


def dense_like(grad: Tensor, x: Tensor) -> Tensor:
    """`grad` laid out as `x`: the kernels pair elements by their place in memory."""
    # A slice is contiguous in neither format, but the stride of its channels tells.
    format = torch.contiguous_format
    if not x.is_contiguous() and x.stride(1) == 1:
        format = _CHANNELS_LAST.get(x.dim(), format)
    return grad.contiguous(memory_format=format)


class _AllSum(torch.autograd.Function):
    """The sum over the ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.Group | None) -> Tensor:
        ctx.group = group
        return dist.all_reduce_sum(tensor.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllSum.apply(grad, ctx.group), None


def composite_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    group: dist.Group | None = None,
) -> tuple[Tensor, Moments]:
    """As `sync_batch_norm`, differentiable any number of times (collective).

    Every backward pass through it is collective too: all ranks must take the same derivatives in
    the same order.
    """
    channels = x.shape[1]
    over = [dim for dim in range(x.dim()) if dim != 1]
    shape = (1, channels, *[1] * (x.dim() - 2))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    num_values = x.numel() // channels
    divisor = max(num_values, 1)  # a rank without values has sums of 0

    mean = wide.sum(over) / divisor
    var = (wide - mean.view(shape)).square().sum(over) / divisor
    total = _AllSum.apply(packed_moments(mean, var, num_values), group)
    mean64, var64, count = unpacked_moments(total)
    moments = Moments(mean64.to(wide.dtype), var64.to(wide.dtype), count)
    y = (wide - moments.mean.view(shape)) * (moments.var + eps).rsqrt().view(shape)
    if weight is not None:
        y = y * weight.to(wide.dtype).view(shape)
    if bias is not None:
        y = y + bias.to(wide.dtype).view(shape)
    return y.to(x.dtype), Moments(*(t.detach() for t in moments))
