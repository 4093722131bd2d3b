"""Starting a run from the weights of another one (train.init_from)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from torch import nn

from segtrain.checkpoint.format import load
from segtrain.checkpoint.loading import inference_weights, resolve
from segtrain.checkpoint.weights import check_plain, load_weights
from segtrain.data.class_file import class_file_from_json
from segtrain.errors import CheckpointError, ConfigError


class Initial(NamedTuple):
    """What `fill_initial` did."""

    lines: list[str]  # for the log
    random: list[str]  # the keys that stay random


def load_initial(model: nn.Module, spec: str | Path, class_names: Sequence[str] = ()) -> list[str]:
    """As `fill_initial`; returns its log lines."""
    return fill_initial(model, spec, class_names).lines


def fill_initial(model: nn.Module, spec: str | Path, class_names: Sequence[str] = ()) -> Initial:
    """Fills `model` with the weights of another run, the averaged ones if it has them.

    Classifier layers stay random if the number of classes differs; if the same classes come in
    another order, their channels are reordered. CheckpointError if any other layer does not fit.
    `class_names` are the classes of `model` in order; (): not known.
    """
    file = resolve(spec)
    checkpoint = load(file)
    weights = dict(inference_weights(checkpoint))
    check_plain(weights, file)
    own = model.state_dict()
    lines = [f"init       {file}, step {checkpoint.step}"]
    try:
        there = class_file_from_json(checkpoint.classes).names
    except (ConfigError, ValidationError) as error:
        raise CheckpointError(f"{file}: damaged: its classes cannot be read") from error
    lines += _reorder_classes(weights, there, class_names)
    random = []
    for key in sorted(weights.keys() & own.keys()):
        old, new = tuple(weights[key].shape), tuple(own[key].shape)
        if ".classifier." in key and old != new:
            lines.append(f"init       {key} stays random: {old} there, {new} here")
            weights[key] = own[key]
            random.append(key)
    load_weights(model, weights, file)
    return Initial(lines, random)


def _reorder_classes(
    weights: dict[str, Any], there: Sequence[str], here: Sequence[str]
) -> list[str]:
    """Reorders the classifiers in `weights` from the classes `there` to `here`; log lines."""
    differing = [i for i, (old, new) in enumerate(zip(there, here, strict=False)) if old != new]
    if len(there) != len(here) or not differing:
        return []
    if set(there) != set(here):
        i = differing[0]
        return [
            f"warning: init: {len(differing)} of {len(here)} classes have other names there: class "
            f"{i} is {there[i]} there, {here[i]} here, and starts from its weights"
        ]
    order = [there.index(name) for name in here]
    for key, value in weights.items():
        if ".classifier." in key and value.shape[:1] == (len(order),):
            weights[key] = value[order]
    return ["init       the classes come in another order there; classifiers follow the one here"]
