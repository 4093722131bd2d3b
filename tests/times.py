"""What each test costs: seconds on the clock, and of processors with all processes it starts.

`pytest --times FILE` writes them, `python tests/times.py FILE` prints the tables of the README.
"""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")


class Times:
    """A plugin of pytest; of its workers each measures, and the one that started them writes."""

    def __init__(self, file: Path, worker: dict[str, Any] | None):
        self._file, self._worker = file, worker
        self._tests: dict[str, tuple[float, float]] = {}
        self._collecting: list[float] = []
        self._start = time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before, start = processor_s(os.getpid()), time.monotonic()
        if not self._collecting:
            self._collecting.append(before)
        try:
            return (yield)
        finally:
            seconds = time.monotonic() - start
            self._tests[item.nodeid] = (seconds, processor_s(os.getpid()) - before)

    def pytest_testnodedown(self, node: Any) -> None:
        told = getattr(node, "workeroutput", {}).get("times")
        if told is not None:
            self._tests |= told[0]
            self._collecting += told[1]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._worker is not None:
            self._worker["times"] = (self._tests, self._collecting)
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        figures = {
            "commit": _commit(),
            "wall_s": time.monotonic() - self._start,
            "collecting_s": self._collecting,
            "tests": self._tests,
        }
        self._file.write_text(json.dumps(figures))


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.check_output(words, cwd=Path(__file__).parent, text=True).strip()


def processor_s(process: int) -> float:
    """What a process and all that it started have used of processors, ended ones included."""
    folder, used = Path(f"/proc/{process}"), 0.0
    with suppress(OSError):  # it has ended: its parent has its seconds
        words = (folder / "stat").read_text().rpartition(")")[2].split()
        used = sum(map(int, words[11:15])) / _TICKS
        for task in (folder / "task").iterdir():
            with suppress(OSError):  # a thread that has ended
                used += sum(map(processor_s, map(int, (task / "children").read_text().split())))
    return used


def tables(figures: dict[str, Any]) -> str:
    """The whole, the files by processor time and the ten longest tests, as Markdown."""
    tests = figures["tests"]
    files: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for name, (seconds, processor) in tests.items():
        row = files[name.partition("::")[0].removeprefix("tests/")]
        row[0], row[1], row[2] = row[0] + 1, row[1] + seconds, row[2] + processor
    whole = sum(processor for _, processor in tests.values()) + sum(figures["collecting_s"])
    collecting = ", ".join(f"{seconds:.0f}" for seconds in figures["collecting_s"])
    lines = [
        f"At {figures['commit']}: {len(tests)} tests in {figures['wall_s'] / 60:.1f} minutes,"
        f" {whole:.0f} s of processors, of which the workers took {collecting} s until their first"
        " test.",
        "",
        "| file | tests | s | processor s |",
        "|---|---:|---:|---:|",
    ]
    order = sorted(files.items(), key=lambda file: -file[1][2])
    lines += [f"| `{name}` | {n} | {s:.0f} | {p:.0f} |" for name, (n, s, p) in order[:40]]
    rest = [row for _, row in order[40:]]
    sums = [sum(column) for column in zip(*rest, strict=True)] or [0, 0, 0]
    lines += [f"| {len(rest)} others | {sums[0]} | {sums[1]:.0f} | {sums[2]:.0f} |", ""]
    lines += ["| test | s | processor s |", "|---|---:|---:|"]
    longest = sorted(tests.items(), key=lambda test: -test[1][0])[:10]
    lines += [f"| `{name[6:]}` | {s:.0f} | {p:.0f} |" for name, (s, p) in longest]
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text())))
