"""The host waits for the bus where too much is on its way to it."""

import threading
import time

import torch
from memory import ClonesAsHost

from segtrain.distributed.offload import InFlight, offload, reload, saved_on_host


class Copy:
    """An event of a copy that is done when the test says so."""

    def __init__(self):
        self.is_done = False

    def query(self):
        return self.is_done


def test_neither_what_fits_nor_a_copy_larger_than_the_bound_waits():
    for sizes in ((25, 25, 25, 25), (1000,)):
        in_flight = InFlight(100)
        for size in sizes:
            in_flight.add(Copy(), size)
        assert in_flight._num_bytes == sum(sizes)


def test_a_transposed_view_of_what_came_back_is_another_tensor():
    """It has the same memory and the same shape; only its strides tell."""
    square = torch.randn(200, 200)
    with saved_on_host(torch.device("cpu"), copies=ClonesAsHost()):
        back = reload(offload(square))
        assert torch.equal(reload(offload(back)), square)
        assert torch.equal(reload(offload(back.T)), square.T)


def test_the_host_waits_for_the_oldest_copies_until_all_fit():
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


def test_copies_that_are_done_make_room():
    in_flight, began = InFlight(100), time.monotonic()
    for _ in range(50):
        copy = Copy()
        copy.is_done = True
        in_flight.add(copy, 90)
    assert in_flight._num_bytes == 0
    assert time.monotonic() - began < 10
