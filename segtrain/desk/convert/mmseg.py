"""PSPNet, DeepLabV3 and DeepLabV3+ of mmsegmentation with ResNet, ResNetV1c and ResNetV1d.

A ConvModule there is a convolution `conv` and a norm `bn`.
"""

from collections.abc import Mapping
from typing import Any

from segtrain.desk.convert import mmseg_config
from segtrain.desk.convert.conversion import (
    Conversion,
    Keys,
    Options,
    Rotation,
    State,
    aux_options,
    count_children,
    deep_stem,
    resnet_name,
    size,
)


def _modules(keys: Keys) -> Keys:
    """The convolution and the norm of each ConvModule."""
    parts = (("conv", "conv"), ("norm", "bn"))
    return {f"{a}.{x}": f"{b}.{y}" for a, b in keys.items() for x, y in parts}


KEYS = {
    "head.ppm.convs.*": "decode_head.psp_modules.*.1.conv",
    "head.ppm.norms.*": "decode_head.psp_modules.*.1.bn",
    "head.aspp.depthwise.*": "decode_head.aspp_modules.+.depthwise_conv.conv",
    "head.aspp.depthwise_norms.*": "decode_head.aspp_modules.+.depthwise_conv.bn",
    "head.aspp.convs.0": "decode_head.aspp_modules.0.conv",
    "head.aspp.norms.0": "decode_head.aspp_modules.0.bn",
    **_modules(
        {
            "head.aspp.project": "decode_head.bottleneck",
            "head.conv": "decode_head.bottleneck",
            "head.low": "decode_head.c1_bottleneck",
            "head.decoder.*.depthwise": "decode_head.sep_bottleneck.*.depthwise_conv",
            "head.decoder.*.pointwise": "decode_head.sep_bottleneck.*.pointwise_conv",
            "aux_head.conv": "auxiliary_head.convs.0",
        }
    ),
    "head.classifier.conv": "decode_head.conv_seg",
    "aux_head.classifier.conv": "auxiliary_head.conv_seg",
}
# The published models of configs/_base_/models/*_r50-d8.py. Without a config in the file nothing
# tells them from those of stride 16 (d16) or 32.
_ASSUMED: Options = {"model.output_stride": 8, "model.align_corners": False}
_PYRAMID: Options = {**_ASSUMED, "model.ppm_bins": (1, 2, 3, 6)}
_PYRAMID_KEY = "decode_head.psp_modules.0.1.conv.weight"


def plan(state: State, beside: Mapping[str, Any]) -> Conversion:
    """The plan for a state dict with backbone., decode_head. and auxiliary_head.

    beside: what the file stores beside its weights; the config and the classes under "meta" are
        read.

    Raises:
        CheckpointError: another head or backbone, or the config contradicts the keys.
    """
    meta = beside.get("meta")
    meta = meta if isinstance(meta, Mapping) else {}
    head, keys, rotations = _head(state)
    conv, classifier = "auxiliary_head.convs.0.conv.weight", "auxiliary_head.conv_seg.weight"
    found = {**_backbone(state), **head, **aux_options(state, conv, classifier)}
    stem = deep_stem("backbone.stem") if "model.stem" in found else {}
    return Conversion(
        "mmsegmentation",
        size(state, "decode_head.conv_seg.weight"),
        found,
        {**keys, **stem, "backbone": "backbone"},
        assumed=_PYRAMID if found["model.arch"] == "pspnet" else _ASSUMED,
        rotations=rotations,
        class_names=mmseg_config.class_names(meta),
        **mmseg_config.stated(meta, found),
    )


def _backbone(state: State) -> Options:
    options = {"model.variant": "mmseg", "model.backbone": resnet_name(state, "backbone.")}
    # In ResNetV1d 0 is the pooling, which has no weights.
    pooled = "backbone.layer2.0.downsample.2.weight" in state
    if pooled or "backbone.stem.0.weight" in state:
        options["model.stem"] = "32-32-64-avgpool" if pooled else "32-32-64"
    return options


def _head(state: State) -> tuple[Options, Keys, dict[str, Rotation]]:
    theirs = "decode_head.aspp_modules"
    width = size(state, "decode_head.bottleneck.conv.weight")
    options: Options = {"model.head_channels": width}
    if _PYRAMID_KEY in state:
        levels = count_children(state, "decode_head.psp_modules.")
        branch, features = size(state, _PYRAMID_KEY), size(state, _PYRAMID_KEY, 1)
        # This is the default width of a branch, so that the option stays unset.
        if branch != features // levels:
            options["model.ppm_channels"] = branch
        return options | {"model.arch": "pspnet"}, KEYS, {}
    separable = f"{theirs}.1.depthwise_conv.conv.weight" in state
    last, dilated = count_children(state, f"{theirs}."), ".pointwise_conv" if separable else ""
    keys = {
        **KEYS,
        f"head.aspp.convs.{last}": "decode_head.image_pool.1.conv",
        f"head.aspp.norms.{last}": "decode_head.image_pool.1.bn",
        "head.aspp.convs.*": f"{theirs}.*{dilated}.conv",
        "head.aspp.norms.*": f"{theirs}.*{dilated}.bn",
    }
    # It concatenates [global mean, 1x1, dilated]; the mean comes last here.
    rotate = Rotation(1, width)
    options["model.separable"] = separable
    if "decode_head.sep_bottleneck.0.depthwise_conv.conv.weight" not in state:
        return options | {"model.arch": "deeplabv3"}, keys, {"head.conv.conv.weight": rotate}
    low = size(state, "decode_head.c1_bottleneck.conv.weight")
    options |= {"model.arch": "deeplabv3plus", "model.low_level_channels": low}
    rotations = {
        "head.aspp.project.conv.weight": rotate,
        # And [ASPP, low-level]: every channel of the depthwise convolution moves with its norm.
        "head.decoder.0.depthwise.": Rotation(0, width),
        "head.decoder.0.pointwise.conv.weight": Rotation(1, width),
    }
    return options, keys, rotations
