"""Names, values and colours of classes from the files that annotation tools leave beside images.

Text: a name a line (classes.txt), CVAT's labelmap.txt, tables with a header (class_dict.csv,
Roboflow's _classes.csv). YAML: `names` of YOLO's data.yaml, or a class file of segtrain. JSON:
nnU-Net's dataset.json, COCO's and Label Studio's categories, Mapillary's config, Supervisely's
meta.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from segtrain.files import parse_json, read_bytes

Color = tuple[int, int, int]

_MAX_BYTES = 4 << 20
_MAX_CLASSES = 4096
_LISTS = ("classes", "class_names", "labels", "label_names", "names", "obj", "categories", "codes")
_TABLES = ("class_dict", "_classes", "classes", "labels", "colors", "colormap", "palette", "legend")
_ABOUT_CLASSES = re.compile(r"class|label|categor|palette|colou?r|legend")
_OTHER_JSON = ("meta", "dataset", "config", "info", "notes", "config_v1.2", "config_v2.0")
_NAME_KEYS = ("readable", "name", "title", "class", "class_name", "label", "category", "value")
_ID_KEYS = ("id", "pixel value", "pixel", "value", "index", "label_id", "class_id", "grey", "gray")
_COLOR_KEYS = ("color", "colour", "rgb", "background")
_NO_CLASS = (
    "void unlabeled unlabelled ignore ignored unknown undefined nodata unannotated outside dontcare"
)
_IGNORED_WORDS = frozenset(_NO_CLASS.split())


class NamedClass(NamedTuple):
    """value: in labels, None where the file gives only an order. ignored: the file says so."""

    name: str
    value: int | None = None
    color: Color | None = None
    ignored: bool = False

    @property
    def means_no_class(self) -> bool:
        """Whether it is left out of training: the file or the name says so."""
        plain = re.sub(r"[^a-z]", "", self.name.lower())
        return self.ignored or plain in _IGNORED_WORDS or plain.startswith("unlabel")


class Legend(NamedTuple):
    """The classes that one file names, in its order. source: that file, relative."""

    source: str
    classes: tuple[NamedClass, ...]

    @property
    def has_values(self) -> bool:
        """Whether the file gives the values in labels."""
        return all(one.value is not None for one in self.classes)

    @property
    def has_colors(self) -> bool:
        """Whether the file gives a colour of its own to each class."""
        colors = [one.color for one in self.classes]
        return None not in colors and len(set(colors)) == len(colors)


def read_legend(path: Path, source: str) -> Legend | None:
    """The classes in a file; None if it does not look like a list of classes.

    source: the name under which it is reported.
    """
    stem, suffix = path.stem.lower(), path.suffix.lower()
    try:
        text = read_bytes(path, _MAX_BYTES).decode("utf-8-sig")
        if suffix in (".txt", ".names") and stem == "labelmap":
            classes = list(_labelmap(text))
        elif suffix in (".txt", ".names") and stem in _LISTS:
            classes = list(_lines(text))
        elif suffix in (".csv", ".txt") and any(stem.endswith(name) for name in _TABLES):
            classes = list(_table(text))
        elif suffix in (".yaml", ".yml"):
            content = yaml.safe_load(text)
            classes = _of_yaml(content) if isinstance(content, dict) else []
        elif suffix == ".json" and (_ABOUT_CLASSES.search(stem) or stem in _OTHER_JSON):
            content = parse_json(text)
            classes = _of_json(content)
            if not classes and isinstance(content, dict) and _ABOUT_CLASSES.search(stem):
                classes = _of_mapping(content)
        else:
            return None
    except (OSError, ValueError, yaml.YAMLError, RecursionError, csv.Error):
        return None
    fits = 1 <= len(classes) <= _MAX_CLASSES and all(one.name for one in classes)
    names = [one.name for one in classes]
    return Legend(source, tuple(classes)) if fits and len(set(names)) == len(names) else None


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


def _lines(text: str) -> Iterator[NamedClass]:
    """`road`, `0 road`, `0: road` or `road 0` a line."""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("#"):
            continue
        found = re.fullmatch(r"(\d+)\s*[:,;\t ]\s*(\D.*)", line)
        after = re.fullmatch(r"(.*\D)\s*[:,;\t ]\s*(\d+)", line)
        if found:
            yield NamedClass(found[2].strip(), int(found[1]))
        elif after:
            yield NamedClass(after[1].strip(" :,;\t"), int(after[2]))
        else:
            yield NamedClass(line)


def _labelmap(text: str) -> Iterator[NamedClass]:
    """CVAT: `# label:color_rgb:parts:actions`, then `road:128,64,128::`."""
    for line in filter(None, map(str.strip, text.splitlines())):
        if not line.startswith("#"):
            name, _, rest = line.partition(":")
            yield NamedClass(name.strip(), None, color_of(rest.partition(":")[0]))


def _table(text: str) -> Iterator[NamedClass]:
    """A table with a header: a name, and a value or three colours."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]
    header = [cell.lower() for cell in rows[0]] if rows else []
    column = {name: i for i, name in enumerate(header)}
    name = next(
        (column[key] for key in ("name", "class", "class_name", "label") if key in column), None
    )
    if name is None:
        return
    value = next((column[key] for key in _ID_KEYS if column.get(key, name) != name), None)
    channels = [
        next((column[key] for key in keys if key in column), None)
        for keys in (("r", "red"), ("g", "green"), ("b", "blue"))
    ]
    for row in rows[1:]:
        color = None
        if None not in channels:
            color = color_of([int(row[channel]) for channel in channels])
        yield NamedClass(row[name], None if value is None else int(row[value]), color)


def _of_yaml(content: Mapping[str, Any]) -> list[NamedClass]:
    names = content.get("names", content.get("classes"))
    if isinstance(names, list) and all(isinstance(one, dict) for one in names):
        return _of_entries(names)
    if isinstance(names, list):
        return [NamedClass(str(name)) for name in names]
    return _of_mapping(names) if isinstance(names, dict) else []


def _of_json(content: Any) -> list[NamedClass]:
    """The first list or mapping of classes in it."""
    if isinstance(content, list):
        if content and all(isinstance(one, str) for one in content):
            return [NamedClass(one) for one in content]
        is_list = content and all(isinstance(one, dict) for one in content)
        return _of_entries(content) if is_list else []
    if not isinstance(content, dict):
        return []
    for key in ("categories", "classes", "labels", "label", "names", "colors", "palette"):
        inner = content.get(key)
        found = _of_mapping(inner) if isinstance(inner, dict) else _of_json(inner) if inner else []
        if found:
            return found
    return []


def _of_entries(entries: Sequence[Mapping[str, Any]]) -> list[NamedClass]:
    """Entries with a name, and perhaps an id and a colour."""
    found = []
    for entry in entries[:_MAX_CLASSES]:
        plain = {str(key).lower(): value for key, value in entry.items()}
        name = next((plain[k] for k in _NAME_KEYS if isinstance(plain.get(k), str)), None)
        if name is None:
            return []
        ids = plain.get("ids") if isinstance(plain.get("ids"), list) else []
        value = next((plain[k] for k in _ID_KEYS if type(plain.get(k)) is int), (ids or [None])[0])
        color = next((c for k in _COLOR_KEYS if (c := color_of(plain.get(k)))), None)
        left_out = plain.get("evaluate") is False or plain.get("ignoreineval") is True
        found.append(NamedClass(name, value, color, left_out))
    return found


def _of_mapping(mapping: Mapping[Any, Any]) -> list[NamedClass]:
    """`{name: value}`, `{value: name}`, `{name: colour}` or `{value: {name, ...}}`."""
    found = []
    for key, value in mapping.items():
        number = int(key) if re.fullmatch(r"\d+", str(key)) else None
        if number is not None and isinstance(value, str):
            found.append(NamedClass(value, number))
        elif number is not None and isinstance(value, dict) and _of_entries([value]):
            found.append(_of_entries([value])[0]._replace(value=number))
        elif type(value) is int:
            found.append(NamedClass(str(key), value, None, str(key).lower() == "ignore"))
        elif isinstance(value, list) and len(value) == 1 and type(value[0]) is int:
            found.append(NamedClass(str(key), value[0]))
        elif number is None and (color := color_of(value)):
            found.append(NamedClass(str(key), None, color))
        else:
            return []
    return found
