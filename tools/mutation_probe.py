"""A plugin of pytest: which tests reach the marks that mutants.py puts into the code."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = "MUTANTS_REACHED"  # in the environment: where the marks are, and the outcome

_here = Path(os.environ.get(FOLDER, "."), os.environ.get("PYTEST_XDIST_WORKER", "alone"))
_seen: set[int] = set()


def hit(number: int) -> None:
    """Marks a mutant as reached; None, so that `hit(3) or x` is x."""
    if number not in _seen:
        _seen.add(number)
        (_here / str(number)).touch()


class Reached:
    """What the tests of one worker reach, their fixtures and the processes they start included."""

    def __init__(self) -> None:
        self._tests: dict[str, list[int]] = {}
        self._failed: set[str] = set()
        self._fixtures: dict[Any, set[int]] = defaultdict(set)
        _here.mkdir(parents=True, exist_ok=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = _taken()
        try:
            return (yield)
        finally:
            # Whoever uses what it made later does not run these lines again.
            self._fixtures[fixturedef] |= _taken()
            for number in before:
                hit(number)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _taken()
        try:
            return (yield)
        finally:
            reached = _taken()
            for found in item._fixtureinfo.name2fixturedefs.values():
                for fixture in found:
                    reached |= self._fixtures.get(fixture, set())
            self._tests[item.nodeid] = sorted(reached)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        # One that fails anyway, or by the marks, would fail with every mutant.
        passed = {name: n for name, n in self._tests.items() if name not in self._failed}
        _here.with_suffix(".json").write_text(json.dumps(passed))


def _taken() -> set[int]:
    """The marks since the last call, which are gone now."""
    reached = {int(name) for name in os.listdir(_here)}
    for number in reached:
        (_here / str(number)).unlink()
    _seen.clear()
    return reached


def pytest_configure(config: pytest.Config) -> None:
    if FOLDER in os.environ and (
        hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    ):
        config.pluginmanager.register(Reached())
