"""A trial of backbones from elsewhere: images apart, nothing random, nothing kept of old weights.

Only then is the gradient of a batch that of its parts. Layers are not judged by their names: two
small images go through a copy of the network.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.errors import ConfigError
from segtrain.parts import changed_state
from segtrain.text import MAX_NAME, printable

_SIZE = (65, 97)  # a multiple of no stride
# Of the largest feature: float32 in another order of its sums, far below what another image moves.
_ROUNDING = 1e-4
# In errors of kernels that only a device has; the second is Triton's.
_NEEDS_DEVICE, _CUDA = ("cuda", "cpu tensor"), "cuda"


def refuse_by_trial(
    network: nn.Module,
    name: str,
    maps: Callable[[Any], Sequence[Tensor]] = list,
    device: str = "cpu",
) -> None:
    """ConfigError if the features of an image depend on more than the image and the weights.

    Batch norms, which are synchronized, take their running statistics. A network without numbers
    (on the meta device, or of fake tensors) is not tried.

    maps: the feature maps (N, C, h, w) of what the network returns. device: of the first trial.
    """
    weights = [*network.parameters(), *network.buffers()]
    if any(w.is_meta or type(w.data) is not Tensor for w in weights):
        return
    trial = copy.deepcopy(network).to(device, torch.float32).train()
    for layer in trial.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()  # by running statistics it joins no images
    images = torch.arange(2 * 3 * _SIZE[0] * _SIZE[1]).float().square().sin()
    images = images.view(2, 3, *_SIZE).to(device).requires_grad_()
    try:
        with torch.enable_grad(), changed_state(trial) as changed:
            features = maps(trial(images))
            joins = _joins_images(features, images)
        with torch.no_grad():
            others = maps(trial(torch.stack([images[0], images[0]])))
            before = _held(trial.eval())
            trial(images)
    except Exception as error:  # foreign code may raise anything
        what = "cannot be tried on two images of 65x97"
        if device == "cpu" and any(word in str(error).lower() for word in _NEEDS_DEVICE):
            if torch.cuda.is_available():
                refuse_by_trial(network, name, maps, _CUDA)
                return
            what += " on the CPU, and no CUDA device is visible to torch; start where one is"
        raise _refused(name, f"{what} ({printable(str(error), MAX_NAME)})") from error
    if changed:
        raise _refused(name, f"a forward pass changes {changed[0]}, which depend on the rank")
    if joins:
        raise _refused(name, "the features of an image depend on other images of the batch")
    # What has no gradient: statistics that are detached, numbers from elsewhere.
    if not all(_is_close(one[0], other[0]) for one, other in zip(features, others, strict=True)):
        raise _refused(name, "the features of an image depend on other images, or on chance")
    if kept := _held(trial) - before:
        raise _refused(name, f"{min(kept)} keeps values that new weights would not change")


def _joins_images(features: Sequence[Tensor], images: Tensor) -> bool:
    """Whether features of the first image have a gradient for the second."""
    firsts = [feature[0] for feature in features if feature.requires_grad]
    # Different factors, since a softmax adds up to a constant.
    factors = [torch.linspace(-1, 1, one.numel(), device=one.device).view_as(one) for one in firsts]
    if not firsts:
        return False
    (gradient,) = torch.autograd.grad(firsts, images, factors, allow_unused=True)
    return gradient is not None and bool(gradient[1].any())


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Whether features are equal but for rounding."""
    return bool((one - other).abs().max() <= _ROUNDING * one.abs().max())


def _held(network: nn.Module) -> set[str]:
    """Where layers hold tensors beside parameters and buffers, such as tables made of weights."""
    return {
        f"{path}.{name}"
        for path, layer in network.named_modules()
        for name, value in vars(layer).items()
        if not name.startswith("_") and any(isinstance(x, Tensor) for x in _parts_of(value))
    }


def _parts_of(value: Any) -> Iterable[Any]:
    """What a dict, list or tuple holds, or the value itself."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else [value]


def _refused(name: str, what: str) -> ConfigError:
    return ConfigError(f"model.backbone: {name}: {what}; use another network")
