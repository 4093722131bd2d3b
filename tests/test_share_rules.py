"""What breaks equal bits without a word is refused, and other arithmetic is seen."""

import re
import threading

import pytest
import torch
from experiments import last, refusal, small, train, write_config
from torch import nn

from segtrain.config import TrainConfig
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.norm import FrozenBatchNorm2d, SyncBatchNorm2d
from segtrain.training import share_passes
from segtrain.training.share_rules import fingerprint, refuse_layers, watch

CPU = torch.device("cpu")
IMAGES = torch.randn(2, 3, 4, 4)


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.Dropout2d(0.1), nn.BatchNorm2d(3)])
def test_layers_that_depend_on_when_they_run_are_refused_by_name(layer):
    others = [SyncBatchNorm2d(3), FrozenBatchNorm2d(3), nn.GroupNorm(1, 3), nn.Dropout(0.0)]
    model = nn.Sequential(*others, nn.Sequential(layer))
    with pytest.raises(ConfigError, match=f"train.shares: 4.0, a {type(layer).__name__}, "):
        refuse_layers(model, "train.shares")


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (nn.RReLU(), "changes torch's random numbers"),
        (nn.InstanceNorm2d(3, track_running_stats=True), "changes the buffer 0.running_mean"),
    ],
)
def test_other_layers_are_seen_in_the_first_step(layer, what):
    model = nn.Sequential(layer).train()

    def step():
        with watch(model):
            model(IMAGES)

    with pytest.raises(ConfigError, match=what):
        step()


def test_a_step_without_side_effects_passes():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), SyncBatchNorm2d(3), nn.GroupNorm(1, 3)).train()
    with watch(model):
        model(IMAGES).sum().backward()
    assert model[1].num_batches_tracked == 1


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "float64"])
def test_the_digits_of_a_machine_are_the_same_each_time_and_in_any_thread(precision):
    config, found = TrainConfig(precision=precision), []

    def work():
        torch.set_num_threads(1)
        found.append(fingerprint(CPU, config))

    state = torch.get_rng_state()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work()
    assert len(found) == 5
    assert len(set(found)) == 1
    assert re.fullmatch("[0-9a-f]{16}", found[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_they_are_others_for_another_precision_or_a_kernel_that_rounds_otherwise(monkeypatch):
    precisions = ("float32", "bfloat16", "float16", "float64")
    digits = [fingerprint(CPU, TrainConfig(precision=name)) for name in precisions]
    assert len(set(digits)) == 4
    conv2d = torch.nn.functional.conv2d

    def other_kernel(x, weight, *args, **kwargs):
        return torch.nextafter(conv2d(x, weight, *args, **kwargs), torch.zeros(()))

    monkeypatch.setattr(torch.nn.functional, "conv2d", other_kernel)
    assert fingerprint(CPU, TrainConfig()) != digits[0]


def test_more_ranks_than_shares_are_refused_by_the_ranks_too(run_ranks, tmp_path, data):
    config = write_config(tmp_path / "c.yaml", small(data, train={"shares": 2}))
    said = "train.shares: 2 shares leave some of 3 ranks without one; start at most 2 ranks"
    for kind, code, text in run_ranks(3, refusal, train, config, tmp_path / "run"):
        assert (kind, code) == ("ConfigError", 2)
        assert text.startswith(said)


def with_digits(digits, function, *args, **options):
    """Calls `function` on ranks whose arithmetic has these digits."""
    share_passes.fingerprint = lambda *_: digits[dist.rank()]
    return function(*args, **options)


def test_the_log_warns_of_ranks_and_checkpoints_with_other_arithmetic(run_ranks, tmp_path, data):
    values = small(data, train={"shares": 3, "steps": 2})
    config, run = write_config(tmp_path / "c.yaml", values), tmp_path / "run"

    def warnings():
        lines = (run / "train.log").read_text().splitlines()
        return [line for line in lines if "warning" in line and "other bits" in line]

    assert run_ranks(1, with_digits, ["a"], train, config, run, until=1) == [0]
    assert last(run).shares["arithmetic"] == "a"
    assert warnings() == []
    assert run_ranks(2, with_digits, ["b", "c"], train, config, run, True) == [0] * 2
    first, second = warnings()
    assert "warning: ranks 1 compute other bits than rank 0" in first
    assert "than the one that trained" in second
