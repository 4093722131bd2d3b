import pytest
import torch

from segtrain.training.receipt_meter import StepMeter
from segtrain.training.step import StepResult


def result(loss, *, aux=float("nan"), norm=1.0, lr=0.1, data_s=0.0):
    tensors = [torch.tensor(v, dtype=torch.float64) for v in (loss, aux)]
    return StepResult(1, *tensors, torch.tensor(norm), lr, data_s)


def test_losses_are_means_and_the_learning_rate_is_the_newest(now):
    meter = StepMeter(8, torch.device("cpu"))
    meter.update(result(1.0, aux=3.0, norm=2.0, lr=0.3))
    meter.update(result(2.0, aux=5.0, norm=4.0, lr=0.2))
    now[0] += 1
    values = meter.read()
    assert values["train/loss"] == 1.5
    assert values["train/aux_loss"] == 4.0
    assert values["train/grad_norm"] == 3.0
    assert values["train/lr"] == 0.2


def test_time_and_speed_are_those_of_the_steps(now):
    meter = StepMeter(8, torch.device("cpu"))
    for _ in range(4):
        meter.update(result(1.0, data_s=0.25))
    now[0] += 10
    meter.skip(8.0)
    values = meter.read()
    assert values["time/step_s"] == 0.5
    assert values["time/data_s"] == 0.25
    assert values["images_per_s"] == 16


def test_reading_begins_anew(now):
    meter = StepMeter(8, torch.device("cpu"))
    meter.update(result(1.0))
    now[0] += 10
    assert "train/aux_loss" not in meter.read()  # without an auxiliary head
    meter.update(result(7.0))
    now[0] += 2
    values = meter.read()
    assert values["train/loss"] == 7.0
    assert values["time/step_s"] == 2.0
    with pytest.raises(ValueError, match="no step"):
        meter.read()


def test_steps_before_an_interruption_count_in_the_means_but_not_in_the_time(now):
    meter = StepMeter(8, torch.device("cpu"))
    meter.update_earlier(1.0, 5.0, 2.0)
    meter.update_earlier(2.0, 6.0, 3.0)
    meter.update(result(6.0, aux=7.0, norm=4.0))
    now[0] += 3
    values = meter.read()
    assert [values[f"train/{name}"] for name in ("loss", "aux_loss", "grad_norm")] == [3, 6, 3]
    assert values["time/step_s"] == 3
    meter.update(result(1.0))
    now[0] += 1
    assert meter.read()["train/loss"] == 1.0
