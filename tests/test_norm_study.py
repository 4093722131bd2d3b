"""The studies of batch statistics: what they compute is what they say."""

import dataclasses
import json
import math

import norm_study
import norm_training
import pytest
import torch
from experiments import experiment, train, write_config
from ghost_norm import RUNNING, GhostBatchNorm2d, take_running
from norm_reports import training_summary, training_table
from norm_simulation import (
    ESTIMATES,
    SETTINGS,
    Setting,
    batch_statistics,
    exact,
    running_average,
    simulate,
    standard_error,
)
from norm_training import TREATMENTS, Result, Study
from torch import nn

from segtrain.checkpoint.format import load
from segtrain.config import load_config
from segtrain.distributed import collectives as dist
from segtrain.distributed.partition import partition
from segtrain.errors import CheckpointError, ConfigError
from segtrain.norm import PartialBatchNorm2d, sync_running_stats

C = 4
X = torch.randn(5, C, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# Ranks that see different data.
X = X * torch.linspace(0.5, 3, 5, dtype=torch.float64).view(5, 1, 1, 1) + torch.arange(5).view(
    5, 1, 1, 1
)


def weighted(layer):
    """`layer` in float64, with a weight and bias that could not be forgotten."""
    layer.double()
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2, C))
        layer.bias.copy_(torch.linspace(-1, 1, C))
    return layer


def two_steps(layer, x, settle):
    x = x.clone().requires_grad_()
    outputs = []
    for scale in (1.0, 2.0):
        y = layer(x * scale)
        y.pow(3).sum().backward()
        settle(layer)
        outputs.append(y.detach())
    return outputs, x.grad, layer.weight.grad, layer.bias.grad


def on_a_rank(running, momentum):
    layer = weighted(PartialBatchNorm2d(C, running=running, momentum=momentum))
    rows = partition(len(X), dist.world_size(), dist.rank())
    results = two_steps(layer, X[rows.start : rows.stop], sync_running_stats)
    return *results, list(layer.buffers())


@pytest.mark.parametrize("running", RUNNING)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_ghost_batch_norm_is_local_batch_norm_of_real_ranks(run_ranks, running, momentum):
    """5 images are 3 + 2: outputs, gradients and running statistics to 1e-12."""
    ghost = weighted(GhostBatchNorm2d(C, num_ranks=2, momentum=momentum))
    outputs, grad, *parameter_grads = two_steps(ghost, X, lambda _: None)
    ranks = run_ranks(2, on_a_rank, running, momentum)

    def close(a, b):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    close(outputs, [torch.cat(parts) for parts in zip(*(rank[0] for rank in ranks), strict=True)])
    close(grad, torch.cat([rank[1] for rank in ranks]))
    # `segtrain.training.gradients` adds these up over the ranks.
    close(parameter_grads, [ranks[0][i] + ranks[1][i] for i in (2, 3)])
    for rank in ranks:
        close(list(ghost.trackers[running].buffers()), rank[4])
    take_running(ghost, running)
    close([ghost.running_mean, ghost.running_var], ranks[0][4][:2])
    evaluated = ghost.eval()(X)
    theirs = weighted(nn.BatchNorm2d(C)).eval()
    theirs.running_mean, theirs.running_var = ranks[0][4][:2]
    close(evaluated, theirs(X))


def test_a_pooled_branch_of_one_image_a_rank_needs_the_others():
    pooled = X[:4].mean((2, 3), keepdim=True)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        GhostBatchNorm2d(C, num_ranks=4).double()(pooled)
    whole = GhostBatchNorm2d(C, num_ranks=4, whole_if_pooled=True).double()
    plain = nn.BatchNorm2d(C).double()
    torch.testing.assert_close(whole(pooled), plain(pooled), rtol=0, atol=1e-14)
    for tracker in whole.trackers.values():
        torch.testing.assert_close(tracker.running_var, plain.running_var, rtol=0, atol=1e-14)


def named(name):
    (treatment,) = [treatment for treatment in TREATMENTS if treatment.name == name]
    return treatment


@pytest.mark.parametrize(
    ("name", "norm", "ranks"),
    [
        ("sync", {"kind": "sync"}, 1),
        ("local_2_strict", {"kind": "local", "running": "mean"}, 2),
    ],
)
def test_a_treatment_trains_what_segtrain_train_does(run_ranks, tmp_path, data, name, norm, ranks):
    options = experiment(data, norm=norm, train={"steps": 3, "batch_size": 4})
    path = write_config(tmp_path / "c.yaml", options)
    assert run_ranks(ranks, train, path, tmp_path / "run") == [0] * ranks
    wanted = load(tmp_path / "run/checkpoints/last.pt").model

    config = load_config(path)
    treatment = named(name)
    state, losses = norm_training.train(config, treatment.norm(config), "test")
    assert len(losses) == 3
    if ranks > 1:
        take_running(state.model, "mean")
    weights = state.model.state_dict()
    for key, value in wanted.items():
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-11)


NUM_BATCHES = 4000


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_simulated_statistics_have_the_exact_law(setting):
    """Means over the steps within 4 standard errors; standard deviations likewise.

    An exponential average of momentum m is an autoregression with coefficient a = 1 - m; its sample
    variance has a relative variance of (2 (1 + a^2) / (1 - a^2) + kappa) / T, with the excess
    kurtosis kappa of what it averages, 12 at most (a chi-square of one degree of freedom).
    """
    decay = 0.9
    relative = (2 * (1 + decay**2) / (1 - decay**2) + 12) / NUM_BATCHES
    measured = simulate(setting, seed=1, num_batches=NUM_BATCHES)
    for name in ESTIMATES:
        for law, wanted in zip(measured[name], exact(setting, name), strict=True):
            error = standard_error(wanted, NUM_BATCHES)
            # The start (0, 1) is forgotten to a part of 1e-9.
            assert law.expectation == pytest.approx(wanted.expectation, abs=4 * error + 1e-8)
            assert law.sd == pytest.approx(wanted.sd, rel=4 * math.sqrt(relative) / 2, abs=1e-8)


def test_exact_laws_of_the_textbook_by_hand():
    """Variance 12.4^2 = 153.76; the average of momentum 0.1 keeps 1/19 of a variance."""
    rank0, mean, pooled = (exact(Setting(100), kind).var for kind in RUNNING)
    assert [law.expectation for law in (rank0, mean, pooled)] == pytest.approx([153.76] * 3)
    assert rank0.sd == pytest.approx(153.76 * math.sqrt(2 / 99 / 19))
    assert mean.sd == pytest.approx(rank0.sd / 2)
    assert pooled.sd == pytest.approx(153.76 * math.sqrt(2 / 399 / 19))
    # Means of -1.342, -0.447, 0.447 and 1.342 standard deviations: squares that add up to 4.
    apart = exact(Setting(100, spread=1.0), "pooled").var
    assert apart.expectation == pytest.approx(153.76 * (1 + 100 * 4 / 399))
    assert exact(Setting(100, spread=1.0), "mean").var == mean


def test_the_simulation_tracks_what_the_layers_track():
    values = Setting(4, spread=1.0).draw(30, torch.Generator().manual_seed(0))  # (k, B, T)
    layer = GhostBatchNorm2d(1, num_ranks=4).double()
    for step in values.unbind(2):
        layer(step.view(4, 1, 4, 1))
    batches = batch_statistics(values)
    for kind, tracker in layer.trackers.items():
        mean = running_average(batches[kind].mean, 0.0)[-1]
        var = running_average(batches[kind].var, 1.0)[-1]
        assert tracker.running_mean.item() == pytest.approx(mean, rel=1e-12)
        assert tracker.running_var.item() == pytest.approx(var, rel=1e-12)


def test_the_simulation_reports_every_setting(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(norm_study.sys, "argv", ["x", "simulation", "--output", str(tmp_path)])
    simulated = norm_study.run_simulation
    few = [Setting(100), *(setting for setting in SETTINGS if setting != Setting(100))]
    monkeypatch.setattr(norm_study, "run_simulation", lambda: simulated(few, num_batches=50))
    assert norm_study.main() == 0
    report = capsys.readouterr().out
    assert (tmp_path / "simulation.md").read_text() == report
    assert len(json.loads((tmp_path / "simulation.json").read_text())) == len(SETTINGS) * 6
    # 6 estimates and 13 settings, each table with a header of two lines.
    assert sum(line.startswith("|") for line in report.splitlines()) == 6 + 13 + 2 * 2
    assert report.count("none of one value") == 2
    assert report.count("```mermaid") == 2


def study(tmp_path, data, **train_options):
    options = {"steps": 2, "batch_size": 4, "precision": "float32"} | train_options
    config = load_config(write_config(tmp_path / "c.yaml", experiment(data, train=options)))
    return Study(config, continued_steps=2, precise_batches=1, output=tmp_path / "study")


def result(treatment, seed, score):
    return Result(
        treatment=treatment.name,
        seed=seed,
        losses=[2.0, 1.0],
        mean_iou=dict.fromkeys(treatment.evaluations, score),
        running={},
        train_s=1.0,
        eval_s=1.0,
    )


def test_a_study_that_was_stopped_runs_only_what_is_missing(monkeypatch, tmp_path, data):
    ran = []

    def run_one(_, treatment, seed):
        ran.append((seed, treatment.name))
        if treatment.name == "group" and ran.count((seed, "group")) == 1:
            raise KeyboardInterrupt
        return result(treatment, seed, 0.5)

    monkeypatch.setattr(Study, "_run_one", run_one)
    treatments = [named("sync"), named("group"), named("frozen")]
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, data).run(0, treatments)
    found = study(tmp_path, data).run(0, treatments)
    assert ran == [(0, "sync"), (0, "group"), (0, "group"), (0, "frozen")]
    assert found == [result(treatment, 0, 0.5) for treatment in treatments]


def test_results_of_other_settings_are_refused(tmp_path, data):
    study(tmp_path, data).run(0, [])
    study(tmp_path, data).run(1, [])
    with pytest.raises(ConfigError, match=r"config\.train\.lr: 0\.02 there, 0\.5 here"):
        study(tmp_path, data, lr=0.5).run(0, [])
    other = dataclasses.replace(study(tmp_path, data), precise_batches=3)
    with pytest.raises(ConfigError, match="precise_batches: 1 there, 3 here"):
        other.run(0, [])


def test_frozen_statistics_need_the_weights_of_sync(tmp_path, data):
    with pytest.raises(CheckpointError, match=r"sync\.pt: no such"):
        study(tmp_path, data).run(0, [named("frozen")])


def test_continued_runs_differ_in_nothing_but_the_statistics(tmp_path, data):
    this = study(tmp_path, data)
    sync, frozen = (this.config_of(named(name), 7) for name in ("sync_continued", "frozen"))
    assert sync.model_copy(update={"norm": frozen.norm}) == frozen
    assert (sync.seed, sync.train.steps, sync.train.lr) == (7, 2, pytest.approx(0.006))
    assert (sync.norm.kind, frozen.norm.kind) == ("sync", "frozen")


def test_gaps_are_those_of_the_same_seed():
    sync, local, frozen = named("sync"), named("local_1"), named("frozen")
    results = [result(sync, 0, 0.4), result(sync, 1, 0.6)]
    results += [result(local, 0, 0.3), result(local, 1, 0.4), result(frozen, 0, 0.5)]
    rows = {(row["treatment"], row["evaluated_with"]): row for row in training_summary(results)}
    row = rows["local_1", "rank0"]
    assert row["mIoU_mean"] == pytest.approx(0.35)
    assert row["gap_mean"] == pytest.approx(-0.15)
    assert row["gap_sd"] == pytest.approx(math.sqrt(0.005))
    assert rows["frozen", "initial"]["gap_mean"] is None  # sync, continued, was not run
    assert "| 0.350 ± 0.071 | 0.300 to 0.400 | -0.150 ± 0.071 | 1.000 |" in training_table(results)


def test_every_treatment_is_trained_evaluated_and_reported(monkeypatch, capsys, tmp_path, data):
    path = write_config(tmp_path / "c.yaml", experiment(data, train={"batch_size": 4}))
    words = f"camvid --data {data} --output {tmp_path}/study --config {path} --seeds 3 --steps 2"
    words += " --continued-steps 1 --precise-batches 1 --crop-size 41 57"
    words += " --set train.precision=float32"
    monkeypatch.setattr(norm_study.sys, "argv", ["x", *words.split()])
    assert norm_study.main() == 0
    rows = json.loads((tmp_path / "study/camvid.json").read_text())
    assert [row["treatment"] for row in rows if row["evaluated_with"] in ("running", "rank0")] == [
        *("sync", "local_1", "local_2", "sync_continued", "local_2_strict")
    ]
    assert len(rows) == 2 + 4 + 4 + 1 + 2 + 1 + 4
    assert all(0 <= row["mIoU_mean"] <= 1 for row in rows)
    assert (tmp_path / "study/camvid.md").read_text() in capsys.readouterr().out
    before = load(tmp_path / "study/seed_3/sync.pt").model
    assert "backbone.bn1.running_var" in before
