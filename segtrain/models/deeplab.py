"""DeepLabV3 (arXiv:1706.05587) and DeepLabV3+ (arXiv:1802.02611)."""

import torch
from torch import Tensor, nn

from segtrain.config import ModelConfig
from segtrain.models.blocks import (
    Classifier,
    ConvBlock,
    ConvNormReLU,
    FeatureChannels,
    Features,
    Head,
    SeparableConvNormReLU,
    concatenated,
    conv2d,
    norm_relu_together,
    run_together,
)
from segtrain.models.forms import form_of
from segtrain.models.resizing import enlarge
from segtrain.norm import NormFactory

# The papers' rates for strides 16 and 8; those for 32 have the same reach in image pixels.
_RATES = {8: (12, 24, 36), 16: (6, 12, 18), 32: (3, 6, 9)}


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: convolutions of several dilations side by side.

    Concatenated as [1x1, 3x3 at each rate, global mean], the order of torchvision and VainF, and
    projected by one convolution, to `model.head_channels`. With `model.separable` each dilated
    convolution is a depthwise and a 1x1 one.

    project_kernel: of the projection; None: there is none, and `forward` gives the branches.
    """

    def __init__(
        self,
        model: ModelConfig,
        in_channels: int,
        width: int,
        *,
        norm: NormFactory,
        project_kernel: int | None,
    ) -> None:
        super().__init__()
        rates = model.aspp_rates or _RATES[model.output_stride]
        depthwise_rates = rates if model.separable else ()
        self.depthwise = nn.ModuleList(
            conv2d(in_channels, in_channels, 3, dilation=rate, groups=in_channels)
            for rate in depthwise_rates
        )
        between = depthwise_rates if form_of(model).separable_norm else ()
        self.depthwise_norms = nn.ModuleList(norm(in_channels) for _ in between)
        # With `separable` the depthwise kernels are 3x3 and dilated, and these only mix channels.
        kernel = 1 if model.separable else 3
        dilated = [conv2d(in_channels, width, kernel, dilation=rate) for rate in rates]
        self.convs = nn.ModuleList(
            [conv2d(in_channels, width, 1), *dilated, conv2d(in_channels, width, 1)]
        )
        self.norms = nn.ModuleList(norm(width) for _ in self.convs)
        self.out_channels = width * len(self.convs)
        self.project = None
        if project_kernel is not None:
            self.project = ConvNormReLU(self.out_channels, width, project_kernel, norm=norm)
            self.out_channels = width

    def branches(self, x: Tensor) -> Tensor:
        """The branches of (N, in_channels, h, w), concatenated: the input of `project`."""
        # All but the first, 1x1, and the last, which takes the global mean.
        dilated = [x] * (len(self.convs) - 2)
        if self.depthwise:
            dilated = [conv(x) for conv in self.depthwise]
        if self.depthwise_norms:
            dilated = norm_relu_together(zip(dilated, self.depthwise_norms, strict=True))
        inputs = [x, *dilated, x.mean((2, 3), keepdim=True)]
        convolved = [conv(y) for conv, y in zip(self.convs, inputs, strict=True)]
        # All norms in one call, so that they share a collective for their statistics.
        *local, pooled = norm_relu_together(zip(convolved, self.norms, strict=True))
        return concatenated([*local, pooled.expand_as(local[0])])

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, h, w) to (N, out_channels, h, w)."""
        branches = self.branches(x)
        return branches if self.project is None else self.project(branches)


class DeepLabV3Head(Head):
    """ASPP, 3x3 convolution, norm, ReLU, dropout and 1x1 convolution, as torchvision's.

    In mmsegmentation's form the 3x3 convolution takes the branches themselves.
    """

    over = "out"

    def __init__(
        self, model: ModelConfig, channels: FeatureChannels, *, num_classes: int, norm: NormFactory
    ) -> None:
        super().__init__()
        width = model.head_channels or 256
        if form_of(model).aspp_join == 3:
            self.aspp = ASPP(model, channels.out, width, norm=norm, project_kernel=None)
            self.conv: ConvBlock = ConvNormReLU(self.aspp.out_channels, width, 3, norm=norm)
        else:
            self.aspp = ASPP(model, channels.out, width, norm=norm, project_kernel=1)
            self.conv = _conv3x3(model, width, width, norm)
        self.classifier = Classifier(width, num_classes, dropout=model.dropout)

    def join(self, features: Features) -> Tensor:
        """At the size of `features.out`."""
        return self.aspp(features.out)


class DeepLabV3PlusHead(Head):
    """ASPP joined with low-level features, 3x3 convolutions, dropout and 1x1 convolution.

    Concatenated as [low-level, ASPP], the order of VainF and detectron2. The paper (table 2) has
    two convolutions.
    """

    over = "low"

    def __init__(
        self, model: ModelConfig, channels: FeatureChannels, *, num_classes: int, norm: NormFactory
    ) -> None:
        super().__init__()
        form, width = form_of(model), model.head_channels or 256
        self.align_corners = model.align_corners
        self.aspp = ASPP(model, channels.out, width, norm=norm, project_kernel=form.aspp_join)
        self.aspp_conv = _conv3x3(model, width, width, norm) if form.aspp_conv else None
        self.low = ConvNormReLU(channels.low, model.low_level_channels, 1, norm=norm)
        joined = model.low_level_channels + width
        widths = [joined, *[width] * (form.decoder_convs - 1)]
        self.decoder = nn.Sequential(*(_conv3x3(model, c, width, norm) for c in widths))
        self.classifier = Classifier(width, num_classes, dropout=model.dropout)

    @property
    def conv(self) -> ConvBlock:
        """The last convolution; checkpoints know it as part of the decoder."""
        return self.decoder[-1]

    def join(self, features: Features) -> Tensor:
        """At the size of `features.low`."""
        inputs = [self.aspp.branches(features.out), features.low]
        high, low = run_together([self.aspp.project, self.low], inputs)
        if self.aspp_conv is not None:
            high = self.aspp_conv(high)
        size, strides = low.shape[-2:], self.strides
        # One value of ASPP covers so many of the low-level features a side; None: it is stretched.
        stride = None if strides is None else strides.out // strides.low
        high = enlarge(high, size, stride, align_corners=self.align_corners)
        joined = torch.cat([low, high], dim=1)
        for conv in list(self.decoder)[:-1]:
            joined = conv(joined)
        return joined


def _conv3x3(
    model: ModelConfig, in_channels: int, out_channels: int, norm: NormFactory
) -> ConvBlock:
    if model.separable:
        between = form_of(model).separable_norm
        return SeparableConvNormReLU(in_channels, out_channels, norm=norm, norm_between=between)
    return ConvNormReLU(in_channels, out_channels, 3, norm=norm)
