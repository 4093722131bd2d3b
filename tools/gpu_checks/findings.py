"""What a check has found, written after every line, so that a crash or a kill loses none."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from segtrain.files import write_atomic

GOOD, BAD, MEASURED = "good", "BAD", "measured"
NEEDS_CUDA, NOT_MEASURED = "needs a CUDA device", "not measured"


class Finding(NamedTuple):
    """One line of the table.

    what: the case or the question. found: for people, with units. wanted: what `found` was compared
        with; empty: nothing.
    figures: the numbers behind `found`, which JSON can hold.
    """

    what: str
    found: str
    wanted: str
    verdict: str
    figures: dict[str, Any]


class Findings:
    """The lines of one check, in the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Finding] = []
        self._save(ended=False)

    def measured(self, what: str, found: str, **figures: Any) -> None:
        """A figure that nothing is asked of."""
        self._add(Finding(what, found, "", MEASURED, figures))

    def judged(self, what: str, is_good: bool, found: str, wanted: str, **figures: Any) -> None:
        """A figure that must be as `wanted` says."""
        self._add(Finding(what, found, wanted, GOOD if is_good else BAD, figures))

    def needs_cuda(self, what: str) -> None:
        """A question that has no answer on this machine."""
        self._add(Finding(what, "", "", NEEDS_CUDA, {}))

    def not_measured(self, what: str, why: str) -> None:
        """A question that this check leaves open, wherever it runs."""
        self._add(Finding(what, why, "", NOT_MEASURED, {}))

    def end(self) -> None:
        """The check has asked all its questions."""
        self._save(ended=True)

    def _add(self, line: Finding) -> None:
        print(f"{line.what}: {line.found} [{line.verdict}]", flush=True)
        self.lines.append(line)
        self._save(ended=False)

    def _save(self, *, ended: bool) -> None:
        content = {"ended": ended, "findings": [line._asdict() for line in self.lines]}
        write_atomic(self.path, json.dumps(content, indent=1) + "\n", durable=False)


def read_findings(path: Path) -> tuple[list[Finding], bool]:
    """The lines in a file of `Findings`, and whether the check came to its end."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return [], False
    return [Finding(**line) for line in content["findings"]], content["ended"]
