import copy
import json
import math
import re
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments import experiment, settings, write_config, write_data
from torch import nn

from segtrain.checkpoint.format import Checkpoint, experiment_fields, load, parse_experiment, save
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.checkpoint.restore import check_changes, restore
from segtrain.checkpoint.trained import load_initial, load_model, resolve
from segtrain.checkpoint.weights import load_weights
from segtrain.config import LayerRule, load_config, override_config
from segtrain.data.read.classes import SegClass, load_class_file
from segtrain.errors import CheckpointError
from segtrain.models import build_model
from segtrain.models.norms import make_norm
from segtrain.training.optim.optimizer import build_optimizer
from segtrain.training.optim.saved import restore_optimizer
from segtrain.training.state import make_state


def checkpoint(step=3, **fields):
    values = {
        "config": "{}",
        "classes": "{}",
        "model": {"weight": torch.arange(6.0).view(2, 3), "count": torch.tensor(4)},
        "average": None,
        "optimizer": {"state": {0: {"momentum": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
        "scaler": {},
        "best": {"step": min(2, step), "by": "mIoU", "score": 0.25},
        "evaluated": min(2, step),
    }
    return Checkpoint(step=step, **values | fields)


def checkpoint_fields(**fields):
    return {"format": 1, "segtrain": "0", **checkpoint(**fields)._asdict()}


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.fault(48)
def test_what_cannot_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    """weights_only refuses a NumPy array, which torch.save accepts."""
    save(tmp_path / "a.pt", checkpoint(step=1))
    best = {"step": 2, "by": "mIoU", "score": np.ones(1)}
    with pytest.raises(CheckpointError, match="more than tensors and plain data"):
        save(tmp_path / "a.pt", checkpoint(step=2, best=best))
    assert load(tmp_path / "a.pt").step == 1
    assert names(tmp_path) == ["a.pt"]


@pytest.mark.fault(37, 40)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"weight": torch.zeros(2)}, "found a bare state dict"),
        ([1, 2], "found list"),
        (torch.zeros(2), "found Tensor"),
        ({"format": 2, "segtrain": "9.0"}, "format 2, written by segtrain 9.0; this is segtrain"),
        ({"format": 1, "step": 3}, "damaged: config: Field required"),
        (checkpoint_fields(step=-5), "damaged: step: Input should be greater"),
        (checkpoint_fields(shares=3), "damaged: shares: Input should be a valid dictionary"),
        (checkpoint_fields(best={"step": 2}), r"damaged: best\.by: Field required"),
    ],
)
def test_files_that_are_no_checkpoint_are_refused_with_what_was_found(tmp_path, content, said):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path / "a.pt")


def test_what_is_no_file_of_torch_is_refused(tmp_path):
    for name, said in (
        ("my.yaml", "is a config; name a run directory"),
        ("missing.pt", "cannot be read: no such file"),
        (".", "cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=said):
            load(tmp_path / name)


def test_the_best_checkpoint_holds_no_training_state(tmp_path):
    store = CheckpointManager(tmp_path, keep_limit=1)
    store.save_best(checkpoint())
    best = load(tmp_path / "best.pt")
    assert best.optimizer is None
    assert best.scaler is None
    with pytest.raises(CheckpointError, match=r"no training state; go on with last\.pt"):
        restore(None, best, tmp_path / "best.pt")


def test_a_run_directory_means_its_best_checkpoint_otherwise_its_last(tmp_path):
    with pytest.raises(CheckpointError, match="no such run or checkpoint"):
        resolve(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no checkpoints/best\.pt or checkpoints/last\.pt"):
        resolve(tmp_path)
    mine, run = tmp_path / "mine", tmp_path / "mine/runs/mine"
    run.mkdir(parents=True)
    (mine / "config.yaml").touch()
    said = rf"mine: .* experiment, .*; segtrain train {mine} writes the run runs/mine"
    with pytest.raises(CheckpointError, match=said):
        resolve(mine)
    (run / "environment.json").touch()
    with pytest.raises(CheckpointError, match=rf"instead of it give {run}"):
        resolve(mine)
    store = CheckpointManager(tmp_path / "checkpoints", keep_limit=1)
    store.save_last(checkpoint())
    assert resolve(tmp_path) == store.last
    store.save_best(checkpoint())
    assert resolve(tmp_path).name == "best.pt"
    assert resolve(store.last) == store.last


@pytest.mark.fault(38)
def test_weights_of_another_model_are_listed_and_none_is_copied():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    weights = {key: value + 1 for key, value in before.items() if key != "0.bias"}
    weights |= {"0.weight": torch.zeros(9, 9)} | {f"other{i}": torch.zeros(1) for i in range(12)}
    with pytest.raises(CheckpointError) as refusal:
        load_weights(model, weights, Path("a.pt"))
    lines = str(refusal.value).splitlines()
    assert lines[1] == "  0.bias: missing in the checkpoint, (3,) in the model"
    assert lines[2] == "  0.weight: (9, 9) in the checkpoint, (3, 2) in the model"
    assert lines[-1].endswith(" and 4 more")
    assert len(lines) == 11
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A config, its classes and a checkpoint of a training state that has moved."""
    root = tmp_path_factory.mktemp("small")
    write_data(root, num_images=1)
    options = experiment(root, optim={"ema_decay": 0.9})
    options["train"]["precision"] = "float32"
    config = load_config(write_config(root / "c.yaml", options))
    classes = load_class_file(config.data.classes)
    state = new_state(config)
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    state.average.update(state.model, state.average.toward(1))
    saved = Checkpoint(
        step=1,
        **experiment_fields(config, classes),
        model=state.model.state_dict(),
        average=state.average.model.state_dict(),
        optimizer=state.optimizer.state_dict(),
        scaler=state.scaler.state_dict(),
        best=None,
    )
    return config, classes, saved


def new_state(config, seed=1):
    torch.manual_seed(seed)
    model = build_model(config.model, num_classes=4, norm=make_norm(config.norm))
    return make_state(model, config, torch.device("cpu"))


def test_a_checkpoint_restores_the_whole_state(small, tmp_path):
    config, _, saved = small
    save(tmp_path / "a.pt", saved)
    state = new_state(config, seed=2)
    restore(state, load(tmp_path / "a.pt"), tmp_path / "a.pt")
    assert state.step == 1
    for own, wanted in ((state, saved.model), (state.average, saved.average)):
        torch.testing.assert_close(own.model.state_dict(), wanted, rtol=0, atol=0)
    momenta = [entry["momentum_buffer"] for entry in state.optimizer.state_dict()["state"].values()]
    assert momenta
    assert all((momentum != 0).all() for momentum in momenta)
    state = new_state(override_config(config, ["train.shares=2"], source="c.yaml"))
    exponents = {name: 30 + i for i, name in enumerate(state.passes.gradients.exponents)}
    restore(state, saved._replace(shares={"exponents": exponents}), tmp_path / "a.pt")
    assert state.passes.gradients.exponents == exponents


@pytest.mark.fault(39)
@pytest.mark.parametrize(
    ("other", "change", "said"),
    [
        ("", "optim.kind=adamw", "optim.kind: sgd there, adamw now"),
        ("no average", "optim.ema_decay=0.8", "optim.ema_decay: null there, 0.8 now"),
        ("", "norm.kind=group", "norm.kind: sync there, group now"),
        ("", "model.head_channels=8", "model.head_channels: 16 there, 8 now"),
        ("classes", "seed=0", "data.classes: 4 classes there, 5 now"),
        ("", "model.dropout=0.3", None),
        ("", "train.precision=float64", None),
        ("", "optim.clip_grad_norm=0.1", None),
        ("", "optim.layers=[{names: [head], lr_mult: 2.0}]", None),
        ("", "optim.layers=[{zero: ['head.a[0]']}]", "optim.layers: [] there, [{names: [], fr"),
        ("", "train.shares=5", None),
        ("", "optim.ema_decay=null", None),
    ],
)
def test_changed_options_that_need_another_state_are_refused_by_name(small, other, change, said):
    config, classes, saved = small
    if other == "no average":
        old = override_config(config, ["optim.ema_decay=null"], source="c.yaml")
        saved = saved._replace(average=None, **experiment_fields(old, classes))
    if other == "classes":
        classes = replace(classes, classes=(*classes.classes, SegClass("more", (9, 9, 9), (9,))))
    new = override_config(config, [change], source="c.yaml")
    model = build_model(new.model, num_classes=classes.num_classes, norm=make_norm(new.norm))
    resumed = saved, Path("runs/my/checkpoints/last.pt")
    if not said:
        check_changes(model, *resumed, new, classes)
        return
    with pytest.raises(CheckpointError) as refusal:
        check_changes(model, *resumed, new, classes)
    first, changed, *ways = str(refusal.value).splitlines()
    assert first == f"{resumed[1]}: does not hold the state that these changes need"
    assert changed.startswith(f"  {said}")
    assert ways == [
        "to go on with the run: undo them",
        "to start a new run with its weights: --output DIR --set train.init_from=runs/my instead "
        "of --resume",
    ]


def test_masks_that_a_pruned_run_has_lost_are_missed(small):
    config, classes, saved = small
    pruned = override_config(config, ["optim.layers=[{zero: ['head.a[0]']}]"], source="c.yaml")
    model = build_model(pruned.model, num_classes=classes.num_classes, norm=make_norm(pruned.norm))
    saved = saved._replace(**experiment_fields(pruned, classes))
    with pytest.raises(CheckpointError, match=r"^a\.pt: damaged: no masks of the weights that st"):
        check_changes(model, saved, Path("a.pt"), pruned, classes)
    check_changes(model, saved._replace(start={"held": {}}), Path("a.pt"), pruned, classes)


@pytest.mark.fault(41)
def test_a_loaded_model_is_the_average_in_evaluation_mode_with_plain_batch_norm(small, tmp_path):
    config, classes, saved = small
    save(tmp_path / "checkpoints" / "last.pt", saved)
    model, loaded_config, loaded_classes, step, *_ = load_model(tmp_path)
    assert (loaded_config, loaded_classes, step) == (config, classes, 1)
    assert not model.training
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {type(module) for module in norms} == {nn.BatchNorm2d}
    own = model.state_dict()
    assert all(torch.equal(own[key], value) for key, value in saved.average.items())
    assert any(not torch.equal(saved.average[key], saved.model[key]) for key in saved.model)


def test_a_checkpoint_of_255_classes_is_loaded(small, tmp_path):
    names = "\n".join(f"- a class with a name of some length, number {i}" for i in range(255))
    (tmp_path / "many.yaml").write_text(f"classes:\n{names}\n")
    classes = load_class_file(str(tmp_path / "many.yaml"))
    save(tmp_path / "a.pt", checkpoint(**experiment_fields(small[0], classes)))
    loaded = load(tmp_path / "a.pt")
    assert len(loaded.classes) > 20_000
    assert parse_experiment(loaded, tmp_path / "a.pt")[1].num_classes == 255


def test_a_config_or_classes_that_cannot_be_read_are_refused_by_name(small):
    _, _, saved = small
    content = json.loads(saved.classes)
    content["classes"][1]["name"] = content["classes"][0]["name"]
    for change, said in (
        ({"config": saved.config.replace('"lr":', '"learning":')}, "does not .*: optim.learning"),
        ({"classes": json.dumps(content)}, "its classes contradict themselves: .*name"),
    ):
        with pytest.raises(CheckpointError, match=rf"a\.pt: .*{said}"):
            parse_experiment(saved._replace(**change), Path("a.pt"))


def spoilt(weights, key, value):
    """`weights` with one number of `key` replaced."""
    tensor = weights[key].double()
    tensor.view(-1)[0] = value
    return {**weights, key: tensor}


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("classifier.conv.weight", math.nan, "values are not finite"),
        ("running_mean", 1e300, "values are not finite"),  # in the model's float32
        ("running_var", -1.0, "a variance below 0: -1"),
        ("num_batches_tracked", -7, "a count below 0: -7"),
    ],
)
def test_weights_that_no_training_leaves_are_refused_by_name(small, tmp_path, key, value, said):
    """Such a model predicts the same class everywhere, without any error."""
    config, _, saved = small
    key = next(name for name in saved.model if name.endswith(key))
    state = new_state(config)
    for field in ("model", "average"):
        bad = saved._replace(**{field: spoilt(getattr(saved, field), key, value)})
        with pytest.raises(CheckpointError, match=said):
            restore(state, bad, tmp_path / "a.pt")
    save(tmp_path / "a.pt", bad)
    with pytest.raises(CheckpointError) as refusal:
        load_model(tmp_path / "a.pt")
    assert re.search(rf"a\.pt: damaged: (.|\n)*\n  {key}: .*{said}", str(refusal.value))
    with pytest.raises(CheckpointError, match=said):
        load_initial(build_model(config.model, num_classes=4), tmp_path / "a.pt")


def with_momenta(saved, make):
    states = saved.optimizer["state"].items()
    state = {i: {"momentum_buffer": make(value["momentum_buffer"])} for i, value in states}
    return {**saved.optimizer, "state": state}


def test_a_state_that_training_cannot_go_on_from_is_refused(small):
    config, _, saved = small
    short = with_momenta(saved, lambda old: old.flatten()[:1])
    infinite = with_momenta(saved, lambda old: torch.full_like(old, torch.inf))
    damaged = "the state of training is damaged, or belongs to another model"
    pulled = ["train.init_from=x", "optim.decay_toward=start", "optim.weight_decay=0.1"]
    name = next(name for name in saved.model if name.endswith("weight"))
    start = {"weights": {**saved.model, name: torch.zeros(1)}}
    less = {"weights": {key: value for key, value in saved.model.items() if key != name}}
    other = "does not hold the weights that the run started from"
    shares = {"exponents": {"weight": 40}}
    for options, fields, said in (
        ([], {"average": None}, r"no average of the weights \(optim\.ema_decay\)"),
        ([], {"optimizer": short}, f"{damaged}: momentum_buffer: expected shape"),
        ([], {"optimizer": infinite}, f"{damaged}: momentum_buffer is not finite"),
        (pulled, {"start": start}, rf"{damaged}: {name}: expected shape"),
        (pulled, {"start": less}, other),
        ([], {"optimizer": {"state": 3}}, damaged),
        (["train.precision=float16"], {"scaler": {"scale": "x"}}, damaged),
        (["train.shares=2"], {"shares": shares}, "optim.layers cannot freeze others"),
        (["train.shares=2"], {"shares": {"exponents": 3}}, damaged),
    ):
        state = new_state(override_config(config, options, source="c.yaml"))
        with pytest.raises(CheckpointError, match=rf"^a\.pt: .*{said}"):
            restore(state, saved._replace(**fields), Path("a.pt"))
    wide = {"weights": {key: value.double() for key, value in saved.model.items()}}
    state = new_state(override_config(config, pulled, source="c.yaml"))
    restore(state, saved._replace(start=wide), Path("a.pt"))  # train.precision may change


@pytest.mark.parametrize("channels", [10**6, 2**62])
def test_a_config_of_a_larger_model_than_the_weights_is_refused_before_it_is_built(
    small, tmp_path, channels
):
    _, _, saved = small
    config = json.loads(saved.config)
    config["model"]["head_channels"] = channels
    folder = tmp_path / "checkpoints"
    save(folder / "last.pt", saved._replace(config=json.dumps(config, indent=1)))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    try:
        with pytest.raises(CheckpointError, match=r"last\.pt: (the weights do not fit|its config)"):
            load_model(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert names(tmp_path) == ["checkpoints"]


def optimizer_of(model, **train):
    return build_optimizer(model, settings(**train))


def stepped(optimizer):
    """Gives every weight a momentum of its own."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for number, weight in enumerate(sorted(weights, key=id)):
        weight.grad = torch.full_like(weight, number + 1.0)
    optimizer.step()
    return {weight: optimizer.state[weight]["momentum_buffer"].clone() for weight in weights}


def rate_of(*names):
    return (LayerRule(names=names, lr_mult=3.0),)


def test_momenta_find_their_weights_by_name_in_other_groups():
    """All tensors have one shape and all groups one size: by their order they would be mistaken."""
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abcd"})
    wanted = stepped(one := optimizer_of(model, layers=rate_of("a", "b")))
    other = optimizer_of(model, layers=rate_of("a", "c"))
    restore_optimizer(other, one.state_dict())
    assert [group["param_names"][1][0] for group in other.param_groups] == ["c", "d"]
    assert [group["lr_mult"] for group in other.param_groups] == [3.0, 1.0]
    for weight, momentum in wanted.items():
        assert torch.equal(other.state[weight]["momentum_buffer"], momentum)
    # torch's fused updates take a momentum in the memory format of its weight only.
    turned = copy.deepcopy(model)
    turned["d"].weight.data = turned["d"].weight.data.T.contiguous().T
    assert turned["d"].weight.stride() == (1, 2)
    again = optimizer_of(turned)
    restore_optimizer(again, one.state_dict())
    momentum = again.state[turned["d"].weight]["momentum_buffer"]
    assert momentum.stride() == (1, 2)
    assert torch.equal(momentum, wanted[model["d"].weight])
    # A frozen weight has left, so the numbers of those behind it have changed.
    model["a"].requires_grad_(False)
    third = optimizer_of(model)
    restore_optimizer(third, one.state_dict())
    assert len(third.state) == 3
    for weight in third.state:
        assert torch.equal(third.state[weight]["momentum_buffer"], wanted[weight])


def test_ctrl_c_while_a_file_is_written_is_no_error(tmp_path, monkeypatch):
    """torch.save, when it is interrupted, raises an error of its own (seen: "unexpected pos")."""

    def interrupted(content, file):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos")

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "a.pt", checkpoint())
    assert list(tmp_path.iterdir()) == []
