"""What a config of mmsegmentation does with test images: normalization, resize, sliding window.

Takes the parsed config of mmseg_config.py; what segtrain cannot do becomes a warning.
"""

from collections.abc import Iterator
from typing import Any

from segtrain.convert.plan import Options
from segtrain.errors import CheckpointError
from segtrain.text import MAX_NAME, printable

Stated = tuple[Options, tuple[str, ...]]
"""Options, and warnings about what none of them says."""

# Steps of a test pipeline that leave the pixels where they are.
_HARMLESS = (
    *("LoadImageFromFile", "LoadImageFromNDArray", "LoadAnnotations", "PackSegInputs"),
    *("Normalize", "ImageToTensor", "Collect", "DefaultFormatBundle"),
)
# Data sets whose reduce_zero_label is true by default.
_ZERO_IS_IGNORED = frozenset(
    ("ADE20KDataset", "PascalContextDataset59", "PotsdamDataset", "ISPRSDataset", "LoveDADataset")
)
_CITYSCAPES = "CityscapesDataset", (1024, 2048)
# Longer images than this many short sides are rare enough for the README alone.
_USUAL_ASPECT = 4


def input_options(config: dict[str, Any]) -> Stated:
    """The options of `data` and `eval` that the config decides, of version 1 or 0.

    Raises:
        CheckpointError: the images are BGR.
    """
    parts = _normalization(config), _resize(config), _window(config["model"])
    options = {key: value for part, _ in parts for key, value in part.items()}
    return options, tuple(line for _, lines in parts for line in lines)


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


def _normalization(config: dict[str, Any]) -> Stated:
    model = config["model"]
    for place, rgb in (
        (model.get("data_preprocessor"), "bgr_to_rgb"),
        (config.get("data_preprocessor"), "bgr_to_rgb"),
        (config.get("img_norm_cfg"), "to_rgb"),
    ):
        if not isinstance(place, dict) or not {"mean", "std"} <= place.keys():
            continue
        if not place.get(rgb, False):
            raise CheckpointError(
                "the config in the file does not fit:\n  the model takes BGR images (no "
                f"{rgb}); segtrain's take RGB"
            )
        pair = [place["mean"], place["std"]]
        if all(isinstance(v, tuple) and len(v) == 3 for v in pair):
            return {f"data.{k}": v for k, v in zip(("mean", "std"), pair, strict=True)}, ()
    return {}, ("no mean and std of three numbers in the config: those of ImageNet are assumed",)


def _resize(config: dict[str, Any]) -> Stated:
    """data.short_side_px for a Resize that keeps the ratio.

    mmcv.imrescale multiplies by min(long / max(h, w), short / min(h, w)).
    """
    pipeline, kind = _test_pipeline(config)
    if pipeline is None:
        return {}, ("the config names no test pipeline: images keep their size",)
    options: Options = {}
    lines: list[str] = []
    for step in pipeline:
        name, scale, keep = _step(step)
        if name in _HARMLESS:
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
        return step.get("type"), step.get("scale"), step.get("keep_ratio") is True
    # Version 0: the sides stand around the steps, and Resize keeps the ratio by default.
    inner = step.get("transforms")
    inner = [s for s in inner if isinstance(s, dict)] if isinstance(inner, tuple) else []
    others = {s.get("type") for s in inner} - {*_HARMLESS, "Resize", "RandomFlip"}
    resizes = [s for s in inner if s.get("type") == "Resize"]
    known = resizes and all(set(s) <= {"type", "keep_ratio"} for s in resizes)
    if others or not known or step.get("img_ratios") or step.get("flip"):
        return "MultiScaleFlipAug", None, False
    return "Resize", step.get("img_scale"), resizes[0].get("keep_ratio", True) is True


def _test_pipeline(config: dict[str, Any]) -> tuple[tuple[Any, ...] | None, Any]:
    """The steps of the test images, and the type of their data set; of version 1 or 0."""
    loader, data = config.get("test_dataloader"), config.get("data")
    for place in (
        loader.get("dataset") if isinstance(loader, dict) else None,
        data.get("test") if isinstance(data, dict) else None,
        {"pipeline": config.get("test_pipeline"), "type": config.get("dataset_type")},
    ):
        if isinstance(place, dict) and isinstance(place.get("pipeline"), tuple):
            return place["pipeline"], place.get("type")
    return None, None


def _window(model: dict[str, Any]) -> Stated:
    """The sliding window, if the model is evaluated with one."""
    test = model.get("test_cfg")
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
