"""`segtrain data`: check, pack and stats, which read a whole data set.

What is heavy is imported when the config has been loaded: a wrong one is refused at once.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from segtrain.commands.config import load_named
from segtrain.config.experiment import wrong_units
from segtrain.config.loading import with_places
from segtrain.errors import EXIT_DATA, EXIT_OK, ConfigError, DataError, UserError
from segtrain.files import check_output, os_errors_as, write_output
from segtrain.run.console import say
from segtrain.text import printable, printable_lines


def check(args: argparse.Namespace) -> int:
    """The exit code: 0 without errors (warnings are allowed), else 3."""
    config = load_named(args)
    if wrong := wrong_units(config):
        raise ConfigError("\n".join(wrong))
    from segtrain.data.check.checks import CheckResult, check_data
    from segtrain.data.check.finding import Finding
    from segtrain.data.sample.photometric import extra_transforms

    def find() -> CheckResult:
        result = check_data(config.data, jobs=args.jobs)
        try:
            extra_transforms(config.augment, result.form)
        except ConfigError as error:
            result.findings.append(Finding("error", "", "augment", str(error)))
        for line in config.eval.unknown_classes(result.class_names):
            result.findings.append(Finding("error", "", "eval", line))
        placed = [
            replace(finding, text=with_places(finding.text, args.config, args.set))
            for finding in result.findings
        ]
        return replace(result, findings=placed)

    return EXIT_OK if _reported(find, args.json, "ok").ok else EXIT_DATA


def stats(args: argparse.Namespace) -> int:
    """The exit code: 0; what cannot be counted completely is an error."""
    data = load_named(args).data
    from segtrain.data.check.stats import measure

    split = args.split or data.train_split
    _reported(partial(measure, data, split, beta=args.beta, jobs=args.jobs), args.json, "split")
    return EXIT_OK


def _reported(work: Callable[[], Any], path: Path | None, first_key: str) -> Any:
    """The CheckResult or SplitStats of `work`, printed, and written to `path` if that is given.

    first_key: of the JSON that is written.

    Raises:
        ConfigError: `path` cannot be written; as far as possible before `work` begins.
    """
    errors = partial(os_errors_as, ConfigError, f"--json {path}", "cannot be written")
    if path is not None:
        with errors():
            check_output(path, f'{{\n  "{first_key}": ')
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
    data = load_named(args).data.model_copy(update={"pack": None})
    from segtrain.data.read.label_formats import label_format_of

    if not label_format_of(data.label_format).packs:
        raise ConfigError(f"data.label_format: labels of {data.label_format} cannot be packed")
    if data.neighbours:
        raise ConfigError("data.neighbours: a pack has none; training reads the files")
    from segtrain.data import open_dataset
    from segtrain.data.check.checks import check_split
    from segtrain.data.pack import writer
    from segtrain.data.pack.index import MANIFEST
    from segtrain.data.read.concurrent import num_processes
    from segtrain.data.read.protect import check_run_directory
    from segtrain.distributed.machine import process_pool
    from segtrain.run.directory import RunLock

    directory = Path(os.path.expanduser(args.output))
    check_run_directory(directory, data, example="packs/my")
    with RunLock(directory):
        splits = dict.fromkeys((data.train_split, data.eval_split))
        datasets = [open_dataset(data, split) for split in splits]
        if (directory / MANIFEST).exists():
            try:
                for split in splits:
                    open_dataset(data.model_copy(update={"pack": str(directory)}), split)
            except UserError as error:
                raise DataError(
                    f"{printable(directory)}: holds another pack; delete it, or choose another "
                    f"folder by --output\n{error}"
                ) from error
            say(f"{printable(directory)} is packed already; segtrain data check reads it")
            return EXIT_OK
        warnings = {dataset.split: check_split(dataset) for dataset in datasets}
        for line in dict.fromkeys(x for d in datasets for x in (*d.warnings, *warnings[d.split])):
            say(f"warning: {line}")
        num_pairs = sum(map(len, datasets))
        with process_pool(num_processes(num_pairs, args.jobs)) as pool:
            made = writer.write_pack(directory, data, datasets, warnings, pool)
    size = sum(shard.num_bytes for shard in made.shards) / 1e9
    say(f"packed {num_pairs} images, {size:,.1f} GB: set data.pack: {printable(args.output)}")
    return EXIT_OK
