"""Recomputation: the same numbers with less memory, of a layer and of whole blocks."""

from functools import partial

import pytest
import torch
from memory import measure_step
from torch import nn

from segtrain.config import ModelConfig
from segtrain.distributed import collectives as dist
from segtrain.models import build_model
from segtrain.norm import SyncBatchNorm2d, norm_relu_conv, placed

X = torch.randn(5, 6, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.3


def test_a_whole_model_needs_less():
    """Beside the triples stand the layers before each shortcut, twice as large together."""
    heads = {"head_channels": 16, "aux_channels": 16, "num_stages": 3, "output_stride": 8}
    plain, fused, blocks = (
        measure_step(
            ModelConfig(recompute=recompute, **heads), size=65, batch_size=2, num_classes=3
        )
        for recompute in ("none", "norm", "blocks")
    )
    assert blocks.forward <= 0.35 * plain.forward
    assert blocks.peak <= 0.6 * plain.peak
    assert fused.layers <= 0.55 * plain.layers
    saved = plain.layers - fused.layers
    assert fused.forward <= plain.forward - 0.99 * saved
    assert fused.peak <= plain.peak - 0.9 * saved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_is_near_float32(dtype):
    torch.manual_seed(0)
    norm, conv = SyncBatchNorm2d(6), nn.Conv2d(6, 4, 3, bias=False)
    x = X.float().requires_grad_()
    conv(torch.relu(norm(x))).square().mean().backward()
    wanted = [x.grad.clone(), conv.weight.grad.clone(), norm.weight.grad.clone()]
    for tensor in (x, conv.weight, norm.weight):
        tensor.grad = None
    with torch.autocast("cpu", dtype):
        y = norm_relu_conv(x, norm, conv)
    assert y.dtype == dtype
    y.float().square().mean().backward()
    for tensor, expected in zip((x, conv.weight, norm.weight), wanted, strict=True):
        assert tensor.grad.dtype == torch.float32
        assert (tensor.grad - expected).norm() < 0.05 * expected.norm()


def test_layers_of_other_kinds_and_evaluation_run_as_they_are():
    conv = nn.Conv2d(6, 4, 3, bias=False)
    for norm in (nn.BatchNorm2d(6), nn.GroupNorm(2, 6), SyncBatchNorm2d(6).eval()):
        x = X.float()
        expected = conv(torch.relu(norm(x)))
        torch.testing.assert_close(norm_relu_conv(x, norm, conv), expected, rtol=0, atol=0)


def model_step(recompute, options):
    torch.manual_seed(0)
    config = ModelConfig(**options, recompute=recompute, dropout=0.0)
    norm = partial(SyncBatchNorm2d, images=1) if "stem" in options else SyncBatchNorm2d
    model = build_model(config, num_classes=3, norm=norm).double().train()
    if "stem" in options:
        model.to(memory_format=torch.channels_last)
    images = torch.randn(3, 3, 33, 25, generator=torch.Generator().manual_seed(2)).double()
    images = images[: 2 + dist.rank()] if dist.world_size() > 1 else images
    with placed([3] if dist.world_size() == 1 else [2, 3]):
        out, aux = model(images)
        (out.pow(3).mean() + (0.0 if aux is None else aux.square().mean())).backward()
    return {
        "out": out.detach(),
        **{name: p.grad for name, p in model.named_parameters()},
        **dict(model.named_buffers()),
    }


MODELS = [
    {"backbone": "resnet18", "arch": "deeplabv3plus", "num_stages": 2, "output_stride": 8},
    {"backbone": "resnet50", "stem": "64-64-128", "num_stages": 2, "output_stride": 8},
    {"backbone": "mobilenet_v3_large", "aux_head": False},
]


def model_steps(models):
    found = []
    for options in models:
        widths = {"head_channels": 8} | ({} if "aux_head" in options else {"aux_channels": 8})
        levels = ["none", "blocks"] + ["norm"] * options["backbone"].startswith("resnet")
        found.append([model_step(level, options | widths) for level in levels])
    return found


SLOW = pytest.mark.slow("norm", "models")
OTHERS = [pytest.param(2, MODELS[1:], marks=SLOW), pytest.param(1, MODELS, marks=SLOW)]


@pytest.mark.parametrize(("ranks", "models"), [(2, MODELS[:1]), *OTHERS])
def test_a_whole_model_has_the_same_outputs_gradients_and_buffers(run_ranks, ranks, models):
    """Blocks bit for bit: they repeat the same operations, collectives included.

    With statistics of all ranks; others of each image alone, and in both layouts.
    """
    for found in run_ranks(ranks, model_steps, models):
        for plain, blocks, *norm in found:
            torch.testing.assert_close(blocks, plain, rtol=0, atol=0)
            for name, value in norm[0].items() if norm else ():
                most = max(1.0, plain[name].abs().max())
                assert (value - plain[name]).abs().max() <= 1e-12 * most
