"""Two machines: network namespaces joined by a cable, and nothing else between them.

Each has a loopback of its own and a host name that leads there, as most machines do, so whatever
finds the others by name or by 127.0.0.1 fails here as it fails between machines.
"""

import os
import shutil
import signal
import stat
import subprocess
import time

import numpy as np
import pytest
import torch
from attacker import NOBODY, attack, listening
from experiments import bits, experiment, last, losses, train, write_config
from processes import Command, logged_steps
from two_machines import ip, join, remove

from segtrain.checkpoint.format import load

pytestmark = pytest.mark.netns

ADDRESS = "10.77.0.{}"  # seen by the two namespaces only


@pytest.fixture
def start(tmp_path):
    """`start(node, *args, **environ)`: a segtrain command on machine 0 or 1, ends with the test."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip, of iproute2")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    names = [f"segtrain-{os.getpid()}-{node}" for node in range(2)]
    commands = []

    def run(node, *args, **environ):
        wrapper = ["ip", "netns", "exec", names[node]]
        commands.append(Command(tmp_path, *args, wrapper=wrapper, **environ))
        return commands[-1]

    def cable(state, node=0):
        ip("-n", names[node], "link", "set", "eth0", state)

    run.cable = cable
    run.names = names

    try:
        try:
            join(names, ADDRESS)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs the right to make network namespaces: {error.stderr.strip()}")
        yield run
    finally:
        for command in commands:
            if command.process.poll() is None:
                command.kill()
        remove(names)


SMALL = {"augment": {"crop_size": [33, 41]}, "model": {"num_stages": 2, "output_stride": 8}}


def test_one_rank_on_each_of_two_machines_trains_as_one_process(run_ranks, start, tmp_path, data):
    config = write_config(tmp_path / "c.yaml", experiment(data, **SMALL, train={"steps": 3}))
    arguments = ["train", config, "--output", tmp_path / "two", "--nproc", 1, "--nnodes", 2]
    commands = [start(node, *arguments) for node in range(2)]
    codes = [command.wait() for command in commands]
    assert codes == [0, 0], "\n".join(command.errors for command in commands)

    assert run_ranks(1, train, config, tmp_path / "one") == [0]
    got, wanted = tmp_path / "two", tmp_path / "one"
    np.testing.assert_allclose(losses(got), losses(wanted), rtol=1e-9, atol=0)
    assert len(losses(got)) == 3
    got, wanted = (load(path / "checkpoints/last.pt").model for path in (got, wanted))
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


def test_workers_of_another_machine_send_gradients_to_a_server(run_ranks, start, tmp_path, data):
    """With staleness 0: the losses of one process that takes the parts as microbatches."""
    train_options = {"steps": 3, "batch_size": 6}
    server = train_options | {"parallel": "server", "staleness": 0}
    config = write_config(tmp_path / "c.yaml", experiment(data, **SMALL, train=server))
    arguments = ["train", config, "--device", "cpu", "--output", tmp_path / "two", "--nnodes", 2]
    commands = [start(node, *arguments, "--nproc", node + 1) for node in range(2)]
    codes = [command.wait() for command in commands]
    assert codes == [0, 0], "\n".join(command.errors for command in commands)

    sync = train_options | {"accumulate_steps": 2}
    config = write_config(tmp_path / "one.yaml", experiment(data, **SMALL, train=sync))
    assert run_ranks(1, train, config, tmp_path / "one") == [0]
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-9)


def test_a_stranger_finds_no_state_that_a_launcher_unpickles(start, tmp_path, data):
    """What listens is one store of the ranks' addresses, in the network of the machines alone."""
    options = experiment(data, **SMALL, train={"steps": 10_000})
    config, run = write_config(tmp_path / "c.yaml", options), tmp_path / "two"
    arguments = ["train", config, "--output", run, "--nproc", 1, "--nnodes", 2]
    commands = [start(node, *arguments) for node in range(2)]
    commands[0].wait_for_step(run, 1)
    served = {node: listening(command.process.pid) for node, command in enumerate(commands)}
    ((node, ((address, port),)),) = ((n, places) for n, places in served.items() if places)
    assert address == ADDRESS.format(node + 1)
    elsewhere = ["ip", "netns", "exec", start.names[1 - node]]
    found = attack(tmp_path / "x", address, [port], user=NOBODY, wrapper=elsewhere)
    assert found[port]  # it did connect
    assert not any("torch.rendezvous" in key for key in found[port])
    assert not (tmp_path / "x").exists()
    reached = max(logged_steps(run))
    commands[0].wait_for_step(run, reached + 2)
    assert stat.S_IMODE((run / ".machines").stat().st_mode) == 0o700


def test_a_machine_whose_cable_is_cut_leaves_and_the_other_goes_on(
    run_ranks, start, tmp_path, data
):
    """Both still see the shared folder, and ranks would wait for each other for `timeout_s`."""
    shares = {"steps": 60, "batch_size": 4, "shares": 4, "timeout_s": 300}
    options = experiment(data, **SMALL, train=shares, checkpoint={"every_steps": 2})
    config, run = write_config(tmp_path / "c.yaml", options), tmp_path / "two"
    arguments = ["train", config, "--output", run, "--nproc", 1, "--nnodes", "1:2"]
    commands = [start(node, *arguments) for node in range(2)]
    commands[0].wait_until(lambda: "machine 1 of 2: ranks" in commands[0].errors)
    commands[0].wait_for_step(run, max(logged_steps(run), default=0) + 3)
    start.cable("down", node=1)
    assert commands[1].wait() == 6
    where = f"this machine does not reach {ADDRESS.format(1)}, where rank 0 is, and leaves"
    assert where in commands[1].errors
    assert commands[0].wait() == 0, commands[0].errors
    assert run_ranks(1, train, config, tmp_path / "one") == [0]
    assert bits(last(tmp_path / "one")) == bits(last(run))


def long(data):
    train = {"steps": 24, "timeout_s": 8}
    return experiment(data, **SMALL, train=train, checkpoint={"every_steps": 2})


@pytest.fixture
def machines(start, tmp_path, data):
    """`machines(node, *more)`: the command of one of two machines."""
    config = write_config(tmp_path / "c.yaml", long(data))
    options = ["--nproc", 1, "--nnodes", 2, "--max-restarts", 9]
    arguments = ["train", config, "--output", tmp_path / "two", *options]
    return lambda node, *more: start(node, *arguments, *more)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["one died", "the cable was cut"])
def test_machines_join_again(run_ranks, start, machines, tmp_path, data, how):
    """A dead one is started again; without a cable they meet in the folder until it is back."""
    commands, codes = [machines(0), machines(1)], []
    commands[0].wait_for_step(tmp_path / "two", 6)
    if how == "one died":
        commands[1].kill()
    else:
        start.cable("down")
        time.sleep(30)
        start.cable("up")
    deadline = time.monotonic() + 200
    while any(command.process.poll() != 0 for command in commands):
        assert time.monotonic() < deadline, [command.errors for command in commands]
        for node, command in enumerate(commands):
            if command.process.poll() not in (None, 0):
                codes.append(command.process.poll())
                commands[node] = machines(node, "--resume")
        time.sleep(0.2)
    assert codes == ([] if how == "the cable was cut" else [-signal.SIGKILL])
    config = write_config(tmp_path / "one.yaml", long(data))
    assert run_ranks(1, train, config, tmp_path / "one") == [0]
    got, wanted = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert len(got) == len(wanted) == 24
    np.testing.assert_allclose(got, wanted, rtol=1e-8, atol=0)
