"""Any module that returns a list of feature maps, as a backbone: those of plugins."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from segtrain.config import ModelConfig
from segtrain.errors import ConfigError
from segtrain.models.blocks import FeatureChannels, Features, FeatureStrides
from segtrain.models.timm_backbone import refuse_random_layers, replace_norms
from segtrain.models.trial import refuse_by_trial
from segtrain.norm import NormFactory
from segtrain.text import MAX_NAME, printable

# Multiples of every stride, then no multiple of any.
_EVEN, _ODD = (256, 320), (65, 97)


class PlainBackbone(nn.Module):
    """`network` as the backbone that `model` names: images (N, 3, H, W) to `Features`.

    It returns three or more maps (N, C, h, w) in a list, tuple or dict, the first of stride 4, the
    last of `model.output_stride`; between these only the last counts. Channels and strides are
    found by images without content. Every batch norm is made by `norm`; other norms stay.

    Raises:
        ConfigError: its features are others, or it cannot be synchronized over ranks.
    """

    classifier_keys: tuple[str, ...] = ()
    stem_keys: tuple[str, ...] = ()

    def __init__(self, network: nn.Module, model: ModelConfig, *, norm: NormFactory) -> None:
        super().__init__()
        self.name = model.backbone
        if not isinstance(network, nn.Module):
            raise _wrong(self.name, f"expected a torch.nn.Module, found {type(network).__name__}")
        strides, channels, self._low, has_strides = _measured(network, model)
        self.channels = FeatureChannels(channels[self._low], *channels[-2:])
        self.strides = FeatureStrides(4, *strides[-2:]) if has_strides else None
        for path, layer in network.named_modules():
            if isinstance(layer, nn.BatchNorm2d) and not (
                layer.affine and layer.track_running_stats
            ):
                what = f"{path} is a batch norm without weights or without running statistics"
                raise _wrong(self.name, f"{what}, which segtrain's has")
        replace_norms(network, norm, self.name)
        refuse_random_layers(network, self.name)
        if norm is not nn.BatchNorm2d:  # the norm of inference: what is trained was tried
            refuse_by_trial(network, self.name, _maps)
        self.network = network

    @property
    def weights(self) -> nn.Module:
        """The part whose keys are those of the network's own files."""
        return self.network

    def forward(self, images: Tensor) -> Features:
        """Features of normalized images (N, 3, H, W)."""
        maps = _maps(self.network(images))
        return Features(maps[self._low], maps[-2], maps[-1])


def _measured(network: nn.Module, model: ModelConfig) -> tuple[list[int], list[int], int, bool]:
    """Strides and channels of the maps, which one is of stride 4, and whether sizes round up."""
    try:
        # A copy, so that the network stays as it is; the meta device computes shapes alone.
        shapes = copy.deepcopy(network).to("meta", torch.float32).eval()
        with torch.no_grad():
            even, odd = (
                [tuple(one.shape) for one in _maps(shapes(torch.empty(2, 3, *size, device="meta")))]
                for size in (_EVEN, _ODD)
            )
    except Exception as error:  # foreign code may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _wrong(
            model.backbone,
            f"cannot be tried on images of 256x320 and 65x97 ({printable(reason, 2 * MAX_NAME)}); "
            "take images of any size, or return segtrain.models.blocks.Features and have channels",
        ) from error
    strides = [_EVEN[0] // shape[2] if len(shape) == 4 and shape[2] else 0 for shape in even]
    fits = [
        shape[0] == 2 and (shape[2] * stride, shape[3] * stride) == _EVEN
        for shape, stride in zip(even, strides, strict=True)
        if stride
    ]
    if len(even) < 3 or len(fits) < len(even) or not all(fits) or 4 not in strides[:-2]:
        raise _wrong(
            model.backbone,
            f"returns maps of shapes {even} for images of 256x320; needed are three or more "
            "(N, C, h, w), one of stride 4 before the last two",
        )
    if strides[-1] != model.output_stride:
        what = f"its last map is of stride {strides[-1]}, and model.output_stride is"
        raise _wrong(model.backbone, f"{what} {model.output_stride}; the two must be equal")
    # Odd sizes show whether maps have ceil(size / stride) values; if not, they are stretched.
    rounds_up = all(
        shape[2:] == tuple(-(-side // stride) for side in _ODD)
        for shape, stride in zip(odd, strides, strict=True)
    )
    return strides, [shape[1] for shape in even], strides.index(4), rounds_up


def _maps(features: Any) -> list[Tensor]:
    return list(features.values() if isinstance(features, Mapping) else features)


def _wrong(name: str, what: str) -> ConfigError:
    return ConfigError(f"model.backbone: {name}: {what}")
