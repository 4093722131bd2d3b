"""What a checkpoint keeps of an optimizer, and how it is taken back."""

from typing import Any

import torch
from torch import Tensor


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
    is_own = isinstance(optimizer, torch.optim.SGD | torch.optim.AdamW)
    # Muon, and what derives from it.
    bases = type(optimizer).__mro__
    is_own = is_own or any(base.__module__.startswith("segtrain.") for base in bases)
    for i, values in state.items():
        state[i] = dict(values)
        for name, value in values.items():
            like = isinstance(value, Tensor) and value.shape == parameters[i].shape
            if not is_own and not like:
                continue
            if value is not None:  # that of SGD without momentum
                check_shape(name, value, () if name == "step" else parameters[i].shape)
                if name != "step":
                    state[i][name] = torch.empty_like(parameters[i]).copy_(value)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def check_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError for another shape, which torch might broadcast."""
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, found {tuple(value.shape)}")


def check_finite(states: dict[int, dict[str, Tensor | None]]) -> None:
    """Raises ValueError: an infinite second moment would keep its weight where it is."""
    for values in states.values():
        for name, value in values.items():
            if isinstance(value, Tensor) and not value.isfinite().all():
                raise ValueError(f"{name} is not finite")
