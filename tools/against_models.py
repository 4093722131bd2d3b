"""The contenders of bench_against.py, and the networks that they have in common.

Each case but the last is a network that segtrain and one other program implement themselves, with
equal weights. The plain loop of torchvision's reference, which has none of them, trains segtrain's
modules with torch's own batch norm: it differs from segtrain in nothing but the loop and the norm
layers.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from against_mmseg import build_mmseg, deeplabv3plus_mnv2, pspnet_r18
from stepping import NUM_CLASSES, config_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from segtrain.config import ModelConfig
from segtrain.distributed import collectives as dist
from segtrain.models import build_model
from segtrain.training.measure import training_flops

SEGTRAIN, TORCHVISION, SMP, MMSEG = "segtrain", "torchvision", "smp", "mmseg"
SEMSEG, ALBUMENTATIONS = "semseg", "albumentations"
PACKAGES = {
    SEGTRAIN: ("segtrain",),
    TORCHVISION: ("torchvision",),
    SMP: ("segmentation_models_pytorch",),
    MMSEG: ("mmseg", "mmengine", "mmcv"),
    SEMSEG: ("cv2",),  # its transforms are written out here
    ALBUMENTATIONS: ("albumentations",),
}
"""What has to be importable for a contender."""


class Case(NamedTuple):
    """A network: the options of segtrain's, and the program that has the same."""

    model: dict[str, Any]
    peer: str
    build: Callable[[], nn.Module] | None = None  # the peer's own; None: torchvision's loop


def missing(name: str) -> list[str]:
    """The packages of a contender that are not installed."""
    return [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]


def _mmseg(options: Callable[[int], dict[str, Any]]) -> Callable[[], nn.Module]:
    return lambda: build_mmseg(options(NUM_CLASSES))


def _smp(arch: str, *args: Any, **options: Any) -> nn.Module:
    package = importlib.import_module("segmentation_models_pytorch")
    return getattr(package, arch)(*args, encoder_weights=None, classes=NUM_CLASSES, **options)


def _smp_pspnet() -> nn.Module:
    """With all five stages, dilated to stride 8, instead of the three that it has by default."""
    return _smp("PSPNet", "resnet18", encoder_depth=5, output_stride=8, psp_dropout=0.1)


def _smp_deeplab() -> nn.Module:
    """On timm's MobileNetV2: its own also has the layer of 1,280 channels for ImageNet."""
    return _smp(
        "DeepLabV3Plus",
        "tu-mobilenetv2_100",
        encoder_output_stride=16,
        decoder_atrous_rates=(6, 12, 18),
        decoder_aspp_dropout=0.1,
    )


_PSPNET = {"arch": "pspnet", "backbone": "resnet18", "dropout": 0.1}
_R18 = {"arch": "deeplabv3plus", "backbone": "resnet18", "output_stride": 16}
_DEEPLAB = {**_R18, "backbone": "mobilenet_v2", "separable": True, "dropout": 0.1}
CASES = {
    "pspnet_r18 of mmseg": Case(
        {**_PSPNET, "head_channels": 128, "aux_channels": 64, "variant": "mmseg"},
        MMSEG,
        _mmseg(pspnet_r18),
    ),
    "pspnet_r18 of smp": Case({**_PSPNET, "variant": "smp", "aux_head": False}, SMP, _smp_pspnet),
    "deeplabv3plus_mnv2 of mmseg": Case(
        {**_DEEPLAB, "variant": "mmseg"}, MMSEG, _mmseg(deeplabv3plus_mnv2)
    ),
    "deeplabv3plus_mnv2 of smp": Case(
        {**_DEEPLAB, "variant": "smp", "aux_head": False}, SMP, _smp_deeplab
    ),
    "deeplabv3plus_r18": Case(_R18, TORCHVISION),  # what `segtrain init` takes for a CPU
}


class Plain(nn.Module):
    """segtrain's network with torch's batch norm, and outputs as torchvision's have them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        model = ModelConfig(**case.model)
        self.net = build_model(model, num_classes=NUM_CLASSES, norm=nn.BatchNorm2d)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        logits = self.net(images)
        return {name: x for name, x in zip(("out", "aux"), logits, strict=True) if x is not None}


def build(contender: str, case: Case) -> nn.Module:
    """The network that a peer trains."""
    return Plain(case) if contender == TORCHVISION else case.build()


def work(contender: str, case: Case, size: tuple[int, int]) -> dict[str, float]:
    """Weights of a contender's network, and GFLOP of training it on an image of `size`.

    Counted as in `segtrain.training.measure`: the backward pass as two forward ones.
    """
    if contender == SEGTRAIN:
        config = config_of(size, 2, model=case.model)
        model = build_model(config.model, num_classes=NUM_CLASSES)
        weights = sum(p.numel() for p in model.parameters())
        return {"weights": weights, "gflop": training_flops(config, NUM_CLASSES) / 1e9}
    images = 2
    with dist.alone(), FakeTensorMode(), FlopCounterMode(display=False) as counter:
        model = build(contender, case).train()
        x = torch.empty(images, 3, *size)
        if contender == MMSEG:
            features = model.extract_feat(x)
            model.decode_head(features)
            model.auxiliary_head(features)
        else:
            model(x)
    weights = sum(p.numel() for p in model.parameters())
    return {"weights": weights, "gflop": 3 * counter.get_total_flops() / images / 1e9}
