"""What ranks exchange besides tensors, and the interface on which they listen."""

import os
import pickle
import subprocess
import sys
import textwrap

import pytest
from experiments import small, write_config
from processes import Command

from segtrain.distributed import collectives as dist
from segtrain.distributed import liveness, machine, process_group
from segtrain.errors import DataError


def gathered(values):
    return dist.all_gather_object(values[dist.rank()])


def refused_by_main(message):
    def function():
        raise DataError(message)

    try:
        dist.run_on_rank0(function)
    except DataError as error:
        return str(error)


def of_main():
    return dist.run_on_rank0(lambda: [dist.rank(), None, "ß"]), dist.broadcast_object(dist.rank())


class Payload:
    def __reduce__(self):
        return print, ("executed",)


def hostile_peer():
    """Rank 1 sends a pickle, as an attacker in its place would; rank 0 must not run it."""
    import torch

    data = pickle.dumps(Payload())
    if dist.rank() == 0:
        try:
            return dist.all_gather_object("fine")
        except ValueError as error:
            return type(error).__name__
    length = torch.tensor([len(data)])
    dist._gather_processes(length)  # through shared memory, where there is some
    longest = max(len(data), len('"fine"'))
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    torch.distributed.all_gather_into_tensor(torch.empty(2 * longest, dtype=torch.uint8), mine)
    return None


def everything():
    values = [{"a": [1, 2.5, None]}, "a longer text than that of rank 0: ß", []]
    return gathered(values), refused_by_main("a.png: no"), of_main()


def test_ranks_exchange_plain_data_and_the_refusals_of_rank_0(run_ranks):
    values = [{"a": [1, 2.5, None]}, "a longer text than that of rank 0: ß", []]
    assert run_ranks(3, everything) == [(values, "a.png: no", ([0, None, "ß"], 0))] * 3


def test_what_is_no_plain_data_is_refused_even_alone():
    with pytest.raises(TypeError):
        dist.all_gather_object(object())
    assert dist.all_gather_object((1, 2)) == [[1, 2]]
    assert refused_by_main("a.png: no") == "a.png: no"


def test_a_pickle_from_another_rank_is_not_run(run_ranks, capfd):
    assert run_ranks(2, hostile_peer) == ["UnicodeDecodeError", None]
    assert "executed" not in capfd.readouterr().out


@pytest.mark.parametrize("already", [None, "eth7"])
def test_ranks_of_one_machine_listen_on_its_loopback(tmp_path, monkeypatch, already):
    """gloo and NCCL would else listen where the machine's name leads; a user's choice stays."""
    tmp_path.chmod(0o700)
    for name, value in (
        (liveness.FOLDER_VARIABLE, str(tmp_path)),
        (liveness.ONE_MACHINE, "1"),
        ("RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
        ("GLOO_SOCKET_IFNAME", already),
        ("NCCL_SOCKET_IFNAME", already),
    ):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    process_group._choose_interface()
    wanted = already or machine.interface_with("127.0.0.1")
    assert wanted is not None
    assert [os.environ[f"{library}_SOCKET_IFNAME"] for library in ("GLOO", "NCCL")] == [wanted] * 2


@pytest.mark.parametrize(
    ("wrapper", "environ", "said"),
    [
        pytest.param(
            ["unshare", "--net"],
            {},
            "no loopback interface with the address 127.0.0.1, on which the ranks of one machine "
            "meet; switch it on: ip link set lo up",
            marks=pytest.mark.netns,
        ),
        (
            [],
            {"GLOO_SOCKET_IFNAME": "nope"},
            "no network interface for the ranks: Unable to find address for: nope; "
            "GLOO_SOCKET_IFNAME in the environment names another one",
        ),
    ],
)
def test_a_machine_without_an_interface_for_its_ranks_says_so(
    tmp_path, data, wrapper, environ, said
):
    """It is no other machine that is lost."""
    if wrapper and os.geteuid() != 0:
        pytest.skip("needs root, to make a network namespace")
    config = write_config(tmp_path / "c.yaml", small(data))
    words = ("train", config, "--nproc", 2, "--device", "cpu", "--output", tmp_path / "run")
    command = Command(tmp_path, *words, wrapper=wrapper, **environ)
    assert command.wait() == 6
    assert command.errors == f"segtrain: {said}\n"


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
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **group, **store},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
