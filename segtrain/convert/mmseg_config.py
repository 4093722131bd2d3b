"""The config and the classes that mmsegmentation stores in a checkpoint.

The config is Python source. It is parsed, never run: only literals and dict(...) are understood.
"""

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from segtrain.convert.layout import Options
from segtrain.convert.mmseg_input import (
    FLAG,
    Keys,
    drops_zero,
    integers,
    misfits,
    read_input,
    short,
)
from segtrain.errors import CheckpointError
from segtrain.text import MAX_NAME, printable

_MAX_CHARACTERS = 1_000_000
# Deep stem, and pooling in the shortcuts.
_STEMS = {"ResNet": (False, False), "ResNetV1c": (True, False), "ResNetV1d": (True, True)}
_HEADS = {
    "PSPHead": "pspnet",
    "ASPPHead": "deeplabv3",
    "DepthwiseSeparableASPPHead": "deeplabv3plus",
}
# (strides, dilations) of the four stages, and the output stride; the last one is the default.
_STRIDES = {
    ((1, 2, 1, 1), (1, 1, 2, 4)): 8,
    ((1, 2, 2, 1), (1, 1, 1, 2)): 16,
    ((1, 2, 2, 2), (1, 1, 1, 1)): 32,
}
_CONV = (None, (None, {"type": "Conv2d"}))
_HEAD_KEYS = (
    *("type", "in_channels", "channels", "num_classes", "out_channels", "norm_cfg", "act_cfg"),
    *("dropout_ratio", "init_cfg", "loss_decode", "sampler", "ignore_index"),
    "threshold",  # of one channel, which is refused
)
_KEYS = {
    "model": Keys(
        {"type": ("EncoderDecoder", ("EncoderDecoder",)), "neck": (None, (None,))},
        (
            *("backbone", "decode_head", "auxiliary_head", "data_preprocessor", "test_cfg"),
            *("pretrained", "init_cfg", "train_cfg"),
        ),
    ),
    "backbone": Keys(
        {
            "style": ("pytorch", ("pytorch",)),
            "in_channels": (3, (3,)),
            "num_stages": (4, (4,)),
            "out_indices": ((0, 1, 2, 3), ((0, 1, 2, 3),)),
            "dcn": (None, (None,)),
            "plugins": (None, (None,)),
            "conv_cfg": _CONV,
            **dict.fromkeys(("contract_dilation", "deep_stem", "avg_down"), FLAG),
        },
        (
            *("type", "depth", "strides", "dilations", "multi_grid"),
            *("norm_cfg", "stem_channels", "base_channels"),
            *("init_cfg", "pretrained", "zero_init_residual", "frozen_stages", "norm_eval"),
            *("with_cp", "stage_with_dcn"),
        ),
    ),
    "decode_head": Keys(
        {
            "in_index": (-1, (3, -1)),
            "input_transform": (None, (None,)),
            "conv_cfg": _CONV,
            "align_corners": FLAG,
        },
        (*_HEAD_KEYS, "pool_scales", "dilations", "c1_in_channels", "c1_channels"),
    ),
    "auxiliary_head": Keys(
        {
            "type": ("FCNHead", ("FCNHead",)),
            "in_index": (-1, (2, -2)),
            "input_transform": (None, (None,)),
            "num_convs": (2, (1,)),
            "kernel_size": (3, (3,)),
            "concat_input": (True, (False,)),
            "dilation": (1, (1,)),
            "conv_cfg": _CONV,
            "align_corners": FLAG,
        },
        _HEAD_KEYS,
    ),
    "test_cfg": Keys({"mode": ("whole", ("whole", "slide"))}, ("crop_size", "stride")),
    "norm_cfg": Keys(
        {"type": ("BN", ("BN", "SyncBN", "BN2d", "MMSyncBN")), "eps": (1e-5, (1e-5,))},
        ("requires_grad", "momentum"),
    ),
    "act_cfg": Keys({"type": ("ReLU", ("ReLU",))}, ("inplace",)),
}
_SECTIONS = ("backbone", "decode_head", "auxiliary_head", "test_cfg")
_READ = {
    *("model", "data_preprocessor", "test_cfg"),
    *("data", "dataset_type", "test_dataloader", "test_pipeline"),
}


class _UnreadError(Exception):
    """A part of the source is no literal."""


class Stated(NamedTuple):
    """What a config says.

    notes, warnings: lines for the report.
    drops_zero: whether id 0 of the labels is ignored, and class i has id i + 1.
    """

    options: Options
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    drops_zero: bool = False


def stated(meta: Mapping[str, Any], found: Options) -> Stated:
    """What the config in `meta` says.

    found: what the keys of the file decide.

    Raises:
        CheckpointError: the config describes a model that segtrain cannot build, or another one
            than the keys do.
    """
    text = _text(meta)
    if text is None:
        return Stated({}, ("the file holds no config of mmsegmentation",))
    try:
        config = _parse(text)
        if not isinstance(config.get("model"), dict):
            raise _UnreadError("it has no model")
    except _UnreadError as error:
        what = printable(error.args[0], MAX_NAME)
        return Stated(
            {},
            warnings=(
                f"the config in the file cannot be read ({what}): the options of its model, its "
                "images and the ids of its labels (reduce_zero_label) are assumed; compare them",
            ),
        )
    given = read_input(config)
    model = config["model"]
    sections = {key: model.get(key) or {} for key in _SECTIONS}
    others = [key for key, section in sections.items() if not isinstance(section, dict)]
    problems = [f"{key}: expected a dict, found {short(model[key])}" for key in others]
    problems += [] if others else _problems(sections, found)
    problems += [*misfits("model", model, _KEYS["model"]), *given.problems]
    if problems:
        raise CheckpointError(
            "the config in the file does not fit:\n" + "\n".join(f"  {p}" for p in problems)
        )
    options = _model_options(sections, found)
    return Stated({**options, **given.options}, (), given.warnings, drops_zero(config))


def foreign(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The backbone and heads of the config in `meta` that segtrain does not have: place, type."""
    try:
        model = _parse(_text(meta) or "").get("model")
    except _UnreadError:
        return []
    parts = [
        (place, part)
        for place in ("backbone", "decode_head")
        for part in _as_tuple(model.get(place) if isinstance(model, dict) else None)
    ]
    kinds = [(place, part.get("type")) for place, part in parts if isinstance(part, dict)]
    return [
        (place, printable(kind, MAX_NAME))
        for place, kind in kinds
        if isinstance(kind, str) and kind not in _STEMS and kind not in _HEADS
    ]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _text(meta: Mapping[str, Any]) -> str | None:
    return next((meta[key] for key in ("cfg", "config") if isinstance(meta.get(key), str)), None)


def classes(
    meta: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[tuple[int, int, int], ...]]:
    """The names and colours of the classes that `meta` stores; () if it has none."""
    stored = meta.get("dataset_meta")
    stored = stored if isinstance(stored, Mapping) else meta
    names = stored.get("classes", stored.get("CLASSES"))
    palette = stored.get("palette", stored.get("PALETTE"))
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        return (), ()
    colors = palette if isinstance(palette, list | tuple) else ()
    fits = all(
        isinstance(c, list | tuple) and len(c) == 3 and all(type(v) is int for v in c)
        for c in colors
    )
    return tuple(names), tuple(map(tuple, colors)) if fits and len(colors) == len(names) else ()


def _parse(text: str) -> dict[str, Any]:
    """The values of the assignments in a config; those that are no literals are left out."""
    if len(text) > _MAX_CHARACTERS:
        raise _UnreadError("it is too long")
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _UnreadError("it is not Python") from error
    values = {}
    for node in body:
        name = _assigned(node)
        if name is None:
            # Such as model['backbone']['dilations'] = ..., model.update(...) or an alias of it.
            if changed := _names(node) & _READ:
                raise _UnreadError(f"line {node.lineno} may change {min(changed)}")
            continue
        try:
            values[name] = _value(node.value)
        except (_UnreadError, RecursionError, TypeError):  # a key without a hash
            if name == "model":
                raise _UnreadError("model is more than literals") from None
            if "model" in _names(node.value):
                raise _UnreadError(f"line {node.lineno} may change model") from None
            values.pop(name, None)
    return values


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _assigned(node: ast.stmt) -> str | None:
    """The name in `name = value`; None for every other statement."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    return node.targets[0].id if isinstance(node.targets[0], ast.Name) else None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple() | ast.List():
            return tuple(_value(item) for item in node.elts)
        case ast.Dict():
            if None in node.keys:
                raise _UnreadError("a dict with **")
            return {_value(k): _value(v) for k, v in zip(node.keys, node.values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Call(func=ast.Name(id="dict"), args=[]):
            if any(keyword.arg is None for keyword in node.keywords):
                raise _UnreadError("dict(**...)")
            return {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    raise _UnreadError("an expression")


def _problems(sections: dict[str, dict], found: Options) -> Iterator[str]:
    """What is not as segtrain's models are, or not as the keys are."""
    backbone, head = sections["backbone"], sections["decode_head"]
    for section, values in sections.items():
        if values:
            yield from misfits(section, values, _KEYS[section])
        for key, default in (("norm_cfg", {}), ("act_cfg", {"type": "ReLU"})):
            inner = values.get(key, default)
            if inner is None and key == "norm_cfg":
                continue  # the keys tell
            if isinstance(inner, dict):
                yield from misfits(f"{section}.{key}", inner, _KEYS[key])
            else:
                yield f"{section}.{key}: expected a dict, found {short(inner)}"
    stem = found.get("model.stem", "7x7")
    stem = stem != "7x7", stem.endswith("avgpool")
    kind, head_kind = (str(section.get("type")) for section in (backbone, head))
    set_by_keys = bool(backbone.get("deep_stem")), bool(backbone.get("avg_down"))
    by_type = _STEMS.get(kind)
    if by_type is None or tuple(map(max, by_type, set_by_keys)) != stem:
        yield f"backbone.type {short(kind)}: the keys are those of {_named(_STEMS, stem)}"
    depth, by_keys = f"resnet{backbone.get('depth', '')}", found["model.backbone"]
    if depth != by_keys:
        yield f"backbone.depth: {short(depth)}, and the keys are those of {by_keys}"
    if _HEADS.get(head_kind) != found["model.arch"]:
        named = _named(_HEADS, found["model.arch"])
        yield f"decode_head.type {short(head_kind)}: the keys are those of {named}"
    if _geometry(backbone) not in list(_STRIDES):
        yield (
            f"backbone.strides and dilations {_geometry(backbone)}: segtrain dilates only stages "
            f"without a stride; expected one of {list(_STRIDES)}"
        )
    elif _STRIDES[_geometry(backbone)] < 32 and not backbone.get("contract_dilation", False):
        yield "backbone.contract_dilation: expected True where a stage is dilated, found False"
    if not ((grid := backbone.get("multi_grid")) is None or integers(grid)):
        yield f"backbone.multi_grid: expected numbers above 0, found {short(grid)}"
    dropout = head.get("dropout_ratio", 0.1)
    if not (isinstance(dropout, int | float) and 0 <= dropout < 1):
        yield f"decode_head.dropout_ratio: expected a number in [0, 1), found {short(dropout)}"
    align = {bool(s.get("align_corners", False)) for k, s in sections.items() if "head" in k}
    if sections["auxiliary_head"] and len(align) > 1:
        yield "align_corners: differs between decode_head and auxiliary_head"
    pyramid = found["model.arch"] == "pspnet"
    dilations = head.get("dilations", (1, 6, 12, 18))
    if not pyramid and (not integers(dilations) or dilations[0] != 1):
        yield f"decode_head.dilations: expected 1 and the rates, found {short(dilations)}"
    if pyramid and not integers(head.get("pool_scales", (1, 2, 3, 6))):
        yield f"decode_head.pool_scales: expected numbers, found {short(head['pool_scales'])}"


def _model_options(sections: dict[str, dict], found: Options) -> Options:
    backbone, head = sections["backbone"], sections["decode_head"]
    stride = _STRIDES[_geometry(backbone)]
    options: Options = {
        "model.output_stride": stride,
        "model.align_corners": bool(head.get("align_corners", False)),
    }
    options["model.dropout"] = float(head.get("dropout_ratio", 0.1))
    if integers(grid := backbone.get("multi_grid")):
        options["model.multi_grid"] = grid
    if found["model.arch"] == "pspnet":
        return options | {"model.ppm_bins": head.get("pool_scales", (1, 2, 3, 6))}
    return options | {"model.aspp_rates": head.get("dilations", (1, 6, 12, 18))[1:]}


def _geometry(backbone: dict[str, Any]) -> tuple[Any, Any]:
    return backbone.get("strides", (1, 2, 2, 2)), backbone.get("dilations", (1, 1, 1, 1))


def _named(table: Mapping[str, Any], value: Any) -> str:
    return next((name for name, known in table.items() if known == value), "another one")
