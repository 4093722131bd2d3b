"""What a check of the data found: the issues of a data set, as text and as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from segtrain.config import Config
from segtrain.data.check.dark_images import lost_bits, whole_split_problem
from segtrain.data.check.scan import BadFile, SplitScan, by_reason, class_problem, moved_colors
from segtrain.data.check.stats import enet_weights, median_frequency_weights
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.find import MAX_SHOWN, extra_labels_text, left_out_text
from segtrain.data.read.labels import (
    looks_like_train_ids,
    single_class,
    train_ids,
    unknown_colors,
    unknown_ids,
)
from segtrain.data.read.layouts import Listing
from segtrain.text import MAX_NAME, counted, first_of, printable


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


ONE_SPLIT = "data.train_split and data.eval_split are the same: scores are of training images"


def listing_issues(split: str, listing: Listing) -> Iterator[Issue]:
    """Issues of the names of the files."""
    if problems := listing.problems:
        text = f"files that are missing or named wrongly: {len(problems)}"
        yield Issue("error", split, "files", text, problems)
    if clashes := listing.warnings:
        text = counted(len(clashes), "name clashes", "names clash") + " on some file systems"
        yield Issue("warning", split, "names", text, clashes)
    for note in listing.notes:
        yield Issue("warning", split, "labels", note)
    if files := listing.left_out:
        places = list(map(printable, files))
        yield Issue("warning", split, "formats", left_out_text(files), places)
    if files := listing.extra_labels:
        places = list(map(printable, files))
        yield Issue("warning", split, "extra labels", extra_labels_text(files), places)


def split_issues(scan: SplitScan, classes: ClassFile) -> Iterator[Issue]:
    """Issues of the files of one split, whatever it is used for."""
    yield from _file_issues(scan)
    if scan.unknown:
        yield _unknown_values(scan, classes)
    if names := scan.all_ignored:
        text = counted(len(names), "label holds", "labels hold") + " nothing but ignored pixels"
        yield Issue("warning", scan.split, "all ignored", text, names)
    if names := scan.turned:
        what = counted(len(names), "image carries", "images carry")
        text = f"{what} an EXIF orientation, which is ignored"
        yield Issue("warning", scan.split, "orientation", text, names)
    yield from _brightness_issues(scan)
    yield from _palette_issues(scan, classes)
    yield from _class_issues(scan, classes)


def training_issues(scan: SplitScan, config: Config) -> Iterator[Issue]:
    """Issues of the training split: images smaller than the crop, or fewer than a batch."""
    crop_size, short_side = config.augment.crop_size, config.data.short_side_px
    sizes = np.array(list(scan.sizes.elements())).reshape(-1, 2)
    if short_side:
        sizes = sizes * short_side / sizes.min(axis=1, keepdims=True)
    small = int((sizes.round() < crop_size).any(axis=1).sum())
    if small:
        text = (
            f"{small} of {len(sizes)} images are smaller than augment.crop_size {list(crop_size)} "
            f"and are padded; the median size is {np.median(sizes, axis=0).astype(int).tolist()}"
        )
        yield Issue("warning", scan.split, "small", text)
    batch = config.train.batch_size
    if 0 < scan.num_pairs < batch:
        text = (
            f"images: {scan.num_pairs}, fewer than train.batch_size {batch}: a batch repeats some"
        )
        yield Issue("warning", scan.split, "few", text)


def shared_image_issues(scans: Sequence[SplitScan], *, is_one_split: bool) -> Iterator[Issue]:
    """Images that occur more than once, in one split or in both."""
    if is_one_split:
        yield Issue("warning", "", "one split", ONE_SPLIT)
    for scan in scans:
        groups = [names for names in scan.digests.values() if names[1:]]
        if copies := [first_of(names, separator=" = ") for names in groups]:
            text = counted(len(copies), "image occurs", "images occur") + " more than once"
            yield Issue("warning", scan.split, "copies", text, copies)
    if len(scans) == 2:
        first, second = (scan.digests for scan in scans)
        shared = [
            f"{printable(first[digest][0])} = {printable(second[digest][0])}"
            for digest in first
            if digest in second
        ]
        if shared:
            what = counted(len(shared), "image is", "images are")
            text = f"{what} in both splits: the scores will be too good"
            yield Issue("warning", "", "both splits", text, shared)


def _file_issues(scan: SplitScan) -> Iterator[Issue]:
    """Files that cannot be read, and labels whose size is not that of the image."""
    single = []
    for reason, places in by_reason(scan.bad_files).items():
        if places[1:]:
            text = f"{len(places)} files cannot be read: {reason}"
            yield Issue("error", scan.split, "unreadable", text, places)
        else:
            single.append(f"{places[0]}: {reason}")
    if single:
        text = f"files that cannot be read: {len(single)}"
        yield Issue("error", scan.split, "unreadable", text, single)
    if problems := scan.size_problems:
        what = counted(len(problems), "label differs from its", "labels differ from their")
        text = f"{what} image in size"
        yield Issue("error", scan.split, "sizes", text, problems)


def _unknown_values(scan: SplitScan, classes: ClassFile) -> Issue:
    if scan.values:
        text = unknown_ids(scan.values, classes)
    else:
        text = unknown_colors(scan.unknown, classes)
    places = []
    for value, num_pixels in scan.unknown.most_common():
        labels = scan.unknown_labels[value]
        first = ", ".join(map(printable, labels[:3]))
        where = counted(len(labels), "label", "labels")
        places.append(f"{value}: {num_pixels} pixels in {where}, first {first}")
    return Issue("error", scan.split, "values", text, places)


def _brightness_issues(scan: SplitScan) -> Iterator[Issue]:
    images = scan.brightness
    lost = [image for image in images if image.lost]
    if problem := whole_split_problem(images):
        places = [image.name for image in lost or images]
        yield Issue("error", scan.split, "faint", problem, places)
        return
    if lost:
        text = f"{len(lost)} {lost_bits(lost)}, if these are not just dark"
        yield Issue("warning", scan.split, "faint", text, [image.name for image in lost])
    if flat := [image.name for image in images if image.flat]:
        text = counted(len(flat), "image is", "images are") + " of a single colour"
        yield Issue("warning", scan.split, "single colour", text, flat)


def _palette_issues(scan: SplitScan, classes: ClassFile) -> Iterator[Issue]:
    bad = [
        BadFile(printable(name), problem)
        for name, palette in scan.palettes.items()
        if (problem := class_problem(palette, classes))
    ]
    for reason, places in by_reason(bad).items():
        labels = counted(len(places), "label", "labels")
        yield Issue("error", scan.split, "palette", f"in {labels} {reason}", places)
    moved, is_permutation = moved_colors(scan.palettes)
    if moved:
        yield Issue("error" if is_permutation else "warning", scan.split, "palettes", moved)


def _class_issues(scan: SplitScan, classes: ClassFile) -> Iterator[Issue]:
    if not scan.pixels.any() and not scan.ignored_pixels:  # no label could be read
        return
    present = [name for name, pixels in zip(classes.names, scan.pixels, strict=True) if pixels]
    absent = [name for name in classes.names if name not in present]
    if classes.num_classes > 1 and len(present) < 2 and not scan.unknown:
        text = single_class(present, is_mask=set(scan.values) == {0, 255})
        yield Issue("error", scan.split, "one class", text)
    elif absent:
        text = f"{len(absent)} of {classes.num_classes} classes never occur"
        yield Issue("warning", scan.split, "absent", text, absent)
    if looks_like_train_ids(scan.values, classes):
        yield Issue("warning", scan.split, "train ids", train_ids(scan.values))
