"""The pieces that backbones and heads share."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segtrain.norm import NormFactory, normalize_together


class Features(NamedTuple):
    """What every backbone returns, each (N, C, h, w) with h = ceil(H / stride).

    low: stride 4. aux: the stage before the last, stride min(16, output_stride). out: the last
    stage, stride output_stride. low_branch, aux_branch: what the `Branches` made of low and aux.
    """

    low: Tensor
    aux: Tensor
    out: Tensor
    low_branch: Tensor | None = None
    aux_branch: Tensor | None = None


class FeatureChannels(NamedTuple):
    """The number of channels of each of the `Features`."""

    low: int
    aux: int
    out: int


class StagePlan(NamedTuple):
    """How one stage of a backbone walks over its input; the dilations are of 3x3 kernels."""

    stride: int
    first_dilation: int
    dilation: int


def plan_stages(
    strides: Sequence[int], *, stem_stride: int, output_stride: int, contract_dilation: bool
) -> list[StagePlan]:
    """Strides until `output_stride` is reached and dilations instead of strides from there on.

    With `contract_dilation` the kernel that used to stride keeps its own dilation and only those
    after it are widened: they meet the same pixels as in the network of stride 32 that the
    pretrained weights come from, so its output is a subset of the dilated one's.
    """
    plans = []
    reached, dilation = stem_stride, 1
    for stride in strides:
        previous = dilation
        if stride > 1 and reached == output_stride:
            dilation, stride = dilation * stride, 1
        reached *= stride
        plans.append(StagePlan(stride, previous if contract_dilation else dilation, dilation))
    return plans


def conv2d(
    in_channels: int,
    out_channels: int,
    kernel: int,
    *,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    bias: bool = False,
) -> nn.Conv2d:
    """A convolution that keeps the size, up to its stride; initialized as torchvision's ResNets."""
    conv = nn.Conv2d(
        in_channels,
        out_channels,
        kernel,
        stride=stride,
        padding=dilation * (kernel // 2),
        dilation=dilation,
        groups=groups,
        bias=bias,
    )
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def resize(x: Tensor, size: Sequence[int], *, align_corners: bool) -> Tensor:
    """`x` (N, C, h, w) interpolated bilinearly to `size` (H, W)."""
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=align_corners)


def at_least_float32(x: Tensor) -> Tensor:
    """`x`, with half precision widened to float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ConvNormReLU(nn.Module):
    """Convolution without bias, norm, ReLU."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        norm: NormFactory,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.conv = conv2d(in_channels, out_channels, kernel, dilation=dilation, groups=groups)
        self.norm = norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, h, w) to (N, out_channels, h, w)."""
        return F.relu(self.norm(self.conv(x)), inplace=True)


class SeparableConvNormReLU(nn.Module):
    """A 3x3 depthwise and a 1x1 convolution, each with norm and ReLU.

    As in mmsegmentation, detectron2 and the first DeepLabV3+ (arXiv:1802.02611, section 3.1).
    """

    def __init__(self, in_channels: int, out_channels: int, *, norm: NormFactory) -> None:
        super().__init__()
        self.depthwise = ConvNormReLU(in_channels, in_channels, 3, norm=norm, groups=in_channels)
        self.pointwise = ConvNormReLU(in_channels, out_channels, 1, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, h, w) to (N, out_channels, h, w)."""
        return self.pointwise(self.depthwise(x))


class Classifier(nn.Module):
    """Channel dropout and the 1x1 convolution to logits, initialized as mmsegmentation's."""

    def __init__(self, in_channels: int, num_classes: int, *, dropout: float) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.dropout = dropout
        self.conv = nn.Conv2d(in_channels, num_classes, 1)
        nn.init.normal_(self.conv.weight, std=0.01)
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(N, in_channels, h, w) to (N, K, h, w).

        Args:
            mask: (N, in_channels, 1, 1), multiplied in training; None: drawn from torch's
                generator.
        """
        if self.training and mask is not None:
            x = x * mask.to(x.dtype)
        elif self.training and self.dropout > 0:
            x = F.dropout2d(x, self.dropout)
        return self.conv(x)


class Branches(NamedTuple):
    """A head's first convolutions on features that the backbone goes on with.

    The backbone runs them, each beside the block that reads the same features, so that the two
    share one collective for their statistics.
    """

    low: ConvNormReLU | None = None
    aux: ConvNormReLU | None = None


def normalize_beside(
    y: Tensor, norm: nn.Module, x: Tensor, branch: ConvNormReLU | None
) -> tuple[Tensor, Tensor | None]:
    """`y` through `norm`, and `x` through `branch`, with one collective for both."""
    if branch is None:
        return norm(y), None
    y, beside = normalize_together([(y, norm), (branch.conv(x), branch.norm)])
    return y, F.relu(beside, inplace=True)


class AuxHead(nn.Module):
    """The auxiliary classifier: 3x3 convolution, norm, ReLU, dropout, 1x1 (arXiv:1612.01105)."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        num_classes: int,
        dropout: float,
        norm: NormFactory,
    ) -> None:
        super().__init__()
        self.conv = ConvNormReLU(in_channels, channels, 3, norm=norm)
        self.classifier = Classifier(channels, num_classes, dropout=dropout)

    def forward(self, features: Features, mask: Tensor | None) -> Tensor:
        """Logits (N, K, h, w) at the size of `features.aux`."""
        x = self.conv(features.aux) if features.aux_branch is None else features.aux_branch
        return self.classifier(x, mask)
