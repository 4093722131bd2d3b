"""The full check of a data set: every pair of both splits is read."""

from dataclasses import replace

from segtrain.config import Config
from segtrain.data.check.issues import (
    listing_issues,
    shared_image_issues,
    split_issues,
    training_issues,
)
from segtrain.data.check.result import CheckResult, Issue
from segtrain.data.check.scan import process_pool, scan_split
from segtrain.data.class_file import load_class_file
from segtrain.data.dataset import SegDataset
from segtrain.data.layouts import scan_layout
from segtrain.distributed.machine import num_cores
from segtrain.errors import DataError

_PAIRS_PER_PROCESS = 128


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
            listing = scan_layout(data, split)
        except DataError as error:
            issue = Issue("error", split, "split", str(error))
            if issues and issues[-1].text == issue.text:  # such as a wrong data.root
                issues[-1] = replace(issue, split="")
            else:
                issues.append(issue)
            continue
        issues += listing_issues(split, listing)
        datasets.append(
            SegDataset(listing.pairs, classes, split=split, label_format=data.label_format)
        )
    with process_pool(_num_processes(jobs, sum(map(len, datasets)))) as pool:
        scans = [scan_split(dataset, pool) for dataset in datasets]
    for scan in scans:
        issues += split_issues(scan, classes)
        if scan.split == data.train_split:
            issues += training_issues(scan, config)
    issues += shared_image_issues(scans, is_one_split=data.train_split == data.eval_split)
    return CheckResult(classes.name, list(classes.names), scans, issues)


def _num_processes(jobs: int | None, num_pairs: int) -> int:
    """At most `jobs`, and each with enough pairs to pay for its start."""
    return max(1, min(jobs or num_cores(), -(-num_pairs // _PAIRS_PER_PROCESS)))
