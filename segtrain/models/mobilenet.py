"""MobileNetV2 and MobileNetV3-Large with torchvision's state-dict keys, dilated."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from segtrain.config import ModelConfig
from segtrain.models.blocks import FeatureChannels, Features, StagePlan, conv2d, plan_stages
from segtrain.norm import NormFactory

# V3's pretrained weights belong to this eps (torchvision, mobilenetv3.py): under 1e-5, channels of
# tiny variance come out several times too large.
_V3_EPS = 1e-3


class MobileNet(nn.Module):
    """The convolutional part of a MobileNet: images to `Features`.

    Args:
        low, aux: positions in `layers` of the last layer of stride 4, and of the last one before
            the stage that brings stride 32.
    """

    stem_keys: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        layers: list[nn.Module],
        *,
        low: int,
        aux: int,
        channels: FeatureChannels,
        classifier_keys: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.name = name
        self.features = nn.Sequential(*layers)
        self.channels = channels
        self.classifier_keys = classifier_keys
        self._low, self._aux = low, aux

    def forward(self, images: Tensor) -> Features:
        """Features of normalized images (N, 3, H, W)."""
        x = low = aux = images
        for i, layer in enumerate(self.features):
            x = layer(x)
            if i == self._low:
                low = x
            if i == self._aux:
                aux = x
        return Features(low, aux, x)


def build_mobilenet(model: ModelConfig, *, norm: NormFactory) -> MobileNet:
    """The MobileNet that `model` describes."""
    build = mobilenet_v2 if model.backbone == "mobilenet_v2" else mobilenet_v3_large
    return build(
        output_stride=model.output_stride, contract_dilation=model.contract_dilation, norm=norm
    )


def mobilenet_v2(
    *, output_stride: int = 32, contract_dilation: bool = True, norm: NormFactory = nn.BatchNorm2d
) -> MobileNet:
    """MobileNetV2 up to its last inverted residual, dilated as VainF's.

    As in VainF and mmsegmentation, features.18 is left out: it widens to 1280 channels for the
    classifier of ImageNet.
    """
    plans = _plans(tuple(_v2_blocks()), output_stride, contract_dilation)
    return MobileNet(
        "mobilenet_v2",
        [
            _conv_norm(3, 32, 3, nn.ReLU6, norm=norm, stride=2),
            *_inverted_residuals(32, plans, key="conv", norm=norm),
        ],
        low=3,
        aux=13,
        channels=FeatureChannels(low=24, aux=96, out=320),
        classifier_keys=("classifier.", "features.18."),
    )


def mobilenet_v3_large(
    *, output_stride: int = 32, contract_dilation: bool = True, norm: NormFactory = nn.BatchNorm2d
) -> MobileNet:
    """MobileNetV3-Large up to its last convolution (960 channels), as torchvision's DeepLabV3.

    torchvision's segmentation models dilate the strided block too: contract_dilation=False. The
    norm layers get eps 1e-3, whatever `norm` chooses.
    """

    def norm_v3(channels: int) -> nn.Module:
        layer = norm(channels)
        layer.eps = _V3_EPS
        return layer

    plans = _plans(_V3_BLOCKS, output_stride, contract_dilation)
    return MobileNet(
        "mobilenet_v3_large",
        [
            _conv_norm(3, 16, 3, nn.Hardswish, norm=norm_v3, stride=2),
            *_inverted_residuals(16, plans, key="block", norm=norm_v3),
            _conv_norm(160, 960, 1, nn.Hardswish, norm=norm_v3),
        ],
        low=3,
        aux=12,
        channels=FeatureChannels(low=24, aux=112, out=960),
        classifier_keys=("classifier.",),
    )


class _Block(NamedTuple):
    """An inverted residual. expanded, out: channels; squeeze: with squeeze-and-excitation."""

    kernel: int
    expanded: int
    out: int
    squeeze: bool
    activation: type[nn.Module]
    stride: int


def _v2_blocks() -> Iterator[_Block]:
    channels = 32
    # arXiv:1801.04381, table 2.
    for expansion, out, num_blocks, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for i in range(num_blocks):
            first = stride if i == 0 else 1
            yield _Block(3, channels * expansion, out, False, nn.ReLU6, first)
            channels = out


# arXiv:1905.02244, table 1.
_V3_BLOCKS = (
    _Block(3, 16, 16, False, nn.ReLU, 1),
    _Block(3, 64, 24, False, nn.ReLU, 2),
    _Block(3, 72, 24, False, nn.ReLU, 1),
    _Block(5, 72, 40, True, nn.ReLU, 2),
    _Block(5, 120, 40, True, nn.ReLU, 1),
    _Block(5, 120, 40, True, nn.ReLU, 1),
    _Block(3, 240, 80, False, nn.Hardswish, 2),
    _Block(3, 200, 80, False, nn.Hardswish, 1),
    _Block(3, 184, 80, False, nn.Hardswish, 1),
    _Block(3, 184, 80, False, nn.Hardswish, 1),
    _Block(3, 480, 112, True, nn.Hardswish, 1),
    _Block(3, 672, 112, True, nn.Hardswish, 1),
    _Block(5, 672, 160, True, nn.Hardswish, 2),
    _Block(5, 960, 160, True, nn.Hardswish, 1),
    _Block(5, 960, 160, True, nn.Hardswish, 1),
)


def _plans(
    blocks: Sequence[_Block], output_stride: int, contract_dilation: bool
) -> list[tuple[_Block, StagePlan]]:
    """Every block with its stride and dilations."""
    plans = plan_stages(
        [block.stride for block in blocks],
        stem_stride=2,
        output_stride=output_stride,
        contract_dilation=contract_dilation,
    )
    return list(zip(blocks, plans, strict=True))


def _inverted_residuals(
    channels: int, plans: list[tuple[_Block, StagePlan]], *, key: str, norm: NormFactory
) -> Iterator[nn.Module]:
    """The blocks behind a layer of `channels`. torchvision calls the layers of a block `key`."""
    for block, plan in plans:
        hidden, activation = block.expanded, block.activation
        parts: list[nn.Module] = []
        if hidden != channels:
            parts.append(_conv_norm(channels, hidden, 1, activation, norm=norm))
        depthwise = {"stride": plan.stride, "dilation": plan.first_dilation, "groups": hidden}
        parts.append(_conv_norm(hidden, hidden, block.kernel, activation, norm=norm, **depthwise))
        if block.squeeze:
            parts.append(_SqueezeExcitation(hidden))
        projection = _conv_norm(hidden, block.out, 1, None, norm=norm)
        parts += projection if key == "conv" else [projection]  # V2's keys have one level less
        # A stride that became a dilation brings no shortcut, as in torchvision.
        shortcut = block.stride == 1 and channels == block.out
        yield _InvertedResidual(key, parts, shortcut=shortcut)
        channels = block.out


class _InvertedResidual(nn.Module):
    def __init__(self, key: str, parts: list[nn.Module], *, shortcut: bool) -> None:
        super().__init__()
        self.key, self.shortcut = key, shortcut
        self.add_module(key, nn.Sequential(*parts))

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(self, self.key)(x)
        return y.add_(x) if self.shortcut else y


class _SqueezeExcitation(nn.Module):
    """Channels weighted by a function of their means (arXiv:1709.01507), with a hard sigmoid."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = _multiple_of_8(channels // 4)
        self.fc1 = conv2d(channels, squeezed, 1, bias=True)
        self.fc2 = conv2d(squeezed, channels, 1, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        return x * F.hardsigmoid(self.fc2(F.relu(self.fc1(means), inplace=True)))


def _multiple_of_8(channels: int) -> int:
    """The nearest multiple of 8, the next one if that loses more than a tenth."""
    rounded = max(8, (channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _conv_norm(
    in_channels: int,
    out_channels: int,
    kernel: int,
    activation: type[nn.Module] | None,
    *,
    norm: NormFactory,
    **conv: int,
) -> nn.Sequential:
    """Convolution, norm and activation under the keys 0, 1 and 2."""
    layers = [conv2d(in_channels, out_channels, kernel, **conv), norm(out_channels)]
    if activation is not None:
        layers.append(activation(inplace=True))
    return nn.Sequential(*layers)
