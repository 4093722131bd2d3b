"""Names, values and colours of classes from the files that annotation tools leave beside images.

Text: a name a line (classes.txt), CVAT's labelmap.txt, tables with a header (class_dict.csv,
Roboflow's _classes.csv) or of colours without one (CamVid's label_colors.txt). YAML: `names` of
YOLO's data.yaml, or a class file of segtrain. JSON: nnU-Net's dataset.json, COCO's and Label
Studio's categories, Mapillary's config, Supervisely's meta.
"""

import codecs
import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from segtrain.config.strict_yaml import foreign_yaml
from segtrain.data.read.classes import says_no_class
from segtrain.files import parse_json, read_bytes

Color = tuple[int, int, int]

_MAX_BYTES = 4 << 20
_OF_WINDOWS = "cp1252"
_MAX_CLASSES = 4096
_NO_TRAIN_ID = 255
_LISTS = ("classes", "class_names", "labels", "label_names", "names", "obj", "categories", "codes")
_TABLES = ("class_dict", "_classes", "classes", "labels", "colors", "colormap", "palette", "legend")
_ABOUT_CLASSES = re.compile(r"class|label|categor|palette|colou?r|legend")
_OTHER_JSON = ("meta", "dataset", "config", "info", "notes", "config_v1.2", "config_v2.0")
_NAME_KEYS = ("readable", "name", "title", "class", "class_name", "label", "category", "value")
_ID_KEYS = ("id", "pixel value", "pixel", "value", "index", "label_id", "class_id", "grey", "gray")
_TRAIN_ID_KEYS = ("trainid", "train_id", "train id")
_COLOR_KEYS = ("color", "colour", "rgb", "hex", "background")


class NamedClass(NamedTuple):
    """value: in labels, None where the file gives only an order. ignored: the file says so.

    train_id: in labels that hold train ids, as Cityscapes' *_labelTrainIds.png.
    """

    name: str
    value: int | None = None
    color: Color | None = None
    ignored: bool = False
    train_id: int | None = None

    @property
    def means_no_class(self) -> bool:
        """Whether it is left out of training: the file or the name says so."""
        return self.ignored or says_no_class(self.name)


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
    parse = _parser(path.stem.lower(), path.suffix.lower())
    try:
        content = read_bytes(path, _MAX_BYTES) if parse else b""
        classes = list(parse(decoded(content))) if parse else []
    except (OSError, ValueError, RecursionError, csv.Error):
        return None
    # A guess, since any bytes can be read so: it is named beside the file.
    if _encoding(content) == _OF_WINDOWS:
        source = f"{source} (not UTF-8: read as Windows-1252)"
    names = [entry.name for entry in classes]
    fits = 1 <= len(names) <= _MAX_CLASSES and all(names) and len(set(names)) == len(names)
    return Legend(source, tuple(classes)) if fits else None


def is_called_legend(path: str) -> bool:
    """Whether a file of this name should be a list of classes."""
    name = PurePath(path.lower())
    return name.suffix in (".txt", ".names", ".csv") and name.stem.endswith((*_LISTS, *_TABLES))


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
    """What reads a file of this name; None: it is no list of classes."""
    if suffix in (".txt", ".names") and stem == "labelmap":
        return _labelmap
    if suffix in (".txt", ".names") and stem in _LISTS:
        return _lines
    if suffix in (".csv", ".txt") and stem.endswith(_TABLES):
        return lambda text: _colored_lines(text) or _table(text)
    if suffix == ".csv" and _ABOUT_CLASSES.search(stem):  # statistics have no colours
        return lambda text: [entry for entry in _table(text) if entry.color]
    if suffix in (".yaml", ".yml"):
        return _yaml
    # Only names that are about classes: annotations and settings are JSON, too.
    if suffix == ".json" and _ABOUT_CLASSES.search(stem):
        return lambda text: _of_json(parse_json(text)) or _of_mapping(parse_json(text))
    if suffix == ".json" and stem in _OTHER_JSON:
        return lambda text: _of_json(parse_json(text))
    return None


def color_of(value: Any) -> Color | None:
    """A colour written as [r, g, b], "#rrggbb" or "r,g,b"; None if it is none."""
    if isinstance(value, str):
        if re.fullmatch(r"#?[0-9a-fA-F]{6}", value):
            return tuple(bytes.fromhex(value.removeprefix("#")))
        value = [int(part) for part in re.findall(r"\d+", value)]
    is_color = isinstance(value, list | tuple) and len(value) in (3, 4)
    if not is_color or not all(type(v) is int and 0 <= v <= 255 for v in value):
        return None
    return tuple(value[:3])


def _lines(text: str) -> list[NamedClass]:
    """`road`, `0 road`, `0: road` or `road 0` a line; `lane 1` and `lane 2` are names."""
    lines = [line for x in text.splitlines() if (line := x.strip()) and line[0] != "#"]
    classes = []
    for line in lines:
        name, (value,) = _numbers_before(line, 1) or _numbers_behind(line, 1) or (line, [None])
        classes.append(NamedClass(name, value))
    # If only some have a number, or names repeat without it, it is a part of the name.
    is_mixed = len({entry.value is None for entry in classes}) > 1
    is_unique = len({entry.name for entry in classes}) == len(classes)
    return classes if is_unique and not is_mixed else [NamedClass(line) for line in lines]


def _labelmap(text: str) -> Iterator[NamedClass]:
    """CVAT: `# label:color_rgb:parts:actions`, then `road:128,64,128::`."""
    for line in filter(None, map(str.strip, text.splitlines())):
        if not line.startswith("#"):
            name, _, rest = line.partition(":")
            yield NamedClass(name.strip(), None, color_of(rest.partition(":")[0]))


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
    """A table with a header: a name, and a value or three colours."""
    entries = []
    lines = text.splitlines()
    # Excel writes semicolons where the comma is the decimal sign.
    delimiter = max(",;\t", key="".join(lines[:1]).count)
    for row in csv.DictReader(lines, restval="", delimiter=delimiter):
        cells = {str(key).strip().lower(): str(cell).strip() for key, cell in row.items()}
        entry: dict[str, Any] = {k: int(x) if x.isdigit() else x for k, x in cells.items()}
        rgb = [entry.get(name[0], entry.get(name)) for name in ("red", "green", "blue")]
        entries.append(entry if None in rgb else entry | {"color": rgb})
    return _of_entries(entries)


def _yaml(text: str) -> list[NamedClass]:
    content = foreign_yaml(text)
    # Configs of many programs are YAML, and have lists of other things.
    known = {"names", "classes"} & content.keys() if isinstance(content, dict) else ()
    return _of_json({key: content[key] for key in known})


def _of_json(content: Any) -> list[NamedClass]:
    """The first list or mapping of classes in it."""
    if isinstance(content, list):
        if all(isinstance(item, str) or type(item) is int for item in content):
            return [NamedClass(str(item)) for item in content]
        return _of_entries(content) if all(isinstance(item, dict) for item in content) else []
    if isinstance(content, dict):
        for key in ("categories", "classes", "labels", "label", "names", "colors", "palette"):
            inner = content.get(key)
            if classes := _of_mapping(inner) if isinstance(inner, dict) else _of_json(inner):
                return classes
    return []


def _of_entries(entries: Sequence[Mapping[str, Any]]) -> list[NamedClass]:
    """Entries with a name, and perhaps an id and a colour."""
    classes = []
    for entry in entries[:_MAX_CLASSES]:
        plain = {str(key).lower(): value for key, value in entry.items()}
        name = next((plain[k] for k in _NAME_KEYS if isinstance(plain.get(k), str)), None)
        if name is None:
            return []
        ids = plain.get("ids") if isinstance(plain.get("ids"), list) else []
        value = next((plain[k] for k in _ID_KEYS if type(plain.get(k)) is int), (ids or [None])[0])
        train_id = next((plain[k] for k in _TRAIN_ID_KEYS if type(plain.get(k)) is int), None)
        color = next((c for k in _COLOR_KEYS if (c := color_of(plain.get(k)))), None)
        # Mapillary's config, and Cityscapes' table of labels.
        left_out = plain.get("evaluate") is False or plain.get("ignoreineval") is True
        classes.append(NamedClass(name, value, color, left_out, train_id))
    return classes


def _of_mapping(mapping: Any) -> list[NamedClass]:
    """`{name: value}`, `{value: name}`, `{name: colour}`, `{colour: name}` or `{value: {name}}`."""
    classes = []
    pairs = mapping.items() if isinstance(mapping, dict) else ()
    of_values = all(re.fullmatch(r"\d+", str(key)) for key, _ in pairs)  # names may be numbers too
    for key, value in pairs:
        number = int(key) if re.fullmatch(r"\d+", str(key)) else None
        if number is not None and (isinstance(value, str) or (of_values and type(value) is int)):
            classes.append(NamedClass(str(value), number))
        elif number is not None and isinstance(value, dict) and _of_entries([value]):
            classes.append(_of_entries([value])[0]._replace(value=number))
        elif isinstance(value, str) and str(key).startswith("#") and color_of(str(key)):
            classes.append(NamedClass(value, None, color_of(str(key))))
        elif type(value) is int:
            # nnU-Net calls so what is not labelled.
            classes.append(NamedClass(str(key), value, None, str(key).lower() == "ignore"))
        elif isinstance(value, list) and len(value) == 1 and type(value[0]) is int:
            # nnU-Net has lists for regions of several values; of one value it is a class.
            classes.append(NamedClass(str(key), value[0]))
        elif number is None and (color := color_of(value)):
            classes.append(NamedClass(str(key), None, color))
        else:
            return []
    return classes
