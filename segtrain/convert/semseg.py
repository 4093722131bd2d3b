"""PSPNet of hszhao/semseg: ResNet with a stem of three convolutions, all blocks dilated."""

from segtrain.convert.layout import (
    Options,
    Plan,
    State,
    aux_head,
    conv_norm,
    count_children,
    deep_stem,
    resnet_name,
    size,
)

# model/pspnet.py.
_ASSUMED = {
    "model.output_stride": 8,
    "model.align_corners": True,
    "model.ppm_bins": (1, 2, 3, 6),
}
# The crop and the long side of test images by the number of classes: Cityscapes, VOC, ADE20K.
_TESTS = {19: ("713", "2048 px"), 21: ("473", "512 px"), 150: ("473", "512 px")}


def plan(state: State) -> Plan:
    """The plan for a state dict with layer0. to layer4., ppm., cls. and, after training, aux."""
    found: Options = {
        "model.arch": "pspnet",
        "model.variant": "semseg",
        "model.backbone": resnet_name(state, ""),
        "model.stem": "64-64-128",
        "model.head_channels": size(state, "cls.0.weight"),
    }
    aux, aux_renames = aux_head(state, "aux.0.", "aux.1.", "aux.4.")
    found |= aux
    levels = count_children(state, "ppm.features.")
    pyramid = tuple(
        (f"head.ppm.{kind}.{i}.", f"ppm.features.{i}.{place}.")
        for i in range(levels)
        for kind, place in (("convs", 1), ("norms", 2))
    )
    renames = (
        *pyramid,
        *conv_norm("head.conv", "cls.0.", "cls.1."),
        ("head.classifier.conv.", "cls.4."),
        *aux_renames,
        *deep_stem("layer0."),
        ("backbone.", ""),
    )
    return Plan(
        "semseg",
        size(state, "cls.4.weight"),
        found,
        renames,
        assumed=_ASSUMED,
        notes=_notes(size(state, "cls.4.weight")),
    )


def _notes(num_classes: int) -> tuple[str, ...]:
    """How its tool/test.py evaluates, by test_h and base_size of config/*/*_pspnet*.yaml."""
    crop, long_side = _TESTS.get(num_classes, ("N", "base_size"))
    unknown = ", N being test_h of its config" if crop == "N" else ""
    window = (
        "semseg evaluates with a sliding window of its training crop and a mirrored image: --set "
        f"eval.mode=slide --set 'eval.crop_size=[{crop}, {crop}]' --set eval.flip=true{unknown}"
    )
    if long_side == "2048 px":  # as the images of Cityscapes are stored
        return (window,)
    resize = (
        f"semseg resizes test images to a long side of {long_side}, for which segtrain has no "
        "option: resize the images before"
    )
    return (window, resize)
