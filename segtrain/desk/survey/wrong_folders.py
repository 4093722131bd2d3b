"""Folders that are not made for semantic segmentation: what they hold instead, and what helps."""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np

from segtrain.desk.survey import contents, reasons
from segtrain.desk.survey.contents import spread
from segtrain.desk.survey.file_names import ROLE_WORDS, split_of, words_of
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.survey import Survey
from segtrain.errors import DataError
from segtrain.text import counted, first_of

NOT_READ = "not read: "
_SNIFFED_BYTES = 1 << 16
# Files that are opened of each suffix.
_OPENED = 3
# A smooth picture has so many values at least, and steps of at most this part of their range.
_SMOOTH_VALUES, _STEP, _SMOOTH = 20, 0.04, 0.8
_PER_FOLDER = 3
_UNPAIRED = reasons.WITHOUT_IMAGE, reasons.OF_SEVERAL_IMAGES

_COCO = "export masks as PNG, or outlines as COCO, and segtrain data import reads them"
_BOXES = f"boxes are no masks: outline the objects (CVAT, Label Studio), {_COCO}"
_AS_PNG = "save the label of each image as PNG of ids, with the name of the image"
# Words of folders or names, and what such pictures show.
_PICTURES = {
    **dict.fromkeys(("depth", "depths"), "depth maps"),
    **dict.fromkeys(("disp", "disparity"), "disparity maps"),
    **dict.fromkeys(("normal", "normals"), "surface normals"),
    **dict.fromkeys(("heatmap", "heatmaps"), "heat maps"),
    "flow": "optical flow",
    "saliency": "saliency maps",
}
# Of each suffix: what such files are, and what would help. Of others the content tells.
_FORMATS = {
    ".mat": ("data of MATLAB", _AS_PNG),
    ".h5": ("data of HDF5", _AS_PNG),
    ".hdf5": ("data of HDF5", _AS_PNG),
    ".pkl": ("data of Python's pickle", _AS_PNG),
    ".parquet": ("tables of Parquet", _AS_PNG),
    ".tfrecord": ("records of TensorFlow", _AS_PNG),
    ".psd": ("layers of Photoshop", _AS_PNG),
    ".xcf": ("layers of GIMP", _AS_PNG),
    ".svg": ("outlines of SVG", "draw them as PNG of ids, with the name of the image"),
    ".roi": ("ROIs of ImageJ", "make masks of them (ROI Manager, Labels) and save these as PNG"),
    ".flo": ("optical flow", "segmentation needs the class of each pixel"),
    ".pfm": ("depth or disparity maps", "segmentation needs the class of each pixel"),
    ".exr": ("pictures of OpenEXR, such as depth", _AS_PNG),
    ".shp": ("outlines of a Shapefile", "save them as GeoJSON: ogr2ogr labels.geojson FILE.shp"),
    ".gpkg": ("outlines of a GeoPackage", "save them as GeoJSON: ogr2ogr labels.geojson FILE"),
    ".kml": ("outlines of KML", "save them as GeoJSON: ogr2ogr labels.geojson FILE.kml"),
    ".ndjson": ("annotations of Labelbox", _COCO),
}
_JSON = {  # text that only files of this tool hold
    rb'"data_row"': "annotations of Labelbox",
    rb'"instances"\s*:(?s:.*)"metadata"|"metadata"\s*:(?s:.*)"instances"\s*:': (
        "annotations of SuperAnnotate"
    ),
    rb'"item"\s*:(?s:.*)"annotations"\s*:': "annotations of V7 Darwin",
    rb'"(box2d|poly2d)"\s*:': "annotations of BDD100K (Scalabel)",
}
# A class, and sides or points as parts of the image; rounding leaves some a little outside.
_POINTS = rb"\d{1,3}(\s+(-?[01]?\.\d+|[01]\.?|-?\d(\.\d+)?e-\d+))"
_MATRIX = rb"\s*(-?\d+[\s,;]+){7,}-?\d+[\s,;]*"


def checked(survey: Survey, wanted: str | None = None) -> Survey:
    """The survey without smooth pictures, such as depth, and with notes of what is not read.

    wanted: labels that the user has named are kept, whatever they show.

    Raises:
        DataError: there are no labels for segmentation: what there is, and what would help.
    """
    candidates = survey.sets if wanted is None else ()
    smooth = [labels for labels in candidates if _is_smooth(survey.root, labels)]
    sets = tuple(labels for labels in survey.sets if labels not in smooth)
    # Labels whose names fit no image are said elsewhere.
    if not (sets or survey.annotations or any(survey.left_out.get(x) for x in _UNPAIRED)):
        _refuse_other_task(survey, smooth)
    notes = [f"{_shown_by(smooth)}, not used"] if smooth else []
    notes += _of_objects(survey) if not sets else []
    labelled = {path for labels in sets for path in labels.labels}
    is_lacking = any(x.path not in labelled and x.split != "test" for x in survey.images)
    # Outlines that are read are the labels of the others.
    if is_lacking and not survey.annotations:
        notes += [f"{NOT_READ}{line}"] if (line := _of_files(survey)) else []
    files = [x for labels in smooth for of_image in labels.labels.values() for x in of_image]
    left_out = {**survey.left_out, **({reasons.SMOOTH: files} if files else {})}
    return replace(survey, sets=sets, notes=(*survey.notes, *notes), left_out=left_out)


def _refuse_other_task(survey: Survey, smooth: list[LabelSet]) -> None:
    """As `checked`, where there are no sets but these, nor annotations that are read."""
    lines = [_of_files(survey), _of_pictures(survey), _of_classes(survey)]
    if smooth:
        option = f"--labels {shlex.quote(smooth[0].pattern)} takes them as they are"
        lines.insert(0, f"{_shown_by(smooth)}; {_AS_PNG}; {option}")
    if line := next(filter(None, lines), ""):
        images = counted(len(survey.images), "image", "images")
        first = f"{survey.root}: {images}, and no labels for segmentation: {line}"
        raise DataError("\n  ".join([first, *survey.notes]))


def _shown_by(smooth: list[LabelSet]) -> str:
    patterns = first_of(labels.pattern for labels in smooth)
    return f"{patterns}: {_meaning(patterns) or 'smooth pictures, such as depth or heat maps'}"


def _is_smooth(folder: Path, labels: LabelSet) -> bool:
    """Whether values of neighbours differ by little, as those of classes do not."""
    if len(labels.values) < _SMOOTH_VALUES or labels.classes:
        return False
    small, steps = 0, 0
    for files in spread(list(labels.labels.values()), _OPENED):
        with suppress(DataError):
            stored = contents.read_label_part(folder / files[0])[..., :3].astype(np.int32)
            limit = max(1, _STEP * int(np.ptp(stored)))
            for axis in (0, 1):
                step = np.abs(np.diff(stored, axis=axis)).max(axis=2)
                small += np.count_nonzero((step > 0) & (step <= limit))
                steps += np.count_nonzero(step)
    return small > _SMOOTH * steps > 0


def _of_objects(survey: Survey) -> list[str]:
    """A note on labels that go on from the names of images by numbers: 0001_04_01.png."""
    images = {PurePosixPath(image.path).stem for image in survey.images}
    alone = survey.left_out.get(reasons.WITHOUT_IMAGE, ())
    begins = [re.sub(r"([_\-. ]\d+)+$", "", PurePosixPath(label).stem) for label in alone]
    found = Counter(begin for begin in begins if begin in images)
    if 2 * found.total() <= len(alone) or max(found.values()) < 2:
        return []
    label, begin = next(x for x in zip(alone, begins, strict=True) if x[1] in images)
    what = f"{label}: perhaps a file for each object: masks of one class are read from a folder "
    what += f"for each image (masks/{begin}/1.png); lay those of several classes together, in "
    return [f"{what}one PNG of ids of the image's name (numpy.maximum)"]


# Files that are no pictures


def _of_files(survey: Survey) -> str:
    """The kind of most files that can be named, with an example, and what would help."""
    by_suffix: dict[str, list[str]] = {}
    read = (x for files in survey.annotations.values() for x in files)
    known = {*survey.tables, *survey.lists, *(x.relative_to(survey.root).as_posix() for x in read)}
    for path in survey.others:
        if path not in known:
            by_suffix.setdefault(PurePosixPath(path).suffix.lower(), []).append(path)
    kinds = []
    for suffix, paths in by_suffix.items():
        known = (*_FORMATS[suffix], paths[0]) if suffix in _FORMATS else None
        if named := known or _named(survey.root, suffix, paths):
            kinds.append((len(paths), named))
    if not kinds:
        return ""
    number, (what, repair, example) = max(kinds)
    return f"{counted(number, 'file', 'files')} with {what} ({example}); {repair}"


def _named(folder: Path, suffix: str, paths: list[str]) -> tuple[str, str, str] | None:
    """What files of a suffix that many formats share are, and one of them; None: nobody knows."""
    tell = _TELLERS.get(suffix)
    for path in spread(paths, _OPENED) if tell else ():
        with suppress(OSError), open(folder / path, "rb") as file:
            if found := tell(file.read(_SNIFFED_BYTES)):
                return *found, path
    return None


def _of_xml(text: bytes) -> tuple[str, str] | None:
    if b"<bndbox" in text and b"<polygon" not in text:
        return "boxes of Pascal VOC", _BOXES
    root = re.search(rb"<([A-Za-z_][\w.:-]*)", re.sub(rb"(?s)<[?!].*?>", b"", text))
    return (f"XML of an unknown tool (<{root[1].decode()}>)", _COCO) if root else None


def _of_text(text: bytes) -> tuple[str, str] | None:
    lines = [line for line in text.splitlines() if line.strip()][:20]
    are_parts = any(b"." in line for line in lines)  # 0 and 1 alone are none
    if are_parts and all(re.fullmatch(_POINTS + rb"{4,5}\s*", line) for line in lines):
        return "boxes of YOLO", _BOXES
    if are_parts and all(re.fullmatch(_POINTS + rb"{6,}\s*", line) for line in lines):
        return "outlines of YOLO", "add its data.yaml, or one with `names: [first, second]`"
    if lines and all(re.fullmatch(_MATRIX, line) for line in lines):
        return "matrices of integers as text", f"numpy.loadtxt reads them: {_AS_PNG}, 255 for -1"
    return None


def _of_json(text: bytes) -> tuple[str, str] | None:
    kinds = (what for pattern, what in _JSON.items() if re.search(pattern, text))
    if what := next(kinds, None):
        return what, _COCO
    if re.search(rb'"(bbox|bndbox|boxes)"\s*:', text):
        return "boxes in JSON", _BOXES
    if re.search(rb'"(points|polygons?|segmentation|shapes|regions|annotations?)"\s*:', text):
        return "annotations of an unknown tool in JSON", _COCO
    return None


def _of_table(text: bytes) -> tuple[str, str] | None:
    header = {
        x.strip().strip('"').lower() for x in text.split(b"\n")[0].decode("latin-1").split(",")
    }
    if {"xmin", "ymin"} <= header or {"x_min", "y_min"} <= header or "bbox" in header:
        return "boxes in a table", _BOXES
    return None


_TELLERS: Mapping[str, Callable[[bytes], tuple[str, str] | None]] = {
    ".xml": _of_xml,
    ".txt": _of_text,
    ".json": _of_json,
    ".jsonl": _of_json,
    ".csv": _of_table,
}


# Pictures


def _meaning(pattern: str) -> str:
    """What pictures show of which a folder or the name has such a word; empty: no such word."""
    return next((_PICTURES[x] for x in words_of(pattern) if x in _PICTURES), "")


def _of_pictures(survey: Survey) -> str:
    """Depth and its like, as the names of pictures say it."""
    shown = {PurePosixPath(path).parent.as_posix(): path for path in survey.pictures}
    for folder, example in shown.items():
        if what := _meaning(folder):
            return f"{folder}/ holds {what} ({example}), and no classes; {_AS_PNG}"
    return ""


def _of_classes(survey: Survey) -> str:
    """Folders of whole pictures, named by what they show: cat/ and dog/."""
    names = Counter(PurePosixPath(image.path).parent.name for image in survey.images)
    known = {x for x in names if any(split_of(w) or w in ROLE_WORDS for w in words_of(x))}
    are_words = all(re.fullmatch(r"\D+", name) for name in names)
    if known or len(names) < 2 or not are_words or min(names.values()) < _PER_FOLDER:
        return ""
    return (
        f"folders of whole pictures ({first_of(names, 5)}), as for classification; segmentation "
        f"needs the class of each pixel: outline the objects, {_COCO}"
    )
