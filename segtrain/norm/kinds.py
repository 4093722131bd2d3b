"""Norm layers beside the synchronized ones, and the exchange of batch norms in a module."""

import copy
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.errors import ConfigError
from segtrain.norm.group_sums import Running
from segtrain.norm.sync import (
    GroupLike,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
)

NormFactory = Callable[[int], nn.Module]
"""Makes the norm layer for a number of channels; an argument of the models."""


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with constant running statistics, in training too; weight and bias are trained.

    The statistics come with the weights that training starts from. With random weights they are 0
    and 1, which normalizes nothing.
    """

    def forward(self, input: Tensor) -> Tensor:
        """`input` (N, C, H, W) normalized by the running statistics."""
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


def freeze_statistics(layer: _BatchNorm) -> FrozenBatchNorm2d:
    """`layer` with constant statistics; parameters and buffers are the same tensors."""
    frozen = FrozenBatchNorm2d(layer.num_features)
    # All of a module is there: hooks too, and the activation that timm's networks have inside.
    frozen.__dict__.update(layer.__dict__)
    return frozen


class _GroupNorm(nn.GroupNorm):
    """torch's group norm, which in training refuses groups of one value as batch norm does.

    The result is the bias, whatever the value, and rounding decides which gradients the ReLU
    after it lets through: another number of ranks would train another model.
    """

    def forward(self, input: Tensor) -> Tensor:
        """`input` (N, C, *) normalized within each image and group."""
        if self.training and input.shape[1:].numel() == self.num_groups:
            raise ConfigError(
                f"norm.kind: group: a layer of {self.num_channels} channels and one pixel, as "
                f"after global pooling, is divided into {self.num_groups} groups of one value "
                "each, of which group norm leaves nothing; use more channels, or another kind"
            )
        return super().forward(input)


# As in arXiv:1803.08494.
NUM_GROUPS = 32


def group_norm(channels: int) -> nn.GroupNorm:
    """Group norm of NUM_GROUPS groups, or the most of these that `channels` can be divided into."""
    # 48 channels cannot be divided into 32 groups, but into gcd(32, 48) = 16.
    return _GroupNorm(math.gcd(NUM_GROUPS, channels), channels)


_TO_SYNC = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}
_TO_LOCAL = {sync: local for local, sync in _TO_SYNC.items()}
# Attributes that only the layers of this package have.
_OWN = ("process_group", "images", "running", "_seen")


def convert(
    module: nn.Module,
    to: Literal["sync", "local"] = "sync",
    *,
    process_group: GroupLike = None,
    images: int | None = None,
    running: Running = "pooled",
) -> nn.Module:
    """Replaces the batch norm layers inside `module`, in place; returns `module`.

    If `module` is itself a batch norm, returns its replacement. Parameters and buffers stay the
    same tensors, so an optimizer made before stays valid. Training mode, hooks and layers that are
    used in several places are kept. So are the modules that a subclass such as timm's
    BatchNormAct2d applies after the batch norm. Converting twice changes nothing, and an error
    leaves the module as it was.

    Args:
        to: "sync" replaces nn.BatchNorm1d, 2d and 3d by SyncBatchNorm1d, 2d and 3d; "local" back.
        process_group, images, running: for "sync", as in SyncBatchNorm; layers that are
            synchronized get them too, unless they are the defaults.

    Raises:
        TypeError: a layer is of a subclass that computes something else (see `is_batch_norm`).
        ValueError: `to` is something else.
    """
    if to not in ("sync", "local"):
        raise ValueError(f'expected "sync" or "local", got {to!r}')
    for path, layer in module.named_modules():
        is_subclass = isinstance(layer, _BatchNorm) and type(layer) not in _TO_SYNC | _TO_LOCAL
        # A subclass of torch's layers is local already.
        is_ours = isinstance(layer, SyncBatchNorm)
        if is_subclass and (is_ours or (to == "sync" and not is_batch_norm(layer))):
            raise TypeError(
                f"{path or 'the module'} is a {type(layer).__name__}: expected a batch norm of 1, "
                "2 or 3 dimensions, then at most modules that it holds; what this class computes "
                "would be lost"
            )
    # By layer: one that is used in several places must stay one.
    done: dict[nn.Module, nn.Module] = {}
    asked = {"process_group": process_group, "images": images, "running": running}
    sharing = {} if (process_group, images, running) == (None, None, "pooled") else asked

    def replace(layer: nn.Module) -> nn.Module:
        if layer not in done:
            done[layer] = _replacement(layer, to, sharing)
            # named_children would skip a layer that its parent holds under a second name.
            for name, child in layer._modules.items():
                if child is not None:
                    setattr(layer, name, replace(child))
        return done[layer]

    return replace(module)


def _replacement(layer: nn.Module, to: str, sharing: dict[str, Any]) -> nn.Module:
    """What takes the place of `layer`: a new batch norm, or `layer` itself.

    sharing: arguments of SyncBatchNorm.
    """
    kind = _TO_SYNC.get(_base(layer)) if to == "sync" else _TO_LOCAL.get(type(layer))
    if kind is None:
        if to == "sync" and sharing and type(layer) in _TO_LOCAL:
            alike = SyncBatchNorm(layer.num_features, device="meta", **sharing)
            layer.__dict__.update({name: vars(alike)[name] for name in sharing})
        return layer
    extra = sharing if to == "sync" else {}
    new = kind(layer.num_features, affine=False, track_running_stats=False, **extra)
    # __dict__ holds everything of a module, hooks and tensors too. Attributes that only the new
    # class has keep their values.
    own = _OWN if to == "local" else ()
    new.__dict__.update({k: v for k, v in layer.__dict__.items() if k not in own})
    if to == "sync":
        keep_inside(new, layer)
    return new


def keep_inside(norm: nn.Module, layer: nn.Module) -> None:
    """Lets `norm` apply, after normalizing, what `layer` holds: the activation of timm's layers."""
    if any(not isinstance(child, nn.Identity) for child in layer.children()):
        norm._modules = layer._modules
        # Before the user's hooks, which expect the activation's output.
        norm.register_forward_hook(_apply_inside, prepend=True)


def _apply_inside(norm: nn.Module, _: Any, output: Tensor) -> Tensor:
    for child in norm.children():
        output = child(output)
    return output


def _base(layer: nn.Module) -> type[_BatchNorm] | None:
    """The batch norm of torch that `layer` is or derives from."""
    return next((base for base in _TO_SYNC if isinstance(layer, base)), None)


def is_batch_norm(layer: nn.Module) -> bool:
    """Whether `layer` computes torch's batch norm and then applies the modules that it holds.

    A subclass may do anything, so it is tried on numbers beside its base class: outputs in training
    and in evaluation, and running statistics.
    """
    base = _base(layer)
    if base is None or type(layer) is base:
        return base is not None
    with torch.device("cpu"), torch.no_grad():  # the model may be made on the meta device
        return _computes_as(layer, base)


def _computes_as(layer: nn.Module, base: type[_BatchNorm]) -> bool:
    """Whether a layer of a subclass of `base` computes as `is_batch_norm` says."""

    def numbers(*shape: int) -> Tensor:
        return torch.arange(math.prod(shape)).double().sin().view(shape)

    twin = base(layer.num_features, layer.eps, 0.3, layer.affine, layer.track_running_stats)
    for tensor in twin.double().state_dict().values():
        tensor.copy_(1 + numbers(*tensor.shape) / 2)
    # A copy with parameters and modules of its own: the trial must leave the layer as it is.
    trial = copy.copy(layer)
    own = {name: vars(copy.deepcopy(twin))[name] for name in ("_parameters", "_buffers")}
    inside = {
        name: copy.deepcopy(child).to_empty(device="cpu").double().eval()
        for name, child in layer.named_children()
    }
    vars(trial).update(own, momentum=0.3, _modules=inside)
    x = numbers(3, layer.num_features, *[2] * (1 + list(_TO_SYNC).index(base)))
    for trial.training in (True, False):
        twin.training = trial.training
        try:
            output = type(layer).forward(trial, x.clone())
            wanted = _apply_inside(trial, None, twin(x.clone()))
        except (AssertionError, AttributeError, RuntimeError):
            return False
        if not torch.allclose(output, wanted, equal_nan=True):
            return False
    return all(map(torch.allclose, trial.buffers(recurse=False), twin.buffers()))
