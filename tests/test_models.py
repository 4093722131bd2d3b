"""Heads against formulas written down again, and the contract of whole models."""

from functools import partial
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from experiments import on_meta
from torch import nn
from torch.profiler import ProfilerActivity, profile

from segtrain.config import ModelConfig
from segtrain.models import BACKBONES, MODELS, build_model
from segtrain.models.blocks import FeatureChannels, Features
from segtrain.models.deeplab import ASPP, DeepLabV3PlusHead
from segtrain.models.pspnet import PSPHead, PyramidPooling, adaptive_avg_pools
from segtrain.norm import SyncBatchNorm2d
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


@pytest.mark.parametrize("align_corners", [False, True])
def test_psp_head_equals_the_formula(align_corners):
    """Pyramid pooling with torch's own adaptive pooling, in the order [x, p1, p2, p3, p6]."""
    torch.manual_seed(0)
    config = small(align_corners=align_corners)
    channels = FeatureChannels(low=4, aux=6, out=20)
    head = PSPHead(config, channels, num_classes=3, norm=nn.BatchNorm2d).double().train()
    x = normal(2, 20, 7, 11, dtype=torch.float64)
    resize = partial(F.interpolate, size=(7, 11), mode="bilinear", align_corners=align_corners)
    branches = [x]
    for size, conv, norm in zip((1, 2, 3, 6), head.ppm.convs, head.ppm.norms, strict=True):
        assert conv.weight.shape == (5, 20, 1, 1)
        y = F.conv2d(F.adaptive_avg_pool2d(x, size), conv.weight)
        y = F.batch_norm(y, None, None, norm.weight, norm.bias, training=True)
        branches.append(resize(F.relu(y)))
    y = F.conv2d(torch.cat(branches, 1), head.conv.conv.weight, padding=1)
    y = F.relu(F.batch_norm(y, None, None, training=True))
    mask = torch.ones(2, 8, 1, 1, dtype=torch.float64)
    mask[0, 3] = 0
    expected = F.conv2d(y * mask, head.classifier.conv.weight)
    actual = head(Features(x, x, x), mask)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_pooling_equals_that_of_adaptive_pooling(layout):
    x = normal(2, 3, 10, 7, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    weights = [normal(2, 3, size, size, seed=size, dtype=torch.float64) for size in (2, 6)]
    ours = sum((p * w).sum() for p, w in zip(adaptive_avg_pools(x, (2, 6)), weights, strict=True))
    theirs = sum((F.adaptive_avg_pool2d(x, w.shape[-1]) * w).sum() for w in weights)
    torch.testing.assert_close(*(torch.autograd.grad(loss, x) for loss in (ours, theirs)))


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


def test_exported_pyramid_pooling_is_right_at_sizes_it_was_not_traced_with():
    torch.manual_seed(0)
    module = PyramidPooling(8, (1, 2, 3, 6), norm=nn.BatchNorm2d, align_corners=False).eval()
    height, width = torch.export.Dim("height", min=2), torch.export.Dim("width", min=2)
    program = torch.export.export(
        module, (normal(1, 8, 9, 12),), dynamic_shapes=({2: height, 3: width},)
    )
    for size in ((9, 12), (5, 31), (40, 2)):
        x = normal(1, 8, *size)
        torch.testing.assert_close(program.module()(x), module(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"backbone": "resnet18"},
        {"arch": "deeplabv3", "backbone": "mobilenet_v3_large"},
        {"arch": "deeplabv3plus", "backbone": "mobilenet_v2"},
        {"backbone": "resnet18", "variant": "smp", "num_stages": 2},
        {"backbone": "resnet18", "variant": "smp", "arch": "deeplabv3plus", "separable": True},
        {"backbone": "resnet18", "variant": "mmseg", "arch": "deeplabv3"},
        {"backbone": "resnet18", "variant": "vainf", "arch": "deeplabv3plus", "separable": True},
        {"backbone": "mobilenet_v3_large", "variant": "torchvision"},
        {"backbone": "resnet18", "ppm_channels": 24},
    ],
)
def test_every_parameter_learns_and_logits_have_the_size_of_the_image(options):
    """A parameter without a gradient is never trained, and its bucket is sent late."""
    model = built(small(**options)).train()
    logits = model(normal(2, 3, 33, 50))
    assert logits.out.shape == logits.aux.shape == (2, 5, 33, 50)
    (logits.out.square().sum() + logits.aux.square().sum()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("output_stride", [8, 16, 32])
def test_images_of_any_size_are_accepted(arch, output_stride):
    model = built(small(arch, output_stride=output_stride)).eval()
    with torch.no_grad():
        for height, width in ((output_stride, 2 * output_stride), (71, 33), (1, 5)):
            logits = model(normal(1, 3, height, width))
            assert logits.out.shape == (1, 5, height, width)


def test_auxiliary_head_runs_in_training_only_and_its_keys_stay():
    model = built(small()).train()
    x = normal(2, 3, 32, 40)
    keys = list(model.state_dict())
    assert model(x).aux is not None
    assert model.eval()(x).aux is None
    assert list(model.state_dict()) == keys
    assert any(key.startswith("aux_head.") for key in keys)


def test_model_without_auxiliary_head_has_none():
    model = built(small().model_copy(update={"aux_head": False, "aux_channels": 256})).train()
    assert model.aux_head is None
    assert model(normal(2, 3, 32, 40)).aux is None
    assert model.dropout_channels == (8, None)


@pytest.mark.parametrize(("option", "table"), [("arch", MODELS), ("backbone", BACKBONES)])
def test_the_config_knows_the_models_that_there_are(option, table):
    assert get_args(ModelConfig.model_fields[option].annotation) == tuple(table)


def test_heads_that_run_together_have_the_logits_of_separate_calls():
    model = built(small("deeplabv3plus", separable=True, dropout=0.5)).train()
    x, masks = normal(2, 3, 33, 40), (torch.rand(2, 8, 1, 1), torch.rand(2, 6, 1, 1))
    features = model.backbone(x)
    for logits, head, mask in zip(
        model(x, DropoutMasks(*masks)), (model.head, model.aux_head), masks, strict=True
    ):
        alone = F.interpolate(head(features, mask), size=(33, 40), mode="bilinear")
        torch.testing.assert_close(logits, alone, rtol=0, atol=0)


@pytest.mark.parametrize("arch", ARCHS)
def test_norm_kinds_share_their_keys(arch):
    def keys(norm):
        return list(on_meta(lambda: built(small(arch, "resnet18"), norm=norm)).state_dict())

    assert keys(SyncBatchNorm2d) == keys(nn.BatchNorm2d)


@pytest.mark.parametrize("backbone", ["resnet18", "mobilenet_v2"])
def test_norm_factory_makes_every_norm_layer_as_it_is(backbone):
    made = []

    def norm(channels):
        made.append(nn.BatchNorm2d(channels, eps=0.002, momentum=0.3))
        return made[-1]

    model = built(small("deeplabv3plus", backbone, separable=True), norm=norm)
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert set(map(id, layers)) <= set(map(id, made))
    assert {(m.eps, m.momentum) for m in layers} == {(0.002, 0.3)}


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


def test_model_without_dropout_asks_for_no_masks():
    model = built(small(dropout=0.0)).train()
    x = normal(2, 3, 32, 40)
    assert model.dropout_channels == (None, None)
    torch.testing.assert_close(model(x), model(x), rtol=0, atol=0)


def test_aligned_corners_put_feature_pixels_on_image_pixels():
    """An input of 8 k + 1, as semseg's 713: every eighth logit is one of the network's own."""
    model = built(small(align_corners=True)).eval()
    x = normal(1, 3, 41, 57)
    with torch.no_grad():
        own = model.head(model.backbone(x), None)
        torch.testing.assert_close(model(x).out[..., ::8, ::8], own, rtol=1e-5, atol=1e-6)


def test_logits_are_float32_under_autocast_and_float64_stays():
    model = built(small()).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(normal(2, 3, 32, 40))
    assert {logits.out.dtype, logits.aux.dtype} == {torch.float32}
    assert model.double()(normal(2, 3, 32, 40).double()).out.dtype == torch.float64


@pytest.mark.parametrize(
    ("output_stride", "rates"), [(8, [12, 24, 36]), (16, [6, 12, 18]), (32, [3, 6, 9])]
)
@pytest.mark.parametrize("separable", [False, True])
def test_aspp_rates_follow_the_stride(output_stride, rates, separable):
    config = small("deeplabv3", output_stride=output_stride, separable=separable)
    aspp = on_meta(lambda: build_model(config, num_classes=5)).head.aspp
    dilated = aspp.depthwise if separable else aspp.convs[1:4]
    assert [conv.dilation for conv in dilated] == [(rate, rate) for rate in rates]
    assert {conv.groups for conv in dilated} == {320 if separable else 1}


def test_separable_aspp_equals_the_formula():
    torch.manual_seed(0)
    config = ModelConfig(arch="deeplabv3", separable=True, aspp_rates=(2, 3))
    aspp = ASPP(config, 6, 4, norm=nn.BatchNorm2d, project_kernel=1).double().eval()
    x = normal(1, 6, 9, 7, dtype=torch.float64)
    scale = (1 + 1e-5) ** -0.5  # of an untrained norm layer in evaluation
    branches = [F.conv2d(x, aspp.convs[0].weight)]
    for i, rate in enumerate((2, 3)):
        y = F.conv2d(x, aspp.depthwise[i].weight, padding=rate, dilation=rate, groups=6)
        branches.append(F.conv2d(F.relu(y * scale), aspp.convs[i + 1].weight))
    mean = F.conv2d(F.adaptive_avg_pool2d(x, 1), aspp.convs[3].weight)
    branches.append(F.interpolate(mean, size=(9, 7)))
    joined = torch.cat([F.relu(y * scale) for y in branches], 1)
    expected = F.relu(F.conv2d(joined, aspp.project.conv.weight) * scale)
    torch.testing.assert_close(aspp(x), expected, rtol=0, atol=1e-12)


def test_decoder_joins_low_level_features_first():
    torch.manual_seed(0)
    config = ModelConfig(arch="deeplabv3plus", head_channels=8, low_level_channels=3)
    channels = FeatureChannels(low=4, aux=6, out=10)
    head = DeepLabV3PlusHead(config, channels, num_classes=5, norm=nn.BatchNorm2d).eval()
    assert head.decoder[0].conv.weight.shape == (8, 3 + 8, 3, 3)
    head.decoder[0].conv.weight.data[:, :3] = 0
    low, out = normal(1, 4, 16, 24), normal(1, 10, 8, 12)
    first = head(Features(low, low, out), None)
    assert first.shape == (1, 5, 16, 24)
    torch.testing.assert_close(head(Features(-low, low, out), None), first, rtol=0, atol=0)


def test_semseg_pspnet_has_its_known_extent():
    """61 norm layers of 29,568 channels: semseg's PSPNet-50."""
    config = ModelConfig(stem="64-64-128", variant="semseg", align_corners=True)
    model = on_meta(lambda: build_model(config, num_classes=19))
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert (len(norms), sum(m.num_features for m in norms)) == (61, 29_568)


def test_convolutions_and_classifiers_start_with_the_variance_of_their_recipe():
    head = built(ModelConfig(backbone="resnet18")).head
    weight = head.conv.conv.weight  # He: 2 / fan_out
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.02)
    assert head.classifier.conv.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert head.classifier.conv.bias.tolist() == [0] * 5
