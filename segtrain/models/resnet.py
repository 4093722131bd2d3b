"""ResNet (arXiv:1512.03385) with torchvision's state-dict keys, dilated in any of its forms.

torchvision's own cannot dilate a BasicBlock, has no deep stem and always contracts dilations.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from segtrain.models.blocks import (
    Branches,
    ConvNormReLU,
    FeatureChannels,
    Features,
    StagePlan,
    conv2d,
    normalize_beside,
    plan_stages,
)
from segtrain.norm import NormFactory, norm_relu_conv, normalize_together

# Widths of the three 3x3 convolutions that replace the 7x7 one.
_DEEP_STEMS = {"64-64-128": (64, 64, 128), "32-32-64": (32, 32, 64)}

# Keys that only mean something together with the stem. The wide stem changes the input of layer1.
_STEM_KEYS = ("conv1.", "bn1.", "conv2.", "bn2.", "conv3.", "bn3.")
_WIDE_STEM_KEYS = ("layer1.0.conv1.", "layer1.0.bn1.", "layer1.0.downsample.")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(
        self,
        in_channels: int,
        width: int,
        *,
        stride: int,
        dilations: tuple[int, int],
        norm: NormFactory,
        recompute_norm: bool = False,
    ) -> None:
        super().__init__()
        self.recompute_norm = recompute_norm
        self.conv1 = conv2d(in_channels, width, 3, stride=stride, dilation=dilations[0])
        self.bn1 = norm(width)
        self.conv2 = conv2d(width, width, 3, dilation=dilations[1])
        self.bn2 = norm(width)
        self.downsample = _downsample(in_channels, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, h, w) to (N, width, h / stride, w / stride)."""
        return self.forward_beside(x, None)[0]

    def forward_beside(
        self, x: Tensor, branch: ConvNormReLU | None
    ) -> tuple[Tensor, Tensor | None]:
        """The block's and the branch's output for the same input."""
        y, beside = self.conv1(x), None
        if branch is None:
            y = _activated_conv(y, self.bn1, self.conv2, recompute=self.recompute_norm)
        else:
            y, beside = normalize_beside(y, self.bn1, x, branch)
            y = self.conv2(F.relu(y, inplace=True))
        return _join(y, self.bn2, x, self.downsample), beside


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut; the 3x3 strides (ResNet "v1.5")."""

    expansion = 4

    def __init__(
        self,
        in_channels: int,
        width: int,
        *,
        stride: int,
        dilations: tuple[int, int],
        norm: NormFactory,
        recompute_norm: bool = False,
    ) -> None:
        super().__init__()
        self.recompute_norm = recompute_norm
        out_channels = width * self.expansion
        self.conv1 = conv2d(in_channels, width, 1)
        self.bn1 = norm(width)
        self.conv2 = conv2d(width, width, 3, stride=stride, dilation=dilations[0])
        self.bn2 = norm(width)
        self.conv3 = conv2d(width, out_channels, 1)
        self.bn3 = norm(out_channels)
        self.downsample = _downsample(in_channels, out_channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, h, w) to (N, 4 * width, h / stride, w / stride)."""
        return self.forward_beside(x, None)[0]

    def forward_beside(
        self, x: Tensor, branch: ConvNormReLU | None
    ) -> tuple[Tensor, Tensor | None]:
        """The block's and the branch's output for the same input."""
        y, beside = self.conv1(x), None
        if branch is None:
            y = _activated_conv(y, self.bn1, self.conv2, recompute=self.recompute_norm)
        else:
            y, beside = normalize_beside(y, self.bn1, x, branch)
            y = self.conv2(F.relu(y, inplace=True))
        y = _activated_conv(y, self.bn2, self.conv3, recompute=self.recompute_norm)
        return _join(y, self.bn3, x, self.downsample), beside


_DEPTHS: dict[str, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
}


class ResNet(nn.Module):
    """The convolutional part of a ResNet: images to `Features`.

    Args:
        name: resnet18, resnet34, resnet50 or resnet101.
        output_stride: 8, 16 or 32; strides beyond it become dilations.
        stem: "7x7", or the widths of three 3x3 convolutions: "64-64-128" (semseg), "32-32-64".
        contract_dilation: see `plan_stages`. In a BasicBlock the first of the two convolutions is
            the one that used to stride; the second is already behind it.
        multi_grid: factors on the dilation of the last stage, one a block, as in DeepLabV3
            (arXiv:1706.05587, section 4.2.1) and detectron2: at stride 16, [1, 2, 4] gives 2, 4, 8.
            They leave nothing to contract. mmsegmentation reads them as the dilations themselves.
        recompute_norm: memory for time, see `norm_relu_conv`.
        norm: makes the norm layer for a number of channels.

    Attributes:
        channels: of the features.
        classifier_keys: prefixes of the keys of a classification checkpoint without a place here.
        stem_keys: prefixes of the keys that a checkpoint with a 7x7 stem cannot fill.

    Raises:
        ValueError: `multi_grid` has not one number for each block of the last stage.
    """

    classifier_keys = ("fc.",)

    def __init__(
        self,
        name: str,
        *,
        output_stride: int = 32,
        stem: str = "7x7",
        contract_dilation: bool = True,
        multi_grid: tuple[int, ...] | None = None,
        norm: NormFactory = nn.BatchNorm2d,
        recompute_norm: bool = False,
    ) -> None:
        super().__init__()
        self.recompute_norm = recompute_norm
        block, depths = _DEPTHS[name]
        if multi_grid is not None and len(multi_grid) != depths[-1]:
            raise ValueError(f"multi_grid: expected {depths[-1]} numbers, got {multi_grid}")
        self.name = name
        self.stem_keys = _stem_keys(stem)
        self.channels = FeatureChannels(*(w * block.expansion for w in (64, 256, 512)))
        plans = plan_stages(
            (1, 2, 2, 2),
            stem_stride=4,
            output_stride=output_stride,
            contract_dilation=contract_dilation,
        )
        grids = (None, None, None, multi_grid)

        channels = self._add_stem(stem, norm)
        for i, (plan, depth, grid) in enumerate(zip(plans, depths, grids, strict=True)):
            width = 64 * 2**i
            blocks = []
            for j, dilations in enumerate(_block_dilations(plan, depth, grid)):
                stride = plan.stride if j == 0 else 1
                blocks.append(
                    block(
                        channels,
                        width,
                        stride=stride,
                        dilations=dilations,
                        norm=norm,
                        recompute_norm=recompute_norm,
                    )
                )
                channels = width * block.expansion
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))

    def _add_stem(self, stem: str, norm: NormFactory) -> int:
        """Adds conv1, bn1 and, in a deep stem, conv2 to bn3; returns the output channels."""
        if stem == "7x7":
            self.conv1, self.bn1 = conv2d(3, 64, 7, stride=2), norm(64)
            return 64
        first, second, third = _DEEP_STEMS[stem]
        self.conv1, self.bn1 = conv2d(3, first, 3, stride=2), norm(first)
        self.conv2, self.bn2 = conv2d(first, second, 3), norm(second)
        self.conv3, self.bn3 = conv2d(second, third, 3), norm(third)
        return third

    def forward(self, images: Tensor, branches: Branches | None = None) -> Features:
        """Features of normalized images (N, 3, H, W), and the branches'."""
        branches = branches or Branches()
        x, last = self.conv1(images), self.bn1
        if self.stem_keys:
            x = _activated_conv(x, self.bn1, self.conv2, recompute=self.recompute_norm)
            x = _activated_conv(x, self.bn2, self.conv3, recompute=self.recompute_norm)
            last = self.bn3
        x = F.max_pool2d(F.relu(last(x), inplace=True), 3, stride=2, padding=1)
        low = self.layer1(x)
        x, low_branch = _stage(self.layer2, low, branches.low)
        aux = self.layer3(x)
        out, aux_branch = _stage(self.layer4, aux, branches.aux)
        return Features(low, aux, out, low_branch, aux_branch)


def _stage(
    blocks: nn.Sequential, x: Tensor, branch: ConvNormReLU | None
) -> tuple[Tensor, Tensor | None]:
    """One stage, with a branch beside its first block."""
    first, *others = blocks
    x, beside = first.forward_beside(x, branch)
    for block in others:
        x = block(x)
    return x, beside


def _activated_conv(x: Tensor, norm: nn.Module, conv: nn.Conv2d, *, recompute: bool) -> Tensor:
    if recompute:
        return norm_relu_conv(x, norm, conv)
    return conv(F.relu(norm(x), inplace=True))


def _stem_keys(stem: str) -> tuple[str, ...]:
    if stem == "7x7":
        return ()
    return _STEM_KEYS if stem == "32-32-64" else _STEM_KEYS + _WIDE_STEM_KEYS


def _block_dilations(
    plan: StagePlan, num_blocks: int, multi_grid: Sequence[int] | None
) -> list[tuple[int, int]]:
    """For each block, the dilations of the kernel that may stride and of the one behind it."""
    if multi_grid is not None:
        return [(plan.dilation * factor, plan.dilation * factor) for factor in multi_grid]
    first = (plan.first_dilation, plan.dilation)
    return [first] + [(plan.dilation, plan.dilation)] * (num_blocks - 1)


def _downsample(
    in_channels: int, out_channels: int, stride: int, norm: NormFactory
) -> nn.Sequential | None:
    """The convolution and norm of the shortcut; None where the input can be added as it is."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(conv2d(in_channels, out_channels, 1, stride=stride), norm(out_channels))


def _join(y: Tensor, norm: nn.Module, x: Tensor, downsample: nn.Sequential | None) -> Tensor:
    """ReLU of the sum of both branches, the main one still to be normalized."""
    if downsample is None:
        y, shortcut = norm(y), x
    else:
        conv, shortcut_norm = downsample
        y, shortcut = normalize_together([(y, norm), (conv(x), shortcut_norm)])
    return F.relu(y.add_(shortcut), inplace=True)
