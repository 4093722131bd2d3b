"""`segtrain data check`, `pack` and `stats`: what reads a whole data set."""

import argparse
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from segtrain.config import DataConfig, load_config
from segtrain.config.loading import with_places
from segtrain.data import SegDataset, open_dataset
from segtrain.data.check.checks import CheckResult, check_data, check_split
from segtrain.data.check.stats import SplitStats, measure
from segtrain.data.pack import writer
from segtrain.data.pack.manifest import MANIFEST, Pack
from segtrain.data.read.concurrent import num_processes
from segtrain.data.read.protect import check_run_directory
from segtrain.distributed.machine import process_pool
from segtrain.errors import EXIT_DATA, EXIT_OK, ConfigError, DataError, ExecutionError, UserError
from segtrain.files import check_output, os_errors_as, write_output
from segtrain.run.console import say
from segtrain.run.directory import RunLock
from segtrain.text import printable, printable_lines

R = TypeVar("R", CheckResult, SplitStats)


def check(args: argparse.Namespace) -> int:
    """The exit code: 0 without errors (warnings are allowed), else 3."""

    def find() -> CheckResult:
        result = check_data(load_config(args.config, args.set), jobs=args.jobs)
        placed = [
            replace(finding, text=with_places(finding.text, args.config, args.set))
            for finding in result.findings
        ]
        return replace(result, findings=placed)

    return EXIT_OK if _reported(find, args.json).ok else EXIT_DATA


def stats(args: argparse.Namespace) -> int:
    """The exit code: 0; what cannot be counted completely is an error."""
    data = load_config(args.config, args.set).data
    split = args.split or data.train_split
    _reported(partial(measure, data, split, beta=args.beta, jobs=args.jobs), args.json)
    return EXIT_OK


def _reported(work: Callable[[], R], path: Path | None) -> R:
    """The result of `work`, printed, and written to `path` if that is given.

    Raises:
        ConfigError: `path` cannot be written; as far as possible before `work` begins.
    """
    errors = partial(os_errors_as, ConfigError, f"--json {path}", "cannot be written")
    if path is not None:
        with errors():
            check_output(path)
    result = work()
    # First what can be read at once: the disk may be full.
    text = result.as_text()
    print("\n".join(printable_lines(text, len(text) + 1)))
    if path is not None:
        with errors():
            write_output(path, result.as_json() + "\n")
    return result


def pack(args: argparse.Namespace) -> int:
    """The exit code: 0 if the pack is whole.

    Raises:
        ConfigError: the config or --output is wrong, or another process uses --output.
        DataError: images or labels that training would refuse; --output holds another pack.
        ExecutionError: the disk is too small, or a process was killed.
    """
    data = load_config(args.config, args.set).data.model_copy(update={"pack": None})
    directory = Path(os.path.expanduser(args.output))
    check_run_directory(directory, data, example="packs/my")
    with RunLock(directory):
        splits = dict.fromkeys((data.train_split, data.eval_split))
        datasets = [open_dataset(data, split) for split in splits]
        if (directory / MANIFEST).exists():
            _check_finished(directory, data, splits)
            say(f"{printable(directory)} is packed already; segtrain data check reads it")
            return EXIT_OK
        warnings = {dataset.split: check_split(dataset) for dataset in datasets}
        for line in dict.fromkeys(x for d in datasets for x in (*d.warnings, *warnings[d.split])):
            say(f"warning: {line}")
        planned = writer.plan_pack(data, datasets, warnings)
        if writer.remove_unfinished(directory):
            say("the pack that was interrupted here is made again from its beginning")
        _announce(directory, planned, datasets)
        num_pairs = sum(map(len, datasets))
        with process_pool(num_processes(num_pairs, args.jobs), writer.start_process) as pool:
            writer.write_pack(directory, planned, datasets, pool)
    say(f"packed: set data.pack: {printable(args.output)}")
    return EXIT_OK


def _check_finished(directory: Path, data: DataConfig, splits: Iterable[str]) -> None:
    """DataError if the pack in `directory` is not what this command would make."""
    try:
        for split in splits:
            open_dataset(data.model_copy(update={"pack": str(directory)}), split)
    except UserError as error:
        raise DataError(
            f"{printable(directory)}: holds another pack; delete it, or choose another folder by "
            f"--output\n{error}"
        ) from error


def _announce(directory: Path, pack: Pack, datasets: Sequence[SegDataset]) -> None:
    """Says how large the pack is; ExecutionError if it does not fit on the disk."""
    counts = " and ".join(f"{len(d)} of split {printable(d.split)}" for d in datasets)
    needed = sum(shard.num_bytes for shard in pack.shards)
    free = shutil.disk_usage(directory).free
    size = f"{needed / 1e6:,.1f} MB; {free / 1e6:,.1f} MB are free"
    say(f"pack of {counts}: {size}")
    if needed > free:
        raise ExecutionError(f"{printable(directory)}: the disk is too small for {size}")
