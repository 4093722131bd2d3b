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
    as_ranks,
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
_KNOWN = (*_TO_SYNC, *_TO_LOCAL)
# What only the layers of this package have.
_OWN = ("process_group", "on_one_value", "double_backward", "extent", "running", "_seen")


def convert(
    module: nn.Module, to: Literal["sync", "local"] = "sync", *, process_group: Group = None
) -> nn.Module:
    """`module` with its batch norm layers exchanged in place; itself a batch norm, its counterpart.

    Parameters and buffers are the same tensors afterwards, so an optimizer made before stays valid;
    training mode, hooks and layers that stand in several places are kept too. Converting twice
    changes nothing, and an error leaves the module as it was.

    Args:
        to: "sync" exchanges nn.BatchNorm1d, 2d and 3d for SyncBatchNorm1d, 2d and 3d; "local" back.
        process_group: as in SyncBatchNorm, for "sync"; given, also of layers that are so already.

    Raises:
        TypeError: a layer derives from a batch norm class without being it: the exchange would
            silently drop what the subclass adds.
        ValueError: `to` is something else.
    """
    if to not in ("sync", "local"):
        raise ValueError(f'expected "sync" or "local", got {to!r}')
    for path, layer in module.named_modules():
        _check(layer, to, path)
    done: dict[nn.Module, nn.Module] = {}

    def exchange(layer: nn.Module) -> nn.Module:
        if layer not in done:
            done[layer] = _exchanged(layer, to, process_group)
            # Not named_children, which leaves out the second place of a layer in its parent.
            for name, child in layer._modules.items():
                if child is not None:
                    setattr(layer, name, exchange(child))
        return done[layer]

    return exchange(module)


def _check(layer: nn.Module, to: str, path: str) -> None:
    """Refuses a batch norm that neither is what it should become nor can become it."""
    if not isinstance(layer, nn.modules.batchnorm._BatchNorm) or type(layer) in _KNOWN:
        return
    # The others are local already.
    if to == "sync" or isinstance(layer, SyncBatchNorm):
        raise TypeError(
            f"{path or 'the module'} is a {type(layer).__name__}: only batch norm layers of 1, 2 "
            "or 3 dimensions themselves can be converted, not what derives from them"
        )


def _exchanged(layer: nn.Module, to: str, process_group: Group) -> nn.Module:
    table = _TO_SYNC if to == "sync" else _TO_LOCAL
    if type(layer) in table:
        return _rebuilt(layer, table[type(layer)], process_group)
    if to == "sync" and process_group is not None and type(layer) in _TO_LOCAL:
        layer.process_group = as_ranks(process_group)
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
