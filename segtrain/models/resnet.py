"""ResNet (arXiv:1512.03385) with torchvision's state-dict keys.

torchvision's own cannot dilate a BasicBlock, has no deep stem and always contracts dilations.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from segtrain.config import ModelConfig
from segtrain.models.blocks import FeatureChannels, Features, StagePlan, conv2d, plan_stages
from segtrain.norm import NormFactory, norm_relu_conv, normalize_together

# Widths of the three 3x3 convolutions that replace the 7x7 one.
_DEEP_STEMS = {"64-64-128": (64, 64, 128), "32-32-64": (32, 32, 64)}

# Keys of a deep stem, which weights with a 7x7 stem cannot fill. The wide stem also changes the
# input of layer1.
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
        y = self.conv1(x)
        y = _norm_relu_conv(y, self.bn1, self.conv2, recompute=self.recompute_norm)
        return _norm_add_relu(y, self.bn2, x, self.downsample)


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
        y = self.conv1(x)
        y = _norm_relu_conv(y, self.bn1, self.conv2, recompute=self.recompute_norm)
        y = _norm_relu_conv(y, self.bn2, self.conv3, recompute=self.recompute_norm)
        return _norm_add_relu(y, self.bn3, x, self.downsample)


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
            the one that lost its stride.
        multi_grid: factors on the dilation of the last stage, one a block, as in DeepLabV3
            (arXiv:1706.05587, section 4.2.1) and detectron2: at stride 16, [1, 2, 4] gives 2, 4, 8.
            `contract_dilation` does not touch such a stage. mmsegmentation reads the numbers as the
            dilations themselves.
        recompute_norm: memory for time, see `segtrain.norm.norm_relu_conv`.

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
        block, depths = _DEPTHS[name]
        if multi_grid is not None and len(multi_grid) != depths[-1]:
            raise ValueError(f"multi_grid: expected {depths[-1]} numbers, got {multi_grid}")
        self.name = name
        self.recompute_norm = recompute_norm
        self.channels = FeatureChannels(*(w * block.expansion for w in (64, 256, 512)))
        self.stem_keys: tuple[str, ...] = ()
        if stem == "7x7":
            channels = 64
            self.conv1, self.bn1 = conv2d(3, channels, 7, stride=2), norm(channels)
        else:
            self.stem_keys = _STEM_KEYS + (_WIDE_STEM_KEYS if stem == "64-64-128" else ())
            first, second, channels = _DEEP_STEMS[stem]
            self.conv1, self.bn1 = conv2d(3, first, 3, stride=2), norm(first)
            self.conv2, self.bn2 = conv2d(first, second, 3), norm(second)
            self.conv3, self.bn3 = conv2d(second, channels, 3), norm(channels)

        plans = plan_stages(
            (1, 2, 2, 2),
            stem_stride=4,
            output_stride=output_stride,
            contract_dilation=contract_dilation,
        )
        grids = (None, None, None, multi_grid)
        for i, (plan, depth, grid) in enumerate(zip(plans, depths, grids, strict=True)):
            width = 64 * 2**i
            blocks = []
            for j, dilations in enumerate(_block_dilations(plan, depth, grid)):
                stride = plan.stride if j == 0 else 1
                options = {"norm": norm, "recompute_norm": recompute_norm}
                blocks.append(block(channels, width, stride=stride, dilations=dilations, **options))
                channels = width * block.expansion
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))

    def forward(self, images: Tensor) -> Features:
        """Features of normalized images (N, 3, H, W)."""
        x, last_norm = self.conv1(images), self.bn1
        if self.stem_keys:
            x = _norm_relu_conv(x, self.bn1, self.conv2, recompute=self.recompute_norm)
            x = _norm_relu_conv(x, self.bn2, self.conv3, recompute=self.recompute_norm)
            last_norm = self.bn3
        x = F.max_pool2d(F.relu(last_norm(x), inplace=True), 3, stride=2, padding=1)
        low = self.layer1(x)
        aux = self.layer3(self.layer2(low))
        return Features(low, aux, self.layer4(aux))


def build_resnet(model: ModelConfig, *, norm: NormFactory) -> ResNet:
    """The ResNet that `model` describes."""
    return ResNet(
        model.backbone,
        output_stride=model.output_stride,
        stem=model.stem,
        contract_dilation=model.contract_dilation,
        multi_grid=model.multi_grid,
        norm=norm,
        recompute_norm=model.recompute_norm,
    )


def _norm_relu_conv(x: Tensor, norm: nn.Module, conv: nn.Conv2d, *, recompute: bool) -> Tensor:
    if recompute:
        return norm_relu_conv(x, norm, conv)
    return conv(F.relu(norm(x), inplace=True))


def _norm_add_relu(
    y: Tensor, norm: nn.Module, x: Tensor, downsample: nn.Sequential | None
) -> Tensor:
    """relu(norm(y) + downsample(x)), with one collective for both norms."""
    if downsample is None:
        y, shortcut = norm(y), x
    else:
        conv, shortcut_norm = downsample
        y, shortcut = normalize_together([(y, norm), (conv(x), shortcut_norm)])
    return F.relu(y.add_(shortcut), inplace=True)


def _downsample(
    in_channels: int, out_channels: int, stride: int, norm: NormFactory
) -> nn.Sequential | None:
    """The convolution and norm of the shortcut; None where the input can be added as it is."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(conv2d(in_channels, out_channels, 1, stride=stride), norm(out_channels))


def _block_dilations(
    plan: StagePlan, num_blocks: int, multi_grid: Sequence[int] | None
) -> list[tuple[int, int]]:
    """For each block, the dilations of the kernel that may stride and of the one after it."""
    if multi_grid is not None:
        return [(plan.dilation * factor, plan.dilation * factor) for factor in multi_grid]
    first = (plan.first_dilation, plan.dilation)
    return [first] + [(plan.dilation, plan.dilation)] * (num_blocks - 1)
