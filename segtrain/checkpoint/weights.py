"""State dicts from checkpoints: do they fit the model, and are their numbers usable?"""

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
    """Copies a whole state dict into `model`, or nothing.

    CheckpointError if it does not fit, or holds NaN, infinities or a negative variance.
    """
    check_fit(model, weights, path)
    problems = [
        f"{key}: {problem}"
        for key, value in model.state_dict().items()
        if (problem := _value_problem(key, weights[key], value.dtype))
    ]
    if problems:
        # Such a model predicts the same class everywhere, without any error.
        raise CheckpointError(
            f"{path}: damaged: the weights hold numbers that no training leaves; use another "
            f"checkpoint\n{_listed(problems)}"
        )
    model.load_state_dict(weights)


def check_fit(model: nn.Module, weights: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError if keys or shapes are not those of `model`, which may be on "meta"."""
    check_plain(weights, path)
    own = model.state_dict()
    problems = [f"{key}: missing in the checkpoint" for key in own.keys() - weights.keys()]
    unknown = weights.keys() - own.keys()
    problems += [f"{printable(key, MAX_NAME)}: not in the model" for key in unknown]
    problems += [
        f"{key}: {tuple(weights[key].shape)} in the checkpoint, "
        f"{tuple(own[key].shape)} in the model"
        for key in own.keys() & weights.keys()
        if own[key].shape != weights[key].shape
    ]
    if problems:
        raise CheckpointError(f"{path}: the weights do not fit the model\n{_listed(problems)}")


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


def _listed(problems: Iterable[str]) -> str:
    problems = sorted(problems)
    more = len(problems) - _MAX_LISTED
    lines = problems[:_MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
    return "\n".join(f"  {line}" for line in lines)
