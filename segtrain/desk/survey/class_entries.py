"""Classes in nested data: of JSON and YAML, or the rows of a table."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from segtrain.data.read.classes import says_no_class

Color = tuple[int, int, int]

MAX_CLASSES = 4096
A_FILE = re.compile(r"\.(png|jpe?g|tiff?|bmp|gif|webp|npy)\b", re.IGNORECASE)
"""The name of a picture, which is none of a class."""
_NAME_KEYS = ("readable", "name", "title", "class", "class name", "label", "category", "value")
_ID_KEYS = (
    *("id", "pixel value", "pixel", "value", "index", "label id", "class id", "grey", "gray"),
    "code",
    *("class", "label"),
)
_TRAIN_ID_KEYS = ("trainid", "train id")
_MAPPING_KEYS = ("categories", "classes", "labels", "label", "names", "colors", "palette")
_MAPPING_KEYS += ("id2label", "label2id", "class names", "tools")
_COLOR_KEYS = ("color", "colour", "class color", "rgb", "hex", "background")


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


def of_json(content: Any) -> list[NamedClass]:
    """The first list or mapping of classes in it."""
    if isinstance(content, list):
        if all(isinstance(item, str) or type(item) is int for item in content):
            return [NamedClass(str(item)) for item in content]
        return of_entries(content) if all(isinstance(item, dict) for item in content) else []
    if isinstance(content, dict):
        inner_of = {str(key).lower().replace("_", " "): inner for key, inner in content.items()}
        for inner in map(inner_of.get, _MAPPING_KEYS):
            if classes := of_mapping(inner) if isinstance(inner, dict) else of_json(inner):
                return classes
    return []


def of_maps(content: Any) -> list[NamedClass]:
    """RUGD and RELLIS-3D: a list of two mappings, `{value: name}` and `{value: colour}`."""
    if not (isinstance(content, list) and 0 < len(content) <= 2):
        return []
    if not all(isinstance(part, dict) for part in content):
        return []
    classes = of_mapping(content[0])
    colors = {str(key): color_of(value) for key, value in (*content[1:], {})[0].items()}
    return [x._replace(color=colors.get(str(x.value))) for x in classes if x.value is not None]


def of_entries(entries: Sequence[Mapping[str, Any]]) -> list[NamedClass]:
    """Entries with a name, and perhaps an id and a colour."""
    classes = []
    for entry in entries[:MAX_CLASSES]:
        plain = {str(key).lower().replace("_", " "): value for key, value in entry.items()}
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


def of_mapping(mapping: Any) -> list[NamedClass]:
    """`{name: value}`, `{value: name}`, `{name: colour}`, `{colour: name}` or `{value: {name}}`.

    Or `{name: {id, color}}`.
    """
    classes = []
    pairs = mapping.items() if isinstance(mapping, dict) else ()
    of_values = all(re.fullmatch(r"\d+", str(key)) for key, _ in pairs)  # names may be numbers too
    for key, value in pairs:
        number = int(key) if re.fullmatch(r"\d+", str(key)) else None
        if number is not None and (isinstance(value, str) or (of_values and type(value) is int)):
            classes.append(NamedClass(str(value), number))
        elif number is not None and isinstance(value, dict) and of_entries([value]):
            classes.append(of_entries([value])[0]._replace(value=number))
        elif isinstance(value, dict) and (found := of_entries([{"name": str(key)} | value])):
            # Images have entries of their own, too.
            if found[0].value is found[0].color is None or A_FILE.search(str(key)):
                return []
            classes += found
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
