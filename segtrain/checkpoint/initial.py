"""Starting a run from the weights of another one (train.init_from)."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from torch import nn

from segtrain.checkpoint.format import load
from segtrain.checkpoint.loading import inference_weights, resolve
from segtrain.checkpoint.weights import check_plain, load_weights
from segtrain.config import Config
from segtrain.config.loading import yaml_value
from segtrain.data.class_file import class_file_from_json
from segtrain.errors import CheckpointError, ConfigError
from segtrain.run.directory import flat

# Options that change what the weights compute and neither their keys nor their shapes.
_SILENT = {
    *("model.output_stride", "model.contract_dilation", "model.multi_grid"),
    *("model.multi_grid_values", "model.basic_block_dilation", "model.align_corners"),
    *("model.ppm_bins", "model.aspp_rates", "model.aux_layer"),
    *("data.mean", "data.std", "data.short_side_px", "norm.eps"),
}
# Options that may change keys or shapes.
_MODEL = re.compile(r"model\.(?!pretrained|dropout)|norm\.(kind|num_groups)")


class Initial(NamedTuple):
    """What `load_initial` did."""

    lines: list[str]  # for the log
    random: list[str]  # the keys that stay random


def load_initial(
    model: nn.Module,
    spec: str | Path,
    class_names: Sequence[str] = (),
    config: Config | None = None,
) -> Initial:
    """Fills `model` with the weights of another run, the averaged ones if it has them.

    Classifier layers stay random if the number of classes differs; if the same classes come in
    another order, their channels are reordered. CheckpointError if any other layer does not fit.
    `class_names` are the classes of `model` in order; (): not known. `config` is that of `model`: a
    warning names options that the weights were trained with otherwise.
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
    options = {} if config is None else _other_options(checkpoint.config, config)
    # In the order of the config: head and backbone first, then what changes a part of them.
    larger = [f"{key}: {shown}" for key, shown in options.items() if _MODEL.match(key)]
    if class_names and len(class_names) != len(there):
        larger.append(f"classes: {len(there)} there, {len(class_names)} here")
    load_weights(model, weights, file, differences=larger)
    lines += [
        f"warning: init: {key} is {shown}: the weights fit either"
        for key, shown in options.items()
        if key in _SILENT
    ]
    return Initial(lines, random)


def _other_options(there: str, here: Config) -> dict[str, str]:
    """Both values, in words, of each option that is another one in the config `there`, JSON."""
    try:
        before = flat(Config.model_validate_json(there))
    except ValidationError:
        return {}  # of another version
    return {
        key: f"{yaml_value(before.get(key))} there, {yaml_value(new)} here"
        for key, new in flat(here).items()
        if new != before.get(key)
    }


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
