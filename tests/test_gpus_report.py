"""tools/test_gpus.py: its checks on CPU ranks, and what only GPUs reach by devices that are not."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_gpus
import torch
from gpus import equality, group, hooks, report, speed, stack
from gpus.report import CUT, ENDED, FAILED, HANG, PASSED, Outcome, Report, anonymous
from processes import REPOSITORY, free_port
from torch.autograd import DeviceType

from segtrain.distributed.machine import is_alive

NO_MEMORY = "a rank has no memory for a graph"
RANKS_MODULE = """
import os, time

def stays():
    time.sleep(600)

def items(device, options):
    second = int(os.environ["RANK"]) == 1
    def hangs():
        stays() if second else None
        return {}, []
    def dies():
        os._exit(3) if second else None
        return {}, []
    finds = lambda: ({"n": 1}, ["wrong"] if second else [])
    return {"fine": lambda: ({"n": 1}, []), "finds": finds, "hangs": hangs, "dies": dies}
"""


def ask(path, *arguments):
    """The exit code of the tool on CPU ranks, and its report."""
    code = test_gpus.main(["--device", "cpu", "--limit", "120", "--output", str(path), *arguments])
    return code, json.loads(path.read_text())


def parsed(*arguments):
    return test_gpus._parser().parse_args(arguments)


@pytest.fixture
def run_items(tmp_path):
    """`run_items(skip, limit_s, end)`: what becomes of RANKS_MODULE on two ranks."""
    (tmp_path / "ranks_module.py").write_text(RANKS_MODULE)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environ = group.environment(LOCAL_WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo", **shared)
    environ["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    place = group.Place(environ, {r: {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)})

    def run(*skip, limit_s=60.0, end=float("inf")):
        options = {"device": "cpu", "skip": skip}
        folder = Path(tempfile.mkdtemp(dir=tmp_path))  # ranks add to files that are there
        return group.run("it", "ranks_module", place, options, folder, limit_s, end)

    return run


@pytest.mark.slow("training", "norm", "distributed")
def test_steps_of_two_ranks_are_those_of_one_in_one_file(tmp_path, capsys):
    code, found = ask(tmp_path / "r.json", "--ranks", "2", "--sets", "1", "--only", "bits")
    assert code == 0, found
    assert [check["status"] for check in found["checks"]] == [PASSED, PASSED]
    digests = found["checks"][1]["figures"]["sha256"]
    splits = ["an uneven split", "a rank without images"]
    assert list(digests) == ["defaults", *splits, equality.FLOAT64, equality.SHARES]
    assert found["summary"][0] == "2 passed"
    assert str(tmp_path) not in json.dumps(found)
    assert "2 passed" in capsys.readouterr().out


@pytest.mark.slow
def test_all_checks_run_on_cpu_ranks(tmp_path):
    _, found = ask(tmp_path / "r.json", "--sets", "2", "--minutes", "20")
    assert found["not run"] == {}
    statuses = {check["name"]: check["status"] for check in found["checks"]}
    assert len(statuses) == 13
    assert set(statuses.values()) == {PASSED}, found["summary"]


@pytest.mark.slow
def test_all_ranks_go_on_eagerly_if_one_cannot_record(tmp_path):
    lab = test_gpus.runs.Lab(tmp_path, 2, "cpu", group.environment(OMP_NUM_THREADS="1"), 120)
    found = test_gpus.runs.outcome(NO_MEMORY, lab, test_gpus.runs.goes_on_without_memory)
    assert found.status == PASSED, found.problems


@pytest.mark.slow
def test_processes_that_torchrun_starts_on_two_machines_meet(tmp_path):
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    where += ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
    tool = [REPOSITORY / "tools/test_gpus.py", "--device", "cpu", "--sets", "1", "--limit", "120"]
    command = [sys.executable, "-m", "torch.distributed.run", *where, *tool]
    environ = group.environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    processes = []
    for node in ("first", "second"):
        (tmp_path / node).mkdir()
        words = list(map(str, [*command, "--only", "sums", "bits"]))
        processes.append(subprocess.Popen(words, cwd=tmp_path / node, env=environ))
    assert [process.wait() for process in processes] == [0, 0]
    (path,) = tmp_path.rglob("gpus-report.json")
    found = json.loads(path.read_text())
    assert [check["status"] for check in found["checks"]] == [PASSED] * 3
    assert len(found["machines"]) == 2


def test_a_rank_that_hangs_is_named_with_its_stack_and_killed(run_items, monkeypatch):
    started, start = [], group._Rank

    def starts(*about):
        started.append(start(*about))
        return started[-1]

    monkeypatch.setattr(group, "_Rank", starts)
    found, last = run_items("dies", limit_s=6.0)
    assert found.status == HANG
    assert found.figures["fine"] == {"n": 1}
    assert found.problems[0] == "rank 1, finds: wrong"
    assert "rank 1 in hangs" in found.problems[1]
    assert "in stays" in found.said
    assert last in ("hangs", "leaving the group")
    assert not any(is_alive(rank.process.pid) for rank in started)


@pytest.mark.slow
def test_a_rank_that_dies_or_finds_something_is_named(run_items):
    found, _ = run_items("hangs")
    assert found.status == ENDED
    assert "rank 1 with 3" in found.problems[-1]
    found, _ = run_items("hangs", "dies")
    assert (found.status, found.problems) == (FAILED, ["rank 1, finds: wrong"])
    found, _ = run_items(end=0.0)
    assert (found.status, found.said) == (CUT, ""), "the end of the time is no fault"


def test_without_a_device_nothing_passes(tmp_path):
    code, found = ask(tmp_path / "r.json", "--device", "cuda")
    assert code == 1
    assert "no CUDA device; --device cpu runs" in found["summary"][2]


def test_eight_devices_are_asked_with_both_engines_and_ranks_that_share_one_for_no_times():
    checks = test_gpus.plan("cuda", 8, parsed(), shared=False)
    assert [c.ranks for c in checks if c.kind == "bits"] == [1, 2, 8]
    speeds = [check for check in checks if check.kind == "speed"]
    assert [c.ranks for c in speeds if not c.environ] == [8, 4, 2, 1]
    engines = {c.environ["TORCH_DIST_USE_NCCL2"] for c in speeds if c.environ}
    registered = {c.environ["NCCL_GRAPH_REGISTER"] for c in speeds if c.environ}
    assert engines == registered == {"0", "1"}
    (images,) = {c.options["images"] for c in checks if c.kind == "bits"}
    assert images % 8
    shared = test_gpus.plan("cuda", 2, parsed(), shared=True)
    assert [c.options["cases"] for c in shared if c.kind == "speed"] == [0]
    sums = test_gpus.plan("cuda", 2, parsed("--only", "sums"), shared=True)
    assert {c.kind for c in sums} == {"sums"}


def test_an_old_nccl_that_cannot_share_is_told_with_the_way_out():
    old, new = ({"device": "cuda", "NCCL": version} for version in ("2.28.9", "2.30.7"))
    said = test_gpus.problem_of([old], shared=True)
    assert "NCCL 2.28.9 cannot let ranks share a device" in said
    assert "--nccl" in said
    assert test_gpus.problem_of([old], shared=False) == ""
    assert test_gpus.problem_of([new], shared=True) == ""


@pytest.fixture
def two_devices(monkeypatch):
    """What torch would say of two devices."""
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda index: f"H{index}",
        "get_device_properties": lambda _: SimpleNamespace(name="H0", total_memory=80 << 30),
        "can_device_access_peer": lambda one, other: one < other,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92300)
    monkeypatch.setattr(stack, "_output", lambda *words: f"{words[0]}\nGPU0 NV18\n")


def test_the_stack_of_two_devices_tells_no_path(two_devices, monkeypatch):
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/someone/topology.xml")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    found = stack.describe("auto")
    assert (found["device"], found["NCCL"], found["memory_gib"]) == ("cuda", "2.30.7", 80.0)
    assert found["devices"] == ["H0", "H1"]
    assert found["peers"] == [[True, True], [False, True]]
    assert found["topology"] == ["nvidia-smi", "GPU0 NV18"]
    assert found["environment"]["NCCL_TOPO_FILE"] == "(set)"
    assert found["environment"]["NCCL_GRAPH_REGISTER"] == "0"


def test_ranks_beyond_the_devices_share_them(two_devices, tmp_path, monkeypatch):
    described = stack.describe("cuda")
    monkeypatch.setattr(test_gpus.Tool, "_describe", lambda self: described)
    for words, ranks, shared in ((), 2, False), (("--ranks", "3"), 3, True):
        about = Report(tmp_path / "r.json", {})
        tool = test_gpus.Tool(parsed(*words, "--nccl", "x.so"), tmp_path, test_gpus.Alone(), about)
        assert (tool.ranks, tool.shared) == (ranks, shared)
        place = tool._place(test_gpus.Check("sums", "sums", ranks, "collectives"))
        assert place.environ.get(test_gpus.SHARED) == ("1" if shared else None)
        assert place.environ["LD_PRELOAD"].endswith("x.so")
        assert list(place.ranks) == list(range(ranks))


def test_whole_commands_and_some_of_the_ranks_are_asked_on_one_machine_only(tmp_path, monkeypatch):
    two = {"device": "cpu", "devices": []}
    monkeypatch.setattr(test_gpus.Tool, "_describe", lambda self: two)
    monkeypatch.setattr(test_gpus, "Meeting", type("Meeting", (test_gpus.Alone,), {"size": 16}))
    report = Report(tmp_path / "r.json", {})
    tool, asked = test_gpus.Tool(parsed(), tmp_path, test_gpus.Meeting(), report), []
    passed = Outcome("it", PASSED)
    monkeypatch.setattr(tool, "_outcome", lambda check, _: asked.append(check.ranks) or passed)
    tool.run(test_gpus.plan("cpu", tool.ranks, parsed(), shared=False))
    assert set(asked) == {1, 16}
    left = json.loads((tmp_path / "r.json").read_text())["not run"]
    assert {"soak", "a rank is killed", "bits, 2 ranks", "a step, 8 ranks"} <= left.keys()


def test_a_full_device_is_full_only_while_a_graph_is_recorded(monkeypatch):
    fractions, seen = [], []
    graph = type("graph", (), {"__enter__": lambda _: seen.append(fractions[-1])})
    graph.__exit__ = lambda *_: None
    fakes = {
        "graph": graph,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (0, 100 << 20),
        "memory_reserved": lambda: 48 << 20,
        "set_per_process_memory_fraction": fractions.append,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    hooks.take_memory()
    with torch.cuda.graph():
        pass
    assert seen == [0.5]
    assert fractions == [0.5, 1.0]


def test_kernels_of_nccl_are_counted_among_all():
    def event(name, us, kind=DeviceType.CUDA):
        about = {"time_range": SimpleNamespace(elapsed_us=lambda: us), "is_user_annotation": False}
        return SimpleNamespace(name=name, device_type=kind, **about)

    events = [event("ncclDevKernel_AllReduce", us) for us in (10.0, 30.0, 20.0)]
    events += [event("gemm", 940.0), event("ncclAllReduce", 5.0, DeviceType.CPU)]
    found = speed.sending(events, is_cuda=True)
    assert found == {"ncclDevKernel_AllReduce": "3 x 20.0 us", "all kernels, ms": 1.0}


def test_what_differs_from_one_rank_is_named():
    one = {
        equality.FLOAT64: {"losses": [[1, 2.0, float("nan"), 3.0]]},
        equality.SHARES: {"losses": [], "sha256": "a"},
    }
    assert equality.beside_one_rank(one, one) == []
    other = {equality.FLOAT64: {"losses": [[1, 2.0, float("nan"), 3.0 + 1e-8]]}}
    other[equality.SHARES] = {"losses": [], "sha256": "b"}
    first, second = equality.beside_one_rank(one, other)
    assert "differ by 3.3e-09" in first
    assert "other bits" in second


def test_the_report_names_no_person_machine_or_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(report.socket, "gethostname", lambda: "node7.lab.example")
    monkeypatch.setattr(report.getpass, "getuser", lambda: "ada")
    text = f"node7: {tmp_path}/x of ada at 10.1.2.3, {REPOSITORY}/a.py, adam 2.30.7, 127.0.0.1"
    shown = anonymous(text, {tmp_path: "runs"})
    assert shown == "(host): runs/x of (user) at (address), segtrain/a.py, adam 2.30.7, 127.0.0.1"


def test_every_outcome_is_in_the_file_at_once(tmp_path, capsys):
    path = tmp_path / "r.json"
    found = Report(path, {})
    found.add(Outcome("sums", PASSED, 1.0, {"1 KB": {"eager, us": 12.345}}))
    assert found.is_good
    assert json.loads(path.read_text())["summary"][:2] == ["1 passed", "passed  sums, 1 s"]
    found.add(Outcome("bits", HANG, problems=["hang after 30 s"], said="stack"))
    found.leave_out("soak", "no time was left")
    assert not found.is_good
    content = json.loads(path.read_text())
    assert content["not run"] == {"soak": "no time was left"}
    assert content["checks"][1]["said"] == "stack"
    assert "eager, us 12.35" in capsys.readouterr().out
