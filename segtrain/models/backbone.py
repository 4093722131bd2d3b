"""The backbones by name. Each maps images to `Features` and has their widths as `channels`."""

from collections.abc import Callable
from functools import partial

from torch import nn

from segtrain.config import ModelConfig
from segtrain.models.mobilenet import mobilenet_v2, mobilenet_v3_large
from segtrain.models.resnet import ResNet
from segtrain.norm import NormFactory

_RESNETS: dict[str, Callable[..., nn.Module]] = {
    name: partial(ResNet, name) for name in ("resnet18", "resnet34", "resnet50", "resnet101")
}
_MOBILENETS: dict[str, Callable[..., nn.Module]] = {
    "mobilenet_v2": mobilenet_v2,
    "mobilenet_v3_large": mobilenet_v3_large,
}


def build_backbone(model: ModelConfig, *, norm: NormFactory = nn.BatchNorm2d) -> nn.Module:
    """The backbone that `model` names, with random weights."""
    options = {
        "output_stride": model.output_stride,
        "contract_dilation": model.contract_dilation,
        "norm": norm,
    }
    if model.backbone in _MOBILENETS:
        return _MOBILENETS[model.backbone](**options)
    return _RESNETS[model.backbone](
        **options,
        stem=model.stem,
        multi_grid=model.multi_grid,
        recompute_norm=model.recompute_norm,
    )
