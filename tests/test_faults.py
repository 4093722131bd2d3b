"""Every fault of faults.md is provoked by a test, or the table says why not."""

import ast
import re
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
NUM_FAULTS = 95


def listed():
    """The number of each row and why it is not provoked."""
    rows = re.findall(
        r"^\| (\d+) \| [^|]+ \| ?([^|]*?) ?\|$", (HERE / "faults.md").read_text(), re.M
    )
    return {int(number): reason for number, reason in rows}, len(rows)


@cache
def marked():
    """The tests of each number, and those of them that replace a part of the program."""
    tests, patched = {}, set()
    for path in sorted(HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    for argument in mark.args:
                        tests.setdefault(argument.value, []).append(f"{path.name}::{node.name}")
                    if any(one.arg == "monkeypatch" for one in node.args.args):
                        patched.add(f"{path.name}::{node.name}")
    return tests, patched


def test_every_fault_is_provoked_or_excused():
    reasons, num_rows = listed()
    tests, _ = marked()
    assert num_rows == NUM_FAULTS
    assert sorted(reasons) == list(range(1, NUM_FAULTS + 1))
    assert [
        number for number, reason in reasons.items() if not reason and number not in tests
    ] == []
    assert [number for number, reason in reasons.items() if reason and number in tests] == []
    assert set(tests) <= set(reasons)


def test_faults_are_real():
    """None of these tests but the ones named here takes pytest's monkeypatch.

    What some do is to wrap a function of the process that they kill or stop, to choose the moment.
    """
    _, patched = marked()
    assert patched == {
        # The packages are there; taking them away from one process takes a hook of its imports.
        "test_export.py::test_a_missing_onnx_package_is_named_with_the_command_that_installs_it"
    }
