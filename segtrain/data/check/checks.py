"""`segtrain data check CONFIG`: reads both splits completely and reports all that is wrong or odd.

Training makes the cheap part itself (`quick_check`): headers of every file, no pixels.
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from segtrain.config import Config, load_config
from segtrain.data.brightness import brightness, lost_bits, whole_split_problem
from segtrain.data.check import report
from segtrain.data.check.faint import faint_problem, faint_warnings
from segtrain.data.check.palettes import Palette, class_problem, moved_colors, used_palette
from segtrain.data.check.report import CheckReport, Finding
from segtrain.data.check.scan import Problem, SplitScan, by_reason, process_pool, scan_split
from segtrain.data.class_file import load_class_file
from segtrain.data.classes import ClassFile
from segtrain.data.dataset import SegDataset, size_problem
from segtrain.data.decode import (
    decode_palette,
    decode_raw_label,
    label_mode_problem,
    read_bytes,
    read_header,
    read_label,
    read_raw_label,
)
from segtrain.data.labels import IGNORE_INDEX, count_ids, unknown_colors, unknown_ids
from segtrain.data.layouts import scan_layout
from segtrain.data.listing import Listing, Pair, extra_labels_text, first_lines, left_out_text
from segtrain.data.suggest import looks_like_train_ids
from segtrain.errors import EXIT_DATA, EXIT_OK, ConfigError, DataError
from segtrain.files import output_place, write_output
from segtrain.text import MAX_NAME, printable, printable_lines

# Waiting for the disk, not the processor, is what headers cost.
_HEADER_THREADS = 16
_PAIRS_A_PROCESS = 128
# Mistakes in a class file or a converter are in all labels alike: a few show them.
_SAMPLES = 4
# Labels that are looked at before their ids are called train ids.
_ID_SAMPLES = 32
_TELLING_SHARE = 0.25
_ONE_SPLIT = "data.train_split and data.eval_split are one: scores are those of training images"


def main(args: argparse.Namespace) -> int:
    """The command: 0 if nothing is wrong (warnings are not), 3 otherwise."""
    config = load_config(args.config, args.set)
    with ExitStack() as stack:
        if args.json is not None:
            with _about_json(args.json):
                stack.enter_context(output_place(args.json))
        found = run(config, jobs=args.jobs)
        if args.json is not None:
            with _about_json(args.json):
                write_output(args.json, report.as_json(found) + "\n")
    text = report.as_text(found)
    print("\n".join(printable_lines(text, len(text) + 1)))
    return EXIT_OK if found.ok else EXIT_DATA


@contextmanager
def _about_json(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--json {path}: {(error.strerror or '').lower()}") from error


def run(config: Config, jobs: int | None = None) -> CheckReport:
    """All findings about the training and the evaluation split of `config`.

    jobs: processes; None: one for each core this process may use.

    Raises:
        ConfigError: the class file is missing or wrong.
        ExecutionError: a process was killed.
    """
    data = config.data
    classes = load_class_file(data.classes, label_format=data.label_format)
    findings = []
    datasets = []
    for split in dict.fromkeys((data.train_split, data.eval_split)):
        try:
            listing = scan_layout(data, split)
        except DataError as error:
            findings.append(Finding("error", split, "split", str(error)))
            continue
        findings += _listing_findings(split, listing)
        datasets.append(
            SegDataset(listing.pairs, classes, split=split, label_format=data.label_format)
        )
    with process_pool(_processes(jobs, sum(map(len, datasets)))) as pool:
        scans = [scan_split(dataset, pool) for dataset in datasets]
    for scan in scans:
        findings += _pixel_findings(scan, classes)
        findings += _brightness_findings(scan)
        findings += _palette_findings(scan, classes)
        findings += _class_findings(scan, classes)
        if scan.split == data.train_split:
            findings += _crop_findings(scan, config)
            findings += _number_findings(scan, config)
    findings += _shared_images(scans, data.train_split == data.eval_split)
    findings = _joined(findings)
    return CheckReport(classes.name, list(classes.names), scans, findings)


def quick_check(train: SegDataset, evaluation: SegDataset) -> list[str]:
    """Refuses data at which training would stop, as far as headers and a few labels tell.

    About 0.2 ms a pair. Returns warnings, a line for each.

    Raises:
        DataError: files that are no PNG or JPEG, sizes that differ, labels of a kind that cannot be
            read, of which all are counted and the first ten shown; a pair out of a small sample
            that cannot be read or holds unknown label values; labels of a single class; a palette
            that contradicts the class file; or images of which reading leaves next to nothing.
    """
    is_one = train.split == evaluation.split
    warnings = [_ONE_SPLIT] if is_one else []
    for dataset in (train,) if is_one else (train, evaluation):
        with ThreadPoolExecutor(_HEADER_THREADS) as pool:
            jobs = ((pair, dataset.label_format) for pair in dataset.pairs)
            found = list(pool.map(_look_at_headers, jobs, chunksize=64))
        problems = [one for one in found if isinstance(one, Problem)]
        if problems:
            raise DataError(first_lines(f"split {dataset.split!r}", _reason_lines(problems)))
        depths = dict(enumerate(one for one in found if isinstance(one, int)))
        sample = range(0, len(dataset), max(1, len(dataset) // _SAMPLES))
        labels, seen = [], []
        for i in sample:
            image, label = dataset[i]
            labels.append(label)
            seen.append(brightness(image, depths[i], printable(dataset.pairs[i].image)))
        _refuse_one_class(dataset, labels)
        if problem := faint_problem(dataset, depths, seen):
            raise DataError(problem)
        warnings += faint_warnings(dataset, seen)
        if dataset.label_format == "ids":
            warnings += _id_warnings(dataset, sample)
    return warnings


def _id_warnings(dataset: SegDataset, sample: Iterable[int]) -> list[str]:
    """What is odd about the ids and the palettes of the labels in `sample`.

    Raises:
        DataError: a palette contradicts the class file.
    """
    palettes: dict[str, Palette] = {}
    ids: Counter[int] = Counter()
    for i in sample:
        path = dataset.pairs[i].label
        data = read_bytes(path)
        counts = count_ids(decode_raw_label(data, path))
        ids.update(counts)
        palette = used_palette(decode_palette(data, path), counts)
        if problem := class_problem(palette, dataset.classes):
            raise DataError(f"{printable(path)}: {problem}")
        palettes[dataset.name(i)] = palette
    moved, _ = moved_colors(palettes)
    lines = [moved, _train_ids_text(dataset, ids)]
    return [f"split {dataset.split!r}: {line}" for line in lines if line]


def _train_ids_text(dataset: SegDataset, ids: Counter[int]) -> str:
    """What to say if `ids`, of a few labels, and those of more labels look like train ids."""
    # Where hardly a class has an id that no train id is, as the last of ADE20K's 1 to 150, a sample
    # tells nothing.
    num_classes = dataset.classes.num_classes
    telling = sum(min(one.ids) >= num_classes for one in dataset.classes.classes)
    if telling < _TELLING_SHARE * num_classes:
        return ""
    step = max(1, len(dataset) // _ID_SAMPLES)
    rest = iter(dataset.pairs[::step])
    while looks_like_train_ids(ids, dataset.classes):
        pair = next(rest, None)
        if pair is None:
            return f"by a sample of labels, {_train_ids(ids)}"
        ids.update(count_ids(read_raw_label(pair.label)))
    return ""


def _train_ids(ids: Iterable[int]) -> str:
    return (
        f"no label holds an id above {max(i for i in ids if i != 255)}, although the class file "
        "goes further: these may be train ids where raw ids are expected"
    )


def _look_at_headers(job: tuple[Pair, str]) -> Problem | int:
    """What is wrong with a pair, as far as its headers tell; else the bit depth of its image."""
    pair, label_format = job
    headers = []
    for path in (pair.image, pair.label):
        try:
            headers.append(read_header(path))
        except DataError as error:
            return Problem.of(path, error)
    image, label = headers
    mode = label_mode_problem(label.mode, label_format)
    if mode:
        return Problem(printable(pair.label), mode)
    sizes = size_problem(pair, image.size, label.size)
    return Problem.of(pair.label, DataError(sizes)) if sizes else image.depth


def _reason_lines(problems: Iterable[Problem]) -> list[str]:
    return [
        f"{places[0]}: {reason}" + (f" ({len(places)} files are like this)" if places[1:] else "")
        for reason, places in by_reason(problems).items()
    ]


def _refuse_one_class(dataset: SegDataset, sample: Sequence[np.ndarray]) -> None:
    """Refuses labels that hold a single class beside ignored pixels: any model scores 100 % there.

    The sample of labels decides in all but odd cases; then labels are read until a second class
    is met.
    """
    classes = dataset.classes
    values = {int(value) for label in sample for value in np.unique(label)}
    rest = iter(dataset.pairs)
    while classes.num_classes > 1 and len(values - {IGNORE_INDEX}) < 2:
        pair = next(rest, None)
        if pair is None:
            names = [classes.names[i] for i in values - {IGNORE_INDEX}]
            text = _one_class(names, is_mask=_holds_masks(dataset))
            raise DataError(f"split {dataset.split!r}: {text}")
        label = read_label(pair.label, classes, dataset.label_format)
        values.update(int(value) for value in np.unique(label))


def _holds_masks(dataset: SegDataset) -> bool:
    """Whether the first label is a mask of 0 and 255."""
    if dataset.label_format == "colors":
        return False
    return set(np.unique(read_raw_label(dataset.pairs[0].label)).tolist()) == {0, 255}


def _one_class(present: Sequence[str], *, is_mask: bool) -> str:
    text = (
        f"only '{printable(present[0], MAX_NAME)}' ever occurs"
        if present
        else "no class ever occurs"
    )
    text += "; every other pixel is ignored: check ids and ignore_ids in the class file"
    if is_mask:
        text += ". For a 0/255 mask give the foreground `ids: [255]` and set `ignore_ids: []`"
    return text


def _processes(jobs: int | None, num_pairs: int) -> int:
    """As many as asked for, but none that would take longer to start than to work."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(jobs or cores or 1, -(-num_pairs // _PAIRS_A_PROCESS)))


def _listing_findings(split: str, listing: Listing) -> list[Finding]:
    findings = []
    if listing.problems:
        text = f"{len(listing.problems)} files are missing or named wrongly"
        findings.append(Finding("error", split, "files", text, listing.problems))
    if listing.warnings:
        text = f"{len(listing.warnings)} names clash on some file systems"
        findings.append(Finding("warning", split, "names", text, listing.warnings))
    if listing.left_out:
        files = [printable(file) for file in listing.left_out]
        findings.append(
            Finding("warning", split, "formats", left_out_text(listing.left_out), files)
        )
    if listing.extra_labels:
        text = extra_labels_text(listing.extra_labels)
        files = [printable(file) for file in listing.extra_labels]
        findings.append(Finding("warning", split, "extra labels", text, files))
    return findings


def _pixel_findings(scan: SplitScan, classes: ClassFile) -> list[Finding]:
    findings = []
    single = []
    for reason, places in by_reason(scan.unreadable).items():
        if places[1:]:
            text = f"{len(places)} files cannot be read: {reason}"
            findings.append(Finding("error", scan.split, "unreadable", text, places))
        else:
            single.append(f"{places[0]}: {reason}")
    if single:
        text = f"{len(single)} files cannot be read"
        findings.append(Finding("error", scan.split, "unreadable", text, single))
    if scan.size_problems:
        text = f"{len(scan.size_problems)} labels differ from their image in size"
        findings.append(Finding("error", scan.split, "sizes", text, scan.size_problems))
    if scan.unknown:
        counts = {value: seen.pixels for value, seen in scan.unknown.items()}
        if isinstance(next(iter(counts)), int):
            text = unknown_ids(scan.values, classes)
        else:
            text = unknown_colors(counts, classes)
        lines = [
            f"{value}: {seen.pixels} pixels in {len(seen.labels)} labels, first "
            + ", ".join(printable(name) for name in seen.labels[:3])
            for value, seen in sorted(scan.unknown.items(), key=lambda item: -item[1].pixels)
        ]
        findings.append(Finding("error", scan.split, "values", text, lines))
    if scan.all_ignored:
        text = f"{len(scan.all_ignored)} labels hold nothing but ignored pixels"
        findings.append(Finding("warning", scan.split, "all ignored", text, scan.all_ignored))
    if scan.turned:
        text = f"{len(scan.turned)} images carry an EXIF orientation, which is ignored"
        findings.append(Finding("warning", scan.split, "orientation", text, scan.turned))
    return findings


def _brightness_findings(scan: SplitScan) -> list[Finding]:
    images = scan.brightness
    lost = [one for one in images if one.lost]
    flat = [one.name for one in images if one.flat]
    if problem := whole_split_problem(images):
        places = [one.name for one in lost or images]
        return [Finding("error", scan.split, "faint", problem, places)]
    findings = []
    if lost:
        text = f"{len(lost)} {lost_bits(lost)}, if these are not just dark"
        findings.append(Finding("warning", scan.split, "faint", text, [one.name for one in lost]))
    if flat:
        text = f"{len(flat)} images are of a single colour"
        findings.append(Finding("warning", scan.split, "single colour", text, flat))
    return findings


def _palette_findings(scan: SplitScan, classes: ClassFile) -> list[Finding]:
    problems = [
        Problem(printable(name), problem)
        for name, palette in scan.palettes.items()
        if (problem := class_problem(palette, classes))
    ]
    findings = [
        Finding("error", scan.split, "palette", f"in {_labels(len(places))} {reason}", places)
        for reason, places in by_reason(problems).items()
    ]
    moved, is_permutation = moved_colors(scan.palettes)
    if moved:
        severity = "error" if is_permutation else "warning"
        findings.append(Finding(severity, scan.split, "palettes", moved))
    return findings


def _labels(count: int) -> str:
    return "1 label" if count == 1 else f"{count} labels"


def _class_findings(scan: SplitScan, classes: ClassFile) -> list[Finding]:
    findings = []
    present = [name for name, pixels in zip(classes.names, scan.pixels, strict=True) if pixels]
    absent = [name for name in classes.names if name not in present]
    if not scan.pixels.any() and not scan.ignored_pixels:  # no label could be read
        return []
    if classes.num_classes > 1 and len(present) < 2 and not scan.unknown:
        text = _one_class(present, is_mask=set(scan.values) == {0, 255})
        findings.append(Finding("error", scan.split, "one class", text))
    elif absent:
        text = f"{len(absent)} of {classes.num_classes} classes never occur"
        findings.append(Finding("warning", scan.split, "absent", text, absent))
    if looks_like_train_ids(scan.values, classes):
        text = _train_ids(scan.values)
        findings.append(Finding("warning", scan.split, "train ids", text))
    return findings


def _crop_findings(scan: SplitScan, config: Config) -> list[Finding]:
    height, width = config.augment.crop_size
    short_side = config.data.short_side_px
    small = 0
    for size, count in scan.sizes.items():
        scale = short_side / min(size) if short_side else 1
        if round(size[0] * scale) < height or round(size[1] * scale) < width:
            small += count
    if not small:
        return []
    text = (
        f"{small} of {sum(scan.sizes.values())} images are smaller than "
        f"augment.crop_size {[height, width]} and are padded with ignored pixels"
    )
    if 2 * small > sum(scan.sizes.values()):
        text += f"; the median size is {_median_size(scan, short_side)}"
    return [Finding("warning", scan.split, "small", text)]


def _median_size(scan: SplitScan, short_side: int | None) -> list[int]:
    """Median height and width of the images at the size that crops are taken from."""
    sizes = np.repeat(list(scan.sizes), list(scan.sizes.values()), axis=0)  # (images, 2)
    scale = short_side / sizes.min(axis=1, keepdims=True) if short_side else 1
    return [int(side) for side in np.median(sizes * scale, axis=0)]


def _number_findings(scan: SplitScan, config: Config) -> list[Finding]:
    batch = config.train.batch_size
    if not 0 < scan.num_pairs < batch:
        return []
    text = f"{scan.num_pairs} images are fewer than train.batch_size {batch}: a batch repeats some"
    return [Finding("warning", scan.split, "few", text)]


def _joined(findings: Sequence[Finding]) -> list[Finding]:
    """What is wrong with both splits in the same words, such as data.root, is said once."""
    count = Counter((finding.kind, finding.text) for finding in findings)
    joined = [
        replace(one, split="") if count[one.kind, one.text] > 1 and one.kind == "split" else one
        for one in findings
    ]
    return [one for i, one in enumerate(joined) if one.split or one not in joined[:i]]


def _shared_images(scans: Sequence[SplitScan], same_split: bool) -> list[Finding]:
    findings = []
    if same_split:
        findings.append(Finding("warning", "", "one split", _ONE_SPLIT))
    for scan in scans:
        copies = [" = ".join(map(printable, names)) for names in scan.digests.values() if names[1:]]
        if copies:
            text = f"{len(copies)} images occur more than once"
            findings.append(Finding("warning", scan.split, "copies", text, copies))
    if len(scans) == 2:
        first, second = (scan.digests for scan in scans)
        shared = [
            f"{printable(first[digest][0])} = {printable(second[digest][0])}"
            for digest in first
            if digest in second
        ]
        if shared:
            text = f"{len(shared)} images are in both splits: the scores will be too good"
            findings.append(Finding("warning", "", "both splits", text, shared))
    return findings
