"""How a replayed step differs from the receipt or the checkpoint of a run, in words."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from segtrain.checkpoint.format import Checkpoint
from segtrain.checkpoint.restore import initial_weights_fields
from segtrain.run.receipts import GRADIENT, WEIGHT, Receipt, unpack
from segtrain.text import MAX_NAME, printable
from segtrain.training.receipts import hash_tensor, weights_fields
from segtrain.training.state import TrainState


def receipt_differences(there: Receipt, here: Receipt, state: TrainState) -> list[str]:
    """A line for each field in which two receipts of a step differ, in the order of computation."""
    lines = []
    if there.samples != here.samples:
        lines.append("samples: other names or another order: the data or their order changed")
    for field in ("loss", "aux_loss", "grad_norm"):
        before, now = getattr(there, field), getattr(here, field)
        if before != now:
            lines.append(f"{field}: {_number(before)} there, {_number(now)} now")
    # What is nearest to the loss comes first in the backward pass.
    names = state.gradients.names[::-1]
    before, now = (unpack(receipt.gradients, GRADIENT)[::-1] for receipt in (there, here))
    lines += _tensors("gradients", before, now, names, "the nearest to the loss")
    return lines + weights_differences(there, (here.weights, here.average), state)


def weights_differences(
    there: Receipt, here: tuple[str | None, str | None], state: TrainState
) -> list[str]:
    """Likewise for the fields `weights` and `average`, if the receipt has them."""
    lines = []
    names = list(state.model.state_dict())
    if there.weights is None:
        return lines
    for field, before, now in zip(
        ("weights", "average"), (there.weights, there.average), here, strict=True
    ):
        values = unpack(before, WEIGHT), unpack(now, WEIGHT)
        lines += _tensors(field, *values, names, "the first")
    return lines


def start_differences(there: Receipt, state: TrainState) -> list[str]:
    """How the weights that a replay starts from differ from the receipt of their step."""
    return weights_differences(there, weights_fields(state), state)


def checkpoint_differences(checkpoint: Checkpoint, state: TrainState) -> list[str]:
    """A line for each part of a checkpoint that differs from `state` in any bit."""
    average = {} if state.average is None else state.average.model.state_dict()
    optimizer = _moments(state.optimizer.state_dict(), state.model, state.optimizer)
    parts = [
        ("model", checkpoint.model, state.model.state_dict()),
        ("average", checkpoint.average or {}, average),
    ]
    if checkpoint.optimizer is not None:
        saved = _moments(checkpoint.optimizer, state.model, state.optimizer)
        parts.append(("optimizer", saved, optimizer))
        exponents = (checkpoint.shares or {}).get("exponents")
        parts.append(("exponents", exponents or {}, state.gradients.exponents))
        parts.append(("start", _start(checkpoint.start), _start(initial_weights_fields(state))))
        parts.append(("loss scale", checkpoint.scaler or {}, state.scaler.state_dict()))
    lines = []
    for what, before, now in parts:
        names = list(dict.fromkeys([*now, *before]))
        differing = [name for name in names if not _is_equal(before.get(name), now.get(name))]
        lines += _line(what, differing, len(names), "the first")
    return lines


def _start(fields: dict[str, Any] | None) -> dict[str, Any]:
    """The tensors of the field `start`, by name."""
    kinds = ("weights", "held")
    found = {kind: fields.get(kind) for kind in kinds} if isinstance(fields, dict) else {}
    return {
        f"{kind} of {printable(name, MAX_NAME)}": value
        for kind, tensors in found.items()
        for name, value in (tensors.items() if isinstance(tensors, dict) else ())
    }


def _moments(
    saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """What an optimizer's state dict holds for each weight, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    found = {}
    # That of a stranger may hold anything.
    states = saved.get("state")
    for number, values in states.items() if isinstance(states, dict) else ():
        is_known = isinstance(number, int) and 0 <= number < len(order)
        name = order[number] if is_known else printable(number, MAX_NAME)
        for key, value in values.items() if isinstance(values, dict) else ():
            found[f"{printable(key, MAX_NAME)} of {name}"] = value
    return found


def _is_equal(before: object, now: object) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        # Not torch.equal, for which -0.0 is 0.0.
        return hash_tensor("", before) == hash_tensor("", now)
    return type(before) is type(now) and before == now


def _tensors(
    what: str, before: Sequence[int], now: Sequence[int], names: Sequence[str], which: str
) -> list[str]:
    if not len(before) == len(now) == len(names):
        return [] if before == now else [f"{what}: {len(before)} tensors there, {len(now)} now"]
    pairs = zip(names, before, now, strict=True)
    return _line(what, [name for name, a, b in pairs if a != b], len(names), which)


def _line(what: str, differing: Sequence[str], total: int, which: str) -> list[str]:
    if not differing:
        return []
    if len(differing) == total > 1:
        return [f"{what}: all {total} tensors differ"]
    verb = "differs" if len(differing) == 1 else "differ"
    first = printable(differing[0], 2 * MAX_NAME)
    return [f"{what}: {len(differing)} of {total} tensors {verb}; {which} is {first}"]


def _number(text: str | None) -> str:
    """A field of a receipt: what it says, and its bits."""
    if text is None:
        return "none"
    try:
        return f"{float.fromhex(text):.9g} ({printable(text, MAX_NAME)})"
    except (ValueError, OverflowError):
        return printable(text, MAX_NAME)
