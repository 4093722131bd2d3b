"""Moves the tensors of a file to the keys of a model, all of them or none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segtrain.convert.plan import Plan, Rotation, State
from segtrain.convert.read import listed
from segtrain.errors import CheckpointError
from segtrain.text import MAX_NAME, printable

_COUNTER = "num_batches_tracked"
_SHOWN = 10


@dataclass(frozen=True)
class Translation:
    """The weights under the model's keys, and what happened to the others.

    left_out: (why, keys of the file); counters: batch counters that the file lacks, set to 0.
    dtypes: of the file's weights, where they are not those of the model.
    """

    weights: dict[str, Tensor]
    left_out: tuple[tuple[str, list[str]], ...]
    counters: int
    dtypes: tuple[str, ...]


def translate(state: State, plan: Plan, wanted: State, outside: Sequence[str] = ()) -> Translation:
    """The tensors of `state` under the keys of `wanted`, a state dict that may be on "meta".

    outside: keys that are no part of the model.

    Raises:
        CheckpointError: a tensor is missing, has another shape or found no place; all of them.
    """
    weights: dict[str, Tensor] = {}
    missing, shapes, counters, used = [], [], 0, set()
    for key, own in wanted.items():
        theirs = plan.their_key(key)
        tensor = None if theirs is None else state.get(theirs)
        if tensor is None:
            if key.endswith(_COUNTER):
                weights[key] = torch.zeros(own.shape, dtype=own.dtype)
                counters += 1
            else:
                missing.append(f"{theirs} (for {key})")
            continue
        used.add(theirs)
        if tensor.shape != own.shape:
            found, expected = tuple(tensor.shape), tuple(own.shape)
            shapes.append(f"{theirs}: {found}, and {key} has {expected}")
            continue
        if tensor.is_floating_point() != own.is_floating_point():
            shapes.append(f"{theirs}: {tensor.dtype}, and {key} has {own.dtype}")
            continue
        weights[key] = rotated(tensor, plan.rotation(key)).to(own.dtype)
    left_out, placeless = _sort_out([*(k for k in state if k not in used), *outside], plan.left_out)
    _refuse(plan.source, missing, shapes, placeless)
    dtypes = {str(state[k].dtype).removeprefix("torch.") for k in used if k in state}
    own_dtypes = {str(t.dtype).removeprefix("torch.") for t in wanted.values()}
    return Translation(weights, left_out, counters, tuple(sorted(dtypes - own_dtypes)))


def check_numbers(weights: Mapping[str, Tensor], plan: Plan, prefix: str) -> None:
    """Refuses weights that are not finite and variances below 0, by their keys in the file.

    prefix: of all keys in the file.

    Raises:
        CheckpointError: there are some; a model with them predicts one class everywhere.
    """
    problems = []
    for key, value in weights.items():
        where = f"{prefix}{plan.their_key(key)}"
        if not torch.isfinite(value).all():
            kind = "NaN" if value.isnan().any() else "infinite"
            count = int((~value.isfinite()).sum())
            problems.append(f"{where}: {count} of {value.numel()} values are {kind}")
        elif key.endswith("running_var") and (value < 0).any():
            problems.append(f"{where}: a variance below 0: {value.min().item():g}")
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            "damaged: the weights hold numbers that no training leaves; use another checkpoint:"
            + "".join(f"\n  {printable(line, 3 * MAX_NAME)}" for line in problems[:_SHOWN])
            + more
        )


def reorder_classes(weights: dict[str, Tensor], order: Sequence[int]) -> None:
    """Makes class i of `weights` what was class order[i], in every classifier."""
    for key, value in weights.items():
        if ".classifier." in key:
            weights[key] = value[list(order)]


def rotated(tensor: Tensor, rotation: Rotation | None) -> Tensor:
    """`tensor` of a file with its channels in the order of segtrain."""
    if rotation is None or tensor.dim() <= rotation.dim:  # a counter has no channels
        return tensor
    return tensor.roll(-rotation.count, rotation.dim)


def _sort_out(
    keys: Sequence[str], rules: Sequence[tuple[str, str]]
) -> tuple[tuple[tuple[str, list[str]], ...], list[str]]:
    """The keys that have no place: by the reason, and those without one."""
    reasons: dict[str, list[str]] = {}
    placeless = []
    for key in keys:
        why = next((why for start, why in rules if key.startswith(start)), None)
        if why is None:
            placeless.append(key)
        else:
            reasons.setdefault(why, []).append(key)
    return tuple(reasons.items()), placeless


def _refuse(source: str, missing: list[str], shapes: list[str], placeless: list[str]) -> None:
    lines = []
    if missing:
        lines.append(f"  {len(missing)} missing: {listed(missing)}")
    if shapes:
        lines.append(f"  {len(shapes)} of another shape or kind: {listed(shapes)}")
    if placeless:
        lines.append(f"  {len(placeless)} without a place: {listed(placeless)}")
        lines.append("  --ignore PREFIX leaves out keys that are no part of the model")
    if lines:
        raise CheckpointError(
            f"by its keys this is a file of {source}, but not all of it fits a model of segtrain:\n"
            + "\n".join(lines)
        )
