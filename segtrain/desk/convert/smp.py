"""PSPNet, DeepLabV3 and DeepLabV3+ of segmentation_models.pytorch with torchvision's ResNets."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from segtrain.desk.convert.conversion import (
    Conversion,
    Keys,
    Options,
    Rotation,
    State,
    accepting,
    aspp,
    count_children,
    misfits,
    resnet_name,
    size,
)
from segtrain.desk.convert.read import CONFIG_JSON
from segtrain.errors import CheckpointError
from segtrain.models.resnet import stage_widths

_NAME = "segmentation_models.pytorch"
_CLASSES = {"pspnet": "PSPNet", "deeplabv3": "DeepLabV3", "deeplabv3plus": "DeepLabV3Plus"}
_RATES = (12, 24, 36)
COMMON_KEYS = {"head.classifier.conv": "segmentation_head.0", "backbone": "encoder"}
PSPNET_KEYS = {
    "head.ppm.convs.*": "decoder.psp.blocks.*.pool.1.0",
    "head.ppm.norms.*": "decoder.psp.blocks.*.pool.1.1",
    "head.conv.conv": "decoder.conv.0",
    "head.conv.norm": "decoder.conv.1",
}
PLUS_KEYS = {
    "head.aspp_conv.depthwise": "decoder.aspp.1.0",
    "head.aspp_conv.pointwise.conv": "decoder.aspp.1.1",
    "head.aspp_conv.pointwise.norm": "decoder.aspp.2",
    "head.low.conv": "decoder.block1.0",
    "head.low.norm": "decoder.block1.1",
    "head.decoder.0.depthwise": "decoder.block2.0.0",
    "head.decoder.0.pointwise.conv": "decoder.block2.0.1",
    "head.decoder.0.pointwise.norm": "decoder.block2.1",
}
# Parameters of the constructors of 0.3 to 0.6 that change no prediction, are read elsewhere, or are
# decided by the shapes.
_ANY = (
    "encoder_weights psp_dropout decoder_aspp_dropout aux_params decoder_atrous_rates "
    "decoder_use_norm psp_use_batchnorm classes in_channels encoder_depth psp_out_channels "
    "decoder_channels decoder_aspp_separable upsampling"
)
# Activations that give each pixel one class, as segtrain's softmax does.
_ACTIVATIONS = (None, "identity", "softmax", "softmax2d", "logsoftmax", "argmax", "argmax2d")
# What segtrain's batch norm is, by the parameters of torch's. The momentum acts in training only.
_NORM = accepting(
    "momentum", type=("batchnorm",), eps=(1e-5,), affine=(True,), track_running_stats=(True,)
)


def plan(state: State, beside: Mapping[str, Any]) -> Conversion:
    """The plan for a state dict with encoder., decoder. and segmentation_head.

    beside: the config.json that its save_pretrained writes says more.

    Raises:
        CheckpointError: an encoder or decoder that segtrain does not have, or the config is that of
            another model, or says what segtrain does not know.
    """
    if "decoder.psp.blocks.0.pool.1.0.weight" in state:
        made = _pspnet(state)
    elif "decoder.aspp.0.convs.0.0.weight" in state:
        made = _deeplabv3plus(state)
    else:
        made = _deeplabv3(state)
    config = beside.get(CONFIG_JSON)
    if not isinstance(config, dict) or config.get("_model_class") is None:
        return made
    return replace(made, stated=_stated(config, made.found))


def _stated(config: dict[str, Any], found: Options) -> Options:
    """The options in `config`, of which every key is known and agrees with `found`."""
    accepted = accepting(
        _ANY,
        _model_class=(_CLASSES[found["model.arch"]],),
        encoder_name=(found["model.backbone"],),
        encoder_output_stride=(8, 16),
        activation=_ACTIVATIONS,
    )
    # The constructor drops others with an underscore.
    given = {k: v for k, v in config.items() if k in accepted or not k.startswith("_")}
    problems = list(misfits(CONFIG_JSON, given, accepted))
    for key in ("decoder_use_norm", "psp_use_batchnorm"):
        norm = config.get(key, True)
        if not isinstance(norm, dict):
            norm = {"type": "batchnorm" if norm is True else str(norm).lower()}
        problems += misfits(f"{CONFIG_JSON}.{key}", norm, _NORM)
    if problems:
        what = f"{CONFIG_JSON} beside the file describes another model than segtrain would build"
        repair = "remove there what changes no prediction, or move it away:"
        raise CheckpointError("\n  ".join([f"{what}; {repair}", *problems]))
    options: Options = {}
    if "encoder_output_stride" in config:
        # The stride of the last stage that is kept: a shallower encoder does not reach the
        # config's.
        smallest = 2 ** (found["model.num_stages"] + 1)
        options["model.output_stride"] = min(config["encoder_output_stride"], smallest)
    if "decoder_atrous_rates" in config:
        rates = config["decoder_atrous_rates"]
        options["model.aspp_rates"] = tuple(rates) if isinstance(rates, list) else rates
    return options


def _plan(
    state: State, found: Options, keys: Keys, *, reads: str, assumed: Options, **more: Any
) -> Conversion:
    """reads: the convolution whose input tells which stage the head reads (encoder_depth)."""
    backbone, channels = resnet_name(state, "encoder."), size(state, reads, 1)
    widths = stage_widths(backbone)
    # Where no stage fits, the shapes do not either.
    stages = widths.index(channels) + 1 if channels in widths else 4
    left_out = {f"encoder.layer{i}.": f"the head reads layer{stages}" for i in range(stages + 1, 5)}
    common = {
        "model.variant": "smp",
        "model.backbone": backbone,
        "model.num_stages": stages,
        "model.aux_head": False,
    }
    stride = min(assumed.get("model.output_stride", 32), 2 ** (stages + 1))
    return Conversion(
        _NAME,
        size(state, "segmentation_head.0.weight"),
        {**common, **found},
        {**keys, **COMMON_KEYS},
        left_out={**left_out, "classification_head.": "it classifies whole images"},
        # Every resize is aligned.
        assumed={**assumed, "model.output_stride": stride, "model.align_corners": True},
        **more,
    )


def _pspnet(state: State) -> Conversion:
    first, join = "decoder.psp.blocks.0.pool.1.0.weight", "decoder.conv.0.weight"
    pooled = count_children(state, "decoder.psp.blocks.") * size(state, first)
    return _plan(
        state,
        {"model.arch": "pspnet", "model.head_channels": size(state, join)},
        PSPNET_KEYS,
        reads=first,
        assumed={"model.ppm_bins": (1, 2, 3, 6)},
        # It concatenates [p1, p2, p3, p6, x].
        rotations={"head.conv.conv.weight": Rotation(1, pooled)},
    )


def _deeplabv3(state: State) -> Conversion:
    # Older versions number the parts of the decoder, later ones name them.
    old = "decoder.0.convs.0.0.weight" in state
    where, conv, norm = ("0", "1", "2") if old else ("aspp", "conv", "bn")
    where = f"decoder.{where}"
    width = size(state, f"{where}.project.0.weight")
    return _plan(
        state,
        {"model.arch": "deeplabv3", "model.head_channels": width},
        {
            **aspp(state, where),
            "head.conv.conv": f"decoder.{conv}",
            "head.conv.norm": f"decoder.{norm}",
        },
        reads=f"{where}.convs.0.0.weight",
        assumed={"model.output_stride": 8, "model.aspp_rates": _RATES},
    )


def _deeplabv3plus(state: State) -> Conversion:
    where = "decoder.aspp.0"
    width = size(state, f"{where}.project.0.weight")
    found: Options = {
        "model.arch": "deeplabv3plus",
        "model.head_channels": width,
        "model.separable": True,
        "model.low_level_channels": size(state, "decoder.block1.0.weight"),
    }
    return _plan(
        state,
        found,
        {**aspp(state, where, separable=("0", "1")), **PLUS_KEYS},
        reads=f"{where}.convs.0.0.weight",
        assumed={"model.output_stride": 16, "model.aspp_rates": _RATES},
        # It concatenates [ASPP, low-level].
        rotations={
            "head.decoder.0.depthwise.": Rotation(0, width),
            "head.decoder.0.pointwise.conv.": Rotation(1, width),
        },
    )
