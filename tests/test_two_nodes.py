"""Two machines: network namespaces joined by a cable, and nothing else between them.

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
def machines(tmp_path):
    """The names of two, joined."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip, of iproute2")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    names = [f"segtrain-{os.getpid()}-{node}" for node in range(2)]
    try:
        try:
            join(names, ADDRESS)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs the right to make network namespaces: {error.stderr.strip()}")
        yield names
    finally:
        remove(names)


def done(machines, where, places, *words, torchrun=False):
    """A command with a rank at each of `places`, by torchrun or with its variables, that ends."""
    commands = []
    for rank, node in enumerate(places):
        local, size = places[:rank].count(node), places.count(node)
        wrapper = ["ip", "netns", "exec", machines[node]]
        if torchrun and local == 0:
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESS.format(1)}:29400"]
            # torchrun looks for HOST0 among the addresses of the host name, no others' here.
            meeting += ["--rdzv-conf", f"is_host={int(node == 0)}"]
            meeting += ["--local-addr", ADDRESS.format(node + 1), "--nnodes", "2"]
            meeting += ["--nproc-per-node", str(size), "-m", "segtrain"]
            program = ["torch.distributed.run", *meeting]
            commands.append(Command(where, *words, program=program, wrapper=wrapper))
        elif not torchrun:
            group = {"RANK": rank, "WORLD_SIZE": len(places), "LOCAL_RANK": local}
            group |= {"LOCAL_WORLD_SIZE": size, "MASTER_PORT": 29400}
            group |= {"MASTER_ADDR": ADDRESS.format(1)}
            texts = {name: str(value) for name, value in group.items()}
            commands.append(Command(where, *words, wrapper=wrapper, **texts))
    codes = [command.wait() for command in commands]
    assert not any(codes), "\n".join(command.errors for command in commands)


@pytest.mark.parametrize(
    "torchrun",
    [False, pytest.param(True, marks=pytest.mark.slow("commands", "trainer", "distributed"))],
)
def test_one_rank_on_each_of_two_machines_trains_as_one_process(
    run_ranks, machines, tmp_path, data, torchrun
):
    config = write_config(tmp_path / "c.yaml", experiment(data, **SMALL, train={"steps": 2}))
    words = ["train", config, "--device", "cpu", "--output", tmp_path / "two"]
    done(machines, tmp_path, (0, 1), *words, torchrun=torchrun)

    assert run_ranks(1, train, config, tmp_path / "one") == [0]
    got, wanted = tmp_path / "two", tmp_path / "one"
    np.testing.assert_allclose(losses(got), losses(wanted), rtol=1e-9, atol=0)
    assert len(losses(got)) == 2
    got, wanted = (load(path / "checkpoints/last.pt").model for path in (got, wanted))
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.slow("training", "distributed")
def test_workers_of_another_machine_send_gradients_to_a_server(run_ranks, machines, tmp_path, data):
    """With staleness 0: the losses of one process that takes the parts as microbatches."""
    train_options = {"steps": 2, "batch_size": 6}
    server = train_options | {"parallel": "server", "staleness": 0}
    config = write_config(tmp_path / "c.yaml", experiment(data, **SMALL, train=server))
    words = ["train", config, "--device", "cpu", "--output", tmp_path / "two"]
    done(machines, tmp_path, (0, 1, 1), *words)

    sync = train_options | {"accumulate_steps": 2}
    config = write_config(tmp_path / "one.yaml", experiment(data, **SMALL, train=sync))
    assert run_ranks(1, train, config, tmp_path / "one") == [0]
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-9)
