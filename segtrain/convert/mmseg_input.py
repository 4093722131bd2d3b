"""What a config of mmsegmentation does with test images: normalization, resize, sliding window.

Takes the parsed config of mmseg_config.py. What moves pixels and cannot be converted becomes a
warning; what changes their values is refused.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from segtrain.convert.layout import Options
from segtrain.text import MAX_NAME, printable

Stated = tuple[Options, tuple[str, ...]]
"""Options, and warnings about what none of them says."""


class Keys(NamedTuple):
    """The keys of a dict that are understood.

    only: the default of mmsegmentation, and the values that segtrain's models have.
    others: keys that are read elsewhere, that the shapes of the tensors decide, or that change no
        prediction.
    """

    only: Mapping[str, tuple[Any, tuple[Any, ...]]]
    others: Collection[str] = ()


class Input(NamedTuple):
    """Options of `data` and `eval`, warnings, and why the model cannot be converted."""

    options: Options
    warnings: tuple[str, ...]
    problems: list[str]


FLAG = False, (True, False)  # off by default
# tifffile gives RGB, the others BGR.
_LOAD = Keys(
    {
        "color_type": ("color", ("color", "color_ignore_orientation")),
        "imdecode_backend": ("cv2", ("cv2", "pillow", "turbojpeg")),
    },
    ("to_float32", "ignore_empty", "backend_args", "file_client_args"),
)
# Steps of a test pipeline that leave the pixels where they are; None: all keys are harmless.
_IN_PLACE = {
    "LoadImageFromFile": _LOAD,
    "LoadImageFromNDArray": _LOAD,
    "Normalize": Keys({"to_rgb": FLAG}, ("mean", "std")),
    **dict.fromkeys(("LoadAnnotations", "PackSegInputs"), None),
    **dict.fromkeys(("ImageToTensor", "Collect", "DefaultFormatBundle"), None),
}
# Those that move pixels, and leave their values.
_MOVING = (
    *("Resize", "RandomFlip", "Pad", "MultiScaleFlipAug", "TestTimeAug", "CenterCrop"),
    *("RandomCrop", "RandomResize", "ResizeToMultiple", "ResizeShortestEdge"),
)
_RESIZE = Keys(
    {"interpolation": ("bilinear", ("bilinear",)), "backend": ("cv2", ("cv2",))},
    ("type", "scale", "keep_ratio", "clip_object_border"),
)
# Padding of training crops, and augmentation.
_PREPROCESSOR = Keys(
    {
        "type": ("SegDataPreProcessor", ("SegDataPreProcessor",)),
        "test_cfg": (None, (None, {})),
        "bgr_to_rgb": FLAG,
    },
    (
        *("mean", "std", "rgb_to_bgr"),
        *("size", "size_divisor", "pad_val", "seg_pad_val", "batch_augments"),
    ),
)
# Data sets whose reduce_zero_label is true by default.
_ZERO_IS_IGNORED = frozenset(
    ("ADE20KDataset", "PascalContextDataset59", "PotsdamDataset", "ISPRSDataset", "LoveDADataset")
)
_CITYSCAPES = "CityscapesDataset", (1024, 2048)
# Longer images than this many short sides are rare enough for the README alone.
_USUAL_ASPECT = 4


def read_input(config: dict[str, Any]) -> Input:
    """What the config decides of the images, of version 1 or 0."""
    pipeline, kind = _test_pipeline(config)
    steps = list(_steps(pipeline or ()))
    mean, problems = _normalization(config, pipeline)
    for step in steps:
        name = step.get("type") if isinstance(step, dict) else step
        keys = _IN_PLACE.get(name) if isinstance(name, str) else None
        if keys is not None:
            given = {key: value for key, value in step.items() if key != "type"}
            problems += misfits(f"test_pipeline.{name}", given, keys)
        elif name not in (*_IN_PLACE, *_MOVING):
            what = f"test_pipeline.{printable(name, MAX_NAME)}"
            problems.append(f"{what}: segtrain has no such step, which may change values of pixels")
    model = config["model"]
    test = model.get("test_cfg") or config.get("test_cfg")
    parts = mean, _resize(pipeline, kind), _window(test)
    options = {key: value for part, _ in parts for key, value in part.items()}
    return Input(options, tuple(line for _, lines in parts for line in lines), problems)


def misfits(place: str, given: Mapping[Any, Any], keys: Keys) -> Iterator[str]:
    """What stands in the dict at `place` and is not understood, by its full name."""
    for key, (default, accepted) in keys.only.items():
        if (value := given.get(key, default)) not in accepted:
            expected = " or ".join(map(repr, accepted))
            yield f"{place}.{key}: expected {expected}, found {short(value)}"
    for key, value in given.items():
        if key not in keys.only and key not in keys.others:
            name = printable(key, MAX_NAME)
            yield f"{place}.{name}: {short(value)}: segtrain does not know this key"


def drops_zero(config: dict[str, Any]) -> bool:
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


def integers(value: Any) -> bool:
    """Whether `value` is a tuple of numbers above 0, not empty."""
    whole = isinstance(value, tuple) and all(type(v) is int and v > 0 for v in value)
    return whole and len(value) > 0


def short(value: Any) -> str:
    """`value` as Python writes it, short enough for a message."""
    return printable(repr(value), MAX_NAME)


def _normalization(
    config: dict[str, Any], pipeline: tuple[Any, ...] | None
) -> tuple[Stated, list[str]]:
    """Mean and std of the steps that run, or of the model's own preprocessor; and problems.

    Not of the variable `img_norm_cfg`: a config that replaces it leaves inherited steps as they
    were.
    """
    own = config["model"].get("data_preprocessor") or config.get("data_preprocessor")
    if own is not None and not isinstance(own, dict):
        return ({}, ()), [f"data_preprocessor: expected a dict, found {short(own)}"]
    if own is None and pipeline is None:
        return ({}, ("no mean and std in the config: those of ImageNet are assumed",)), []
    own = own or {}
    problems = [*misfits("data_preprocessor", own, _PREPROCESSOR)]
    tested = list(_normalizations(pipeline or ()))
    found = [("test_pipeline.Normalize", *values) for values in tested]
    pair, rgb = (own.get("mean"), own.get("std")), own.get("bgr_to_rgb", False)
    if pair != (None, None) or rgb:
        found.append(("data_preprocessor", *pair, rgb))
    if len(found) > 1:
        places = ", ".join(place for place, *_ in found)
        problems.append(f"{len(found)} normalizations ({places}): expected one")
        return ({}, ()), problems
    place, mean, std, rgb = found[0] if found else ("test pipeline", (0,) * 3, (1,) * 3, False)
    if not rgb:
        problems.append(f"{place}: the model takes BGR images; segtrain's take RGB")
    for key, value in (("mean", mean), ("std", std)):
        if not (isinstance(value, tuple) and len(value) == 3):
            problems.append(f"{place}.{key}: expected three numbers, found {short(value)}")
    data = config.get("data")
    trained = data.get("train") if isinstance(data, dict) else config.get("train_dataloader")
    if any(other not in tested for other in _normalizations(_values(trained, "pipeline"))):
        problems.append(f"{place}: the training pipeline has another one; make them equal")
    return ({"data.mean": mean, "data.std": std}, ()), problems


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


def _resize(pipeline: tuple[Any, ...] | None, kind: Any) -> Stated:
    """data.short_side_px for a Resize that keeps the ratio.

    mmcv.imrescale multiplies by min(long / max(h, w), short / min(h, w)).
    """
    if pipeline is None:
        return {}, ("the config names no test pipeline: images keep their size",)
    options: Options = {}
    lines: list[str] = []
    for step in pipeline:
        name, scale, keep = _step(step)
        if name not in _MOVING:
            continue
        if name != "Resize" or not keep or not integers(scale) or len(scale) != 2 or options:
            lines.append(
                f"the test pipeline has {short(step)}, which is not converted; --set "
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
    return options, tuple(lines)


def _step(step: Any) -> tuple[Any, Any, bool]:
    """The type of a step, its (long, short) sides, and whether it keeps the ratio."""
    if not isinstance(step, dict):
        return None, None, False
    if step.get("type") != "MultiScaleFlipAug":
        keeps = step.get("keep_ratio") is True and not list(misfits("", step, _RESIZE))
        return step.get("type"), step.get("scale"), keeps
    # Version 0: the sides stand around the steps, and Resize keeps the ratio by default.
    inner = step.get("transforms")
    inner = [s for s in inner if isinstance(s, dict)] if isinstance(inner, tuple) else []
    others = [s for s in inner if s.get("type") not in (*_IN_PLACE, "Resize", "RandomFlip")]
    resizes = [s for s in inner if s.get("type") == "Resize"]
    known = resizes and all(set(s) <= {"type", "keep_ratio"} for s in resizes)
    if others or not known or step.get("img_ratios") or step.get("flip"):
        return "MultiScaleFlipAug", None, False
    return "Resize", step.get("img_scale"), resizes[0].get("keep_ratio", True) is True


def _test_pipeline(config: dict[str, Any]) -> tuple[tuple[Any, ...] | None, Any]:
    """The steps of the test images, and the type of their data set; of version 1 or 0.

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


def _window(test: Any) -> Stated:
    """The sliding window, if the model is evaluated with one."""
    if not isinstance(test, dict) or test.get("mode") != "slide":
        return {}, ()
    crop, stride = test.get("crop_size"), test.get("stride")
    pairs = integers(crop) and integers(stride) and len(crop) == len(stride) == 2
    if not pairs or any(s > c for s, c in zip(stride, crop, strict=True)):
        return {}, (
            f"the sliding window of the config is not converted: crop_size {short(crop)}, stride "
            f"{short(stride)}; expected two pairs, and no stride above its side; --set "
            "eval.mode=slide, eval.crop_size and eval.overlap give one",
        )
    high, wide = (round(1 - s / c, 4) for s, c in zip(stride, crop, strict=True))
    options = {"eval.mode": "slide", "eval.crop_size": crop, "eval.overlap": max(high, wide)}
    # Strides are rounded to whole pixels.
    exact = (side * (1 - max(high, wide)) for side in crop)
    if all(abs(e - s) < 1 for e, s in zip(exact, stride, strict=True)):
        return options, ()
    return options, (
        f"the windows overlap by {high:g} of their height and {wide:g} of their width there; "
        f"eval.overlap is for both: the larger one, {max(high, wide):g}",
    )
