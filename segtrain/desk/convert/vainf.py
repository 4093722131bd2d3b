"""DeepLabV3 and DeepLabV3+ of VainF/DeepLabV3Plus-Pytorch with ResNet-50 and ResNet-101."""

from collections.abc import Mapping
from typing import Any

from segtrain.desk.convert.conversion import Conversion, Options, State, aspp, resnet_name, size

V3_KEYS = {
    "head.conv.depthwise": "classifier.classifier.1.body.0",
    "head.conv.pointwise.conv": "classifier.classifier.1.body.1",
    "head.conv.pointwise.norm": "classifier.classifier.2",
    "head.conv.conv": "classifier.classifier.1",
    "head.conv.norm": "classifier.classifier.2",
    "head.classifier.conv": "classifier.classifier.4",
    "backbone": "backbone",
}
PLUS_KEYS = {
    "head.low.conv": "classifier.project.0",
    "head.low.norm": "classifier.project.1",
    "head.decoder.0.depthwise": "classifier.classifier.0.body.0",
    "head.decoder.0.pointwise.conv": "classifier.classifier.0.body.1",
    "head.decoder.0.pointwise.norm": "classifier.classifier.1",
    "head.decoder.0.conv": "classifier.classifier.0",
    "head.decoder.0.norm": "classifier.classifier.1",
    "head.classifier.conv": "classifier.classifier.3",
    "backbone": "backbone",
}
# network/modeling.py and main.py, where 16 is the default. The rates of the ASPP follow the stride,
# as ours do.
_ASSUMED = {"model.output_stride": 16, "model.align_corners": False}


def plan(state: State, _beside: Mapping[str, Any]) -> Conversion:
    """The plan for a state dict with backbone. and classifier.classifier."""
    plus = "classifier.aspp.project.0.weight" in state
    where = "classifier.aspp" if plus else "classifier.classifier.0"
    separable = any(".body.0." in key for key in state)
    found: Options = {
        "model.arch": "deeplabv3plus" if plus else "deeplabv3",
        "model.variant": "vainf",
        "model.backbone": resnet_name(state, "backbone."),
        "model.head_channels": size(state, f"{where}.project.0.weight"),
        "model.aux_head": False,
        "model.separable": separable,
    }
    if plus:
        found["model.low_level_channels"] = size(state, "classifier.project.0.weight")
    keys = PLUS_KEYS if plus else V3_KEYS
    branches = aspp(state, where, separable=("body.0", "body.1") if separable else None)
    num_classes = size(state, f"{keys['head.classifier.conv']}.weight")
    return Conversion("VainF", num_classes, found, {**branches, **keys}, assumed=_ASSUMED)
