"""Loading the weights of a checkpoint into a model: all of them, and checked before, or none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segtrain.errors import CheckpointError
from segtrain.files.torch_file import is_plain
from segtrain.text import MAX_NAME, first_of, printable

_NEXT_LINE = "\n  "


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
    _refuse(problems, _NEXT_LINE.join(["the weights do not fit the model", *differences]), path)


def check_plain(weights: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError if a state dict holds anything but plain tensors."""
    odd = [printable(key, MAX_NAME) for key, value in weights.items() if not is_plain(value)]
    if odd:
        raise CheckpointError(f"{path}: damaged: no weights under {first_of(odd)}")


def _value_problem(key: str, value: Tensor, dtype: torch.dtype) -> str:
    """What is wrong with the numbers in the model's `dtype`; empty if nothing."""
    # 1e300 in float64 is infinite in the model's float32.
    value = value.to(dtype)
    if odd := int((~value.isfinite()).sum()):
        return f"{odd} of {value.numel()} values are not finite"
    what = {"running_var": "variance", "num_batches_tracked": "count"}.get(key.rpartition(".")[2])
    if what is not None and (value < 0).any():
        return f"a {what} below 0: {value.min().item():g}"
    return ""


def _refuse(problems: dict[str, str], what: str, path: Path) -> None:
    lines = [f"{printable(key, MAX_NAME)}: {problems[key]}" for key in sorted(problems)]
    if lines:
        raise CheckpointError(f"{path}: {what}\n  {first_of(lines, separator=_NEXT_LINE)}")
