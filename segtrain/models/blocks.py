"""The pieces that backbones and heads share."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from segtrain.config import ModelConfig
from segtrain.norm import NormFactory, norm_relu, norm_relu_together
from segtrain.norm.once import sums_once

Values = tuple[float, ...]
"""A number for each channel."""


def in_255(
    images: Tensor, value_range: tuple[float, float] | None, dtype: torch.dtype, *, clip: bool
) -> Tensor:
    """`images`, as stored, in units of 0..255 and in `dtype`.

    value_range: the stored values that become 0 and 255; None: 0..65535 of uint16, and of other
        images their own units. clip: values beyond it become its ends.
    """
    if value_range is None and images.dtype != torch.uint16:
        return images.to(dtype)
    low, high = value_range or (0.0, 65535.0)
    # Half precision ends below the values of 16 bits.
    wide = torch.promote_types(dtype, torch.float32)
    values = images.to(wide)
    values = values.clamp(low, high) if clip else values
    return ((values - low) * (255 / (high - low))).to(dtype)


T = TypeVar("T")


def normalize(
    images: Tensor,
    mean: Values,
    std: Values,
    *,
    value_range: tuple[float, float] | None = None,
    clip: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`(images - mean) / std` by channel, (N, C, H, W) in `dtype`.

    images, value_range, clip: see `in_255`. mean, std: in units of 0..255.
    """
    # From a list on the CPU and then moved: the host does not wait for the device.
    mean_t = torch.tensor(mean, dtype=dtype).to(images.device, non_blocking=True).view(-1, 1, 1)
    std_t = torch.tensor(std, dtype=dtype).to(images.device, non_blocking=True).view(-1, 1, 1)
    # In place: an image of 12 million pixels takes 144 MB.
    return (in_255(images, value_range, dtype, clip=clip) - mean_t).div_(std_t)


class Normalize(nn.Module):
    """`normalize` as a module, for the training step and for export; in the dtype of its buffers.

    The buffers come from the config and are not part of the state dict.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: Values,
        std: Values,
        value_range: tuple[float, float] | None = None,
        *,
        clip: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)
        self.value_range, self.clip = value_range, clip

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) as stored -> the same shape, normalized."""
        values = in_255(images, self.value_range, self.mean.dtype, clip=self.clip)
        return (values - self.mean) / self.std


class Features(NamedTuple):
    """What every backbone returns, each (N, C, h, w) with h = ceil(H / stride)."""

    low: Tensor  # stride 4
    aux: Tensor  # the stage before the last
    out: Tensor  # the last stage, stride output_stride


class FeatureChannels(NamedTuple):
    """The number of channels of each of the `Features`."""

    low: int
    aux: int
    out: int


class FeatureStrides(NamedTuple):
    """The pixels of the image, along a side, for one of each of the `Features`."""

    low: int
    aux: int
    out: int


def feature_strides(model: ModelConfig) -> FeatureStrides:
    """Those of the ResNet or MobileNet that `model` describes."""
    return FeatureStrides(4, min(2**model.num_stages, model.output_stride), model.output_stride)


class StagePlan(NamedTuple):
    """The stride of one stage, and the dilations of its 3x3 kernels."""

    stride: int
    first_dilation: int
    dilation: int


def plan_stages(
    strides: Sequence[int], output_stride: int, *, stem_stride: int, contract: bool
) -> list[StagePlan]:
    """Strides until `output_stride` is reached and dilations instead of strides from there on.

    contract: the kernel that lost its stride keeps the dilation of the stage before; the stage then
        sees the same pixels as in the pretrained network of stride 32.
    """
    plans = []
    reached, dilation = stem_stride, 1
    for stride in strides:
        previous = dilation
        # The stride that is left out becomes dilation, so that kernels still see as far.
        if stride > 1 and reached == output_stride:
            dilation, stride = dilation * stride, 1
        reached *= stride
        plans.append(StagePlan(stride, previous if contract else dilation, dilation))
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
    """A convolution padded to keep the size (up to its stride)."""
    padding = dilation * (kernel // 2)
    geometry = (kernel, stride, padding, dilation, groups)
    conv = nn.Conv2d(in_channels, out_channels, *geometry, bias=bias)
    initialize(conv)
    return conv


def initialize(conv: nn.Conv2d) -> None:
    """Draws weights and zeroes the bias as torchvision does."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)


def at_least_float32(x: Tensor) -> Tensor:
    """`x`, with half precision widened to float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels of a pixel lie side by side; False in a graph, which plans memory."""
    if torch.compiler.is_compiling():
        return False
    # With one channel both memory formats have such strides.
    return x.stride(1) == 1 and x.shape[1] > 1


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """`tensors`, (N, C, h, w) each, side by side along C, in the memory format of the first.

    torch.cat makes a contiguous tensor as soon as one is, or is a view by `expand`: all layers
    after it would lose channels-last.
    """
    if is_channels_last(tensors[0]):
        tensors = [t.contiguous(memory_format=torch.channels_last) for t in tensors]
    return torch.cat(list(tensors), dim=1)


def recomputed(function: Callable[..., T], *inputs: Tensor) -> T:
    """`function(*inputs)`, keeping the inputs alone: the backward pass computes the rest again.

    Bit for bit the same values and gradients (arXiv:1604.06174). Collective if `function` is; of
    that the backward pass repeats what is not asked for by `once`, as norm layers do. It must draw
    no random numbers and change no input.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": sums_once}
    return checkpoint(function, *inputs, **options)


class ConvNormReLU(nn.Module):
    """Convolution without bias, norm, ReLU: (N, in_channels, h, w) to (N, out_channels, h, w)."""

    def __init__(
        self, in_channels: int, channels: int, kernel: int, *, norm: NormFactory, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = conv2d(in_channels, channels, kernel, groups=groups)
        self.norm = norm(channels)

    def before_norm(self, x: Tensor) -> Tensor:
        """The input of the last norm, for `run_together`."""
        return self.conv(x)

    def forward(self, x: Tensor) -> Tensor:
        """The activations."""
        return norm_relu(self.before_norm(x), self.norm)


class SeparableConvNormReLU(nn.Module):
    """A 3x3 depthwise and a 1x1 convolution, each with norm and ReLU (arXiv:1802.02611, 3.1).

    norm_between: False: nothing stands between the two (segmentation_models.pytorch, VainF).
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, norm: NormFactory, norm_between: bool = True
    ) -> None:
        super().__init__()
        if norm_between:
            depthwise = ConvNormReLU(in_channels, in_channels, 3, norm=norm, groups=in_channels)
        else:
            depthwise = conv2d(in_channels, in_channels, 3, groups=in_channels)
        self.depthwise = depthwise
        self.pointwise = ConvNormReLU(in_channels, out_channels, 1, norm=norm)

    @property
    def norm(self) -> nn.Module:
        """The last norm."""
        return self.pointwise.norm

    def before_norm(self, x: Tensor) -> Tensor:
        """The input of the last norm, for `run_together`."""
        return self.pointwise.conv(self.depthwise(x))

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, h, w) to (N, out_channels, h, w)."""
        return self.pointwise(self.depthwise(x))


ConvBlock = ConvNormReLU | SeparableConvNormReLU


def run_together(blocks: Sequence[ConvBlock], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Each block's output for its own input; in training the last norms share one collective.

    The numbers are those of separate calls. No input may depend on another block's output.
    """
    pairs = zip(blocks, inputs, strict=True)
    return norm_relu_together((block.before_norm(x), block.norm) for block, x in pairs)


class Classifier(nn.Module):
    """Channel dropout and the convolution to logits, initialized as mmsegmentation's."""

    def __init__(
        self, in_channels: int, num_classes: int, *, dropout: float, kernel: int = 1
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.dropout = dropout
        self.conv = nn.Conv2d(in_channels, num_classes, kernel, padding=kernel // 2)
        nn.init.normal_(self.conv.weight, std=0.01)
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(N, in_channels, h, w) to (N, K, h, w).

        mask: (N, in_channels, 1, 1), multiplied in training; None: drawn from torch's generator.
        """
        if self.training and mask is not None:
            x = x * mask.to(x.dtype)
        elif self.training and self.dropout > 0:
            x = F.dropout2d(x, self.dropout)
        return self.conv(x)


class Head(nn.Module):
    """The base of all heads: `join`, then `conv`, then `classifier`.

    A subclass makes `conv` and `classifier`. `SegModel` runs the `conv` of both heads together.

    over: which of the `Features` have the size of the logits; None: not known.
    strides: of the features; None: features and logits are stretched over the image.
    """

    conv: ConvBlock
    classifier: Classifier
    over: Literal["low", "aux", "out"] | None = None
    strides: FeatureStrides | None = None

    @property
    def stride(self) -> int | None:
        """The pixels of the image, along a side, under one of the logits; None: see `strides`."""
        known = self.over is not None and self.strides is not None
        return getattr(self.strides, self.over) if known else None

    def join(self, features: Features) -> Tensor:
        """One tensor made of the features: the input of `conv`."""
        raise NotImplementedError

    def forward(self, features: Features, mask: Tensor | None) -> Tensor:
        """Logits (N, K, h, w) at the size of `join(features)`.

        mask: (N, C, 1, 1), the dropout before the classifier; None: drawn from torch's generator.
        """
        return self.classifier(self.conv(self.join(features)), mask)


class AuxHead(Head):
    """The auxiliary classifier: 3x3 convolution, norm, ReLU, dropout, 1x1 (arXiv:1612.01105)."""

    over = "aux"

    def __init__(
        self, model: ModelConfig, channels: FeatureChannels, *, num_classes: int, norm: NormFactory
    ) -> None:
        super().__init__()
        width = model.aux_channels
        self.conv = ConvNormReLU(channels.aux, width, 3, norm=norm)
        self.classifier = Classifier(width, num_classes, dropout=model.dropout)

    def join(self, features: Features) -> Tensor:
        """The features of the stage before the last."""
        return features.aux
