"""Exchange of a finished module's batch norm layers, both ways."""

from typing import Literal

from torch import nn

from segtrain.norm.partial import PartialBatchNorm2d
from segtrain.norm.sync import (
    Group,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
)

_TO_SYNC: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}
_TO_LOCAL: dict[type[nn.Module], type[nn.Module]] = {
    **{sync: local for local, sync in _TO_SYNC.items()},
    PartialBatchNorm2d: nn.BatchNorm2d,
}
# What only the layers of this package have.
_OWN = ("process_group", "on_one_value", "double_backward", "extent", "running", "_seen")


def convert(
    module: nn.Module, to: Literal["sync", "local"] = "sync", *, process_group: Group = None
) -> nn.Module:
    """`module` with its batch norm layers exchanged in place; itself a batch norm, its counterpart.

    Parameters and buffers are the same tensors afterwards, so an optimizer made before stays valid;
    training mode, hooks and layers that stand in several places are kept too. Converting twice
    changes nothing.

    Args:
        to: "sync" exchanges nn.BatchNorm1d, 2d and 3d for SyncBatchNorm1d, 2d and 3d; "local" back.
        process_group: as in SyncBatchNorm, for "sync".

    Raises:
        TypeError: a layer derives from a batch norm class without being it: the exchange would
            silently drop what the subclass adds.
    """
    done: dict[nn.Module, nn.Module] = {}

    def exchange(layer: nn.Module, path: str) -> nn.Module:
        if layer not in done:
            done[layer] = _exchanged(layer, to, process_group, path)
            for name, child in layer.named_children():
                setattr(layer, name, exchange(child, f"{path}.{name}" if path else name))
        return done[layer]

    return exchange(module, "")


def _exchanged(layer: nn.Module, to: str, process_group: Group, path: str) -> nn.Module:
    table = _TO_SYNC if to == "sync" else _TO_LOCAL
    if type(layer) in table:
        return _rebuilt(layer, table[type(layer)], process_group)
    known = (*_TO_SYNC, *_TO_LOCAL, SyncBatchNorm)
    is_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
    if to == "sync" and is_norm and type(layer) not in known:
        raise TypeError(
            f"{path or 'the module'} is a {type(layer).__name__}: only nn.BatchNorm1d, 2d and 3d "
            "themselves can be converted"
        )
    return layer


def _rebuilt(layer: nn.Module, kind: type[nn.Module], process_group: Group) -> nn.Module:
    extra = {"process_group": process_group} if issubclass(kind, SyncBatchNorm) else {}
    new = kind(
        layer.num_features,
        eps=layer.eps,
        momentum=layer.momentum,
        affine=False,
        track_running_stats=False,
        **extra,
    )
    # Everything a module is, hooks and tensors included, lies in its __dict__; what is left of the
    # new one are the attributes that only its class has.
    new.__dict__.update({k: v for k, v in layer.__dict__.items() if k not in extra})
    if not isinstance(new, SyncBatchNorm):
        for name in _OWN:
            new.__dict__.pop(name, None)
    return new
