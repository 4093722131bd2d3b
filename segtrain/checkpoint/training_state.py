"""Restoring weights, optimizer and loss scale, checked before training goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segtrain.checkpoint.format import LAST, Checkpoint
from segtrain.checkpoint.weights import load_weights
from segtrain.errors import CheckpointError
from segtrain.files.torch_file import is_plain
from segtrain.text import MAX_NAME, printable
from segtrain.training.engine import TrainState


def restore(state: TrainState, checkpoint: Checkpoint, path: Path) -> None:
    """Sets `state` to what it was when `checkpoint` was saved; called on every rank.

    Raises:
        CheckpointError: it belongs to another model, or holds no training state.
    """
    if checkpoint.optimizer is None or checkpoint.scaler is None:
        raise CheckpointError(f"{path}: holds no training state; go on with {LAST}")
    load_weights(state.model, checkpoint.model, path)
    if state.average is not None:
        if checkpoint.average is None:
            raise CheckpointError(f"{path}: holds no average of the weights (train.ema_decay)")
        load_weights(state.average.model, checkpoint.average, path)
    restore_optimizer(state.optimizer, checkpoint.optimizer, path)
    # The run may not have used float16 before; a new scaler finds its scale within some steps.
    if state.scaler.is_enabled() and checkpoint.scaler:
        restore_scaler(state.scaler, checkpoint.scaler, path)
    state.step = checkpoint.step


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], path: Path) -> None:
    """Loads the state of each weight; learning rates and other settings stay as configured.

    Raises:
        CheckpointError: it belongs to another optimizer or other weights, or its numbers are
            damaged.
    """
    # load_state_dict would bring back the settings of the old config.
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    try:
        optimizer.load_state_dict(saved)
        misfit = _misfit(optimizer)
    # A damaged dict has anything where torch expects a dict, a list or a tensor.
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        misfit = str(error) or type(error).__name__
    if misfit:
        raise CheckpointError(
            f"{path}: the optimizer's state belongs to another optimizer or to other groups of "
            f"weights: {misfit}"
        )
    if damage := _damage(optimizer):
        raise CheckpointError(f"{path}: damaged: the optimizer's {damage}")
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


_MAX_SCALE = 2.0**127  # the scale is a float32
_MAX_COUNT = 2**31 - 1  # its counters are int32
_SCALER_RANGES: dict[str, Callable[[float], bool]] = {
    "scale": lambda value: value > 0,
    "growth_factor": lambda value: value > 1,
    "backoff_factor": lambda value: 0 < value < 1,
    "growth_interval": lambda value: value > 0,
    "_growth_tracker": lambda value: value >= 0,
}


def restore_scaler(scaler: torch.amp.GradScaler, saved: dict[str, Any], path: Path) -> None:
    """Loads the loss scale and its counters.

    Raises:
        CheckpointError: fields are missing, of another type or out of range.
    """
    types = {key: type(value) for key, value in scaler.state_dict().items()}
    if {key: type(value) for key, value in saved.items()} != types:
        raise CheckpointError(f"{path}: the state of the loss scale is damaged")
    for key, value in saved.items():
        limit = _MAX_COUNT if isinstance(value, int) else _MAX_SCALE
        # NaN fails every comparison.
        if not (abs(value) <= limit and _SCALER_RANGES[key](value)):
            raise CheckpointError(f"{path}: damaged: the loss scale has an impossible {key}")
    scaler.load_state_dict(saved)


def _misfit(optimizer: torch.optim.Optimizer) -> str:
    """Why the next step would fail; empty if it would not."""
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
    """The first impossible number in the state; empty if there is none."""
    seen: dict[int, Tensor] = {}
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if value is None:
                continue
            where = f"{name} for weights of shape {tuple(parameter.shape)}"
            storage = value.untyped_storage().data_ptr()
            # Steps write in place: an update of one tensor would change the other.
            if value.numel() and seen.setdefault(storage, value) is not value:
                return f"{where} shares its memory with another one"
            if not torch.isfinite(value).all():
                return f"{where} holds NaN or infinite values"
            if name in ("step", "exp_avg_sq") and (value < 0).any():
                return f"{where} holds values below 0"
    return ""
