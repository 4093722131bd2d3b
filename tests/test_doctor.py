"""`segtrain doctor` in real processes, in installations with something wrong."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import REPOSITORY

from segtrain.commands.launch import num_ranks_here
from segtrain.run.environment import library_version

REPAIR = "pip install --force-reinstall --no-deps opencv-python-headless"


@pytest.fixture
def doctor(lab, monkeypatch):
    """Exit code and output; `installed` is a folder with further packages."""

    def run(installed=None):
        if installed is not None:
            monkeypatch.syspath_prepend(installed)
        code, said, error = lab.command("doctor")
        assert error == ""
        return code, said

    return run


def install(root, name, version):
    """As pip leaves it, for all that asks for versions."""
    folder = root / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_versions_devices_and_memory_are_told(doctor):
    code, said = doctor()
    assert code == 0
    told = {line.split()[0] for line in said.splitlines()}
    assert {"segtrain", "Python", "cores", "CUDA"} <= told
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = [extra for name, extra in project["optional-dependencies"].items() if name != "dev"]
    needed = {re.split("[=>]", line)[0] for line in sum(extras, project["dependencies"])}
    assert needed <= told
    assert f"torch                   {library_version('torch')}\n" in said


@pytest.mark.parametrize(("gain", "offer"), [(3.3, ": set train.precision=bfloat16"), (0.7, "")])
def test_bfloat16_is_offered_where_the_processor_is_fast_in_it(doctor, monkeypatch, gain, offer):
    monkeypatch.setattr("segtrain.models.precision.cpu_gain", lambda: gain)
    line = f"bfloat16 on the CPU     {gain} times as fast as float32 in dense convolutions{offer}\n"
    assert line in doctor()[1]


@pytest.mark.fault(86)
def test_two_packages_of_opencv_are_pointed_out_with_the_repair(tmp_path, doctor):
    _, said = doctor()
    assert REPAIR not in said
    install(tmp_path, "opencv-python", "4.10.0.84")
    code, said = doctor(tmp_path)
    assert code == 0
    (line,) = [line for line in said.splitlines() if REPAIR in line]
    assert line.startswith("warning: opencv-python beside opencv-python-headless: each overwrites")


def test_a_library_that_is_missing_is_an_error(tmp_path):
    """Said without that library: by an interpreter that has none of them."""
    bare = Path(sys.base_prefix) / "bin" / "python3"
    command = [bare, "-S", "-c", "import torch"]
    if subprocess.run(command, capture_output=True).returncode == 0:
        pytest.skip(f"{bare} has torch")
    search = {"PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [bare, "-S", "-m", "segtrain", "doctor"], env=search, text=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (2, "")
    assert "error: torch: not installed; pip install torch\n" in done.stdout


def test_a_compiler_that_is_missing_is_a_warning(monkeypatch, doctor):
    monkeypatch.setattr("segtrain.desk.commands.doctor._COMPILER", "no-such-compiler")
    monkeypatch.setenv("CC", "no-such-c")
    _, said = doctor()
    assert "warning: no-such-compiler: not found; train.compile needs a C++ compiler" in said
    assert "no-such-c:" not in said  # which only a GPU needs
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "warning: no-such-c: not found; on CUDA train.compile needs it" in doctor()[1]


def test_devices_that_torch_cannot_use_do_not_count(monkeypatch, doctor):
    """With an old driver there are so many all the same."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    code, said = doctor()
    assert code == 0
    assert re.search(r"^CUDA devices +none$", said, re.MULTILINE)
    assert num_ranks_here("auto", "auto") == 1
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [num_ranks_here("auto", device) for device in ("auto", "cuda", "cpu")] == [8, 8, 1]


def test_what_several_devices_train_on_and_what_was_found_there(doctor, monkeypatch, tmp_path):
    import torch

    from segtrain.distributed.stack import DeviceStack

    monkeypatch.setenv("SEGTRAIN_CACHE", str(tmp_path))
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 3,
        "get_device_name": lambda index=0: "card",
        "can_device_access_peer": lambda a, b: (a, b) != (0, 2),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    _, said = doctor()
    assert "device to device        not between 0-2\n" in said
    assert re.search(r"CUDA, driver, NCCL +.*, 2\.30\.7\n", said)
    assert "not tried with several devices yet" in said
    assert "NCCL_GRAPH_REGISTER" not in said
    stack = DeviceStack("0", "2", "13", "2.30", "NCCL", "580", ("card",) * 2, 1)
    stack.keep("silent")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "1")
    code, said = doctor()
    assert code == 0
    assert f"steps as CUDA graphs    a replay did not come back: {stack}\n" in said
    assert "warning: NCCL_GRAPH_REGISTER=1: recorded steps may hang" in said
    assert "warning: TORCH_DIST_USE_NCCL2=1: no device has run segtrain with it" in said
