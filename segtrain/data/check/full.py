"""The full check of a data set: every pair of both splits is read."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from segtrain.config import Config, DataConfig
from segtrain.config.loss import takes_class_weights
from segtrain.data.check.findings import (
    Finding,
    listing_findings,
    shared_image_findings,
    split_findings,
    training_findings,
)
from segtrain.data.check.scan import SplitScan, scan_split
from segtrain.data.check.stats import (
    class_column,
    counts_of,
    enet_weights,
    median_frequency_weights,
    table_lines,
)
from segtrain.data.pack.opening import open_dataset
from segtrain.data.read.classes import ClassFile, load_class_file, read_by
from segtrain.data.read.concurrent import num_processes
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.layouts import scan_layout
from segtrain.distributed.machine import process_pool
from segtrain.errors import DataError
from segtrain.text import counted


@dataclass(frozen=True)
class CheckResult:
    """All findings of a data set, and the counts of its classes and sizes."""

    class_file: str
    class_names: Sequence[str]
    scans: list[SplitScan]
    findings: list[Finding]
    weighs_classes: bool = True  # whether the loss can

    @property
    def ok(self) -> bool:
        """Whether training can start: there may be warnings, but no errors."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def class_weights(self) -> dict[str, list[float]]:
        """Weights by the name of their method, from the first split; empty: no use for them."""
        if not (self.weighs_classes and self.scans and self.scans[0].pixels.any()):
            return {}
        scan = self.scans[0]
        return {
            "median_frequency": median_frequency_weights(scan),
            "enet": enet_weights(scan.pixels),
        }


def check_data(config: Config, jobs: int | None = None) -> CheckResult:
    """All findings of the training and the evaluation split.

    jobs: processes; None: one for each core that this process may use.

    Raises:
        ConfigError: the class file is missing or wrong.
        ExecutionError: a process was killed.
    """
    data = config.data
    classes = load_class_file(data.classes, label_format=data.label_format)
    findings: list[Finding] = []
    datasets = []
    for split in dict.fromkeys((data.train_split, data.eval_split)):
        try:
            found, dataset = _open(data, split, classes)
        except DataError as error:
            finding = Finding("error", split, "split", str(error))
            if findings and findings[-1].text == finding.text:  # such as a wrong data.root
                findings.pop()
                finding = replace(finding, split="")
            findings.append(finding)
            continue
        findings += found
        datasets.append(dataset)
    with process_pool(num_processes(sum(map(len, datasets)), jobs)) as pool:
        scans = [scan_split(dataset, pool, compare=True) for dataset in datasets]
    for scan in scans:
        findings += split_findings(scan, read_by(classes, data.label_format))
        if scan.split == data.train_split:
            findings += training_findings(scan, config)
    findings += shared_image_findings(scans, is_one_split=data.train_split == data.eval_split)
    weighs = any(takes_class_weights(term.kind) for term in config.loss.terms)
    return CheckResult(classes.name, classes.names, scans, findings, weighs)


def check_as_text(result: CheckResult) -> str:
    """For a terminal: a table of the classes, suggested class weights, the findings, a verdict."""
    lines = [_split_line(scan) for scan in result.scans]
    if result.scans:
        columns = [class_column(result.class_names)]
        for scan in result.scans:
            total = max(1, int(scan.pixels.sum()))
            percentages = [f"{100 * pixels / total:.3f} %" for pixels in scan.pixels]
            columns.append([f"{scan.split} pixels", *percentages])
            columns.append(["images", *map(str, scan.images)])
        lines += ["", *table_lines(columns)]
    if weights := result.class_weights:
        split = result.scans[0].split
        lines += [
            "",
            f"class weights for the loss section, from split {split!r}, if rare classes matter:",
            f"  class_weights: {weights['median_frequency']}  # median frequency",
            f"  class_weights: {weights['enet']}  # ENet",
        ]
    kinds = {}
    for severity in ("warning", "error"):
        found = [finding for finding in result.findings if finding.severity == severity]
        kinds[severity] = counted(len(found), "kind", "kinds")
        for first, *places in (finding.lines() for finding in found):
            lines += ["", f"{severity}: {first}", *places]
    has_warnings = any(finding.severity == "warning" for finding in result.findings)
    verdict = "the data is fine" if result.ok else f"errors of {kinds['error']}"
    warnings = f"warnings of {kinds['warning']}" if has_warnings else "no warnings"
    return "\n".join([*lines, "", f"{verdict}; {warnings}"])


def check_as_json(result: CheckResult) -> str:
    """The whole result, with every place of every finding, as one JSON object."""
    content: dict[str, Any] = {
        "ok": result.ok,
        "class_file": result.class_file,
        "splits": {
            scan.split: {"pairs": scan.num_pairs, **counts_of(scan, result.class_names)}
            for scan in result.scans
        },
        "findings": [vars(finding) for finding in result.findings],
    }
    if weights := result.class_weights:
        content["class_weights"] = weights
    return json.dumps(content, indent=2)


def _open(data: DataConfig, split: str, classes: ClassFile) -> tuple[list[Finding], SegDataset]:
    """A split, of the pack if there is one, and the findings that show before it is read."""
    if data.pack is not None:
        dataset = open_dataset(data, split)
        return [Finding("warning", split, "pack", line) for line in dataset.warnings], dataset
    listing = scan_layout(data, split)
    dataset = SegDataset(listing.pairs, classes, split=split, label_format=data.label_format)
    return list(listing_findings(split, listing)), dataset


def _split_line(scan: SplitScan) -> str:
    total = int(scan.pixels.sum()) + scan.ignored_pixels
    ignored = f", {scan.ignored_pixels / total:.1%} of the pixels ignored" if total else ""
    size = ""
    if scan.sizes:
        heights, widths = zip(*scan.sizes, strict=True)
        size = f" of {min(heights)}x{min(widths)} to {max(heights)}x{max(widths)}"
    return f"{scan.split}: {counted(scan.num_pairs, 'pair', 'pairs')}{size}{ignored}"
