"""Restoring a training: weights, optimizer and loss scale, checked before it goes on."""

import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segtrain.checkpoint.format import LAST, Checkpoint, parse_experiment
from segtrain.checkpoint.weights import check_fit, load_weights
from segtrain.config import Config
from segtrain.data.read.classes import ClassFile
from segtrain.errors import CheckpointError
from segtrain.run.directory import config_differences
from segtrain.text import MAX_NAME, printable
from segtrain.training.optim.muon import Muon
from segtrain.training.state import TrainState


def restore(state: TrainState, checkpoint: Checkpoint, path: Path) -> None:
    """Sets `state` to what it was when `checkpoint` was saved; called on every rank.

    CheckpointError if it does not hold what this state needs, or is damaged.
    """
    if checkpoint.optimizer is None or checkpoint.scaler is None:
        raise CheckpointError(f"{path}: holds no training state; go on with {LAST}")
    load_weights(state.model, checkpoint.model, path)
    if state.average is not None:
        if checkpoint.average is None:
            raise CheckpointError(f"{path}: holds no average of the weights (optim.ema_decay)")
        load_weights(state.average.model, checkpoint.average, path)
    try:
        _check_finite(checkpoint.optimizer["state"])
        restore_optimizer(state.optimizer, checkpoint.optimizer)
        restore_initial_weights(state, checkpoint.start)
        # The run may not have used float16 before; a new scaler finds its scale within some steps.
        if state.scaler.is_enabled() and checkpoint.scaler:
            state.scaler.load_state_dict(checkpoint.scaler)
        state.passes.restore(checkpoint.shares)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    # A stranger's file has anything where a dict, a list, a number or a tensor is expected.
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        problem = printable(str(error) or type(error).__name__, 2 * MAX_NAME)
        what = "the state of training is damaged, or belongs to another model"
        raise CheckpointError(f"{path}: {what}: {problem}") from error
    state.step = checkpoint.step


def check_changes(
    model: nn.Module, checkpoint: Checkpoint, path: Path, config: Config, classes: ClassFile
) -> None:
    """CheckpointError if options or classes have changed so that the run needs another state."""
    before, known = parse_experiment(checkpoint, path)
    guilty = ["optim.kind:"]
    if checkpoint.average is None:
        guilty.append("optim.ema_decay:")
    if checkpoint.best is not None:  # another score may have been best at another step
        guilty.append("eval.best:")
    if _pruning(before) != _pruning(config):
        guilty.append("optim.layers:")
    elif config.optim.prunes and "held" not in (checkpoint.start or {}):
        raise CheckpointError(f"{path}: damaged: no masks of the weights that stay 0")
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


def _pruning(config: Config) -> list[tuple[Any, ...]]:
    """What of the rules for layers decides which weights stay 0."""
    rules = config.optim.layers
    return [(rule.names, rule.keep_zeros, rule.zero) for rule in rules if rule.prunes]


def initial_weights_fields(state: TrainState) -> dict[str, Any] | None:
    """What a checkpoint keeps of the weights that training started from; None if it needs nothing.

    loaded: the names of the weights that came from a file; None: all.
    weights: the starting values of those that decay pulls toward them, by name.
    held: bool masks of the weights that stay 0, by name.
    """
    initial = state.initial_weights
    if not initial.is_needed:
        return None
    return {
        "loaded": None if initial.loaded is None else sorted(initial.loaded),
        "weights": dict(initial.weights),
        "held": dict(initial.held),
    }


def restore_initial_weights(state: TrainState, saved: dict[str, Any] | None) -> None:
    """Sets the weights that training started from."""
    initial = state.initial_weights
    if not initial.is_needed:
        return
    if saved is None or not initial.weights.keys() <= saved["weights"].keys():
        raise CheckpointError(
            "does not hold the weights that the run started from, which new_weight_decay and "
            "decay_toward need: these cannot change in the middle of a run; start a new one with "
            "train.init_from"
        )
    for name, value in initial.weights.items():
        _check_shape(name, saved["weights"][name], value.shape)
        value.copy_(saved["weights"][name])
    for name, mask in saved.get("held", {}).items():
        parameter = state.model.get_parameter(name)
        _check_shape(name, mask, parameter.shape)
        initial.held[name] = torch.empty_like(parameter, dtype=torch.bool).copy_(mask)


def optimizer_fields(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint keeps of an optimizer; rates are numbers, on whatever device they are."""
    saved = optimizer.state_dict()
    return saved | {
        "param_groups": [group | {"lr": float(group["lr"])} for group in saved["param_groups"]]
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Loads the state of each weight by its name; settings stay as configured.

    torch goes by the order of weights alone: with other groups it would give a weight the momentum
    of another. And it keeps the memory format of the checkpoint, while its fused updates take no
    other than that of the weight.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    # Rates may be tensors, which torch would copy to other memory.
    groups = [group | {"lr": 0.0} for group in optimizer.state_dict()["param_groups"]]
    own = [name for group in groups for name in group["param_names"]]
    states = {
        name: saved["state"][number]
        for group in saved["param_groups"]
        for name, number in zip(group["param_names"], group["params"], strict=True)
        if number in saved["state"]
    }
    state = {i: states[name] for i, name in enumerate(own) if name in states}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # A plugin's keeps what it wants.
    is_own = isinstance(optimizer, torch.optim.SGD | torch.optim.AdamW | Muon)
    for i, values in state.items():
        state[i] = dict(values)
        for name, value in values.items():
            like = isinstance(value, Tensor) and value.shape == parameters[i].shape
            if not is_own and not like:
                continue
            if value is not None:  # that of SGD without momentum
                _check_shape(name, value, () if name == "step" else parameters[i].shape)
                if name != "step":
                    state[i][name] = torch.empty_like(parameters[i]).copy_(value)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _check_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError for another shape, which torch might broadcast."""
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, found {tuple(value.shape)}")


def _check_finite(states: dict[int, dict[str, Tensor | None]]) -> None:
    """Raises ValueError: an infinite second moment would keep its weight where it is."""
    for values in states.values():
        for name, value in values.items():
            if isinstance(value, Tensor) and not value.isfinite().all():
                raise ValueError(f"{name} is not finite")
