"""What ranks tell their launcher, and what ends a rank that is stuck once its message is out."""

import json
import os
import signal
import stat
import subprocess

import pytest
import torch
from processes import run_python

from segtrain.distributed import collectives as dist
from segtrain.distributed import launcher, liveness
from segtrain.distributed.liveness import (
    ATTEMPT_VARIABLE,
    FOLDER_VARIABLE,
    HostWatch,
    Watchdog,
    beat,
    is_first_to_print,
    read_exit_statuses,
    read_heartbeats,
    write_exit_status,
)
from segtrain.distributed.machine import is_alive


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A launcher's folder, in the environment of its rank 0."""
    folder = tmp_path / "root"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv(ATTEMPT_VARIABLE, raising=False)
    return folder


def read_everything(root):
    return read_exit_statuses(root), read_heartbeats(root)


def test_what_is_written_is_read_and_is_for_this_user_alone(root):
    old = os.umask(0)
    try:
        beat("training", 7)
        write_exit_status(3)
        asked = [is_first_to_print(words) for words in ("no such file", "no such file", "another")]
    finally:
        os.umask(old)
    assert asked == [True, False, True]  # the same message is printed once
    (status,), (rank,) = read_everything(root)
    assert (status.rank, status.code) == (0, 3)
    assert rank[:4] == (0, os.getpid(), "training", 7)
    # The others could read the files, but cannot enter the folders.
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    assert [path for path in folders if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_only_the_last_attempt_counts(root, monkeypatch):
    for attempt, code in (("9", 6), ("10", 0)):
        monkeypatch.setenv(ATTEMPT_VARIABLE, attempt)
        write_exit_status(None)
        write_exit_status(code)
    monkeypatch.delenv(ATTEMPT_VARIABLE)
    assert [(status.rank, status.code) for status in read_exit_statuses(root)] == [(0, 0)]


def test_the_watchdog_ends_ranks_of_its_own_launcher_only(root, monkeypatch):
    """Another process may have the number of a rank that is gone."""
    monkeypatch.setattr(liveness, "PATIENCE_S", 0.0)
    words = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as ours:
        other = int(ours.stdout.readline())
        write_exit_status(6, consequence=True)
        for rank, pid in ((1, other), (2, ours.pid)):
            beaten = json.dumps([rank, pid, "training", 3, 0.0])
            (root / "0" / f"{rank}.now").write_text(beaten)
        with Watchdog(root) as watchdog:
            assert ours.wait(10) == -signal.SIGKILL
        assert [rank.rank for rank in watchdog.killed] == [2]
        assert is_alive(other)
        os.kill(other, signal.SIGKILL)


def test_a_step_is_given_up_that_does_not_get_on_and_between_steps_there_is_time(monkeypatch):
    given_up, now = [], [100.0]
    monkeypatch.setattr(liveness, "_give_up", given_up.append)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(dist, "_num_processes", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **_: tensor)
    watch = HostWatch(0.8, dist.last_exchange)

    def wait(seconds):
        now[0] += seconds
        watch._look()

    with watch.step():
        for _ in range(3):
            wait(0.9)
            dist.all_reduce_sum(torch.ones(1))
    wait(9.0)
    with watch.step():
        wait(0.9)
        assert given_up == []
        wait(0.2)
    assert given_up == [pytest.approx(1.1)]


def test_the_process_ends_although_its_host_is_stuck():
    """In a sleep of C that releases Python's lock, as the driver does."""
    code = """
        import ctypes
        from segtrain.distributed.liveness import HostWatch
        with HostWatch(0.5, lambda: 0.0) as watch, watch.step():
            ctypes.CDLL(None).sleep(300)
    """
    done = run_python(code, forked=True)
    assert done.returncode == 6
    assert "for the device, which waits for another rank, in setup" in done.stderr


# A rank alone in its group, whose connections nothing can cut in an orderly way.
STUCK = """
    import sys, time
    import torch
    from segtrain.commands import exit_code
    from segtrain.distributed import liveness, process_group
    from segtrain.errors import DataError

    def never_returns(*args):
        print("leaving", flush=True)
        time.sleep(1000)

    liveness.ABORT_LIMIT_S = 0.2
    torch.distributed.destroy_process_group = never_returns
    torch.distributed.distributed_c10d._abort_process_group = never_returns

    def work():
        with process_group.process_group(torch.device("cpu"), timeout_s=20):
            raise {error}

    {run}
"""


@pytest.mark.parametrize(
    ("error", "run", "launched", "code"),
    [
        ("DataError('a.png: no')", "sys.exit(exit_code.run(work))", True, 3),
        ("ValueError('a.png: no')", "work()", False, 1),
    ],
)
def test_a_rank_that_cannot_leave_has_told_why_and_ends_with_its_code(
    root, error, run, launched, code
):
    group = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if not launched:
        os.environ.pop(FOLDER_VARIABLE)
    done = run_python(STUCK.format(error=error, run=run), forked=launched, **group)
    assert (done.stdout, done.returncode) == ("leaving\n", code)
    assert done.stderr.rstrip().endswith("a.png: no")
    assert [status.code for status in read_exit_statuses(root)] == [code] * launched


def test_the_launcher_leaves_the_watchdog_time_to_name_a_rank_that_hangs():
    # Its watch looks once a second. Sooner, the launcher's SIGKILL takes that rank's message.
    assert launcher._BEREAVED_S > liveness.PATIENCE_S + 1
