"""Functions that compute norm layers with what stands around them: their ReLU, their neighbours.

A network calls these instead of its layers one by one. Outputs, gradients and running statistics
are those of the layers. The gain is fewer collectives, fewer passes over the memory, or less that
is kept for the backward pass. Layers that do not fit run as they are.
"""

from collections.abc import Iterable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from segtrain.distributed import collectives as dist
from segtrain.norm.functional import NormInput, norm_relu_conv2d
from segtrain.norm.sync import SyncBatchNorm, by_kernels, fit_kernels, synchronized


def normalize_together(pairs: Iterable[tuple[Tensor, nn.Module]]) -> list[Tensor]:
    """Each tensor through its own norm layer, with one all_reduce for all layers (collective).

    For independent branches: no input may depend on another's result. The numbers are bit for bit
    those of one layer after another, if all or none of them fit Triton's kernels. If a layer is in
    evaluation mode, has hooks, or is of another kind or has other ranks, the layers run one by one.

    Raises:
        ValueError: with `images`, the tensors have different numbers of images.
    """
    pairs = list(pairs)
    if _alike_and_fit(pairs):
        return by_kernels(pairs, "none")
    if _are_alike(pairs):
        layer = pairs[0][1]
        # Without other ranks there is no sum to save, and each layer takes torch's batch norm.
        if layer.images or dist.group_size(layer._group()) > 1:
            return synchronized(pairs)
    return [layer(x) for x, layer in pairs]


def norm_relu_together(pairs: Iterable[tuple[Tensor, nn.Module]]) -> list[Tensor]:
    """ReLU of each tensor after its own norm layer, as `normalize_together` (collective).

    The ReLU writes over what a layer returns; so does that of `norm_relu`.
    """
    pairs = list(pairs)
    if _alike_and_fit(pairs):
        return by_kernels(pairs, "relu")
    return [F.relu(y, inplace=True) for y in normalize_together(pairs)]


def norm_relu(
    x: Tensor, norm: nn.Module, shortcut: Tensor | tuple[Tensor, nn.Module] | None = None
) -> Tensor:
    """relu(norm(x) + shortcut) (collective in training).

    Where `segtrain.kernels` may compute, layers in training are one autograd function, and norm(x)
    is never stored; differentiable once. Other layers run as they are, and so do those with hooks.

    shortcut: like norm(x); or a tensor and its own norm layer, which shares the collective; None:
        nothing is added.
    """
    if isinstance(shortcut, tuple):
        pairs = [(x, norm), shortcut]
        if x.shape == shortcut[0].shape and _alike_and_fit(pairs):
            return by_kernels(pairs, "relu", joined=True)[0]
        y, shortcut = normalize_together(pairs)
    else:
        alike = shortcut is None or (shortcut.shape, shortcut.dtype) == (x.shape, x.dtype)
        if alike and _alike_and_fit([(x, norm)]):
            return by_kernels([(x, norm)], "relu", shortcut=shortcut)[0]
        y = norm(x)
    return F.relu(y if shortcut is None else y.add_(shortcut), inplace=True)


_ACTIVATIONS = {nn.ReLU: "relu", nn.ReLU6: "relu6"}


def norm_activation(x: Tensor, norm: nn.Module, activation: nn.Module) -> Tensor:
    """activation(norm(x)), as `norm_relu` (collective in training)."""
    kind = _ACTIVATIONS.get(type(activation))
    if kind and not _has_hooks(activation) and _alike_and_fit([(x, norm)]):
        return by_kernels([(x, norm)], kind)[0]
    return activation(norm(x))


def norm_relu_conv(x: Tensor, norm: nn.Module, conv: nn.Conv2d) -> Tensor:
    """conv(relu(norm(x))), keeping `x` alone for the backward pass (collective in training).

    Outputs, gradients and running statistics are those of the three modules; differentiable once.
    Other layers than synchronized batch norms in training run as they are, and so do those with
    hooks. The convolution must have no bias, and pad with zeros.
    """
    if not _is_plain(norm) or _has_hooks(conv):
        return conv(F.relu(norm(x), inplace=True))
    norm._check_input_dim(x)
    # The backward pass of `norm_relu_conv2d` has no term for a bias, and no other padding.
    assert conv.bias is None
    assert conv.padding_mode == "zeros"
    geometry = (conv.stride, conv.padding, conv.dilation, conv.groups)
    layer, sharing = NormInput(x, norm.weight, norm.bias, norm.eps), norm._sharing(len(x))
    y, moments = norm_relu_conv2d(layer, conv.weight, geometry, sharing)
    norm._track(moments, sharing.groups)
    return y


def _alike_and_fit(pairs: Sequence[tuple[Tensor, nn.Module]]) -> bool:
    """Whether kernels may compute these layers together."""
    return _are_alike(pairs) and fit_kernels(pairs)


def _are_alike(pairs: Sequence[tuple[Tensor, nn.Module]]) -> bool:
    """Whether one function may compute these layers: plain ones of one type, ranks and `images`."""
    layers = [layer for _, layer in pairs]
    if not all(map(_is_plain, layers)) or len({*map(type, layers)}) != 1:
        return False
    return len({(layer.images, layer.sharing_ranks()) for layer in layers}) == 1


def _is_plain(layer: nn.Module) -> bool:
    """Whether a function may compute this layer instead of a call.

    It is a synchronized batch norm in training, without hooks.
    """
    if not isinstance(layer, SyncBatchNorm) or type(layer).forward is not SyncBatchNorm.forward:
        return False  # a subclass may compute anything
    return layer.training and not _has_hooks(layer)


def _has_hooks(module: nn.Module) -> bool:
    forward = [module._forward_pre_hooks, module._forward_hooks]
    backward = [module._backward_pre_hooks, module._backward_hooks]
    return any(forward + backward)
