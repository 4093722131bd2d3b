"""The digits that tell whether two machines compute the same bits."""

import re
import threading

import pytest
import torch

from segtrain.config import TrainConfig
from segtrain.training.arithmetic import fingerprint

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "float64"])
def test_the_digits_are_the_same_each_time_and_in_any_thread(precision):
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
