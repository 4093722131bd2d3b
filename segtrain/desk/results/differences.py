"""In what two receipts of a step differ, or two checkpoints: for `verify` and `compare --steps`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from segtrain.checkpoint.format import Checkpoint
from segtrain.run.receipts import GRADIENT, WEIGHT, Receipt, unpack
from segtrain.text import MAX_NAME, printable
from segtrain.training.receipt_meter import hash_tensor

FIELDS = (
    *("samples", "pixels", "start", "loss", "aux_loss", "gradients", "grad_norm"),
    *("weights", "average"),
)
"""The fields of a receipt in the order of computation."""


def receipt_differences(
    a: Receipt,
    b: Receipt,
    names: Mapping[str, Sequence[str]],
    sides: tuple[str, str] = ("there", "now"),
) -> dict[str, str]:
    """A line for each field in which two receipts of a step differ, in the order of computation.

    A field that only one of them has is not compared: it was not due, or the receipt is older.

    names: of the tensors of "gradients" and of "weights". sides: what to call both.
    """
    lines = {}
    if a.samples != b.samples:
        lines["samples"] = "samples: other names or another order: the data or their order changed"
    if None not in (a.pixels, b.pixels) and a.pixels != b.pixels:
        lines["pixels"] = "pixels: the same samples, but other crops or labels"
    if None not in (a.start, b.start):
        lines["start"] = _packed(a, b, "start", names["weights"])
    for field in ("loss", "aux_loss"):
        lines[field] = _number(a, b, field, sides)
    lines["gradients"] = _packed(a, b, "gradients", names["gradients"])
    lines["grad_norm"] = _number(a, b, "grad_norm", sides)
    for field in ("weights", "average") if None not in (a.weights, b.weights) else ():
        lines[field] = _packed(a, b, field, names["weights"])
    return {field: line for field, line in lines.items() if line}


def checkpoint_differences(a: Checkpoint, b: Checkpoint) -> list[str]:
    """A line for each part in which two checkpoints of a step differ in any bit.

    Those for inference have no optimizer, which is then not compared.
    """
    pairs = {"model": (a.model, b.model), "average": (a.average or {}, b.average or {})}
    # A checkpoint for inference has no optimizer: equal models are then all that can be told.
    if a.optimizer is not None and b.optimizer is not None:
        pairs["optimizer"] = _moments(a.optimizer), _moments(b.optimizer)
        for field in ("weights", "held"):
            pairs[f"start {field}"] = tuple((state.start or {}).get(field, {}) for state in (a, b))
    lines = [_tensors(what, *pair) for what, pair in pairs.items()]
    return [line for line in lines if line]


def _number(a: Receipt, b: Receipt, field: str, sides: tuple[str, str]) -> str:
    values = getattr(a, field), getattr(b, field)
    if values[0] == values[1]:
        return ""
    # Nine digits for people, then the number exact to the bit.
    texts = [x and f"{float.fromhex(x):.9g} ({x})" for x in values]
    return f"{field}: {texts[0]} {sides[0]}, {texts[1]} {sides[1]}"


def _packed(a: Receipt, b: Receipt, field: str, names: Sequence[str]) -> str:
    """As `_tensors`; those without a name, of which nothing tells it, have their number."""
    if getattr(a, field) == getattr(b, field):
        return ""
    # What is nearest to the loss comes first in the backward pass.
    dtype, step = (GRADIENT, -1) if field == "gradients" else (WEIGHT, 1)
    numbers = [list(enumerate(unpack(getattr(side, field), dtype)))[::step] for side in (a, b)]
    named = (
        {names[i] if i < len(names) else f"number {i + 1}": x for i, x in side} for side in numbers
    )
    return _tensors(field, *named)


def _moments(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer's state dict holds for each weight, by name."""
    names: dict[int, str] = {}
    for group in saved["param_groups"]:
        # Without names a weight is called by its number.
        names |= zip(group["params"], group.get("param_names", group["params"]), strict=True)
    return {
        f"{kind} of {names[number]}": value
        for number, values in saved["state"].items()
        for kind, value in values.items()
    }


def _tensors(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A line if the values of any names differ; else empty."""
    names = list(dict.fromkeys([*now, *before]))
    differing = [name for name in names if not _is_equal(before.get(name), now.get(name))]
    if not differing:
        return ""
    first = printable(differing[0], 2 * MAX_NAME)
    return f"{what}: {len(differing)} of {len(names)} tensors differ; the first is {first}"


def _is_equal(before: object, now: object) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        # Not torch.equal, for which -0.0 is 0.0.
        return hash_tensor("", before) == hash_tensor("", now)
    return type(before) is type(now) and before == now
