"""What ranks exchange besides tensors, and the interface on which they listen."""

import os
import pickle

import pytest
from experiments import small, write_config
from processes import Command, run_python

from segtrain.distributed import collectives as dist
from segtrain.distributed import liveness, machine, process_group
from segtrain.errors import DataError

VALUES = [{"a": [1, 2.5, None]}, "a longer text than that of rank 0: ß", []]


def refused_by_main():
    def function():
        raise DataError("a.png: no")

    with pytest.raises(DataError) as refusal:
        dist.run_on_rank0(function)
    return str(refusal.value)


def exchanged():
    of_main = dist.run_on_rank0(lambda: [dist.rank(), None, "ß"])
    return dist.all_gather_object(VALUES[dist.rank()]), refused_by_main(), of_main


class Payload:
    def __reduce__(self):
        return print, ("executed",)


def hostile_peer():
    """Rank 1 sends a pickle, as an attacker in its place would; rank 0 must not run it."""
    import torch

    data = pickle.dumps(Payload())
    if dist.rank() == 0:
        with pytest.raises(UnicodeDecodeError):
            dist.all_gather_object("fine")
        return True
    length = torch.tensor([len(data)])
    dist._gather_processes(length)  # through shared memory, where there is some
    longest = max(len(data), len('"fine"'))
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    torch.distributed.all_gather_into_tensor(torch.empty(2 * longest, dtype=torch.uint8), mine)
    return True


def test_ranks_exchange_plain_data_and_the_refusals_of_rank_0(run_ranks):
    assert run_ranks(3, exchanged) == [(VALUES, "a.png: no", [0, None, "ß"])] * 3


def test_what_is_no_plain_data_is_refused_even_alone():
    with pytest.raises(TypeError):
        dist.all_gather_object(object())
    assert dist.all_gather_object((1, 2)) == [[1, 2]]
    assert refused_by_main() == "a.png: no"


def test_a_pickle_from_another_rank_is_not_run(run_ranks, capfd):
    assert run_ranks(2, hostile_peer) == [True, True]
    assert "executed" not in capfd.readouterr().out


@pytest.mark.parametrize("already", [None, "eth7"])
def test_ranks_of_one_machine_listen_on_its_loopback(tmp_path, monkeypatch, already):
    """gloo and NCCL would else listen where the machine's name leads; a user's choice stays."""
    tmp_path.chmod(0o700)
    launched = {liveness.FOLDER_VARIABLE: str(tmp_path), "RANK": "0"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    for library in ("GLOO", "NCCL"):
        monkeypatch.setenv(f"{library}_SOCKET_IFNAME", already or "")
        if already is None:
            monkeypatch.delenv(f"{library}_SOCKET_IFNAME")
    process_group._choose_interface()
    assert machine.addresses()[machine.LOOPBACK] == "127.0.0.1"
    found = [os.environ[f"{library}_SOCKET_IFNAME"] for library in ("GLOO", "NCCL")]
    assert found == [already or machine.LOOPBACK] * 2


def test_a_machine_without_an_interface_for_its_ranks_says_so(tmp_path, data):
    """It is no other machine that is lost."""
    config = write_config(tmp_path / "c.yaml", small(data))
    words = ("train", config, "--nproc", 2, "--device", "cpu", "--output", tmp_path / "run")
    command = Command(tmp_path, *words, GLOO_SOCKET_IFNAME="nope")
    assert command.wait() == 6
    assert command.errors == (
        "segtrain: no network interface for the ranks: Unable to find address for: nope; "
        "GLOO_SOCKET_IFNAME in the environment names another one\n"
    )


def test_no_thread_of_the_group_outlives_it():
    """A thread that releases a tensor while Python ends would abort the process."""
    script = """
        import os
        import torch
        import torch.distributed
        from segtrain.distributed.process_group import process_group

        with process_group(torch.device("cpu"), timeout_s=20):
            import torch.distributed.nn.functional  # as torch does it in the middle of a run
            torch.distributed.all_reduce(torch.ones(3))
        names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
        print([name for name in names if "gloo" in name])
    """
    group = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run_python(script, **group, **store)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
