"""The full check of a data set: every pair of both splits is read."""

import os
from dataclasses import replace
from pathlib import Path

from segtrain.config import Config, DataConfig
from segtrain.data.check import issues as find
from segtrain.data.check.issues import CheckResult, Issue
from segtrain.data.check.scan import header_problems, num_processes, scan_split
from segtrain.data.pack.opening import open_packed
from segtrain.data.read.classes import ClassFile, load_class_file, read_by
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.layouts import scan_layout
from segtrain.distributed.machine import process_pool
from segtrain.errors import DataError


def check_data(config: Config, jobs: int | None = None) -> CheckResult:
    """All issues of the training and the evaluation split.

    jobs: processes; None: one for each core that this process may use.

    Raises:
        ConfigError: the class file is missing or wrong.
        ExecutionError: a process was killed.
    """
    data = config.data
    classes = load_class_file(data.classes, label_format=data.label_format)
    issues: list[Issue] = []
    datasets = []
    for split in dict.fromkeys((data.train_split, data.eval_split)):
        try:
            found, dataset = _open(data, split, classes)
        except DataError as error:
            issue = Issue("error", split, "split", str(error))
            if issues and issues[-1].text == issue.text:  # such as a wrong data.root
                issues.pop()
                issue = replace(issue, split="")
            issues.append(issue)
            continue
        issues += found
        datasets.append(dataset)
    if data.pack is not None and datasets and (lines := header_problems(_directory(data))):
        issues.append(Issue("error", "", "pack", "shards that are not what was written", lines))
    with process_pool(num_processes(sum(map(len, datasets)), jobs)) as pool:
        scans = [scan_split(dataset, pool, compare=True) for dataset in datasets]
    for scan in scans:
        issues += find.split_issues(scan, read_by(classes, data.label_format))
        if scan.split == data.train_split:
            issues += find.training_issues(scan, config)
    issues += find.shared_image_issues(scans, is_one_split=data.train_split == data.eval_split)
    weighs = any(term.takes_class_weights for term in config.loss.terms)
    return CheckResult(classes.name, list(classes.names), scans, issues, weighs)


def _open(data: DataConfig, split: str, classes: ClassFile) -> tuple[list[Issue], SegDataset]:
    """A split, of the pack if there is one, and the issues that show before it is read."""
    if data.pack is not None:
        dataset = open_packed(data, split, classes)
        return [Issue("warning", split, "pack", line) for line in dataset.warnings], dataset
    listing = scan_layout(data, split)
    dataset = SegDataset(listing.pairs, classes, split=split, label_format=data.label_format)
    return list(find.listing_issues(split, listing)), dataset


def _directory(data: DataConfig) -> Path:
    return Path(os.path.expanduser(data.pack))
