"""The config and the classes that mmsegmentation stores in a checkpoint.

The config is Python source. It is parsed, never run: only literals and dict(...) are understood.
Each key of the model and of its test pipeline is understood, or the config is refused by it. What
moves pixels and cannot be converted is a warning.
"""

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from segtrain.convert.layout import Options, accepting, misfits, short
from segtrain.errors import CheckpointError

Config = dict[str, Any]
_MAX_CHARACTERS = 1_000_000
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
_FLAG = (False, True)
_NONE = (None,)
_CONV = (None, {"type": "Conv2d"})
# Keys with any value are read elsewhere, or the shapes of the tensors decide them, or they change
# no prediction. A key that is missing has one of the values here, but for `_AUX_DEFAULTS`.
_HEAD_KEYS = (
    "type in_channels channels num_classes out_channels norm_cfg act_cfg dropout_ratio init_cfg "
    "loss_decode sampler ignore_index "
    "threshold "  # of one channel, which is refused
)
_KEYS = {
    "model": accepting(
        "backbone decode_head auxiliary_head data_preprocessor test_cfg pretrained init_cfg "
        "train_cfg",
        type=("EncoderDecoder",),
        neck=_NONE,
    ),
    "backbone": accepting(
        "depth strides dilations multi_grid norm_cfg act_cfg stem_channels base_channels "
        "init_cfg pretrained zero_init_residual frozen_stages norm_eval with_cp stage_with_dcn "
        "deep_stem avg_down",
        type=("ResNet", "ResNetV1c", "ResNetV1d"),
        style=("pytorch",),
        in_channels=(3,),
        num_stages=(4,),
        out_indices=((0, 1, 2, 3),),
        conv_cfg=_CONV,
        dcn=_NONE,
        plugins=_NONE,
        contract_dilation=_FLAG,
    ),
    "decode_head": accepting(
        _HEAD_KEYS + "pool_scales dilations c1_in_channels c1_channels",
        in_index=(3, -1),
        input_transform=_NONE,
        conv_cfg=_CONV,
        align_corners=_FLAG,
    ),
    "auxiliary_head": accepting(
        _HEAD_KEYS,
        type=("FCNHead",),
        in_index=(2, -2),
        input_transform=_NONE,
        num_convs=(1,),
        kernel_size=(3,),
        concat_input=(False,),
        dilation=(1,),
        conv_cfg=_CONV,
        align_corners=_FLAG,
    ),
    "test_cfg": accepting("crop_size stride type", mode=("whole", "slide")),
    "data_preprocessor": accepting(
        "mean std bgr_to_rgb rgb_to_bgr "
        "size size_divisor pad_val seg_pad_val batch_augments",  # of training crops
        type=("SegDataPreProcessor",),
        test_cfg=(None, {}),
    ),
}
_AUX_DEFAULTS = {"in_index": -1, "num_convs": 2, "concat_input": True}
_NORM = accepting("requires_grad momentum", type=("BN", "SyncBN", "BN2d", "MMSyncBN"), eps=(1e-5,))
_ACTIVATION = accepting("inplace", type=("ReLU",))
# Steps of a test pipeline that change no pixel. tifffile gives RGB, the others BGR.
_IN_PLACE = ("LoadAnnotations", "PackSegInputs", "ImageToTensor", "Collect", "DefaultFormatBundle")
_LOADING = ("LoadImageFromFile", "LoadImageFromNDArray")
_LOAD = accepting(
    "type to_float32 ignore_empty backend_args file_client_args",
    color_type=("color", "color_ignore_orientation"),
    imdecode_backend=("cv2", "pillow", "turbojpeg"),
)
# Those that move pixels, and leave their values.
_MOVING = ("Resize", "RandomFlip", "Pad", "MultiScaleFlipAug", "CenterCrop", "ResizeShortestEdge")
_NORMALIZE = accepting("type mean std to_rgb")
_RESIZE = accepting(
    "type scale clip_object_border",
    keep_ratio=(True,),
    interpolation=("bilinear",),
    backend=("cv2",),
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
    sections = {
        "backbone": model.get("backbone") or {},
        "decode_head": model.get("decode_head") or {},
        "auxiliary_head": model.get("auxiliary_head") or {},
        "test_cfg": model.get("test_cfg") or config.get("test_cfg") or {},
        "data_preprocessor": model.get("data_preprocessor")
        or config.get("data_preprocessor")
        or {},
    }
    problems = [
        f"{key}: expected a dict, found {short(value)}"
        for key, value in sections.items()
        if not isinstance(value, dict)
    ]
    images = Stated({})
    if not problems:
        problems += _model_problems(model, sections, found)
        images, more = _images(sections["data_preprocessor"], *_test_pipeline(config))
        problems += more
    if problems:
        raise CheckpointError("\n  ".join(["the config in the file does not fit:", *problems]))
    window, warnings = _window(sections["test_cfg"])
    return Stated(
        _model_options(sections, found) | images.options | window,
        warnings=(*images.warnings, *warnings),
        drops_zero=_drops_zero(config),
    )


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


def parsed(meta: Mapping[str, Any]) -> Config | str | None:
    """The values of the config in `meta`; why it cannot be read; or None if there is none.

    mmcv and mmengine write configs anew, as assignments of literals.
    """
    texts = (meta[key] for key in ("cfg", "config") if isinstance(meta.get(key), str))
    if (text := next(texts, None)) is None:
        return None
    if len(text) > _MAX_CHARACTERS:
        return "it is too long"
    values: Config = {}
    try:
        for node in ast.parse(text).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]):
                    values.pop(name, None)
                    with suppress(ValueError, TypeError):  # no literal
                        values[name] = ast.literal_eval(_Literals().visit(node.value))
                case _:  # such as model['backbone']['dilations'] = ..., or model.update(...)
                    return f"line {node.lineno} assigns no variable"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "it is not Python"
    return values if isinstance(values.get("model"), dict) else "it has no model of literals"


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


# The model


def _model_problems(model: Config, sections: dict[str, dict], found: Options) -> Iterator[str]:
    """What is not as segtrain's models are, or not as the keys are."""
    backbone, head, auxiliary, *_ = sections.values()
    yield from misfits("model", model, _KEYS["model"])
    if auxiliary:
        sections = sections | {"auxiliary_head": _AUX_DEFAULTS | auxiliary}
        if bool(auxiliary.get("align_corners")) != bool(head.get("align_corners")):
            yield "align_corners: differs between decode_head and auxiliary_head"
    for name, section in sections.items():
        yield from misfits(name, section, _KEYS[name])
        for key, default, accepted in (
            ("norm_cfg", {}, _NORM),
            ("act_cfg", {"type": "ReLU"}, _ACTIVATION),
        ):
            inner = section.get(key, default)
            if inner is None and key == "norm_cfg":
                continue  # the keys tell
            if isinstance(inner, dict):
                yield from misfits(f"{name}.{key}", inner, accepted)
            else:
                yield f"{name}.{key}: expected a dict, found {short(inner)}"
    for where, stated_value, by_keys in (
        ("backbone.depth", f"resnet{backbone.get('depth', '')}", found["model.backbone"]),
        ("decode_head.type", _HEADS.get(str(head.get("type"))), found["model.arch"]),
    ):
        if stated_value != by_keys:
            yield f"{where}: {short(stated_value)}, and the keys are those of {by_keys}"
    stride = next((s for key, s in _STRIDES.items() if key == _geometry(backbone)), None)
    if stride is None:
        yield (
            f"backbone.strides and dilations {_geometry(backbone)}: segtrain dilates only stages "
            f"without a stride; expected one of {list(_STRIDES)}"
        )
    elif stride < 32 and not backbone.get("contract_dilation", False):
        yield "backbone.contract_dilation: expected True where a stage is dilated, found False"
    dilations = head.get("dilations", (1, 6, 12, 18))
    if not isinstance(dilations, tuple) or dilations[:1] != (1,):
        yield f"decode_head.dilations: expected 1 and the rates, found {short(dilations)}"


def _model_options(sections: dict[str, dict], found: Options) -> Options:
    """What the sections say, of whose values `Config` checks the kind."""
    backbone, head = sections["backbone"], sections["decode_head"]
    options: Options = {
        "model.output_stride": _STRIDES[_geometry(backbone)],
        "model.align_corners": bool(head.get("align_corners", False)),
        "model.dropout": head.get("dropout_ratio", 0.1),
    }
    if backbone.get("multi_grid"):
        options["model.multi_grid"] = backbone["multi_grid"]
    if found["model.arch"] == "pspnet":
        return options | {"model.ppm_bins": head.get("pool_scales", (1, 2, 3, 6))}
    return options | {"model.aspp_rates": head.get("dilations", (1, 6, 12, 18))[1:]}


def _geometry(backbone: dict[str, Any]) -> tuple[Any, Any]:
    return backbone.get("strides", (1, 2, 2, 2)), backbone.get("dilations", (1, 1, 1, 1))


def _is_pair(value: Any) -> bool:
    """Whether `value` is a pair of numbers above 0."""
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and all(type(v) is int and v > 0 for v in value)


# The images and their labels, of version 1 or 0


def _test_pipeline(config: Config) -> tuple[list[dict[str, Any]] | None, Any]:
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
            return [step for steps in different for step in _flattened(steps)], kind
    return None, None


def _flattened(steps: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """The steps one after another.

    Version 0 has the sides around its steps, and its Resize keeps the ratio by default.
    """
    for step in steps:
        inner = step.get("transforms") if isinstance(step, dict) else None
        if not isinstance(inner, tuple):
            yield step if isinstance(step, dict) else {"type": step}
            continue
        sized = step.get("type") == "MultiScaleFlipAug"
        if not sized or step.get("flip") or step.get("img_ratios"):
            yield step
        for part in _flattened(inner):
            if part.get("type") == "Resize":
                yield {"scale": step.get("img_scale"), "keep_ratio": True, **part}
            elif part.get("type") != "RandomFlip":
                yield part


def _images(
    own: dict[str, Any], steps: list[dict[str, Any]] | None, kind: Any
) -> tuple[Stated, list[str]]:
    """The options of test images, and problems.

    Mean and std are those of the steps that run, or of the model's `data_preprocessor`; not of the
    variable `img_norm_cfg`: a config that replaces it leaves inherited steps as they were.
    """
    if steps is None and not own:
        lines = ("no test pipeline in the config: ImageNet's mean and std are assumed",)
        return Stated({}, warnings=lines), []
    warnings = (
        [] if steps is not None else ["the config names no test pipeline: images keep their size"]
    )
    normalizations, problems, options = [], [], {}
    for step in steps or ():
        name = step.get("type")
        if name == "Normalize":
            normalizations.append((step.get("mean"), step.get("std"), step.get("to_rgb", True)))
            problems += misfits(f"test_pipeline.{name}", step, _NORMALIZE)
        elif name == "Resize" and not options and (sides := _sides(step)):
            side, bound = sides
            if (kind, sides) == _CITYSCAPES:
                continue  # as these images are stored
            options["data.short_side_px"] = side
            if bound < _USUAL_ASPECT * side:
                warnings.append(
                    f"the test pipeline also keeps the long side at most {bound} px: images longer "
                    f"than {bound / side:.2f} short sides are larger here"
                )
        elif name in _LOADING:
            problems += misfits(f"test_pipeline.{name}", step, _LOAD)
        elif name in _MOVING:
            warnings.append(f"the test pipeline has {short(step)}, which is not converted")
        elif name not in _IN_PLACE:
            problems.append(f"test_pipeline: segtrain has no step {short(step)}")
    if own.get("mean") is not None or own.get("bgr_to_rgb"):
        normalizations.append((own.get("mean"), own.get("std"), own.get("bgr_to_rgb")))
    if len(normalizations) != 1 or normalizations[0][2] is not True:
        problems.append(
            "test pipeline and data_preprocessor: expected one normalization, with RGB images "
            f"(to_rgb or bgr_to_rgb), found {len(normalizations)}: {short(normalizations)}"
        )
    else:
        options |= {"data.mean": normalizations[0][0], "data.std": normalizations[0][1]}
    return Stated(options, warnings=tuple(warnings)), problems


def _sides(step: dict[str, Any]) -> tuple[int, int] | None:
    """The short and the long side of a Resize that keeps the ratio; None: it is another one.

    mmcv.imrescale multiplies by min(long / max(h, w), short / min(h, w)).
    """
    fits = _is_pair(step.get("scale")) and "keep_ratio" in step and not misfits("", step, _RESIZE)
    return (min(step["scale"]), max(step["scale"])) if fits else None


def _window(test: dict[str, Any]) -> tuple[Options, list[str]]:
    """The sliding window, if the model is evaluated with one; and warnings."""
    if test.get("mode") != "slide":
        return {}, []
    crop, stride = test.get("crop_size"), test.get("stride")
    fits = _is_pair(crop) and _is_pair(stride)
    if not fits or any(s > c for s, c in zip(stride, crop, strict=True)):
        return {}, [
            f"the sliding window of the config is not converted: crop_size {short(crop)}, stride "
            f"{short(stride)}; expected two pairs, and no stride above its side; --set "
            "eval.mode=slide, eval.crop_size and eval.overlap give one",
        ]
    high, wide = (round(1 - s / c, 4) for s, c in zip(stride, crop, strict=True))
    overlap = max(high, wide)
    options = {"eval.mode": "slide", "eval.crop_size": crop, "eval.overlap": overlap}
    # Strides are rounded to whole pixels.
    if all(abs(c * (1 - overlap) - s) < 1 for s, c in zip(stride, crop, strict=True)):
        return options, []
    return options, [
        f"the windows overlap by {high:g} of their height and {wide:g} of their width there; "
        f"eval.overlap is for both: the larger one, {overlap:g}",
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
