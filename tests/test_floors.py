"""What .ci/floors.py makes of an index, with stand-ins for Python, pip and pytest."""

import re
import subprocess
import sys

import pytest
from processes import REPOSITORY

FLOORS = REPOSITORY / ".ci/floors.py"
# As `python -m venv DIR`; its pip says what a test wants, its python counts calls.
STAND_IN = """#!/bin/sh
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho "$@" >> {log}\\n{pip}\\n' > "$3/bin/pip"
printf '#!/bin/sh\\necho "$@" | head -1 >> {log}\\n{python}\\n' > "$3/bin/python"
chmod +x "$3/bin/pip" "$3/bin/python"
"""


@pytest.fixture
def check(tmp_path):
    """`check(pip=..., python=...)`: exit code, output, and what the programs were asked."""
    cache, log = tmp_path / "cache", tmp_path / "log"
    cache.mkdir()

    def run(pip="true", python="true"):
        stand_in = tmp_path / "python"
        stand_in.write_text(STAND_IN.format(log=log, pip=pip, python=python))
        stand_in.chmod(0o755)
        log.write_text("")
        code = (
            f"import runpy, sys; sys.executable, sys.argv = {str(stand_in)!r}, ['', {str(cache)!r}]"
        )
        code += f"; runpy.run_path({str(FLOORS)!r}, run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert not (cache / "floors-venv").exists()
        return done.returncode, done.stdout, log.read_text().splitlines()

    run.cache = cache
    return run


def test_each_requirement_is_installed_at_its_lowest_version_and_only_once(check):
    code, said, (installed, *called) = check()
    assert code == 0, said
    text = (REPOSITORY / "pyproject.toml").read_text()
    text = text.partition("dependencies = [")[2].partition("\ndev = [")[0]
    wanted = re.findall(r'"([\w-]+)[>=]=([\d.]+)"', text)
    assert len(wanted) > 25
    assert installed.split()[3:-1] == [f"{name}=={version}" for name, version in wanted]
    assert len(called) == 2
    (stamp,) = check.cache.iterdir()
    assert stamp.read_text().split() == installed.split()[3:-1]
    assert check(pip="false") == (0, "", [])  # not asked again


def test_an_index_out_of_reach_is_told_and_asked_again(check):
    reason = "Retrying after connection broken by 'NewConnectionError': no route to host"
    for _ in range(2):
        code, said, called = check(pip=f'echo "{reason}" >&2; exit 1')
        assert code == 0
        assert "NOT CHECKED" in said
        assert len(called) == 1
    assert list(check.cache.iterdir()) == []


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ({"pip": 'echo "no x==1 (from versions: 1.1)" >&2; exit 1'}, "cannot be installed"),
        ({"pip": 'echo "no xx==1 (from versions: none)" >&2; exit 1'}, "cannot be installed"),
        ({"python": "exit 1"}, "do not work"),
    ],
)
def test_versions_that_are_not_there_or_fail_are_errors(check, programs, message):
    code, said, _ = check(**programs)
    assert code == 1
    assert message in said
    assert list(check.cache.iterdir()) == []
