"""How a replayed step differs from the receipt or the checkpoint of a run, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

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
    gradients = [_named(names, unpack(r.gradients, GRADIENT)[::-1]) for r in (there, here)]
    lines += _tensors("gradients", *gradients, which="the nearest to the loss")
    return lines + _weights_differences(there, (here.weights, here.average), state)


def start_differences(there: Receipt, state: TrainState) -> list[str]:
    """How the weights that a replay starts from differ from the receipt of their step."""
    return _weights_differences(there, weights_fields(state), state)


def _weights_differences(
    there: Receipt, here: tuple[str | None, str | None], state: TrainState
) -> list[str]:
    """Likewise for the fields `weights` and `average`, if the receipt has them."""
    if there.weights is None:
        return []
    lines, names = [], list(state.model.state_dict())
    fields = ("weights", "average"), (there.weights, there.average), here
    for field, *packed in zip(*fields, strict=True):
        lines += _tensors(field, *(_named(names, unpack(text, WEIGHT)) for text in packed))
    return lines


def checkpoint_differences(checkpoint: Checkpoint, state: TrainState) -> list[str]:
    """A line for each part of a checkpoint that differs from `state` in any bit."""
    average = {} if state.average is None else state.average.model.state_dict()
    lines = _tensors("model", checkpoint.model, state.model.state_dict())
    lines += _tensors("average", checkpoint.average or {}, average)
    if checkpoint.optimizer is not None:
        saved = checkpoint.optimizer, state.optimizer.state_dict()
        lines += _tensors("optimizer", *(_moments(one, state) for one in saved))
        exponents = (checkpoint.shares or {}).get("exponents") or {}
        lines += _tensors("exponents", exponents, state.gradients.exponents)
        lines += _tensors("start", _start(checkpoint.start), _start(initial_weights_fields(state)))
        lines += _tensors("loss scale", checkpoint.scaler or {}, state.scaler.state_dict())
    return lines


def _moments(saved: dict[str, Any], state: TrainState) -> dict[str, Any]:
    """What an optimizer's state dict holds for each weight, by name."""
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    order = [names[p] for group in state.optimizer.param_groups for p in group["params"]]
    return _flat({order[number]: values for number, values in saved["state"].items()})


def _start(fields: dict[str, Any] | None) -> dict[str, Any]:
    if fields is None:
        return {}
    kinds = ("weights", "held")
    return {f"{kind} of {name}": value for kind in kinds for name, value in fields[kind].items()}


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`{"b of a": value}` for each `tree[a][b]`."""
    return {
        f"{inner} of {outer}": value
        for outer, values in tree.items()
        for inner, value in values.items()
    }


def _named(names: Sequence[str], values: Sequence[int]) -> dict[str, int]:
    """The values of a receipt by the name of their tensor."""
    unknown = [f"tensor {i}" for i in range(len(names), len(values))]
    return dict(zip([*names, *unknown], values, strict=False))


def _tensors(
    what: str, before: Mapping[str, Any], now: Mapping[str, Any], *, which: str = "the first"
) -> list[str]:
    """A line if the values of any names differ."""
    names = list(dict.fromkeys([*now, *before]))
    differing = [name for name in names if not _is_equal(before.get(name), now.get(name))]
    if not differing:
        return []
    if len(differing) == len(names) > 1:
        return [f"{what}: all {len(names)} tensors differ"]
    verb = "differs" if len(differing) == 1 else "differ"
    first = printable(differing[0], 2 * MAX_NAME)
    return [f"{what}: {len(differing)} of {len(names)} tensors {verb}; {which} is {first}"]


def _is_equal(before: object, now: object) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        # Not torch.equal, for which -0.0 is 0.0.
        return hash_tensor("", before) == hash_tensor("", now)
    return type(before) is type(now) and before == now


def _number(text: str | None) -> str:
    """A field of a receipt: what it says, and its bits."""
    return "none" if text is None else f"{float.fromhex(text):.9g} ({text})"
