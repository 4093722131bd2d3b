"""Converts a file of another program: finds the program by its keys, moves every tensor."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from pydantic import ValidationError
from torch import Tensor

from segtrain.checkpoint.format import Checkpoint, experiment_fields, save
from segtrain.checkpoint.restore import load_weights
from segtrain.config import Config, DataConfig, ModelConfig, override_config
from segtrain.config.loading import yaml_value
from segtrain.convert import mmseg, semseg, smp, torchvision, vainf
from segtrain.convert.classes import Choice, choose_classes, class_file_text, stored_file
from segtrain.convert.layout import Options, Plan, State
from segtrain.convert.read import SourceFile, read_file
from segtrain.data.read.classes import load_class_file
from segtrain.errors import CheckpointError, ConfigError, ExecutionError
from segtrain.files import os_errors_as, write_atomic
from segtrain.models import SegModel, build_model
from segtrain.norm import make_inference_norm
from segtrain.text import MAX_NAME, first_of, printable

PROGRAMS: dict[str, Callable[[State, Mapping[str, Any]], Plan]] = {
    "ppm.features.0.1.weight": semseg.plan,
    "decode_head.conv_seg.weight": mmseg.plan,
    "decode_head.0.conv_seg.weight": mmseg.plan,  # several heads: refused by their names
    "segmentation_head.0.weight": smp.plan,
    "classifier.aspp.convs.0.0.weight": vainf.plan,
    # Before torchvision's, with which it ends.
    "classifier.classifier.0.convs.0.0.weight": vainf.plan,
    "classifier.0.convs.0.0.weight": torchvision.plan,
}
"""A key that only files of one program have, and the function that makes the plan of the state
dict and what the file stores beside it."""

# Keys of what is not read, and what to say of it.
_OTHERS = {
    "head.classifier.conv.weight": "a bare state dict of segtrain; a checkpoint holds its config "
    "too: use the one that training wrote",
    "classifier.cbr.0.weight": "torchvision's LRASPP, which segtrain does not have",
    "classifier.4.weight": "torchvision's FCN, which segtrain does not have",
    "psa.conv6.0.weight": "semseg's PSANet, which segtrain does not have",
    "cls.0.weight": "semseg's PSPNet without its pyramid (use_ppm), which segtrain does not have",
    "fc.weight": "a classifier of images, without a head for segmentation; name it in "
    "model.pretrained",
    "layer1.0.conv1.weight": "a backbone without a head; name it in model.pretrained",
}
# Counters of averages (torch.optim.swa_utils, mmengine's EMAHook), which no model has.
_COUNTERS = ("n_averaged", "steps")


class Found(NamedTuple):
    """A plan, and the state dict without the prefix of its keys."""

    plan: Plan
    state: dict[str, Any]
    prefix: str
    outside: tuple[str, ...]  # the keys without the prefix
    ignored: tuple[str, ...] = ()  # those that the user leaves out


def detect(state: State, beside: Mapping[str, Any], ignored: Sequence[str] = ()) -> Found:
    """What the file is; keys may have a common prefix, such as "module." or "model.".

    ignored: beginnings of keys that the user leaves out, with or without that prefix. The model is
        that of the other keys.

    Raises:
        CheckpointError: no program that is read, or a model that segtrain does not have.
        ConfigError: no key begins with one of `ignored`.
    """
    starts = tuple(ignored)
    whole = {key: value for key, value in state.items() if not key.startswith(starts)}
    found = _detect(whole, beside)
    inner = [f"{found.prefix}{start}" for start in starts]
    rest = {key: value for key, value in whole.items() if not key.startswith(tuple(inner))}
    for start, with_prefix in zip(starts, inner, strict=True):
        if not any(key.startswith((start, with_prefix)) for key in state):
            raise ConfigError(f"--ignore {printable(start, MAX_NAME)}: no key begins so")
    if len(rest) < len(whole):
        found = _detect(rest, beside)
    return found._replace(ignored=tuple(key for key in state if key not in rest))


def _detect(state: State, beside: Mapping[str, Any]) -> Found:
    for marker, make in PROGRAMS.items():
        prefixes = [key.removesuffix(marker) for key in state if _ends(key, marker)]
        if len(prefixes) > 1:
            quoted = first_of(map(repr, prefixes))
            raise CheckpointError(
                f"the keys hold {len(prefixes)} models: {quoted}; --ignore PREFIX leaves one out, "
                "or save one of them alone"
            )
        for prefix in prefixes:
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            outside = [key for key in state if not key.startswith(prefix)]
            outside = [key for key in outside if key not in _COUNTERS]
            if prefix == "":
                own = {key: value for key, value in own.items() if key not in _COUNTERS}
            return Found(make(own, beside), own, prefix, tuple(outside))
    for marker, what in _OTHERS.items():
        if any(_ends(key, marker) for key in state):
            raise CheckpointError(f"this is {what}")
    raise CheckpointError(
        "the keys are those of no model that is read: DeepLabV3 of torchvision; PSPNet of semseg; "
        "PSPNet, DeepLabV3 and DeepLabV3+ of mmsegmentation and segmentation_models.pytorch; "
        f"DeepLabV3 and DeepLabV3+ of VainF; found {first_of(sorted(state))}"
    )


def _ends(key: str, marker: str) -> bool:
    return key == marker or key.endswith(f".{marker}")


_LAYOUTS = get_args(DataConfig.model_fields["layout"].annotation)
_INPUT = ("mean", "std", "short_side_px")


def make_config(plan: Plan, classes: str, overrides: Sequence[str]) -> Config:
    """The whole config: defaults, then `plan`, then the `section.key=value` overrides.

    classes: data.classes. The data lie in datasets/<name>, in the layout of that name if there is
        one: a guess that eval and train let the user change.

    Raises:
        ConfigError: a wrong override.
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
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = printable(f"{where}: {first['msg']}", 3 * MAX_NAME)
        raise CheckpointError(
            f"the file describes a model that segtrain does not have: {what}"
        ) from None
    return override_config(config, overrides, source="the converted model")


def _split_options(plan: Plan, config: Config, overrides: Sequence[str]) -> dict[str, Options]:
    """The options of `plan` as they are in `config`, by who decided: stated, assumed, set."""
    given = _given(overrides)
    stated = {key: value for key, value in plan.stated.items() if key not in given}
    known = given | set(stated)
    assumed = {key: value for key, value in plan.assumed.items() if key not in known}
    data: Any = config.model_dump()
    paths = {key: key.split(".", 1) for key in sorted(given)}
    by_user = {k: data[path[0]][path[1]] if path[1:] else data[k] for k, path in paths.items()}
    return {"stated": stated, "assumed": assumed, "set": by_user}


def model_lines(config: Config) -> list[str]:
    """The options of the model and of its input that differ from the defaults, by sections."""
    lines = ["model:"]
    for key, field in ModelConfig.model_fields.items():
        value = getattr(config.model, key)
        if value != field.default or key in ("arch", "backbone"):
            lines.append(f"  {key}: {yaml_value(value)}")
    data = {key: getattr(config.data, key) for key in _INPUT}
    changed = {k: v for k, v in data.items() if v != DataConfig.model_fields[k].default}
    if changed:
        lines += ["data:", *(f"  {key}: {yaml_value(value)}" for key, value in changed.items())]
    return lines


def check_foreign(overrides: Sequence[str]) -> None:
    """Refuses overrides of options that a converted file has no use for.

    Raises:
        ConfigError: one of another section than model, data, augment, eval and norm; data.classes.
    """
    if "data.classes" in _given(overrides):
        raise ConfigError("--set data.classes: write --classes, which names the channels")
    sections = ("model.", "data.", "augment.", "eval.", "norm.")
    foreign = [text for text in overrides if not text.strip().startswith(sections)]
    if foreign:
        what = "is for training; convert takes model.*, data.*, augment.*, eval.* and norm.*"
        raise ConfigError("\n".join(f"--set {text}: {what}" for text in foreign))


def _given(overrides: Sequence[str]) -> set[str]:
    return {text.partition("=")[0].strip() for text in overrides}


_COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class Translation:
    """The weights under the model's keys, and what happened to the others.

    left_out: keys of the file, by the reason.
    counters: how many batch counters the file lacks; they are set to 0.
    dtypes: of the file's weights, where they are not those of the model.
    """

    weights: dict[str, Tensor]
    left_out: dict[str, list[str]]
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
        weights[key] = plan.rotated(key, tensor).to(own.dtype)
    left_out: dict[str, list[str]] = {}
    placeless = []
    for key in (*(key for key in state if key not in used), *outside):
        whys = [why for start, why in plan.left_out.items() if key.startswith(start)]
        (left_out.setdefault(whys[0], []) if whys else placeless).append(key)
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
        raise CheckpointError(
            "damaged: the weights hold numbers that no training leaves; use another checkpoint:\n  "
            + first_of(problems, separator="\n  ")
        )


def _refuse(source: str, missing: list[str], shapes: list[str], placeless: list[str]) -> None:
    kinds = {"missing": missing, "of another shape or kind": shapes, "without a place": placeless}
    lines = [f"  {len(keys)} {kind}: {first_of(keys)}" for kind, keys in kinds.items() if keys]
    if placeless:
        lines.append("  --ignore PREFIX leaves out keys that are no part of the model")
    if lines:
        raise CheckpointError(
            f"by its keys this is a file of {source}, but not all of it fits a model of segtrain:\n"
            + "\n".join(lines)
        )


@dataclass(frozen=True)
class Converted:
    """A converted model in evaluation mode, and what to say of it."""

    model: SegModel
    config: Config
    classes: Choice
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

    Where the file stores names of classes that no class file has, they are written beside `output`.

    Args:
        classes: a class file, by name or path; None: by the names that the file stores.
        class_order: see `choose_classes`.
        entry: see `read_file`.
        ignored: beginnings of keys that are no part of the model.
        overrides: `section.key=value`.
        overwrite: whether those names may replace a file.

    Raises:
        ConfigError: a wrong override or class file.
        CheckpointError: the file cannot be read, or not all of it fits.
        ExecutionError: the disk is full, or nothing can be written there.
    """
    source = read_file(path, entry)
    try:
        found = detect(source.state, source.beside, ignored)
        if any(re.fullmatch(r"\s*model\.aux_head\s*=\s*false\s*", text) for text in overrides):
            found = found._replace(plan=found.plan.without_aux_head())
        plan = found.plan
        with _stored_classes(plan, classes, output, overwrite=overwrite) as spec:
            choice = choose_classes(plan, spec, class_order)
            config = make_config(plan, choice.spec, overrides)
            model, translation = load_plan(found, choice, config)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
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
    lines = _report(source, found, translation, choice, config, overrides)
    return Converted(model, config, choice, lines)


@contextmanager
def _stored_classes(
    plan: Plan, classes: str | None, output: Path, *, overwrite: bool
) -> Iterator[str | None]:
    """The class file to use. Deletes the file that it wrote if the conversion fails."""
    path = stored_file(plan, classes, output)
    if path is None:
        yield classes
        return
    if path.exists() and not overwrite:
        raise ConfigError(
            f"{path}: exists, and would be replaced by the names in the file; name it in --classes "
            "to use it, or pass --overwrite"
        )
    with os_errors_as(ExecutionError, path, "cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, class_file_text(plan))
    try:
        _check_stored(path)
        yield str(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _check_stored(path: Path) -> None:
    try:
        load_class_file(str(path))
    except ConfigError as error:
        raise CheckpointError(
            f"the names of classes in the file cannot be used; name a class file in --classes: "
            f"{error}"
        ) from None


def load_plan(found: Found, choice: Choice, config: Config) -> tuple[SegModel, Translation]:
    """The model with the weights of the file, in evaluation mode.

    Raises:
        CheckpointError: not all of it fits, or a number is not finite.
    """
    options = {"num_classes": choice.classes.num_classes, "norm": make_inference_norm(config.norm)}
    try:
        with torch.device("meta"):
            wanted: State = build_model(config.model, **options).state_dict()
    except (RuntimeError, OverflowError):  # the number of bytes overflows
        raise CheckpointError("its shapes are those of a model too large for any machine") from None
    translation = translate(found.state, found.plan, wanted, found.outside)
    check_numbers(translation.weights, found.plan, found.prefix)
    for key, value in translation.weights.items():
        if choice.order is not None and ".classifier." in key:
            translation.weights[key] = value[choice.order]
    model = build_model(config.model, **options)
    load_weights(model, translation.weights, Path("the converted weights"))
    return model.eval(), translation


def _report(
    source: SourceFile,
    found: Found,
    translation: Translation,
    choice: Choice,
    config: Config,
    overrides: Sequence[str],
) -> list[str]:
    """What was read, decided and left out, a line each."""
    plan, model = found.plan, config.model
    where = f" under {source.entry}" if source.entry else ""
    if found.prefix:
        where += f", keys without '{printable(found.prefix)}'"
    lines = [
        f"source      {plan.source}: {len(source.state)} tensors{where}",
        f"model       {model.arch} {model.backbone}, {choice.classes.num_classes} classes of "
        f"{choice.classes.name}",
    ]
    data = config.data
    side = f", short side {data.short_side_px} px" if data.short_side_px else ""
    lines.append(f"input       RGB of 0..255, mean {data.mean}, std {data.std}{side}")
    about = {
        "stated": "by the config of the file",
        "assumed": f"the file does not say; the defaults of {plan.source}, --set changes them",
        "set": "by --set",
    }
    for kind, values in _split_options(plan, config, overrides).items():
        if values:
            shown = " ".join(f"{key}={yaml_value(value)}" for key, value in values.items())
            lines.append(f"{kind:<11} {shown} ({about[kind]})")
    ignored = {"--ignore": list(found.ignored)} if found.ignored else {}
    for why, keys in {**translation.left_out, **ignored}.items():
        lines.append(f"left out    {len(keys)} tensors ({why}): {first_of(keys)}")
    if translation.counters:
        lines.append(f"counters    {translation.counters} batch counters not in the file, set to 0")
    if translation.dtypes:
        lines.append(f"dtype       {', '.join(translation.dtypes)} in the file, float32 here")
    lines += [f"note        {note}" for note in (*source.notes, *plan.notes)]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return lines + [
        line if line.startswith("warning") else f"classes     {line}" for line in choice.lines
    ]
