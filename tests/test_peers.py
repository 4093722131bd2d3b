"""Converted models against the programs they come from, installed from PyPI.

Marked `peers`; skipped where they are not installed. They are no dependencies of segtrain:

    pip install mmsegmentation==1.2.2 mmengine mmcv-lite==2.1.0 ftfy regex prettytable
    pip install segmentation_models_pytorch timm
    pytest tests/test_peers.py -s        # -s shows the differences

mmcv-lite has no compiled operators. None of these models uses one, but mmsegmentation imports them:
a module of their name without any stands in for them.
"""

import importlib
import importlib.util
import re
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from experiments import enliven

from segtrain.checkpoint import load_model
from segtrain.convert.converter import convert_file

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

K = 7
CONFIGS = (
    "pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024.py",
    "pspnet/pspnet_r50-d8_4xb2-80k_cityscapes-769x769.py",
    "pspnet/pspnet_r50b-d8_4xb2-80k_cityscapes-512x1024.py",
    "pspnet/pspnet_r18-d8_4xb2-80k_cityscapes-512x1024.py",
    "deeplabv3/deeplabv3_r18b-d8_4xb2-80k_cityscapes-512x1024.py",
    "deeplabv3/deeplabv3_r50-d8_4xb2-40k_cityscapes-769x769.py",
    "deeplabv3/deeplabv3_r101-d16-mg124_4xb2-80k_cityscapes-512x1024.py",
    "deeplabv3plus/deeplabv3plus_r18-d8_4xb2-80k_cityscapes-512x1024.py",
    "deeplabv3plus/deeplabv3plus_r50-d8_4xb4-160k_ade20k-512x512.py",
    "deeplabv3plus/deeplabv3plus_r50-d8_4xb2-80k_cityscapes-769x769.py",
    "deeplabv3plus/deeplabv3plus_r101-d16-mg124_4xb2-80k_cityscapes-512x1024.py",
)
SMP = (
    ("PSPNet", {"encoder_name": "resnet34"}, ()),
    ("PSPNet", {"encoder_name": "resnet50", "psp_out_channels": 64}, ()),
    ("PSPNet", {"encoder_name": "resnet18", "encoder_depth": 4, "upsampling": 16}, ()),
    ("DeepLabV3", {"encoder_name": "resnet50"}, ()),
    (
        "DeepLabV3",
        {"encoder_name": "resnet34", "encoder_output_stride": 16},
        ("model.output_stride=16",),
    ),
    ("DeepLabV3", {"encoder_name": "resnet18", "encoder_depth": 4}, ()),
    ("DeepLabV3Plus", {"encoder_name": "resnet34"}, ()),
    ("DeepLabV3Plus", {"encoder_name": "resnet101", "decoder_channels": 128}, ()),
    (
        "DeepLabV3Plus",
        {"encoder_name": "resnet50", "encoder_output_stride": 8},
        ("model.output_stride=8",),
    ),
    ("DeepLabV3Plus", {"encoder_name": "resnet18", "encoder_depth": 4}, ()),
)


@pytest.fixture(scope="module")
def mmseg():
    """The registry of mmsegmentation's models, and the folder of its configs."""
    for name in ("mmcv", "mmengine", "mmseg"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; see the top of this file")

    class NoOperators(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if importlib.util.find_spec("mmcv._ext") is None:
            sys.modules["mmcv._ext"] = NoOperators("mmcv._ext")
        import mmseg.models
        from mmseg.registry import MODELS

        assert mmseg.models
    return MODELS, Path(importlib.util.find_spec("mmseg").origin).parent / ".mim" / "configs"


@pytest.fixture(scope="module")
def smp():
    if importlib.util.find_spec("segmentation_models_pytorch") is None:
        pytest.skip("segmentation_models_pytorch is not installed; see the top of this file")
    return importlib.import_module("segmentation_models_pytorch")


@pytest.fixture
def classes(tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text(f"classes: [{', '.join(f'class{i}' for i in range(K))}]\n")
    return str(path)


def images(height, width):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, 3, height, width, generator=generator)


def compare(name, theirs, path, x, *, aux):
    """`theirs`, a function of images, agrees with the checkpoint at `path` in both precisions.

    aux: the logits of the auxiliary head too.
    """
    model, shares = load_model(path).model, []
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        model.to(dtype)
        with torch.no_grad():
            expected = theirs(dtype, x.to(dtype))
            got = [model(x.to(dtype)).out]
            if aux:
                raw = model.aux_head(model.backbone(x.to(dtype)), None)
                got.append(resize(raw, x, model))
        for e, g in zip(expected, got, strict=True):
            assert e.shape == g.shape
            assert e.std() > 1e-3
            share = ((e.double() - g.double()).abs().max() / e.abs().max()).item()
            assert share < limit, (name, dtype, share)
            shares.append(share)
    print(f"{name:<72} {' '.join(f'{share:.0e}' for share in shares)}")


def resize(y, x, model):
    return F.interpolate(y, x.shape[-2:], mode="bilinear", align_corners=model.align_corners)


def mmseg_model(registry, cfg):
    """The model of a config, with K classes, plain batch norm and no pretrained weights."""
    model = cfg.model.to_dict()
    model["pretrained"] = None
    model["data_preprocessor"] = None
    for part in ("backbone", "decode_head", "auxiliary_head"):
        model[part]["norm_cfg"] = {"type": "BN", "requires_grad": True}
        if part != "backbone":
            model[part]["num_classes"] = K
            model[part].pop("sampler", None)
    return enliven(registry.build(model))


@pytest.mark.parametrize(
    ("config", "is_v1d"), [*((config, False) for config in CONFIGS), (CONFIGS[0], True)]
)
def test_converted_model_equals_mmsegmentations(config, is_v1d, mmseg, tmp_path, classes):
    """With the config in the file, as mmengine writes it; ResNetV1d without.

    So wide that a kernel of the largest rate, 36, reaches from one feature to another.
    """
    from mmengine.config import Config

    registry, folder = mmseg
    cfg = Config.fromfile(str(folder / config))
    if is_v1d:
        cfg.model.backbone.type = "ResNetV1d"
    model = mmseg_model(registry, cfg)
    meta = {} if is_v1d else {"cfg": cfg.pretty_text, "mmseg_version": "1.2.2"}
    path = tmp_path / "theirs.pth"
    torch.save({"meta": meta, "state_dict": model.state_dict()}, path)
    made = convert_file(path, tmp_path / "ours.pt", classes=classes).config
    side = 512 if "ade20k" in config else 1025 if "769" in config else 1024
    assert made.data.short_side_px == (None if is_v1d else side)
    assert (made.model.align_corners, made.eval.mode == "slide") == ("769" in config,) * 2

    def theirs(dtype, x):
        model.to(dtype)
        raw = model.auxiliary_head(model.extract_feat(x))
        shapes = [{"img_shape": tuple(x.shape[-2:])}] * len(x)
        return [model.encode_decode(x, shapes), resize(raw, x, model)]

    name = f"{Path(config).stem}{' ResNetV1d' * is_v1d}"
    compare(name, theirs, tmp_path / "ours.pt", images(33, 306), aux=True)


def test_deeplabv3_with_the_keys_of_earlier_versions_is_read(smp, tmp_path, classes):
    """They had no names, and smp renames them when it loads them."""
    theirs = enliven(smp.DeepLabV3("resnet18", encoder_weights=None, classes=K))
    state = theirs.state_dict()
    for old, new in enumerate(("aspp", "conv", "bn")):
        state = {re.sub(rf"^decoder\.{new}\.", f"decoder.{old}.", k): v for k, v in state.items()}
    theirs.load_state_dict(state)
    torch.save(state, tmp_path / "theirs.pth")
    convert_file(tmp_path / "theirs.pth", tmp_path / "ours.pt", classes=classes)
    name, x = "DeepLabV3 of earlier versions", images(32, 320)
    compare(name, lambda dtype, x: [theirs.to(dtype)(x)], tmp_path / "ours.pt", x, aux=False)


@pytest.mark.parametrize(("arch", "options", "overrides"), SMP)
def test_converted_model_equals_smps(arch, options, overrides, smp, tmp_path, classes):
    """Its models take no odd sizes. The width is as above, for rate 36 at stride 16."""
    model = enliven(getattr(smp, arch)(encoder_weights=None, classes=K, **options))
    path = tmp_path / "theirs.pth"
    torch.save(model.state_dict(), path)
    convert_file(path, tmp_path / "ours.pt", classes=classes, overrides=overrides)
    name, x = " ".join([arch, *map(str, options.values())]), images(32, 608)
    compare(name, lambda dtype, x: [model.to(dtype)(x)], tmp_path / "ours.pt", x, aux=False)
