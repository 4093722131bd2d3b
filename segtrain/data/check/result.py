"""What a check of the data found, as text and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from segtrain.data.check.class_weights import enet_weights, median_frequency_weights
from segtrain.data.check.scan import SplitScan
from segtrain.data.listing import MAX_SHOWN
from segtrain.text import MAX_NAME, counted, printable


@dataclass(frozen=True)
class Issue:
    """One thing that is wrong ("error") or odd ("warning"), and the places where it occurs.

    split: empty if the issue is about both splits.
    """

    severity: Literal["error", "warning"]
    split: str
    kind: str
    text: str
    places: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CheckResult:
    """All issues of a data set, and the counts of its classes and sizes."""

    class_file: str
    class_names: list[str]
    scans: list[SplitScan]
    issues: list[Issue]
    weighs_classes: bool = True  # whether the loss can

    @property
    def ok(self) -> bool:
        """Whether training can start: there may be warnings, but no errors."""
        return not any(issue.severity == "error" for issue in self.issues)

    @property
    def weights_scan(self) -> SplitScan | None:
        """The split to compute class weights from; None if there is no use for them."""
        useful = self.weighs_classes and self.scans and self.scans[0].pixels.any()
        return self.scans[0] if useful else None


def as_text(result: CheckResult) -> str:
    """For a terminal: a table of the classes, suggested class weights, the issues, a verdict."""
    parts = [_split_line(scan) for scan in result.scans]
    if result.scans:
        parts += ["", *_class_table(result)]
    if result.weights_scan:
        parts += ["", *_weight_lines(result.weights_scan)]
    for severity in ("warning", "error"):
        for issue in result.issues:
            if issue.severity == severity:
                parts += ["", *_issue_lines(issue)]
    num_errors = sum(issue.severity == "error" for issue in result.issues)
    num_warnings = len(result.issues) - num_errors
    verdict = "the data is fine" if result.ok else f"errors of {_kinds(num_errors)}"
    warnings = f"warnings of {_kinds(num_warnings)}" if num_warnings else "no warnings"
    return "\n".join([*parts, "", f"{verdict}; {warnings}"])


def as_json(result: CheckResult) -> str:
    """The whole result, with every place of every issue, as one JSON object."""
    splits = {}
    for scan in result.scans:
        counts = zip(result.class_names, scan.pixels.tolist(), scan.images.tolist(), strict=True)
        splits[scan.split] = {
            "pairs": scan.num_pairs,
            "ignored_pixels": scan.ignored_pixels,
            "sizes": [[*size, count] for size, count in sorted(scan.sizes.items())],
            "classes": {name: {"pixels": n, "images": m} for name, n, m in counts},
        }
    content: dict[str, Any] = {
        "ok": result.ok,
        "class_file": result.class_file,
        "splits": splits,
        "findings": [vars(issue) for issue in result.issues],
    }
    if scan := result.weights_scan:
        content["class_weights"] = {
            "median_frequency": median_frequency_weights(scan),
            "enet": enet_weights(scan.pixels),
        }
    return json.dumps(content, indent=2)


def _kinds(count: int) -> str:
    return counted(count, "kind", "kinds")


def _split_line(scan: SplitScan) -> str:
    total = int(scan.pixels.sum()) + scan.ignored_pixels
    ignored = f", {scan.ignored_pixels / total:.1%} of the pixels ignored" if total else ""
    size = ""
    if scan.sizes:
        heights, widths = zip(*scan.sizes, strict=True)
        size = f" of {min(heights)}x{min(widths)} to {max(heights)}x{max(widths)}"
    return f"{scan.split}: {counted(scan.num_pairs, 'pair', 'pairs')}{size}{ignored}"


def _class_table(result: CheckResult) -> list[str]:
    """One row per class: its percentage of the valid pixels and its images, for each split."""
    header = ["class"]
    columns: list[Sequence[str]] = [[printable(name, MAX_NAME) for name in result.class_names]]
    for scan in result.scans:
        total = max(1, int(scan.pixels.sum()))
        header += [f"{scan.split} pixels", "images"]
        columns.append([f"{100 * pixels / total:.3f} %" for pixels in scan.pixels])
        columns.append([str(count) for count in scan.images])
    rows = [header, *zip(*columns, strict=True)]
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([name.ljust(first), *map(str.rjust, cells, widths)]) for name, *cells in rows]


def _weight_lines(scan: SplitScan) -> list[str]:
    return [
        f"class weights for the loss section, from split {scan.split!r}, if rare classes matter:",
        f"  class_weights: {median_frequency_weights(scan)}  # median frequency",
        f"  class_weights: {enet_weights(scan.pixels)}  # ENet",
    ]


def _issue_lines(issue: Issue) -> list[str]:
    split = f"{issue.split}: " if issue.split else ""
    lines = [f"{issue.severity}: {split}{issue.text}"]
    lines += [f"  {place}" for place in issue.places[:MAX_SHOWN]]
    if len(issue.places) > MAX_SHOWN:
        lines.append(f"  and {len(issue.places) - MAX_SHOWN} more")
    return lines
