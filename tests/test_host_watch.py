"""A rank whose host is stuck in the driver is ended by a thread; one that gets on is not."""

import subprocess
import sys
import textwrap
import time

import pytest
import torch

from segtrain.distributed import collectives as dist
from segtrain.distributed import process_group
from segtrain.distributed.process_group import HostWatch


@pytest.fixture
def given_up(monkeypatch):
    """How long the ranks had waited that were given up."""
    waits = []
    monkeypatch.setattr(process_group, "_give_up", waits.append)
    return waits


def test_a_step_without_an_exchange_is_given_up(given_up):
    with HostWatch(timeout_s=0.2) as watch, watch.step():
        time.sleep(1)
    assert given_up
    assert given_up[0] >= 0.25


def test_a_step_that_gets_on_is_not(given_up, monkeypatch):
    monkeypatch.setattr(dist, "_num_processes", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **_: tensor)
    with HostWatch(timeout_s=4) as watch, watch.step():
        for _ in range(15):
            time.sleep(0.5)
            dist.all_reduce_sum(torch.ones(1))
    assert given_up == []


def test_between_steps_there_is_time(given_up):
    with HostWatch(timeout_s=0.1) as watch:
        with watch.step():
            pass
        time.sleep(0.8)
    assert given_up == []


def test_the_process_ends_although_its_host_is_stuck():
    """In a sleep of C that releases Python's lock, as the driver does."""
    script = """
        import ctypes
        from segtrain.distributed.process_group import HostWatch
        with HostWatch(timeout_s=0.5) as watch, watch.step():
            ctypes.CDLL(None).sleep(300)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 6
    assert "for the device, which waits for another rank, in setup" in done.stderr
