"""Annotation files of all formats, found in a folder and read into one form.

To add a format, write a module with a `read` as in `coco`, and enter it in `FORMATS`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from segtrain.annotations import (
    coco,
    cvat,
    geojson,
    label_studio,
    labelme,
    rle_table,
    supervisely,
    via,
    yolo,
)
from segtrain.annotations.draw import Overlap
from segtrain.annotations.place import place_images
from segtrain.annotations.regions import IGNORED, Annotated, Findings, lines, mask_library
from segtrain.data.read.classes import says_no_class
from segtrain.data.read.find import first_lines
from segtrain.data.read.georeference import geo_library
from segtrain.errors import ConfigError, DataError
from segtrain.files import open_regular, os_errors_as, walk
from segtrain.text import counted, first_of, name_problem, printable

MAX_CLASSES = 255  # train ids have 8 bits, and 255 is ignored
BACKGROUND = "background"

_SNIFFED_BYTES = 1 << 16
# By how much, of a diagonal, the corners of a rectangle may be off.
_RECTANGLE = 0.02
# Other files that come with COCO, without outlines of objects or with the same ones once more; and
# Kaggle's example of an answer for the test images.
_OTHER_FILES = ("captions_", "image_info_", "panoptic_", "person_keypoints_", "sample_submission")


class AnnotationFormat(NamedTuple):
    """How files of one format are recognized and read.

    suffixes: of the file names.
    pattern: matches the first and last bytes of each file, joined.
    read: (file, findings) -> its classes in its order, as far as it declares them, and its images;
        ValueError, LookupError or TypeError: no such file. What is wrong with a single region goes
        to the findings.
    overlap: which of two regions its own tool shows.
    others_are_empty: it leaves out images without regions, which are background.
    on_map: regions lie on the map and name no image.
    """

    suffixes: tuple[str, ...]
    pattern: bytes
    read: Callable[[Path, Findings], tuple[list[str], list[Annotated]]]
    overlap: Overlap
    others_are_empty: bool = False
    on_map: bool = False


# The first that matches counts.
FORMATS: dict[str, AnnotationFormat] = {
    "LabelMe": AnnotationFormat((".json",), rb'\s*\{.*"shapes"\s*:\s*\[', labelme.read, "order"),
    "Label Studio": AnnotationFormat(
        (".json",), rb'\s*\[.*"annotations"\s*:\s*\[', label_studio.read, "order"
    ),
    "COCO": AnnotationFormat(
        (".json",), rb'\s*\{(?=.*"images"\s*:).*"(annotations|category_id)"\s*:', coco.read, "area"
    ),
    "Supervisely": AnnotationFormat(
        (".json",),
        rb'\s*\{(?=.*"objects"\s*:\s*\[).*"size"\s*:\s*\{\s*"(height|width)"',
        supervisely.read,
        "order",
    ),
    "VIA": AnnotationFormat(
        (".json",),
        rb'\s*\{(?=.*"filename"\s*:).*"(region_attributes|file_attributes)"\s*:',
        via.read,
        "order",
    ),
    "CVAT": AnnotationFormat((".xml",), rb".*<annotations\b", cvat.read, "order"),
    "GeoJSON": AnnotationFormat(
        (".geojson", ".json"),
        rb'\s*\{.*"type"\s*:\s*"Feature(Collection)?"',
        geojson.read,
        "order",
        on_map=True,
    ),
    "YOLO": AnnotationFormat((".yaml", ".yml"), rb"(.*\n)?names\s*:", yolo.read, "area"),
    "RLE table": AnnotationFormat(
        (".csv",), rb"(?i)[^\r\n]*\bEncodedPixels\b", rle_table.read, "area", others_are_empty=True
    ),
}


class AnnotationSet(NamedTuple):
    """What annotation files say about the images of one folder.

    format: a key of FORMATS.
    classes: their names; the first is the background, which is where no region is.
    images: each with its file, its size, and regions of these classes or IGNORED.
    folder: what the names of the images are relative to.
    overlap: which of two regions the format's own tool shows.
    notes: a line for each thing the user has to know.
    """

    format: str
    classes: Sequence[str]
    images: Sequence[Annotated]
    folder: Path
    overlap: Overlap
    notes: Sequence[str]


def detect(source: Path) -> dict[str, list[Path]]:
    """The annotation files in a folder and below, or the one file, by format in FORMATS.

    Reads the ends of each file only.

    Raises:
        DataError: one of them cannot be read.
    """
    found: dict[str, list[Path]] = {kind: [] for kind in FORMATS}
    with os_errors_as(DataError):
        files = [source]
        if source.resolve(strict=True).is_dir():
            files = [here / name for here, names in walk(source, hidden=False) for name in names]
            files = [file for file in files if not file.name.startswith(_OTHER_FILES)]
        for file in files:
            if kind := _format_of(file):
                found[kind].append(file)
    return {kind: files for kind, files in found.items() if files}


def _format_of(path: Path) -> str | None:
    """The format of an annotation file by its name and its first and last bytes."""
    kinds = [kind for kind, form in FORMATS.items() if path.suffix.lower() in form.suffixes]
    if not kinds:
        return None
    with os_errors_as(DataError, path), open_regular(path) as file:
        text = file.read(_SNIFFED_BYTES)
        file.seek(max(len(text), path.stat().st_size - _SNIFFED_BYTES))
        text = text.removeprefix(b"\xef\xbb\xbf") + file.read(_SNIFFED_BYTES)
    return next((k for k in kinds if re.match(FORMATS[k].pattern, text, re.DOTALL)), None)


def read_annotations(
    sources: Sequence[Path], images: Path | None = None, *, attribute: str | None = None
) -> AnnotationSet:
    """The annotations in these files, or in folders of such files, all of one format.

    images: the folder of the images, which are searched to any depth; None: the folder of the
        first source, and for a folder `annotations` or `ann` the one above it.
    attribute: of VIA and GeoJSON, the one that names the class; None: the only one.

    Raises:
        DataError: no annotation files, or several formats; images that are missing, ambiguous or
            of another size; boxes without outlines; anything else that could train wrong. All of
            it is reported at once.
        ConfigError: what draws them is not installed, or `attribute` is for another format.
    """
    kind, files = _one_format(sources)
    read_file, on_map = FORMATS[kind].read, FORMATS[kind].on_map
    geo_library(sources[0]) if on_map else mask_library()  # missing, it is reported at once
    if attribute is not None:
        if kind not in ("VIA", "GeoJSON"):
            what = "have none; only those of VIA and GeoJSON"
            raise ConfigError(f"--attribute: annotations of {kind} {what}")
        read_file = partial(read_file, attribute=attribute)
    findings = Findings()
    declared: list[str] = []
    read: list[Annotated] = []
    for file in files:
        with findings.refusing(file):
            names, of_file = read_file(file, findings)
            texts = [*names, *(x.name for image in of_file for x in (image, *image.regions))]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("expected text as the names of images and classes")
            declared += names
            read += of_file
    folder = _image_folder(sources[0]) if images is None else images
    with os_errors_as(DataError):
        if on_map:
            placed, unnamed = geojson.place_on_map(read, folder, findings)
        else:
            placed, unnamed = place_images(
                read, folder, findings, others_are_empty=FORMATS[kind].others_are_empty
            )
    classes = _classes(declared, placed, findings)
    if not read and not findings.problems:
        findings.refuse(first_of(sources, 3), "no annotated images in it")
    if findings.problems:
        raise DataError(first_lines(f"{kind} annotations", lines(findings.problems)))
    _note_doubts(placed, unnamed, folder, findings)
    named = [
        image._replace(regions=[r._replace(name=classes[r.name]) for r in image.regions])
        for image in placed
    ]
    names = tuple(name for name in dict.fromkeys(classes.values()) if name != IGNORED)
    notes = lines(findings.notes)
    return AnnotationSet(kind, names, named, folder, FORMATS[kind].overlap, notes)


def _one_format(sources: Sequence[Path]) -> tuple[str, list[Path]]:
    """The format of all `sources`, and their files."""
    found: dict[str, list[Path]] = {}
    for source in sources:
        parts = detect(source)
        if not parts:
            kinds = ", ".join(FORMATS)
            raise DataError(f"{printable(source)}: no annotations of a known format ({kinds})")
        for kind, files in parts.items():
            found.setdefault(kind, []).extend(files)
    if len(found) > 1:
        both = "; ".join(f"{kind}: {first_of(files, 2)}" for kind, files in found.items())
        raise DataError(f"annotations of several formats; name the files of one: {both}")
    ((kind, files),) = found.items()
    return kind, list(dict.fromkeys(files))


def _image_folder(source: Path) -> Path:
    """Where the images of `source` are searched if the user does not say."""
    folder = source if source.is_dir() else source.parent
    # COCO's files lie in a folder `annotations` beside those of the images, Supervisely's in `ann`.
    return folder.parent if folder.name in ("annotations", "ann") else folder


def _classes(
    declared: Iterable[str], images: Iterable[Annotated], findings: Findings
) -> dict[str, str]:
    """The class that each name in the files means: first those declared, then others by name.

    Names that differ in case or blanks only are one class; `void` and its like are IGNORED. The
    background is the first.
    """
    used = {region.name for image in images for region in image.regions}
    first: dict[str, str] = {}
    classes: dict[str, str] = {}
    for name in dict.fromkeys((*declared, *sorted(used))):
        if problem := name_problem(name):
            findings.refuse(f"class {name!r}", problem)
        if says_no_class(name):
            classes[name] = IGNORED
            if name in used:
                findings.note(f"class {name!r}", "ignored, as its name says")
            continue
        classes[name] = first.setdefault(" ".join(name.split()).casefold(), name)
        if classes[name] != name:
            findings.note(f"{name!r} and {classes[name]!r}", "taken as one class")
    background = next((x for x in classes if x.casefold().strip("_") == BACKGROUND), BACKGROUND)
    classes = {background: classes.get(background, background)} | classes
    if (count := len({*classes.values()} - {IGNORED})) > MAX_CLASSES:
        findings.refuse(f"{count} classes", f"at most {MAX_CLASSES} can be trained")
    return classes


def _note_doubts(
    images: Sequence[Annotated], unnamed: int, folder: Path, findings: Findings
) -> None:
    """Notes what is right in some data sets, and in others a mistake."""
    if unnamed:
        what = counted(unnamed, "image is", "images are")
        findings.note(folder, f"{what} not named by any annotation and left out")
    for image in images:
        if not image.regions:
            findings.note(image.name, "no region, so all of it is background")
    polygons = [polygon for image in images for r in image.regions for polygon in r.polygons]
    if polygons and all(map(_is_rectangle, polygons)):
        findings.note("every outline", "is a rectangle; boxes of a detector train wrong")


def _is_rectangle(polygon: np.ndarray) -> bool:
    """Whether diagonals are equal and halve each other; the first corner may be there twice."""
    if len(polygon) not in (4, 5) or (len(polygon) == 5 and (polygon[0] != polygon[4]).any()):
        return False
    a, b, c, d = polygon[:4]
    one, other = np.linalg.norm(a - c), np.linalg.norm(b - d)
    apart = max(abs(one - other), np.linalg.norm(a + c - b - d))
    return apart <= _RECTANGLE * max(one, other)
