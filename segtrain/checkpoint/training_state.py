"""Restoring weights, optimizer and loss scale, checked before training goes on."""

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
from segtrain.training.exact_sum import ExactGradientSum


def restore(state: TrainState, checkpoint: Checkpoint, path: Path) -> None:
    """Sets `state` to what it was when `checkpoint` was saved; called on every rank."""
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
    # The run may not have had shares before; the first step finds its exponents.
    if isinstance(state.gradients, ExactGradientSum) and checkpoint.shares:
        restore_exponents(state.gradients, checkpoint.shares, path)
    state.step = checkpoint.step


def shares_fields(state: TrainState) -> dict[str, Any] | None:
    """What a checkpoint keeps for train.shares; None without it.

    exponents: of the fixed-point gradients of the next step, by parameter.
    arithmetic: `arithmetic.fingerprint` of rank 0.
    """
    if not isinstance(state.gradients, ExactGradientSum):
        return None
    return {"exponents": state.gradients.exponents, "arithmetic": state.arithmetic}


def restore_exponents(gradients: ExactGradientSum, saved: dict[str, Any], path: Path) -> None:
    """Sets the exponents of the next step; CheckpointError if they are damaged."""
    exponents = saved.get("exponents")
    names = gradients.exponents.keys()
    if not (isinstance(exponents, dict) and exponents.keys() == names):
        raise CheckpointError(f"{path}: damaged: the gradients' exponents are of other weights")
    if any(type(value) is not int or abs(value) > 128 for value in exponents.values()):
        raise CheckpointError(f"{path}: damaged: a gradient has an impossible exponent")
    gradients.exponents = exponents


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], path: Path) -> None:
    """Loads the state of each weight; learning rates and other settings stay as configured.

    CheckpointError if it is of another optimizer or other weights, or its numbers are damaged.
    """
    # load_state_dict would bring back the settings of the old config.
    settings = [dict(group) for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(saved)
        problem = _problem(optimizer)
    # A damaged dict has anything where torch expects a dict, a list or a tensor.
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        problem = str(error) or type(error).__name__
    if problem:
        what = "the optimizer's state is damaged, or belongs to another optimizer or model"
        raise CheckpointError(f"{path}: {what}: {problem}")
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


# Each value is above the first and below the second number: the scale is a float32, counters int32.
_SCALER_RANGES = {
    "scale": (0, 2.0**128),
    "growth_factor": (1, 2.0**128),
    "backoff_factor": (0, 1),
    "growth_interval": (0, 2**31),
    "_growth_tracker": (-1, 2**31),
}


def restore_scaler(scaler: torch.amp.GradScaler, saved: dict[str, Any], path: Path) -> None:
    """Loads the loss scale and its counters; CheckpointError if they are out of range."""
    types = {key: type(value) for key, value in scaler.state_dict().items()}
    if {key: type(value) for key, value in saved.items()} != types:
        raise CheckpointError(f"{path}: the state of the loss scale is damaged")
    for key, (low, high) in _SCALER_RANGES.items():
        # NaN fails every comparison.
        if not low < saved[key] < high:
            raise CheckpointError(f"{path}: damaged: the loss scale has an impossible {key}")
    scaler.load_state_dict(saved)


def _problem(optimizer: torch.optim.Optimizer) -> str:
    """Why the next step would fail or go wrong; empty if it would not."""
    sgd = isinstance(optimizer, torch.optim.SGD)
    names = {"momentum_buffer"} if sgd else {"step", "exp_avg", "exp_avg_sq"}
    seen: dict[int, Tensor] = {}
    for parameter, values in optimizer.state.items():
        if values.keys() not in (names, set()):
            return f"has {printable(list(values), MAX_NAME)}, not {sorted(names)}"
        for name, value in values.items():
            if sgd and value is None:
                continue
            shape = () if name == "step" else parameter.shape
            what = f"{name} for weights of shape {tuple(parameter.shape)}"
            if not (is_plain(value) and value.shape == shape):
                return f"{what} does not fit"
            # Steps write in place: an update of one tensor would change the other.
            storage = value.untyped_storage().data_ptr()
            if value.numel() and seen.setdefault(storage, value) is not value:
                return f"{what} shares its memory with another one"
            if not torch.isfinite(value).all():
                return f"{what} holds NaN or infinite values"
            if name in ("step", "exp_avg_sq") and (value < 0).any():
                return f"{what} holds values below 0"
    return ""
