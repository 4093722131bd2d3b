"""The learning rate at every step, against torch and formulas of other programs."""

import math

import pytest
import torch
from experiments import settings
from torch.optim import lr_scheduler

from segtrain.training.optim.schedule import describe_rates, learning_rate

STEPS = 40


def rates(train):
    return [learning_rate(train, step) for step in range(train.train.steps)]


def theirs(make, lr=0.3, steps=STEPS, **options):
    """The rates that a scheduler of torch gives to SGD."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer, **options)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_cosine_is_torchs():
    train = settings(schedule="cosine", steps=STEPS, lr=0.3, min_lr=0.02)
    wanted = theirs(lr_scheduler.CosineAnnealingLR, T_max=STEPS, eta_min=0.02)
    assert rates(train) == pytest.approx(wanted, rel=1e-9)
    assert rates(train)[STEPS // 2] == pytest.approx((0.3 + 0.02) / 2)


@pytest.mark.parametrize("steps", [STEPS, 37])
def test_one_cycle_is_torchs(steps):
    train = settings(schedule="one_cycle", steps=steps, lr=0.3)
    options = {"max_lr": 0.3, "total_steps": steps, "cycle_momentum": False}
    wanted = theirs(lr_scheduler.OneCycleLR, steps=steps, **options)
    assert rates(train) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("step", [0, 500, 40_000, 79_999])
def test_poly_is_that_of_detectron2_and_of_mmsegmentation(step):
    """projects/DeepLab/deeplab/lr_scheduler.py, WarmupPolyLR with the numbers of its configs; and
    configs/_base_/schedules/schedule_80k.py: PolyLR(eta_min=1e-4, power=0.9)."""
    train = settings(steps=90_000, lr=0.01, warmup_steps=1000, warmup_start=0.001)
    alpha = min(step / 1000, 1.0)
    wanted = 0.01 * (0.001 * (1 - alpha) + alpha) * math.pow(1.0 - step / 90_000, 0.9)
    assert learning_rate(train, step) == pytest.approx(wanted, rel=1e-12)
    train = settings(steps=80_000, lr=0.01, min_lr=1e-4)
    wanted = (0.01 - 1e-4) * (1 - step / 80_000) ** 0.9 + 1e-4
    assert learning_rate(train, step) == pytest.approx(wanted, rel=1e-12)


def test_the_rates_of_the_log_are_those_of_the_steps_to_come():
    """At the first step, after the warmup, at the last step."""
    plain = settings(steps=100, lr=0.02, schedule="constant", warmup_steps=10, warmup_start=0.25)
    assert describe_rates(plain, 0) == describe_rates(plain, 60) == "0.005 -> 0.02"
    branch = settings(
        steps=100, lr=0.02, schedule="constant", warmup_steps=10, warmup_start=0.25, finish_from=50
    )
    last = f"{learning_rate(branch, 99):.3g}"
    assert describe_rates(branch, 0) == f"0.005 -> 0.02 -> {last}"
    assert describe_rates(branch, 49) == describe_rates(branch, 0)
    assert describe_rates(branch, 50) == f"0.02 -> {last}"
