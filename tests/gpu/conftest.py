"""`pytest -m gpu`: a device for each test, a process and a time limit, and their figures in a file.

With `--device cpu` all of them run tiny, in this process, and none can judge speed or memory.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from gpus.stack import machine

from gpu import isolation
from segtrain.files import write_atomic


class Figures(dict[str, Any]):
    """What a test has measured, by name; printed at once, since the test may be killed later."""

    def __setitem__(self, name: str, value: Any) -> None:
        print(f"{name}: {json.dumps(value)}", flush=True)
        super().__setitem__(name, value)


@pytest.fixture(scope="session")
def device(pytestconfig) -> torch.device:
    """The device under test; with the index, for which NCCL and the memory statistics ask."""
    on_cuda = pytestconfig.getoption("device") == "cuda"
    return torch.device("cuda", 0) if on_cuda else torch.device("cpu")


@pytest.fixture
def figures(request) -> Figures:
    """Takes figures, `figures["step_ms"] = 12.5`, which end up in the file of `--figures`."""
    found = Figures()
    request.node.user_properties.append(("figures", found))
    return found


@pytest.fixture(scope="session")
def gloo_ranks(request, device):
    """As `run_ranks`: ranks that share the device over gloo, which takes tensors through the host.

    NCCL refuses two ranks on one device.
    """
    return request.getfixturevalue("spawn_ranks" if device.type == "cuda" else "run_ranks")


@pytest.fixture(scope="session")
def nccl_ranks(request, device):
    """As `run_ranks`: ranks with a device each over NCCL; on a CPU over gloo."""
    return request.getfixturevalue("spawn_nccl_ranks" if device.type == "cuda" else "run_ranks")


def pytest_configure(config: pytest.Config) -> None:
    isolation.pytest_configure(config)
    if isolation.CHILD not in os.environ:
        config.pluginmanager.register(FiguresFile(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _is_missing(config):
        reason = "needs a CUDA device; torch finds none (--device cpu runs it tiny on the CPU)"
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if item.config.getoption("device") == "cpu" or _is_missing(item.config):
        return None
    return isolation.pytest_runtest_protocol(item)


def _is_missing(config: pytest.Config) -> bool:
    return config.getoption("device") == "cuda" and not torch.cuda.is_available()


class FiguresFile:
    """Writes the outcome and the figures of every test as soon as it has ended."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._tests = config, {}
        self._path = Path(config.getoption("figures"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] += report.duration
        test["figures"] = dict(report.user_properties).get("figures", {})
        if report.outcome != "passed":
            reason = report.longrepr[2] if report.skipped else report.longreprtext[-2000:]
            test |= {"outcome": report.outcome, "reason": reason}
        if report.when == "teardown" and not _is_missing(self._config):
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine(self._config.getoption("device")), "tests": self._tests}
        write_atomic(self._path, json.dumps(content, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        line = terminalreporter.write_line
        if _is_missing(self._config):
            line("torch finds no CUDA device: NOTHING WAS CHECKED", red=True)
            return
        if not self._tests:
            return
        counts = Counter(test["outcome"] for test in self._tests.values())
        name = machine(self._config.getoption("device"))["name"]
        line(f"{name}: {', '.join(f'{n} {outcome}' for outcome, n in counts.items())}")
        line(f"figures: {self._path}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if _is_missing(self._config) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
