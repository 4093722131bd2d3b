"""The config and the classes that mmsegmentation stores in a checkpoint.

The config is Python source. It is parsed, never run: only literals and dict(...) are understood.
Each key of the model and of its test pipeline is understood, or the config is refused by it. What
moves pixels and cannot be converted is a warning.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from segtrain.convert.layout import Options
from segtrain.errors import CheckpointError
from segtrain.text import MAX_NAME, printable

Config = dict[str, Any]
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


class Known(NamedTuple):
    """The keys of a dict that are understood.

    only: the default of mmsegmentation, and the values that segtrain's models have.
    others: keys that are read elsewhere, that the shapes of the tensors decide, or that change no
        prediction, separated by blanks.
    """

    only: Mapping[str, tuple[Any, tuple[Any, ...]]]
    others: str


_FLAG = False, (True, False)  # off by default
_NONE = None, (None,)
_CONV = None, (None, {"type": "Conv2d"})
_HEAD_KEYS = (
    "type in_channels channels num_classes out_channels norm_cfg act_cfg dropout_ratio init_cfg "
    "loss_decode sampler ignore_index "
    "threshold "  # of one channel, which is refused
)
_KEYS = {
    "model": Known(
        {"type": ("EncoderDecoder", ("EncoderDecoder",)), "neck": _NONE},
        "backbone decode_head auxiliary_head data_preprocessor test_cfg pretrained init_cfg "
        "train_cfg",
    ),
    "backbone": Known(
        {
            "style": ("pytorch", ("pytorch",)),
            "in_channels": (3, (3,)),
            "num_stages": (4, (4,)),
            "out_indices": ((0, 1, 2, 3), ((0, 1, 2, 3),)),
            "conv_cfg": _CONV,
            **dict.fromkeys(("dcn", "plugins"), _NONE),
            **dict.fromkeys(("contract_dilation", "deep_stem", "avg_down"), _FLAG),
        },
        "type depth strides dilations multi_grid norm_cfg stem_channels base_channels init_cfg "
        "pretrained zero_init_residual frozen_stages norm_eval with_cp stage_with_dcn",
    ),
    "decode_head": Known(
        {
            "in_index": (-1, (3, -1)),
            "input_transform": _NONE,
            "conv_cfg": _CONV,
            "align_corners": _FLAG,
        },
        _HEAD_KEYS + "pool_scales dilations c1_in_channels c1_channels",
    ),
    "auxiliary_head": Known(
        {
            "type": ("FCNHead", ("FCNHead",)),
            "in_index": (-1, (2, -2)),
            "input_transform": _NONE,
            "num_convs": (2, (1,)),
            "kernel_size": (3, (3,)),
            "concat_input": (True, (False,)),
            "dilation": (1, (1,)),
            "conv_cfg": _CONV,
            "align_corners": _FLAG,
        },
        _HEAD_KEYS,
    ),
    "test_cfg": Known({"mode": ("whole", ("whole", "slide"))}, "crop_size stride"),
    "norm_cfg": Known(
        {"type": ("BN", ("BN", "SyncBN", "BN2d", "MMSyncBN")), "eps": (1e-5, (1e-5,))},
        "requires_grad momentum",
    ),
    "act_cfg": Known({"type": ("ReLU", ("ReLU",))}, "inplace"),
    "data_preprocessor": Known(
        {
            "type": ("SegDataPreProcessor", ("SegDataPreProcessor",)),
            "test_cfg": (None, (None, {})),
            "bgr_to_rgb": _FLAG,
        },
        "mean std rgb_to_bgr "
        "size size_divisor pad_val seg_pad_val batch_augments",  # of training crops
    ),
}
_SECTIONS = ("backbone", "decode_head", "auxiliary_head", "test_cfg")
# tifffile gives RGB, the others BGR.
_LOAD = Known(
    {
        "color_type": ("color", ("color", "color_ignore_orientation")),
        "imdecode_backend": ("cv2", ("cv2", "pillow", "turbojpeg")),
    },
    "to_float32 ignore_empty backend_args file_client_args",
)
# Steps of a test pipeline that leave the pixels where they are; None: all keys are harmless.
_IN_PLACE = {
    "LoadImageFromFile": _LOAD,
    "LoadImageFromNDArray": _LOAD,
    "Normalize": Known({"to_rgb": _FLAG}, "mean std"),
    **dict.fromkeys(["LoadAnnotations", "PackSegInputs"]),
    **dict.fromkeys(["ImageToTensor", "Collect", "DefaultFormatBundle"]),
}
# Those that move pixels, and leave their values.
_MOVING = (
    *("Resize", "RandomFlip", "Pad", "MultiScaleFlipAug", "TestTimeAug", "CenterCrop"),
    *("RandomCrop", "RandomResize", "ResizeToMultiple", "ResizeShortestEdge"),
)
_RESIZE = Known(
    {"interpolation": ("bilinear", ("bilinear",)), "backend": ("cv2", ("cv2",))},
    "type scale keep_ratio clip_object_border",
)
_CITYSCAPES = "CityscapesDataset", (1024, 2048)
# Longer images than this many short sides are rare enough for the README alone.
_USUAL_ASPECT = 4
# Data sets whose reduce_zero_label is true by default.
_ZERO_IS_IGNORED = frozenset(
    ("ADE20KDataset", "PascalContextDataset59", "PotsdamDataset", "ISPRSDataset", "LoveDADataset")
)


class Stated(NamedTuple):
    """What a config says.

    notes, warnings: lines for the report.
    drops_zero: whether id 0 of the labels is ignored, and class i has id i + 1.
    """

    options: Options
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    drops_zero: bool = False


def stated(config: Config | str | None, found: Options) -> Stated:
    """What a config says.

    config: of `parsed`.
    found: what the keys of the file decide.

    Raises:
        CheckpointError: the config describes a model that segtrain cannot build, or another one
            than the keys do.
    """
    if config is None:
        return Stated({}, ("the file holds no config of mmsegmentation",))
    if isinstance(config, str):
        return Stated(
            {},
            warnings=(
                f"the config in the file cannot be read ({config}): the options of its model, its "
                "images and the ids of its labels (reduce_zero_label) are assumed; compare them",
            ),
        )
    model = config["model"]
    sections = {key: model.get(key) or {} for key in _SECTIONS}
    problems = [
        f"{key}: expected a dict, found {_short(model[key])}"
        for key, section in sections.items()
        if not isinstance(section, dict)
    ]
    problems += [] if problems else _problems(sections, found)
    pipeline, kind = _test_pipeline(config)
    mean, mean_problems = _normalization(config, pipeline)
    problems += [
        *_misfits("model", model, _KEYS["model"]),
        *mean_problems,
        *_foreign_steps(pipeline),
    ]
    if problems:
        raise CheckpointError(
            "the config in the file does not fit:\n" + "\n".join(f"  {p}" for p in problems)
        )
    options, warnings = _model_options(sections, found) | mean, []
    if not mean:
        warnings.append("no mean and std in the config: those of ImageNet are assumed")
    window = _window(model.get("test_cfg") or config.get("test_cfg"))
    for more, lines in (_resize(pipeline, kind), window):
        options |= more
        warnings += lines
    return Stated(options, (), tuple(warnings), _drops_zero(config))


def foreign(config: Config | str | None) -> list[str]:
    """The backbone and heads of a config that segtrain does not have: `backbone HRNet`."""
    model = config["model"] if isinstance(config, dict) else {}
    return [
        f"{place} {printable(kind, MAX_NAME)}"
        for place, known in (("backbone", _STEMS), ("decode_head", _HEADS))
        for part in _as_tuple(model.get(place))
        if isinstance(part, dict) and str(kind := part.get("type")) not in known
    ]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


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


# Reading the source


class _UnreadError(Exception):
    """A part of the source is no literal."""


def parsed(meta: Mapping[str, Any]) -> Config | str | None:
    """The values of the config in `meta`; why it cannot be read; or None if there is none."""
    texts = (meta[key] for key in ("cfg", "config") if isinstance(meta.get(key), str))
    if (text := next(texts, None)) is None:
        return None
    try:
        config = _parse(text)
    except _UnreadError as error:
        return printable(error.args[0], MAX_NAME)
    return config if isinstance(config.get("model"), dict) else "it has no model"


# Names whose later changes would be missed.
_READ = {
    *("model", "data_preprocessor", "test_cfg"),
    *("data", "dataset_type", "test_dataloader", "test_pipeline"),
}


def _parse(text: str) -> Config:
    """The values of the assignments in a config; those that are no literals are left out."""
    if len(text) > _MAX_CHARACTERS:
        raise _UnreadError("it is too long")
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _UnreadError("it is not Python") from error
    values = {}
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                pass
            case _:
                # Such as model['backbone']['dilations'] = ..., or model.update(...).
                if changed := _names(node) & _READ:
                    raise _UnreadError(f"line {node.lineno} may change {min(changed)}")
                continue
        used = _names(node.value)
        try:
            values[name] = ast.literal_eval(_Literals().visit(node.value))
        except (ValueError, RecursionError, TypeError, MemoryError):
            if name == "model":
                raise _UnreadError("model is more than literals") from None
            if "model" in used:  # another name for it
                raise _UnreadError(f"line {node.lineno} may change model") from None
            values.pop(name, None)
    return values


class _Literals(ast.NodeTransformer):
    """Makes a dict display of dict(...), and tuples of lists."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        names = [keyword.arg for keyword in node.keywords]
        is_dict = isinstance(node.func, ast.Name) and node.func.id == "dict"
        if not is_dict or node.args or None in names:
            return ast.Name("more than a literal", ast.Load())
        keys = [ast.Constant(name) for name in names]
        return ast.Dict(keys, [keyword.value for keyword in node.keywords])

    def visit_List(self, node: ast.List) -> ast.AST:
        self.generic_visit(node)
        return ast.Tuple(node.elts, ast.Load())


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


# The model


def _misfits(place: str, given: Mapping[Any, Any], keys: Known) -> Iterator[str]:
    """What stands in the dict at `place` and is not understood, by its full name."""
    for key, (default, accepted) in keys.only.items():
        if (value := given.get(key, default)) not in accepted:
            expected = " or ".join(map(repr, accepted))
            yield f"{place}.{key}: expected {expected}, found {_short(value)}"
    for key, value in given.items():
        if key not in keys.only and key not in keys.others.split():
            name = printable(key, MAX_NAME)
            yield f"{place}.{name}: {_short(value)}: segtrain does not know this key"


def _problems(sections: dict[str, dict], found: Options) -> Iterator[str]:
    """What is not as segtrain's models are, or not as the keys are."""
    backbone, head = sections["backbone"], sections["decode_head"]
    for section, values in sections.items():
        if values:
            yield from _misfits(section, values, _KEYS[section])
        for key, default in (("norm_cfg", {}), ("act_cfg", {"type": "ReLU"})):
            inner = values.get(key, default)
            if inner is None and key == "norm_cfg":
                continue  # the keys tell
            if isinstance(inner, dict):
                yield from _misfits(f"{section}.{key}", inner, _KEYS[key])
            else:
                yield f"{section}.{key}: expected a dict, found {_short(inner)}"
    stem = "model.stem" in found, found.get("model.stem") == "32-32-64-avgpool"
    kind, head_kind = (str(section.get("type")) for section in (backbone, head))
    set_by_keys = bool(backbone.get("deep_stem")), bool(backbone.get("avg_down"))
    by_type = _STEMS.get(kind)
    if by_type is None or tuple(map(max, by_type, set_by_keys)) != stem:
        yield f"backbone.type {_short(kind)}: the keys are those of {_named(_STEMS, stem)}"
    depth, by_keys = f"resnet{backbone.get('depth', '')}", found["model.backbone"]
    if depth != by_keys:
        yield f"backbone.depth: {_short(depth)}, and the keys are those of {by_keys}"
    if _HEADS.get(head_kind) != found["model.arch"]:
        named = _named(_HEADS, found["model.arch"])
        yield f"decode_head.type {_short(head_kind)}: the keys are those of {named}"
    if _geometry(backbone) not in list(_STRIDES):
        yield (
            f"backbone.strides and dilations {_geometry(backbone)}: segtrain dilates only stages "
            f"without a stride; expected one of {list(_STRIDES)}"
        )
    elif _STRIDES[_geometry(backbone)] < 32 and not backbone.get("contract_dilation", False):
        yield "backbone.contract_dilation: expected True where a stage is dilated, found False"
    if not ((grid := backbone.get("multi_grid")) is None or _integers(grid)):
        yield f"backbone.multi_grid: expected numbers above 0, found {_short(grid)}"
    dropout = head.get("dropout_ratio", 0.1)
    if not (isinstance(dropout, int | float) and 0 <= dropout < 1):
        yield f"decode_head.dropout_ratio: expected a number in [0, 1), found {_short(dropout)}"
    align = {bool(s.get("align_corners", False)) for k, s in sections.items() if "head" in k}
    if sections["auxiliary_head"] and len(align) > 1:
        yield "align_corners: differs between decode_head and auxiliary_head"
    if found["model.arch"] == "pspnet":
        if not _integers(head.get("pool_scales", (1, 2, 3, 6))):
            yield f"decode_head.pool_scales: expected numbers, found {_short(head['pool_scales'])}"
    elif not _integers(dilations := head.get("dilations", (1, 6, 12, 18))) or dilations[0] != 1:
        yield f"decode_head.dilations: expected 1 and the rates, found {_short(dilations)}"


def _model_options(sections: dict[str, dict], found: Options) -> Options:
    backbone, head = sections["backbone"], sections["decode_head"]
    options: Options = {
        "model.output_stride": _STRIDES[_geometry(backbone)],
        "model.align_corners": bool(head.get("align_corners", False)),
        "model.dropout": float(head.get("dropout_ratio", 0.1)),
    }
    if backbone.get("multi_grid"):
        options["model.multi_grid"] = backbone["multi_grid"]
    if found["model.arch"] == "pspnet":
        return options | {"model.ppm_bins": head.get("pool_scales", (1, 2, 3, 6))}
    return options | {"model.aspp_rates": head.get("dilations", (1, 6, 12, 18))[1:]}


def _geometry(backbone: dict[str, Any]) -> tuple[Any, Any]:
    return backbone.get("strides", (1, 2, 2, 2)), backbone.get("dilations", (1, 1, 1, 1))


def _named(table: Mapping[str, Any], value: Any) -> str:
    return next((name for name, known in table.items() if known == value), "another one")


def _integers(value: Any) -> bool:
    """Whether `value` is a tuple of numbers above 0, not empty."""
    whole = isinstance(value, tuple) and all(type(v) is int and v > 0 for v in value)
    return whole and len(value) > 0


def _short(value: Any) -> str:
    """`value` as Python writes it, short enough for a message."""
    return printable(repr(value), MAX_NAME)


# The images and their labels, of version 1 or 0

_Pipeline = tuple[Any, ...] | None
_Part = tuple[Options, list[str]]  # and lines


def _test_pipeline(config: Config) -> tuple[_Pipeline, Any]:
    """The steps of the test images, and the type of their data set.

    Of several data sets in one all steps, one after another.
    """
    loader, data = config.get("test_dataloader"), config.get("data")
    for place in (
        loader.get("dataset") if isinstance(loader, dict) else None,
        data.get("test") if isinstance(data, dict) else None,
        {"pipeline": config.get("test_pipeline"), "type": config.get("dataset_type")},
    ):
        found = [steps for steps in _values(place, "pipeline") if isinstance(steps, tuple)]
        if found:
            kind = place.get("type") if isinstance(place, dict) else None
            different = [steps for i, steps in enumerate(found) if steps not in found[:i]]
            return tuple(step for steps in different for step in steps), kind
    return None, None


def _foreign_steps(pipeline: _Pipeline) -> Iterator[str]:
    """The steps, and keys of steps, that may change values of pixels."""
    for step in _steps(pipeline or ()):
        name = step.get("type") if isinstance(step, dict) else step
        if not isinstance(name, str) or name not in (*_IN_PLACE, *_MOVING):
            what = f"test_pipeline.{printable(name, MAX_NAME)}"
            yield f"{what}: segtrain has no such step, which may change values of pixels"
        elif (keys := _IN_PLACE.get(name)) is not None:
            given = {} if step is name else {k: v for k, v in step.items() if k != "type"}
            yield from _misfits(f"test_pipeline.{name}", given, keys)


def _normalization(config: Config, pipeline: _Pipeline) -> _Part:
    """Mean and std of the steps that run, or of the model's own preprocessor; and problems.

    Not of the variable `img_norm_cfg`: a config that replaces it leaves inherited steps as they
    were.
    """
    own = config["model"].get("data_preprocessor") or config.get("data_preprocessor")
    if own is not None and not isinstance(own, dict):
        return {}, [f"data_preprocessor: expected a dict, found {_short(own)}"]
    if own is None and pipeline is None:
        return {}, []
    own = own or {}
    problems = [*_misfits("data_preprocessor", own, _KEYS["data_preprocessor"])]
    tested = list(_normalizations(pipeline or ()))
    found = [("test_pipeline.Normalize", *values) for values in tested]
    pair, rgb = (own.get("mean"), own.get("std")), own.get("bgr_to_rgb", False)
    if pair != (None, None) or rgb:
        found.append(("data_preprocessor", *pair, rgb))
    if len(found) > 1:
        places = ", ".join(place for place, *_ in found)
        return {}, [*problems, f"{len(found)} normalizations ({places}): expected one"]
    place, mean, std, rgb = found[0] if found else ("test pipeline", (0,) * 3, (1,) * 3, False)
    if not rgb:
        problems.append(f"{place}: the model takes BGR images; segtrain's take RGB")
    for key, value in (("mean", mean), ("std", std)):
        if not (isinstance(value, tuple) and len(value) == 3):
            problems.append(f"{place}.{key}: expected three numbers, found {_short(value)}")
    data = config.get("data")
    trained = data.get("train") if isinstance(data, dict) else config.get("train_dataloader")
    if any(other not in tested for other in _normalizations(_values(trained, "pipeline"))):
        problems.append(f"{place}: the training pipeline has another one; make them equal")
    return {"data.mean": mean, "data.std": std}, problems


def _normalizations(steps: Iterable[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Mean, std and whether BGR becomes RGB, of each Normalize within `steps`."""
    for step in _steps(steps):
        if isinstance(step, dict) and step.get("type") == "Normalize":
            yield step.get("mean"), step.get("std"), step.get("to_rgb", True)


def _steps(steps: Iterable[Any]) -> Iterator[Any]:
    """The steps, and those within them."""
    for step in steps:
        if isinstance(step, tuple):
            yield from _steps(step)
            continue
        yield step
        if isinstance(step, dict) and isinstance(step.get("transforms"), tuple):
            yield from _steps(step["transforms"])


def _resize(pipeline: _Pipeline, kind: Any) -> _Part:
    """data.short_side_px for a Resize that keeps the ratio.

    mmcv.imrescale multiplies by min(long / max(h, w), short / min(h, w)).
    """
    if pipeline is None:
        return {}, ["the config names no test pipeline: images keep their size"]
    options: Options = {}
    lines: list[str] = []
    for step in pipeline:
        name, scale, keep = _step(step)
        if name not in _MOVING:
            continue
        if name != "Resize" or not keep or not _integers(scale) or len(scale) != 2 or options:
            lines.append(
                f"the test pipeline has {_short(step)}, which is not converted; --set "
                "data.short_side_px=N resizes images to a short side"
            )
            continue
        side, bound = sorted(scale)
        if (kind, (side, bound)) == _CITYSCAPES:
            continue  # as these images are stored
        options["data.short_side_px"] = side
        if bound < _USUAL_ASPECT * side:
            lines.append(
                f"the test pipeline also keeps the long side at most {bound} px: images longer "
                f"than {bound / side:.2f} short sides are larger here"
            )
    return options, lines


def _step(step: Any) -> tuple[Any, Any, bool]:
    """The type of a step, its (long, short) sides, and whether it keeps the ratio."""
    if not isinstance(step, dict):
        return step, None, False
    if step.get("type") != "MultiScaleFlipAug":
        keeps = step.get("keep_ratio") is True and not list(_misfits("", step, _RESIZE))
        return step.get("type"), step.get("scale"), keeps
    # Version 0: the sides stand around the steps, and Resize keeps the ratio by default.
    inner = [s for s in _as_tuple(step.get("transforms")) if isinstance(s, dict)]
    others = [s for s in inner if s.get("type") not in (*_IN_PLACE, "Resize", "RandomFlip")]
    resizes = [s for s in inner if s.get("type") == "Resize"]
    known = resizes and all(set(s) <= {"type", "keep_ratio"} for s in resizes)
    if others or not known or step.get("img_ratios") or step.get("flip"):
        return "MultiScaleFlipAug", None, False
    return "Resize", step.get("img_scale"), resizes[0].get("keep_ratio", True) is True


def _window(test: Any) -> _Part:
    """The sliding window, if the model is evaluated with one."""
    if not isinstance(test, dict) or test.get("mode") != "slide":
        return {}, []
    crop, stride = test.get("crop_size"), test.get("stride")
    pairs = _integers(crop) and _integers(stride) and len(crop) == len(stride) == 2
    if not pairs or any(s > c for s, c in zip(stride, crop, strict=True)):
        return {}, [
            f"the sliding window of the config is not converted: crop_size {_short(crop)}, stride "
            f"{_short(stride)}; expected two pairs, and no stride above its side; --set "
            "eval.mode=slide, eval.crop_size and eval.overlap give one",
        ]
    high, wide = (round(1 - s / c, 4) for s, c in zip(stride, crop, strict=True))
    options = {"eval.mode": "slide", "eval.crop_size": crop, "eval.overlap": max(high, wide)}
    # Strides are rounded to whole pixels.
    exact = (side * (1 - max(high, wide)) for side in crop)
    if all(abs(e - s) < 1 for e, s in zip(exact, stride, strict=True)):
        return options, []
    return options, [
        f"the windows overlap by {high:g} of their height and {wide:g} of their width there; "
        f"eval.overlap is for both: the larger one, {max(high, wide):g}",
    ]


def _drops_zero(config: Config) -> bool:
    """reduce_zero_label: id 0 of the labels is ignored, and class i has id i + 1."""
    found = list(_values(config, "reduce_zero_label"))
    if True in found or False in found:
        return True in found
    return not _ZERO_IS_IGNORED.isdisjoint(v for v in _values(config, "type") if type(v) is str)


def _values(value: Any, key: str) -> Iterator[Any]:
    """What stands under `key`, in all dicts within `value`."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = tuple(value.values())
    if isinstance(value, tuple):
        for item in value:
            yield from _values(item, key)
