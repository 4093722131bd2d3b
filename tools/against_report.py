"""The tables of bench_against.py."""

import statistics
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

BASE = "segtrain"
TITLES = {
    "data": "Training samples on one core",
    "work": "The same work",
    "train": "Training steps",
    "eval": "Evaluation",
    "memory": "Peak memory of training",
}


class Row(NamedTuple):
    """What one contender took, in each round."""

    title: str
    contender: str
    unit: str
    values: tuple[float, ...]

    def ratios(self, base: "Row") -> list[float]:
        """To `base` in the same rounds."""
        return [value / other for value, other in zip(self.values, base.values, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the median and the spread."""
        return {
            **self._asdict(),
            "median": statistics.median(self.values),
            "low": min(self.values),
            "high": max(self.values),
        }


def markdown(found: dict[str, list[Row]], absent: dict[str, list[str]]) -> str:
    """A table for each section, and what is not installed.

    A ratio is the median over the rounds of this contender's figure by segtrain's.
    """
    lines = []
    for section, rows in found.items():
        lines += [f"## {TITLES[section]}", ""]
        lines += _work_table(rows) if section == "work" else _table(rows)
        lines.append("")
    for name, packages in absent.items():
        lines.append(f"{name}: not installed ({', '.join(packages)})")
    return "\n".join(lines).rstrip()


def _table(rows: Sequence[Row]) -> list[str]:
    unit = rows[0].unit
    lines = [f"| | contender | {unit} | spread | / segtrain |", "|---|---|---|---|---|"]
    for _, group in groupby(rows, key=lambda row: row.title):
        group = list(group)
        base = next(row for row in group if row.contender == BASE)
        for i, row in enumerate(group):
            spread = f"{_number(min(row.values))} to {_number(max(row.values))}"
            lines.append(
                f"| {row.title if i == 0 else ''} | {row.contender} "
                f"| {_number(statistics.median(row.values))} | {spread} "
                f"| {statistics.median(row.ratios(base)):.2f} |"
            )
    return lines


def _work_table(rows: Sequence[Row]) -> list[str]:
    """Weights and operations beside segtrain's, so that one sees whether they are equal."""
    lines = ["| | contender | weights | GFLOP an image | / segtrain |", "|---|---|---|---|---|"]
    for title, group in groupby(rows, key=lambda row: row.title):
        found: dict[str, dict[str, float]] = {}
        for row in group:
            found.setdefault(row.contender, {})[row.unit] = row.values[0]
        flops = found[BASE]["GFLOP an image"]
        for name, values in found.items():
            gflop = values["GFLOP an image"]
            lines.append(
                f"| {title if name == BASE else ''} | {name} | {values['weights']:,.0f} "
                f"| {gflop:.2f} | {gflop / flops:.4f} |"
            )
    return lines


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
