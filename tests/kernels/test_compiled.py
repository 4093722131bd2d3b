"""Every kernel compiles for devices that are not here, and keeps its numbers in registers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

# Some kernels for one device; compiling all takes minutes.
SOME = ("labels", "6 bins, aligned", "--targets", "sm_90")
ALL = pytest.param(("",), marks=pytest.mark.slow("kernels"))


@pytest.fixture(scope="module", params=[SOME, ALL], ids=["some", "all"])
def rows(request, tmp_path_factory):
    """The rows of tests/kernels/kernel_table.py, which a process without the interpreter makes."""
    file = tmp_path_factory.mktemp("table") / "rows.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(file.parent)
    command = [sys.executable, ROOT / "tests/kernels/kernel_table.py", "--json", file, "--only"]
    command += request.param
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


def test_no_kernel_spills(rows):
    found = [compiled for row in rows for compiled in row.values() if isinstance(compiled, dict)]
    assert len(found) >= 4
    assert {compiled["spills"] for compiled in found} == {0}
    # 255 is the most that a thread can have; at 128 sixteen warps fill a multiprocessor.
    assert max(compiled["registers"] for compiled in found) <= 168


def test_every_kernel_is_in_the_table(rows):
    files = (ROOT / "segtrain/kernels").glob("*.py")
    text = "\n".join(map(Path.read_text, files))
    kernels = set(re.findall(r"^def (_\w+_kernel)\(", text, re.MULTILINE))
    assert kernels
    assert {row["kernel"] for row in rows} == kernels
