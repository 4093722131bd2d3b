"""PSPNet, DeepLabV3 and DeepLabV3+ of mmsegmentation with ResNet, ResNetV1c and ResNetV1d.

A ConvModule there is a convolution `conv` and a norm `bn`.
"""

from collections.abc import Mapping
from typing import Any

from segtrain.convert import mmseg_config
from segtrain.convert.layout import (
    Options,
    Plan,
    Renames,
    Rotation,
    State,
    conv_norm,
    count_children,
    deep_stem,
    resnet_name,
    size,
)
from segtrain.errors import CheckpointError

# The published models of configs/_base_/models/*_r50-d8.py. Without a config in the file nothing
# tells them from those of stride 16 (d16) or 32.
_ASSUMED: Options = {
    "model.output_stride": 8,
    "model.align_corners": False,
}

# Beginnings of keys that PSPNet and DeepLab with ResNets do not have, and where they come from.
_OTHERS = {
    "backbone.layer1.0.conv.": ("backbone", "MobileNetV2"),
    "backbone.layer1.depthwise_conv.": ("backbone", "MobileNetV3"),
    "backbone.encoder.": ("backbone", "UNet"),
    "backbone.stage2.": ("backbone", "HRNet"),
    "backbone.layers.0.0.projection.": ("backbone", "MixVisionTransformer"),
    "decode_head.pam.": ("decode_head", "DAHead"),
    "decode_head.1.object_context_block.": ("decode_head", "OCRHead"),
    "decode_head.0.": ("decode_head", "several heads"),
    "decode_head.lateral_convs.": ("decode_head", "UPerHead"),
    "decode_head.fusion_conv.": ("decode_head", "SegformerHead"),
    "decode_head.convs.0.": ("decode_head", "FCNHead"),
}
_REASONS = {
    "MobileNetV2": "of its backbones only ResNets are read, though segtrain has a MobileNetV2",
    "MobileNetV3": "of its backbones only ResNets are read, though segtrain has a MobileNetV3",
    "UNet": "segtrain has no decoder that goes back to the full size",
    "MixVisionTransformer": "SegFormer is a transformer; segtrain has convolutional backbones",
    "DAHead": "DANet has attention, which segtrain does not have",
    "OCRHead": "OCRNet has a head that refines another one, which segtrain does not have",
    "FCNHead": "segtrain has this head as the auxiliary one only",
}


def plan(state: State, beside: Mapping[str, Any]) -> Plan:
    """The plan for a state dict with backbone., decode_head. and auxiliary_head.

    beside: what the file stores beside its weights; the config and the classes under "meta" are
        read.

    Raises:
        CheckpointError: another head or backbone, or the config contradicts the keys.
    """
    meta = beside.get("meta")
    meta = meta if isinstance(meta, Mapping) else {}
    _refuse_others(state, meta)
    backbone, stem = _backbone(state)
    arch, head, rotations = _head(state)
    assumed = dict(_ASSUMED)
    if arch["model.arch"] == "pspnet":
        assumed["model.ppm_bins"] = (1, 2, 3, 6)
    aux, aux_renames = _aux(state)
    found = {**backbone, **arch, **aux}
    stated = mmseg_config.stated(meta, found)
    names, palette = mmseg_config.classes(meta)
    return Plan(
        "mmsegmentation",
        size(state, "decode_head.conv_seg.weight"),
        found,
        (
            *head,
            ("head.classifier.conv.", "decode_head.conv_seg."),
            *aux_renames,
            *stem,
            ("backbone.", "backbone."),
        ),
        stated=stated.options,
        assumed=assumed,
        rotations=rotations,
        class_names=names,
        palette=palette,
        notes=stated.notes,
        warnings=stated.warnings,
        drops_zero=stated.drops_zero,
    )


def _refuse_others(state: State, meta: Mapping[str, Any]) -> None:
    """Names a backbone or heads that segtrain does not have, by the config or by the keys."""
    found = mmseg_config.foreign(meta)
    places = {place for place, _ in found}
    by_keys = {
        place: kind
        for start, (place, kind) in reversed(_OTHERS.items())
        if place not in places and any(key.startswith(start) for key in state)
    }
    lines = [
        f"  {place} {kind}: {_REASONS.get(kind, 'segtrain does not have it')}"
        for place, kind in sorted({*found, *by_keys.items()})
    ]
    if lines:
        raise CheckpointError(
            "a model of mmsegmentation that is not converted; expected PSPHead, ASPPHead or "
            "DepthwiseSeparableASPPHead on ResNet, ResNetV1c or ResNetV1d, found\n"
            + "\n".join(lines)
        )


def _backbone(state: State) -> tuple[Options, Renames]:
    name = resnet_name(state, "backbone.")
    found: Options = {"model.backbone": name, "model.variant": "mmseg"}
    stem: Renames = ()
    if "backbone.stem.0.weight" in state:
        found["model.stem"] = "32-32-64"
        stem = deep_stem("backbone.stem.")
    # In ResNetV1d 0 is the pooling, which has no weights.
    if "backbone.layer2.0.downsample.2.weight" in state:
        found["model.stem"] = "32-32-64-avgpool"
    return found, stem


def _module(ours: str, theirs: str) -> Renames:
    return conv_norm(ours, f"{theirs}.conv.", f"{theirs}.bn.")


def _head(state: State) -> tuple[Options, Renames, dict[str, Rotation]]:
    head = "decode_head"
    join = _module("head.conv", f"{head}.bottleneck")
    width = size(state, f"{head}.bottleneck.conv.weight")
    found: Options = {"model.head_channels": width}
    if f"{head}.psp_modules.0.1.conv.weight" in state:
        levels = count_children(state, f"{head}.psp_modules.")
        pyramid = tuple(
            (f"head.ppm.{ours}.{i}.", f"{head}.psp_modules.{i}.1.{theirs}.")
            for i in range(levels)
            for ours, theirs in (("convs", "conv"), ("norms", "bn"))
        )
        first = f"{head}.psp_modules.0.1.conv.weight"
        branch, features = size(state, first), size(state, first, 1)
        if branch != features // levels:
            found["model.ppm_channels"] = branch
        return found | {"model.arch": "pspnet"}, (*pyramid, *join), {}
    if f"{head}.aspp_modules.0.conv.weight" not in state:
        raise CheckpointError(
            "mmsegmentation with another decode_head than PSPHead, ASPPHead and "
            "DepthwiseSeparableASPPHead: segtrain does not have it"
        )
    branches, separable = _aspp(state)
    # It concatenates [global mean, 1x1, dilated]; the mean comes last here.
    rotate = Rotation(1, width)
    if f"{head}.sep_bottleneck.0.depthwise_conv.conv.weight" not in state:
        found |= {"model.arch": "deeplabv3", "model.separable": separable}
        return found, (*branches, *join), {"head.conv.conv.weight": rotate}
    if not separable:
        raise CheckpointError("mmsegmentation's sep_bottleneck without a separable ASPP")
    found |= {
        "model.arch": "deeplabv3plus",
        "model.separable": True,
        "model.low_level_channels": size(state, f"{head}.c1_bottleneck.conv.weight"),
    }
    decoder = tuple(
        pair
        for i in range(2)
        for part in ("depthwise", "pointwise")
        for pair in _module(f"head.decoder.{i}.{part}", f"{head}.sep_bottleneck.{i}.{part}_conv")
    )
    low = _module("head.low", f"{head}.c1_bottleneck")
    project = _module("head.aspp.project", f"{head}.bottleneck")
    rotations = {
        "head.aspp.project.conv.weight": rotate,
        # And [ASPP, low-level]: every channel of the depthwise convolution moves with its norm.
        "head.decoder.0.depthwise.": Rotation(0, width),
        "head.decoder.0.pointwise.conv.weight": Rotation(1, width),
    }
    return found, (*branches, *project, *low, *decoder), rotations


def _aspp(state: State) -> tuple[Renames, bool]:
    """The branches, and whether the dilated ones are separable."""
    theirs = "decode_head.aspp_modules"
    local = count_children(state, f"{theirs}.")
    separable = f"{theirs}.1.depthwise_conv.conv.weight" in state
    renames: list[tuple[str, str]] = []
    for i in range(local):
        module = f"{theirs}.{i}."
        if separable and i > 0:
            renames.append((f"head.aspp.depthwise.{i - 1}.", f"{module}depthwise_conv.conv."))
            renames.append((f"head.aspp.depthwise_norms.{i - 1}.", f"{module}depthwise_conv.bn."))
            module += "pointwise_conv."
        renames.append((f"head.aspp.convs.{i}.", f"{module}conv."))
        renames.append((f"head.aspp.norms.{i}.", f"{module}bn."))
    renames.append((f"head.aspp.convs.{local}.", "decode_head.image_pool.1.conv."))
    renames.append((f"head.aspp.norms.{local}.", "decode_head.image_pool.1.bn."))
    return tuple(renames), separable


def _aux(state: State) -> tuple[Options, Renames]:
    head = "auxiliary_head"
    if f"{head}.conv_seg.weight" not in state:
        return {"model.aux_head": False}, ()
    found = {
        "model.aux_head": True,
        "model.aux_channels": size(state, f"{head}.convs.0.conv.weight"),
    }
    conv = _module("aux_head.conv", f"{head}.convs.0")
    return found, (*conv, ("aux_head.classifier.conv.", f"{head}.conv_seg."))
