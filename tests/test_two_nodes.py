"""Two machines under torchrun: network namespaces joined by a cable, and nothing else between them.

Each has a loopback of its own and a host name that leads there, as most machines do, so whatever
finds the others by name or by 127.0.0.1 fails here as it fails between machines.
"""

import os
import shutil
import subprocess

import numpy as np
import pytest
import torch
from experiments import experiment, losses, train, write_config
from processes import Command
from two_machines import join, remove

from segtrain.checkpoint.format import load

pytestmark = pytest.mark.netns

ADDRESS = "10.77.0.{}"  # seen by the two namespaces only
SMALL = {"augment": {"crop_size": [33, 41]}, "model": {"num_stages": 2, "output_stride": 8}}


@pytest.fixture
def start(tmp_path):
    """`start(node, nproc, *args)`: a segtrain command on machine 0 or 1, ends with the test."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip, of iproute2")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    names = [f"segtrain-{os.getpid()}-{node}" for node in range(2)]
    commands = []

    def run(node, nproc, *args):
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESS.format(1)}:29400"]
        # torchrun looks for HOST0 among the addresses of the host name, which are no others' here.
        meeting += ["--rdzv-conf", f"is_host={int(node == 0)}"]
        meeting += ["--local-addr", ADDRESS.format(node + 1)]
        size = ["--nnodes", "2", "--nproc-per-node", str(nproc)]
        torchrun = ["torch.distributed.run", *size, *meeting, "-m", "segtrain"]
        wrapper = ["ip", "netns", "exec", names[node]]
        commands.append(Command(tmp_path, *args, program=torchrun, wrapper=wrapper))
        return commands[-1]

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


def ended(commands):
    codes = [command.wait() for command in commands]
    assert codes == [0, 0], "\n".join(command.errors for command in commands)


def test_one_rank_on_each_of_two_machines_trains_as_one_process(run_ranks, start, tmp_path, data):
    config = write_config(tmp_path / "c.yaml", experiment(data, **SMALL, train={"steps": 3}))
    arguments = ["train", config, "--device", "cpu", "--output", tmp_path / "two"]
    ended([start(node, 1, *arguments) for node in range(2)])

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
    arguments = ["train", config, "--device", "cpu", "--output", tmp_path / "two"]
    ended([start(node, node + 1, *arguments) for node in range(2)])

    sync = train_options | {"accumulate_steps": 2}
    config = write_config(tmp_path / "one.yaml", experiment(data, **SMALL, train=sync))
    assert run_ranks(1, train, config, tmp_path / "one") == [0]
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-9)
