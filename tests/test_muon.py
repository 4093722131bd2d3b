"""Muon against torch's own and the singular value decomposition; AdamW for what is no kernel."""

import copy
import math

import torch
from experiments import settings
from torch import nn

from segtrain.config import ModelConfig
from segtrain.models import build_model
from segtrain.models.precision import float32_products
from segtrain.norm import SyncBatchNorm2d
from segtrain.training.optim.muon import muon_names, orthogonalized
from segtrain.training.optim.optimizer import build_optimizer

SHAPES = [[(16, 144)], [(64, 27)], [(1, 9)], [(48, 48), (99, 48), (48, 50)]]


class Mixed(nn.Module):
    """Kernels of several shapes, and one of everything that is AdamW's."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Conv2d(8, 16, 3)
        self.tall = nn.Conv2d(4, 32, 1, bias=False).to(memory_format=torch.channels_last)
        self.other = nn.Conv2d(8, 32, 1, bias=False)  # as tall as that, but wider
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.norm = SyncBatchNorm2d(8)
        self.classifier = nn.Conv2d(8, 3, 1)
        self.to(**options)


KERNELS = {"wide.weight", "tall.weight", "other.weight"}


def steps(model, optimizer, number=4):
    generator = torch.Generator().manual_seed(1)
    for step in range(number):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.step()


def test_the_step_has_the_singular_vectors_of_the_momentum_and_equal_singular_values():
    torch.manual_seed(0)
    for shapes in SHAPES:
        matrices, parts = [], []
        for shape in shapes:
            # Condition number 100: all values above what five iterations can lift.
            u, s, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
            s = torch.logspace(0, -2, len(s), dtype=torch.float64)
            matrices.append(1e3 * (u * s) @ v)
            parts.append((u, v))
        for (u, v), found in zip(parts, orthogonalized(matrices), strict=True):
            inside = u.T @ found @ v.T
            values = inside.diagonal()
            assert values.min() > 0.65
            assert values.max() < 1.22
            torch.testing.assert_close(inside, values.diag(), rtol=0, atol=1e-7)
            torch.testing.assert_close(u @ inside @ v, found, rtol=0, atol=1e-7)


def test_products_are_those_of_float32_even_if_others_are_tf32(monkeypatch):
    """As a device would compute them: TF32 keeps 10 bits of the factors of a product."""

    def rounded(*factors):
        if not torch.backends.cuda.matmul.allow_tf32:
            return factors
        bits = [(x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF for x in factors]
        return [x.view(torch.float32) for x in bits]

    product, baddbmm = torch.Tensor.__matmul__, torch.baddbmm
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: product(*rounded(a, b)))
    monkeypatch.setattr(torch, "baddbmm", lambda x, a, b, **by: baddbmm(x, *rounded(a, b), **by))
    model = Mixed()
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(16, 72), full_matrices=False)
    falling = (u * torch.arange(1, 17) ** -3.0) @ v
    with float32_products(settings(precision="tf32").train):
        assert torch.linalg.matrix_norm(*orthogonalized([falling]), 2) > 2
        before = model.wide.weight.detach().clone()
        optimizer = build_optimizer(model, settings(optimizer="muon", weight_decay=0.0))
        model.wide.weight.grad = falling.view_as(before)
        optimizer.step()
        assert torch.backends.cuda.matmul.allow_tf32
    lr = optimizer.param_groups[0]["lr"]
    moved = (before - model.wide.weight).detach().flatten(1) / (lr * 0.2 * math.sqrt(72))
    assert torch.linalg.matrix_norm(moved, 2) < 1.22


def test_a_momentum_that_has_died_away_changes_nothing():
    """Of a layer without a gradient for 900 steps; in float32 its sum of squares is 0."""
    for norm in (0, 1e-45, 1e-24, 1e-15):
        (found,) = orthogonalized([norm * torch.ones(3, 5)])
        assert found.abs().max() < 1e-4


def test_kernels_go_as_torchs_muon_takes_them(monkeypatch):
    """Torch's rounds to bfloat16 and takes matrices alone; without the rounding they are equal."""
    monkeypatch.setattr(torch, "bfloat16", torch.float64)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.clone)  # as torch 2.10 does it
    model = Mixed(dtype=torch.float64)
    matrices = {
        name: nn.Parameter(value.detach().flatten(1).clone())
        for name, value in model.named_parameters()
        if name in KERNELS
    }
    ours = build_optimizer(model, settings(optimizer="muon", weight_decay=0.3))
    torchs = torch.optim.Muon(matrices.values(), weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 5):
        for group in ours.param_groups + torchs.param_groups:
            group["lr"] = 0.1 / step
        for name, parameter in model.named_parameters():
            grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = grad
            if name in KERNELS:
                matrices[name].grad = grad.flatten(1)
        ours.step()
        torchs.step()
    for name, wanted in matrices.items():
        found = model.get_parameter(name).detach().flatten(1)
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-9, atol=1e-9)


def test_all_else_goes_as_torchs_adamw_takes_it_to_the_bit():
    model = Mixed()
    other = copy.deepcopy(model)
    options = {"weight_decay": 0.3, "decay_norm_and_bias": False}
    steps(model, build_optimizer(model, settings(optimizer="muon", **options)))
    steps(other, build_optimizer(other, settings(optimizer="adamw", **options)))
    wanted = dict(other.named_parameters())
    same = {name for name, p in model.named_parameters() if torch.equal(p, wanted[name])}
    assert same == wanted.keys() - KERNELS


def test_it_is_for_kernels_that_map_all_channels_but_not_to_classes():
    with torch.device("meta"):
        config = ModelConfig(arch="deeplabv3plus", backbone="mobilenet_v2")
        model = build_model(config, num_classes=5)
    layers = dict(model.named_modules())
    found = muon_names(model)
    assert all(layers[name.removesuffix(".weight")].groups == 1 for name in found)
    others = {name for name, p in model.named_parameters() if p.dim() > 1} - found
    for name in others:
        path = name.removesuffix(".weight")
        assert "classifier" in name or layers[path].groups > 1
    assert any("classifier" in name for name in others)
    assert len(found) > 30
    assert muon_names(nn.Sequential(nn.Linear(2, 3))) == {"0.weight"}  # which has no groups


def test_a_state_that_is_saved_goes_on_to_the_bit():
    whole, first = Mixed(), Mixed()
    config = settings(optimizer="muon", weight_decay=0.1)
    steps(whole, one := build_optimizer(whole, config), 2)
    steps(first, other := build_optimizer(first, config), 2)
    again = build_optimizer(first, config)
    again.load_state_dict(copy.deepcopy(other.state_dict()))
    for model, optimizer in ((whole, one), (first, again)):
        steps(model, optimizer, 2)
    torch.testing.assert_close(whole.state_dict(), first.state_dict(), rtol=0, atol=0)
