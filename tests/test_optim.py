import copy

import pytest
import torch
from experiments import settings
from fake_device import NoWaits
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from segtrain.checkpoint.restore import restore_optimizer
from segtrain.config import LayerRule
from segtrain.training.optim import optimizer as optimizer_module
from segtrain.training.optim.layers import parameter_groups
from segtrain.training.optim.optimizer import WeightAverage, build_optimizer, set_learning_rate
from segtrain.training.optim.schedule import base_lr, learning_rate, poly


class TinyModel(nn.Module):
    """Has one of everything: norm, biases, a shared and a frozen parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.head_twin = nn.Conv2d(4, 4, 1)
        self.head_twin.weight = self.head[0].weight
        self.backbone_frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)


def test_poly_falls_from_one_to_zero():
    assert poly(0, 100) == 1
    assert poly(100, 100) == 0
    assert poly(50, 100) == pytest.approx(0.5358867312681466)  # 0.5 ** 0.9
    assert poly(75, 100, power=2) == 0.0625
    with pytest.raises(ValueError, match=r"step 101 is outside \[0, 100\]"):
        poly(101, 100)


def test_rate_scales_with_the_batch_only_if_asked():
    assert base_lr(settings(lr=0.01, batch_size=24)) == 0.01
    assert base_lr(settings(lr=0.01, batch_size=24, lr_batch_size=16)) == pytest.approx(0.015)
    train = settings(lr=0.01, batch_size=24, lr_batch_size=16, steps=4, poly_power=1.0)
    assert learning_rate(train, 2) == pytest.approx(0.0075)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decay_norm_and_bias": False},
        {"layers": (LayerRule(names=("*.0",), lr_mult=0.5, weight_decay=0.0),)},
    ],
)
def test_every_trainable_parameter_is_in_one_group(options):
    model = TinyModel()
    groups = parameter_groups(model, settings(weight_decay=0.3, **options).optim)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in model.parameters() if p.requires_grad}
    if not options:
        assert {group["weight_decay"] for group in groups} == {0.3}


def group_of(groups, parameter):
    (found,) = (g for g in groups if any(p is parameter for p in g["params"]))
    return found


def test_only_the_backbone_keeps_the_plain_rate():
    model = TinyModel()
    groups = parameter_groups(model, settings(head_lr_mult=10.0).optim)
    assert {group_of(groups, p)["lr_mult"] for p in model.backbone.parameters()} == {1.0}
    assert {group_of(groups, p)["lr_mult"] for p in model.head.parameters()} == {10.0}
    assert group_of(groups, model.head_twin.bias)["lr_mult"] == 10.0
    optimizer = build_optimizer(model, settings(head_lr_mult=10.0))
    set_learning_rate(optimizer, 0.02)
    assert {g["lr_mult"]: g["lr"] for g in optimizer.param_groups} == {1.0: 0.02, 10.0: 0.2}


def test_weight_average_is_the_loop_over_its_formula():
    model = TinyModel()
    average = WeightAverage(model, decay=0.5)
    wanted = {name: value.clone().double() for name, value in model.state_dict().items()}
    for step in range(1, 13):
        with torch.no_grad():
            for value in {id(v): v for v in model.state_dict().values()}.values():
                value.add_(step)
        average.update(model, step)
        decay = min(0.5, (1 + step) / (10 + step))  # 2/11 at first, 0.5 from step 8 on
        for name, value in model.state_dict().items():
            wanted[name] = decay * wanted[name] + (1 - decay) * value
    for name, value in average.model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), wanted[name], rtol=1e-5, atol=0, msg=name)
        else:
            assert value == model.state_dict()[name]
    assert not average.model.training
    assert not any(p.requires_grad for p in average.model.parameters())


def fused_on_cpu(monkeypatch, **options):
    """The optimizer that a CUDA device would have, with torch's fused kernels for CPUs."""
    monkeypatch.setattr(optimizer_module, "_may_be_fused", lambda *_: True)
    model = TinyModel()
    return model, build_optimizer(model, settings(**options))


def gradients(model, value=None):
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            random = torch.randn(parameter.shape, generator=generator)
            parameter.grad = random if value is None else torch.full_like(random, value)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_fused_optimizer_steps_as_the_other(monkeypatch, name):
    plain = TinyModel()
    other = build_optimizer(plain, settings(optimizer=name))
    model, optimizer = fused_on_cpu(monkeypatch, optimizer=name)
    for _ in range(3):
        for one, update in ((plain, other), (model, optimizer)):
            gradients(one)
            update.step()
    assert optimizer.param_groups[0]["fused"]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_first_step_that_overflows_leaves_nothing_in_a_fused_optimizer(monkeypatch, name):
    """torch's fused SGD would keep velocities from memory that nothing has filled."""
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **options: empty_like(*args, **options).fill_(7.0)
    )
    model, optimizer = fused_on_cpu(monkeypatch, optimizer=name, precision="float16")
    before = copy.deepcopy(model.state_dict())
    gradients(model, torch.inf)
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    for state in optimizer.state.values():
        assert all(not value.any() for value in state.values())


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({}, True),
        ({"optimizer": "adamw"}, True),
        ({"precision": "float16"}, True),
        ({"decoupled_decay": True}, True),
        # A step that overflows is left out by the kernel, but not by the hooks before it.
        ({"precision": "float16", "decoupled_decay": True}, False),
        ({"precision": "float16", "momentum_correction": False}, False),
    ],
)
def test_on_cuda_the_kernels_are_fused_unless_hooks_could_not_be_left_out(options, fused):
    with FakeTensorMode(), torch.device("cuda"):
        optimizer = build_optimizer(TinyModel(), settings(**options))
    assert bool(optimizer.param_groups[0]["fused"]) == fused
    on_cpu = build_optimizer(TinyModel(), settings(**options))
    assert on_cpu.param_groups[0]["fused"] is None


def test_a_checkpoint_of_a_cpu_goes_on_with_fused_kernels_and_back(monkeypatch):
    model, fused = fused_on_cpu(monkeypatch, optimizer="adamw")
    gradients(model)
    fused.step()
    monkeypatch.undo()
    plain = build_optimizer(TinyModel(), settings(optimizer="adamw"))
    restore_optimizer(plain, fused.state_dict())
    assert plain.param_groups[0]["fused"] is None
    saved = plain.state_dict()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        on_device = build_optimizer(TinyModel(), settings(optimizer="adamw"))
        restore_optimizer(on_device, saved)
    # The kernel reads the counters on the device.
    assert {state["step"].device.type for state in on_device.state.values()} == {"cuda"}


def test_the_average_takes_in_all_counters_by_one_operation():
    model = TinyModel()
    average = WeightAverage(model, 0.9)
    for layer in (model.backbone[1], model.head[1]):
        layer.num_batches_tracked.fill_(5)
    with NoWaits() as operations:
        average.update(model, 3)
    assert [name for name in operations.seen if name == "copy_"] == []
    layers = average.model.backbone[1], average.model.head[1]
    assert [int(layer.num_batches_tracked) for layer in layers] == [5, 5]
