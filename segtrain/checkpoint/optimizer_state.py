"""The optimizer's and the loss scale's part of a checkpoint, checked before training goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segtrain.errors import CheckpointError
from segtrain.files.torch_file import is_plain
from segtrain.text import MAX_NAME, printable


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], path: Path) -> None:
    """Loads the momenta of `saved`; learning rates and the like stay those of the config.

    Raises:
        CheckpointError: it is of another optimizer or other weights, or its numbers are damaged.
    """
    # What the config says counts, not what it said: loading would bring the old values back.
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    try:
        optimizer.load_state_dict(saved)
        misfits = _misfits(optimizer)
    # Whatever lies where it looks for a dict, a list or a tensor.
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        misfits = str(error) or type(error).__name__
    if misfits:
        raise CheckpointError(
            f"{path}: the optimizer's state belongs to another optimizer or to other groups of "
            f"weights: {misfits}"
        )
    if damage := _damage(optimizer):
        raise CheckpointError(f"{path}: damaged: the optimizer's {damage}")
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def restore_scaler(scaler: torch.amp.GradScaler, saved: dict[str, Any], path: Path) -> None:
    """Loads the loss scale and what it grows by.

    Raises:
        CheckpointError: fields are missing, of another kind or out of range.
    """
    kinds = {key: type(value) for key, value in scaler.state_dict().items()}
    if {key: type(value) for key, value in saved.items()} != kinds:
        raise CheckpointError(f"{path}: the state of the loss scale is damaged")
    for key, value in saved.items():
        limit = _MAX_COUNT if isinstance(value, int) else _MAX_SCALE
        # NaN is below nothing.
        if not (abs(value) <= limit and _SCALER_RANGES[key](value)):
            raise CheckpointError(f"{path}: damaged: the loss scale has an impossible {key}")
    scaler.load_state_dict(saved)


_MAX_SCALE = 2.0**127  # the scale is kept in float32
_MAX_COUNT = 2**31 - 1  # and its counters in int32
_SCALER_RANGES: dict[str, Callable[[float], bool]] = {
    "scale": lambda value: value > 0,
    "growth_factor": lambda value: value > 1,
    "backoff_factor": lambda value: 0 < value < 1,
    "growth_interval": lambda value: value > 0,
    "_growth_tracker": lambda value: value >= 0,
}


def _misfits(optimizer: torch.optim.Optimizer) -> str:
    """What the next step would fail at; empty if nothing."""
    sgd = isinstance(optimizer, torch.optim.SGD)
    names = {"momentum_buffer"} if sgd else {"step", "exp_avg", "exp_avg_sq"}
    for parameter, values in optimizer.state.items():
        if values.keys() not in (names, set()):
            found = ", ".join(printable(name, MAX_NAME) for name in list(values)[:10])
            return f"has {found}, not {', '.join(sorted(names))}"
        for name, value in values.items():
            shape = () if name == "step" else parameter.shape
            if not (sgd and value is None) and not (is_plain(value) and value.shape == shape):
                return f"{name} does not fit weights of shape {tuple(parameter.shape)}"
    return ""


def _damage(optimizer: torch.optim.Optimizer) -> str:
    """What is wrong with the numbers of state that fits; empty if nothing."""
    seen: dict[int, Tensor] = {}
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if value is None:
                continue
            where = f"{name} for weights of shape {tuple(parameter.shape)}"
            storage = value.untyped_storage().data_ptr()
            # Steps write in place: one tensor's numbers would end in another.
            if value.numel() and seen.setdefault(storage, value) is not value:
                return f"{where} shares its memory with another one"
            if not torch.isfinite(value).all():
                return f"{where} holds NaN or infinite values"
            if name in ("step", "exp_avg_sq") and (value < 0).any():
                return f"{where} holds values below 0"
    return ""
