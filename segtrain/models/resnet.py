"""ResNet (arXiv:1512.03385) with torchvision's state-dict keys.

torchvision's own cannot dilate a BasicBlock, has no deep stem and always contracts dilations.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from segtrain.config import ModelConfig
from segtrain.models.blocks import (
    FeatureChannels,
    Features,
    conv2d,
    feature_strides,
    plan_stages,
    recomputed,
)
from segtrain.models.forms import form_of
from segtrain.norm import NormFactory, norm_relu, norm_relu_conv

# Keys of a deep stem, which weights with a 7x7 stem cannot fill. The wide stem also changes the
# input of layer1.
_STEM_KEYS = ("conv1.", "bn1.", "conv2.", "bn2.", "conv3.", "bn3.")
_WIDE_STEM_KEYS = ("layer1.0.conv1.", "layer1.0.bn1.", "layer1.0.downsample.")


class _Conv(NamedTuple):
    width: int
    kernel: int
    stride: int = 1
    dilation: int = 1


_STEMS = {
    "7x7": [_Conv(64, 7, 2)],
    "64-64-128": [_Conv(64, 3, 2), _Conv(64, 3), _Conv(128, 3)],
    "32-32-64": [_Conv(32, 3, 2), _Conv(32, 3), _Conv(64, 3)],
}
_AVGPOOL = "-avgpool"
# The number of blocks of each stage, and whether they are bottlenecks.
DEPTHS = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
}


def stage_widths(name: str) -> list[int]:
    """The channels of each of the four stages."""
    return [(4 if DEPTHS[name][1] else 1) * 64 * 2**i for i in range(4)]


class _ConvChain(nn.Module):
    """conv1, bn1, ReLU, conv2, bn2 and so on, up to the last norm."""

    def __init__(
        self, in_channels: int, convs: Sequence[_Conv], *, norm: NormFactory, recompute: str
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self._length = len(convs)
        for i, (width, kernel, stride, dilation) in enumerate(convs, start=1):
            conv = conv2d(in_channels, width, kernel, stride=stride, dilation=dilation)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"bn{i}", norm(width))
            in_channels = width

    def again(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`function(x)`, in training `recomputed` if the config says so."""
        if self.training and self.recompute == "blocks":
            return recomputed(function, x)
        return function(x)

    def run_chain(self, x: Tensor) -> tuple[Tensor, nn.Module]:
        """The input of the last norm, and this norm."""
        # A norm waits for the next convolution: with `recompute` norm, ReLU and convolution are one
        # operation. The last norm is the caller's, which may have a shortcut to add.
        x, norm = self.conv1(x), self.bn1
        for i in range(2, self._length + 1):
            conv = getattr(self, f"conv{i}")
            x = _norm_relu_conv(x, norm, conv, recompute=self.recompute == "norm")
            norm = getattr(self, f"bn{i}")
        return x, norm


class _Block(_ConvChain):
    """Convolutions and a shortcut: (N, C, h, w) to (N, C', h / stride, w / stride)."""

    def __init__(
        self,
        in_channels: int,
        convs: Sequence[_Conv],
        *,
        norm: NormFactory,
        recompute: str,
        pooled_shortcut: bool,
    ) -> None:
        super().__init__(in_channels, convs, norm=norm, recompute=recompute)
        width, stride = convs[-1].width, max(conv.stride for conv in convs)
        self.downsample = None
        if stride > 1 or in_channels != width:
            if pooled_shortcut:
                # Of ceil(size / stride); at a border, means of the pixels that there are.
                pool = nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False)
                before, stride = [pool if stride > 1 else nn.Identity()], 1
            else:
                before = []
            conv = conv2d(in_channels, width, 1, stride=stride)
            self.downsample = nn.Sequential(*before, conv, norm(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self._block, x)

    def _block(self, x: Tensor) -> Tensor:
        y, norm = self.run_chain(x)
        if self.downsample is None:
            return norm_relu(y, norm, x)
        *convolve, shortcut_norm = self.downsample
        for layer in convolve:
            x = layer(x)
        # One collective for both norms.
        return norm_relu(y, norm, (x, shortcut_norm))


class ResNet(_ConvChain):
    """The convolutional part of the ResNet that `model` describes: images to `Features`.

    `multi_grid` is that of DeepLabV3 (arXiv:1706.05587, section 4.2.1); such a stage is not
    contracted. `recompute` norm: see `segtrain.norm.norm_relu_conv`; blocks: the stem and each
    residual block are `recomputed`.
    """

    def __init__(self, model: ModelConfig, *, norm: NormFactory = nn.BatchNorm2d) -> None:
        depths, bottleneck = DEPTHS[model.backbone]
        options = {"norm": norm, "recompute": model.recompute}
        stem = _STEMS[model.stem.removesuffix(_AVGPOOL)]
        super().__init__(3, stem, **options)
        self.name = model.backbone
        widths = stage_widths(model.backbone)[: model.num_stages]
        self.channels = FeatureChannels(widths[0], *widths[-2:])
        self.strides = feature_strides(model)
        # The stages that the model does not have are no use for its weights either.
        left_out = (f"layer{i}." for i in range(model.num_stages + 1, 5))
        self.classifier_keys: tuple[str, ...] = ("fc.", *left_out)
        self.stem_keys: tuple[str, ...] = ()
        if model.stem != "7x7":
            self.stem_keys = _STEM_KEYS + (_WIDE_STEM_KEYS if model.stem == "64-64-128" else ())
        form, strides = form_of(model), (1, 2, 2, 2)[: model.num_stages]
        planning = {"stem_stride": 4, "contract": form.contract_dilation}
        plans = plan_stages(strides, model.output_stride, **planning)
        channels, pooled = stem[-1].width, model.stem.endswith(_AVGPOOL)
        for i, plan in enumerate(plans):
            blocks = []
            dilations = [(plan.first_dilation, plan.dilation)]
            dilations += [(plan.dilation, plan.dilation)] * (depths[i] - 1)
            if i == 3 and model.multi_grid is not None:
                unit = plan.dilation if form.multi_grid_factors else 1
                dilations = [(unit * value, unit * value) for value in model.multi_grid]
            if not (bottleneck or form.basic_block_both):
                dilations = [(first, 1) for first, _ in dilations]
            for convs in _stage(64 * 2**i, plan.stride, dilations, bottleneck=bottleneck):
                blocks.append(_Block(channels, convs, **options, pooled_shortcut=pooled))
                channels = convs[-1].width
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        self._num_stages = model.num_stages

    def forward(self, images: Tensor) -> Features:
        """Features of normalized images (N, 3, H, W)."""
        low = self.layer1(self.again(self._stem, images))
        # `aux` is the stage before the last, of however many there are.
        aux, out = low, self.layer2(low)
        if self._num_stages > 2:
            aux, out = out, self.layer3(out)
        if self._num_stages > 3:
            aux, out = out, self.layer4(out)
        return Features(low, aux, out)

    def _stem(self, images: Tensor) -> Tensor:
        x, norm = self.run_chain(images)
        return F.max_pool2d(norm_relu(x, norm), 3, stride=2, padding=1)


def _norm_relu_conv(x: Tensor, norm: nn.Module, conv: nn.Conv2d, *, recompute: bool) -> Tensor:
    if recompute:
        return norm_relu_conv(x, norm, conv)
    return conv(norm_relu(x, norm))


def _stage(
    width: int, stride: int, dilations: Sequence[tuple[int, int]], *, bottleneck: bool
) -> Iterator[list[_Conv]]:
    """The convolutions of each block. Bottlenecks stride in the 3x3 one (ResNet "v1.5").

    dilations: of each block, that of the kernel that may have a stride and that of the next one.
    """
    for i, (first, second) in enumerate(dilations):
        strided = _Conv(width, 3, stride if i == 0 else 1, first)
        if bottleneck:
            yield [_Conv(width, 1), strided, _Conv(4 * width, 1)]
        else:
            yield [strided, _Conv(width, 3, 1, second)]
