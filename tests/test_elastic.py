"""Machines that join and leave a run while it trains: launchers of one machine, which all meet."""

import os
import shutil
import signal
import threading
from datetime import timedelta

import cv2
import numpy as np
import pytest
from experiments import assert_same_state, last, refusal, small, train, write_config
from processes import Command, logged_steps
from torch.distributed import HashStore

from segtrain.checkpoint.format import Checkpoint
from segtrain.distributed import agent, process_group
from segtrain.distributed.launcher import Notice
from segtrain.distributed.rendezvous import SharedFolder
from segtrain.errors import ConfigError

STEPS = 40
_whole: list[Checkpoint] = []


def options_of(data, **train_options):
    """With shares: the bits do not depend on the number of ranks."""
    trained = {"steps": STEPS, "batch_size": 4, "shares": 4, "timeout_s": 60} | train_options
    return small(data, train=trained, checkpoint={"every_steps": 5})


@pytest.fixture
def machine(tmp_path, data):
    """`machine(NNODES, *more)`: another launcher of the run."""
    config = write_config(tmp_path / "c.yaml", options_of(data))
    words = ["train", config, "--device", "cpu", "--nproc", 1, "--output", tmp_path / "run"]

    def start(nnodes, *more):
        network = {"GLOO_SOCKET_IFNAME": "lo"}
        return Command(tmp_path, *words, "--nnodes", nnodes, *more, **network)

    return start


@pytest.fixture
def undisturbed(run_ranks, tmp_path, data):
    """What the run of one process ends with; it is trained once."""
    if not _whole:
        config = write_config(tmp_path / "one.yaml", options_of(data))
        assert run_ranks(1, train, config, tmp_path / "one") == [0]
        _whole.append(last(tmp_path / "one"))
    return _whole[0]


def wait_for_machines(command, run, number):
    """Returns once `number` machines have trained a step together."""
    command.wait_until(lambda: f" of {number}: ranks" in command.errors)
    command.wait_for_step(run, max(logged_steps(run), default=0) + 1)


def test_a_machine_joins_and_leaves_and_the_model_is_that_of_one_process(
    machine, undisturbed, tmp_path
):
    run = tmp_path / "run"
    first = machine("1:2")
    first.wait_for_step(run, 3)
    second = machine("1:2")  # the same command line, without --resume
    wait_for_machines(second, run, 2)
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == 143
    assert first.wait() == 0, first.errors

    assert_same_state(undisturbed, last(run))
    assert logged_steps(run) == list(range(1, STEPS + 1))  # none was done twice
    late = machine("2:3")  # alone, but there is nothing left to meet for
    assert (late.wait(), late.errors) == (0, "")
    assert f"already complete: {STEPS} steps" in late.output


def test_without_the_machine_that_began_it_a_run_goes_on(machine, undisturbed, tmp_path):
    run = tmp_path / "run"
    first = machine("1:2")
    first.wait_for_step(run, 3)
    second = machine("1:2")
    wait_for_machines(second, run, 2)
    first.kill()
    assert second.wait() == 0, second.errors
    assert_same_state(undisturbed, last(run))


def test_a_machine_whose_rank_dies_leaves_and_the_other_goes_on(machine, undisturbed, tmp_path):
    run = tmp_path / "run"
    first, second = machine("1:2"), machine("1:2")
    wait_for_machines(second, run, 2)
    os.kill(second.ranks()[0], signal.SIGKILL)
    assert second.wait() == 6
    assert "was ended by SIGKILL" in second.errors
    assert first.wait() == 0, first.errors
    assert "SIGKILL" not in first.errors
    assert_same_state(undisturbed, last(run))


def test_a_newcomer_with_another_config_is_refused_before_it_stops_the_others(machine, tmp_path):
    run = tmp_path / "run"
    first = machine("1:2")
    first.wait_for_step(run, 3)
    second = machine("1:2", "--set", "optim.lr=0.5")
    assert second.wait() == 2
    assert "optim.lr: 0.02 there, 0.5 now" in second.errors
    assert "stopped by" not in (run / "train.log").read_text()
    first.kill()


def test_a_newcomer_with_other_labels_leaves_alone(machine, undisturbed, tmp_path, data):
    """Files of the same names and sizes, which only their contents tell apart."""
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(data, other)
    label = next((other / "labels" / "train").iterdir())
    size = label.stat().st_size
    cv2.imwrite(str(label), np.ones_like(cv2.imread(str(label), cv2.IMREAD_UNCHANGED)))
    label.write_bytes(label.read_bytes().ljust(size, b"\0"))  # what follows a PNG is not read
    first = machine("1:2")
    first.wait_for_step(run, 8)  # and a checkpoint, with the hashes of the labels
    second = machine("1:2", "--set", f"data.root={other}")
    assert second.wait() == 3, second.errors
    assert "sees other labels than that of rank 0" in second.errors
    assert first.wait() == 0, first.errors
    assert_same_state(undisturbed, last(run))


def test_a_run_that_has_saved_nothing_starts_anew_with_another_config(machine, tmp_path):
    """As without machines that come and go: it was killed, and its mistake is mended."""
    first = machine("1:2", "--set", "checkpoint.every_steps=30")
    first.wait_for_step(tmp_path / "run", 3)
    first.kill()
    second = machine("1:2", "--set", "optim.lr=0.01")
    second.wait_until(lambda: "optim.lr" not in second.errors and "train " in second.output)
    second.kill()
    assert "lr         0.01 ->" in second.output


def test_ranks_with_another_config_are_refused(run_ranks, tmp_path, data):
    """As of machines whose command lines differ."""
    configs = [
        write_config(tmp_path / f"{lr}.yaml", options_of(data) | {"optim": {"lr": lr}})
        for lr in (0.02, 0.5)
    ]
    found = run_ranks(2, train_as, configs, tmp_path / "run")
    assert [code for _, code, _ in found] == [2, 2]
    assert "optim.lr: 0.02 on rank 0, 0.5 on rank 1" in found[0][2]


def train_as(configs, directory):
    from segtrain.distributed import collectives

    return refusal(train, configs[collectives.rank()], directory)


def test_below_the_fewest_a_launcher_waits_and_then_says_so(machine, tmp_path):
    command = machine("2:3", "--rdzv-timeout", 2)
    assert command.wait() == 6
    said, folder = command.errors.splitlines(), tmp_path / "run" / ".machines"
    assert said == [
        f"segtrain: this machine, 127.0.0.1, waits until at least 2 are in {folder}",
        "segtrain: fewer than 2 machines came within 2 s (--rdzv-timeout); resume from "
        "the last checkpoint by --resume",
    ]


def test_a_notice_of_eviction_saves_and_leaves(machine, tmp_path):
    run, notice = tmp_path / "run", tmp_path / "notice"
    command = machine("1:2", "--notice", f"test -e {notice}")
    command.wait_for_step(run, 3)
    notice.touch()
    assert command.wait() == 143, command.errors
    assert f"about to be taken away (test -e {notice}): saving" in command.errors
    assert "which is saved" in (run / "train.log").read_text()
    again = machine("1:2")
    assert again.wait() == 0, again.errors
    assert logged_steps(run) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("command", ["no-such-command --now", "/etc/hostname"])
def test_a_command_for_notices_that_cannot_be_run_is_refused(command):
    with pytest.raises(ConfigError, match="--notice: cannot be run"):
        Notice(command)


def test_a_machine_without_a_network_is_told_how_to_name_one(tmp_path, data):
    config = write_config(tmp_path / "c.yaml", options_of(data))
    words = ["train", config, "--device", "cpu", "--nproc", 1, "--output", tmp_path / "run"]
    command = Command(tmp_path, *words, "--nnodes", 2, GLOO_SOCKET_IFNAME="nope")
    assert command.wait() == 2
    assert "GLOO_SOCKET_IFNAME in the environment names the one" in command.errors


def test_ranks_that_start_again_do_not_meet_the_dead(monkeypatch):
    """By torchrun, whose store keeps the addresses of those that were killed."""
    kept = HashStore()
    monkeypatch.setattr(
        process_group.torch_dist,
        "rendezvous",
        lambda _, timeout: iter([(kept, threading.current_thread().rank, 3)]),
    )

    def attempt(*ranks):
        found = {}

        def join(rank):
            store = process_group._store_of_attempt(process_group.timedelta(seconds=5))["store"]
            store.set(f"address {rank}", "here")
            found[rank] = store

        threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in ranks]
        for thread, rank in zip(threads, ranks, strict=True):
            thread.rank = rank
            thread.start()
        for thread in threads:
            thread.join(timeout=10)
        return found

    for _ in range(2):
        stores = attempt(2, 1, 0)
        assert sorted(stores) == [0, 1, 2]
        assert all(stores[i].get(f"address {j}") == b"here" for i in range(3) for j in range(3))
        others = attempt(1, 2, 0)
        assert not others[0].check(["no such"])
        assert sorted(others) == [0, 1, 2]


def test_a_machine_that_dies_while_all_count_their_ranks_costs_one_more_round(
    monkeypatch, tmp_path
):
    tries, store = [], SharedFolder(tmp_path / "m").store(1)
    store.set_timeout(timedelta(milliseconds=10))

    def rendezvous_of_torch(self, group):
        tries.append(group)
        if len(tries) == 1:
            store.get("of the dead")

    monkeypatch.setattr(agent.LocalElasticAgent, "_rendezvous", rendezvous_of_torch)
    made = agent.Agent.__new__(agent.Agent)
    made._rendezvous("group")
    assert tries == ["group", "group"]
