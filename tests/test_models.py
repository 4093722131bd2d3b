"""Heads against formulas written down again, and the contract of whole models."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from experiments import on_meta
from torch import nn
from torch.profiler import ProfilerActivity, profile

from segtrain.config import ModelConfig
from segtrain.config.section import RESNETS
from segtrain.models import BACKBONES, MODELS, build_backbone, build_model
from segtrain.models.blocks import FeatureChannels, Features
from segtrain.models.deeplab import DeepLabV3Head
from segtrain.models.pspnet import adaptive_avg_pools
from segtrain.models.resnet import DEPTHS
from segtrain.types import DropoutMasks

ARCHS = ("pspnet", "deeplabv3", "deeplabv3plus")
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def small(arch="pspnet", backbone="mobilenet_v2", **options):
    return ModelConfig(arch=arch, backbone=backbone, head_channels=8, aux_channels=6, **options)


def built(model, *, num_classes=5, seed=0, **options):
    torch.manual_seed(seed)
    return build_model(model, num_classes=num_classes, **options)


def normal(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pooling_equals_adaptive_pooling_at_every_size(dtype, layout):
    bins = (1, 2, 3, 6, 7)
    tolerance = 5e-7 if dtype == torch.float32 else 1e-15
    for height in (*range(1, 15), 90, 97):
        x = normal(2, 3, height, 103 - height, seed=height, dtype=dtype).to(memory_format=layout)
        for pooled, size in zip(adaptive_avg_pools(x, bins), bins, strict=True):
            expected = F.adaptive_avg_pool2d(x, size)
            torch.testing.assert_close(pooled, expected, rtol=0, atol=tolerance)


def test_pooling_is_exact_under_autocast():
    """Half-precision products would be off by 4e-3."""
    x = normal(1, 3, 61, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (pooled,) = adaptive_avg_pools(x + 10, (3,))
    torch.testing.assert_close(pooled, F.adaptive_avg_pool2d(x + 10, 3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_heads_keep_the_memory_format(arch, layout):
    """torch.cat loses it if one input has another one; all that follows would be slower."""
    model = built(small(arch)).to(memory_format=layout)
    seen, layers = [], [model.head.conv, model.head.classifier]
    if arch != "pspnet":
        layers.append(model.head.aspp.project)
    for layer in layers:
        layer.conv.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model.eval()(normal(2, 3, 65, 97).contiguous(memory_format=layout))
    assert len(seen) == len(layers)
    assert all(x.is_contiguous(memory_format=layout) for x in seen), [x.stride() for x in seen]


@pytest.mark.parametrize("backbone", ["mobilenet_v2", "mobilenet_v3_large"])
def test_activations_do_not_copy_their_input(backbone):
    """In place, torch copies what their gradient needs first."""
    net = built(small(backbone=backbone)).train().backbone
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        net(normal(2, 3, 32, 32))
    assert "aten::clone" not in {event.name for event in profiler.events()}


@pytest.mark.parametrize(
    "options",
    [
        {"arch": "deeplabv3", "backbone": "mobilenet_v3_large"},
        {"arch": "deeplabv3plus", "backbone": "mobilenet_v2"},
        {"backbone": "resnet18", "variant": "smp", "num_stages": 2, "ppm_channels": 24},
        {"backbone": "resnet18", "variant": "smp", "arch": "deeplabv3plus", "separable": True},
        {"backbone": "resnet18", "variant": "mmseg", "arch": "deeplabv3"},
        {"backbone": "resnet18", "variant": "vainf", "arch": "deeplabv3plus", "separable": True},
        {"backbone": "mobilenet_v3_large", "variant": "torchvision"},
    ],
)
def test_every_parameter_learns_and_logits_have_the_size_of_the_image(options):
    """A parameter without a gradient is never trained, and its bucket is sent late."""
    model = built(small(**options)).train()
    logits = model(normal(2, 3, 33, 50))
    assert logits.out.shape == logits.aux.shape == (2, 5, 33, 50)
    (logits.out.square().sum() + logits.aux.square().sum()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_auxiliary_head_runs_in_training_only_and_its_keys_stay():
    without = built(small().model_copy(update={"aux_head": False})).train()
    assert without(normal(2, 3, 32, 40)).aux is None
    assert without.dropout_channels == (8, None)
    model = built(small()).train()
    x = normal(2, 3, 32, 40)
    keys = list(model.state_dict())
    assert model(x).aux is not None
    assert model.eval()(x).aux is None
    assert list(model.state_dict()) == keys
    assert any(key.startswith("aux_head.") for key in keys)


def test_the_config_knows_the_models_that_there_are():
    for option, table in (("arch", MODELS), ("backbone", BACKBONES)):
        assert get_args(ModelConfig.model_fields[option].annotation) == tuple(table)
    assert tuple(DEPTHS) == RESNETS


def test_heads_that_run_together_have_the_logits_of_separate_calls():
    model = built(small("deeplabv3plus", separable=True, dropout=0.5)).train()
    x, masks = normal(2, 3, 33, 40), (torch.rand(2, 8, 1, 1), torch.rand(2, 6, 1, 1))
    features = model.backbone(x)
    for logits, head, mask in zip(
        model(x, DropoutMasks(*masks)), (model.head, model.aux_head), masks, strict=True
    ):
        alone = F.interpolate(head(features, mask), scale_factor=head.stride, mode="bilinear")
        torch.testing.assert_close(logits, alone[..., :33, :40], rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"output_stride": 32},
        {"backbone": "mobilenet_v3_large", "output_stride": 16},
        {"backbone": "resnet18", "num_stages": 2, "output_stride": 8},
    ],
)
def test_features_have_the_strides_of_their_backbone(options):
    with torch.device("meta"):
        backbone = build_backbone(small(**options))
        features = backbone(torch.empty(1, 3, 257, 353))
    for x, stride in zip(features, backbone.strides, strict=True):
        assert x.shape[2:] == (-(-257 // stride), -(-353 // stride))


def test_own_networks_see_things_where_they_are_at_any_size():
    """41 pixels are 5 strides of 8 and one more; the others stretch 48 pixels over them."""
    for variant, wrong in (("paper", 0), ("torchvision", 6)):
        model = built(small("deeplabv3", variant=variant)).eval()
        model.head.forward = lambda *_: (8 * torch.arange(6) + 3.5).expand(1, 1, 6, 6)  # centres
        found = model(torch.zeros(1, 3, 41, 41)).out[0, 0, 0]
        assert (found - torch.arange(41))[4:38].abs().max().round() == wrong


def test_low_level_features_and_those_over_them_lie_over_the_same_pixels():
    head = built(small("deeplabv3plus", output_stride=16, num_stages=4)).eval().head
    head.aspp_conv = lambda _: (4 * torch.arange(6) + 1.5).expand(1, 8, 6, 6)
    low = torch.arange(21.0).expand(1, 24, 21, 21)
    seen = []
    head.decoder[0].forward = lambda x: seen.append(x) or x
    head.join(Features(low, low, normal(1, 320, 6, 6)))
    assert torch.equal(seen[0][0, -1, 0, 2:], torch.arange(2.0, 21.0))


@pytest.mark.parametrize(
    ("backbone", "eps"),
    [("resnet18", {0.002}), ("mobilenet_v2", {0.002}), ("mobilenet_v3_large", {0.002, 0.001})],
)
def test_norm_factory_makes_every_norm_layer_as_it_is(backbone, eps):
    """But for the eps of MobileNetV3."""
    made = []

    def norm(channels):
        made.append(nn.BatchNorm2d(channels, eps=0.002, momentum=0.3))
        return made[-1]

    model = built(small("deeplabv3plus", backbone, separable=True), norm=norm)
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert set(map(id, layers)) <= set(map(id, made))
    assert {m.eps for m in layers} == eps
    assert {m.momentum for m in layers} == {0.3}


@pytest.mark.parametrize(("output_stride", "rates"), [(16, [6, 12, 18]), (32, [3, 6, 9])])
def test_aspp_rates_follow_the_stride(output_stride, rates):
    aspp = on_meta(lambda: built(small("deeplabv3", output_stride=output_stride))).head.aspp
    assert [conv.dilation[0] for conv in aspp.convs[1:4]] == rates


def test_masks_replace_the_dropout_of_the_model():
    model = built(small("deeplabv3plus", dropout=0.5)).train()
    assert model.dropout_channels == (8, 6)
    assert model.dropout_p == 0.5
    x = normal(2, 3, 32, 40)
    nothing = DropoutMasks(torch.zeros(2, 8, 1, 1), torch.zeros(2, 6, 1, 1))
    logits = model(x, nothing)
    for logit, head in ((logits.out, model.head), (logits.aux, model.aux_head)):
        bias = head.classifier.conv.bias.view(1, 5, 1, 1)
        torch.testing.assert_close(logit, bias.expand_as(logit))
    model.eval()  # which never drops
    torch.testing.assert_close(model(x, nothing).out, model(x).out, rtol=0, atol=0)


def test_without_masks_dropout_draws_whole_channels_from_torchs_generator():
    model = built(small(dropout=0.5)).train()
    classifier = model.head.classifier
    classifier.conv.weight.data = torch.eye(5, 8).view(5, 8, 1, 1)
    x = torch.ones(40, 8, 2, 3)
    torch.manual_seed(3)
    first = classifier(x, None)
    torch.manual_seed(3)
    torch.testing.assert_close(classifier(x, None), first, rtol=0, atol=0)
    assert first.unique().tolist() == [0, 2]
    assert (first == first[..., :1, :1]).all()


def test_logits_are_float32_under_autocast_and_float64_stays():
    model = built(small()).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(normal(2, 3, 32, 40))
    assert {logits.out.dtype, logits.aux.dtype} == {torch.float32}
    assert model.double()(normal(2, 3, 32, 40).double()).out.dtype == torch.float64


def test_convolutions_and_classifiers_start_with_the_variance_of_their_recipe():
    head = built(ModelConfig(backbone="resnet18")).head
    weight = head.conv.conv.weight  # He: 2 / fan_out
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.02)
    assert head.classifier.conv.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert head.classifier.conv.bias.tolist() == [0] * 5


# Forms that weights of other programs need, against formulas written down again.


def head_of(kind, **options):
    torch.manual_seed(0)
    channels = FeatureChannels(low=4, aux=6, out=20)
    made = kind(small(backbone="resnet18", **options), channels, num_classes=3, norm=nn.BatchNorm2d)
    return made.double().train()


def features():
    low, out = (normal(2, *shape, dtype=torch.float64) for shape in ((4, 13, 21), (20, 7, 11)))
    return Features(low, out, out)


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def conv_norm_relu(x, conv, **geometry):
    y = F.conv2d(x, conv.weight, padding=conv.padding, dilation=conv.dilation, groups=conv.groups)
    return F.relu(F.batch_norm(y, None, None, training=True))


def test_averaging_shortcut_is_the_mean_of_two_by_two_pixels_and_a_convolution():
    """At an odd border it is the mean of the pixels that there are."""
    torch.manual_seed(0)
    backbone = build_backbone(
        small(backbone="resnet18", stem="32-32-64-avgpool", output_stride=32)
    ).double()
    block = backbone.layer2[0].eval()
    x = torch.randn(2, 64, 7, 9, dtype=torch.float64)
    padded = F.pad(x, (0, 1, 0, 1), value=float("nan"))
    blocks = padded.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    shortcut = block.downsample[2](F.conv2d(blocks.nanmean(-1), block.downsample[1].weight))
    y = F.relu(block.bn1(F.conv2d(x, block.conv1.weight, stride=2, padding=1)))
    y = block.bn2(F.conv2d(y, block.conv2.weight, padding=1))
    with torch.no_grad():
        assert_same(block(x.clone()), F.relu(y + shortcut))


def test_deeplabv3_may_join_its_branches_by_the_3x3_convolution_alone():
    head = head_of(DeepLabV3Head, arch="deeplabv3", variant="mmseg")
    x = features().out
    inputs = [x, x, x, x, x.mean((2, 3), keepdim=True)]
    branches = [conv_norm_relu(y, c) for y, c in zip(inputs, head.aspp.convs, strict=True)]
    joined = torch.cat([y.expand(-1, -1, 7, 11) for y in branches], 1)
    assert head.conv.conv.weight.shape == (8, 40, 3, 3)
    y = conv_norm_relu(joined, head.conv.conv)
    expected = F.conv2d(y, head.classifier.conv.weight, head.classifier.conv.bias)
    assert_same(head(features(), torch.ones(2, 8, 1, 1)), expected)
