"""`segtrain data check`, `pack` and `stats`: what reads a whole data set."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from segtrain.config import DataConfig, load_config
from segtrain.config.loading import with_places
from segtrain.data import SegDataset, open_dataset
from segtrain.data.check.full import check_data
from segtrain.data.check.issues import as_json, as_text
from segtrain.data.check.quick import check_split
from segtrain.data.check.scan import num_processes
from segtrain.data.check.stats import measure, stats_as_json, stats_as_text
from segtrain.data.pack import writer
from segtrain.data.pack.manifest import Pack, read_pack
from segtrain.data.pack.writer import layout_hash, plan_pack
from segtrain.data.read.find import first_lines
from segtrain.data.read.protect import check_run_directory
from segtrain.distributed.machine import process_pool
from segtrain.errors import EXIT_DATA, EXIT_OK, ConfigError, DataError, ExecutionError
from segtrain.files import reserve_output, write_output
from segtrain.run.console import say
from segtrain.run.directory import Claim
from segtrain.text import counted, printable, printable_lines


def check(args: argparse.Namespace) -> int:
    """The exit code: 0 without errors (warnings are allowed), else 3."""
    config = load_config(args.config, args.set)
    with ExitStack() as stack:
        if args.json is not None:
            with output_errors(args.json):
                stack.enter_context(reserve_output(args.json))
        result = check_data(config, jobs=args.jobs)
        placed = (with_places(issue.text, args.config, args.set) for issue in result.issues)
        issues = [replace(i, text=text) for i, text in zip(result.issues, placed, strict=True)]
        result = replace(result, issues=issues)
        # First what can be read at once: the disk may be full.
        text = as_text(result)
        print("\n".join(printable_lines(text, len(text) + 1)))
        if args.json is not None:
            with output_errors(args.json):
                write_output(args.json, as_json(result) + "\n")
    return EXIT_OK if result.ok else EXIT_DATA


@contextmanager
def output_errors(path: Path, option: str = "--json") -> Iterator[None]:
    """Says of an OSError inside that the file of `option` cannot be written, as a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: {(error.strerror or '').lower()}") from error


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
    with Claim(directory, what="pack"):
        splits = dict.fromkeys((data.train_split, data.eval_split))
        datasets = [open_dataset(data, split) for split in splits]
        warnings = {dataset.split: check_split(dataset) for dataset in datasets}
        for line in dict.fromkeys(x for d in datasets for x in (*d.warnings, *warnings[d.split])):
            say(f"warning: {line}")
        planned = plan_pack(data, datasets, warnings)
        if writer.is_finished(directory):
            return _finished_before(directory, planned)
        known = writer.read_journal(directory, planned)
        _announce(directory, planned, datasets, done=len(known))
        writer.lay_out(directory, planned)
        _fill(directory, planned, datasets, data, known, args.jobs)
    say(f"packed: set data.pack: {printable(args.output)}")
    return EXIT_OK


def _finished_before(directory: Path, planned: Pack) -> int:
    """0 if the pack in `directory` is what this command would make."""
    before = read_pack(directory)
    if layout_hash(before) != layout_hash(planned) or _stamps(before) != _stamps(planned):
        raise DataError(
            f"{printable(directory)}: holds a pack of other images or options, or its files have "
            "changed since; delete it, or choose another folder by --output"
        )
    say(f"{printable(directory)} is packed already; segtrain data check reads it")
    return EXIT_OK


def _stamps(pack: Pack) -> list[tuple[int, ...]]:
    files = [file for image in pack.images() for file in (image.image, image.label)]
    return [(file.num_bytes, file.mtime_ns) for file in files]


def _announce(directory: Path, pack: Pack, datasets: Sequence[SegDataset], *, done: int) -> None:
    """Says how large the pack is; ExecutionError if it does not fit on the disk."""
    counts = " and ".join(f"{len(d)} of split {printable(d.split)}" for d in datasets)
    size = sum(shard.num_bytes for shard in pack.shards)
    missing, free = writer.missing_bytes(directory, pack), writer.free_bytes(directory)
    many = counted(len(pack.shards), "shard", "shards")
    line = f"pack of {counts}: {_size(size)} in {many}; {_size(free)} are free"
    say(f"{line}; {done} images are packed already" if done else line)
    if missing > free:
        raise ExecutionError(
            f"{printable(directory)}: the disk is too small: {_size(missing)} are needed, "
            f"{_size(free)} are free"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _fill(
    directory: Path,
    planned: Pack,
    datasets: Sequence[SegDataset],
    data: DataConfig,
    known: dict[int, writer.Filled],
    jobs: int | None,
) -> None:
    pairs = [pair for dataset in datasets for pair in dataset.pairs]
    work = writer.Work(directory, planned, pairs, datasets[0].classes, data.label_format)
    try:
        with process_pool(num_processes(len(pairs), jobs), writer.start_process) as pool:
            filled, problems = writer.fill(work, known, pool)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on where it stopped")
        raise
    if problems:
        title = f"{printable(directory)}: not finished; repair these and run the command again"
        raise DataError(first_lines(title, problems))
    writer.finish(directory, planned, filled)


def stats(args: argparse.Namespace) -> int:
    """The exit code: 0; what cannot be counted completely is an error."""
    data = load_config(args.config, args.set).data
    with ExitStack() as stack:
        if args.json is not None:
            with output_errors(args.json):
                stack.enter_context(reserve_output(args.json))
        stats = measure(data, args.split or data.train_split, beta=args.beta, jobs=args.jobs)
        text = stats_as_text(stats)
        print("\n".join(printable_lines(text, len(text) + 1)))
        if args.json is not None:
            with output_errors(args.json):
                write_output(args.json, stats_as_json(stats) + "\n")
    return EXIT_OK
