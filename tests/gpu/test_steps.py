"""Training steps on the device: waits, kernels, time and memory, and what they compute."""

import math
import statistics
import time

import pytest
import torch
from rounds import estimate, measure, ratios
from stepping import config_of

from gpu.watching import (
    LOCAL,
    SYNC,
    TINY,
    Training,
    added_gib,
    contenders,
    greatest_difference,
    host_waits,
    num_kernels,
    one_rank,
)
from segtrain.desk.commands.doctor import missing_for_triton

pytestmark = pytest.mark.gpu(limit_s=240)

# Crops as in recipes, and so small ones that the host may be slower than the device.
CASES = {"large": ({"backbone": "resnet50"}, 713), "small": ({"backbone": "resnet18"}, 257)}


@pytest.mark.parametrize("precision", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_the_host_never_waits_in_a_synchronized_step(device, figures, case, precision):
    is_cuda = device.type == "cuda"
    if not is_cuda and case == "small":
        pytest.skip("one size tells enough on a CPU")
    model, side = CASES[case] if is_cuda else (TINY, 33)
    config = config_of((side, side), 2, model=model, precision=precision)
    with one_rank(device):
        trainings = contenders(config, device)
        rounds = {"rounds": 6, "warmup": 5, "block_ms": 100} if is_cuda else {"rounds": 1}
        times = measure(trainings, device=device, **rounds)
        for name, training in trainings.items():
            figures[f"{name}: ms"] = statistics.median(times[name])
            figures[f"{name}: time / {LOCAL}"] = estimate(ratios(times[name], times[LOCAL]))
            figures[f"{name}: kernels"] = num_kernels(training, device)
            figures[f"{name}: GiB"] = added_gib(training, device)
            figures[f"{name}: waits"] = host_waits(training, device)
    assert figures[f"{SYNC}: waits"] == {}


def losses_and_norms(device_type):
    size = (65, 81) if device_type == "cuda" else (33, 41)
    training = Training(
        config_of(size, 6, model=TINY, precision="float64"), torch.device(device_type)
    )
    results = [training() for _ in range(3)]
    return [[one.loss.item() for one in results], [one.grad_norm.item() for one in results]]


def test_one_two_and_three_ranks_train_the_same_model(gloo_ranks, device, figures):
    (one,) = gloo_ranks(1, losses_and_norms, device.type)
    for num in (2, 3) if device.type == "cuda" else (2,):
        found = gloo_ranks(num, losses_and_norms, device.type)
        for other in found[1:]:
            assert greatest_difference(other, found[0]) < 1e-12  # they have the same sums
        figures[f"{num} ranks: difference of losses and gradient norms to one rank"] = (
            greatest_difference(found[0], one)
        )
    # In float64 numbers of ranks differ in rounding only.
    assert max(figures.values()) < 1e-9


def test_float16_trains_and_its_loss_scale_settles(device, figures):
    is_cuda = device.type == "cuda"
    side, num_steps = (257, 30) if is_cuda else (33, 10)
    model = {"backbone": "resnet18"} if is_cuda else TINY
    config = config_of((side, side), 4, model=model, precision="float16", lr=0.01)
    training, losses, skipped = Training(config, device), [], 0
    for _ in range(num_steps):
        before = training.state.scaler.get_scale()
        losses.append(training().loss.item())
        skipped += training.state.scaler.get_scale() < before
    figures["losses"], figures["steps left out by overflow"] = losses, skipped
    figures["scale at the end"] = training.state.scaler.get_scale()
    assert all(map(math.isfinite, losses))
    assert min(losses[-3:]) < losses[0]
    # The scale begins at 2^16 and halves with each.
    assert skipped <= min(10, num_steps // 2)


@pytest.mark.gpu(limit_s=300)
@pytest.mark.parametrize(
    ("precision", "size", "rtol"),
    # Compiled code rounds bfloat16 at other places, where it joins operations.
    [("bfloat16", (512, 1024), 2e-2), ("float32", (257, 257), 1e-4)],
)
def test_compiled_training_is_equal_and_one_graph(device, figures, precision, size, rtol):
    if device.type == "cpu":
        pytest.skip("test_compile.py compiles for CPUs")
    if missing := missing_for_triton():
        pytest.skip(f"{missing}: not found")
    from torch._dynamo.utils import counters

    trainings, losses = {}, {}
    # Otherwise the first step would be short where code is left of another run.
    with torch._inductor.config.patch(force_disable_caches=True):
        for name in ("eager", "compiled"):
            options = {"precision": precision, "compile": name == "compiled"}
            config = config_of(size, 4, model={"backbone": "resnet18"}, **options)
            trainings[name] = Training(config, device)
            began = time.perf_counter()
            # Three steps: later ones amplify rounding errors.
            losses[name] = [trainings[name]().loss.item() for _ in range(3)]
            figures[f"{name}: seconds of three steps"] = time.perf_counter() - began
        times = measure(trainings, device=device, rounds=8, warmup=2)
    figures["time, eager / compiled"] = estimate(ratios(times["eager"], times["compiled"]))
    figures["difference of losses"] = greatest_difference(losses["compiled"], losses["eager"])
    figures["graphs"] = counters["stats"]["unique_graphs"]
    assert figures["difference of losses"] < rtol
    assert figures["graphs"] == 1
