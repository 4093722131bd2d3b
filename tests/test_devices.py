"""Which device a rank gets, and what NCCL's errors at set-up mean; no device is needed."""

import os

import pytest
import torch
import torch.distributed as torch_dist

from segtrain.config import Config
from segtrain.data.sample.loader import worker_failures
from segtrain.distributed import collectives as dist
from segtrain.distributed import liveness, process_group
from segtrain.distributed import machine as machine_module
from segtrain.distributed.process_group import device_for
from segtrain.errors import ConfigError, ExecutionError, LostRanksError
from segtrain.trainer.setup import make_repeatable

DUPLICATE = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:77, invalid usage (run \
with NCCL_DEBUG=WARN for details), NCCL version 2.27.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 35000
Exception raised from create at ../torch/csrc/x.cpp:1 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98
"""
SYSTEM = """NCCL error in: ../torch/x.cpp:77, unhandled system error\nncclSystemError: System call
Last error:
Error while creating shared memory segment /dev/shm/nccl-GyHpWD (size 9637888)
"""
REMOTE = """NCCL error in: ../torch/x.cpp:77, remote process exited\nncclRemoteError: A call failed
Last error:
socketProgress: Connection closed by remote peer node2
"""


@pytest.fixture
def machine(monkeypatch):
    """`machine(devices, local_rank, launched)`: what a rank finds."""

    def make(devices, local_rank=0, *, launched=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(liveness, "has_launcher", lambda: launched)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    return make


def test_each_rank_has_its_own_device(machine):
    machine(4, local_rank=3, launched=True)
    assert device_for("auto") == torch.device("cuda", 3)
    machine(1, local_rank=3)  # a task of SLURM with --gpus-per-task=1
    assert device_for("cuda") == torch.device("cuda", 0)


def test_more_ranks_than_devices_are_refused(machine):
    for devices, launched in ((1, True), (2, False)):
        machine(devices, local_rank=2, launched=launched)
        with pytest.raises(ConfigError, match="rank 2 of this machine has no device of its own"):
            device_for("auto")


def test_ranks_share_devices_where_the_environment_lets_nccl_do_so(machine, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    for devices, wanted in ((5, [0, 1, 2, 3, 4]), (2, [0, 1, 0, 1, 0])):
        assert capsys.readouterr().err == ""
        for rank in range(5):
            machine(devices, local_rank=rank, launched=True)
            assert device_for("cuda").index == wanted[rank]
    said = capsys.readouterr().err
    assert said.count("5 ranks share 2 devices") == said.count("times mean nothing") == 1
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    with pytest.raises(ConfigError, match="has no device of its own"):
        device_for("cuda")


def test_a_device_that_torch_cannot_use_is_a_warning(machine, monkeypatch, tmp_path, capsys):
    machine(0)
    monkeypatch.setattr(machine_module, "_FIRST_DEVICE", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_for("auto") == torch.device("cpu")
    assert "the driver may be too old for CUDA 13.2" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="the driver may be too old"):
        device_for("cuda")


@pytest.mark.parametrize(
    ("found", "used"), [(None, ":4096:8"), (":16:8", ":16:8"), (":0:0", ":4096:8")]
)
def test_deterministic_training_gives_cublas_the_workspace_that_it_needs(monkeypatch, found, used):
    name = "CUBLAS_WORKSPACE_CONFIG"
    config = Config(
        data={"layout": "voc", "root": "nowhere", "classes": "voc"}, train={"deterministic": True}
    )
    monkeypatch.setenv(name, found or "")
    if found is None:
        monkeypatch.delenv(name)
    try:
        make_repeatable(config, torch.device("cuda"))
        assert os.environ[name] == used
    finally:
        torch.use_deterministic_algorithms(False)


def fail(monkeypatch, error, *, in_set_up):
    """As `process_group` tells `error`, of its set-up or of what is done in it."""

    def init_process_group(**_):
        if in_set_up:
            raise error

    monkeypatch.setattr(torch_dist, "init_process_group", init_process_group)
    monkeypatch.setenv("RANK", "1")
    with process_group.process_group(torch.device("cpu"), timeout_s=5):
        raise error


def test_a_group_over_nccl_is_made_and_left_with_its_surroundings(monkeypatch):
    """What no device has run is switched off, unless the user has chosen."""
    did, used = [], {}
    monkeypatch.setenv("RANK", "0")
    for name in process_group._NCCL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_LOCAL_REGISTER", "1")

    def init_process_group(**options):
        used.update({name: os.environ[name] for name in process_group._NCCL_SETTINGS}, **options)

    monkeypatch.setattr(torch_dist, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: did.append(str(device)))
    monkeypatch.setattr(dist, "barrier", lambda: did.append("barrier"))
    monkeypatch.setattr(dist, "leave_groups", lambda: did.append("left"))
    with process_group.process_group(torch.device("cuda", 1), timeout_s=5):
        did.append("steps")
    assert did == ["cuda:1", "steps", "barrier", "cuda:1", "left"]
    assert (used["backend"], used["TORCH_DIST_USE_NCCL2"]) == ("nccl", "0")
    assert (used["NCCL_GRAPH_REGISTER"], used["NCCL_LOCAL_REGISTER"]) == ("0", "1")


TIMED_OUT = "Watchdog caught collective operation timeout: NCCL operation timed out"


# torch has two back ends for NCCL: the older one's errors have a type.
@pytest.mark.parametrize("kind", [torch_dist.DistBackendError, RuntimeError], ids=["old", "new"])
@pytest.mark.parametrize(
    ("in_set_up", "error", "meaning", "said"),
    [
        (True, DUPLICATE, ConfigError, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA"),
        (True, SYSTEM, ExecutionError, "Error while creating shared memory"),
        (True, REMOTE, LostRanksError, "Connection closed by remote peer node2"),
        (False, TIMED_OUT, LostRanksError, r"rank 1: lost the .*NCCL operation timed out"),
    ],
)
def test_errors_of_nccl_are_told_by_their_cause(monkeypatch, in_set_up, error, meaning, said, kind):
    with pytest.raises(meaning, match=said) as found:
        fail(monkeypatch, kind(error), in_set_up=in_set_up)
    assert type(found.value) is meaning
    assert "frame" not in str(found.value)
    with pytest.raises(RuntimeError, match="a mistake of the program"):
        fail(monkeypatch, RuntimeError("a mistake of the program"), in_set_up=in_set_up)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Pin memory thread exited unexpectedly"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
        FileNotFoundError("Caught FileNotFoundError in pin memory thread for device 0.\nTrace"),
    ],
)
def test_a_dead_worker_is_named_with_pinned_memory_too(error):
    message = "a killed worker is often out of memory"
    with pytest.raises(ExecutionError, match=message) as found, worker_failures():
        raise error
    assert "Trace" not in str(found.value)
    other = type(error)("a.png")
    with pytest.raises(type(error), match=r"a\.png"), worker_failures():
        raise other
