"""PSPNet of hszhao/semseg: ResNet with a stem of three convolutions, all blocks dilated."""

from collections.abc import Mapping
from typing import Any

from segtrain.desk.convert.conversion import (
    Conversion,
    Options,
    State,
    aux_options,
    deep_stem,
    resnet_name,
    size,
)

KEYS = {
    "head.ppm.convs.*": "ppm.features.*.1",
    "head.ppm.norms.*": "ppm.features.*.2",
    "head.conv.conv": "cls.0",
    "head.conv.norm": "cls.1",
    "head.classifier.conv": "cls.4",
    "aux_head.conv.conv": "aux.0",
    "aux_head.conv.norm": "aux.1",
    "aux_head.classifier.conv": "aux.4",
    **deep_stem("layer0"),
    "backbone": "",
}
# model/pspnet.py.
_ASSUMED = {"model.output_stride": 8, "model.align_corners": True, "model.ppm_bins": (1, 2, 3, 6)}
# How its tool/test.py evaluates.
_WINDOW = (
    "note        semseg evaluates with a sliding window of its training crop and a mirrored image: "
    "--set eval.mode=slide --set 'eval.crop_size=[N, N]' --set eval.flip=true, N and M being "
    "test_h and base_size of its config; it resizes images to a long side of M px before"
)


def plan(state: State, _beside: Mapping[str, Any]) -> Conversion:
    """The plan for a state dict with layer0. to layer4., ppm., cls. and, after training, aux."""
    found: Options = {
        "model.arch": "pspnet",
        "model.variant": "semseg",
        "model.backbone": resnet_name(state, ""),
        "model.stem": "64-64-128",
        "model.head_channels": size(state, "cls.0.weight"),
        **aux_options(state, "aux.0.weight", "aux.4.weight"),
    }
    num_classes = size(state, "cls.4.weight")
    return Conversion("semseg", num_classes, found, KEYS, assumed=_ASSUMED, notes=(_WINDOW,))
