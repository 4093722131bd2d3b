"""The two checks of a data set.

`check_data` reads every pair completely, for `segtrain data check`. `quick_check`, before training,
reads the headers of every pair and decodes a sample.
"""

import json
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from segtrain.config import DataConfig
from segtrain.data.check.finding import Finding
from segtrain.data.check.findings import (
    ONE_SPLIT,
    both_splits,
    copy_findings,
    file_findings,
    refuse_errors,
    shared_image_findings,
    split_findings,
)
from segtrain.data.check.image_findings import scaling_words
from segtrain.data.check.scan import SplitScan, scan_label, scan_pair, scan_split
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.concurrent import IO_THREADS, num_processes, prefetch
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.find import Pair
from segtrain.data.read.find_tiles import boxes_of
from segtrain.data.read.image import RGB, ImageForm, other_bands, other_sizes
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.label_formats import LabelFormat, label_format_of
from segtrain.data.read.layouts import scan_layout
from segtrain.data.read.opening import dataset_of, open_dataset
from segtrain.data.read.tiles import overlapping
from segtrain.distributed.machine import process_pool
from segtrain.errors import DataError
from segtrain.text import counted, printable, table_lines

T = TypeVar("T")

_TIFF = (".tif", ".tiff")
# Few: each holds a decoded image, which may be large.
_DECODING_THREADS = 4
# Pairs to look at before training: fewer could all be dark, or without the high ids, by chance.
_SAMPLES = 32
# The least fraction of classes whose raw ids cannot be train ids, see `_can_tell_train_ids`.
_MIN_TELLING = 0.25
# The kinds of findings that a sample can tell; others, such as "absent" classes, need all pairs.
_KINDS_BY_SAMPLE = {
    *("blended", "no class", "scales"),
    *("unreadable", "values", "palette", "palettes", "one class", "train ids"),
    *("damaged", "range", "faint", "dropped band", "grey", "white", "outside", "orientation"),
}


@dataclass(frozen=True)
class CheckResult:
    """All findings of a data set, and the counts of its classes and sizes."""

    class_file: str
    class_names: Sequence[str]
    scans: list[SplitScan]
    findings: list[Finding]
    form: ImageForm  # of the training images

    @property
    def ok(self) -> bool:
        """Whether training can start: there may be warnings, but no errors."""
        return not any(finding.severity == "error" for finding in self.findings)

    def as_text(self) -> str:
        """For a terminal: a table of the classes, the findings, a verdict."""
        lines = [_split_line(scan) for scan in self.scans]
        if self.scans:
            lines += ["", *self._class_table()]
        ordered = sorted(self.findings, key=lambda finding: finding.severity, reverse=True)
        for finding in ordered:  # warnings, then errors, which a terminal shows last
            first, *places = finding.lines()
            lines += ["", f"{finding.severity}: {first}", *places]
        counts = Counter(finding.severity for finding in self.findings)
        kinds = {severity: counted(n, "kind", "kinds") for severity, n in counts.items()}
        verdict = "the data is fine" if self.ok else f"errors of {kinds['error']}"
        warnings = f"warnings of {kinds['warning']}" if "warning" in kinds else "no warnings"
        return "\n".join([*lines, "", f"{verdict}; {warnings}"])

    def _class_table(self) -> list[str]:
        """The lines of a table: a class a line; of each split, its pixels and its images."""
        columns = [["class", *self.class_names]]
        for scan in self.scans:
            # At least 1, so that a split without valid pixels has shares of 0.
            shares = 100 * scan.pixels / np.maximum(scan.valid, 1)
            percentages = [f"{share:.3f} %" for share in shares]
            columns.append([f"{scan.split} pixels", *percentages])
            columns.append(["images", *map(str, scan.images)])
        return table_lines(columns)

    def as_json(self) -> str:
        """The whole result, with every place of every finding, as one JSON object."""
        content = {
            "ok": self.ok,
            "class_file": self.class_file,
            "splits": {
                scan.split: {"pairs": scan.num_pairs, **scan.counts(self.class_names)}
                for scan in self.scans
            },
            "findings": [vars(finding) for finding in self.findings],
        }
        return json.dumps(content, indent=2)


def check_data(data: DataConfig, jobs: int | None = None) -> CheckResult:
    """All findings of the training and the evaluation split.

    jobs: processes; None: one for each core that this process may use.

    Raises:
        ConfigError: the class file is missing or wrong.
        ExecutionError: a process was killed.
    """
    labels = label_format_of(data.label_format)
    classes = labels.class_file(data.classes)
    findings: list[Finding] = []
    datasets = []
    # One split may serve both purposes. Then it is read once.
    for split in dict.fromkeys((data.train_split, data.eval_split)):
        try:
            early_findings, dataset = _open(data, split, classes)
        except DataError as error:
            # The other split is checked all the same, so that one call tells of both.
            findings.append(Finding("error", split, "split", str(error)))
            continue
        findings += early_findings
        datasets.append(dataset)
    # One pool for both splits: its processes are started once.
    with process_pool(num_processes(sum(map(len, datasets)), jobs)) as pool:
        scans = [scan_split(dataset, pool, compare=True) for dataset in datasets]
    for scan in scans:
        findings += split_findings(scan, labels.meant(classes))
    if len(datasets) == 2:
        findings += copy_findings(*(dataset.names for dataset in datasets))
        findings += _tile_findings(*datasets)
    findings += shared_image_findings(scans, is_one_split=data.train_split == data.eval_split)
    form = next((opened.form for opened in datasets if opened.split == data.train_split), RGB)
    return CheckResult(classes.name, classes.names, scans, findings, form)


def quick_check(train: SegDataset, evaluation: SegDataset) -> list[str]:
    """Warnings about the two splits, one line each.

    Raises:
        DataError: training would stop at this data: files that no reader takes, sizes that differ,
            labels of a wrong kind (all are counted, the first ten shown); or, in the sample
            of pairs, files that cannot be read, unknown label values, a palette that contradicts
            the class file, nearly black images; or labels of a single class.
    """
    if train.split == evaluation.split:
        return [ONE_SPLIT, *check_split(train)]
    # A window of a raster is an image of its own: two windows of a file may be in two splits.
    trained = {(pair.image, pair.window) for pair in train.pairs}
    in_both = [x.image for x in evaluation.pairs if (x.image, x.window) in trained]
    findings = [
        *both_splits(list(map(printable, in_both))),
        *copy_findings(train.names, evaluation.names),
        *_tile_findings(train, evaluation),
    ]
    warnings = [finding.lines()[0] for finding in findings]
    if other := other_bands(evaluation.form.bands, train.form.bands):
        raise DataError(f"split {printable(evaluation.split)!r}: {other}")
    scalings = [dataset.form.scaling for dataset in (train, evaluation)]
    if scalings[0] != scalings[1]:
        said = " and ".join(map(scaling_words, scalings))
        warnings.append(
            f"images to train on and to evaluate on have other scales or offsets: {said}"
        )
    return warnings + check_split(train) + check_split(evaluation)


def check_split(dataset: SegDataset) -> list[str]:
    """`quick_check` of one split; nothing of a pack, which repeats what was found before packing.

    Raises:
        DataError: as there.
    """
    if dataset.is_packed:
        return []
    # Headers first: what is wrong with any pair is said before an image is decoded.
    headers, depths = _check_headers(dataset)
    scan = _scan_sample(dataset, depths)
    scan.places["scales"] = headers.places["scales"]  # of all images
    kinds = _KINDS_BY_SAMPLE
    if not _can_tell_train_ids(dataset):
        kinds = kinds - {"train ids"}
    classes = dataset.labels.meant(dataset.classes)
    findings = [finding for finding in split_findings(scan, classes) if finding.kind in kinds]
    refuse_errors(findings)
    return [_warning_line(finding) for finding in findings]


def _open(data: DataConfig, split: str, classes: ClassFile) -> tuple[list[Finding], SegDataset]:
    """A split, of the pack if there is one, and the findings that show before it is read."""
    if data.pack is not None:
        dataset = open_dataset(data, split)
        return [Finding("warning", split, "pack", line) for line in dataset.warnings], dataset
    # Not `open_dataset`, which raises where files are missing: here that is a finding.
    listing = scan_layout(data, split)
    dataset = dataset_of(listing, data, split, classes)
    findings = [Finding("warning", split, "files", note) for note in listing.notes]
    if problems := listing.problems:
        text = f"{counted(len(problems), 'file is', 'files are')} missing or named wrongly"
        findings.append(Finding("error", split, "files", text, dict.fromkeys(problems, ())))
    return findings, dataset


def _split_line(scan: SplitScan) -> str:
    """Such as "train: 8 pairs of 96x128 to 100x128, 2.5% of the pixels ignored"."""
    # Where classes overlap, of the class of which most pixels are known.
    total = int(scan.valid.max()) + scan.ignored_pixels
    ignored = f", {scan.ignored_pixels / total:.1%} of the pixels ignored" if total else ""
    size = ""
    if scan.sizes:
        heights, widths = zip(*scan.sizes, strict=True)
        size = f" of {min(heights)}x{min(widths)} to {max(heights)}x{max(widths)}"
    return f"{scan.split}: {counted(scan.num_pairs, 'pair', 'pairs')}{size}{ignored}"


def _warning_line(finding: Finding) -> str:
    """A finding of a sample on one line, with its first file."""
    line = f"split {finding.split!r}, by a sample: {finding.text}"
    if finding.places:
        names = next(iter(finding.places.values()))
        line += f"; such as {printable(names[0])}"
    return line


def _check_headers(dataset: SegDataset) -> tuple[SplitScan, list[int]]:
    """What headers tell, and the bit depth of each image; DataError: training would stop."""
    scan = SplitScan(dataset.split, len(dataset), dataset.classes.num_classes)
    read = partial(_read_headers, num_classes=scan.pixels.size, labels=dataset.labels)
    depths = []
    for pair_scan, depth in prefetch(read, dataset.pairs, IO_THREADS):
        scan.add(pair_scan)
        depths.append(depth)
    refuse_errors(file_findings(scan))
    return scan, depths


def _read_headers(pair: Pair, num_classes: int, labels: LabelFormat) -> tuple[SplitScan, int]:
    """What is wrong with a pair, as far as its headers tell, and the bit depth of its image.

    The depth is 0 if the image cannot be used.
    """
    scan, depth = SplitScan("", 1, num_classes), 0
    path = pair.image  # of the file that a DataError is about
    try:
        image, *more = map(read_info, pair.images)
        if problem := other_sizes([image, *more]):
            raise DataError(f"{printable(path)}: {problem}")
        depth = image.depth
        scan.places["scales"][image.scaling].append(pair.name)
        path = pair.label
        label = read_info(path)
        if problem := labels.problem(label, num_classes):
            raise DataError(problem)
        scan.compare_sizes(pair, image.size, label.size)
        scan.compare_places(pair)
    except DataError as error:
        scan.add_unreadable(path, error)
    return scan, depth


def _tile_findings(train: SegDataset, evaluation: SegDataset) -> Iterator[Finding]:
    """About tiles to evaluate on that show what tiles to train on show, too."""
    # A pack may be here without its files, whose headers tell where tiles lie.
    if train.is_packed:
        return
    pairs = [*train.pairs, *evaluation.pairs]
    # Indices below len(train) are of the training. One overlap of each tile is enough.
    shared = {b: a for a, b in overlapping(boxes_of(pairs)) if a < len(train) <= b}
    if shared:
        overlaps = [
            f"{printable(pairs[b].name)} and {printable(pairs[a].name)}" for b, a in shared.items()
        ]
        what = counted(len(overlaps), "tile to evaluate on shows", "tiles to evaluate on show")
        text = (
            f"{what} what tiles to train on show, too: the scores will be too good; leave tiles "
            "out that overlap, as segtrain init does"
        )
        yield Finding("warning", "", "tiles", text, {"": overlaps})


def _scan_sample(dataset: SegDataset, depths: Sequence[int]) -> SplitScan:
    """What some pairs hold, among them images of 16 bits if there are any.

    If these show a single class, labels of more pairs are read.
    """
    classes = dataset.classes
    deep = [i for i, depth in enumerate(depths) if depth > 8]
    indices = dict.fromkeys([*_spread(range(len(dataset))), *_spread(deep)])
    work = partial(scan_pair, classes=classes, form=dataset.form, labels=dataset.labels)
    scan = SplitScan(dataset.split, len(dataset), classes.num_classes)
    for pair_scan in prefetch(work, (dataset.pairs[i] for i in indices), _DECODING_THREADS):
        scan.add(pair_scan)
    # With fewer classes no label can show as many, so nothing is searched.
    if classes.num_classes >= dataset.labels.least_shown:
        _look_for_second_class(scan, dataset, scanned=indices)
    return scan


def _look_for_second_class(
    scan: SplitScan, dataset: SegDataset, *, scanned: Container[int]
) -> None:
    """Adds labels to `scan`, beside those `scanned`, until it holds two classes or an error.

    If all labels show a single class, any model scores 100 %. Only all of them can tell. Where
    classes overlap a single one is enough.
    """
    enough = dataset.labels.least_shown
    for i, pair in enumerate(dataset.pairs):
        # Before each label: of most data sets the sample already shows enough.
        if np.count_nonzero(scan.pixels) >= enough or scan.unknown or scan.places["unreadable"]:
            return
        if i not in scanned:
            scan.add(scan_label(pair, dataset.classes, dataset.labels))


def _can_tell_train_ids(dataset: SegDataset) -> bool:
    """Whether a sample of labels shows that they hold train ids instead of raw ids.

    It does with Cityscapes: train ids end at 18, and 13 of its 19 classes have raw ids from 19 to
    33. A sample of raw ids has one of these 13. It does not with ADE20K: train ids end at 149, and
    only one class has a larger raw id, 150. A sample may well lack it.
    """
    classes = dataset.classes
    telling = sum(min(seg_class.ids) >= classes.num_classes for seg_class in classes.classes)
    return dataset.label_format == "ids" and telling >= _MIN_TELLING * classes.num_classes


def _spread(items: Sequence[T]) -> Sequence[T]:
    """_SAMPLES of the items or up to twice as many, evenly spread; all if they are fewer.

    >>> len(_spread(range(31))), _spread(range(320))[:3]
    (31, range(0, 30, 10))
    """
    return items[:: max(1, len(items) // _SAMPLES)]
