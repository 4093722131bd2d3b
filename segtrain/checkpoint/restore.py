"""Restoring weights, optimizer and loss scale, checked before training goes on."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segtrain.checkpoint.format import LAST, Checkpoint, parse_experiment
from segtrain.config import Config
from segtrain.data.read.classes import ClassFile
from segtrain.errors import CheckpointError
from segtrain.files.torch_file import is_plain
from segtrain.run.directory import config_differences
from segtrain.text import MAX_NAME, printable
from segtrain.training.exact_sum import ExactGradientSum
from segtrain.training.state import TrainState

_MAX_LISTED = 10


def load_weights(
    model: nn.Module, weights: dict[str, Any], path: Path, *, differences: Sequence[str] = ()
) -> None:
    """Copies a whole state dict into `model`, or nothing.

    CheckpointError if it does not fit, or holds NaN, infinities or a negative variance.
    `differences` between the models are told before those of single tensors.
    """
    check_fit(model, weights, path, differences)
    own = model.state_dict().items()
    problems = {key: _value_problem(key, weights[key], value.dtype) for key, value in own}
    # Such a model predicts the same class everywhere, without any error.
    what = "damaged: the weights hold numbers that no training leaves; use another checkpoint"
    _refuse({key: problem for key, problem in problems.items() if problem}, what, path)
    model.load_state_dict(weights)


def check_fit(
    model: nn.Module, weights: dict[str, Any], path: Path, differences: Sequence[str] = ()
) -> None:
    """Raises CheckpointError if keys or shapes are not those of `model`, which may be on "meta"."""
    check_plain(weights, path)
    own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    there = {key: tuple(value.shape) for key, value in weights.items()}
    problems = {
        key: f"{there.get(key, 'missing')} in the checkpoint, {own.get(key, 'none')} in the model"
        for key in own.keys() | there.keys()
        if own.get(key) != there.get(key)
    }
    _refuse(problems, "\n  ".join(["the weights do not fit the model", *differences]), path)


def check_plain(weights: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError if a state dict holds anything but plain tensors."""
    odd = [key for key, value in weights.items() if type(key) is not str or not is_plain(value)]
    if odd:
        names = ", ".join(printable(key, MAX_NAME) for key in odd[:_MAX_LISTED])
        raise CheckpointError(f"{path}: damaged: no weights under {names}")


def _value_problem(key: str, value: Tensor, dtype: torch.dtype) -> str:
    """What is wrong with the numbers in the model's `dtype`; empty if nothing."""
    # 1e300 in float64 is infinite in the model's float32.
    value = value.to(dtype)
    if value.is_floating_point() and not torch.isfinite(value).all():
        kind = "NaN" if value.isnan().any() else "infinite"
        return f"{int((~value.isfinite()).sum())} of {value.numel()} values are {kind}"
    what = {"running_var": "variance", "num_batches_tracked": "count"}.get(key.rpartition(".")[2])
    if what is not None and (value < 0).any():
        return f"a {what} below 0: {value.min().item():g}"
    return ""


def _refuse(problems: dict[str, str], what: str, path: Path) -> None:
    lines = [f"\n  {printable(key, MAX_NAME)}: {problems[key]}" for key in sorted(problems)]
    more = f"\n  and {len(lines) - _MAX_LISTED} more" if len(lines) > _MAX_LISTED else ""
    if lines:
        raise CheckpointError(f"{path}: {what}{''.join(lines[:_MAX_LISTED])}{more}")


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
    restore_initial_weights(state, checkpoint.start, path)
    # The run may not have used float16 before; a new scaler finds its scale within some steps.
    if state.scaler.is_enabled() and checkpoint.scaler:
        restore_scaler(state.scaler, checkpoint.scaler, path)
    # The run may not have had shares before; the first step finds its exponents.
    if isinstance(state.gradients, ExactGradientSum) and checkpoint.shares:
        restore_exponents(state.gradients, checkpoint.shares, path)
    state.step = checkpoint.step


def check_changes(
    model: nn.Module, checkpoint: Checkpoint, path: Path, config: Config, classes: ClassFile
) -> None:
    """CheckpointError if options or classes have changed so that the run needs another state."""
    before, known = parse_experiment(checkpoint, path)
    guilty = ["train.optimizer:"]
    if checkpoint.average is None:
        guilty.append("train.ema_decay:")
    try:
        check_fit(model, checkpoint.model, path)
    except CheckpointError:
        guilty += ["data.classes:", "model.", "norm."]
    changes = config_differences(before, config)
    if known.num_classes != classes.num_classes:
        numbers = f"{known.num_classes} classes there, {classes.num_classes} now"
        changes.append(f"data.classes: {numbers}")
    changes = [line for line in changes if line.startswith(tuple(guilty))]
    if changes:
        listed = "\n  ".join(changes)
        run = shlex.quote(str(path.parent.parent))
        raise CheckpointError(
            f"{path}: does not hold the state that these changes need\n  {listed}\n"
            "to go on with the run: undo them\n"
            "to start a new run with its weights: --output DIR --set train.init_from="
            f"{run} instead of --resume"
        )


def initial_weights_fields(state: TrainState) -> dict[str, Any] | None:
    """What a checkpoint keeps of the weights that training started from; None if it needs nothing.

    loaded: the names of the weights that came from a file; None: all.
    weights: the starting values of those that decay pulls toward them, by name.
    held: bool masks of the weights that keep their value, by name.
    hold: what of the config decided the masks.
    """
    start = state.initial_weights
    if not start.is_needed:
        return None
    loaded = None if start.loaded is None else sorted(start.loaded)
    fields = {"weights": dict(start.weights), "held": dict(start.held)}
    return {"loaded": loaded, "hold": start.hold, **fields}


def loaded_names(checkpoint: Checkpoint, path: Path) -> list[str] | None:
    """The names of the weights that the run loaded at its start; None: all, or not told.

    CheckpointError if they are damaged.
    """
    names = (checkpoint.start or {}).get("loaded")
    if names is None or (type(names) is list and all(type(name) is str for name in names)):
        return names
    raise CheckpointError(f"{path}: damaged: the names of loaded weights cannot be read")


def restore_initial_weights(state: TrainState, saved: dict[str, Any] | None, path: Path) -> None:
    """Sets the weights that training started from; CheckpointError if other ones are needed."""
    start = state.initial_weights
    if not start.is_needed:
        return
    if saved is None:
        raise CheckpointError(
            f"{path}: does not hold the weights that the run started from, which new_weight_decay, "
            "decay_toward, hold_zeros and hold_mask need: these cannot begin in the middle of a "
            "run; start a new one with train.init_from"
        )
    weights, held = saved.get("weights"), saved.get("held")
    parameters = dict(state.model.named_parameters())
    damaged = f"{path}: damaged: the weights at the start of the run cannot be read"
    for tensors, is_mask in ((weights, False), (held, True)):
        if not isinstance(tensors, dict):
            raise CheckpointError(damaged)
        for name, value in tensors.items():
            fits = name in parameters and is_plain(value) and (value.dtype == torch.bool) is is_mask
            if not fits or value.shape != parameters[name].shape:
                raise CheckpointError(damaged)
            # In the precision of this run, which may be another one.
            if not torch.isfinite(value.to(parameters[name].dtype)).all():
                raise CheckpointError(damaged)
    if start.has_held and saved.get("hold") == start.hold and not held:
        raise CheckpointError(damaged)
    missing = [name for name in start.weights if name not in weights]
    if missing or saved.get("hold") != start.hold:
        what = f"does not hold where {missing[0]} started" if missing else "holds other weights"
        keys = "decay_toward" if missing else "hold_zeros and hold_mask"
        raise CheckpointError(
            f"{path}: {what}: {keys} cannot change in the middle of a run; start a new one with "
            "train.init_from"
        )
    for name, value in start.weights.items():
        value.copy_(weights[name])
    if start.has_held:
        start.held = {name: held[name].to(parameters[name].device) for name in held}
        start.hold_from_now(state.model)


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
    if not isinstance(exponents, dict):
        raise CheckpointError(f"{path}: damaged: it has no exponents of gradients")
    if exponents.keys() != names:
        raise CheckpointError(
            f"{path}: it has gradients of other weights: with train.shares, train.layers cannot "
            "freeze others in the middle of a run; start a new one with train.init_from"
        )
    if any(type(value) is not int or abs(value) > 128 for value in exponents.values()):
        raise CheckpointError(f"{path}: damaged: a gradient has an impossible exponent")
    gradients.exponents = exponents


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], path: Path) -> None:
    """Loads the state of each weight; learning rates and other settings stay as configured.

    Weights go by their names; older checkpoints have none, and their order counts. CheckpointError
    if it is of another optimizer or other weights, or its numbers are damaged.
    """
    # load_state_dict would bring back the settings of the old config.
    settings = [dict(group) for group in optimizer.param_groups]
    try:
        velocities = _velocity_rates(saved)
        optimizer.load_state_dict(_with_own_kernels(_in_order(saved, optimizer), optimizer))
        problem = _problem(optimizer)
    # A damaged dict has anything where torch expects a dict, a list or a tensor.
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        problem = str(error) or type(error).__name__
    if problem:
        what = "the optimizer's state is damaged, or belongs to another model"
        raise CheckpointError(f"{path}: {what}: {problem}")
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
        if "velocity_lr" in own:
            rates = {velocities.get(name) for name in own["param_names"]}
            if len(rates) > 1:
                raise CheckpointError(
                    f"{path}: weights of different learning rates are in one group now: with "
                    "train.momentum_correction false, rules for layers cannot change in the middle "
                    "of a run"
                )
            group["velocity_lr"] = rates.pop()


def _velocity_rates(saved: dict[str, Any]) -> dict[str, float | None]:
    """The learning rates of the newest step, which a velocity remembers, by weight."""
    rates = {}
    for group in saved["param_groups"]:
        rate = group.get("velocity_lr")
        if rate is not None and not (type(rate) is float and 0 <= rate < math.inf):
            raise ValueError("a group has an impossible velocity_lr")
        rates |= dict.fromkeys(group.get("param_names", ()), rate)
    return rates


def _in_order(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`saved` with its weights in the groups and the order of `optimizer`, if it has their names.

    torch goes by the order alone: with other groups it would give a weight the momentum of another.
    """
    groups = optimizer.state_dict()["param_groups"]
    own = [name for group in groups for name in group["param_names"]]
    if any("param_names" not in group for group in saved["param_groups"]):
        return saved
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    if names == own and len(groups) == len(saved["param_groups"]):
        return saved
    ids = [number for group in saved["param_groups"] for number in group["params"]]
    states = {
        name: saved["state"][i] for name, i in zip(names, ids, strict=True) if i in saved["state"]
    }
    numbers = [number for group in groups for number in group["params"]]
    state = {i: states[name] for name, i in zip(own, numbers, strict=True) if name in states}
    return {"state": state, "param_groups": groups}


def _with_own_kernels(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`saved` with the kernels of `optimizer`, which are others on another device.

    By them torch decides where the step counters go: for fused kernels, to the device.
    """
    fused = optimizer.param_groups[0]["fused"]
    groups = [{**group, "fused": fused} for group in saved["param_groups"]]
    return {**saved, "param_groups": groups}


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
