"""The one file that a person sends: what each check found, without names of the machine.

It is written anew after every check, so that whatever ends the tool loses nothing.
"""

import getpass
import json
import re
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from commands import ROOT

from segtrain.files import write_atomic

PASSED, FAILED, HANG, ENDED = "passed", "failed", "hang", "ended"
CUT = "cut off"  # when the time was over: nothing is wrong with what had run
_WIDTH = 160  # of a line of the summary


class Outcome(NamedTuple):
    """What became of a check.

    status: passed; failed: it found something; hang: it gave no sign of life for too long; ended:
        a process of it died.
    figures: by item. problems: what is wrong, a line each. said: the end of what its processes
        said, and their stacks, of a check that has not passed.
    """

    name: str
    status: str
    seconds: float = 0.0
    figures: dict[str, Any] = {}  # noqa: RUF012 - never changed
    problems: Sequence[str] = ()
    said: str = ""


class Report:
    """All outcomes, in `path`; what is left out is told too.

    places: folders that stand in messages, which the file calls by these names. silent: another
        process writes and prints.
    """

    def __init__(self, path: Path, places: dict[Path, str], *, silent: bool = False) -> None:
        self._path, self._places, self._silent = path, places, silent
        self._machines: list[dict[str, Any]] = []
        self._outcomes: list[Outcome] = []
        self._left_out: dict[str, str] = {}

    def describe(self, machines: list[dict[str, Any]]) -> None:
        """Takes what the machines are."""
        self._machines = machines
        self._write()

    def add(self, outcome: Outcome) -> None:
        """Takes an outcome, and prints it."""
        self._outcomes.append(outcome)
        if not self._silent:
            print("\n".join(map(self._anonymous, _lines(outcome))), flush=True)
        self._write()

    def leave_out(self, name: str, why: str) -> None:
        """Tells that a check has not run."""
        self._left_out[name] = why
        self._write()

    def summary(self) -> list[str]:
        """The readable part."""
        counts = Counter(outcome.status for outcome in self._outcomes)
        lines = [f"{', '.join(f'{n} {status}' for status, n in counts.items())}"]
        lines += [f"not run: {name}: {why}" for name, why in self._left_out.items()]
        return lines + [line for outcome in self._outcomes for line in _lines(outcome)]

    @property
    def is_good(self) -> bool:
        """Whether checks have run, and none has found anything."""
        found = {outcome.status for outcome in self._outcomes}
        return PASSED in found and found <= {PASSED, CUT}

    def _write(self) -> None:
        if self._silent:
            return
        content = {
            "summary": self.summary(),
            "machines": self._machines,
            "checks": [outcome._asdict() for outcome in self._outcomes],
            "not run": self._left_out,
        }
        write_atomic(self._path, self._anonymous(json.dumps(content, indent=1)) + "\n")

    def _anonymous(self, text: str) -> str:
        return anonymous(text, self._places)


def anonymous(text: str, places: dict[Path, str]) -> str:
    """`text` without the names of folders, of this machine and of who uses it, and addresses."""
    known = places | {ROOT: "segtrain", Path(sys.prefix): "python", Path.home(): "~"}
    for folder in sorted(known, key=lambda one: -len(str(one))):  # the innermost first
        if len(str(folder)) > 1:
            text = text.replace(str(folder), known[folder])
    host, users = socket.gethostname(), []
    with suppress(Exception):  # no such user, as in a container
        users.append(getpass.getuser())
    names = {"host": [host, host.partition(".")[0]], "user": users}
    for shown, found in names.items():
        for name in found:
            if len(name) > 2 and name != "root":  # which is the name of an option too
                text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", f"({shown})", text)
    return re.sub(r"(?<![\d.])(?!127\.0\.0\.1)(\d{1,3}\.){3}\d{1,3}(?![\d.])", "(address)", text)


def _lines(outcome: Outcome) -> list[str]:
    lines = [f"{outcome.status:6}  {outcome.name}, {outcome.seconds:.0f} s"]
    lines += [f"        {problem}" for problem in outcome.problems]
    for item, figures in outcome.figures.items():
        shown = figures
        if isinstance(figures, dict):
            shown = ", ".join(f"{key} {_short(value)}" for key, value in figures.items())
        line = f"        {item}: {_short(shown)}"
        lines.append(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}...")
    return lines


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
