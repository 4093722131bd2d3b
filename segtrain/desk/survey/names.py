"""Names, values and colours of classes from the files that annotation tools leave beside images.

Text: a name a line (classes.txt), CVAT's labelmap.txt, tables with a header (class_dict.csv,
Roboflow's _classes.csv) or without one (CamVid's label_colors.txt). YAML: `names` of YOLO's
data.yaml, or a class file of segtrain. JSON: nnU-Net's dataset.json, COCO's and Label Studio's
categories, Mapillary's config, Supervisely's meta, Labelbox' ontology, id2label of Hugging Face.
Lines of JSON: a manifest of SageMaker Ground Truth.
"""

import codecs
import csv
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from segtrain.config.strict_yaml import foreign_yaml
from segtrain.desk.survey.class_entries import (
    A_FILE,
    MAX_CLASSES,
    NamedClass,
    color_of,
    of_entries,
    of_json,
    of_mapping,
    of_maps,
)
from segtrain.files import parse_json, read_bytes

_MAX_BYTES = 4 << 20
_OF_WINDOWS = "cp1252"
_NO_TRAIN_ID = 255
# Ends of names, without signs between their words: `Class-Names.txt`.
_SURE = (
    *("classes", "classnames", "classname", "classlist", "classdict", "classmap", "categories"),
    *("labelnames", "labellist", "labelmap", "id2label", "colormap", "palette", "legend"),
    "ontology",
)
# As whole names.
_LISTS = ("class", "category", "label", "labels", "names", "obj", "codes")
_ABOUT_CLASSES = re.compile(r"class|label|categor|palette|colou?r|legend|ontolog|codes?$")
_STATISTICS = re.compile(r"weight|count|stat|freq|histogram|distribution")
_OTHER_JSON = ("meta", "dataset", "config", "info", "notes", "configv12", "configv20")


class Legend(NamedTuple):
    """The classes that one file names, in its order. source: that file, relative."""

    source: str
    classes: tuple[NamedClass, ...]

    @property
    def has_values(self) -> bool:
        """Whether the file gives the values in labels."""
        return all(entry.value is not None for entry in self.classes)

    @property
    def has_colors(self) -> bool:
        """Whether the file gives a colour of its own to each class; void and such may share one."""
        # Void classes may share a colour with each other, but not with a class that is trained.
        kept = {entry.color for entry in self.classes if entry.means_no_class}
        kept = [*kept, *(entry.color for entry in self.classes if not entry.means_no_class)]
        return None not in kept and len(set(kept)) == len(kept)

    def by_train_ids(self) -> "Legend | None":
        """The classes with their train ids as values; None: the file has none, or the same."""
        known: dict[int, NamedClass] = {}
        for entry in self.classes:
            if entry.train_id is not None and 0 <= entry.train_id < _NO_TRAIN_ID:
                known.setdefault(entry.train_id, entry._replace(value=entry.train_id))
        if all(known.get(entry.train_id, entry).value == entry.value for entry in self.classes):
            return None
        return Legend(f"{self.source} (train ids)", tuple(known[i] for i in sorted(known)))


def read_legend(path: Path, source: str) -> Legend | None:
    """The classes in a file; None if it does not look like a list of classes.

    source: the name under which it is reported.
    """
    parse = _parser(_plain(path.stem), path.suffix.lower())
    try:
        content = read_bytes(path, _MAX_BYTES) if parse else b""
        classes = list(parse(decoded(content))) if parse else []
    except (OSError, ValueError, RecursionError, KeyError, csv.Error):
        return None
    # A guess, since any bytes can be read so: it is named beside the file.
    if _encoding(content) == _OF_WINDOWS:
        source = f"{source} (not UTF-8: read as Windows-1252)"
    names = [entry.name for entry in classes]
    fits = 1 <= len(names) <= MAX_CLASSES and all(names) and len(set(names)) == len(names)
    return Legend(source, tuple(classes)) if fits else None


def is_called_legend(path: str) -> bool:
    """Whether a file of this name should be a list of classes."""
    name = PurePath(path.lower())
    stem, is_text = _plain(name.stem), name.suffix in (".txt", ".names")
    return stem.endswith(_SURE) or (is_text and stem in _LISTS)


def _plain(stem: str) -> str:
    return re.sub(r"[^a-z0-9]", "", stem.lower())


def decoded(content: bytes) -> str:
    """The text of UTF-8, UTF-16 with a mark, or what Excel writes in western Europe.

    ValueError: it is none of them.
    """
    text = content.decode(_encoding(content))
    if "\0" in text:
        raise ValueError("UTF-16 without a mark, or no text")
    return text


def _encoding(content: bytes) -> str:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return _OF_WINDOWS
    return "utf-8-sig"


def _parser(stem: str, suffix: str) -> Callable[[str], Iterable[NamedClass]] | None:
    """What reads a file of this name; None: it is no list of classes. stem: as of `_plain`."""
    is_list, is_about = stem.endswith(_SURE) or stem in _LISTS, _ABOUT_CLASSES.search(stem)
    if _STATISTICS.search(stem):
        return None
    if suffix in (".txt", ".names") and is_list:
        return lambda text: _labelmap(text) or _colored_lines(text) or _table(text) or _lines(text)
    if suffix == ".txt" and is_about:
        return lambda text: _colored_lines(text) or _table(text)
    if suffix in (".csv", ".tsv") and (is_list or is_about):
        return partial(_rows, is_list=is_list)
    if suffix in (".yaml", ".yml"):
        return partial(_yaml, is_list=is_list)
    if suffix == ".manifest":
        return _ground_truth
    # Only names that are about classes: annotations and settings are JSON, too.
    if suffix == ".json" and is_about:
        return lambda text: of_json(parse_json(text)) or of_mapping(parse_json(text))
    if suffix == ".json" and stem in _OTHER_JSON:
        return lambda text: of_json(parse_json(text))
    return None


def _lines(text: str) -> list[NamedClass]:
    """`road`, `0 road`, `0: road` or `road 0` a line; `lane 1` and `lane 2` are names."""
    lines = [line for x in text.splitlines() if (line := x.strip()) and line[0] != "#"]
    if any(map(A_FILE.search, lines)):
        return []
    # Numbers alone, as of colours or boxes, are no names.
    if any(not line.strip(f"{_DIGITS}{_SEPARATORS}.") and not line.isdigit() for line in lines):
        return []
    # LabelMe counts from -1, which is 255 in a PNG.
    if lines[:2] == ["__ignore__", "_background_"]:
        return [NamedClass(line, (i - 1) % 256) for i, line in enumerate(lines)]
    classes = []
    for line in lines:
        name, (value,) = _numbers_before(line, 1) or _numbers_behind(line, 1) or (line, [None])
        classes.append(NamedClass(name, value))
    # If only some have a number, or names repeat without it, it is a part of the name.
    is_mixed = len({entry.value is None for entry in classes}) > 1
    is_unique = len({entry.name for entry in classes}) == len(classes)
    return classes if is_unique and not is_mixed else [NamedClass(line) for line in lines]


def _rows(text: str, *, is_list: bool) -> list[NamedClass]:
    """A table with colours, or with a header; without either a name a line, perhaps with a value.

    is_list: whether the file is called a list of classes; else there must be values or colours,
        because statistics have names, too.
    """
    if found := _colored_lines(text) or _table(text):
        has_more = all(entry.color or entry.value is not None for entry in found)
        return found if is_list or has_more else []
    found = _lines(text) if is_list else []
    has_values = all(entry.value is not None for entry in found)
    return found if has_values or not re.search("[,;\t]", text) else []


def _labelmap(text: str) -> list[NamedClass]:
    """CVAT: `# label:color_rgb:parts:actions`, then `road:128,64,128::`; else nothing."""
    lines = [line for x in text.splitlines() if (line := x.strip()) and line[0] != "#"]
    parts = [line.split(":", 3) for line in lines]
    if not all(len(part) == 4 for part in parts):
        return []
    return [NamedClass(name.strip(), None, color_of(color)) for name, color, *_ in parts]


def _colored_lines(text: str) -> list[NamedClass]:
    """`64 128 64 Animal`, `Animal,64,128,64` or `0 Animal 64 128 64` in each line; else nothing."""
    classes = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if before := _numbers_before(line, 3):
            classes.append(NamedClass(before[0], None, color_of(before[1])))
        elif after := _numbers_behind(line, 3):
            name, (value,) = _numbers_before(after[0], 1) or (after[0], [None])
            classes.append(NamedClass(name, value, color_of(after[1])))
        elif not line.startswith("#"):
            return []
    return classes if all(entry.color for entry in classes) else []


# By strip and not by regular expressions, which need the square or the cube of a line's length.
_DIGITS, _SEPARATORS = "0123456789", " \t,;:"


def _numbers_before(line: str, count: int) -> tuple[str, list[int]] | None:
    """`7, 8 lane` with count 2: ("lane", [7, 8]); None: it does not begin so."""
    numbers = []
    for _ in range(count):
        behind = line.lstrip(_DIGITS)
        rest = behind.lstrip(_SEPARATORS)
        if behind in (line, rest):
            return None
        numbers.append(int(line[: len(line) - len(behind)]))
        line = rest
    return None if line[:1].isdigit() else (line, numbers)


def _numbers_behind(line: str, count: int) -> tuple[str, list[int]] | None:
    """`lane 7, 8` with count 2: ("lane", [7, 8]); None: it does not end so."""
    numbers = []
    for _ in range(count):
        before = line.rstrip(_DIGITS)
        rest = before.rstrip(_SEPARATORS)
        if before in (line, rest) or not rest:
            return None
        numbers.insert(0, int(line[len(before) :]))
        line = rest
    return line, numbers


def _table(text: str) -> list[NamedClass]:
    """A table with a header: a name, and a value or three colours; nothing if it is of files."""
    entries = []
    lines = text.splitlines()
    if any(map(A_FILE.search, lines)):
        return []
    # Excel writes semicolons where the comma is the decimal sign.
    delimiter = max(",;\t", key="".join(lines[:1]).count)
    for row in csv.DictReader(lines, restval="", delimiter=delimiter):
        cells = {str(key).strip().lower(): str(cell).strip() for key, cell in row.items()}
        entry: dict[str, Any] = {k: int(x) if x.isdigit() else x for k, x in cells.items()}
        rgb = [entry.get(name[0], entry.get(name)) for name in ("red", "green", "blue")]
        entry.setdefault("code", next((x for k, x in entry.items() if k.endswith("_code")), ""))
        entries.append(entry if None in rgb else entry | {"color": rgb})
    return of_entries(entries)


def _ground_truth(text: str) -> list[NamedClass]:
    """The colours of classes in each line, which says those of its own label."""
    colors = {}
    for entry in map(parse_json, text.splitlines()):
        for part in entry.values() if isinstance(entry, dict) else ():
            shown = part.get("internal-color-map") if isinstance(part, dict) else None
            for one in shown.values() if isinstance(shown, dict) else ():
                colors |= {one["class-name"]: one["hex-color"]} if isinstance(one, dict) else {}
    return of_entries([{"name": name, "color": color} for name, color in colors.items()])


def _yaml(text: str, *, is_list: bool) -> list[NamedClass]:
    content = foreign_yaml(text)
    if is_list:
        return of_maps(content) or of_json(content) or of_mapping(content)
    # Configs of many programs are YAML, and have lists of other things.
    known = {"names", "classes"} & content.keys() if isinstance(content, dict) else ()
    return of_json({key: content[key] for key in known})
