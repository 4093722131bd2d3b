"""Messages between rank 0 and each other rank."""

import socket
import threading
import time

import pytest
import torch

from segtrain.distributed import collectives as dist
from segtrain.distributed import wires
from segtrain.distributed.wires import GoneError, Wire, ready, to_rank0
from segtrain.errors import LostRanksError


@pytest.fixture
def pair():
    """Both ends of a wire, whose limit is a second."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    ends = [Wire(one, 1, 1.0), Wire(other, 0, 1.0)]
    yield ends
    for end in ends:
        end.close()


def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_a_value_and_the_bits_of_a_tensor_arrive(pair, dtype, size):
    one, other = pair
    sent = torch.randn(size).to(dtype)
    thread = in_thread(one.send, [True, {"ä": 1.5}, None], sent)
    received = torch.empty(size, dtype=dtype)
    assert other.receive(received) == [True, {"ä": 1.5}, None]
    thread.join()
    assert torch.equal(received, sent)


def test_ready_names_who_has_sent_and_who_has_gone(pair):
    one, other = pair
    assert ready([one, other], 0.0) == []
    one.send(1, torch.empty(0))
    assert ready([one, other], 1.0) == [other]
    assert other.receive(torch.empty(0)) == 1
    assert ready([other], 0.0) == []
    one.close()
    assert ready([other], 1.0) == [other]
    with pytest.raises(GoneError, match="rank 0 is gone"):
        other.receive(torch.empty(1))


def test_who_does_not_read_or_send_is_waited_for_as_long_as_the_limit(pair):
    one, _ = pair
    with pytest.raises(LostRanksError, match="rank 1 did not answer for 1 s") as sending:
        one.send(1, torch.empty(30_000_000))  # more than the system keeps
    with pytest.raises(LostRanksError, match="rank 1 did not answer for 1 s") as receiving:
        one.receive(torch.empty(1))
    assert not any(isinstance(error.value, GoneError) for error in (sending, receiving))


def dies(address, sends):
    """Says that it is there; sends a large tensor, or reads nothing."""
    wire = Wire(socket.create_connection(address), 0, 60.0)
    wire.send("here", torch.empty(0))
    if sends:
        wire.send("all", torch.ones(30_000_000))
    time.sleep(60)


@pytest.mark.parametrize("sends", [True, False])
def test_whoever_waits_learns_at_once_that_a_process_died_in_the_midst(forkserver, sends):
    """gloo does not tell; the tensor is larger than what the system keeps of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = forkserver.Process(target=dies, args=(server.getsockname(), sends))
        process.start()
        connection, _ = server.accept()
    wire, tensor = Wire(connection, 1, 60.0), torch.ones(30_000_000)
    assert wire.receive(torch.empty(0)) == "here"
    if sends:
        assert ready([wire], 60.0)
    threading.Timer(0.5, process.kill).start()
    began = time.monotonic()
    if sends:
        process.join()
    with pytest.raises(GoneError, match="rank 1 is gone"):
        wire.receive(tensor) if sends else wire.send(0, tensor)
    assert time.monotonic() - began < 30
    process.join()
    wire.close()


def numbers_of_all():
    """Each says its rank to rank 0, which answers with twice that; before, strangers come."""
    connect = socket.create_connection

    def after_strangers(address, *others):
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100), None):
            stranger = connect(address, *others)
            if said is None:
                stranger.close()
            else:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
        return connect(address, *others)

    wires.socket.create_connection = after_strangers
    mine = to_rank0(60.0)
    for rank, wire in mine.items():
        if dist.is_main():
            assert wire.receive(torch.empty(0)) == rank
            wire.send(2 * rank, torch.full((2,), float(rank)))
    if dist.is_main():
        return sorted(mine)
    tensor = torch.empty(2)
    mine[0].send(dist.rank(), torch.empty(0))
    return [mine[0].receive(tensor), tensor.tolist()]


def test_each_has_a_wire_to_rank_0_and_strangers_are_sent_away(run_ranks):
    assert run_ranks(3, numbers_of_all) == [[1, 2], [2, [1.0, 1.0]], [4, [2.0, 2.0]]]


def alone_at_rank0():
    if dist.is_main():
        try:
            to_rank0(0.5)
        except LostRanksError as error:
            return str(error)
    else:
        dist.run_on_rank0(lambda: None)  # and does not connect
    return None


def test_who_does_not_come_is_named(run_ranks):
    assert run_ranks(2, alone_at_rank0) == ["ranks [1] did not come", None]
