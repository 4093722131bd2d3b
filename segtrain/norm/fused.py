"""Batch norm, its activation and a shortcut in one pass each way, by `segtrain.kernels.norm`.

Ranks send the vectors that they would send by `functional`. So a rank that cannot use the kernels,
such as one whose input is not channels-last, takes the plain way beside others.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segtrain import kernels
from segtrain.autograd import differentiable_once
from segtrain.distributed import collectives as dist
from segtrain.norm.cuda_kernels import NormInput
from segtrain.norm.functional import Moments, dense_like
from segtrain.norm.once import once


class LayerPlan(NamedTuple):
    """How layers are computed; see `fused_norms`."""

    activation: str
    eps: tuple[float, ...]  # of each layer
    ranks: dist.Group | None
    joined: bool


def takes(x: Tensor) -> bool:
    """Whether kernels may compute a batch norm of `x`."""
    if x.dim() != 4 or not kernels.takes(x):
        return False
    return x.numel() == 0 or x.is_contiguous(memory_format=torch.channels_last)


def fused_norms(
    inputs: Sequence[NormInput],
    ranks: dist.Group | None,
    activation: str,
    *,
    shortcut: Tensor | None = None,
    joined: bool = False,
) -> tuple[list[Tensor], list[Moments]]:
    """The activation of what each layer gives, and the layers' statistics (collective).

    One all_reduce each way serves all layers. The backward pass keeps the inputs, and with a
    shortcut the output: from these it knows where the activation cut. Differentiable once.

    inputs: `takes` every x.
    ranks: those that share statistics; None: all.
    activation: none, relu or relu6.
    shortcut: is added before the activation, to what the only layer gives; of the same shape and
        dtype.
    joined: what the second of two layers gives is the shortcut of the first, and no output.
    """
    plan = LayerPlan(activation, tuple(layer.eps for layer in inputs), ranks, joined)
    tensors = [t for layer in inputs for t in layer[:3]]
    results = _FusedNorms.apply(plan, shortcut, *tensors)
    num = 1 if joined else len(inputs)
    moments = [Moments(*results[i : i + 3]) for i in range(num, len(results), 3)]
    return list(results[:num]), moments


class _FusedNorms(torch.autograd.Function):
    """x, weight and bias of every layer in turn, to every y and then every mean, var and count."""

    @staticmethod
    def forward(
        ctx: Any, plan: LayerPlan, shortcut: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        from segtrain.kernels import norm  # imports Triton

        xs = tensors[::3]
        layers, statistics, saved = [], [], []
        total = once(lambda: dist.all_reduce_sum(norm.packed_moments(xs), plan.ranks))
        sums = total.split_with_sizes([2 * x.shape[1] + 1 for x in xs])
        for i, part in enumerate(sums):
            x, *parameters = tensors[3 * i : 3 * i + 3]
            # Kernels read them side by side.
            weight, bias = (p if p is None else p.contiguous() for p in parameters)
            mean, var, inv_std = norm.finished(part, plan.eps[i])
            layers.append(norm.Layer(x, mean, inv_std, weight, bias, plan.activation))
            statistics += [mean, var, part[-1]]
            saved += [x, mean, inv_std, weight, bias, part[-1]]
        if plan.joined:
            # The second layer has no output: what it gives is added to that of the first.
            shortcut = norm.normalized(layers.pop()._replace(activation="none"))
        elif shortcut is not None:
            shortcut = dense_like(shortcut, xs[0])
        ys = [norm.normalized(layer, shortcut) for layer in layers]
        ctx.plan = plan
        ctx.save_for_backward(*saved, None if shortcut is None else ys[0])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*statistics)
        return (*ys, *statistics)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from segtrain.kernels import norm

        plan, num = ctx.plan, len(ctx.plan.eps)
        *saved, output = ctx.saved_tensors
        layers = [
            norm.Layer(*saved[6 * i : 6 * i + 5], plan.activation, output) for i in range(num)
        ]
        grads = grads[:1] * num if plan.joined else grads[:num]
        # Used by nobody: the sums are zeros, like those of a rank without values.
        grads = [
            torch.zeros_like(layer.x) if grad is None else dense_like(grad, layer.x)
            for grad, layer in zip(grads, layers, strict=True)
        ]
        _, needs_shortcut, *needed = ctx.needs_input_grad
        of_shortcut, results = None, []
        sums, parameters = norm.backward_sums(grads, layers)
        # Also if this rank needs no gradient of x: the others would wait for it.
        total = dist.all_reduce_sum(sums, plan.ranks)
        totals = total.split_with_sizes([2 * layer.x.shape[1] for layer in layers])
        for i, layer in enumerate(layers):
            of_x, count = None, saved[6 * i + 5]
            if needed[3 * i] or needs_shortcut:
                of_x, of_shortcut = norm.input_gradient(
                    grads[i], layer, totals[i], count, shortcut=needs_shortcut
                )
            results.append(of_x if needed[3 * i] else None)
            of_bias, of_weight = parameters[i]
            needs_weight, needs_bias = needed[3 * i + 1 : 3 * i + 3]
            results.append(of_weight.to(layer.weight.dtype) if needs_weight else None)
            results.append(of_bias.to(layer.bias.dtype) if needs_bias else None)
        return None, of_shortcut, *results
