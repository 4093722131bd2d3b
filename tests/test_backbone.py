"""Backbones against torchvision's, and dilation against the network it must contain."""

import pytest
import torch
from experiments import lively, on_meta
from torch import nn

from segtrain.config import ModelConfig
from segtrain.models import build_backbone


def torchvisions(name):
    import torchvision

    return torchvision.models.get_model(name)


def backbone_of(name, **options):
    return build_backbone(ModelConfig(backbone=name, **({"output_stride": 32} | options)))


def images(height, width, *, batch=1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, height, width, generator=generator)


def resnet_features(reference, x):
    x = reference.maxpool(reference.relu(reference.bn1(reference.conv1(x))))
    low = reference.layer1(x)
    aux = reference.layer3(reference.layer2(low))
    return low, aux, reference.layer4(aux)


def loaded(backbone, reference, classifier_keys):
    """`backbone`, made on meta, with the reference's tensors; keys must match both ways."""
    state = {k: v for k, v in reference.state_dict().items() if not k.startswith(classifier_keys)}
    assert list(state) == list(backbone.state_dict())
    backbone.load_state_dict(state, strict=True, assign=True)
    return backbone.eval()


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnet_equals_torchvision(name):
    reference = lively(lambda: torchvisions(name), seed=3)
    ours = loaded(on_meta(lambda: backbone_of(name)), reference, ("fc.",))
    x = images(40, 57)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), resnet_features(reference, x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "stop", "aux"), [("mobilenet_v2", 18, 13), ("mobilenet_v3_large", 17, 12)]
)
def test_mobilenet_equals_torchvision(name, stop, aux):
    """The dilated form of V3 is that of torchvision's DeepLabV3, in tests/test_convert.py."""
    reference = lively(lambda: torchvisions(name), seed=5)
    ours = loaded(on_meta(lambda: backbone_of(name)), reference, ("classifier.", "features.18."))
    y = x = images(40, 57)
    with torch.no_grad():
        layers = [y := layer(y) for layer in reference.features[:stop]]
        torch.testing.assert_close(ours(x), (layers[3], layers[aux], layers[-1]))


@pytest.mark.parametrize("name", ["resnet34", "resnet101"])
def test_larger_resnets_have_the_shapes_of_torchvisions(name):

    ours = on_meta(lambda: backbone_of(name))
    reference = on_meta(lambda: torchvisions(name))
    shapes = {key: value.shape for key, value in reference.state_dict().items()}
    del shapes["fc.weight"], shapes["fc.bias"]
    assert {key: value.shape for key, value in ours.state_dict().items()} == shapes


@pytest.mark.parametrize(
    ("name", "output_stride"), [("resnet18", 8), ("mobilenet_v2", 8), ("mobilenet_v2", 16)]
)
def test_contracted_dilation_contains_the_strided_network(name, output_stride):
    """Every pixel of stride 32 is a pixel of the dilated output, borders included."""
    strided = lively(lambda: backbone_of(name), seed=7, dtype=torch.float64)
    dilated = on_meta(lambda: backbone_of(name, output_stride=output_stride))
    dilated.load_state_dict(strided.state_dict(), assign=True)
    dilated.eval()
    x = images(66, 101).double()
    step = 32 // output_stride
    with torch.no_grad():
        torch.testing.assert_close(dilated(x).out[..., ::step, ::step], strided(x).out)


def dilations(backbone, layer):
    """Of all 3x3 convolutions of a ResNet stage."""
    convs = [m for m in getattr(backbone, layer).modules() if isinstance(m, nn.Conv2d)]
    return [conv.dilation[0] for conv in convs if conv.kernel_size == (3, 3)]


MMSEG = {"variant": "mmseg"}


@pytest.mark.parametrize(
    ("depth", "options", "layer3", "layer4"),
    [
        (50, {"output_stride": 16, "multi_grid": (1, 2, 4)}, [1] * 6, [2, 4, 8]),  # detectron2
        (50, {"multi_grid": (1, 2, 4)}, [1] + [2] * 5, [4, 8, 16]),
        (50, {"output_stride": 16, "multi_grid": (1, 2, 4), **MMSEG}, [1] * 6, [1, 2, 4]),
        # Only the kernel that used to stride contracts.
        (18, {"variant": "paper"}, [1, 2, 2, 2], [2, 4, 4, 4]),
        (18, {"variant": "semseg"}, [2, 2, 2, 2], [4, 4, 4, 4]),
        (18, MMSEG, [1, 1, 2, 1], [2, 1, 4, 1]),
    ],
)
def test_dilations_of_resnets(depth, options, layer3, layer4):
    options = {"output_stride": 8} | options
    backbone = on_meta(lambda: backbone_of(f"resnet{depth}", **options))
    assert dilations(backbone, "layer2") == [1] * 4
    assert [dilations(backbone, f"layer{i}") for i in (3, 4)] == [layer3, layer4]
