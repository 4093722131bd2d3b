"""Runs each test in a process with a time limit, of which nothing is left afterwards.

A crash, a hang or a device that is broken or full ends no other test. Everything here is a hook of
pytest, for a conftest.py to import or to call. Tests carry `@pytest.mark.gpu(limit_s=...)`.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from segtrain.distributed.machine import is_alive

CHILD = "SEGTRAIN_TEST_REPORTS"
_TAIL = 4000  # characters of the output of a test that is killed


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """In the parent: runs `item` in a child, whose reports become those of this session."""
    if CHILD in os.environ:
        return None
    hook, config = item.ihook, item.config
    limit_s = item.get_closest_marker("gpu").kwargs["limit_s"]
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    lines, problem = _child(item, limit_s)
    for line in lines:
        report = hook.pytest_report_from_serializable(config=config, data=json.loads(line))
        hook.pytest_runtest_logreport(report=report)
    if problem:
        where = (item.nodeid, item.location, {}, "failed")
        report = pytest.TestReport(*where, problem, "call", duration=limit_s)
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


class Reports:
    """In the child: hands its reports to the parent, each as soon as there is one."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with Path(os.environ[CHILD]).open("a") as file:
            file.write(json.dumps(data) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if CHILD in os.environ:
        config.pluginmanager.register(Reports(config))


def _child(item: pytest.Item, limit_s: float) -> tuple[list[str], str]:
    """The reports of `item`, one a line, and what is wrong if it was killed or crashed."""
    with tempfile.TemporaryDirectory() as folder:
        reports, output = Path(folder, "reports"), Path(folder, "output")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--capture=no"]
        with output.open("wb") as log:
            process = subprocess.Popen(
                [*command, "-m", "gpu", item.nodeid],
                cwd=item.config.rootpath,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {CHILD: str(reports), "PYTHONFAULTHANDLER": "1"},
                start_new_session=True,
            )
        problem = ""
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            problem = f"killed after {limit_s} s"
        finally:
            _kill_all(f"{CHILD}={reports}")
            process.wait()
        lines = reports.read_text().splitlines() if reports.exists() else []
        if not problem and not any(json.loads(line)["when"] == "teardown" for line in lines):
            problem = f"ended with {process.returncode}"
        if problem:
            problem += f"; its output ends:\n{output.read_text(errors='replace')[-_TAIL:]}"
        return lines, problem


def _kill_all(variable: str) -> None:
    """Kills all processes with this variable: ranks and loader workers hold memory of the device.

    Some of them are in sessions of their own, and no longer children of the one that started them.
    """
    wanted = variable.encode()
    while pids := [pid for pid in _all_pids() if wanted in _environment(pid) and is_alive(pid)]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # of another user, or gone
        return []
