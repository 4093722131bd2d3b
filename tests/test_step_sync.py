import os
import signal
import threading
import time

import pytest
import torch

from segtrain.distributed import collectives as dist
from segtrain.errors import LostRanksError, NonFiniteError
from segtrain.training import step_sync
from segtrain.training.step_sync import MAX_OVERFLOWS, StepSync

NAN = float("nan")
FINE, OVERFLOW = torch.tensor(1.0), torch.tensor(float("inf"))


def sums(total, weight, aux=None):
    return torch.tensor([[total, weight]] + ([] if aux is None else [aux]), dtype=torch.float64)


def watch(**options):
    return StepSync(lambda: False, **options)


def do_step(sync, step, total=1.0, grad_norm=FINE, names=("a",)):
    sync.reduce(sums(total, 4), torch.tensor(sync.requests(), dtype=torch.float64))
    sync.record(step, sync.take_flags(grad_norm), list(names))


@pytest.mark.parametrize("total", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_loss_is_raised_one_step_late_with_the_step_it_happened_in(total):
    sync = watch()
    do_step(sync, 6, names=["good"])
    do_step(sync, 7, total, names=["bad 1", "bad 2"])
    with pytest.raises(NonFiniteError, match=r"^step 7: the loss is not finite\n") as error:
        do_step(sync, 8, names=["next"])
    assert "rank 0: images bad 1, bad 2" in str(error.value)
    assert "good" not in str(error.value)


@pytest.mark.parametrize(
    ("microbatches", "grad_norm", "what"),
    [
        ([sums(NAN, 4)], FINE, "loss"),
        ([sums(1.0, 4, aux=(NAN, 4))], FINE, "loss"),
        ([sums(1.0, 4), sums(NAN, 4), sums(1.0, 4)], FINE, "loss"),
        ([sums(1.0, 4)], torch.tensor(NAN), "gradient"),
    ],
)
@pytest.mark.parametrize("overflow_allowed", [False, True])
def test_what_is_not_finite_is_raised_at_once_and_only_once_when_asked_for(
    microbatches, grad_norm, what, overflow_allowed
):
    sync = watch(overflow_allowed=overflow_allowed)
    for one in microbatches:
        sync.reduce(one)
    sync.record(3, sync.take_flags(grad_norm), ["a"])
    if what == "loss" or not overflow_allowed:
        with pytest.raises(NonFiniteError, match=f"step 3: the {what} is not finite"):
            sync.check_finite()
    sync.check_finite()


@pytest.mark.fault(78)
def test_float16_may_overflow_now_and_then_but_not_without_end():
    sync = watch(overflow_allowed=True)
    for step in range(1, MAX_OVERFLOWS + 1):
        do_step(sync, step, grad_norm=OVERFLOW)
    do_step(sync, MAX_OVERFLOWS + 1)  # one good step, and the count starts anew
    for step in range(100, 100 + MAX_OVERFLOWS + 1):
        do_step(sync, step, grad_norm=OVERFLOW)
    with pytest.raises(NonFiniteError, match=f"step {100 + MAX_OVERFLOWS}: .*overflows float16"):
        sync.check_finite()


def test_requests_are_seen_one_step_late_or_when_flags_are_read_and_saving_once():
    asked = [False, True, False, False]
    sync = StepSync(lambda: len(asked) < 4, save_requested=lambda: asked.pop(0))
    seen = []
    for step in range(1, 5):
        do_step(sync, step)
        seen.append((sync.stopped, sync.pop_save_request()))
    assert seen == [(False, False), (False, False), (True, True), (True, False)]

    other = StepSync(lambda: True)
    do_step(other, 1)
    other.check_finite()
    assert other.stopped


def guards_of_rank():
    """What every rank of three sees when one of them is asked to stop or has a bad loss."""
    rank = dist.rank()
    results = {}

    step = 0
    sync = StepSync(lambda: rank == 1 and step == 3)
    while not sync.stopped and step < 10:
        step += 1
        do_step(sync, step)
    results["stopped after"] = step

    results["totals"] = watch().reduce(sums(float(rank), rank, aux=(1.0, 2))).tolist()

    sync = watch()
    do_step(sync, 1, names=[f"early {rank}"])
    do_step(sync, 2, float("nan") if rank == 2 else 1.0, names=[f"now {rank}"])
    try:
        do_step(sync, 3, names=[f"late {rank}"])
    except NonFiniteError as error:
        results["error"] = str(error)
    return results


@pytest.mark.fault(76)
def test_ranks_stop_together_and_name_the_one_whose_loss_is_bad(run_ranks):
    ranks = run_ranks(3, guards_of_rank)
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0]["stopped after"] == 4
    assert ranks[0]["totals"] == [[3, 3], [3, 6]]
    lines = ranks[0]["error"].splitlines()
    assert lines[0] == "step 2: the loss is not finite"
    assert [line.strip() for line in lines if "rank" in line] == ["rank 2: images now 2"]


class Event:
    """What the device has reached, once `reached` says so; a wait in C would never end."""

    def __init__(self, reached):
        self.query = reached

    def synchronize(self):
        raise AssertionError("the host waits in C, where Python runs no signal handlers")


def readback(reached):
    flags = step_sync._Readback(torch.tensor([1.0, 2.0]))
    flags._arrived = Event(reached)
    return flags


def test_a_device_that_waits_for_a_dead_rank_is_given_up(monkeypatch):
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    began = time.monotonic()
    with pytest.raises(LostRanksError, match="rank 0: waited 0 s for the device, which waits for"):
        readback(lambda: False).read(timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began < 10


def test_a_rank_alone_waits_for_its_device_as_long_as_it_takes():
    began = time.monotonic()
    assert readback(lambda: time.monotonic() - began > 0.2).read(timeout_s=0.01) == [1, 2]


def test_a_signal_is_seen_while_the_host_waits_for_the_device(monkeypatch):
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("asked to stop"))
    sender = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
    sender.start()
    try:
        assert readback(lambda: bool(seen)).read(timeout_s=60) == [1, 2]
    finally:
        sender.join()
        signal.signal(signal.SIGTERM, before)
