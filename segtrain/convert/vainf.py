"""DeepLabV3 and DeepLabV3+ of VainF/DeepLabV3Plus-Pytorch with ResNet-50 and ResNet-101."""

from segtrain.convert.layout import (
    Options,
    Plan,
    State,
    aspp,
    conv_norm,
    count_children,
    resnet_name,
    size,
)
from segtrain.errors import CheckpointError

# network/modeling.py and main.py, where 16 is the default. The rates of the ASPP follow the stride,
# as ours do.
_ASSUMED = {
    "model.output_stride": 16,
    "model.align_corners": False,
}


def plan(state: State) -> Plan:
    """The plan for a state dict with backbone. and classifier.classifier.

    Raises:
        CheckpointError: a backbone that segtrain does not have.
    """
    if any(key.startswith("backbone.high_level_features.") for key in state):
        raise CheckpointError(
            "VainF's MobileNetV2 pads the input of every block before its first 1x1 convolution, "
            "and segtrain's after it as torchvision's does: no option makes these equal; the "
            "ResNets are read"
        )
    plus = "classifier.aspp.project.0.weight" in state
    where = "classifier.aspp." if plus else "classifier.classifier.0."
    separable = any(".body.0." in key for key in state)
    found: Options = {
        "model.arch": "deeplabv3plus" if plus else "deeplabv3",
        "model.variant": "vainf",
        "model.backbone": resnet_name(state, "backbone."),
        "model.head_channels": size(state, f"{where}project.0.weight"),
        "model.aux_head": False,
        "model.separable": separable,
    }
    branches = count_children(state, f"{where}convs.")
    names = ("body.0.", "body.1.") if separable else None
    conv = "head.decoder.0" if plus else "head.conv"
    first = "classifier.classifier.0." if plus else "classifier.classifier.1."
    norm, classifier = ("1.", "3.") if plus else ("2.", "4.")
    if plus:
        found["model.low_level_channels"] = size(state, "classifier.project.0.weight")
    joined = (
        *((f"{conv}.depthwise.", f"{first}body.0."),),
        *conv_norm(f"{conv}.pointwise", f"{first}body.1.", f"classifier.classifier.{norm}"),
        *conv_norm(conv, first, f"classifier.classifier.{norm}"),
    )
    renames = (
        *aspp(where, branches, separable=names),
        *joined,
        *conv_norm("head.low", "classifier.project.0.", "classifier.project.1."),
        ("head.classifier.conv.", f"classifier.classifier.{classifier}"),
        ("backbone.", "backbone."),
    )
    num_classes = size(state, f"classifier.classifier.{classifier}weight")
    return Plan("VainF", num_classes, found, renames, assumed=_ASSUMED)
