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
    monkeypatch.setattr("segtrain.commands.doctor._COMPILER", "no-such-compiler")
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
