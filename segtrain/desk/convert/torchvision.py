"""torchvision's DeepLabV3 with ResNet-50, ResNet-101 and MobileNetV3-Large (0.13 and later)."""

from collections.abc import Mapping
from typing import Any

from segtrain.desk.convert.conversion import (
    Conversion,
    Options,
    State,
    aspp,
    aux_options,
    resnet_name,
    size,
)

KEYS = {
    "head.conv.conv": "classifier.1",
    "head.conv.norm": "classifier.2",
    "head.classifier.conv": "classifier.4",
    "aux_head.conv.conv": "aux_classifier.0",
    "aux_head.conv.norm": "aux_classifier.1",
    "aux_head.classifier.conv": "aux_classifier.4",
    "backbone.features": "backbone",
    "backbone": "backbone",
}
# models/segmentation/deeplabv3.py: both backbones have the rates of stride 8. The short side is
# that of the transforms of its weights, as in its reference evaluation.
_RESNET = {"model.output_stride": 8, "model.align_corners": False, "data.short_side_px": 520}
_MOBILENET = {**_RESNET, "model.output_stride": 16, "model.aspp_rates": (12, 24, 36)}


def plan(state: State, _beside: Mapping[str, Any]) -> Conversion:
    """The plan for a state dict whose keys begin with backbone., classifier. and aux_classifier."""
    mobilenet = "backbone.0.0.weight" in state
    found: Options = {
        "model.arch": "deeplabv3",
        "model.variant": "torchvision",
        "model.backbone": "mobilenet_v3_large" if mobilenet else resnet_name(state, "backbone."),
        "model.head_channels": size(state, "classifier.1.weight"),
        **aux_options(state, "aux_classifier.0.weight", "aux_classifier.4.weight"),
    }
    return Conversion(
        "torchvision",
        size(state, "classifier.4.weight"),
        found,
        {**aspp(state, "classifier.0"), **KEYS},
        assumed=_MOBILENET if mobilenet else _RESNET,
        notes=(
            "note        torchvision's transforms round an image resized to 520 px to whole grey "
            "levels, and antialias where they shrink it; data.short_side_px does neither: the "
            "predictions of images of other sizes differ a little",
        ),
    )
