"""Converts a file of another program: finds the program by its keys, moves every tensor."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from pydantic import ValidationError
from torch import Tensor

from segtrain.checkpoint.format import Checkpoint, experiment_fields, first_problem, save
from segtrain.checkpoint.weights import load_weights
from segtrain.config import Config, DataConfig, override_config
from segtrain.config.loading import given_key, given_keys, yaml_value
from segtrain.desk.convert import mmseg, semseg, smp, torchvision, vainf
from segtrain.desk.convert.class_choice import Choice, choose_classes
from segtrain.desk.convert.conversion import Conversion, State
from segtrain.desk.convert.read import TensorFile, read_file
from segtrain.errors import CheckpointError, ConfigError, ExecutionError
from segtrain.files import os_errors_as, write_atomic
from segtrain.models import SegModel, build_model
from segtrain.models.norms import make_inference_norm
from segtrain.text import MAX_NAME, first_of, printable

PROGRAMS: dict[str, Callable[[State, Mapping[str, Any]], Conversion]] = {
    "ppm.features.0.1.weight": semseg.plan,
    "decode_head.conv_seg.weight": mmseg.plan,
    "segmentation_head.0.weight": smp.plan,
    "classifier.aspp.convs.0.0.weight": vainf.plan,
    # Before torchvision's, with which it ends.
    "classifier.classifier.0.convs.0.0.weight": vainf.plan,
    "classifier.0.convs.0.0.weight": torchvision.plan,
}
"""A key that only files of one program have, and the function that makes the plan of the state
dict and what the file stores beside it."""

_BOTH_OR_NONE = "model.separable makes the ASPP and the convolution after it separable, or neither"
# What is not read, by a part of a key with a dot before it. VainF's heads have two "classifier".
_OTHERS = {
    r"\.classifier\.cbr\.0\.": "torchvision's LRASPP: segtrain does not have its head",
    r"(?<!\.classifier)\.classifier\.1\.running_mean$": "torchvision's FCN: segtrain has its "
    "head as the auxiliary one alone",
    r"\.backbone\.high_level_features\.": "VainF's MobileNetV2: it pads each block before its "
    "first 1x1 convolution",
    r"\.encoder\.features\.18\.": "segmentation_models.pytorch's MobileNetV2: its heads read 1280 "
    "channels that segtrain leaves out",
    r"\.decoder\.(aspp|0)\.convs\.1\.0\.0\.": "segmentation_models.pytorch's DeepLabV3 with "
    f"decoder_aspp_separable: {_BOTH_OR_NONE}",
    r"\.decoder\.aspp\.0\.convs\.1\.0\.weight$": "segmentation_models.pytorch's DeepLabV3+ without "
    f"decoder_aspp_separable: {_BOTH_OR_NONE}",
}

# Counters of averages (torch.optim.swa_utils, mmengine's EMAHook), which no model has.
_COUNTERS = ("n_averaged", "steps")


class Recognized(NamedTuple):
    """A plan, and the state dict without the prefix of its keys."""

    plan: Conversion
    state: State
    prefix: str
    outside: tuple[str, ...]  # the keys without the prefix
    ignored: tuple[str, ...]  # those that the user leaves out


def detect(state: State, beside: Mapping[str, Any], ignored: Sequence[str] = ()) -> Recognized:
    """What the file is; keys may have a common prefix, such as "module." or "model.".

    ignored: beginnings of keys that the user leaves out, with or without that prefix.

    Raises:
        CheckpointError: no program that is read, or a model that segtrain does not have.
        ConfigError: no key begins with one of `ignored`.
    """
    starts = tuple(ignored)
    whole = {key: value for key, value in state.items() if key not in _COUNTERS}
    marker, prefix = _marker([key for key in whole if not key.startswith(starts)])
    for start in starts:
        if not any(key.startswith((start, f"{prefix}{start}")) for key in state):
            raise ConfigError(f"--ignore {printable(start, MAX_NAME)}: no key begins so")
    given = [k for k in whole if k.startswith(starts) or k.removeprefix(prefix).startswith(starts)]
    rest = {key: value for key, value in whole.items() if key not in given}
    own = {k.removeprefix(prefix): v for k, v in rest.items() if k.startswith(prefix)}
    outside = tuple(key for key in rest if not key.startswith(prefix))
    return Recognized(PROGRAMS[marker](own, beside), own, prefix, outside, tuple(given))


def _marker(keys: Sequence[str]) -> tuple[str, str]:
    """The key of `PROGRAMS` that one of `keys` ends in, and what stands before it."""
    # Before `PROGRAMS`, whose markers some of these files have, too.
    for part, what in _OTHERS.items():
        if any(re.search(part, f".{key}") for key in keys):
            raise CheckpointError(f"by its keys this is a file of {what}, so it is not converted")
    for marker in PROGRAMS:
        prefixes = [key.removesuffix(marker) for key in keys if f".{key}".endswith(f".{marker}")]
        if len(prefixes) > 1:
            quoted = first_of(map(repr, prefixes))
            what = f"the keys hold {len(prefixes)} models: {quoted}"
            raise CheckpointError(f"{what}; --ignore PREFIX leaves one out")
        if prefixes:
            return marker, prefixes[0]
    raise CheckpointError(
        "the keys are those of no model that is read: PSPNet, DeepLabV3 or DeepLabV3+ of "
        "torchvision, semseg, mmsegmentation, segmentation_models.pytorch or VainF (a backbone "
        f"alone is for model.pretrained); found {first_of(sorted(keys))}"
    )


_LAYOUTS = get_args(DataConfig.model_fields["layout"].annotation)
_SECTIONS = ("model.", "data.", "augment.", "eval.", "norm.")


def make_config(plan: Conversion, classes: str, overrides: Sequence[str]) -> Config:
    """The whole config: defaults, then `plan`, then the `section.key=value` overrides.

    classes: data.classes. The data lie in datasets/<name>, in the layout of that name if there is
        one: a guess that eval and train let the user change.

    Raises:
        CheckpointError: an option of `plan` has a value that segtrain does not have.
        ConfigError: a wrong override, or one that contradicts what the keys of the file decide.
    """
    path = Path(classes)
    name = path.name.removesuffix(".yaml").removesuffix(".yml").removesuffix(".classes")
    by_name = classes == name
    sections: dict[str, dict[str, Any]] = {
        "data": {
            "layout": name if by_name and name in _LAYOUTS else "folders",
            "root": f"datasets/{name}",
            "classes": classes if by_name else str(path.absolute()),
        }
    }
    for key, value in plan.options().items():
        section, _, option = key.partition(".")
        sections.setdefault(section, {})[option] = value
    try:
        config = Config.model_validate(sections)
    except ValidationError as error:
        what = "the file describes a model that segtrain lacks"
        raise CheckpointError(f"{what}: {first_problem(error)}") from None
    config = override_config(config, overrides, source="the converted model")
    # What is assumed may be changed. What shapes decide may not: the weights would not fit, or fit
    # and predict something else.
    for key, decided in plan.found.items():
        if (chosen := _option(config, key)) != decided:
            what = f"the keys and shapes of the file say {yaml_value(decided)}"
            raise ConfigError(f"--set {key}={yaml_value(chosen)}: {what}; leave it out")
    return config


def _option(config: Config, key: str) -> Any:
    section, _, option = key.partition(".")
    return getattr(getattr(config, section), option)


def check_overrides(overrides: Sequence[str]) -> None:
    """ConfigError for options that a converted file has no use for, and for data.classes."""
    for text in overrides:
        if given_key(text) == "data.classes":
            raise ConfigError("--set data.classes: write --classes, which names the channels")
        if not given_key(text).startswith(_SECTIONS):
            raise ConfigError(f"--set {text}: is for training; only {', '.join(_SECTIONS)} are not")


def model_lines(config: Config) -> list[str]:
    """The options of the model and of its input that differ from the defaults, by sections."""
    model = {"arch": config.model.arch, "backbone": config.model.backbone}
    model |= config.model.model_dump(exclude_defaults=True)
    about_input = {"mean", "std", "short_side_px"}
    data = config.data.model_dump(include=about_input, exclude_defaults=True)
    lines = []
    for section, options in (("model", model), ("data", data)):
        lines += [f"{section}:"] if options else []
        lines += [f"  {key}: {yaml_value(value)}" for key, value in options.items()]
    return lines


def translate(found: Recognized, wanted: State) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of the file under the keys of `wanted`, and lines about those left out.

    wanted: a state dict that may be on "meta".

    Raises:
        CheckpointError: a tensor is missing, has another shape or found no place; all of them.
    """
    weights, used = {}, set()
    missing, misfits, placeless, left_out = [], [], [], {}
    for key, own in wanted.items():
        theirs = found.plan.their_key(key)
        tensor = found.state.get(theirs)
        if tensor is None and key.endswith("num_batches_tracked"):
            # A counter, which some files lack and evaluation does not read.
            weights[key] = torch.zeros(own.shape, dtype=own.dtype)
        elif tensor is None:
            none = f"{key}, which {found.plan.source} does not have"
            missing.append(f"{theirs} (for {key})" if theirs else none)
        else:
            used.add(theirs)
            weights[key] = found.plan.rotated(key, tensor)
            # A quantized weight in integers would be another number.
            if tensor.shape != own.shape or tensor.is_floating_point() != own.is_floating_point():
                there, here = (f"{tuple(t.shape)} of {t.dtype}" for t in (tensor, own))
                misfits.append(f"{theirs}: {there}, and {key} has {here}")
    for key in (*(key for key in found.state if key not in used), *found.outside):
        whys = [why for start, why in found.plan.left_out.items() if key.startswith(start)]
        (left_out.setdefault(whys[0], []) if whys else placeless).append(key)
    kinds = {"missing": missing, "of another shape or kind": misfits, "without a place": placeless}
    if any(kinds.values()):
        lines = [f"  {len(keys)} {kind}: {first_of(keys)}" for kind, keys in kinds.items() if keys]
        raise CheckpointError(
            f"by its keys this is a file of {found.plan.source}, but not all of it fits a model of "
            "segtrain (--ignore PREFIX leaves out what is no part of the model):\n"
            + "\n".join(lines)
        )
    left_out |= {"--ignore": found.ignored} if found.ignored else {}
    return weights, [
        f"left out    {len(keys)} tensors ({why}): {first_of(keys)}"
        for why, keys in left_out.items()
    ]


class Converted(NamedTuple):
    """A converted model in evaluation mode, and what to say of it."""

    model: SegModel
    config: Config
    lines: list[str]


def convert_file(
    path: Path,
    output: Path,
    *,
    classes: str | None = None,
    class_order: str | None = None,
    entry: str | None = None,
    ignored: Sequence[str] = (),
    overrides: Sequence[str] = (),
    overwrite: bool = False,
) -> Converted:
    """Writes the model in `path` to the checkpoint `output`; its step is 0.

    Where the file stores names of classes that no class file has, they are written beside `output`;
    `overwrite` says whether they may replace a file. For the other arguments see `choose_classes`,
    `read_file`, `detect` and `make_config`.

    Raises:
        ConfigError: a wrong override or class file.
        CheckpointError: the file cannot be read, or not all of it fits.
        ExecutionError: the disk is full, or nothing can be written there.
    """
    source = read_file(path, entry)
    try:
        found = detect(source.state, source.beside, ignored)
        if "model.aux_head=false" in ("".join(text.split()) for text in overrides):
            found = found._replace(plan=found.plan.without_aux_head())
        own = output.with_suffix(".classes.yaml")
        choice = choose_classes(found.plan, classes, class_order, own=own)
        if choice.text is not None and own.exists() and not overwrite:
            raise ConfigError(
                f"{own}: exists, and would be replaced by the names in the file; name it in "
                "--classes to use it, or pass --overwrite"
            )
        config = make_config(found.plan, choice.spec, overrides)
        model, translated = load_plan(found, choice, config)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    # Before the checkpoint, which names it.
    if choice.text is not None:
        with os_errors_as(ExecutionError, choice.spec, "cannot be written"):
            output.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(own, choice.text)
    checkpoint = Checkpoint(
        step=0,
        **experiment_fields(config, choice.classes),
        model=dict(model.state_dict()),
        average=None,
        optimizer=None,
        scaler=None,
        best=None,
    )
    save(output, checkpoint)
    lines = _report(source, found, choice, config, overrides)
    return Converted(model, config, [*lines, *translated, *found.plan.notes, *choice.lines])


def load_plan(found: Recognized, choice: Choice, config: Config) -> tuple[SegModel, list[str]]:
    """The model with the weights of the file, in evaluation mode, and lines of `translate`.

    Raises:
        CheckpointError: not all of it fits, or a number is not finite.
    """
    norm = make_inference_norm(config.norm)
    # Without memory, which is taken once all weights fit.
    with torch.device("meta"):
        model = build_model(config.model, num_classes=choice.classes.num_classes, norm=norm)
    weights, lines = translate(found, model.state_dict())
    for key, value in weights.items():
        # The channels of the head, and of the auxiliary one.
        if choice.order is not None and ".classifier." in key:
            weights[key] = value[choice.order]
    load_weights(model.to_empty(device="cpu"), weights, Path("the converted weights"))
    return model.eval(), lines


def _report(
    source: TensorFile, found: Recognized, choice: Choice, config: Config, overrides: Sequence[str]
) -> list[str]:
    """What was read, and which options the file and its program decide, a line each."""
    plan, model = found.plan, config.model
    where = f" under {source.entry}" if source.entry else ""
    if found.prefix:
        where += f", keys without '{printable(found.prefix)}'"
    lines = [
        f"source      {plan.source}: {len(source.state)} tensors{where}",
        f"model       {model.arch} {model.backbone}, {choice.classes.num_classes} classes of "
        f"{choice.classes.name}",
    ]
    overridden = given_keys(overrides)
    assumed = [key for key in plan.assumed if key not in plan.stated]
    defaults = f"the file does not say; the defaults of {plan.source}, --set changes them"
    for kind, keys, about in (
        ("stated", plan.stated, "by the config of the file"),
        ("assumed", assumed, defaults),
    ):
        shown = [f"{k}={yaml_value(_option(config, k))}" for k in keys if k not in overridden]
        lines += [f"{kind:<11} {' '.join(shown)} ({about})"] if shown else []
    return lines + [
        f"warning: --set {key}={yaml_value(_option(config, key))}: the config of the file says "
        f"{yaml_value(value)}"
        for key, value in plan.stated.items()
        if key in overridden and _option(config, key) != value
    ]
