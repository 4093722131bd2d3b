"""`pytest -m gpu` on a machine without a device: it says so, and its tests run on the CPU at least.

A crash or a hang of one of them must not end the others.
"""

import json
import os
import subprocess
import sys

import pytest
from processes import REPOSITORY


def run_pytest(*arguments, where=REPOSITORY):
    """The exit code and the output; `arguments` are those of `pytest -m gpu`."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "gpu"]
    paths = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests", REPOSITORY / "tools")))
    done = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=where,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def on_the_cpu(tmp_path, *chosen):
    """Runs these tests on the CPU; what the file of figures says of each."""
    file = tmp_path / "figures.json"
    code, output = run_pytest("--device", "cpu", "--figures", file, *chosen)
    assert code == 0, output
    assert f"figures: {file}" in output
    content = json.loads(file.read_text())
    assert content["machine"]["device"] == "cpu"
    return content["tests"]


def test_without_a_device_nothing_passes():
    code, output = run_pytest("tests/gpu/test_evaluation.py")
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "torch finds no CUDA device: NOTHING WAS CHECKED" in output
    assert "passed" not in output


# Whole commands, and float16, of which CPUs know little.
SLOW = "test_commands or pack or exported or say_what or large-float16 or float16_trains"
# Tests of test_norm.py, which a CPU runs there.
KNOWN = "any_split or empty_on_all or half_precision or one_value or slices"


def test_a_layer_runs_on_a_cpu(tmp_path):
    found = on_the_cpu(tmp_path, "tests/gpu/test_norm.py", "-k", "few_kernels and float32")
    ((name, layer),) = found.items()
    assert "[torch.float32]" in name
    assert layer["outcome"] == "passed"
    assert layer["figures"]["2x64x23x30, F.batch_norm: ms, ratio"][0] > 0


@pytest.mark.slow("training", "norm", "kernels")
def test_all_but_commands_and_float16_run_on_a_cpu(tmp_path):
    found = on_the_cpu(tmp_path, "tests/gpu", "-k", f"not ({SLOW} or {KNOWN})")
    assert {test["outcome"] for test in found.values()} == {"passed", "skipped"}
    assert len(found) >= 40


@pytest.mark.slow
def test_commands_and_float16_run_on_a_cpu(tmp_path):
    found = on_the_cpu(tmp_path, "tests/gpu", "-k", SLOW)
    assert [test["outcome"] for test in found.values()] == ["passed"] * 10
