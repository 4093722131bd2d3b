"""A recorded step is gone before the groups are left: NCCL's communicators wait for all graphs.

Whole commands in a group of one rank, with the stand-ins of graphs_on_cpu.py.
"""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from experiments import small, write_config
from processes import Command, free_port

from segtrain.distributed import collectives as dist
from segtrain.distributed import liveness, process_group
from segtrain.errors import LostRanksError

PLUGIN, REFUSED = Path(__file__).with_name("graphs_on_cpu.py"), "the communicator waits"


def rank(number=0, size=1):
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


@pytest.fixture
def begun(data, tmp_path):
    """`begun(*arguments, **sections)`: a training of which steps are recorded."""

    def begin(*arguments, command="train", environ=None, **sections):
        train = {"steps": 7, "batch_size": 2} | sections.pop("train", {})
        config = small(data, train=train, **sections) | {"plugins": [str(PLUGIN)]}
        file = write_config(tmp_path / "c.yaml", config)
        where = ["--output", tmp_path / "run"] if command == "train" else []
        environ = rank() if environ is None else environ
        cache = {"SEGTRAIN_CACHE": str(tmp_path / "cache")}
        return Command(tmp_path, command, file, *where, *arguments, **environ, **cache)

    return begin


def ended(command, code=0):
    assert command.wait() == code, command.errors
    assert REFUSED not in command.output
    return command.output


def test_after_sigterm(begun, tmp_path):
    command = begun(train={"steps": 10_000})
    command.wait_for_step(tmp_path / "run", 6)
    os.kill(command.process.pid, signal.SIGTERM)
    assert "stopped by SIGTERM after step " in ended(command, 143)


def test_after_an_error(begun, tmp_path):
    command = begun(environ=rank() | {"GRAPHS_REPLAY": "fail"})
    ended(command, 1)
    assert "illegal memory access" in command.errors


@pytest.mark.slow("training", "distributed", "commands", "trainer")
def test_at_the_end_of_bench(begun):
    assert "step  " in ended(begun("--steps", 3, command="bench"))


class Held:
    """A recording, which is told by `release`."""

    def __init__(self, release):
        self.release = release


def test_in_the_groups_of_a_program_of_ones_own(monkeypatch, tmp_path):
    """Who has made the group leaves it, after segtrain's part of the program."""
    released = []
    held = Held(lambda: released.append(dist.is_distributed()))
    for name, value in rank().items():
        monkeypatch.setenv(name, value)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with process_group.process_group(torch.device("cpu"), timeout_s=5):
            dist.release_before_leaving(held)
        assert released == [True]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("leave", [dist.leave_groups, dist.abort_groups])
def test_recordings_are_released_before_any_group_is_left(monkeypatch, leave):
    order = []
    held = Held(lambda: order.append("released"))
    dist.release_before_leaving(held)
    monkeypatch.setattr(dist, "is_distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: order.append("left"))
    module = torch.distributed.distributed_c10d
    monkeypatch.setattr(module, "_abort_process_group", lambda: order.append("left"))
    leave()
    assert order[0] == "released"
    assert "left" in order


def left(monkeypatch, leave):
    """What is deferred to the end of the process after a group that `leave` should have left."""
    deferred = []
    monkeypatch.setattr(liveness, "defer_abort", lambda *about: deferred.append(about))
    for name, value in rank().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_group, "LEAVE_LIMIT_S", 0.1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "leave_groups", leave)
    process_group._leave(torch.device("cuda", 0))
    return deferred


def test_leaving_has_a_limit_after_which_the_process_goes_on_to_its_end(monkeypatch, capsys):
    wait = threading.Event()
    ((join, code),) = left(monkeypatch, wait.wait)
    said = "rank 0: leaving the process group takes over 0 s; all is saved, and the process ends"
    assert said in capsys.readouterr().err
    assert code == 0
    join(0)
    wait.set()
    join(60)


def test_leaving_that_fails_loses_nothing_that_is_saved(monkeypatch, capsys):
    def fail():
        raise RuntimeError("NCCL error\nTraceback")

    assert left(monkeypatch, fail) == [(dist.abort_groups, 0)]
    assert "warning: rank 0: NCCL error; all is saved" in capsys.readouterr().err


def test_a_rank_that_does_not_come_to_leave_is_waited_for_with_a_limit(monkeypatch, capsys):
    """The work is done: the exit code is that of the work."""
    deferred = []
    monkeypatch.setattr(liveness, "defer_abort", lambda *about: deferred.append(about))

    def barrier():
        raise LostRanksError("rank 0: waited 5 s for the device, which waits for another rank")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "barrier", barrier)
    with process_group.process_group(torch.device("cuda", 0), timeout_s=5):
        pass
    assert "warning: rank 0: rank 0: waited 5 s for the device" in capsys.readouterr().err
    assert deferred == [(dist.abort_groups, 0)]


def test_the_code_of_a_deferred_end_is_kept_where_none_is_given(monkeypatch):
    codes, wait = [], threading.Event()
    monkeypatch.setattr(liveness, "ABORT_LIMIT_S", 0.05)
    monkeypatch.setattr(liveness.os, "_exit", lambda code: (codes.append(code), wait.set()))
    liveness.defer_abort(lambda: wait.wait(), 0)
    liveness.deferred_abort()
    assert codes == [0]
