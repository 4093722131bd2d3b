"""Batch norm over the pixels of several ranks: the arithmetic, without modules or buffers.

Forward. Each rank takes the mean m and biased variance v of its own n values per channel and sends
one float64 vector [n m, n (v + m^2), n]; a rank without values sends zeros. One all_reduce makes
the moments of the whole batch. E[x^2] - E[x]^2 is safe because the sums are in float64 and v was
computed about the local mean: the variance is exact to float32 rounding for |mean| / std up to 1e4.

One rank has the values 1 and 3, the other 5. Together their mean is 3, their variance 8/3.

>>> sent = [kernels.packed_moments([torch.tensor(x)]) for x in ([[1.0], [3.0]], [[5.0]])]
>>> [vector.tolist() for vector in sent]
[[4.0, 10.0, 2.0], [5.0, 25.0, 1.0]]
>>> mean, var, count = kernels.unpacked_moments(sent[0] + sent[1])
>>> mean.item(), round(var.item(), 4), count.item()
(3.0, 2.6667, 3.0)

Backward. With xhat = (x - mean) / std, S1 = sum(dy) and S2 = sum(dy xhat) over all ranks,

    dx = weight / std * (dy - S1 / n - xhat * S2 / n)

(Ioffe and Szegedy, arXiv:1502.03167, section 3), so one all_reduce of [S1, S2] is enough. The
gradients of weight and bias stay local sums, like those of all parameters:
`segtrain.training.gradients` or DistributedDataParallel adds them up.

`kernels` and `cuda_kernels` have the same functions, for a CPU and for CUDA.
"""

from collections.abc import Sequence
from functools import reduce
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain.autograd import differentiable_once
from segtrain.distributed.offload import offload, reload
from segtrain.norm import cuda_kernels, kernels
from segtrain.norm.cuda_kernels import NormInput
from segtrain.norm.groups import Sharing
from segtrain.norm.once import once

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Moments(NamedTuple):
    """The statistics of one layer over all ranks, or over a group of images on them.

    Mean and variance are 0 if count is 0.
    """

    mean: Tensor  # (C,) float32, or float64 for float64 input
    var: Tensor  # the same, biased
    count: Tensor  # () float64, the number of values per channel; below 1: none


def sync_batch_norms(
    inputs: Sequence[NormInput], sharing: Sharing
) -> tuple[list[Tensor], list[list[Moments]]]:
    """Each x normalized with the statistics that `sharing` tells, and these (collective).

    One all_reduce serves all of these independent layers; the numbers are bit for bit those of
    separate calls. The backward pass runs when the gradients of all outputs are there, again with
    one all_reduce. All ranks must pass the same layers in the same order.

    Returns:
        every y like its `x`, also in memory format; and for every layer the statistics of each
        group of images here, or of all. Only the former are differentiable, once.
    """
    tensors, num = [t for layer in inputs for t in layer[:3]], len(inputs)
    results = _SyncBatchNorms.apply([layer.eps for layer in inputs], sharing, *tensors)
    moments = _as_moments(results[num:])
    return list(results[:num]), [moments[i::num] for i in range(num)]


class _SyncBatchNorms(torch.autograd.Function):
    """x, weight and bias of every layer in turn, to every y and then every mean, var and count.

    Of the latter there are as many as groups of images: those of all layers for one after another.
    """

    @staticmethod
    def forward(
        ctx: Any, eps: list[float], sharing: Sharing, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        layers = _as_layers(tensors, eps)
        layers = [layer._replace(x=dense_like(layer.x, layer.x)) for layer in layers]
        moments = _global_moments([layer.x for layer in layers], sharing)
        statistics = [t for layer in moments for t in layer]
        ctx.save_for_backward(*(t for layer in layers for t in layer[:3]), *statistics)
        ctx.eps, ctx.sharing = eps, sharing
        # Otherwise autograd would make zeros for the statistics, which never have a gradient.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*statistics)
        return (*_normalized(layers, moments, sharing), *statistics)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved, num = ctx.saved_tensors, len(ctx.eps)
        layers, moments = _as_layers(saved, ctx.eps), _as_moments(saved[3 * num :])
        del saved  # `_norm_gradients` frees the inputs while this rank waits for others
        # An output that nobody used has no gradient; its sums are zeros like a rank's without x.
        dense_grads = [
            torch.zeros_like(layer.x) if grad is None else dense_like(grad, layer.x)
            for grad, layer in zip(grads[:num], layers, strict=True)
        ]
        needed = ctx.needs_input_grad[2:]
        return None, None, *_norm_gradients(layers, dense_grads, moments, ctx.sharing, needed)


def norm_relu_conv2d(
    layer: NormInput, kernel: Tensor, geometry: tuple[Any, ...], sharing: Sharing
) -> tuple[Tensor, list[Moments]]:
    """conv2d(relu(norm(x)), kernel), keeping `x` alone for the backward pass (collective).

    Autograd would keep the input of the batch norm and the output of the ReLU. Computing the output
    again costs one elementwise pass and no communication (as in In-Place ABN, arXiv:1712.02616, but
    with an exact ReLU and no inversion).

    geometry: stride, padding, dilation and groups of the convolution, without bias.
    """
    y, *moments = _NormReLUConv.apply(*layer, kernel, sharing, geometry)
    return y, _as_moments(moments)


class _NormReLUConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        kernel: Tensor,
        sharing: Sharing,
        geometry: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        layer = NormInput(dense_like(x, x), weight, bias, eps)
        moments = _global_moments([layer.x], sharing)
        statistics = [t for group in moments for t in group]
        ctx.eps, ctx.sharing, ctx.geometry = eps, sharing, geometry
        device, dtype = x.device.type, kernel.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        # Autocast is off in the backward pass, which must convolve in the same type.
        ctx.compute_dtype = dtype
        ctx.save_for_backward(layer.x, weight, bias, kernel, *statistics)
        ctx.mark_non_differentiable(*statistics)
        (z,) = _normalized([layer], moments, sharing)
        y = F.conv2d(F.relu_(z).to(dtype), kernel.to(dtype), None, *geometry)
        return (y, *statistics)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        x, weight, bias, kernel, *statistics = ctx.saved_tensors
        moments = _as_moments(statistics)
        layers = [NormInput(x, weight, bias, ctx.eps)]
        # By the moments that were saved, so no rank is asked again.
        (z,) = _normalized(layers, moments, ctx.sharing)
        F.relu_(z)
        stride, padding, dilation, groups = ctx.geometry
        grad, z_low, kernel_low = (t.to(ctx.compute_dtype) for t in (grad, z, kernel))
        outputs = [True, ctx.needs_input_grad[4], False]
        geometry = (stride, padding, dilation, False, [0] * len(stride), groups)
        grad_z, grad_kernel, _ = torch.ops.aten.convolution_backward(
            grad, z_low, kernel_low, None, *geometry, outputs
        )
        grad_z = dense_like(grad_z.to(x.dtype), x).masked_fill_(z <= 0, 0)
        del x, z, z_low
        grads = _norm_gradients(layers, [grad_z], moments, ctx.sharing, ctx.needs_input_grad[:3])
        grad_kernel = None if grad_kernel is None else grad_kernel.to(kernel.dtype)
        return *grads, None, grad_kernel, None, None


def _kernels_for(x: Tensor) -> ModuleType:
    return cuda_kernels if cuda_kernels.takes(x) else kernels


def _normalized(
    layers: Sequence[NormInput], moments: Sequence[Moments], sharing: Sharing
) -> list[Tensor]:
    """Every y; moments: those of all layers for one group of images after another."""
    ys, num = [], len(layers)
    for i, x in enumerate(sharing.cut([layer.x for layer in layers])):
        layer = layers[i % num]._replace(x=x)
        mean, var, _ = moments[i]
        ys.append(_kernels_for(x).normalized(layer, mean, var, (var + layer.eps).rsqrt_()))
    return _joined(ys, num)


def _joined(pieces: Sequence[Tensor], num_layers: int) -> list[Tensor]:
    """What `Sharing.cut` has cut, as one tensor a layer again."""
    if len(pieces) == num_layers:
        return list(pieces)
    return [torch.cat(pieces[i::num_layers]) for i in range(num_layers)]


def _global_moments(xs: Sequence[Tensor], sharing: Sharing) -> list[Moments]:
    """The moments of every layer for one group of images after another, by one all_reduce."""
    local = _kernels_for(xs[0])
    xs = sharing.cut(xs)
    # One vector, one sum: waiting for the ranks costs more than the few numbers.
    whole = once(lambda: sharing.sum(local.packed_moments(xs)))
    parts = whole.split_with_sizes([2 * x.shape[1] + 1 for x in xs])
    wide = [torch.promote_types(x.dtype, torch.float32) for x in xs]
    return [Moments(*local.unpacked_moments(*pair)) for pair in zip(parts, wide, strict=True)]


def _norm_gradients(
    layers: list[NormInput],
    grads: Sequence[Tensor],
    moments: Sequence[Moments],
    sharing: Sharing,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of x, weight and bias of every layer in turn, by one all_reduce.

    layers: is emptied, so that the inputs can be freed.
    grads: of the outputs, dense like the inputs.
    moments: of all layers for one group of images after another.
    """
    local, num = _kernels_for(layers[0].x), len(layers)
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    grads, xs = sharing.cut(grads), sharing.cut([layer.x for layer in layers])
    inv_stds, sums, parked = [], [], []
    for i, x in enumerate(xs):
        mean, var, _ = moments[i]
        inv_stds.append((var + layers[i % num].eps).rsqrt_())
        sums.append(local.backward_sums(grads[i], x, weights[i % num], mean, inv_stds[-1]))
        # A virtual rank does not keep its input on the device while it waits for the others.
        parked.append(offload(x))
    # From here on `parked` alone has the inputs.
    layers.clear()
    xs.clear()
    del x
    # Also if this rank needs no gradient of x: the others would wait for it.
    totals = sharing.sum(local.packed_sums(sums)).split_with_sizes(
        [2 * group.mean.numel() for group in moments]
    )
    # What is left needs no other rank: layer by layer, of each all groups of images.
    results: list[Tensor | None] = []
    for k in range(num):
        needs_x, needs_weight, needs_bias = needed[3 * k : 3 * k + 3]
        grads_x, groups = [], range(k, len(moments), num)
        for i in groups if needs_x else ():
            mean, _, count = moments[i]
            statistics = mean, inv_stds[i], totals[i], count
            x = reload(parked[i])
            grads_x.append(local.input_gradient(grads[i], x, weights[k], *statistics))
        results.append(_joined(grads_x, 1)[0] if needs_x else None)
        for needs, name, parameter in (
            (needs_weight, "grad_weight", weights[k]),
            (needs_bias, "grad_bias", biases[k]),
        ):
            total = reduce(torch.add, (getattr(sums[i], name) for i in groups))
            results.append(total.to(parameter.dtype) if needs else None)
    return results


def _as_layers(tensors: Sequence[Tensor | None], eps: Sequence[float]) -> list[NormInput]:
    return [NormInput(*tensors[3 * i : 3 * i + 3], e) for i, e in enumerate(eps)]


def _as_moments(tensors: Sequence[Tensor]) -> list[Moments]:
    return [Moments(*tensors[i : i + 3]) for i in range(0, len(tensors), 3)]


def dense_like(grad: Tensor, x: Tensor) -> Tensor:
    """`grad` laid out as `x`: the kernels pair elements by their place in memory."""
    # A slice is contiguous in neither format, but the stride of its channels tells.
    format = torch.contiguous_format
    if not x.is_contiguous() and x.stride(1) == 1:
        format = _CHANNELS_LAST.get(x.dim(), format)
    return grad.contiguous(memory_format=format)
