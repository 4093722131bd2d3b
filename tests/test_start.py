"""Decay toward the start, frozen weights and weights held at 0 in whole runs: ranks, shares,
resume, verify.
"""

import copy
import re
import shutil

import pytest
import torch
from experiments import bits, last, small, train, unread, write_config
from test_verify import change_checkpoint, verify

from segtrain.checkpoint.format import load
from segtrain.config import ModelConfig, load_config
from segtrain.models import build_backbone, build_model
from segtrain.trainer.setup import _load_initial
from segtrain.training.optim.schedule import learning_rate

FROZEN = "backbone.layer1.0"
PRUNED, CUT = "backbone.layer2.0.conv2.weight", "backbone.layer2.1.conv1.weight"
# The last steps of a one-cycle are small: what a resumed run forgets must show before.
EVERYTHING = {
    "train": {"steps": 4, "batch_size": 6, "shares": 3, "accumulate_steps": 2},
    "optim": {
        "clip_grad_norm": 1.0,
        "lr": 0.05,
        "decay_toward": "start",
        "weight_decay": 0.05,
        "new_weight_decay": 0.01,
        "decay_norm_and_bias": False,
        "layers": [
            {"names": [FROZEN], "freeze": True},
            {"names": ["backbone.layer2.1", "head"], "lr_mult": 0.5},
            {"names": ["backbone"], "keep_zeros": True, "zero": [f"{CUT}[:, 3:5]"]},
        ],
    },
    "schedule": {"kind": "one_cycle"},
    "norm": {"precise_batches": 1},
}


@pytest.fixture(scope="module")
def weights_file(tmp_path_factory):
    """A file with a backbone, and its state dict."""
    torch.manual_seed(3)
    backbone = build_backbone(ModelConfig(backbone="resnet18", num_stages=2, output_stride=8))
    state = backbone.state_dict()
    state[PRUNED.removeprefix("backbone.")][torch.rand(128, 128, 3, 3) < 0.5] = 0
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    torch.save(state, path)
    return path, {f"backbone.{key}": value for key, value in state.items()}


def write(data, weights_file, path, **changes):
    options = small(data, **copy.deepcopy(EVERYTHING))
    options["model"]["pretrained"] = str(weights_file[0])
    options["train"].update(changes)
    return write_config(path, options)


@pytest.fixture(scope="module")
def alone(run_ranks, data, weights_file, tmp_path_factory):
    """The config, and a whole run of one rank."""
    where = tmp_path_factory.mktemp("alone")
    config = write(data, weights_file, where / "c.yaml")
    assert run_ranks(1, train, config, where / "run") == [0]
    return config, where / "run"


def test_frozen_weights_keep_the_values_of_the_file_and_others_move(alone, weights_file):
    found, start = last(alone[1]), weights_file[1]
    held = found.start["held"]
    assert held.keys() == {PRUNED, CUT}
    assert torch.equal(held[PRUNED], start[PRUNED] == 0)
    assert held[CUT][:, 3:5].all()
    assert held[CUT].sum() == 128 * 2 * 9
    for weights in (found.model, found.average):
        for key, value in start.items():
            if key.startswith(FROZEN):
                assert torch.equal(weights[key], value), key
            elif key in held:
                assert torch.equal(weights[key] == 0, held[key]), key
            elif value.is_floating_point():
                assert not torch.equal(weights[key], value), key

    config = load_config(alone[0])
    for group in found.optimizer["param_groups"]:
        assert group["lr"] == learning_rate(config, 3) * group["lr_mult"]

    kept = found.start["weights"]
    kernels = {k for k, v in start.items() if k.endswith("weight") and v.dim() > 1}
    assert kept.keys() == {key for key in kernels if not key.startswith(FROZEN)}
    cut = start[CUT].masked_fill(held[CUT], 0)
    assert all(torch.equal(value, (start | {CUT: cut})[key]) for key, value in kept.items())
    count = sum(int(mask.sum()) for mask in held.values())
    assert f"zeros      {count:,} of " in (alone[1] / "train.log").read_text()
    assert load(alone[1] / "checkpoints" / "best.pt").start is None


def test_a_run_goes_on_with_the_same_bits_on_other_ranks_without_the_file(
    run_ranks, tmp_path, data, weights_file, alone
):
    """One rank, then two; the file with the starting weights is gone meanwhile."""
    mine = tmp_path / "mine.pth"
    shutil.copy(weights_file[0], mine)
    config = write(data, (mine,), tmp_path / "c.yaml")
    assert run_ranks(1, train, config, tmp_path / "run", until=1) == [0]
    assert last(tmp_path / "run").step == 1
    mine.unlink()
    assert run_ranks(2, train, config, tmp_path / "run", True) == [0, 0]
    assert bits(last(tmp_path / "run")) == bits(last(alone[1]))


def test_the_run_is_verified_and_a_changed_start_alone_differs(run_ranks, tmp_path, alone):
    def change(checkpoint):
        checkpoint.start["weights"]["backbone.layer2.0.conv1.weight"][5, 0, 0, 0] += 1e-6

    run = tmp_path / "run"
    shutil.copytree(alone[1], run)
    change_checkpoint(run / "checkpoints" / "last.pt", change)
    for code, _, said in run_ranks(2, verify, run, "--steps", "1:"):
        assert code == 4
        what, line = said.splitlines()
        assert what.endswith("last.pt differs from the weights of its step, 4")
        assert line.strip().startswith("start weights: 1 of ")
        assert "backbone.layer2.0.conv1.weight" in line


def test_eval_and_export_say_how_much_is_zero(alone, lab):
    run, file = alone[1], lab.folder / "x.safetensors"
    said = lab.done("eval", run, "--device", "cpu").out
    said += lab.done("export", run, "--format", "safetensors", "--output", file).out
    found = re.findall(r"^zeros: ([\d.]+)% of the kernels \(", said, re.M)
    held = sum(int(mask.sum()) for mask in last(alone[1]).start["held"].values())
    kernels = [value for value in last(alone[1]).model.values() if value.dim() > 1]
    assert found == [f"{100 * held / sum(map(torch.numel, kernels)):.2f}"] * 2


def test_weights_that_no_file_has_are_new_layers(tmp_path):
    """Of a deep stem, where the file has a 7x7 one; of heads; and of a classifier of other size."""
    sizes = {"backbone": "resnet18", "head_channels": 8, "aux_channels": 8}
    torch.save(build_backbone(ModelConfig(**sizes)).state_dict(), tmp_path / "r18.pth")
    deep = {"stem": "32-32-64", "pretrained": str(tmp_path / "r18.pth")}
    config = unread(model=sizes | deep)
    model = build_model(config.model, num_classes=4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, loaded = _load_initial(model, config, ())
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    kernels = {name for name in loaded if before[name].dim() > 1}
    assert moved == kernels
    assert all(name.startswith("backbone.layer") for name in kernels)
