"""The config and the classes that mmsegmentation stores in a checkpoint.

The config is Python source. It is parsed, never run: only literals and dict(...) are understood.
"""

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from segtrain.convert.mmseg_input import drops_zero, input_options, integers, short
from segtrain.convert.plan import Options
from segtrain.errors import CheckpointError
from segtrain.text import MAX_NAME, printable

_MAX_CHARACTERS = 1_000_000
_STEMS = {
    "ResNet": ("7x7", "conv"),
    "ResNetV1c": ("32-32-64", "conv"),
    "ResNetV1d": ("32-32-64", "avgpool"),
}
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
# What segtrain's models always do: the place, the key, its values, and the default.
_FIXED = (
    ("backbone", "style", ("pytorch",), "pytorch"),
    ("backbone", "in_channels", (3,), 3),
    ("backbone", "num_stages", (4,), 4),
    ("backbone", "dcn", (None,), None),
    ("backbone", "plugins", (None,), None),
    ("decode_head", "in_index", (3, -1), -1),
    ("decode_head", "input_transform", (None,), None),
    ("auxiliary_head", "type", ("FCNHead",), "FCNHead"),
    ("auxiliary_head", "in_index", (2, -2), -1),
    ("auxiliary_head", "num_convs", (1,), 2),
    ("auxiliary_head", "concat_input", (False,), True),
    ("auxiliary_head", "dilation", (1,), 1),
)


_READ = {
    *("model", "data_preprocessor", "img_norm_cfg"),
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
    text = next((meta[key] for key in ("cfg", "config") if isinstance(meta.get(key), str)), None)
    if text is None:
        return Stated({}, ("the file holds no config of mmsegmentation",))
    try:
        config = _parse(text)
        sections = {key: _mapping(config["model"], key) for key in ("backbone", "decode_head")}
        sections["auxiliary_head"] = _mapping(config["model"], "auxiliary_head", optional=True)
    except (_UnreadError, KeyError) as error:
        what = printable(error.args[0] if error.args else error, MAX_NAME)
        return Stated(
            {},
            warnings=(
                f"the config in the file cannot be read ({what}): the options of its model, its "
                "images and the ids of its labels (reduce_zero_label) are assumed; compare them",
            ),
        )
    if problems := list(_problems(sections, found)):
        raise CheckpointError(
            "the config in the file does not fit:\n" + "\n".join(f"  {p}" for p in problems)
        )
    options, warnings = input_options(config)
    return Stated({**_model_options(sections, found), **options}, (), warnings, drops_zero(config))


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
        except (_UnreadError, RecursionError):
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


def _mapping(parent: Any, key: str, *, optional: bool = False) -> dict[str, Any]:
    found = parent.get(key) if isinstance(parent, dict) else None
    if found is None and optional:
        return {}
    if not isinstance(found, dict):
        raise _UnreadError(f"model.{key} is no dict")
    return found


def _problems(sections: dict[str, dict], found: Options) -> Iterator[str]:
    """What is not as segtrain's models are, or not as the keys are."""
    backbone, head = sections["backbone"], sections["decode_head"]
    for section, key, expected, default in _FIXED:
        value = sections[section].get(key, default)
        if sections[section] and value not in expected:
            yield f"{section}.{key}: expected {_listed(expected)}, found {short(value)}"
    stem = found.get("model.stem", "7x7"), found.get("model.downsample", "conv")
    kind, head_kind = (str(section.get("type")) for section in (backbone, head))
    if _STEMS.get(kind) != stem:
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
    for section in sections:
        norm = sections[section].get("norm_cfg") or {"type": "BN"}
        if not isinstance(norm, dict) or norm.get("type") not in ("BN", "SyncBN"):
            yield f"{section}.norm_cfg: expected BN or SyncBN, found {short(norm)}"
        elif norm.get("eps", 1e-5) != 1e-5:
            yield f"{section}.norm_cfg.eps: expected 1e-05, found {short(norm['eps'])}"
        act = sections[section].get("act_cfg") or {"type": "ReLU"}
        if not isinstance(act, dict) or act.get("type") != "ReLU":
            yield f"{section}.act_cfg: expected ReLU, found {short(act)}"
    align = {bool(s.get("align_corners", False)) for k, s in sections.items() if k != "backbone"}
    if sections["auxiliary_head"] and len(align) > 1:
        yield "align_corners: differs between decode_head and auxiliary_head"
    dilations = head.get("dilations", (1, 6, 12, 18))
    if found["model.arch"] != "pspnet" and (not integers(dilations) or dilations[0] != 1):
        yield f"decode_head.dilations: expected 1 and the rates, found {short(dilations)}"


def _model_options(sections: dict[str, dict], found: Options) -> Options:
    backbone, head = sections["backbone"], sections["decode_head"]
    stride = _STRIDES[_geometry(backbone)]
    options: Options = {
        "model.output_stride": stride,
        "model.align_corners": bool(head.get("align_corners", False)),
    }
    dropout = head.get("dropout_ratio", 0.1)
    if isinstance(dropout, int | float) and 0 <= dropout < 1:
        options["model.dropout"] = float(dropout)
    if stride < 32:
        options["model.contract_dilation"] = bool(backbone.get("contract_dilation", False))
    if integers(grid := backbone.get("multi_grid")):
        options |= {"model.multi_grid": grid, "model.multi_grid_values": "dilations"}
    if found["model.arch"] == "pspnet":
        bins = head.get("pool_scales", (1, 2, 3, 6))
        return options | ({"model.ppm_bins": bins} if integers(bins) else {})
    return options | {"model.aspp_rates": head.get("dilations", (1, 6, 12, 18))[1:]}


def _geometry(backbone: dict[str, Any]) -> tuple[Any, Any]:
    return backbone.get("strides", (1, 2, 2, 2)), backbone.get("dilations", (1, 1, 1, 1))


def _named(table: Mapping[str, Any], value: Any) -> str:
    return next((name for name, known in table.items() if known == value), "another one")


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(map(repr, values))
