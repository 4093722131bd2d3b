"""What a check of the data found, as text and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from segtrain.data.check.scan import SplitScan
from segtrain.data.listing import MAX_SHOWN
from segtrain.text import MAX_NAME, printable

# ENet's weights are 1 / ln(c + share); c = 1.02 keeps them within [1, 50] (arXiv:1606.02147).
_ENET_CONSTANT = 1.02


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong ("error") or odd ("warning"), with the places it was met at.

    split: empty where both are meant.
    """

    severity: Literal["error", "warning"]
    split: str
    kind: str
    text: str
    places: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CheckReport:
    """All findings about a data set, and what was counted on the way."""

    class_file: str
    class_names: list[str]
    scans: list[SplitScan]
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Whether training can start; warnings do not stand in its way."""
        return not any(finding.severity == "error" for finding in self.findings)


def as_text(report: CheckReport) -> str:
    """The report for a terminal: a table of the classes, the findings, suggested class weights."""
    parts = [_split_line(scan) for scan in report.scans]
    if report.scans:
        parts += ["", *_class_table(report)]
    if report.scans and report.scans[0].pixels.any():
        parts += ["", *_weight_lines(report.scans[0])]
    for severity in ("warning", "error"):
        for finding in report.findings:
            if finding.severity == severity:
                parts += ["", *_finding_lines(finding)]
    errors = sum(finding.severity == "error" for finding in report.findings)
    warnings = len(report.findings) - errors
    verdict = "the data is fine" if report.ok else f"errors of {_kinds(errors)}"
    oddities = f"warnings of {_kinds(warnings)}" if warnings else "no warnings"
    return "\n".join([*parts, "", f"{verdict}; {oddities}"])


def as_json(report: CheckReport) -> str:
    """The whole report, with every place of every finding, as one JSON object."""
    splits = {
        scan.split: {
            "pairs": scan.num_pairs,
            "ignored_pixels": scan.ignored_pixels,
            "sizes": [[*size, count] for size, count in sorted(scan.sizes.items())],
            "classes": {
                name: {"pixels": int(pixels), "images": int(images)}
                for name, pixels, images in zip(
                    report.class_names, scan.pixels, scan.images, strict=True
                )
            },
        }
        for scan in report.scans
    }
    content: dict[str, Any] = {
        "ok": report.ok,
        "class_file": report.class_file,
        "splits": splits,
        "findings": [vars(finding) for finding in report.findings],
    }
    if report.scans and report.scans[0].pixels.any():
        content["class_weights"] = {
            "median_frequency": median_frequency_weights(report.scans[0]),
            "enet": enet_weights(report.scans[0].pixels),
        }
    return json.dumps(content, indent=2)


def median_frequency_weights(scan: SplitScan) -> list[float]:
    """Median of the classes' frequencies / frequency of the class, (K,); 1 for an absent class.

    A class's frequency is its share of the valid pixels, taken over the images that hold it
    (arXiv:1411.4734).
    """
    present = scan.pixels > 0
    frequency = scan.pixels[present] / scan.pixels_beside[present]
    weights = np.ones(len(scan.pixels))
    weights[present] = np.median(frequency) / frequency
    return [float(f"{weight:.4g}") for weight in weights]


def enet_weights(pixels: np.ndarray) -> list[float]:
    """1 / ln(1.02 + share of the class), (K,) (arXiv:1606.02147)."""
    share = pixels / pixels.sum()
    return [float(f"{weight:.4g}") for weight in 1 / np.log(_ENET_CONSTANT + share)]


def _kinds(count: int) -> str:
    return "1 kind" if count == 1 else f"{count} kinds"


def _split_line(scan: SplitScan) -> str:
    total = int(scan.pixels.sum()) + scan.ignored_pixels
    ignored = f", {scan.ignored_pixels / total:.1%} of the pixels ignored" if total else ""
    sizes = sorted(scan.sizes)
    size = ""
    if len(sizes) == 1:
        size = f" of {sizes[0][1]}x{sizes[0][0]}"
    elif sizes:
        heights, widths = zip(*sizes, strict=True)
        size = f" of {min(widths)}..{max(widths)} x {min(heights)}..{max(heights)}"
    return f"{scan.split}: {scan.num_pairs} pairs{size}{ignored}"


def _class_table(report: CheckReport) -> list[str]:
    """One row a class: share of the valid pixels and number of images, for each split."""
    header = ["class"]
    columns: list[Sequence[str]] = [[printable(name, MAX_NAME) for name in report.class_names]]
    for scan in report.scans:
        total = max(1, int(scan.pixels.sum()))
        header += [f"{scan.split} pixels", "images"]
        columns.append([f"{100 * pixels / total:.3f} %" for pixels in scan.pixels])
        columns.append([str(count) for count in scan.images])
    widths = [max(map(len, [title, *cells])) for title, cells in zip(header, columns, strict=True)]
    rows = [header, *zip(*columns, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]


def _weight_lines(scan: SplitScan) -> list[str]:
    return [
        f"class weights for the loss section, from split {scan.split!r}, if rare classes matter:",
        f"  class_weights: {median_frequency_weights(scan)}  # median frequency",
        f"  class_weights: {enet_weights(scan.pixels)}  # ENet",
    ]


def _finding_lines(finding: Finding) -> list[str]:
    split = f"{finding.split}: " if finding.split else ""
    lines = [f"{finding.severity}: {split}{finding.text}"]
    lines += [f"  {place}" for place in finding.places[:MAX_SHOWN]]
    if len(finding.places) > MAX_SHOWN:
        lines.append(f"  and {len(finding.places) - MAX_SHOWN} more")
    return lines
