"""The config and the classes that mmsegmentation stores in a checkpoint.

The config is Python source. It is parsed, never run: only literals and dict(...) are understood.
Each key of the model is understood, or the config is refused by it. What the test pipeline does
and cannot be converted is a warning.
"""

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from segtrain.desk.convert.conversion import Options, accepting, misfits, short
from segtrain.errors import CheckpointError

Config = dict[str, Any]
_MAX_CHARACTERS = 1_000_000
_HEADS = {
    "pspnet": "PSPHead",
    "deeplabv3": "ASPPHead",
    "deeplabv3plus": "DepthwiseSeparableASPPHead",
}
# (strides, dilations) of the four stages, and the output stride; the last one is the default.
_STRIDES = {
    ((1, 2, 1, 1), (1, 1, 2, 4)): 8,
    ((1, 2, 2, 1), (1, 1, 1, 2)): 16,
    ((1, 2, 2, 2), (1, 1, 1, 1)): 32,
}
_CONV = (None, {"type": "Conv2d"})
# Keys with any value are read elsewhere, or the keys and shapes of the tensors decide them, or they
# change no prediction. A key that is missing has one of the values here.
_HEAD = accepting(
    "type in_channels channels num_classes out_channels norm_cfg act_cfg dropout_ratio init_cfg "
    "loss_decode sampler ignore_index threshold pool_scales dilations c1_in_channels c1_channels "
    "num_convs kernel_size concat_input",
    in_index=(3, -1),
    input_transform=(None,),
    conv_cfg=_CONV,
    align_corners=(False, True),
)
_KEYS = {
    "model": accepting(
        "backbone decode_head auxiliary_head data_preprocessor test_cfg pretrained init_cfg "
        "train_cfg",
        type=("EncoderDecoder",),
        neck=(None,),
    ),
    "backbone": accepting(
        "depth strides dilations contract_dilation multi_grid norm_cfg act_cfg stem_channels "
        "base_channels init_cfg pretrained zero_init_residual frozen_stages norm_eval with_cp "
        "stage_with_dcn deep_stem avg_down in_channels num_stages dcn plugins",
        type=("ResNet", "ResNetV1c", "ResNetV1d"),
        style=("pytorch",),
        out_indices=((0, 1, 2, 3),),
        conv_cfg=_CONV,
    ),
    "decode_head": _HEAD,
    "auxiliary_head": {**_HEAD, "type": ("FCNHead",), "in_index": (2, -2), "dilation": (1,)},
    "test_cfg": accepting("crop_size stride type", mode=("whole", "slide")),
    "data_preprocessor": accepting(
        "mean std bgr_to_rgb rgb_to_bgr "
        "size size_divisor pad_val seg_pad_val batch_augments",  # of training crops
        type=("SegDataPreProcessor",),
        test_cfg=(None, {}),
    ),
}
_NORM = accepting("requires_grad momentum", type=("BN", "SyncBN", "BN2d", "MMSyncBN"), eps=(1e-5,))
_ACTIVATION = accepting("inplace", type=("ReLU",))
# Steps of a test pipeline that change no pixel.
_IN_PLACE = ("LoadAnnotations", "PackSegInputs", "ImageToTensor", "Collect", "DefaultFormatBundle")
_LOAD = accepting(
    "type to_float32 ignore_empty backend_args file_client_args",
    color_type=("color", "color_ignore_orientation"),
    imdecode_backend=("cv2", "pillow", "turbojpeg"),  # which give BGR
)
_RESIZE = accepting(
    "type scale clip_object_border",
    keep_ratio=(True,),
    interpolation=("bilinear",),
    backend=("cv2",),
)
_STEPS = {
    "Normalize": accepting("type mean std to_rgb"),
    "LoadImageFromFile": _LOAD,
    "LoadImageFromNDArray": _LOAD,
}
# Data sets whose reduce_zero_label is true by default.
_ZERO_IS_IGNORED = frozenset(
    ("ADE20KDataset", "PascalContextDataset59", "PotsdamDataset", "ISPRSDataset", "LoveDADataset")
)


def stated(meta: Mapping[str, Any], found: Options) -> dict[str, Any]:
    """What the config in `meta` says: `stated`, `notes` and `drops_zero` of a `Conversion`.

    found: what the keys of the file decide.

    Raises:
        CheckpointError: the config describes a model that segtrain cannot build, or another one
            than the keys do.
    """
    text = next((meta[key] for key in ("cfg", "config") if isinstance(meta.get(key), str)), None)
    if text is None:
        return {"notes": ("note        the file holds no config of mmsegmentation",)}
    config = _parsed(text)
    if isinstance(config, str):
        assumed = "the options of its model, images and labels (reduce_zero_label) are assumed"
        return {"notes": (f"warning: the config in the file cannot be read ({config}): {assumed}",)}
    model = config["model"]
    # Some configs have test_cfg beside the model.
    sections = {
        name: model.get(name) or config.get(name) or {} for name in _KEYS if name != "model"
    }
    problems = list(misfits("model", model, _KEYS["model"]))
    for name, section in sections.items():
        problems += misfits(name, section, _KEYS[name])
    options, warnings = {}, []
    if all(isinstance(section, dict) for section in sections.values()):
        problems += _model_problems(sections, found)
        options, warnings, more = _images(sections["data_preprocessor"], _test_steps(config))
        problems += more
    if problems:
        raise CheckpointError("\n  ".join(["the config in the file does not fit:", *problems]))
    window, more = _window(sections["test_cfg"])
    return {
        "stated": _model_options(sections, found) | options | window,
        "notes": tuple(f"warning: {line}" for line in (*warnings, *more)),
        "drops_zero": _drops_zero(config),
    }


def class_names(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes that `meta` stores; () if it has none."""
    stored = meta.get("dataset_meta")
    stored = stored if isinstance(stored, Mapping) else meta
    names = stored.get("classes", stored.get("CLASSES"))
    is_names = isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)
    return tuple(names) if is_names else ()


# Reading the source


def _parsed(text: str) -> Config | str:
    """The values of the config `text`, or why it cannot be read.

    mmcv and mmengine write configs anew, as assignments of literals.
    """
    if len(text) > _MAX_CHARACTERS:
        return "it is too long"
    values: Config = {}
    try:
        for node in ast.parse(text).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]):
                    # Assigned anew, perhaps by something that cannot be read: the old value is
                    # wrong.
                    values.pop(name, None)
                    with suppress(ValueError, TypeError):  # no literal
                        values[name] = _literal(node.value)
                case _:  # such as model['backbone']['dilations'] = ..., or model.update(...)
                    return f"line {node.lineno} assigns no variable"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "it is not Python"
    return values if isinstance(values.get("model"), dict) else "it has no model of literals"


def _literal(node: ast.expr) -> Any:
    """The value of a literal or dict(...), lists as tuples; ValueError: it is more."""
    match node:
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=pairs):
            if any(pair.arg is None for pair in pairs):
                raise ValueError("dict(**more)")
            return {pair.arg: _literal(pair.value) for pair in pairs}
        case ast.Dict(keys=keys, values=values):
            return {ast.literal_eval(k): _literal(v) for k, v in zip(keys, values, strict=True)}
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return tuple(map(_literal, items))
    return ast.literal_eval(node)


# The model


def _model_problems(sections: dict[str, dict], found: Options) -> Iterator[str]:
    """What is not as segtrain's models are, or not as the keys are."""
    backbone, head, auxiliary, *_ = sections.values()
    if auxiliary and bool(auxiliary.get("align_corners")) != bool(head.get("align_corners")):
        yield "align_corners: differs between decode_head and auxiliary_head"
    for name, section in sections.items():
        if section.get("norm_cfg") is not None:  # without, the keys tell
            yield from misfits(f"{name}.norm_cfg", section["norm_cfg"], _NORM)
        yield from misfits(f"{name}.act_cfg", section.get("act_cfg", {}), _ACTIVATION)
    for where, there, by_keys in (
        ("backbone.depth", f"resnet{backbone.get('depth')}", found["model.backbone"]),
        ("decode_head.type", head.get("type"), _HEADS[found["model.arch"]]),
    ):
        if there != by_keys:
            yield f"{where}: {short(there)}, and the keys are those of {by_keys}"
    geometry = _geometry(backbone)
    if geometry not in list(_STRIDES):  # not by hash: what stands there may have none
        what = f"segtrain dilates only stages without a stride; expected one of {list(_STRIDES)}"
        yield f"backbone.strides and dilations {geometry}: {what}"
    elif geometry != list(_STRIDES)[-1] and not backbone.get("contract_dilation"):
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


def _test_steps(config: Config) -> list[dict[str, Any]] | None:
    """The steps of the test images; of several data sets in one all steps, one after another."""
    loader, data = config.get("test_dataloader"), config.get("data")
    test = data.get("test") if isinstance(data, dict) else None
    for place in (loader, test, {"pipeline": config.get("test_pipeline")}):
        pipelines = [steps for steps in _values(place, "pipeline") if isinstance(steps, tuple)]
        if pipelines:
            different = [steps for i, steps in enumerate(pipelines) if steps not in pipelines[:i]]
            return [step for steps in different for step in _flattened(steps)]
    return None


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
    own: dict[str, Any], steps: list[dict[str, Any]] | None
) -> tuple[Options, list[str], list[str]]:
    """The options of test images, warnings and problems.

    Mean and std are those of the steps that run, or of the model's `data_preprocessor`; not of the
    variable `img_norm_cfg`: a config that replaces it leaves inherited steps as they were.
    """
    if steps is None and not own:
        return {}, ["no test pipeline in the config: ImageNet's mean and std are assumed"], []
    options, problems, warnings = {}, [], []
    if steps is None:
        warnings = ["the config names no test pipeline: images keep their size"]
    normalizations = []
    for step in steps or ():
        name = step.get("type")
        if name == "Normalize":
            normalizations.append((step.get("mean"), step.get("std"), step.get("to_rgb", True)))
        if name in _STEPS:
            problems += misfits(f"test_pipeline.{name}", step, _STEPS[name])
        elif name == "Resize" and not options and _keeps_ratio(step):
            # mmcv.imrescale multiplies by min(long / max(h, w), short / min(h, w)).
            options["data.short_side_px"], most = sides = sorted(step["scale"])
            if most < 4 * sides[0]:  # longer images are rare
                warnings.append(f"the test pipeline also keeps the long side at most {most} px")
        elif name not in _IN_PLACE:
            warnings.append(f"the test pipeline has {short(step)}, which is not converted")
    if own.get("mean") is not None or own.get("bgr_to_rgb"):
        normalizations.append((own.get("mean"), own.get("std"), own.get("bgr_to_rgb")))
    # Pipeline and preprocessor may both normalize, or neither does.
    if len(normalizations) != 1 or normalizations[0][2] is not True:
        expected = "expected one normalization, with RGB images (to_rgb or bgr_to_rgb)"
        found = f"found {len(normalizations)}: {short(normalizations)}"
        problems.append(f"test pipeline and data_preprocessor: {expected}, {found}")
    else:
        options |= {"data.mean": normalizations[0][0], "data.std": normalizations[0][1]}
    return options, warnings, problems


def _keeps_ratio(step: dict[str, Any]) -> bool:
    """Whether a Resize is understood; one of version 1 does not keep the ratio by default."""
    fits = _is_pair(step.get("scale")) and "keep_ratio" in step
    return fits and not any(misfits("", step, _RESIZE))


def _window(test: dict[str, Any]) -> tuple[Options, list[str]]:
    """The sliding window, if the model is evaluated with one; and warnings."""
    crop, stride = test.get("crop_size"), test.get("stride")
    if test.get("mode") != "slide":
        return {}, []
    if _is_pair(crop) and _is_pair(stride):
        sides = list(zip(stride, crop, strict=True))
        # One overlap is for both sides, and strides are rounded to whole pixels.
        overlap = max(round(1 - s / c, 4) for s, c in sides)
        if overlap >= 0 and all(abs(c * (1 - overlap) - s) < 1 for s, c in sides):
            return {"eval.mode": "slide", "eval.crop_size": crop, "eval.overlap": overlap}, []
    window = f"crop_size {short(crop)}, stride {short(stride)}"
    return {}, [f"the sliding window is not converted: {window}; --set eval.mode=slide gives one"]


def _drops_zero(config: Config) -> bool:
    """reduce_zero_label: id 0 of the labels is ignored, and class i has id i + 1."""
    flags = list(_values(config, "reduce_zero_label"))
    if True in flags or False in flags:
        return True in flags
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
