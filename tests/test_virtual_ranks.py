"""The promise in the other direction: few ranks, working in shares, equal many."""

import random
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from experiments import experiment, write_config
from memory import ClonesAsHost, LiveBytes

from segtrain.distributed import collectives as dist
from segtrain.distributed import virtual_ranks
from segtrain.distributed.offload import InFlight, offload, reload, saved_on_host
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.training import rank_passes
from segtrain.training import step as step_module
from segtrain.training.local import LocalMicrobatch, StepNumbers
from segtrain.training.state import make_state


def test_sums_count_every_slot_and_results_are_each_ones_own():
    def work():
        assert dist.group_size() == 2
        mine = torch.full((3,), 1.0 + virtual_ranks.slot())
        total = dist.all_reduce_sum(mine)
        assert total is mine
        total += virtual_ranks.slot()
        return total, dist.all_gather(torch.tensor([virtual_ranks.slot()]))

    (a, rows), (b, _) = VirtualRanks(2).run([work] * 2)
    assert a.tolist() == [3.0] * 3
    assert b.tolist() == [4.0] * 3
    assert rows.tolist() == [[0], [1]]
    assert virtual_ranks.current() is None


class Running:
    """How many threads are between two meetings, and in which order they began."""

    def __init__(self):
        self.lock, self.now, self.most, self.began = threading.Lock(), 0, 0, []

    def __enter__(self):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.began.append(virtual_ranks.slot())

    def __exit__(self, *_):
        with self.lock:
            self.now -= 1


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 20])
def test_no_more_than_at_once_run_at_a_time(at_once):
    """Before, between and after many meetings; each sum is that of all slots."""
    slots, meetings, running = 7, 40, Running()
    rng = random.Random(0)
    naps = [[rng.choice((0, 0, 0, 1e-4)) for _ in range(meetings)] for _ in range(slots)]

    def work():
        mine, totals = virtual_ranks.slot(), []
        for meeting in range(meetings):
            with running:
                time.sleep(naps[mine][meeting])
            totals.append(virtual_ranks.current().meet((meeting, mine), list))
        with running:
            return totals

    results = VirtualRanks(slots, at_once=at_once).run([work] * slots)
    wanted = [[(meeting, slot) for slot in range(slots)] for meeting in range(meetings)]
    assert results == [wanted] * slots
    assert running.now == 0
    assert running.most <= at_once
    assert len(running.began) == slots * (meetings + 1)
    if at_once == 1:
        assert running.began == list(range(slots)) * (meetings + 1)


@pytest.mark.parametrize("at_once", [2, 3])
def test_as_many_run_at_the_same_time_as_may(at_once):
    """Nobody passes the barrier before `at_once` threads of a round have come to it."""
    barrier = threading.Barrier(at_once, timeout=60)

    def work():
        for _ in range(5):
            barrier.wait()
            virtual_ranks.current().meet(0, sum)

    group = VirtualRanks(2 * at_once, at_once=at_once)
    assert group.run([work] * 2 * at_once) == [None] * 2 * at_once


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("slot", [0, 2, 4])
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_a_slot_that_fails_or_meets_less_often_ends_all_of_them(slot, at_once, fails):
    def work():
        virtual_ranks.current().meet(0, sum)
        if virtual_ranks.slot() != slot:
            virtual_ranks.current().meet(0, sum)
        elif fails:
            raise ZeroDivisionError("in one share ended")

    before = threading.active_count()
    for _ in range(5):
        with pytest.raises(ZeroDivisionError if fails else RuntimeError, match="ended"):
            VirtualRanks(5, at_once=at_once).run([work] * 5)
    assert threading.active_count() == before


def peak_of_a_step(data, tmp_path, batch_size, virtual, size=41):
    """The peak of live bytes beyond parameters and images, in a step; and the gradients."""
    from segtrain.config import load_config
    from segtrain.models import build_model
    from segtrain.models.norms import make_norm
    from segtrain.models.precision import dtype_of
    from segtrain.training.step_sync import StepSync
    from segtrain.types import DropoutMasks

    train = {"batch_size": batch_size, "virtual_ranks": virtual}
    model = {"num_stages": 2, "output_stride": 8, "dropout": 0.0}
    options = experiment(data, train=train, model=model)
    config = load_config(write_config(tmp_path / f"{batch_size}.yaml", options))
    torch.manual_seed(0)
    model = build_model(config.model, num_classes=4, norm=make_norm(config.norm))
    state = make_state(model, config, torch.device("cpu"))
    state.model.train()
    for parameter in model.parameters():  # gradients exist before, as the parameters do
        parameter.grad = torch.zeros_like(parameter)
    images = torch.randn(batch_size, 3, size, size).to(dtype_of(config.train))
    share = LocalMicrobatch(images, torch.zeros(batch_size, size, size).long(), DropoutMasks())
    mode = LiveBytes([*model.parameters(), *(p.grad for p in model.parameters())])

    @contextmanager
    def on_host(*args):
        with saved_on_host(*args, copies=ClonesAsHost(mode.forget)), mode:
            yield

    sizes, original = [batch_size // virtual] * virtual, rank_passes.saved_on_host
    rank_passes.saved_on_host = on_host
    try:
        numbers = StepNumbers.on(torch.device("cpu"))
        about = torch.ones(()), numbers, StepSync(lambda: False)
        if virtual > 1:
            step_module._in_threads(state, share.split(sizes), *about)
        else:
            with mode:
                objective, _ = step_module.forward(state, state.wrapped, share, *about)
                objective.backward()
    finally:
        rank_passes.saved_on_host = original
    return mode.peak, torch.cat([p.grad.flatten() for p in model.parameters()])


def test_the_device_holds_hardly_more_than_one_share_and_gets_the_rest_back_unchanged(
    data, tmp_path
):
    """Tensors of one shape come and go, and one takes the place in memory of another."""
    cases = ((2, 1), (8, 4), (8, 1))
    found = (peak_of_a_step(data, tmp_path, images, virtual) for images, virtual in cases)
    (one, _), (four, gradient), (whole, wanted) = found
    assert four <= 1.5 * one
    assert whole > 2.5 * one
    assert (gradient - wanted).norm() < 1e-9 * wanted.norm()


class Copy:
    """An event of a copy that is done when the test says so."""

    def __init__(self):
        self.is_done = False

    def query(self):
        return self.is_done


def test_a_transposed_view_of_what_came_back_is_another_tensor():
    """It has the same memory and the same shape; only its strides tell."""
    square = torch.randn(200, 200)
    with saved_on_host(torch.device("cpu"), copies=ClonesAsHost()):
        back = reload(offload(square))
        assert torch.equal(reload(offload(back)), square)
        assert torch.equal(reload(offload(back.T)), square.T)


def test_the_host_waits_for_the_oldest_copies_until_all_fit():
    InFlight(100).add(Copy(), 1000)  # a copy larger than the bound does not wait
    in_flight, copies = InFlight(100), [Copy() for _ in range(4)]
    for copy in copies[:3]:
        in_flight.add(copy, 40 if copy is copies[0] else 30)
    added = threading.Event()

    def add():
        in_flight.add(copies[3], 45)
        added.set()

    # 40 + 30 + 30 + 45: the first done, 105 are left.
    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    copies[2].is_done = True  # not the oldest: copies of one stream end in order
    assert not added.wait(0.2)
    copies[0].is_done = True
    assert not added.wait(0.2)
    copies[1].is_done = True
    assert added.wait(30)
    thread.join()
