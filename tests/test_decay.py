"""Weight decay in all its forms, and momentum, against their formulas in float64."""

import pytest
import torch
from experiments import settings
from torch import nn

from segtrain.config import LayerRule, ModelConfig
from segtrain.errors import ConfigError
from segtrain.models import MODELS, build_model
from segtrain.training.optim.initial_weights import make_initial_weights
from segtrain.training.optim.layers import parameter_groups
from segtrain.training.optim.optimizer import build_optimizer, set_learning_rate
from segtrain.training.optim.schedule import learning_rate

STEPS = 5
OLD = ("backbone.0.weight", "backbone.0.bias", "backbone.1.weight", "backbone.1.bias")


class TinyModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Conv2d(4, 2, 1)
        self.double()


def gradients(model, step):
    """Some that depend on the weights, as those of a loss do: of sum(w**3 / 3 + step w)."""
    return {name: p.detach() ** 2 + step for name, p in model.named_parameters()}


def trained(train, loaded=OLD, steps=STEPS):
    """The weights after some steps with `train`, and those before."""
    model = TinyModel()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    start = make_initial_weights(model, train.optim, loaded)
    optimizer = build_optimizer(model, train, start=start)
    for step in range(steps):
        for name, grad in gradients(model, step).items():
            model.get_parameter(name).grad = grad
        set_learning_rate(optimizer, learning_rate(train, step))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, before


def assert_follows(train, formula, loaded=OLD):
    """`formula(name, start)` is a generator that gets gradients, and gives weights."""
    found, before = trained(train, loaded)
    for name, weight in found.items():
        wanted = formula(name, before[name])
        torch.testing.assert_close(weight, wanted, rtol=1e-12, atol=1e-14, msg=name)


def options(**changes):
    return settings(**{"steps": STEPS, "lr": 0.02, "weight_decay": 0.3} | changes)


@pytest.mark.parametrize("head_lr_mult", [1.0, 10.0])
@pytest.mark.parametrize("warmup", [0, 2])
def test_decoupled_sgd_is_composers(head_lr_mult, warmup):
    """DecoupledSGDW: momentum; w *= 1 - lr / initial_lr * decay; w -= lr * momentum."""
    train = options(
        decoupled_decay=True, momentum=0.8, head_lr_mult=head_lr_mult, warmup_steps=warmup
    )

    def formula(name, weight):
        initial = 0.02 * (1.0 if name in OLD else head_lr_mult)
        buffer = torch.zeros_like(weight)
        for step in range(STEPS):
            lr = learning_rate(train, step) * (1.0 if name in OLD else head_lr_mult)
            buffer = 0.8 * buffer + weight**2 + step
            weight = weight * (1 - lr / initial * 0.3) - lr * buffer
        return weight

    assert_follows(train, formula)


@pytest.mark.parametrize(
    ("decoupled", "toward"), [(d, t) for d in (True, False) for t in ("zero", "start")]
)
def test_decay_of_adamw_is_the_formula(decoupled, toward):
    """By lr as torch's (arXiv:1711.05101 with its schedule in lr), or by lr / initial_lr as
    composer's DecoupledAdamW."""
    train = options(optimizer="adamw", decoupled_decay=decoupled, decay_toward=toward)

    def formula(name, weight):
        target = weight if toward == "start" and name in OLD else torch.zeros_like(weight)
        first = second = torch.zeros_like(weight)
        for step in range(STEPS):
            lr = learning_rate(train, step)
            gradient = weight**2 + step
            weight = weight - (lr / 0.02 if decoupled else lr) * 0.3 * (weight - target)
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            root = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            weight = weight - lr * first / (1 - 0.9 ** (step + 1)) / root
        return weight

    assert_follows(train, formula)


@pytest.mark.parametrize("nesterov", [False, True])
def test_l2_sp_is_the_gradient_of_its_penalty(nesterov):
    """arXiv:1802.01483, equation 2: alpha / 2 |w - w0|^2 for old weights, beta / 2 |w|^2 for new.

    The oracle is torch's SGD without decay on the loss with the penalty.
    """
    train = options(decay_toward="start", new_weight_decay=0.7, nesterov=nesterov)
    model = TinyModel()
    starts = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=nesterov)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = 0.0
        for name, p in model.named_parameters():
            old = name in OLD
            away = p - starts[name] if old else p
            loss = loss + (p**3 / 3 + step * p).sum()
            loss = loss + (0.3 if old else 0.7) / 2 * away.square().sum()
        loss.backward()
        optimizer.param_groups[0]["lr"] = learning_rate(train, step)
        optimizer.step()
    found, _ = trained(train)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-12, atol=1e-14, msg=name)


def test_decoupled_decay_toward_the_start_stands_still_there():
    """Without a gradient the weight neither leaves its start nor fails to come back to it."""
    train = options(decoupled_decay=True, decay_toward="start", momentum=0.0, lr=1e-9)
    model = TinyModel()
    start = make_initial_weights(model, train.optim, None)
    optimizer = build_optimizer(model, train, start=start)
    weight = model.head.weight
    before = weight.detach().clone()
    for moved, wanted in ((0.0, 0.0), (1.0, 0.7)):
        with torch.no_grad():
            weight.copy_(before + moved)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), before + wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("arch", MODELS)
@pytest.mark.parametrize("backbone", ["resnet18", "mobilenet_v2", "mobilenet_v3_large"])
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
    assert kernels == {"backbone.0.weight", "head.weight"}
    assert spared == {"backbone.0.bias", "backbone.1.weight", "backbone.1.bias", "head.bias"}


def velocity_form(*, corrected):
    """(10) of arXiv:1706.02677, section 3: v = m v + lr g; w -= v; correction: v = m lr'/lr v."""

    def formula(train, weight):
        velocity, before = torch.zeros_like(weight), None
        for step in range(STEPS):
            lr = learning_rate(train, step)
            gradient = weight**2 + step + 0.3 * weight
            factor = lr / before if corrected and before is not None else 1.0
            velocity, before = 0.9 * factor * velocity + lr * gradient, lr
            weight = weight - velocity
        return weight

    return formula


# A rate that rises, falls by steps, and falls smoothly.
RATES = [
    {"warmup_steps": 3, "poly_power": 0.0},
    {"warmup_steps": 3, "warmup_start": 0.0},
    {"schedule": "step", "milestones": (2,)},
    {"poly_power": 0.9},
]


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("corrected", [True, False])
def test_momentum_has_the_correction_or_is_the_naive_form(corrected, rates):
    if corrected and rates.get("warmup_start") == 0:
        pytest.skip("from a rate of 0 the correction is 0 / 0")
    train = options(momentum_correction=corrected, **rates)
    formula = velocity_form(corrected=corrected)
    assert_follows(train, lambda _, weight: formula(train, weight))


@pytest.mark.parametrize("form", ["decoupled", "held", "velocity"])
def test_a_step_that_float16_leaves_out_changes_nothing(form):
    train = {
        "decoupled": options(decoupled_decay=True),
        "held": options(layers=(LayerRule(names=("head",), hold_zeros=True),)),
        "velocity": options(momentum_correction=False),
    }[form]
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
    if form == "velocity":
        assert {group["velocity_lr"] for group in optimizer.param_groups} == {0.02}


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"weight_decay": 0.0, "decoupled_decay": True}, "decoupled_decay: has no effect"),
        ({"weight_decay": 0.0, "decay_toward": "start"}, "decay_toward: has no effect"),
        ({"optimizer": "adamw", "momentum_correction": False}, "momentum_correction: has no"),
        ({"momentum": 0.0, "momentum_correction": False}, "momentum_correction: has no"),
    ],
)
def test_a_form_without_effect_is_refused(train, message):
    with pytest.raises(ValueError, match=message):
        options(**train)


def test_decay_that_lacks_its_weights_is_refused():
    toward = options(layers=(LayerRule(names=("head",), decay_toward="start"),))
    with pytest.raises(ConfigError, match=r"decay_toward start: head\.weight starts from random"):
        make_initial_weights(TinyModel(), toward.optim, OLD)
    names = [name for name, _ in TinyModel().named_parameters()]
    with pytest.raises(ConfigError, match="new_weight_decay: has no effect: no weight starts"):
        make_initial_weights(TinyModel(), options(new_weight_decay=0.1).optim, names)
