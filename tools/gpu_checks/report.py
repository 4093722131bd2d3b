"""What all checks have found, as Markdown and JSON."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_checks import CHECKS
from gpu_checks.findings import BAD, NEEDS_CUDA, Finding

PASSED, FAILED, CRASHED, TIMED_OUT = "passed", "FAILED", "CRASHED", "TIMED OUT"
NOT_RUN = "not run"
_BROKEN = (FAILED, CRASHED, TIMED_OUT)


class Result(NamedTuple):
    """How one check ended.

    detail: why, where it did not end well. findings: also of a check that was killed.
    """

    name: str
    status: str
    detail: str
    seconds: float
    findings: list[Finding]

    @property
    def is_broken(self) -> bool:
        """Whether something is wrong with the program or the machine."""
        return self.status in _BROKEN


def status_of(findings: list[Finding]) -> str:
    """The status of a check that came to its end."""
    verdicts = {line.verdict for line in findings}
    if BAD in verdicts:
        return FAILED
    # Half an answer is none: what runs here too would hide that the rest is open.
    return NEEDS_CUDA if NEEDS_CUDA in verdicts else PASSED


def as_json(machine: Mapping[str, Any], revision: str, results: list[Result]) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "machine": dict(machine),
        "revision": revision,
        "checks": [
            {
                **result._asdict(),
                "device": machine["name"],
                "findings": [line._asdict() for line in result.findings],
            }
            for result in results
        ],
    }


def as_markdown(machine: Mapping[str, Any], revision: str, results: list[Result]) -> str:
    """Everything, for people."""
    lines = [f"# {machine['name']}", "", f"Code {revision}.", ""]
    names = [name for name, value in machine.items() if value is not None and name != "name"]
    lines += table(names, [[_short(machine[name]) for name in names]])
    lines += ["", "| check | question | result | s |", "|---|---|---|---|"]
    for result in results:
        detail = f": {result.detail}" if result.detail else ""
        lines.append(
            row(
                result.name,
                CHECKS[result.name].question,
                f"{result.status}{detail}",
                f"{result.seconds:.0f}",
            )
        )
    for result in results:
        if result.findings:
            lines += ["", f"## {result.name}: {machine['name']}", ""]
            rows = [[one.what, one.found, one.wanted, one.verdict] for one in result.findings]
            lines += table(["", "found", "wanted", "verdict"], rows)
    return "\n".join(lines) + "\n"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [row(*head), "|" + "---|" * len(head), *(row(*cells) for cells in rows)]


def row(*cells: str) -> str:
    """One line of a table."""
    # A bar in a message would begin a new cell, and a line break a new row.
    clean = [" ".join(cell.split()).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(clean)} |"


def _short(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)
