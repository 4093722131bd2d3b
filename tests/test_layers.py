"""Rules for chosen layers: rates, decay, frozen and held weights, by names."""

import copy
import math

import pytest
import safetensors.torch
import test_engine
import torch
import torch.nn.functional as F
from experiments import settings
from torch import nn

from segtrain.config import LayerRule, config_to_yaml, parse_config
from segtrain.errors import ConfigError
from segtrain.norm import FrozenBatchNorm2d, SyncBatchNorm2d, precise_statistics
from segtrain.training.optim.initial_weights import make_initial_weights
from segtrain.training.optim.layers import freeze_layers, parameter_groups
from segtrain.training.optim.optimizer import WeightAverage, build_optimizer, set_learning_rate


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


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("backbone.2", "; did you mean backbone.1 or backbone.0 or backbone?"),
        ("haed", "; did you mean head?"),
        ("backbone.*.wieght", "weight"),
        ("xyz", "of the model"),
    ],
)
def test_a_pattern_that_fits_nothing_is_refused_with_close_names(pattern, hint):
    train = rules({"names": ("head",), "lr_mult": 2.0}, {"names": (pattern,), "freeze": True})
    with pytest.raises(
        ConfigError, match=r"optim\.layers\[1\]\.names: .* fits no weight"
    ) as caught:
        freeze_layers(TinyModel(), train.optim)
    assert hint in str(caught.value)


def test_a_decay_of_norms_that_are_spared_it_is_refused():
    rule = {"names": ("*.bias", "backbone.0.1"), "weight_decay": 0.1}
    freeze_layers(TinyModel(), rules(rule).optim)
    with pytest.raises(ConfigError, match=r"optim\.layers\[0\]\.weight_decay: has no effect"):
        freeze_layers(TinyModel(), rules(rule, decay_norm_and_bias=False).optim)


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
        average.update(model, step + 1)
    precise_statistics(model, [torch.randn(4, 3, 9, 9)])
    assert isinstance(model.backbone[0][1], FrozenBatchNorm2d)
    for state in (model.state_dict(), average.model.state_dict()):
        for name, value in state.items():
            stays = name in frozen or name.startswith("backbone.0.1.")
            assert torch.equal(value, before[name]) == stays, name
    assert type(model.backbone[1][1]) is SyncBatchNorm2d
    assert model.backbone[1][1].num_batches_tracked == 3


def test_a_frozen_norm_normalizes_by_its_running_statistics_in_training():
    """As torch's layer in evaluation mode."""
    model = TinyModel()
    with torch.no_grad():
        model.backbone[0][1].running_mean.normal_()
        model.backbone[0][1].running_var.uniform_(0.5, 2)
    wanted = copy.deepcopy(model.backbone[0]).eval()
    freeze_layers(model, rules({"names": ("backbone.0",), "freeze": True}).optim)
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(model.train().backbone[0](x), wanted(x))


OPTIMIZERS = [
    {"lr": 0.1, "weight_decay": 0.1},
    {"lr": 0.1, "weight_decay": 0.1, "nesterov": True, "decoupled_decay": True},
    {"lr": 0.1, "weight_decay": 0.1, "optimizer": "adamw"},
    {"lr": 0.1, "weight_decay": 0.1, "decay_toward": "start"},
]


def train_pruned(train, prune, steps=4):
    """A model after some steps, before them, and its average; `prune` is called at the start."""
    model = TinyModel()
    prune(model)
    before = copy.deepcopy(model)
    freeze_layers(model, train.optim)
    start = make_initial_weights(model, train.optim, None)
    optimizer, average = build_optimizer(model, train, start=start), WeightAverage(model, 0.9)
    for step in range(steps):
        model(torch.randn(4, 3, 9, 9)).square().mean().backward()
        start.hold_gradients()
        set_learning_rate(optimizer, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        average.update(model, step + 1)
    return model, before, average.model, optimizer


@pytest.mark.parametrize("options", OPTIMIZERS)
def test_pruned_kernels_stay_zero_and_the_others_move(options):
    def prune(model):
        with torch.no_grad():
            model.backbone[0][0].weight[1] = 0
            model.head.weight[0, 1] = 0

    train = rules({"names": ("backbone", "head"), "hold_zeros": True}, **options)
    model, before, average, optimizer = train_pruned(train, prune)
    for name, weight in model.named_parameters():
        was = before.get_parameter(name)
        held = (was == 0) & (was.dim() > 1)
        for now in (weight, average.get_parameter(name)):
            assert torch.equal(now == 0, held), name  # biases that start at 0 move too
        state = optimizer.state[weight]
        for key in {"momentum_buffer", "exp_avg"} & state.keys():
            assert (state[key][held] == 0).all(), name
    assert (before.backbone[0][0].weight == 0).sum() == 27


@pytest.mark.parametrize("options", OPTIMIZERS)
def test_a_mask_holds_weights_at_their_value(options, tmp_path):
    masks = {
        "head.bias": torch.tensor([True, False]),
        "backbone.1.0.weight": torch.rand(3, 3, 3, 3) < 0.5,
        "backbone.1.1.weight": torch.tensor([False, False, True]),
    }
    safetensors.torch.save_file(masks, tmp_path / "held.safetensors")
    train = settings(hold_mask=str(tmp_path / "held.safetensors"), **options)
    model, before, average, _ = train_pruned(train, lambda _: None)
    for name, held in masks.items():
        for one in (model, average):
            still = one.get_parameter(name) == before.get_parameter(name)
            assert torch.equal(still, held), name


MISFITS = {
    "no weight head.wieght; did you": {"head.wieght": torch.ones(2, 3, 1, 1).bool()},
    "expected torch.bool (2,), found torch.bool (3,)": {"head.bias": torch.ones(3).bool()},
    "expected torch.bool (2,), found torch.float32 (2,)": {"head.bias": torch.ones(2)},
    "holds nothing": {"head.bias": torch.zeros(2).bool()},
}


def test_a_mask_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "held.safetensors"

    def refusal():
        with pytest.raises(ConfigError) as caught:
            make_initial_weights(TinyModel(), settings(hold_mask=str(path)).optim, None)
        return str(caught.value)

    assert "no such file" in refusal()
    path.write_bytes(b"nothing")
    assert "cannot be read as safetensors" in refusal()
    for message, masks in MISFITS.items():
        safetensors.torch.save_file(masks, path)
        assert message in refusal()


@pytest.mark.parametrize(
    ("use", "rule", "message"),
    [
        (make_initial_weights, {"names": ("head",), "hold_zeros": True}, "hold_zeros: no kernel"),
        (freeze_layers, {"names": ("head",), "freeze": True}, "head.weight: would stay at random"),
        (freeze_layers, {"names": ("backbone", "*"), "freeze": True}, "nothing is left to train"),
    ],
)
def test_a_rule_without_anything_to_act_on_is_refused(use, rule, message):
    loaded = ["backbone"] if "random" in message else None
    with pytest.raises(ConfigError, match=message):
        use(TinyModel(), rules(rule).optim, loaded)


DATA = "data: {layout: folders, root: x, classes: y}\n"


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("layers: [{names: [head]}]", "nothing is said about these weights; set one of freeze"),
        ("layers: [{names: [], freeze: true}]", "optim.layers[0].names"),
        (
            "layers: [{names: [a], freeze: true, lr_mult: 2.0}]",
            "lr_mult: has no effect with freeze",
        ),
        (
            "layers: [{names: [a], freeze: true}]",
            "name some in model.pretrained",
        ),
        ("decay_toward: start", "optim.decay_toward: is about weights that are loaded"),
        ("new_weight_decay: 0.1", "optim.new_weight_decay: is about weights that are loaded"),
        ("layers: [{names: [a], lr_mutl: 2.0}]", "unknown key"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(train, message):
    with pytest.raises(ConfigError) as caught:
        parse_config(f"{DATA}optim: {{{train}}}\n", source="c.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("c.yaml:2: optim.")


def test_rules_are_printed_and_read_back():
    text = "{layers: [{names: ['*.bn1', head], lr_mult: 2.0}, {names: [head], hold_zeros: true}]}"
    whole = f"{DATA}model: {{pretrained: DEFAULT}}\noptim: {text}\n"
    config = parse_config(whole, source="c.yaml")
    assert parse_config(config_to_yaml(config), source="d.yaml") == config


RULES = test_engine.config(
    init_from="names where the weights come from; not read here",
    schedule="cosine",
    weight_decay=0.1,
    decay_toward="start",
    head_lr_mult=2.0,
    layers=(
        LayerRule(names=("aux_head",), freeze=True),
        LayerRule(names=("*.bias",), lr_mult=0.5, weight_decay=0.3, decay_toward="zero"),
    ),
)


def plain_loop():
    """RULES without any of segtrain's parts: one process, the whole batch, decay in the loss."""
    model = test_engine.TwoHeads().double()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = {n: p for n, p in model.named_parameters() if not n.startswith("aux_head")}
    velocity = dict.fromkeys(trained, 0.0)
    mean, std = (torch.tensor(x).double().view(3, 1, 1) for x in (RULES.data.mean, RULES.data.std))
    for step in range(RULES.train.steps):
        images, labels = test_engine.whole_batch(step)
        out, aux = (
            F.cross_entropy(logits, labels.long(), ignore_index=255)
            for logits in model((images.double() - mean) / std)
        )
        loss = out + RULES.loss.aux_weight * aux
        for name, p in trained.items():
            away = p if name.endswith("bias") else p - start[name]
            loss = loss + (0.3 if name.endswith("bias") else 0.1) / 2 * away.square().sum()
        gradients = torch.autograd.grad(loss, list(trained.values()))
        rate = RULES.optim.lr * (1 + math.cos(math.pi * step / RULES.train.steps)) / 2
        for (name, p), gradient in zip(trained.items(), gradients, strict=True):
            factor = 0.5 if name.endswith("bias") else 2.0 if name.startswith("head") else 1.0
            velocity[name] = 0.9 * velocity[name] + gradient
            p.data -= factor * rate * velocity[name]
    return model.state_dict()


def trained_by_rules():
    state = test_engine.new_state(RULES)
    assert len(list(test_engine.run(RULES, state))) == RULES.train.steps
    return test_engine.weights(state)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rules_train_alike_on_all_ranks_and_like_the_plain_loop(run_ranks, ranks):
    wanted = plain_loop()
    for found in run_ranks(ranks, trained_by_rules):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
