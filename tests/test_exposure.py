"""What other users of the machine and of the network can reach of a run.

The attack is the real one: torchrun keeps the state of its rendezvous as a pickle in a TCPStore,
lets everybody who connects replace it, and unpickles what it finds. segtrain's launcher has none.
"""

import os
import shutil
import signal
import socket
import stat
import subprocess
from pathlib import Path

import pytest
from attacker import NOBODY, attack, listening
from experiments import small, write_config
from processes import Command, logged_steps

from segtrain.distributed.machine import children, descendants


def is_loopback(address):
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


@pytest.fixture
def elsewhere(tmp_path):
    """What comes before a command on a machine whose name leads to its outer address."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the command ip, to make a network")
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n10.77.1.1 {socket.gethostname()}\n")
    script = (
        "ip link set lo up && ip link add eth0 type veth peer name eth1 && "
        "ip addr add 10.77.1.1/24 dev eth0 && ip link set eth0 up && ip link set eth1 up && "
        f'mount --bind {hosts} /etc/hosts && exec "$@"'
    )
    wrapper = ["unshare", "--net", "--mount", "sh", "-c", script, "sh"]
    done = subprocess.run([*wrapper, "true"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"making a network is not allowed here: {done.stderr.strip()}")
    return wrapper


@pytest.mark.parametrize(
    "tried", [False, pytest.param(True, marks=pytest.mark.slow("distributed"))]
)
def test_on_one_machine_nothing_listens_where_others_could_write(tmp_path, data, elsewhere, tried):
    """Neither from the network nor from another user's shell; the run goes on undisturbed.

    tried: one such user attacks each port, which takes another process with torch.
    """
    options = small(data, data={"num_workers": 1}, train={"steps": 100_000})
    config, run = write_config(tmp_path / "c.yaml", options), tmp_path / "run"
    command = Command(tmp_path, "train", config, "--nproc", 2, "--output", run, wrapper=elsewhere)
    command.wait_for_step(run, 2)
    launcher, ranks = command.process.pid, command.ranks()
    workers = [worker for rank in ranks for worker in children(rank)]
    for worker in workers:  # the ranks wait for them, and do not take the processor meanwhile
        os.kill(worker, signal.SIGSTOP)
    everyone = {pid: listening(pid) for pid in descendants(launcher)}
    sockets = set().union(*everyone.values())
    found, sentinel = {}, tmp_path / "executed"
    if tried:
        inside, ports = ["nsenter", "--net", "--target", str(launcher)], [p for _, p in sockets]
        found = attack(sentinel, "127.0.0.1", ports, user=NOBODY, wrapper=inside)
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in temporary_files(command)}
    before = logged_steps(run)[-1]
    for worker in workers:
        os.kill(worker, signal.SIGCONT)
    command.wait_for_step(run, before + 1)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 143, command.errors

    assert [pair for pair in sockets if not is_loopback(pair[0])] == []
    assert everyone[launcher] == set()
    assert set(found.values()) == ({None} if tried else set())
    assert not sentinel.exists()
    assert modes
    assert {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


def temporary_files(command):
    """What the processes of a run have in the temporary folder and in shared memory."""
    for pid in descendants(command.process.pid):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                path = Path(os.readlink(entry))
            except OSError:
                continue
            if path.is_relative_to("/dev/shm") and path.exists():
                yield path
    yield command.folder()
