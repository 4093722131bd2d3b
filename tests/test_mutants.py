"""tools/mutants.py: what it changes, and that it tells tests that notice from those that do not."""

import subprocess
import textwrap
from pathlib import Path

import mutants
import pytest

SOURCE = '''\
"""Text that says 1 < 2."""

LIMIT = 3


def rest(a: list[int] | None, b=4, /) -> int | None:
    """Says 5."""
    if a and b > 6:
        raise ValueError("7" + str(b - 8))
    while not a:
        a = f"{b + 9}" + "10"
    return a if b else -11.5 * b
'''
CHANGES = {
    "a and b > 6": "(a or b > 6)",
    "b > 6": "(b >= 6)",
    "6": "(7)",
    "not a": "(a)",
    "-11.5 * b": "(-11.5 / b)",
    "11.5": "(12.5)",
    "b": "(not b)",
}


def test_comparisons_operators_conditions_and_constants_change_and_what_is_said_does_not():
    found = mutants.mutants("m.py", SOURCE)
    assert {mutant.before: mutant.after for mutant in found} == CHANGES
    assert len(found) == len(CHANGES)
    first = next(mutant for mutant in found if mutant.before == "b > 6")
    assert mutants.changed(SOURCE, first) == SOURCE.replace("b > 6", "(b >= 6)")


def test_a_source_with_marks_does_the_same_and_tells_where_it_was(monkeypatch):
    reached = []
    monkeypatch.setattr("mutation_probe.hit", reached.append)
    found = dict(enumerate(mutants.mutants("m.py", SOURCE)))
    names = {}
    exec(mutants.probed(SOURCE, found), names)
    assert names["rest"]([1], 0) == 0
    assert {found[number].before for number in reached} == {*CHANGES}
    reached.clear()
    with pytest.raises(ValueError, match="7-1"):
        names["rest"]([1], 7)
    assert {found[number].before for number in reached} == {"a and b > 6", "b > 6", "6"}


TESTED = {
    "segtrain/__init__.py": "",
    "segtrain/sizes.py": """
        import os

        def larger(a, b):
            return a > b

        def doubled(x):
            return x * 2

        def unused(x):
            return x or 1

        def quiet(x):
            return x > 0 and os.kill(os.getppid(), 9)
        """,
    "tests/test_sizes.py": """
        import pytest
        from segtrain import sizes

        @pytest.fixture(scope="module")
        def double():
            return sizes.doubled(2)

        def test_larger():
            assert sizes.larger(2, 1) and not sizes.larger(1, 1)

        def test_fails_anyway():
            assert sizes.unused(0) == 2

        def test_nothing():
            sizes.larger(1, 2)

        def test_quiet():
            assert not sizes.quiet(0)

        def test_number(double):
            assert isinstance(double, int)

        def test_double(double):
            assert double == 4
        """,
    "tests/conftest.py": """
        from pathlib import Path
        from times import Times

        def pytest_addoption(parser):
            parser.addoption("--times")

        def pytest_configure(config):
            if file := config.getoption("times"):
                worker = getattr(config, "workeroutput", None)
                config.pluginmanager.register(Times(Path(file), worker))
        """,
    "pytest.ini": "[pytest]\npythonpath = tools tests\nmarkers = slow\n",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    root, here = tmp_path / "project", Path(__file__).parent
    tests = {"tests/times.py": (here / "times.py").read_text()}
    tools = {"tools/mutation_probe.py": (here.parent / "tools/mutation_probe.py").read_text()}
    for name, text in (TESTED | tests | tools).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    monkeypatch.setattr(mutants, "ROOT", root)
    return tmp_path


@pytest.mark.slow
def test_mutants_that_no_test_fails_have_survived(project, capsys):
    of = [str(project / "out"), "--of", "sizes.py"]
    assert mutants.main(of) == 0
    said = capsys.readouterr().out
    assert "a > b -> (a >= b) 2 tests: tests/test_sizes.py::test_larger\n" in said
    assert "x * 2 -> (x / 2) 2 tests: tests/test_sizes.py::test_" in said
    assert "2 -> (3) 2 tests: tests/test_sizes.py::test_double\n" in said
    assert "x > 0 -> (x >= 0) 1 tests: (it ended what had started the tests)\n" in said
    # Those of `unused`, which no test reaches, and two numbers of `quiet`.
    assert "4 of 9 mutants survived" in said
    assert mutants.main([*of, "--survivors", "3"]) == 1
    capsys.readouterr()
    mutants.main([str(project / "whole"), "--of", "sizes.py", "--whole", "tests/test_sizes.py"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "none of" in line]
    # What ended the tests does not say which of them noticed.
    assert lines == [
        f"tests/test_sizes.py::test_{name}: none of {number} mutants that it reaches fails it"
        for name, number in (("nothing", 1), ("quiet", 3))
    ]
