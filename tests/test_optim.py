"""The optimizer: groups, rules for chosen layers, decay and momentum against their formulas."""

import copy

import pytest
import torch
from experiments import settings
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from segtrain.config import LayerRule, ModelConfig
from segtrain.errors import ConfigError
from segtrain.models import MODELS, build_model
from segtrain.norm import FrozenBatchNorm2d, SyncBatchNorm2d, precise_statistics
from segtrain.training.optim.layers import freeze_layers, make_initial_weights, parameter_groups
from segtrain.training.optim.optimizer import (
    WeightAverage,
    build_optimizer,
    may_be_captured,
    set_learning_rate,
)
from segtrain.training.optim.saved import optimizer_fields, restore_optimizer
from segtrain.training.optim.schedule import learning_rate


class OneOfEach(nn.Module):
    """Has one of everything: norm, biases, a shared and a frozen parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.head_twin = nn.Conv2d(4, 4, 1)
        self.head_twin.weight = self.head[0].weight
        self.backbone_frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)


def test_every_trainable_parameter_is_in_one_group():
    rule = LayerRule(names=("*.0",), lr_mult=0.5, weight_decay=0.0)
    model, options = OneOfEach(), {"decay_norm_and_bias": False, "layers": (rule,)}
    groups = parameter_groups(model, settings(weight_decay=0.3, **options).optim)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in model.parameters() if p.requires_grad}
    groups = parameter_groups(model, settings(weight_decay=0.3).optim)
    assert {group["weight_decay"] for group in groups} == {0.3}


def test_only_the_backbone_keeps_the_plain_rate():
    model = OneOfEach()
    rates = found(model, settings(head_lr_mult=10.0), "lr_mult")
    plain = {name for name, rate in rates.items() if rate == 1.0}
    assert plain == {name for name in rates if name.startswith("backbone.")}
    assert set(rates.values()) == {1.0, 10.0}
    optimizer = build_optimizer(model, settings(head_lr_mult=10.0))
    set_learning_rate(optimizer, 0.02)
    assert {g["lr_mult"]: g["lr"] for g in optimizer.param_groups} == {1.0: 0.02, 10.0: 0.2}


def test_weight_average_is_the_loop_over_its_formula():
    model = OneOfEach()
    average = WeightAverage(model, decay=0.5)
    wanted = {name: value.clone().double() for name, value in model.state_dict().items()}
    for step in range(1, 13):
        with torch.no_grad():
            for value in {id(v): v for v in model.state_dict().values()}.values():
                value.add_(step)
        average.update(model, average.toward(step))
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


def fused_on_cpu(**options):
    """The optimizer that a CUDA device would have, with torch's fused kernels for CPUs."""
    model = OneOfEach()
    return model, build_optimizer(model, settings(**options), capturable=True)


def set_gradients(model, value=None):
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            random = torch.randn(parameter.shape, generator=generator)
            parameter.grad = random if value is None else torch.full_like(random, value)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_first_step_that_overflows_leaves_nothing_in_a_fused_optimizer(monkeypatch, name):
    """torch's fused SGD would keep velocities from memory that nothing has filled."""
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **options: empty_like(*args, **options).fill_(7.0)
    )
    model, optimizer = fused_on_cpu(optimizer=name, precision="float16")
    before = copy.deepcopy(model.state_dict())
    set_gradients(model, torch.inf)
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    for state in optimizer.state.values():
        assert all(not value.any() for value in state.values())


def test_kernels_are_not_fused_on_a_cpu_nor_where_hooks_could_not_be_left_out():
    """On CUDA others are (test_fake_step.py): a step that overflows is left out by the kernel, but
    not by the hooks before it, nor by Muon."""
    cpu, cuda, half = torch.device("cpu"), torch.device("cuda"), {"precision": "float16"}
    assert may_be_captured(OneOfEach(), settings(**half), cuda)
    for other in ({"decay_toward": "start"}, {"optimizer": "muon"}):
        assert may_be_captured(OneOfEach(), settings(**other), cuda)
        assert not may_be_captured(OneOfEach(), settings(**half, **other), cuda)
    assert not may_be_captured(OneOfEach(), settings(), cpu)
    assert build_optimizer(OneOfEach(), settings()).param_groups[0]["fused"] is None


def test_a_checkpoint_of_a_cpu_goes_on_with_fused_kernels_and_back():
    model, fused = fused_on_cpu(optimizer="adamw")
    set_gradients(model)
    fused.step()
    plain = build_optimizer(OneOfEach(), settings(optimizer="adamw"))
    restore_optimizer(plain, optimizer_fields(fused))
    assert plain.param_groups[0]["fused"] is None
    rates = [group["lr"] for group in optimizer_fields(fused)["param_groups"]]
    assert rates == pytest.approx([group["lr"] for group in plain.param_groups], rel=1e-6)
    assert {type(rate) for rate in rates} == {float}
    saved = plain.state_dict()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        options = settings(optimizer="adamw")
        on_device = build_optimizer(OneOfEach(), options, capturable=True)
        restore_optimizer(on_device, saved)
    # The kernel reads the counters on the device.
    assert {state["step"].device.type for state in on_device.state.values()} == {"cuda"}


class TinyModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Conv2d(3, 3, 3), SyncBatchNorm2d(3)) for _ in range(2)]
        self.backbone = nn.Sequential(*blocks)
        self.head = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.head(self.backbone(x))


def rules(*entries, **train):
    return settings(layers=tuple(LayerRule(**entry) for entry in entries), **train)


def found(model, train, key):
    groups = parameter_groups(model, train.optim)
    return {name: group[key] for group in groups for name in group["param_names"]}


def test_a_rule_is_for_weights_and_for_modules_and_stars_fit_anything():
    train = rules(
        {"names": ("backbone.0",), "lr_mult": 0.1},
        {"names": ("*.bias", "head.weight"), "lr_mult": 3.0},
        {"names": ("backbone.1.?.weight",), "weight_decay": 0.5},
    )
    rates = found(TinyModel(), train, "lr_mult")
    kernel_and_norm = ["backbone.{}.0.weight", "backbone.{}.1.weight"]
    assert {n for n, x in rates.items() if x == 0.1} == {n.format(0) for n in kernel_and_norm}
    assert {n for n, x in rates.items() if x == 3.0} >= {"head.weight", "head.bias"}
    assert rates["backbone.0.0.bias"] == 3.0  # of two rules the later one
    decays = found(TinyModel(), train, "weight_decay")
    assert {n for n, x in decays.items() if x == 0.5} == {n.format(1) for n in kernel_and_norm}
    freeze_layers(TinyModel(), train.optim)
    train = rules({"names": ("backbone.0.1",), "weight_decay": 0.5}, decay_norm_and_bias=False)
    with pytest.raises(ConfigError, match=r"layers\[0\]\.weight_decay: has no effect on norm"):
        freeze_layers(TinyModel(), train.optim)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("backbone.2", "did you mean backbone.1?"), ("haed", "mean head?"), ("xyz", "of the model")],
)
def test_a_pattern_that_fits_nothing_is_refused_with_close_names(pattern, hint):
    train = rules({"names": ("head",), "lr_mult": 2.0}, {"names": (pattern,), "freeze": True})
    with pytest.raises(
        ConfigError, match=r"optim\.layers\[1\]\.names: .* fits no weight"
    ) as caught:
        freeze_layers(TinyModel(), train.optim)
    assert hint in str(caught.value)


def test_frozen_weights_and_the_statistics_of_their_norms_stay():
    """Also through training mode, momentum, decay, averaging and precise statistics. A later rule
    thaws, and a norm with one trained weight is tracked."""
    train = rules(
        {"names": ("backbone",), "freeze": True}, {"names": ("backbone.1.?.bias",), "freeze": False}
    )
    model = TinyModel()
    freeze_layers(model, train.optim)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    pairs = [f"backbone.0.{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")]
    assert frozen == [*pairs, "backbone.1.0.weight", "backbone.1.1.weight"]
    before = copy.deepcopy(model.state_dict())
    optimizer, average = build_optimizer(model, train), WeightAverage(model, 0.9)
    model.train()
    for step in range(3):
        model(torch.randn(4, 3, 9, 9)).square().mean().backward()
        optimizer.step()
        average.update(model, average.toward(step + 1))
    precise_statistics(model, [torch.randn(4, 3, 9, 9)])
    assert isinstance(model.backbone[0][1], FrozenBatchNorm2d)
    for state in (model.state_dict(), average.model.state_dict()):
        for name, value in state.items():
            stays = name in frozen or name.startswith("backbone.0.1.")
            assert torch.equal(value, before[name]) == stays, name
    assert type(model.backbone[1][1]) is SyncBatchNorm2d
    assert model.backbone[1][1].num_batches_tracked == 3


def test_a_frozen_weight_that_would_stay_random_is_refused():
    rule = rules({"names": ("head",), "freeze": True})
    with pytest.raises(ConfigError, match=r"head\.weight: would stay at random"):
        freeze_layers(TinyModel(), rule.optim, ["backbone"])


# Decay and momentum.

STEPS = 5
OLD = [name for name, _ in TinyModel().named_parameters() if name.startswith("backbone")]


def gradients(model, step):
    """Some that depend on the weights, as those of a loss do: of sum(w**3 / 3 + step w)."""
    return {name: p.detach() ** 2 + step for name, p in model.named_parameters()}


def trained(train):
    """The weights after some steps with `train`, and those before; the head is new."""
    model = TinyModel().double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    start = make_initial_weights(model, train.optim, OLD)
    optimizer = build_optimizer(model, train, start=start)
    for step in range(STEPS):
        for name, grad in gradients(model, step).items():
            model.get_parameter(name).grad = grad
        set_learning_rate(optimizer, learning_rate(train, step))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, before


def assert_follows(train, formula):
    """`formula(name, start)` gives the weights after the steps."""
    found, before = trained(train)
    for name, weight in found.items():
        wanted = formula(name, before[name])
        torch.testing.assert_close(weight, wanted, rtol=1e-12, atol=1e-14, msg=name)


def options(**changes):
    return settings(**{"steps": STEPS, "lr": 0.02, "weight_decay": 0.3} | changes)


def target_of(name, weight, toward):
    """Where decay pulls a weight that starts as `weight`."""
    stays = toward == "start" and name.startswith("backbone")
    return weight if stays else torch.zeros_like(weight)


@pytest.mark.parametrize("toward", ["zero", "start"])
def test_decay_of_adamw_is_the_formula(toward):
    """By lr as torch's: arXiv:1711.05101 with its schedule in lr."""
    train = options(optimizer="adamw", decay_toward=toward)

    def formula(name, weight):
        target = target_of(name, weight, toward)
        first = second = torch.zeros_like(weight)
        for step in range(STEPS):
            lr = learning_rate(train, step)
            gradient = weight**2 + step
            weight = weight - lr * 0.3 * (weight - target)
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            root = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            weight = weight - lr * first / (1 - 0.9 ** (step + 1)) / root
        return weight

    assert_follows(train, formula)


def test_l2_sp_is_the_gradient_of_its_penalty():
    """arXiv:1802.01483, equation 2: alpha / 2 |w - w0|^2 for old weights, beta / 2 |w|^2 for new.

    The oracle is torch's SGD without decay.
    """
    train = options(decay_toward="start", new_weight_decay=0.7)

    def formula(name, start):
        decay = 0.3 if name.startswith("backbone") else 0.7
        weight, target = start.clone(), target_of(name, start, "start")
        optimizer = torch.optim.SGD([weight], momentum=0.9)
        for step in range(STEPS):
            weight.grad = weight**2 + step + decay * (weight - target)
            optimizer.param_groups[0]["lr"] = learning_rate(train, step)
            optimizer.step()
        return weight

    assert_follows(train, formula)


@pytest.mark.parametrize(
    ("arch", "backbone"),
    list(zip(MODELS, ("resnet18", "mobilenet_v3_large", "mobilenet_v2"), strict=True)),
)
def test_without_norm_and_bias_only_kernels_of_convolutions_decay(arch, backbone):
    """PSPNet-TF decays what is named weights: the kernels of convolutions."""
    with torch.device("meta"):
        model = build_model(ModelConfig(arch=arch, backbone=backbone), num_classes=3)
    kernels = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d)}
    groups = parameter_groups(model, settings(decay_norm_and_bias=False).optim)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed == kernels


def test_norm_and_bias_are_spared_in_every_form_of_decay():
    train = options(decay_norm_and_bias=False, decay_toward="start", new_weight_decay=0.7)
    (kernels, spared) = (set(), set())
    for group in parameter_groups(TinyModel(), train.optim, OLD):
        (kernels if group["weight_decay"] or group["pull"] else spared).update(group["param_names"])
    assert kernels == {"backbone.0.0.weight", "backbone.1.0.weight", "head.weight"}
    assert len(spared) == 7


def corrected_velocity(train, weight):
    """(10) of arXiv:1706.02677, section 3, with the correction: v = m lr'/lr v + lr g; w -= v."""
    velocity, before = torch.zeros_like(weight), None
    for step in range(STEPS):
        lr = learning_rate(train, step)
        gradient = weight**2 + step + 0.3 * weight
        factor = lr / before if before is not None else 1.0
        velocity, before = 0.9 * factor * velocity + lr * gradient, lr
        weight = weight - velocity
    return weight


# A rate that rises, that does both, and that falls.
RATES = [{"warmup_steps": 3, "poly_power": 0.0}, {"schedule": "one_cycle"}, {"poly_power": 0.9}]


@pytest.mark.parametrize("rates", RATES)
def test_momentum_has_the_correction(rates):
    assert_follows(options(**rates), lambda _, weight: corrected_velocity(options(**rates), weight))


def test_a_step_that_float16_leaves_out_changes_nothing():
    train = options(decay_toward="start")
    model = TinyModel()
    with torch.no_grad():
        model.head.weight[0] = 0
    start = make_initial_weights(model, train.optim, None)
    optimizer = build_optimizer(model, train, start=start)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    states = []
    for infinite in (False, True):
        for p in model.parameters():
            p.grad = torch.full_like(p, torch.inf if infinite else 1.0)
        set_learning_rate(optimizer, 0.01 if infinite else 0.02)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        buffers = [s["momentum_buffer"] for s in optimizer.state.values()]
        states.append([t.detach().clone() for t in (*model.parameters(), *buffers)])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_decay_that_lacks_its_weights_is_refused():
    toward = options(layers=(LayerRule(names=("head",), decay_toward="start"),))
    with pytest.raises(ConfigError, match=r"decay_toward start: head\.weight starts from random"):
        make_initial_weights(TinyModel(), toward.optim, OLD)
    names = [name for name, _ in TinyModel().named_parameters()]
    with pytest.raises(ConfigError, match="new_weight_decay: has no effect: no weight starts"):
        make_initial_weights(TinyModel(), options(new_weight_decay=0.1).optim, names)
