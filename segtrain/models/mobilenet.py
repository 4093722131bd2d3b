"""MobileNetV2 and MobileNetV3-Large with torchvision's state-dict keys, dilated."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from segtrain.config import ModelConfig
from segtrain.models.blocks import FeatureChannels, Features, conv2d, plan_stages
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


# arXiv:1801.04381, table 2: expansion, output channels, blocks, stride.
_V2_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def mobilenet_v2(
    *, output_stride: int = 32, contract_dilation: bool = True, norm: NormFactory = nn.BatchNorm2d
) -> MobileNet:
    """MobileNetV2 up to its last inverted residual, dilated as VainF's.

    As in VainF and mmsegmentation, features.18 is left out: it widens to 1280 channels for the
    classifier of ImageNet.
    """
    plans = plan_stages(
        [stride for *_, stride in _V2_STAGES],
        stem_stride=2,
        output_stride=output_stride,
        contract_dilation=contract_dilation,
    )
    channels = 32
    layers: list[nn.Module] = [_conv_norm(3, channels, 3, nn.ReLU6, stride=2, norm=norm)]
    for (expansion, out_channels, num_blocks, _), plan in zip(_V2_STAGES, plans, strict=True):
        for i in range(num_blocks):
            stride = plan.stride if i == 0 else 1
            dilation = plan.first_dilation if i == 0 else plan.dilation
            layers.append(
                _InvertedResidualV2(
                    *(channels, out_channels, expansion),
                    stride=stride,
                    dilation=dilation,
                    norm=norm,
                )
            )
            channels = out_channels
    return MobileNet(
        "mobilenet_v2",
        layers,
        low=3,
        aux=13,
        channels=FeatureChannels(low=24, aux=96, out=320),
        classifier_keys=("classifier.", "features.18."),
    )


class _InvertedResidualV2(nn.Module):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        expansion: int,
        *,
        stride: int,
        dilation: int,
        norm: NormFactory,
    ) -> None:
        super().__init__()
        hidden = in_channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(_conv_norm(in_channels, hidden, 1, nn.ReLU6, norm=norm))
        depthwise = {"stride": stride, "dilation": dilation, "groups": hidden}
        layers.append(_conv_norm(hidden, hidden, 3, nn.ReLU6, norm=norm, **depthwise))
        layers += [conv2d(hidden, out_channels, 1), norm(out_channels)]
        self.conv = nn.Sequential(*layers)
        self.shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y.add_(x) if self.shortcut else y


class _V3Block(NamedTuple):
    kernel: int
    expanded: int
    out: int
    squeeze: bool
    activation: type[nn.Module]
    stride: int


# arXiv:1905.02244, table 1.
_V3_BLOCKS = (
    _V3Block(3, 16, 16, False, nn.ReLU, 1),
    _V3Block(3, 64, 24, False, nn.ReLU, 2),
    _V3Block(3, 72, 24, False, nn.ReLU, 1),
    _V3Block(5, 72, 40, True, nn.ReLU, 2),
    _V3Block(5, 120, 40, True, nn.ReLU, 1),
    _V3Block(5, 120, 40, True, nn.ReLU, 1),
    _V3Block(3, 240, 80, False, nn.Hardswish, 2),
    _V3Block(3, 200, 80, False, nn.Hardswish, 1),
    _V3Block(3, 184, 80, False, nn.Hardswish, 1),
    _V3Block(3, 184, 80, False, nn.Hardswish, 1),
    _V3Block(3, 480, 112, True, nn.Hardswish, 1),
    _V3Block(3, 672, 112, True, nn.Hardswish, 1),
    _V3Block(5, 672, 160, True, nn.Hardswish, 2),
    _V3Block(5, 960, 160, True, nn.Hardswish, 1),
    _V3Block(5, 960, 160, True, nn.Hardswish, 1),
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

    plans = plan_stages(
        [block.stride for block in _V3_BLOCKS],
        stem_stride=2,
        output_stride=output_stride,
        contract_dilation=contract_dilation,
    )
    channels = 16
    layers: list[nn.Module] = [_conv_norm(3, channels, 3, nn.Hardswish, stride=2, norm=norm_v3)]
    for block, plan in zip(_V3_BLOCKS, plans, strict=True):
        options = {"stride": plan.stride, "dilation": plan.first_dilation, "norm": norm_v3}
        layers.append(_InvertedResidualV3(channels, block, **options))
        channels = block.out
    layers.append(_conv_norm(channels, 960, 1, nn.Hardswish, norm=norm_v3))
    return MobileNet(
        "mobilenet_v3_large",
        layers,
        low=3,
        aux=12,
        channels=FeatureChannels(low=24, aux=112, out=960),
        classifier_keys=("classifier.",),
    )


class _InvertedResidualV3(nn.Module):
    def __init__(
        self, in_channels: int, block: _V3Block, *, stride: int, dilation: int, norm: NormFactory
    ) -> None:
        super().__init__()
        hidden, activation = block.expanded, block.activation
        layers: list[nn.Module] = []
        if hidden != in_channels:
            layers.append(_conv_norm(in_channels, hidden, 1, activation, norm=norm))
        depthwise = {"stride": stride, "dilation": dilation, "groups": hidden}
        layers.append(_conv_norm(hidden, hidden, block.kernel, activation, norm=norm, **depthwise))
        if block.squeeze:
            layers.append(_SqueezeExcitation(hidden))
        layers.append(_conv_norm(hidden, block.out, 1, None, norm=norm))
        self.block = nn.Sequential(*layers)
        # A stride that became a dilation brings no shortcut, as in torchvision.
        self.shortcut = block.stride == 1 and in_channels == block.out

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
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
