"""What is wrong or odd in a data set, from the names of its files and the scans of its splits."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from segtrain.config import Config
from segtrain.data.check.dark_images import lost_bits, whole_split_problem
from segtrain.data.check.scan import Palette, SplitScan
from segtrain.data.read.classes import ClassFile, Color
from segtrain.data.read.find import MAX_SHOWN, extra_labels_text, left_out_text
from segtrain.data.read.labels import (
    looks_like_train_ids,
    single_class,
    train_ids,
    unknown_colors,
    unknown_ids,
)
from segtrain.data.read.layouts import Listing
from segtrain.errors import DataError
from segtrain.text import MAX_NAME, counted, first_of, printable

ONE_SPLIT = "data.train_split and data.eval_split are the same: scores are of training images"
_REPAIR = "if the colours are right and the indices are not, set data.label_format: colors"
_MAX_INDICES = 3


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong ("error") or odd ("warning"), and the places where it occurs.

    split: empty if it is about both splits. kind: a short name, for programs.
    """

    severity: Literal["error", "warning"]
    split: str
    kind: str
    text: str
    places: Sequence[str] = ()

    def lines(self) -> list[str]:
        """Its text, and its first places below."""
        split = f"split {self.split!r}: " if self.split else ""
        left = len(self.places) - MAX_SHOWN
        more = [f"  and {left} more"] if left > 0 else []
        return [split + self.text, *(f"  {place}" for place in self.places[:MAX_SHOWN]), *more]


def refuse_errors(findings: Iterable[Finding]) -> None:
    """Raises DataError if there are errors, with all of them."""
    lines = [line for found in findings if found.severity == "error" for line in found.lines()]
    if lines:
        raise DataError("\n".join(lines))


def listing_findings(split: str, listing: Listing) -> Iterator[Finding]:
    """About the names of the files."""
    if problems := listing.problems:
        text = f"files that are missing or named wrongly: {len(problems)}"
        yield Finding("error", split, "files", text, problems)
    words = "name clashes", "names clash", "on some file systems"
    yield from _warning(split, "names", listing.warnings, *words)
    for note in listing.notes:
        yield Finding("warning", split, "labels", note)
    for kind, text_of, files in (
        ("formats", left_out_text, listing.left_out),
        ("extra labels", extra_labels_text, listing.extra_labels),
    ):
        if files:
            yield Finding("warning", split, kind, text_of(files), list(map(printable, files)))


def split_findings(scan: SplitScan, classes: ClassFile) -> Iterator[Finding]:
    """About the files of one split, whatever it is used for."""
    yield from file_findings(scan)
    if scan.unknown:
        yield _unknown_values(scan, classes)
    words = "label holds", "labels hold", "nothing but ignored pixels"
    yield from _warning(scan.split, "all ignored", scan.all_ignored, *words)
    words = "image carries", "images carry", "an EXIF orientation, which is ignored"
    yield from _warning(scan.split, "orientation", scan.turned, *words)
    yield from brightness_findings(scan)
    yield from _palette_findings(scan, classes)
    yield from _class_findings(scan, classes)


def file_findings(scan: SplitScan) -> Iterator[Finding]:
    """About files that cannot be read, and labels whose size is not that of the image."""
    single = []
    for reason, files in scan.unreadable.items():
        if files[1:]:
            # Such as a wrong setting: it is wrong for all files.
            text = f"{len(files)} files cannot be read: {reason}"
            yield Finding("error", scan.split, "unreadable", text, files)
        else:
            single.append(f"{files[0]}: {reason}")
    if single:
        text = f"files that cannot be read: {len(single)}"
        yield Finding("error", scan.split, "unreadable", text, single)
    if problems := scan.size_problems:
        what = counted(len(problems), "label differs from its", "labels differ from their")
        yield Finding("error", scan.split, "sizes", f"{what} image in size", problems)


def brightness_findings(scan: SplitScan) -> Iterator[Finding]:
    """About images that are dark or of a single colour."""
    images = scan.brightness
    lost = [image for image in images if image.lost]
    if problem := whole_split_problem(images):
        places = [image.name for image in lost or images]
        yield Finding("error", scan.split, "faint", problem, places)
        return
    if lost:
        text = f"{lost_bits(lost)}, if these are not just dark"
        yield Finding("warning", scan.split, "faint", text, [image.name for image in lost])
    flat = [image.name for image in images if image.flat]
    words = "image is", "images are", "of a single colour"
    yield from _warning(scan.split, "single colour", flat, *words)


def training_findings(scan: SplitScan, config: Config) -> Iterator[Finding]:
    """About the training split: images smaller than the crop, or fewer than a batch."""
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
        yield Finding("warning", scan.split, "small", text)
    batch = config.train.batch_size
    if 0 < scan.num_pairs < batch:
        text = (
            f"images: {scan.num_pairs}, fewer than train.batch_size {batch}: a batch repeats some"
        )
        yield Finding("warning", scan.split, "few", text)


def shared_image_findings(scans: Sequence[SplitScan], *, is_one_split: bool) -> Iterator[Finding]:
    """About images that occur more than once, in one split or in both."""
    if is_one_split:
        yield Finding("warning", "", "one split", ONE_SPLIT)
    for scan in scans:
        groups = [names for names in scan.digests.values() if names[1:]]
        copies = [first_of(names, separator=" = ") for names in groups]
        words = "image occurs", "images occur", "more than once"
        yield from _warning(scan.split, "copies", copies, *words)
    if len(scans) == 2:
        first, second = (scan.digests for scan in scans)
        shared = [
            f"{printable(names[0])} = {printable(second[digest][0])}"
            for digest, names in first.items()
            if digest in second
        ]
        words = "image is", "images are", "in both splits: the scores will be too good"
        yield from _warning("", "both splits", shared, *words)


def _warning(
    split: str, kind: str, places: Sequence[str], one: str, many: str, end: str
) -> Iterator[Finding]:
    """`2 names clash on some file systems`, if there are any."""
    if places:
        yield Finding("warning", split, kind, f"{counted(len(places), one, many)} {end}", places)


def _unknown_values(scan: SplitScan, classes: ClassFile) -> Finding:
    if scan.values:
        text = unknown_ids(scan.values, classes)
    else:
        text = unknown_colors(scan.unknown, classes)
    places = []
    for value, num_pixels in scan.unknown.most_common():
        labels = scan.unknown_labels[value]
        where = counted(len(labels), "label", "labels")
        first = ", ".join(map(printable, labels[:3]))
        places.append(f"{value}: {num_pixels} pixels in {where}, first {first}")
    return Finding("error", scan.split, "values", text, places)


def _class_findings(scan: SplitScan, classes: ClassFile) -> Iterator[Finding]:
    if not scan.pixels.any() and not scan.ignored_pixels:  # no label could be read
        return
    present = [name for name, pixels in zip(classes.names, scan.pixels, strict=True) if pixels]
    absent = [name for name in classes.names if name not in present]
    if classes.num_classes > 1 and len(present) < 2 and not scan.unknown:
        text = single_class(present, is_mask=set(scan.values) == {0, 255})
        yield Finding("error", scan.split, "one class", text)
    elif absent:
        text = f"{len(absent)} of {classes.num_classes} classes never occur"
        yield Finding("warning", scan.split, "absent", text, absent)
    if looks_like_train_ids(scan.values, classes):
        yield Finding("warning", scan.split, "train ids", train_ids(scan.values))


def _palette_findings(scan: SplitScan, classes: ClassFile) -> Iterator[Finding]:
    """About palettes that contradict the class file or each other.

    segtrain reads the indices, never the colours. If a tool reduced RGB labels to a palette file by
    file, the colours are right, but each file has other indices. No step fails, and training learns
    noise.
    """
    contradictions = defaultdict(list)
    for name, palette in scan.palettes.items():
        if problem := _contradiction(palette, classes):
            contradictions[problem].append(printable(name))
    for problem, places in contradictions.items():
        labels = counted(len(places), "label", "labels")
        yield Finding("error", scan.split, "palette", f"in {labels} {problem}", places)
    moved, is_permutation = _moved_colors(scan.palettes)
    if moved:
        yield Finding("error" if is_permutation else "warning", scan.split, "palettes", moved)


def _contradiction(palette: Palette, classes: ClassFile) -> str:
    """Which indices have the `color` that the class file gives another class; empty if none."""
    owner = {classes.palette[i]: i for i in classes.given_colors}
    wrong = []
    for index, color in palette.items():
        meant, read = owner.get(color), classes.train_id_of.get(index)
        if meant is not None and read is not None and read != meant:
            is_class = read < classes.num_classes
            name = f"'{printable(classes.names[read], MAX_NAME)}'" if is_class else "ignored"
            other = printable(classes.names[meant], MAX_NAME)
            wrong.append(f"index {index} is {name}, but has the color {list(color)} of '{other}'")
    if not wrong:
        return ""
    return (
        f"the palette contradicts class file {classes.name}: "
        f"{first_of(wrong, _MAX_INDICES, separator='; ')}; {_REPAIR}; if the indices are right, "
        "correct `color` in the class file"
    )


def _moved_colors(labels: Mapping[str, Palette]) -> tuple[str, bool]:
    """Names two labels with one colour at different indices, and whether all colours are equal.

    Empty if there are none: palettes that only have different colours are no mistake.
    """
    found = ""
    first: dict[int | frozenset[Color], str] = {}  # label with this index, or with these colours
    for name, palette in labels.items():
        index = {color: i for i, color in palette.items()}
        colors = frozenset(index)
        for other in dict.fromkeys(first.setdefault(key, name) for key in (colors, *palette)):
            for i, color in labels[other].items():
                if palette.get(i, color) == color or color not in index:
                    continue
                text = (
                    f"labels have the same colours at different indices: {list(color)} is {i} in "
                    f"{printable(other)} and {index[color]} in {printable(name)}, and ids are the "
                    f"indices; were the palettes made file by file? {_REPAIR}"
                )
                if set(labels[other].values()) == colors:
                    return text, True
                found = found or text
    return found, False
