"""Annotation files of all formats, found in a folder and read into one form.

To add a format, write a module with a `read` as in `coco`, and enter it in `FORMATS`.
"""

import mmap
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np

from segtrain.data.read.classes import says_no_class
from segtrain.data.read.find import first_lines
from segtrain.data.read.georeference import geo_library
from segtrain.desk.annotations import (
    coco,
    cvat,
    geojson,
    label_studio,
    labelme,
    qupath,
    rle_table,
    supervisely,
    via,
    yolo,
)
from segtrain.desk.annotations.draw import Overlap
from segtrain.desk.annotations.place import place_images
from segtrain.desk.annotations.regions import IGNORED, Annotated, Findings, lines, mask_library
from segtrain.errors import ConfigError, DataError, refuse_unused
from segtrain.files import open_regular, os_errors_as, walk
from segtrain.text import counted, first_of, name_problem, printable

MAX_CLASSES = 255  # train ids have 8 bits, and 255 is ignored
BACKGROUND = "background"

_SNIFFED_BYTES = 1 << 16
_MARK = b"\xef\xbb\xbf"
# COCO's files lie in a folder `annotations` beside those of the images, Supervisely's in `ann`.
_BESIDE_IMAGES = {"annotations", "ann"}
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
        rb'\s*[\[{].*"type"\s*:\s*"Feature(Collection)?"',
        geojson.read,
        "order",
        on_map=True,
    ),
    # It is found as GeoJSON; `qupath.are_in_pixels` tells.
    "QuPath": AnnotationFormat((), b"", qupath.read, "area"),
    "YOLO": AnnotationFormat((".yaml", ".yml"), rb"(.*\n)?names\s*:", yolo.read, "area"),
    "RLE table": AnnotationFormat(
        (".csv",),
        rb"(?i)[^\r\n]*\b(EncodedPixels|rle)\b",
        rle_table.read,
        "area",
        others_are_empty=True,
    ),
}


class AnnotationSet(NamedTuple):
    """What annotation files say about the images of one folder.

    format: a key of FORMATS, or several.
    classes: their names; the first is the background, which is where no region is.
    images: each with its file, its size, and regions of these classes or IGNORED.
    folder: what the names of the images are relative to.
    overlap: which of two regions the format's own tool shows; None: those of several differ.
    notes: a line for each thing the user has to know.
    on_map: regions lie on the map.
    """

    format: str
    classes: Sequence[str]
    images: Sequence[Annotated]
    folder: Path
    overlap: Overlap | None
    notes: Sequence[str]
    on_map: bool = False

    @property
    def is_one_format(self) -> bool:
        """Whether all files are of one."""
        return self.format in FORMATS


def detect(source: Path) -> dict[str, list[Path]]:
    """The annotation files in a folder and below, or the one file, by format in FORMATS.

    Reads the ends of each file only.

    Raises:
        DataError: one of them cannot be read.
    """
    by_format: dict[str, list[Path]] = {kind: [] for kind in FORMATS}
    with os_errors_as(DataError):
        files = [source]
        if source.resolve(strict=True).is_dir():
            files = [here / name for here, names in walk(source, hidden=False) for name in names]
            files = [file for file in files if not file.name.startswith(_OTHER_FILES)]
        for file in files:
            if kind := _format_of(file):
                by_format[kind].append(file)
    return {kind: files for kind, files in by_format.items() if files}


def roi_files(files: Iterable[Path]) -> list[Path]:
    """Those that hold ROIs of ImageJ, .roi or a .zip of such, which are not read."""
    found = []
    for file in files:
        names = [file.name]
        if file.suffix.lower() == ".zip":
            with suppress(BadZipFile, OSError), ZipFile(file) as archive:
                names = archive.namelist()
        found += [file] if names and all(name.lower().endswith(".roi") for name in names) else []
    return found


def _format_of(path: Path) -> str | None:
    """The format of an annotation file by its name and its first and last bytes."""
    suffix = path.suffix.lower()
    kinds = [kind for kind, form in FORMATS.items() if suffix in form.suffixes]
    if not kinds:
        return None
    with os_errors_as(DataError, path), open_regular(path) as file:
        # Both ends: some tools write the key that tells the format last.
        text = file.read(_SNIFFED_BYTES)
        file.seek(max(len(text), path.stat().st_size - _SNIFFED_BYTES))
        # Some editors begin UTF-8 with a mark.
        start = len(_MARK) if text.startswith(_MARK) else 0
        kind = _first_match(kinds, text + file.read(_SNIFFED_BYTES), start)
        if kind is None and path.stat().st_size > 2 * _SNIFFED_BYTES:
            # Others write it in the middle, as COCO's images between annotations and categories.
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                kind = _first_match(kinds, whole, start)
    return kind


def _first_match(kinds: Sequence[str], text: bytes | mmap.mmap, start: int) -> str | None:
    patterns = ((kind, re.compile(FORMATS[kind].pattern, re.DOTALL)) for kind in kinds)
    return next((kind for kind, pattern in patterns if pattern.match(text, start)), None)


def read_annotations(
    sources: Sequence[Path],
    images: Path | None = None,
    *,
    attribute: str | None = None,
    names: Sequence[str] | None = None,
    others_are_empty: bool = False,
) -> AnnotationSet:
    """The annotations in these files, or in folders of such files, each source of one format.

    images: the folder of the images, which are searched to any depth; None: the folder of the
        sources, and for a folder `annotations` or `ann` the one above it.
    attribute: of VIA and GeoJSON, the one that names the class; None: the only one.
    names: the classes in the order of their ids; None: those declared, then others by name.
    others_are_empty: images beside an annotated one, of its suffix, are background if none is.

    Raises:
        DataError: no annotation files, or several formats; images that are missing, ambiguous or
            of another size; boxes without outlines; anything else that could train wrong. All of
            it is reported at once.
        ConfigError: what draws them is not installed, `attribute` is for another format, or `names`
            leaves out a class.
    """
    sources = _comparable(sources) if images is None else sources
    by_kind = _files_by_format(sources)
    folder = _image_folder(sources) if images is None else images
    with os_errors_as(DataError):
        if "GeoJSON" in by_kind and qupath.are_in_pixels(by_kind["GeoJSON"], folder):
            by_kind = {"QuPath": by_kind["GeoJSON"]}
    formats = [FORMATS[kind] for kind in by_kind]
    kinds = " and ".join(by_kind)
    on_map = formats[0].on_map
    # A package that is missing is reported at once.
    if on_map:
        geo_library(sources[0])
    else:
        mask_library()
    if not {"VIA", "GeoJSON"} & by_kind.keys():
        refuse_unused({"attribute": attribute}, "attribute", f"annotations of {kinds}")
    if on_map:
        refuse_unused({"missing": others_are_empty or None}, "missing", f"annotations of {kinds}")
    findings = Findings()
    declared, read = _read_files(by_kind, attribute, findings)
    with os_errors_as(DataError):
        if on_map:
            placed, unnamed = geojson.place_on_map(read, folder, findings)
        else:
            are_empty = others_are_empty or formats[0].others_are_empty
            placed, unnamed = place_images(read, folder, findings, others_are_empty=are_empty)
    # After images are placed: only classes of regions that are left are used.
    classes = _classes(declared, placed, findings, names or ())
    if not read and not findings.problems:
        findings.refuse(first_of(sources, 3), "no annotated images in it")
    if findings.problems:
        raise DataError(first_lines(f"{kinds} annotations", lines(findings.problems)))
    _note_doubts(placed, unnamed, folder, findings)
    named = [
        image._replace(regions=[r._replace(name=classes[r.name]) for r in image.regions])
        for image in placed
    ]
    class_names = tuple(name for name in dict.fromkeys(classes.values()) if name != IGNORED)
    if names is not None:
        class_names = _in_order(names, class_names, named)
    overlaps = {form.overlap for form in formats}
    overlap = overlaps.pop() if len(overlaps) == 1 else None
    return AnnotationSet(kinds, class_names, named, folder, overlap, lines(findings.notes), on_map)


def _files_by_format(sources: Sequence[Path]) -> dict[str, list[Path]]:
    """The files of `sources`; several formats if they can stand beside each other."""
    by_kind: dict[str, list[Path]] = {}
    for source in sources:
        parts = detect(source)
        if not parts:
            kinds = ", ".join(FORMATS)
            raise DataError(f"{printable(source)}: no annotations of a known format ({kinds})")
        if len(parts) > 1:  # of the same images, as a tool exports them
            both = "; ".join(f"{kind}: {first_of(files, 2)}" for kind, files in parts.items())
            raise DataError(f"annotations of several formats; name the files of one: {both}")
        for kind, files in parts.items():
            by_kind[kind] = list(dict.fromkeys([*by_kind.get(kind, []), *files]))
    # These say something of images that they do not name, which another format may name.
    alone = [kind for kind in by_kind if FORMATS[kind].on_map or FORMATS[kind].others_are_empty]
    if alone and len(by_kind) > 1:
        raise DataError(f"annotations of {' and '.join(by_kind)}; import those of {alone[0]} alone")
    return by_kind


def _read_files(
    by_kind: dict[str, list[Path]], attribute: str | None, findings: Findings
) -> tuple[list[str], list[Annotated]]:
    """The classes that all files declare, and their images."""
    declared: list[str] = []
    read: list[Annotated] = []
    for kind, file in ((kind, file) for kind, files in by_kind.items() for file in files):
        options = {"attribute": attribute} if kind in ("VIA", "GeoJSON") else {}
        with findings.refusing(file):
            names, of_file = FORMATS[kind].read(file, findings, **options)
            texts = [*names, *(x.name for image in of_file for x in (image, *image.regions))]
            # Files of strangers may hold numbers or null in the place of names.
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("expected text as the names of images and classes")
            declared += names
            read += of_file
    return declared, read


def _comparable(sources: Sequence[Path]) -> list[Path]:
    """The sources as absolute paths, where only these can be compared.

    `.` does not end with the name of its folder, and no folder is above a relative path and an
    absolute one.
    """
    folders = [source if source.is_dir() else source.parent for source in sources]
    hidden = (Path(os.path.abspath(x)).name for x in folders if x.name in ("", ".."))
    if len({x.is_absolute() for x in sources}) == 1 and _BESIDE_IMAGES.isdisjoint(hidden):
        return list(sources)
    return [Path(os.path.abspath(source)) for source in sources]


def _image_folder(sources: Sequence[Path]) -> Path:
    """Where the images of `sources` are searched if the user does not say: above all of them."""
    folders = [source if source.is_dir() else source.parent for source in sources]
    folders = [x.parent if x.name in _BESIDE_IMAGES else x for x in folders]
    return folders[0] if len({*folders}) == 1 else Path(os.path.commonpath(folders))


def _key(name: str) -> str:
    """What names of one class have in common; `_background_`, as LabelMe has it, is the background.

    >>> _key("Traffic  light"), _key(" _Background_ ")
    ('traffic light', 'background')
    """
    key = " ".join(name.split()).casefold()
    return BACKGROUND if key.strip("_") == BACKGROUND else key


def _classes(
    declared: Iterable[str],
    images: Iterable[Annotated],
    findings: Findings,
    first_names: Sequence[str],
) -> dict[str, str]:
    """The class that each name in the files means: first those declared, then others by name.

    Before all stand `first_names`.

    Names that differ in case or blanks only are one class; `void` and its like are IGNORED. The
    background is the first.
    """
    used = {region.name for image in images for region in image.regions}
    first: dict[str, str] = {}  # the first name of each `_key`
    classes: dict[str, str] = {}  # the class of each name
    for name in dict.fromkeys((*first_names, *declared, *sorted(used))):
        if problem := name_problem(name):
            findings.refuse(f"class {name!r}", problem)
        if says_no_class(name):
            classes[name] = IGNORED
            if name in used:
                findings.note(f"class {name!r}", "ignored, as its name says")
            continue
        classes[name] = first.setdefault(_key(name), name)
        if classes[name] != name:
            findings.note(f"{name!r} and {classes[name]!r}", "taken as one class")
    background = next((name for name in classes if _key(name) == BACKGROUND), BACKGROUND)
    classes = {background: classes.get(background, background)} | classes
    kept = {*classes.values()} - {IGNORED}
    # What --names leaves out is no class, or is refused later.
    count = len(kept.intersection((*first_names, classes[background])) if first_names else kept)
    if count > MAX_CLASSES:
        findings.refuse(f"{count} classes", f"at most {MAX_CLASSES} can be trained")
    return classes


def _in_order(
    names: Sequence[str], found: Sequence[str], images: Iterable[Annotated]
) -> tuple[str, ...]:
    """The classes as --names orders them; the background is the first.

    ConfigError: another class has regions.
    """
    if found[0] in names[1:]:
        raise ConfigError(f"--names {','.join(names)}: {found[0]} has the id 0; name it first")
    kept = tuple(name for name in found if name in names or name == found[0])
    used = {region.name for image in images for region in image.regions} - {IGNORED}
    if left_out := sorted(used.difference(kept)):
        what = f"annotations show {first_of(left_out)}, too"
        raise ConfigError(f"--names {','.join(names)}: {what}; name all classes")
    return kept


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
    # Boxes are exported as polygons, too.
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
