"""State dicts from checkpoints: whether they fit a model and hold usable numbers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segtrain.errors import CheckpointError
from segtrain.files.torch_file import is_plain
from segtrain.text import MAX_NAME, printable

_MAX_LISTED = 10


def load_weights(model: nn.Module, weights: dict[str, Any], path: Path) -> None:
    """Copies a state dict into `model`, all of it or nothing.

    Raises:
        CheckpointError: as `check_fit`; or values are NaN, infinite or a negative variance. The
            first ten tensors are named.
    """
    check_fit(model, weights, path)
    own = model.state_dict()
    findings = [
        f"{key}: {problem}"
        for key, value in own.items()
        if (problem := _value_problem(key, weights[key], value.dtype))
    ]
    if findings:
        # A model with such a number predicts one class everywhere and raises no error.
        raise CheckpointError(
            f"{path}: damaged: the weights hold numbers that no training leaves; use another "
            f"checkpoint\n{_listed(findings)}"
        )
    model.load_state_dict(weights)


def check_fit(model: nn.Module, weights: dict[str, Any], path: Path) -> None:
    """Refuses a state dict whose keys or shapes are not those of `model`.

    model: its tensors may be on the meta device.

    Raises:
        CheckpointError: keys are missing, unexpected, of another shape or no tensors; the first ten
            are named.
    """
    check_plain(weights, path)
    own = model.state_dict()
    findings = [f"{key}: missing in the checkpoint" for key in own.keys() - weights.keys()]
    foreign = weights.keys() - own.keys()
    findings += [f"{printable(key, MAX_NAME)}: not in the model" for key in foreign]
    findings += [
        f"{key}: {tuple(weights[key].shape)} in the checkpoint, "
        f"{tuple(own[key].shape)} in the model"
        for key in own.keys() & weights.keys()
        if own[key].shape != weights[key].shape
    ]
    if findings:
        raise CheckpointError(f"{path}: the weights do not fit the model\n{_listed(findings)}")


def check_plain(weights: dict[str, Any], path: Path) -> None:
    """Refuses a state dict with anything but plain tensors under its names.

    Raises:
        CheckpointError: the first ten keys of something else.
    """
    odd = [key for key, value in weights.items() if type(key) is not str or not is_plain(value)]
    if odd:
        names = ", ".join(printable(key, MAX_NAME) for key in odd[:_MAX_LISTED])
        raise CheckpointError(f"{path}: damaged: no weights under {names}")


def _value_problem(key: str, value: Tensor, dtype: torch.dtype) -> str:
    """What is wrong with the numbers of `value` once they are `dtype`; empty if nothing."""
    # 1e300 in float64 is infinite in the model's float32.
    value = value.to(dtype)
    if value.is_floating_point() and not torch.isfinite(value).all():
        kind = "NaN" if value.isnan().any() else "infinite"
        return f"{int((~value.isfinite()).sum())} of {value.numel()} values are {kind}"
    name = key.rpartition(".")[2]
    if name == "running_var" and (value < 0).any():
        return f"a variance below 0: {value.min().item():g}"
    if name == "num_batches_tracked" and (value < 0).any():
        return f"a count below 0: {value.min().item():g}"
    return ""


def _listed(findings: Iterable[str]) -> str:
    findings = sorted(findings)
    more = len(findings) - _MAX_LISTED
    lines = findings[:_MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
    return "\n".join(f"  {line}" for line in lines)
