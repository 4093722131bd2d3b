"""Forms that weights of other programs need, against formulas written down again."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from experiments import on_meta
from torch import nn

from segtrain.config import ModelConfig
from segtrain.models import build_backbone
from segtrain.models.blocks import FeatureChannels, Features
from segtrain.models.deeplab import DeepLabV3Head, DeepLabV3PlusHead
from segtrain.models.pspnet import PSPHead

CHANNELS = FeatureChannels(low=4, aux=6, out=20)


def config(arch="pspnet", backbone="resnet18", **options):
    return ModelConfig(arch=arch, backbone=backbone, head_channels=8, aux_channels=6, **options)


def head_of(kind, **options):
    torch.manual_seed(0)
    made = kind(config(**options), CHANNELS, num_classes=3, norm=nn.BatchNorm2d)
    return made.double().train()


def features(seed=1):
    generator = torch.Generator().manual_seed(seed)
    low, out = (
        torch.randn(2, c, h, w, generator=generator, dtype=torch.float64)
        for c, h, w in ((4, 13, 21), (20, 7, 11))
    )
    return Features(low, out, out)


def conv_norm_relu(x, conv, **geometry):
    y = F.conv2d(x, conv.weight, padding=conv.padding, dilation=conv.dilation, groups=conv.groups)
    return F.relu(F.batch_norm(y, None, None, training=True))


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_averaging_shortcut_is_the_mean_of_two_by_two_pixels_and_a_convolution():
    """At an odd border it is the mean of the pixels that there are."""
    torch.manual_seed(0)
    backbone = build_backbone(config(stem="32-32-64-avgpool", output_stride=32)).double()
    block = backbone.layer2[0].eval()
    x = torch.randn(2, 64, 7, 9, dtype=torch.float64)
    padded = F.pad(x, (0, 1, 0, 1), value=float("nan"))
    blocks = padded.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    shortcut = block.downsample[2](F.conv2d(blocks.nanmean(-1), block.downsample[1].weight))
    y = F.relu(block.bn1(F.conv2d(x, block.conv1.weight, stride=2, padding=1)))
    y = block.bn2(F.conv2d(y, block.conv2.weight, padding=1))
    with torch.no_grad():
        same(block(x.clone()), F.relu(y + shortcut))


def test_weights_of_strided_shortcuts_are_refused_by_averaging_ones():
    """Their keys differ, as in mmsegmentation and timm: equal keys would load without a word."""
    strided = on_meta(lambda: build_backbone(config(stem="32-32-64")))
    pooled = on_meta(lambda: build_backbone(config(stem="32-32-64-avgpool")))
    assert "layer2.0.downsample.0.weight" in strided.state_dict()
    assert "layer2.0.downsample.0.weight" not in pooled.state_dict()


@pytest.mark.parametrize("num_stages", [2, 3])
def test_backbone_of_fewer_stages_equals_the_beginning_of_torchvisions(num_stages):
    torch.manual_seed(0)
    reference = torchvision.models.resnet18().double().eval()
    stride = 2 ** (num_stages + 1)
    model = config(num_stages=num_stages, output_stride=stride)
    backbone = on_meta(lambda: build_backbone(model))
    state = {k: v for k, v in reference.state_dict().items() if k in backbone.state_dict()}
    assert len(state) == len(backbone.state_dict())
    backbone.load_state_dict(state, assign=True)
    backbone.eval()
    x = torch.randn(1, 3, 41, 66, dtype=torch.float64)
    with torch.no_grad():
        y = reference.maxpool(F.relu(reference.bn1(reference.conv1(x))))
        stages = [y := getattr(reference, f"layer{i}")(y) for i in range(1, num_stages + 1)]
        got = backbone(x)
    same(got, Features(stages[0], stages[-2], stages[-1]))
    assert backbone.channels == tuple(f.shape[1] for f in got)
    assert all(
        key.startswith(backbone.classifier_keys) for key in set(reference.state_dict()) - set(state)
    )


def test_psp_head_with_the_kernels_of_smp_equals_the_formula():
    """A bias instead of a norm at bin 1, 1x1 after pooling, 3x3 as the classifier."""
    head = head_of(PSPHead, variant="smp")
    nn.init.uniform_(head.ppm.convs[0].bias)
    x = features().out
    branches = [x]
    for size, conv in zip((1, 2, 3, 6), head.ppm.convs, strict=True):
        y = F.conv2d(F.adaptive_avg_pool2d(x, size), conv.weight, conv.bias)
        y = y if size == 1 else F.batch_norm(y, None, None, training=True)
        branches.append(F.interpolate(F.relu(y), size=(7, 11), mode="bilinear"))
    y = F.conv2d(torch.cat(branches, 1), head.conv.conv.weight)
    y = F.relu(F.batch_norm(y, None, None, training=True))
    y = F.conv2d(y, head.classifier.conv.weight, head.classifier.conv.bias, padding=1)
    same(head(features(), torch.ones(2, 8, 1, 1)), y)


def aspp_branches(aspp, x, *, norm_between):
    """The branches in the order [1x1, dilated, global], each conv, norm, ReLU."""
    dilated = [x] * 3
    if len(aspp.depthwise):
        dilated = [
            conv_norm_relu(x, conv)
            if norm_between
            else F.conv2d(x, conv.weight, padding=conv.padding, dilation=conv.dilation, groups=20)
            for conv in aspp.depthwise
        ]
    inputs = [x, *dilated, x.mean((2, 3), keepdim=True)]
    out = [conv_norm_relu(y, conv) for y, conv in zip(inputs, aspp.convs, strict=True)]
    return torch.cat([y.expand(-1, -1, 7, 11) for y in out], 1)


def test_deeplabv3_may_join_its_branches_by_the_3x3_convolution_alone():
    head = head_of(DeepLabV3Head, arch="deeplabv3", variant="mmseg")
    branches = aspp_branches(head.aspp, features().out, norm_between=True)
    y = conv_norm_relu(branches, head.conv.conv)
    assert head.conv.conv.weight.shape == (8, 40, 3, 3)
    same(
        head(features(), torch.ones(2, 8, 1, 1)),
        F.conv2d(y, head.classifier.conv.weight, head.classifier.conv.bias),
    )


def test_decoder_of_smp_equals_the_formula():
    """Nothing between the two parts of a separable convolution, one more before the features
    are joined, and one after."""
    options = {"arch": "deeplabv3plus", "separable": True, "align_corners": True}
    head = head_of(DeepLabV3PlusHead, variant="smp", **options)

    def separable(x, block):
        y = F.conv2d(x, block.depthwise.weight, padding=1, groups=x.shape[1])
        return conv_norm_relu(y, block.pointwise.conv)

    low, _, out = features()
    y = conv_norm_relu(aspp_branches(head.aspp, out, norm_between=False), head.aspp.project.conv)
    y = separable(y, head.aspp_conv)
    y = F.interpolate(y, size=(13, 21), mode="bilinear", align_corners=True)
    y = separable(torch.cat([conv_norm_relu(low, head.low.conv), y], 1), head.decoder[0])
    y = F.conv2d(y, head.classifier.conv.weight, head.classifier.conv.bias)
    assert len(head.decoder) == 1
    same(head(features(), torch.ones(2, 8, 1, 1)), y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "mobilenet_v2", "stem": "64-64-128"}, "stem: has no effect"),
        ({"backbone": "mobilenet_v2", "num_stages": 3}, "num_stages: has no effect"),
        ({"num_stages": 3, "multi_grid": (1, 2)}, "multi_grid: has no effect"),
        ({"arch": "deeplabv3", "ppm_channels": 8}, "ppm_channels: has no effect"),
        (
            {"backbone": "mobilenet_v2", "zero_init_residual": True},
            "zero_init_residual: has no eff",
        ),
        ({"pretrained": "DEFAULT", "zero_init_residual": True}, "with pretrained DEFAULT"),
        # The feature maps would be larger, and the dilations of the head those of smaller ones.
        ({"num_stages": 2, "output_stride": 16}, "num_stages 2 ends at stride 8"),
    ],
)
def test_option_that_cannot_act_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"backbone": "resnet18"} | options)
