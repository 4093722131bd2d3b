"""`segtrain.parts.backward` beside the whole batch, on models of other libraries, in float64.

    pip install segmentation_models_pytorch
    python tools/parts_trial.py

A model takes 5 images in 3 parts. Dropout and drop-path are off. Printed: of the tensors whose
gradient is not rounding, the largest difference over the largest value of the tensor.
"""

import copy
import sys

import timm
import torch
import torch.nn.functional as F
import torchvision.models as tv
from torch import Tensor, nn

from segtrain.norm import convert
from segtrain.parts import backward

TORCHVISION = {
    "resnet50": 65,
    "densenet121": 65,
    "mobilenet_v3_small": 65,
    "efficientnet_b0": 65,
    "regnet_y_400mf": 65,
    "shufflenet_v2_x0_5": 65,
    "segmentation.deeplabv3_resnet50": 65,
    "segmentation.fcn_resnet50": 65,
    "segmentation.lraspp_mobilenet_v3_large": 65,
}
TIMM = {
    "resnet26d": 65,
    "regnetx_002": 65,
    "mobilenetv2_050": 65,
    "efficientnet_lite0": 65,
    "cspresnet50": 65,
    "repvgg_a0": 65,
    "levit_128s": 224,
}
SMP = ["Unet", "UnetPlusPlus", "FPN", "PSPNet", "DeepLabV3Plus", "Linknet"]


def models():
    """Name, model and size of images of each."""
    for name, size in TORCHVISION.items():
        make = getattr(tv.segmentation, name[13:]) if "." in name else getattr(tv, name)
        options = {"weights_backbone": None} if "." in name else {}
        yield f"torchvision {name}", make(weights=None, num_classes=5, **options), size
    for name, size in TIMM.items():
        yield f"timm {name}", timm.create_model(name, num_classes=5), size
    import segmentation_models_pytorch as smp

    for name in SMP:
        yield f"smp {name}", getattr(smp, name)("resnet18", encoder_weights=None, classes=5), 96


def loss(outputs, labels) -> tuple[Tensor, Tensor]:
    """Cross entropy over the valid images or pixels, of all heads."""
    heads = list(outputs.values()) if isinstance(outputs, dict) else [outputs]
    if heads[0].dim() == 2:
        labels = labels[:, 0, 0]
    losses = [F.cross_entropy(y, labels, ignore_index=255, reduction="sum") for y in heads]
    return sum(losses), (labels != 255).sum()


def calm(model: nn.Module) -> nn.Module:
    """`model` without dropout and drop-path."""
    for layer in model.modules():
        if hasattr(layer, "drop_prob"):
            layer.drop_prob = 0.0
        elif isinstance(getattr(layer, "p", None), float):
            layer.p = 0.0
    return model


def difference(model: nn.Module, size: int) -> float:
    images = torch.randn(5, 3, size, size, dtype=torch.float64)
    labels = torch.randint(5, (5, size, size))
    labels[3] = 255
    model = calm(model).double().train()
    whole = copy.deepcopy(model)
    total, weight = loss(whole(images), labels)
    (total / weight).backward()
    backward(convert(model), loss, images, labels, parts=3)
    pairs = [
        (a.grad, b.grad)
        for a, b in zip(model.parameters(), whole.parameters(), strict=True)
        if b.grad is not None
    ]
    largest = max(b.abs().max() for _, b in pairs)
    real = [(a, b) for a, b in pairs if b.abs().max() > 1e-9 * largest]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in real)


def main() -> None:
    torch.manual_seed(0)
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, model, size in models():
        if only in name:
            print(f"| {name} | {difference(model, size):.0e} |", flush=True)


if __name__ == "__main__":
    main()
