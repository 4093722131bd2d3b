"""Checkpoints of other programs: their models, written again or torchvision's own, and refusals.

Modules of mmsegmentation, segmentation_models.pytorch, semseg and VainF are written here after the
layout of their keys.
"""

import argparse
import copy
import json
import re
import sys
import types
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from experiments import lively, on_meta
from safetensors.torch import save_file
from torch import nn

from segtrain.checkpoint import load_model
from segtrain.checkpoint.trained import load_initial
from segtrain.config import override_config
from segtrain.desk.convert.class_choice import choose_classes
from segtrain.desk.convert.conversion import Conversion
from segtrain.desk.convert.converter import convert_file, detect, load_plan, make_config, translate
from segtrain.errors import CheckpointError, ConfigError
from segtrain.files import torch_file
from segtrain.models import build_model

NAMES = ("sky", "road", "pole", "tree", "sign")
K = len(NAMES)
SLOW = pytest.mark.slow("desk", "models")


def class_file(path, names=NAMES):
    path.write_text(f"classes: [{', '.join(names)}]\n")
    return str(path)


@pytest.fixture
def classes(tmp_path_factory):
    return class_file(tmp_path_factory.mktemp("classes") / "own.yaml")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)


def chosen(plan, classes, order=None):
    return choose_classes(plan, classes, order, own=Path("unused.classes.yaml"))


def converted(state, classes, *overrides, beside=None, ignored=()):
    """The converted model and its config, without a file between."""
    found = detect(state, beside or {}, ignored)
    config = make_config(found.plan, classes, overrides)
    return load_plan(found, chosen(found.plan, classes), config)[0], config


def images(height, width):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, 3, height, width, generator=generator)


def resize(x, size, align):
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=align)


def torchvisions(name, **options):
    import torchvision

    return torchvision.models.get_model(name, weights=None, **options)


def without_classifier(name="resnet18", **options):
    network = torchvisions(name, **options)
    del network.fc
    return network


def stages(network, x):
    """The outputs of layer1 to layer4."""
    y = network.maxpool(network.relu(network.bn1(network.conv1(x))))
    return [y := getattr(network, f"layer{i}")(y) for i in (1, 2, 3, 4)]


def assert_equal(model, theirs, size, *, aux=False):
    """Logits in float64; those of `theirs` may be several, with names."""
    x, model, theirs = images(*size).double(), model.double(), copy.deepcopy(theirs).double()
    with torch.no_grad():
        expected = theirs(x)
        got = [model(x).out]
        if aux:
            raw = model.aux_head(model.backbone(x), None)
            got.append(resize(raw, x.shape[-2:], model.align_corners))
    for e, g in zip(expected.values() if aux else [expected], got, strict=True):
        assert e.std() > 1e-3
        assert (e - g).abs().max() < 1e-12 * e.abs().max()


# torchvision


@pytest.mark.parametrize(
    ("name", "width"),
    [pytest.param("deeplabv3_resnet50", 305, marks=SLOW), ("deeplabv3_mobilenet_v3_large", 610)],
)
def test_torchvisions_logits_are_those_of_the_converted_model(name, width, classes):
    """So wide that a kernel of the largest rate, 36, reaches from one feature to another."""
    options = {"weights_backbone": None, "num_classes": K, "aux_loss": True}
    reference = lively(lambda: torchvisions(name, **options))
    model, config = converted(reference.state_dict(), classes)
    assert config.data.short_side_px == 520
    assert "antialias" in detect(reference.state_dict(), {}).plan.notes[0]
    assert_equal(model, reference, (33, width), aux=True)


@pytest.fixture(scope="module")
def deeplabv3():
    """The keys and shapes of torchvision's DeepLabV3 with an auxiliary head."""
    options = {"weights_backbone": None, "aux_loss": True}
    return on_meta(lambda: torchvisions("deeplabv3_resnet50", **options)).state_dict()


# semseg


def conv_bn(c, k, width, **options):
    conv = nn.Conv2d(c, width, k, **{"padding": k // 2, "bias": False} | options)
    return [conv, nn.BatchNorm2d(width), nn.ReLU()]


class SemsegPSPNet(nn.Module):
    """PSPNet-50 by the layout of semseg's keys: layer0 is the stem, all blocks are dilated."""

    def __init__(self):
        super().__init__()
        resnet = torchvisions("resnet50")
        resnet.inplanes = 128
        resnet.layer1 = resnet._make_layer(type(resnet.layer2[0]), 64, 3)
        stem = [*conv_bn(3, 3, 64, stride=2), *conv_bn(64, 3, 64), *conv_bn(64, 3, 128)]
        self.layer0 = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1))
        self.layer1, self.layer2 = resnet.layer1, resnet.layer2
        self.layer3, self.layer4 = resnet.layer3, resnet.layer4
        for layer, dilation in ((self.layer3, 2), (self.layer4, 4)):
            for name, conv in layer.named_modules():
                if name.endswith("conv2"):
                    conv.stride, conv.dilation, conv.padding = (1, 1), (dilation,) * 2, dilation
                elif name.endswith("downsample.0"):
                    conv.stride = (1, 1)
        self.ppm = nn.Module()
        self.ppm.features = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(b), *conv_bn(2048, 1, 512)) for b in (1, 2, 3, 6)
        )
        self.cls = nn.Sequential(*conv_bn(4096, 3, 16), nn.Dropout2d(0.1), nn.Conv2d(16, K, 1))
        self.aux = nn.Sequential(*conv_bn(1024, 3, 8), nn.Dropout2d(0.1), nn.Conv2d(8, K, 1))

    def forward(self, x):
        size = x.shape[-2:]
        aux = self.layer3(self.layer2(self.layer1(self.layer0(x))))
        x = self.layer4(aux)
        pooled = [resize(f(x), x.shape[-2:], True) for f in self.ppm.features]
        out = self.cls(torch.cat([x, *pooled], 1))
        return {"out": resize(out, size, True), "aux": resize(self.aux(aux), size, True)}


def test_semsegs_logits_are_those_of_the_converted_model(classes):
    """Its sizes are 8 k + 1."""
    reference = lively(SemsegPSPNet)
    state = {f"module.{key}": value for key, value in reference.state_dict().items()}
    model, config = converted(state, classes)
    assert config.model.stem == "64-64-128"
    assert_equal(model, reference, (41, 65), aux=True)


# VainF


class Separable(nn.Module):
    """VainF's AtrousSeparableConvolution: nothing stands between the two."""

    def __init__(self, c, width, rate=1):
        super().__init__()
        depthwise = nn.Conv2d(c, c, 3, padding=rate, dilation=rate, groups=c, bias=False)
        self.body = nn.Sequential(depthwise, nn.Conv2d(c, width, 1, bias=False))

    def forward(self, x):
        return self.body(x)


def aspp_of(c, rates, *, separable):
    """torchvision's, whose keys VainF and segmentation_models.pytorch share."""
    from torchvision.models.segmentation.deeplabv3 import ASPP

    aspp = ASPP(c, rates, 16)
    for rate, branch in zip(rates, aspp.convs[1:] if separable else (), strict=False):
        branch[0] = Separable(c, 16, rate)
    return aspp


class VainF(nn.Module):
    """DeepLabV3 or V3+ by the layout of VainF's keys."""

    def __init__(self, *, plus, separable=False, output_stride=16):
        super().__init__()
        dilate = [False, output_stride == 8, True]
        rates = (6, 12, 18) if output_stride == 16 else (12, 24, 36)
        self.backbone = without_classifier("resnet50", replace_stride_with_dilation=dilate)
        aspp = aspp_of(2048, rates, separable=separable)
        c = 12 + 16 if plus else 16
        conv = Separable(c, 16) if separable else nn.Conv2d(c, 16, 3, padding=1, bias=False)
        after = [conv, nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, K, 1)]
        self.classifier = nn.Module()
        self.classifier.classifier = nn.Sequential(*([] if plus else [aspp]), *after)
        if plus:
            self.classifier.aspp = aspp
            self.classifier.project = nn.Sequential(*conv_bn(256, 1, 12))
        self.plus = plus

    def forward(self, x):
        size, head = x.shape[-2:], self.classifier
        low, _, _, y = stages(self.backbone, x)
        if self.plus:
            low = head.project(low)
            y = torch.cat([low, resize(head.aspp(y), low.shape[-2:], False)], 1)
        return resize(head.classifier(y), size, False)


@pytest.mark.parametrize(
    ("options", "overrides"),
    [
        pytest.param({"plus": True}, (), marks=SLOW),
        ({"plus": True, "separable": True}, ()),
        pytest.param({"plus": False, "output_stride": 8}, ("model.output_stride=8",), marks=SLOW),
    ],
)
def test_vainfs_logits_are_those_of_the_converted_model(options, overrides, classes):
    reference = lively(lambda: VainF(**options))
    model, _ = converted(reference.state_dict(), classes, *overrides)
    assert_equal(model, reference, (33, 306))


# mmsegmentation


class ConvModule(nn.Module):
    """mmcv's."""

    def __init__(self, c, k, width, **options):
        super().__init__()
        self.conv, self.bn, self.relu = conv_bn(c, k, width, **options)

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))


class DepthwiseSeparable(nn.Module):
    def __init__(self, c, width, rate=1):
        super().__init__()
        self.depthwise_conv = ConvModule(c, 3, c, dilation=rate, padding=rate, groups=c)
        self.pointwise_conv = ConvModule(c, 1, width)

    def forward(self, x):
        return self.pointwise_conv(self.depthwise_conv(x))


def dilated(c, width, rate):
    return ConvModule(c, 3, width, dilation=rate, padding=rate)


class MmsegV3(nn.Module):
    """ASPPHead on a ResNet-18 of stride 32, whose keys are torchvision's."""

    def __init__(self, dilated=dilated):
        super().__init__()
        self.backbone = without_classifier()
        head = self.decode_head = nn.Module()
        head.image_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvModule(512, 1, 16))
        branches = [dilated(512, 16, rate) for rate in (2, 3, 4)]
        head.aspp_modules = nn.ModuleList([ConvModule(512, 1, 16), *branches])
        head.bottleneck = ConvModule(80, 3, 16)
        head.conv_seg = nn.Conv2d(16, K, 1)

    def decode(self, y, c1):
        head = self.decode_head
        branches = [head.image_pool(y), *(m(y) for m in head.aspp_modules)]
        return head.bottleneck(torch.cat([resize(z, y.shape[-2:], True) for z in branches], 1))

    def forward(self, x):
        c1, _, _, y = stages(self.backbone, x)
        return resize(self.decode_head.conv_seg(self.decode(y, c1)), x.shape[-2:], True)


class MmsegV3Plus(MmsegV3):
    """DepthwiseSeparableASPPHead."""

    def __init__(self):
        super().__init__(DepthwiseSeparable)
        self.decode_head.c1_bottleneck = ConvModule(64, 1, 12)
        parts = DepthwiseSeparable(28, 16), DepthwiseSeparable(16, 16)
        self.decode_head.sep_bottleneck = nn.Sequential(*parts)

    def decode(self, y, c1):
        y, c1 = super().decode(y, c1), self.decode_head.c1_bottleneck(c1)
        return self.decode_head.sep_bottleneck(torch.cat([resize(y, c1.shape[-2:], True), c1], 1))


class MmsegPSPNet(nn.Module):
    """PSPHead whose pyramid is not as wide as the features divided by its grids."""

    def __init__(self, width):
        super().__init__()
        self.backbone = without_classifier()
        head = self.decode_head = nn.Module()
        head.psp_modules = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(bins), ConvModule(512, 1, width))
            for bins in (1, 2, 3, 6)
        )
        head.bottleneck = ConvModule(512 + 4 * width, 3, width)
        head.conv_seg = nn.Conv2d(width, K, 1)

    def forward(self, x):
        head, y = self.decode_head, stages(self.backbone, x)[-1]
        grids = [resize(module(y), y.shape[-2:], False) for module in head.psp_modules]
        y = head.conv_seg(head.bottleneck(torch.cat([y, *grids], 1)))
        return resize(y, x.shape[-2:], False)


def test_mmsegmentations_pyramid_has_its_own_width(classes):
    theirs = lively(lambda: MmsegPSPNet(24))
    model, config = converted(theirs.state_dict(), classes, "model.output_stride=32")
    assert (config.model.ppm_channels, config.model.head_channels) == (24, 24)
    assert_equal(model, theirs, (41, 170))


MMSEG_CONFIG = """
norm_cfg = dict(requires_grad=True, type='SyncBN')
model = dict(
    backbone=dict(
        depth=18, dilations=(1, 1, 1, 1), norm_cfg=norm_cfg_,
        strides=(1, 2, 2, 2), style='pytorch', type='ResNet'),
    data_preprocessor=dict(
        bgr_to_rgb=True, mean=[100.0, 110.0, 120.0], std=[50.0, 60.0, 70.0]),
    decode_head=dict(
        align_corners=True, dilations=(1, 2, 3, 4), dropout_ratio=0.2, in_index=3,
        type='DepthwiseSeparableASPPHead'),
    test_cfg=dict(crop_size=(64, 96), mode='slide', stride=(48, 72)),
    type='EncoderDecoder')
work_dir = os.path.join('a', 'b')
""".replace("norm_cfg_", "dict(requires_grad=True, type='SyncBN')")


V0_NORMALIZE = "dict(type='Normalize', mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0], to_rgb=True)"
GRAY = "dict(type='LoadImageFromFile', color_type='gray')"
AUXILIARY = "auxiliary_head=dict(type='FCNHead', dilation=2),"


@pytest.fixture(scope="module")
def mmseg_model():
    return lively(MmsegV3Plus)


def meta(config=MMSEG_CONFIG, **more):
    return {"meta": {"cfg": config, "mmseg_version": "1.2.2", **more}}


@pytest.mark.parametrize("head", ["DepthwiseSeparableASPPHead", "ASPPHead"])
def test_mmsegmentations_logits_are_those_of_the_converted_model(head, mmseg_model, classes):
    """The ASPP and the decoder are concatenated in another order there."""
    theirs = lively(MmsegV3) if head == "ASPPHead" else mmseg_model
    text = MMSEG_CONFIG.replace("DepthwiseSeparableASPPHead", head)
    model, config = converted(theirs.state_dict(), classes, beside=meta(text))
    assert config.model.aspp_rates == (2, 3, 4)
    assert config.model.output_stride == 32
    assert config.model.dropout == 0.2
    assert config.data.mean == (100.0, 110.0, 120.0)
    window = config.eval.mode, config.eval.crop_size, config.eval.overlap
    assert window == ("slide", (64, 96), 0.25)
    assert_equal(model, theirs, (41, 170))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("type='ResNet'", "type='ResNeXt'", "backbone.type: expected 'ResNet' or 'ResNetV1c' or"),
        ("depth=18", "depth=50", "'resnet50', and the keys are those of resnet18"),
        ("'pytorch'", "'caffe'", "backbone.style: expected 'pytorch', found 'caffe'"),
        ("(1, 1, 1, 1)", "(1, 1, 2, 4)", "dilates only stages without a stride"),
        (
            "dilations=(1, 1, 1, 1), norm_cfg=dict(requires_grad=True, type='SyncBN'),\n"
            "        strides=(1, 2, 2, 2)",
            # No form of segtrain has mmsegmentation's heads on such a backbone.
            "dilations=(1, 1, 1, 2), strides=(1, 2, 2, 1), contract_dilation=False",
            "contract_dilation: expected True",
        ),
        ("(1, 2, 3, 4)", "(2, 3, 4, 5)", "expected 1 and the rates"),
        ("DepthwiseSeparableASPPHead", "PSPHead", "'PSPHead', and the keys are those of"),
        ("'SyncBN'", "'GN'", "backbone.norm_cfg.type: expected 'BN' or 'SyncBN'"),
        ("in_index=3", "in_index=2", "decode_head.in_index: expected 3 or -1, found 2"),
        ("in_index=3", "conv_cfg=dict(type='ConvWS')", "conv_cfg: expected None or {'type': 'Conv"),
        ("in_index=3", "scale=2", "decode_head.scale: 2: segtrain does not know this key"),
        ("bgr_to_rgb=True", "bgr_to_rgb=False", "expected one normalization, with RGB images"),
        ("bgr_to_rgb=True", "gamma=2", "data_preprocessor.gamma: 2"),
        ("'slide'", "'other'", "test_cfg.mode: expected 'whole' or 'slide', found 'other'"),
        ("type='EncoderDecoder'", "neck=dict(type='FPN')", "model.neck: expected None"),
        ("corners=True", "corners='False'", "decode_head.align_corners: expected False or True"),
        ("decode_head=dict(", f"{AUXILIARY} decode_head=dict(", "head.dilation: expected 1, fo"),
        ("work_dir", f"test_pipeline = [{V0_NORMALIZE}]\nw", "found 2: "),
        ("work_dir", f"test_pipeline = [{GRAY}]\nw", "color_type: expected 'color' or 'color_ig"),
    ],
)
def test_config_that_contradicts_the_keys_or_segtrain_is_refused(old, new, message, mmseg_model):
    text = MMSEG_CONFIG.replace(old, new)
    assert text != MMSEG_CONFIG
    with pytest.raises(CheckpointError, match=re.escape(message)):
        make_config(detect(mmseg_model.state_dict(), meta(text)).plan, "voc", ())


# Of keys that change no prediction; without a preprocessor.
V0_CONFIG = re.sub(r"data_preprocessor=dict\(.*?\),", "init_cfg=1,", MMSEG_CONFIG, flags=re.S)
V0_CONFIG = V0_CONFIG.replace("depth=18,", "depth=18, frozen_stages=1, norm_eval=True,")
V0_CONFIG = V0_CONFIG.replace("in_index=3", "conv_cfg=None, loss_decode=dict(type='DiceLoss')")


def v0_config(*steps):
    """The steps run; the variable `img_norm_cfg` may have another value than they."""
    first = "dict(type='Resize', keep_ratio=True)", "dict(type='RandomFlip')"
    inner = ", ".join([*first, *steps, "dict(type='Collect', keys=['img'])"])
    return f"""{V0_CONFIG}
img_norm_cfg = dict(mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5], to_rgb=True)
data = dict(test=dict(type='A', pipeline=[
    dict(type='LoadImageFromFile'), dict(type='MultiScaleFlipAug', img_scale=(2048, 512),
    flip=False, transforms=[{inner}])]))
"""


def test_config_of_version_0_is_read(mmseg_model):
    """Its normalization is the one of the steps that run; keys without effect are read over."""
    file = {"meta": {"config": v0_config(V0_NORMALIZE), "CLASSES": NAMES}}
    plan = detect(mmseg_model.state_dict(), file).plan
    data = {"data.mean": (1, 2, 3), "data.std": (4, 5, 6), "data.short_side_px": 512}
    assert plan.stated.items() >= (data | {"model.aspp_rates": (2, 3, 4)}).items()
    assert plan.class_names == NAMES
    assert plan.notes == ()
    bgr = V0_NORMALIZE.replace("True", "False")
    for text, message in ((v0_config(bgr), "with RGB images"), (v0_config(), "_rgb), found 0")):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            detect(mmseg_model.state_dict(), meta(text))


def assert_warned(plan, warning):
    assert len(plan.notes) == (warning is not None)
    if warning:
        assert re.search(f"^warning: .*{warning}", plan.notes[0])


RESIZE = "dict(type='Resize', scale=(2048, 512), keep_ratio=True)"
V0_RESIZE = """dict(type='MultiScaleFlipAug', img_scale=(2048, 512), flip=False, transforms=[
    dict(type='Resize', keep_ratio=True), dict(type='RandomFlip'), dict(type='Collect')])"""


@pytest.mark.parametrize(
    ("pipeline", "stride", "side", "overlap", "warning"),
    [
        (RESIZE, (48, 72), 512, 0.25, None),
        (RESIZE.replace("512", "1024"), (48, 72), 1024, 0.25, "at most 2048 px"),
        (V0_RESIZE, (48, 72), 512, 0.25, None),
        (V0_RESIZE.replace("flip=False", "flip=True"), (48, 72), 512, 0.25, "not converted"),
        ("dict(type='Resize', scale=(512, 512))", (48, 72), None, 0.25, "'Resize'.* is not conv"),
        ("dict(type='CLAHE')", (48, 72), None, 0.25, "{'type': 'CLAHE'}, which is not converted"),
        ("dict(type='LoadImageFromFile')", (43, 64), None, 0.3333, None),
        ("", (32, 32), None, None, "not converted"),
        ("", (80, 120), None, None, r"not converted: crop_size \(64, 96\), stride \(80, 120\)"),
    ],
)
def test_test_images_and_windows_are_read_or_warned_of(
    pipeline, stride, side, overlap, warning, mmseg_model
):
    text = MMSEG_CONFIG.replace("stride=(48, 72)", f"stride={stride}")
    text += f"test_pipeline = [{pipeline}]"
    plan = detect(mmseg_model.state_dict(), meta(text)).plan
    assert plan.stated.get("data.short_side_px") == side
    assert plan.stated.get("eval.overlap") == overlap
    assert ("eval.mode" in plan.stated) == (overlap is not None)
    assert_warned(plan, warning)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("depth=18", "depth=open('there', 'w')", "it has no model of literals"),
        ("depth=18", "depth=18, **dict(a=1)", "it has no model of literals"),
        ("work_dir", "model['backbone']['dilations']", r"line \d+ assigns no variable"),
        ("work_dir", "model.update(dict(backbone=1))\nw", r"line \d+ assigns no variable"),
        ("model =", "model =(", "it is not Python"),
    ],
)
def test_config_that_is_more_than_literals_is_neither_run_nor_read(
    old, new, why, mmseg_model, tmp_path
):
    """And a warning says that its options are assumed."""
    plan = detect(mmseg_model.state_dict(), meta(MMSEG_CONFIG.replace(old, new))).plan
    assert list(tmp_path.iterdir()) == []
    assert plan.stated == {}
    assert_warned(plan, rf"cannot be read \({why}\)")


# segmentation_models.pytorch


class SmpPSPNet(nn.Module):
    """Depth 3, no norm at bin 1, 1x1 after pooling and a 3x3 classifier."""

    def __init__(self):
        super().__init__()
        self.encoder = without_classifier()
        self.decoder = nn.Module()
        self.decoder.psp = nn.Module()
        self.decoder.psp.blocks = nn.ModuleList()
        for bin in (1, 2, 3, 6):
            conv = [nn.Conv2d(128, 32, 1), nn.Identity(), nn.ReLU()]
            conv = conv if bin == 1 else conv_bn(128, 1, 32)
            block = nn.Module()
            block.pool = nn.Sequential(nn.AdaptiveAvgPool2d(bin), nn.Sequential(*conv))
            self.decoder.psp.blocks.append(block)
        self.decoder.conv = nn.Sequential(*conv_bn(256, 1, 8))
        self.segmentation_head = nn.Sequential(nn.Conv2d(8, K, 3, padding=1))

    def forward(self, x):
        size, y = x.shape[-2:], stages(self.encoder, x)[1]
        pooled = [resize(block.pool(y), y.shape[-2:], True) for block in self.decoder.psp.blocks]
        y = self.decoder.conv(torch.cat([*pooled, y], 1))
        return resize(self.segmentation_head(y), size, True)


@pytest.fixture(scope="module")
def smp_state():
    return lively(SmpPSPNet).state_dict()


class SmpV3Plus(nn.Module):
    """The keys of DeepLabV3Plus with a ResNet-18."""

    def __init__(self):
        super().__init__()

        def separable(c):
            return [Separable(c, 16).body, nn.BatchNorm2d(16), nn.ReLU()]

        aspp = aspp_of(512, (12, 24, 36), separable=True)
        for branch in aspp.convs[1:4]:
            branch[0] = branch[0].body
        self.encoder, self.decoder = without_classifier(), nn.Module()
        self.decoder.aspp = nn.Sequential(aspp, *separable(16))
        self.decoder.block1 = nn.Sequential(*conv_bn(64, 1, 48))
        self.decoder.block2 = nn.Sequential(*separable(64))
        self.segmentation_head = nn.Sequential(nn.Conv2d(16, K, 1))

    def forward(self, x):
        low, _, _, y = stages(self.encoder, x)
        y = resize(self.decoder.aspp(y), low.shape[-2:], True)
        y = self.decoder.block2(torch.cat([y, self.decoder.block1(low)], 1))
        return resize(self.segmentation_head(y), x.shape[-2:], True)


class SmpV3(nn.Module):
    """The keys of DeepLabV3 with a ResNet-18; earlier versions had no names in the decoder."""

    def __init__(self, names=("aspp", "conv", "bn", "relu")):
        super().__init__()
        conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        layers = aspp_of(512, (12, 24, 36), separable=False), conv, nn.BatchNorm2d(16), nn.ReLU()
        self.encoder = without_classifier()
        self.decoder = nn.Sequential(OrderedDict(zip(names, layers, strict=True)))
        self.segmentation_head = nn.Sequential(nn.Conv2d(16, K, 1))

    def forward(self, x):
        y = self.decoder(stages(self.encoder, x)[-1])
        return resize(self.segmentation_head(y), x.shape[-2:], True)


@pytest.fixture(scope="module")
def plus_state():
    return lively(SmpV3Plus).state_dict()


@pytest.mark.parametrize(
    ("make", "stages"),
    [(SmpPSPNet, 2), (SmpV3Plus, 4), (SmpV3, 4), (partial(SmpV3, tuple("0123")), 4)],
)
def test_smps_logits_are_those_of_the_converted_model(make, stages, classes):
    theirs, overrides = lively(make), ("model.output_stride=32",) if stages == 4 else ()
    model, config = converted(theirs.state_dict(), classes, *overrides)
    assert (config.model.num_stages, config.model.output_stride) == (stages, 2 ** (stages + 1))
    assert_equal(model, theirs, (41, 66))


# What save_pretrained of 0.6 writes.
SMP_CONFIG = json.loads("""{
    "_model_class": "PSPNet", "activation": null, "aux_params": null, "classes": 5,
    "decoder_use_norm": "batchnorm", "encoder_depth": 3, "encoder_name": "resnet18",
    "encoder_weights": null, "in_channels": 3, "psp_dropout": 0.2, "psp_out_channels": 8,
    "upsampling": 8}""")
PLUS_CONFIG = json.loads("""{
    "_model_class": "DeepLabV3Plus", "activation": null, "aux_params": null, "classes": 5,
    "decoder_aspp_dropout": 0.5, "decoder_aspp_separable": true, "decoder_channels": 16,
    "decoder_atrous_rates": [6, 12, 18], "encoder_depth": 5, "encoder_name": "resnet18",
    "encoder_output_stride": 8, "encoder_weights": null, "in_channels": 3, "upsampling": 4}""")


def test_config_that_save_pretrained_writes_beside_the_file_is_read(plus_state, tmp_path, classes):
    """Without it, keys are equal for both strides and all rates."""
    save_file(plus_state, tmp_path / "model.safetensors")
    convert = partial(convert_file, tmp_path / "model.safetensors", classes=classes)
    model = convert(tmp_path / "a.pt").config.model
    assert (model.output_stride, model.aspp_rates) == (16, (12, 24, 36))
    there = tmp_path / "config.json"
    there.write_text(json.dumps(PLUS_CONFIG))
    converted = convert(tmp_path / "b.pt")
    model = converted.config.model
    assert (model.output_stride, model.aspp_rates) == (8, (6, 12, 18))
    assert model.variant == "smp"
    stated = "stated      model.output_stride=8 model.aspp_rates=[6, 12, 18] (by the config of"
    assert any(line.startswith(stated) for line in converted.lines)
    there.write_text(json.dumps(PLUS_CONFIG)[:-9])
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read.*; move it away if"):
        convert(tmp_path / "c.pt")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"psp_use_batchnorm": True},  # of 0.3 and 0.4
        {"decoder_use_norm": {"type": "batchnorm", "eps": 1e-5, "momentum": 0.01}},
        {"encoder_weights": "ssl", "psp_dropout": 0.5, "aux_params": {"classes": 2}, "_x": 1},
        {"activation": "softmax2d"},
    ],
)
def test_config_of_what_changes_no_prediction_is_read(change, smp_state):
    assert detect(smp_state, {"config.json": SMP_CONFIG | change}).plan.stated == {}


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        (SMP_CONFIG, {"psp_use_batchnorm": "inplace"}, "psp_use_batchnorm.type: expected "),
        (SMP_CONFIG, {"output_stride": 8}, "output_stride: 8: segtrain does not know this key"),
        (SMP_CONFIG, {"activation": "sigmoid"}, "activation: expected None or"),  # may overlap
        (PLUS_CONFIG, {"encoder_output_stride": 32}, "encoder_output_stride: expected 8 or 16, f"),
        (PLUS_CONFIG, {"encoder_name": "resnet34"}, "encoder_name: expected 'resnet18', found"),
        (PLUS_CONFIG, {"_model_class": "PSPNet"}, "_model_class: expected 'DeepLabV3Plus', found"),
    ],
)
def test_config_that_changes_predictions_is_refused_by_name(
    config, change, said, smp_state, plus_state
):
    state = smp_state if config is SMP_CONFIG else plus_state
    with pytest.raises(CheckpointError, match=said):
        make_config(detect(state, {"config.json": config | change}).plan, "voc", ())


# What a file looks like


def logits(model):
    with torch.no_grad():
        return model.float()(images(33, 40)).out


def test_prefixes_counters_and_what_is_ignored_are_no_part_of_the_model(smp_state, classes):
    """Lightning stores averages beside the weights."""
    zeros = {key: torch.zeros_like(value) for key, value in smp_state.items()}
    wrapped = {f"model.module.{key}": value for key, value in smp_state.items()}
    both = wrapped | {f"ema.{key}": value for key, value in zeros.items()}
    loss = {**wrapped, "loss.weight": torch.ones(K)}
    for state, expected, ignored in (
        ({"n_averaged": torch.tensor(3), **wrapped}, smp_state, []),
        (loss, smp_state, ["loss."]),
        (both, smp_state, ["ema."]),
        (both, zeros, ["model."]),
    ):
        found = detect(state, {}, ignored).state
        assert found.keys() == expected.keys()
        assert all(value is expected[key] for key, value in found.items())
    with pytest.raises(CheckpointError, match=r"--ignore.*\n  1 without a place: loss\.weight"):
        converted(loss, classes)


def test_keys_that_make_no_model_are_refused(smp_state):
    both = {f"{who}.{k}": v for who in ("student", "teacher") for k, v in smp_state.items()}
    shapeless = {**smp_state, "segmentation_head.0.weight": torch.ones(())}
    state = {k: v for k, v in smp_state.items() if k != "decoder.conv.0.weight"}
    for keys, ignored, message in (
        (both, [], r"2 models: 'student\.', 'teacher\.'; --ignore"),
        (shapeless, [], r"head\.0\.weight: expected a convolution's weight, found the shape \(\)"),
        (state, [], r"missing: decoder\.conv\.0\.weight, whose shape decides"),
        (smp_state, ["los."], r"--ignore los\.: no key begins so"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=message):
            detect(keys, {}, ignored)


def test_every_misfit_is_listed(smp_state, classes):
    """Also a tensor that --ignore takes, what a relative of ResNet has more, and integers."""
    state = dict(smp_state)
    state["encoder.layer1.0.se.weight"] = torch.ones(3)
    state["encoder.conv1.weight"] = torch.ones(64, 4, 7, 7)
    state["decoder.conv.0.weight"] = (100 * state["decoder.conv.0.weight"]).to(torch.int8)
    with pytest.raises(CheckpointError) as refused:
        converted(state, classes, ignored=["encoder.bn1.weight"])
    for text in (
        "1 missing: encoder.bn1.weight (for backbone.bn1.weight)",
        "encoder.conv1.weight: (64, 4, 7, 7) of torch.float32, and backbone.conv1.weight has (64",
        "decoder.conv.0.weight: (8, 256, 1, 1) of torch.int8, and",
        "1 without a place: encoder.layer1.0.se.weight",
    ):
        assert text in str(refused.value)


def test_damaged_numbers_are_refused(smp_state, classes):
    state = {**smp_state, "segmentation_head.0.bias": torch.full((K,), torch.nan)}
    with pytest.raises(
        CheckpointError, match=r"damaged: .* numbers.*\n.*5 of 5 values are not finite"
    ):
        converted(state, classes)


SMP = "segmentation_head.0"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("module.layer1.0.conv1", "no model that is read"),
        ("model.backbone.high_level_features.4 classifier.aspp.convs.0.0", "VainF's MobileNetV2"),
        (f"encoder.features.18.0 {SMP}", "segmentation_models.pytorch's MobileNetV2"),
        (f"decoder.aspp.convs.1.0.0 decoder.aspp.project.0 {SMP}", "DeepLabV3 with decoder_aspp_"),
        (f"decoder.0.convs.1.0.0 decoder.0.project.0 {SMP}", "DeepLabV3 with decoder_aspp_"),
        (f"decoder.aspp.0.convs.1.0 decoder.aspp.0.project.0 {SMP}", "DeepLabV3+ without decoder_"),
        (f"encoder.conv1 {SMP} decoder.blocks.0.conv1.0", "missing: decoder."),
        # mmsegmentation's FCN
        ("backbone.conv1 decode_head.conv_seg decode_head.convs.0.conv", "missing: decode_head."),
    ],
)
def test_models_that_segtrain_does_not_have_are_refused(keys, message):
    state = {f"{key}.weight": torch.ones(5, 8, 1, 1) for key in keys.split()}
    with pytest.raises(CheckpointError, match=re.escape(message)):
        detect(state, {})


def test_heads_of_torchvision_that_segtrain_does_not_have_are_named():
    """With prefixes too."""
    for name, what in (("fcn_resnet50", "FCN"), ("lraspp_mobilenet_v3_large", "LRASPP")):
        network = on_meta(lambda: torchvisions(name, weights_backbone=None))  # noqa: B023
        for prefix in ("", "module."):
            state = {f"{prefix}{key}": value for key, value in network.state_dict().items()}
            with pytest.raises(CheckpointError, match=f"this is a file of torchvision's {what}: "):
                detect(state, {})


# What the user sets


@pytest.mark.parametrize(
    ("setting", "decided"),
    [
        *((f"model.variant={name}", "torchvision") for name in ("paper", "semseg", "vainf", "smp")),
        ("model.backbone=resnet101", "resnet50"),
        ("model.head_channels=128", "256"),
        ("model.aux_channels=128", "256"),
    ],
)
def test_options_that_contradict_the_keys_are_refused(setting, decided, deeplabv3):
    """Weights of torchvision fit four other forms, and give other predictions in each."""
    with pytest.raises(ConfigError, match=f"--set {setting}: .* say {decided}; leave it"):
        make_config(detect(deeplabv3, {}).plan, "voc", [setting])


def test_auxiliary_head_is_left_out_as_set(tmp_path, classes):
    """Also one of another width than segtrain's."""
    options = {"weights_backbone": None, "num_classes": K, "aux_loss": True}
    network = torchvisions("deeplabv3_mobilenet_v3_large", **options)
    torch.save(network.state_dict(), "theirs.pth")
    settings = ["model.aux_head=false"]
    made = convert_file(Path("theirs.pth"), Path("o.pt"), classes=classes, overrides=settings)
    assert made.model.aux_head is None
    line = "left out    8 tensors (--set model.aux_head=false): aux_classifier.0.weight"
    assert any(said.startswith(line) for said in made.lines)


def test_what_the_file_has_no_name_for_is_named_by_the_model(deeplabv3):
    found = detect(deeplabv3, {})
    config = make_config(found.plan, "voc", ["model.separable=true"])
    model = build_model(config.model, num_classes=21).to("meta")
    with pytest.raises(CheckpointError, match=r"depthwise\.0\.weight, which torchvision does"):
        translate(found, model.state_dict())


def test_option_that_contradicts_the_config_of_the_file_is_shown(mmseg_model, classes):
    torch.save({"state_dict": mmseg_model.state_dict(), **meta()}, "theirs.pth")
    settings = ["model.align_corners=false", "data.std=[50, 60, 70]"]
    lines = convert_file(
        Path("theirs.pth"), Path("o.pt"), classes=classes, overrides=settings
    ).lines
    assert [line for line in lines if "--set" in line] == [
        "warning: --set model.align_corners=false: the config of the file says true"
    ]


# Classes


def test_channels_move_to_the_order_of_the_class_file_by_name(smp_state, tmp_path, classes):
    torch.save(smp_state, tmp_path / "theirs.pth")
    theirs = class_file(tmp_path / "theirs.yaml", ("tree", "Road", "sky", "sign", "pole"))
    options = {"classes": classes, "class_order": theirs}
    convert_file(tmp_path / "theirs.pth", tmp_path / "moved.pt", **options)
    convert_file(tmp_path / "theirs.pth", tmp_path / "same.pt", classes=classes)
    moved, same = (load_model(tmp_path / f"{name}.pt").model for name in ("moved", "same"))
    torch.testing.assert_close(logits(moved), logits(same)[:, [2, 1, 4, 0, 3]], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("stored", "names", "order", "message"),
    [
        ((), NAMES[:1], None, "one channel, a sigmoid"),
        ((), NAMES[:4], None, "4 classes, and the file has 5"),
        (NAMES[::-1], NAMES, None, "same 5 classes in another order; --class-order stored"),
        (NAMES, NAMES, NAMES[::-1], "--class-order: the file stores the same"),
        ((), NAMES, ("car", *NAMES[1:]), "each once; found 5, without sky"),
        ((), None, None, "5 classes and no usable names; name its class file"),
        (NAMES, None, "stored", "--class-order: needs --classes"),
    ],
)
def test_classes_that_do_not_fit_the_channels_are_refused(stored, names, order, message, tmp_path):
    plan = Conversion("x", 1 if "sigmoid" in message else K, {}, {}, class_names=stored)
    spec = names and class_file(tmp_path / "own.yaml", names)
    if isinstance(order, tuple):
        order = class_file(tmp_path / "theirs.yaml", order)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        chosen(plan, spec, order)


def test_stored_names_give_the_order_and_other_names_a_warning(classes):
    plan = Conversion("x", K, {}, {}, class_names=NAMES[::-1])
    assert chosen(plan, classes, "stored").order == [4, 3, 2, 1, 0]
    plan = Conversion("x", K, {}, {}, class_names=("sky", "street", *NAMES[2:]))
    expected = "warning: the file stores 5 names for 5 classes: 1 street there, road here"
    assert chosen(plan, classes).lines == [expected]


def test_stored_names_become_a_class_file(mmseg_model, tmp_path):
    stored = {"classes": ["a: b", *NAMES[1:]]}
    file = {"state_dict": mmseg_model.state_dict(), **meta(dataset_meta=stored)}
    torch.save(file, "theirs.pth")
    convert_file(Path("theirs.pth"), tmp_path / "ours.pt")
    loaded = load_model(tmp_path / "ours.pt")
    assert loaded.classes.names == ("a: b", *NAMES[1:])
    assert loaded.config.data.classes == str(tmp_path / "ours.classes.yaml")
    with pytest.raises(ConfigError, match="exists"):
        convert_file(Path("theirs.pth"), tmp_path / "ours.pt")


@pytest.mark.parametrize(
    "more",
    [
        "train_pipeline = [dict(type='LoadAnnotations', reduce_zero_label=True)]",
        "data = dict(test=dict(type='ADE20KDataset'))",
    ],
)
def test_classes_of_labels_whose_zero_is_ignored_begin_at_one(more, mmseg_model, classes):
    file = meta(f"{MMSEG_CONFIG}{more}", CLASSES=("a", *NAMES[1:]))
    plan = detect(mmseg_model.state_dict(), file).plan
    choice = chosen(plan, None)
    assert [c.ids for c in choice.classes.classes] == [(1,), (2,), (3,), (4,), (5,)]
    assert choice.classes.ignore_ids == (0, 255)
    line = chosen(plan, classes).lines[-1]
    assert line.endswith("class i has id i + 1; in own id 0 is a class")


# The command


def test_command_writes_a_checkpoint_that_others_start_from(smp_state, tmp_path, classes, lab):
    """Also of a file in half precision and without batch counters."""
    half = {key: v.half() if v.is_floating_point() else v for key, v in smp_state.items()}
    del half["encoder.bn1.num_batches_tracked"]
    half["loss.weight"] = torch.ones(K)
    torch.save({"best_score": np.float64(0.5), "net": half}, "theirs.pth")  # as VainF
    setting = ("--set", "model.align_corners=false", "--set", "data.mean=[1, 2, 3]")
    setting += ("--ignore", "loss.")
    output = tmp_path / "ours.pt"
    command = ("convert", "theirs.pth", "--classes", classes, "--output", output)
    said = lab.done(*command, *setting).out
    unused = sum(k.startswith(("encoder.layer3.", "encoder.layer4.")) for k in smp_state)
    for line in (
        f"source      segmentation_models.pytorch: {len(half)} tensors under net",
        f"left out    {unused} tensors (the head reads layer2): encoder.layer3.0.",
        "left out    1 tensors (--ignore): loss.weight",
        "  num_stages: 2",
        "\ndata:\n  mean: [1.0, 2.0, 3.0]\nwrote",
    ):
        assert line in said
    assumed = re.search(r"assumed .*model\.ppm_bins=\[1, 2, 3, 6\].* \(the file does not say", said)
    assert "align_corners" not in assumed[0]
    loaded = load_model(output)
    assert loaded.config.model.variant == "smp"
    assert not loaded.config.model.align_corners
    assert loaded.config.data.mean == (1, 2, 3)
    assert loaded.step == 0
    started = build_model(loaded.config.model, num_classes=K)
    other = override_config(loaded.config, ["model.align_corners=true"], source="here")
    lines = load_initial(started, output, NAMES, other).lines
    assert lines[1:] == [
        "warning: init: model.align_corners is false there, true here: the weights load, "
        "and compute something else"
    ]
    torch.testing.assert_close(dict(started.state_dict()), dict(loaded.model.state_dict()))


def test_files_that_run_code_and_those_of_segtrain_are_refused(smp_state, classes, lab):
    """torchvision's training script stores its arguments, a class of Python."""
    torch.save({"model": smp_state, "args": argparse.Namespace(lr=1)}, "theirs.pth")
    command = ("convert", "--classes", classes, "--output")
    assert "could run code" in lab.refused(*command, "ours.pt", "theirs.pth", code=4)
    torch.save(smp_state, "theirs.pth")
    lab.done(*command, "o.pt", "theirs.pth")
    assert "checkpoint of segtrain already" in lab.refused(*command, "p.pt", "o.pt", code=4)


def test_checkpoint_of_mmengines_runner_is_read(mmseg_model, tmp_path, monkeypatch):
    """Its message hub holds arrays of numpy and methods; nothing of them is made or called."""

    class HistoryBuffer:
        def __init__(self):
            self.log_history, self.count = np.arange(3.0), np.float64(2)
            self.methods = {"mean": self.mean}

        def mean(self):
            return 0

        def __setstate__(self, state):
            raise AssertionError

    HistoryBuffer.__module__ = "mmengine.logging.history_buffer"
    HistoryBuffer.__qualname__ = "HistoryBuffer"
    module = types.ModuleType(HistoryBuffer.__module__)
    module.HistoryBuffer = HistoryBuffer
    state = mmseg_model.state_dict()
    hub = {"log_scalars": {"train/loss": HistoryBuffer()}, "runtime_info": {"best": np.int64(3)}}
    file = {**meta(CLASSES=NAMES), "state_dict": state, "message_hub": hub}
    with monkeypatch.context() as patch:
        for name in ("mmengine", "mmengine.logging", module.__name__):
            patch.setitem(sys.modules, name, module)
        torch.save(file, tmp_path / "iter_4.pth")
    loaded = convert_file(tmp_path / "iter_4.pth", tmp_path / "ours.pt")
    assert load_model(tmp_path / "ours.pt").classes.names == NAMES
    assert loaded.config.model.aspp_rates == (2, 3, 4)
    assert logits(loaded.model).abs().max() > 0


def test_numbers_of_numpy_1_are_read(tmp_path):
    path = tmp_path / "file.pth"
    torch.save({"best_score": np.float64(0.5)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (pickled,) = (name for name in members if name.endswith("data.pkl"))
    members[pickled] = re.sub(rb"numpy\._?core\.", b"numpy.core.", members[pickled])
    assert b"numpy.core.multiarray" in members[pickled]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    assert torch_file.read(path) == {"best_score": 0.5}


def test_several_state_dicts_are_refused_until_one_is_chosen(smp_state, tmp_path, classes):
    """timm and mmengine store averaged weights beside the others."""
    average = {key: torch.zeros_like(value) for key, value in smp_state.items()}
    torch.save({"state_dict": smp_state, "ema_state_dict": average}, tmp_path / "theirs.pth")
    convert = partial(convert_file, tmp_path / "theirs.pth", tmp_path / "o.pt", classes=classes)
    said = "2 state dicts: state_dict, ema_state_dict; --entry"
    for entry, words in ((None, said), ("ema", "no state dict there")):
        with pytest.raises(CheckpointError, match=words):
            convert(entry=entry)
    assert logits(convert(entry="ema_state_dict").model).abs().max() == 0
