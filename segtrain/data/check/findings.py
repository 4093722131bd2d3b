"""What is wrong or odd in a data set, from the names of its files and the scans of its splits."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from segtrain.data.check.finding import Finding
from segtrain.data.check.image_findings import scaling_words, value_findings
from segtrain.data.check.scan import Palette, SplitScan
from segtrain.data.read.classes import ClassFile, Color
from segtrain.data.read.georeference import SAME_EXTENT
from segtrain.data.read.labels import looks_like_train_ids, unknown_colors, unknown_ids
from segtrain.data.read.rims import is_blend, is_lining
from segtrain.data.read.sequences import without_split
from segtrain.data.read.sources import sources_of
from segtrain.errors import DataError
from segtrain.text import MAX_NAME, counted, first_of, printable
from segtrain.types import IGNORE_INDEX

ONE_SPLIT = "data.train_split and data.eval_split are the same: scores are of training images"
_REPAIR = "if the colours are right and the indices are not, set data.label_format: colors"
_MAX_INDICES = 3
# Of the pixels of a split; Cityscapes has 0.12.
_MOST_WITHOUT_CLASS = 0.5


def refuse_errors(findings: Iterable[Finding]) -> None:
    """Raises DataError if there are errors, with all of them."""
    lines = [
        line for finding in findings if finding.severity == "error" for line in finding.lines()
    ]
    if lines:
        raise DataError("\n".join(lines))


def split_findings(scan: SplitScan, classes: ClassFile) -> Iterator[Finding]:
    """About the files of one split, whatever it is used for."""
    yield from file_findings(scan)
    if scan.unknown:
        yield _unknown_values(scan, classes)
    words = "label holds", "labels hold", "nothing but ignored pixels"
    yield from _counted("warning", scan.split, "all ignored", scan.places["all ignored"], *words)
    words = "image carries", "images carry", "an EXIF orientation, which is ignored"
    yield from _counted("warning", scan.split, "orientation", scan.places["orientation"], *words)
    words = "image is", "images are", "damaged, and decoded with parts that are grey or shifted"
    yield from _counted("warning", scan.split, "damaged", scan.places["damaged"], *words)
    yield from value_findings(scan.values_of_images, scan.split)
    yield from _palette_findings(scan, classes)
    yield from _class_findings(scan, classes)


def file_findings(scan: SplitScan) -> Iterator[Finding]:
    """About files that cannot be read, and labels whose size is not that of the image."""
    words = "file", "files", "cannot be read"
    yield from _counted("error", scan.split, "unreadable", scan.places["unreadable"], *words)
    words = "label has", "labels have", "another size than the image; EXIF orientation is ignored"
    yield from _counted("error", scan.split, "sizes", scan.places["sizes"], *words)
    words = "label lies", "labels lie", f"elsewhere on the map than the image; {SAME_EXTENT}"
    yield from _counted("error", scan.split, "places", scan.places["map places"], *words)
    if len(scalings := scan.places["scales"]) > 1:
        # A file may only have lost what it says.
        severity = "warning" if () in scalings else "error"
        text = (
            "images say by different scales or offsets what their numbers mean, and the numbers are"
            " taken as they are stored; gdal_translate -unscale applies them"
        )
        yield Finding(
            severity, scan.split, "scales", text, {scaling_words(s): x for s, x in scalings.items()}
        )


def shared_image_findings(scans: Sequence[SplitScan], *, is_one_split: bool) -> Iterator[Finding]:
    """About images that are in both splits."""
    if is_one_split:
        yield Finding("warning", "", "one split", ONE_SPLIT)
    if len(scans) == 2:
        first, second = (scan.places["images"] for scan in scans)
        shared = [
            f"{printable(names[0])} = {printable(second[digest][0])}"
            for digest, names in first.items()
            if digest in second
        ]
        yield from both_splits(shared)


def copy_findings(train: Sequence[str], evaluation: Sequence[str]) -> Iterator[Finding]:
    """About images to evaluate on whose names say that they are copies of images to train on."""
    names = [without_split(name) for name in (*train, *evaluation)]
    sources = sources_of(names)
    # `sources` has those of both splits: zip stops after the training's.
    there = dict(zip(sources, range(len(train)), strict=False))
    copies = []
    for i, name in enumerate(evaluation, start=len(train)):
        k = there.get(sources[i])
        # Equal names tell nothing: both splits may number their images alike.
        if k is not None and names[k] != names[i]:
            copies.append(f"{printable(name)} of {printable(train[k])}")
    words = (
        "image to evaluate on is a copy",
        "images to evaluate on are copies",
        "of images to train on, flipped or otherwise changed: the scores will be too good; "
        "segtrain init and segtrain folds keep copies together",
    )
    yield from _counted("warning", "", "copies", {"": copies}, *words)


def both_splits(names: Sequence[str]) -> Iterator[Finding]:
    """About images to train on that are to be evaluated on too."""
    words = "image is", "images are", "in both splits, so the scores will be too good"
    yield from _counted("warning", "", "both splits", {"": names}, *words)


def _counted(
    severity: Literal["error", "warning"],
    split: str,
    kind: str,
    places: Mapping[str, Sequence[str]],
    one: str,
    many: str,
    end: str,
) -> Iterator[Finding]:
    """`2 files cannot be read`, if there are any; what is found in most files stands first."""
    by_number = sorted(places.items(), key=lambda item: -len(item[1]))
    if number := sum(map(len, places.values())):
        text = f"{counted(number, one, many)} {end}"
        yield Finding(severity, split, kind, text, dict(by_number))


def _unknown_values(scan: SplitScan, classes: ClassFile) -> Finding:
    # Ids are whole numbers, colours are tuples.
    if not isinstance(next(iter(scan.unknown)), tuple):
        text = unknown_ids(scan.values or scan.unknown, classes)
    else:
        text = unknown_colors(scan.unknown, classes)
    places = {}
    for value, num_pixels in scan.unknown.most_common():
        labels = scan.places["values"][value]
        where = counted(len(labels), "label", "labels")
        places[f"{value}: {num_pixels} pixels in {where}"] = labels
    return Finding("error", scan.split, "values", text, places)


def _class_findings(scan: SplitScan, classes: ClassFile) -> Iterator[Finding]:
    if not scan.pixels.any() and not scan.ignored_pixels:  # no label could be read
        return
    present = [name for name, pixels in zip(classes.names, scan.pixels, strict=True) if pixels]
    absent = [name for name in classes.names if name not in present]
    if classes.overlapping:
        yield from _presence_findings(scan, classes, absent)
        return
    if classes.num_classes > 1 and len(present) < 2 and not scan.unknown:
        text = (
            f"classes that occur: {first_of(present) or 'none'}; all other pixels are ignored: "
            "check ids and ignore_ids in the class file"
        )
        # 255 is ignored unless the file says otherwise, so such a mask shows one class.
        if set(scan.values) == {0, 255}:
            text += "; for a 0/255 mask give the foreground `ids: [255]` and set `ignore_ids: []`"
        yield Finding("error", scan.split, "one class", text)
    elif absent:
        text = f"{len(absent)} of {classes.num_classes} classes never occur"
        yield Finding("warning", scan.split, "absent", text, {"": absent})
    without = scan.ignored_pixels / (scan.ignored_pixels + scan.pixels.sum())
    if len(present) > 1 and without > _MOST_WITHOUT_CLASS and not scan.unknown:
        text = (
            f"{without:.0%} of the pixels have no class: if they show a background, name it as a "
            "class, with its id, and take the id out of ignore_ids"
        )
        yield Finding("warning", scan.split, "no class", text)
    yield from _rim_findings(scan, classes)
    if looks_like_train_ids(scan.values, classes):
        text = (
            f"no label holds an id above {max(i for i in scan.values if i != IGNORE_INDEX)}, "
            "although the class file goes further: these may be train ids"
        )
        yield Finding("warning", scan.split, "train ids", text)


def _rim_findings(scan: SplitScan, classes: ClassFile) -> Iterator[Finding]:
    """About classes that lie as resizing with interpolation puts them between two others."""
    total = scan.pixels.sum()
    only, too = [], []
    for i, name in enumerate(classes.names):
        # What occurs in a single image may be drawn that way.
        if scan.images[i] > 1 and is_blend(scan.blended[i], scan.pixels[i], total):
            only.append(printable(name, MAX_NAME))
        elif scan.images[i] > 1 and is_lining(
            scan.thin[i], scan.blended[i], scan.contacts[i], total
        ):
            too.append(printable(name, MAX_NAME))
    repair = "labels were resized with interpolation (resize them by nearest neighbour), or"
    if only:
        is_only = "is only" if len(only) == 1 else "are only"
        where = "where a lower and a higher value meet"
        text = f"{first_of(only)} {is_only} {where}: {repair} the areas are thin lines"
        yield Finding("warning", scan.split, "blended", text)
    if too:
        where = "in many places where a lower and a higher value meet"
        text = f"lines of one pixel show {first_of(too)} {where}: {repair} it has such lines"
        yield Finding("warning", scan.split, "blended", text)


def _presence_findings(
    scan: SplitScan, classes: ClassFile, absent: Sequence[str]
) -> Iterator[Finding]:
    """About classes that overlap, each of which has a band of its own."""
    everywhere = [
        name
        for name, pixels, others in zip(classes.names, scan.pixels, scan.absent, strict=True)
        if pixels and not others
    ]
    if len(absent) == classes.num_classes:
        text = "no label shows any class: check the bands, and ids in the class file"
        yield Finding("error", scan.split, "one class", text)
    elif absent:
        text = f"{len(absent)} of {classes.num_classes} classes never occur"
        yield Finding("warning", scan.split, "absent", text, {"": absent})
    known = scan.pixels + scan.absent
    if unknown := [name for name, n in zip(classes.names, known, strict=True) if not n]:
        text = "all pixels of a class are ignored: it would not be trained"
        yield Finding("error", scan.split, "class ignored", text, {"": unknown})
    if everywhere:
        text = "all pixels that are not ignored are of a class: 0 in its band is its absence"
        yield Finding("warning", scan.split, "everywhere", text, {"": everywhere})


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
    end = (
        f"a palette that contradicts class file {classes.name}; {_REPAIR}; if the indices are "
        "right, correct `color` in the class file"
    )
    words = "label has", "labels have", end
    yield from _counted("error", scan.split, "palette", contradictions, *words)
    if moved := _moved_color(scan.palettes):
        yield Finding("warning", scan.split, "palettes", moved)


def _contradiction(palette: Palette, classes: ClassFile) -> str:
    """Which indices have the `color` that the class file gives another class; empty if none."""
    # Only colours that the file gives: a default is segtrain's own choice, and contradicts nobody.
    owner = {classes.palette[i]: i for i in classes.given_colors}
    wrong = []
    for index, color in palette.items():
        meant, read = owner.get(color), classes.train_id_of.get(index)
        if meant is not None and read is not None and read != meant:
            is_class = read < classes.num_classes
            name = f"'{printable(classes.names[read], MAX_NAME)}'" if is_class else "ignored"
            other = printable(classes.names[meant], MAX_NAME)
            wrong.append(f"index {index} is {name}, but has the color {list(color)} of '{other}'")
    return first_of(wrong, _MAX_INDICES, separator="; ")


def _moved_color(labels: Mapping[str, Palette]) -> str:
    """Names two labels with one colour at different indices; empty if there are none.

    Palettes that only have different colours are no mistake.
    """
    first: dict[int, tuple[str, Color]] = {}  # the first label with an index, and its colour
    for name, palette in labels.items():
        index_of = {color: i for i, color in palette.items()}
        for i, here in palette.items():
            other, there = first.setdefault(i, (name, here))
            # Another colour alone is no mistake. The old colour at another index shows that indices
            # moved.
            if there != here and there in index_of:
                return (
                    f"labels have the same colours at different indices: {list(there)} is {i} in "
                    f"{printable(other)} and {index_of[there]} in {printable(name)}, and ids are "
                    f"the indices; were the palettes made file by file? {_REPAIR}"
                )
    return ""
