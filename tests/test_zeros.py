"""Weights that stay 0. The oracle is torch.nn.utils.prune in a loop over the whole batch."""

import copy
import re
from pathlib import Path

import pytest
import test_step
import torch
from test_step import CPU, TwoHeads, assert_same_training, plain_loop, run, weights
from torch.nn.utils import prune

from segtrain.checkpoint.format import Checkpoint
from segtrain.checkpoint.restore import restore
from segtrain.checkpoint.trained import LoadedModel
from segtrain.desk.results.differences import checkpoint_differences
from segtrain.errors import CheckpointError, ConfigError
from segtrain.training.optim.layers import freeze_layers, zero_masks
from segtrain.training.state import make_state

SLICE = "backbone.weight[1:, 2, -1]"
RULES = ({"names": ("head", "aux_head"), "keep_zeros": True}, {"zero": (SLICE,)})


def config(*rules, **options):
    options = {"momentum": 0.9, "weight_decay": 0.1, "init_from": "pruned"} | options
    return test_step.config(layers=rules or RULES, **options)


def pruned_file():
    """The model as a file with pruned weights has it; biases and one head without zeros."""
    model = TwoHeads()
    with torch.no_grad():
        model.head.weight[:, 1::2] = 0
        model.head.bias[1] = 0
    return model


def held():
    """Where weights must stay 0, by name."""
    model = pruned_file()
    masks = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    masks["head.weight"][:, 1::2] = True
    masks["backbone.weight"][1:, 2, 2] = True
    return masks


def by_prune():
    """The model whose weights torch multiplies with a mask in each forward pass."""
    model, masks = pruned_file(), held()
    for name in ("head", "backbone"):
        prune.custom_from_mask(getattr(model, name), "weight", ~masks[f"{name}.weight"])
    return model


def new_state(settings, *, resumed=False):
    model = TwoHeads() if resumed else pruned_file()
    return make_state(model, settings, CPU, resumed=resumed)


SGD = {
    "momentum and decay": config(),
    "clipped, two passes": config(clip_grad_norm=0.05, accumulate_steps=2),
    "virtual ranks": config(virtual_ranks=2),
    "shares": config(shares=3),
}


def trainings():
    return {name: test_step.trained(settings, new_state) for name, settings in SGD.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_is_that_of_weights_which_torch_prunes(run_ranks, world_size):
    for found in run_ranks(world_size, trainings):
        for name, (results, final) in found.items():
            wanted, pruned = plain_loop(SGD[name], by_prune)
            kept = {key: value for key, value in pruned.items() if key in final}
            for layer in ("head.weight", "backbone.weight"):
                kept[layer] = pruned[f"{layer}_orig"] * pruned[f"{layer}_mask"]
            assert_same_training((results, final), (wanted, kept))
            assert all((final[key][mask] == 0).all() for key, mask in held().items())


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamw", "momentum": 0.9, "ema_decay": 0.8},
        {"optimizer": "muon", "momentum": 0.9, "ema_decay": 0.8},
        {"decay_toward": "start", "clip_grad_norm": 0.1},
        {"precision": "float16", "ema_decay": 0.8},
        {"parallel": "hogwild"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_held_weights_and_all_that_moves_them_stay_0_and_others_move(options):
    state, masks = new_state(settings := config(**options)), held()
    before = weights(state)
    for _ in run(settings, state):
        pass
    averages = [] if state.average is None else [state.average.model.state_dict()]
    for final in (weights(state), *averages):
        for name, mask in masks.items():
            assert (final[name][mask] == 0).all(), name
            assert (final[name] != before[name])[~mask].all(), name
    for name, mask in masks.items():
        for value in state.optimizer.state[state.model.get_parameter(name)].values():
            assert value.dim() == 0 or (value[mask] == 0).all(), name


def checkpoint_of(state):
    parts = weights(state), None, copy.deepcopy(state.optimizer.state_dict()), {}
    return Checkpoint(state.step, "", "", *parts, best=None, start=state.initial_weights.fields())


def test_what_is_held_is_what_the_checkpoint_says_and_not_what_is_0_by_chance():
    settings = config()
    whole = new_state(settings)
    steps = run(settings, whole)
    next(steps), next(steps)
    saved = checkpoint_of(whole)
    for _ in steps:
        pass
    same, moved = (new_state(settings, resumed=True) for _ in range(2))
    restore(same, saved, Path("last.pt"))
    saved.model["head.weight"][0, 0] = saved.model["backbone.weight"][0, 2, 2, 0] = 0
    restore(moved, saved, Path("last.pt"))
    for state in (same, moved):
        assert {name: int(mask.sum()) for name, mask in state.initial_weights.held.items()} == {
            "head.weight": 6,
            "backbone.weight": 9,
        }
        for _ in run(settings, state):
            pass
        assert all((weights(state)[name][mask] == 0).all() for name, mask in held().items())
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(same).items())
    assert moved.model.head.weight[0, 0] != 0
    assert moved.model.backbone.weight[0, 2, 2, 0] != 0
    less = saved._replace(start=saved.start | {"held": {"head.weight": held()["head.weight"]}})
    (line,) = checkpoint_differences(saved, less)
    assert line == "start held: 1 of 2 tensors differ; the first is backbone.weight"
    saved.start["held"]["head.weight"] = saved.start["held"]["head.weight"][:1]
    with pytest.raises(CheckpointError, match=r"^last\.pt: .* head\.weight: expected shape"):
        restore(moved, saved, Path("last.pt"))


FROZEN = {"names": ("head",), "freeze": True}


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([{"zero": ("backbone.wieght[0]",)}], "no such weight; did you mean backbone.weight?"),
        (
            [{"zero": ("head.weight[0, 0, 0, 0, 0]",)}],
            "5 indices for a weight of shape (3, 4, 1, 1",
        ),
        ([{"zero": ("head.weight[3]",)}], "out of range for a weight of shape (3, 4, 1, 1)"),
        ([{"zero": ("head.weight[-4]",)}], "out of range"),
        ([{"zero": ("head.weight[:, 2:5]",)}], "out of range"),
        ([{"zero": ("head.weight[2:1]",)}], "an empty slice of a weight of shape (3, 4, 1, 1)"),
        ([FROZEN, {"zero": ("head.bias[0]",)}], "this weight is frozen by another rule"),
        ([{"names": ("aux_head", "*.bias"), "keep_zeros": True}], "no trained kernel under these"),
        ([FROZEN, {"names": ("head",), "keep_zeros": True}], "no trained kernel under these"),
        ([RULES[0], {"names": ("head",), "keep_zeros": False}], "no trained kernel under these"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(rules, said):
    model, optim = pruned_file(), config(*rules).optim
    freeze_layers(model, optim)
    with pytest.raises(ConfigError, match=rf"^optim\.layers\[\d\]\.\w+: .*{re.escape(said)}"):
        zero_masks(model, optim)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("head.weight[-1]", (-1,)),
        ("head.weight[-3:3, -4]", (slice(-3, 3), -4)),
        ("head.weight[ :, 0 ]", (slice(None), 0)),
        ("head.weight[::2, 1:]", (slice(None, None, 2), slice(1, None))),
        ("head.bias[:]", (slice(None),)),
    ],
)
def test_a_slice_is_read_as_python_reads_it(text, chosen):
    model, name = TwoHeads(), text.partition("[")[0]
    (mask,) = zero_masks(model, config({"zero": (text,)}).optim).values()
    wanted = torch.zeros_like(mask)
    wanted[chosen] = True
    assert torch.equal(mask, wanted)
    assert torch.equal(model.get_parameter(name) == 0, wanted)


@pytest.mark.parametrize(
    "text",
    [
        *("w", "w[]", "w[0", "w[0]]", "w[a]", "w[0][1]", "w[...]", "w[None]", "w[1.0]", "w[٣]"),
        *("w[0,]", "w[0:1:0]", "w[::-1]", "w[1:2:3:4]", "w[[0, 1]]", "[0]", "w[9999999999]"),
        *("__import__('os')[0]", "w-x[0]"),
    ],
)
def test_anything_but_a_name_and_a_slice_is_refused(text):
    with pytest.raises(ValueError, match="expected the name of a weight and a slice"):
        config({"zero": (text,)})


def test_eval_and_export_tell_of_zeros_where_they_are_meant_or_stand_out():
    settings = config()
    plain = config({"names": ("head",), "lr_mult": 2.0})
    for model, options, said in (
        (TwoHeads(), plain, []),
        (pruned_file(), plain, ["zeros: 4.55% of the kernels (6 of 132)"]),
        (TwoHeads(), settings, ["zeros: 0.00% of the kernels (0 of 132)"]),
    ):
        assert LoadedModel(model, options, None, 0).zeros() == said
