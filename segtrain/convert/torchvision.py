"""torchvision's DeepLabV3 with ResNet-50, ResNet-101 and MobileNetV3-Large (0.13 and later)."""

from segtrain.convert.layout import (
    Options,
    Plan,
    State,
    aspp,
    aux_head,
    conv_norm,
    count_children,
    resnet_name,
    size,
)

# models/segmentation/deeplabv3.py. Both backbones have the rates of stride 8.
_RESNET = {"model.output_stride": 8}
_MOBILENET = {
    "model.output_stride": 16,
    "model.aspp_rates": (12, 24, 36),
}
_ALWAYS = {
    "model.align_corners": False,
    # What the transforms of its weights do, as its reference evaluation.
    "data.short_side_px": 520,
}


def plan(state: State) -> Plan:
    """The plan for a state dict whose keys begin with backbone., classifier. and aux_classifier."""
    found: Options = {
        "model.arch": "deeplabv3",
        "model.variant": "torchvision",
        "model.head_channels": size(state, "classifier.1.weight"),
    }
    aux, aux_renames = aux_head(
        state, "aux_classifier.0.", "aux_classifier.1.", "aux_classifier.4."
    )
    found |= aux
    if "backbone.0.0.weight" in state:
        found["model.backbone"] = "mobilenet_v3_large"
        assumed, backbone = _MOBILENET, ("backbone.features.", "backbone.")
    else:
        found["model.backbone"] = resnet_name(state, "backbone.")
        assumed, backbone = _RESNET, ("backbone.", "backbone.")
    renames = (
        *aspp("classifier.0.", count_children(state, "classifier.0.convs.")),
        *conv_norm("head.conv", "classifier.1.", "classifier.2."),
        ("head.classifier.conv.", "classifier.4."),
        *aux_renames,
        backbone,
    )
    return Plan(
        "torchvision",
        size(state, "classifier.4.weight"),
        found,
        renames,
        assumed={**assumed, **_ALWAYS},
        notes=(
            "torchvision's dropout is 0.5 after the ASPP; here it is model.dropout at the end",
            "torchvision's transforms antialias where they shrink an image to 520 px, and "
            "data.short_side_px does not: the predictions of larger images differ a little",
        ),
    )
