"""`train.precision`: the type of the weights, and mixed precision by autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch

from segtrain.config import TrainConfig

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(train: TrainConfig) -> torch.dtype:
    """The type of weights and images; mixed precision keeps them in float32."""
    return torch.float64 if train.precision == "float64" else torch.float32


def autocast_dtype(train: TrainConfig) -> torch.dtype | None:
    """The lower type of mixed precision; None without it."""
    return _AUTOCAST.get(train.precision)


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Mixed precision with `dtype` for a forward pass; without effect if it is None."""
    if dtype is None:
        return nullcontext()
    # A forward pass uses each weight once. torch's cache of converted weights belongs to all
    # threads of the process, and one of several shares would empty it for the others.
    return torch.autocast(device.type, dtype, cache_enabled=False)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switches mixed precision off."""
    # Where it is off already, switching it off would only add a node to exported graphs.
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
