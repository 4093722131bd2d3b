"""Checks data against a pydantic model and describes every mistake in plain words.

What a key expects is read from the model's JSON schema, so the messages follow the fields.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from operator import getitem
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from segtrain.config.mistakes import MAX_SHOWN, KeyPath, Mistake, dotted
from segtrain.config.strict_yaml import plain_value
from segtrain.config.suggest import did_you_mean, nearest
from segtrain.text import printable

Model = TypeVar("Model", bound=BaseModel)
Schema = dict[str, Any]

# The hint "did you mean [512, 512]?" is for the sides of crops, and no crop is larger.
_LARGEST_SIDE = 1e6
_OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_BOOLEANS = {"yes": "true", "on": "true", "1": "true", "true": "true"}
_BOOLEANS |= {"no": "false", "off": "false", "0": "false", "false": "false"}


def validate(
    model: type[Model], data: Mapping[str, Any], *, hints: Mapping[str, str] | None = None
) -> Model | list[Mistake]:
    """`data` as a `model`, or all that is wrong with it.

    Lists are accepted for tuples and integers for floats; nothing else is converted.

    Args:
        hints: what to write instead of keys that other tools use.
    """
    try:
        return model.model_validate(_tuples(data))
    except ValidationError as error:
        errors = error.errors()
    mistakes: dict[Mistake, None] = {}  # in order, each once
    for one in errors:
        loc = one["loc"]
        inner = any(e["loc"][: len(loc)] == loc and len(e["loc"]) > len(loc) for e in errors)
        # A list whose items are all wrong counts as empty too, which is no second mistake.
        if one["type"] != "too_short" or not inner:
            mistakes |= dict.fromkeys(_describe(one, data, _schema_of(model), hints or {}))
    return list(mistakes)


@cache
def _schema_of(model: type[BaseModel]) -> Schema:
    return model.model_json_schema()


def _tuples(value: Any) -> Any:
    # Strict pydantic takes no list for a tuple, and tuples keep a frozen config frozen.
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    return value


def _describe(
    error: Any, data: Mapping[str, Any], schema: Schema, hints: Mapping[str, str]
) -> Iterator[Mistake]:
    path, node = _walk(error["loc"], schema)
    kind = error["type"]
    if kind == "extra_forbidden":
        yield Mistake(error["loc"], _unknown_key(error["loc"], schema, hints))
    elif kind == "value_error":
        for line in str(error["ctx"]["error"]).splitlines():
            yield _from_validator(line, path, schema)
    elif kind == "missing" and path == error["loc"]:
        what = _expected(node, schema)
        if "properties" in node:
            what = f"a section with {', '.join(node.get('required', []))}"
        elif "description" in node:
            what += f" ({node['description']})"
        yield Mistake(path, f"is required: {what}")
    else:
        value = reduce(getitem, path, data)
        got = _show(value, with_kind=kind not in _OUT_OF_RANGE)
        hint = _hint(value, node)
        yield Mistake(path, f"expected {_expected(node, schema)}, got {got}{hint}")


def _from_validator(line: str, path: KeyPath, schema: Schema) -> Mistake:
    """The mistake in a validator's `key: message`; the message may name further keys."""
    words = [tuple(word.split(".")) for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", line)]
    keys = [(*path, *word) for word in words if _walk((*path, *word), schema)[0] == (*path, *word)]
    first, separator, message = line.partition(": ")
    if separator and keys and keys[0] == (*path, *first.split(".")):
        return Mistake(keys[0], message, related=tuple(keys[1:]))
    return Mistake(path, line, related=tuple(keys))


def _walk(loc: KeyPath, schema: Schema) -> tuple[KeyPath, Schema]:
    """The key that a message about `loc` names, and its schema.

    An item of a list of numbers or texts belongs to the list: `crop_size[1]` becomes `crop_size`.
    """
    node, path = schema, ()
    for part in loc:
        if isinstance(part, int):
            child = _resolve(node.get("items", {}), schema)
            if "properties" not in child:
                break
        elif part in node.get("properties", {}):
            child = _resolve(node["properties"][part], schema)
        else:
            break
        node, path = child, (*path, part)
    return path, node


def _resolve(node: Schema, schema: Schema) -> Schema:
    """`node` with references and `X | null` replaced by what they mean; keeps its description."""
    if "anyOf" in node:
        options = [_resolve(option, schema) for option in node["anyOf"]]
        others = [option for option in options if option.get("type") != "null"]
        if len(others) == 1:
            return {**others[0], **node, "nullable": len(others) < len(options)}
    if "$ref" in node:
        target = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        return {**target, **{key: node[key] for key in node if key != "$ref"}}
    return node


def _expected(node: Schema, schema: Schema) -> str:
    """What the value of a resolved `node` must be, such as `an integer above 0, or null`."""
    kind = node.get("type")
    if "enum" in node:
        text = f"one of {', '.join(str(value) for value in node['enum'])}"
    elif kind == "string" and "pattern" in node:
        text = f"text that matches {node['pattern']}"
    elif kind == "string":
        text = "text that is not empty" if node.get("minLength") else "text"
    elif kind == "array":
        text = _expected_list(node, schema)
    elif kind in ("integer", "number"):
        text = f"{'an integer' if kind == 'integer' else 'a number'}{_limits(node)}"
    else:
        text = "true or false" if kind == "boolean" else "keys and values"
    return f"{text}, or null" if node.get("nullable") else text


def _expected_list(node: Schema, schema: Schema) -> str:
    low, high = node.get("minItems"), node.get("maxItems")
    length = f"{low} " if low == high and low is not None else ""
    what = "a list" if low is None or length else "a list, not empty,"
    item = _resolve(node.get("items") or node.get("prefixItems", [{}])[0], schema)
    kinds = {"integer": "integers", "number": "numbers", "string": "texts", "array": "lists"}
    kind = kinds.get(item.get("type", ""), "groups of keys and values")
    return f"{what} of {length}{kind}{_limits(item)}"


def _limits(node: Schema) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    if below is not None and below > 2**53:  # the limit of 64 bits, which nobody reaches
        below = None
    start = f"from {low}" if low is not None else f"above {above}" if above is not None else ""
    end = f"to {high}" if high is not None else f"below {below}" if below is not None else ""
    if low is not None and not end:
        start = f"of at least {low}"
    joint = " and " if above is not None or below is not None else " "
    return f" {joint.join(part for part in (start, end) if part)}" if start or end else ""


def _show(value: Any, *, with_kind: bool) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "keys and values"
    if isinstance(value, list | tuple):
        items = ", ".join(_show(item, with_kind=False) for item in value)
        return f"[{printable(items, MAX_SHOWN)}]"
    if isinstance(value, bool):
        text, kind = str(value).lower(), "boolean"
    elif isinstance(value, str):
        text, kind = f"'{printable(value, MAX_SHOWN)}'", "text"
    else:
        text, kind = repr(value), "integer" if isinstance(value, int) else "float"
    return f"{text} ({kind})" if with_kind else text


def _hint(value: Any, node: Schema) -> str:
    """The likely repair, as the end of a message, or ""."""
    kind = node.get("type")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if "enum" in node and kind == "string":
        # "deeplabv3+" is the usual name of deeplabv3plus, and another network than deeplabv3.
        return did_you_mean(str(value).replace("+", "plus"), node["enum"])
    if kind == "boolean" and isinstance(value, str | int) and not isinstance(value, bool):
        meant = _BOOLEANS.get(str(value).lower())
        return f"; did you mean {meant}?" if meant else ""
    if kind == "string" and isinstance(value, int | float):
        return "; for text, put it in quotes"
    if kind in ("integer", "number") and isinstance(value, str):
        return "; remove the quotes" if _is_number(value) else ""
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return f"; write {value:.0f}"
    if kind == "array" and isinstance(value, str):
        return _list_hint(value, node)
    if kind == "array" and is_number and 0 <= value <= _LARGEST_SIDE:
        return f"; did you mean [{', '.join([str(value)] * node.get('minItems', 1))}]?"
    return ""


def _is_number(text: str) -> bool:
    try:
        return type(plain_value(text)) in (int, float)
    except ValueError:
        return False


def _list_hint(text: str, node: Schema) -> str:
    """For `64,64`, `(64, 64)` and `64x64` the list that is meant; empty for other text."""
    words = [word for word in re.split(r"[\s,;x*()\[\]]+", text.strip().lower()) if word]
    low, high = node.get("minItems", 1), node.get("maxItems", len(words))
    if not low <= len(words) <= high or not all(re.fullmatch(r"[0-9.e+-]{1,20}", w) for w in words):
        return ""
    return f"; did you mean [{', '.join(words)}]?"


def _unknown_key(loc: KeyPath, schema: Schema, hints: Mapping[str, str]) -> str:
    """What may be meant: a similar key here, the same key elsewhere, a hint, a similar key."""
    key = str(loc[-1])
    here = list(_walk(loc[:-1], schema)[1].get("properties", {}))
    elsewhere = [path for path in _all_keys(schema) if path[:-1] != loc[:-1]]
    same = [dotted(path) for path in elsewhere if path[-1] == key]
    if near := nearest(key, here):
        return f"unknown key; did you mean '{near}'?"
    if same:
        return f"unknown key; did you mean {' or '.join(same)}?"
    if key in hints:
        return f"unknown key; {hints[key]}"
    # In reverse: of the same key in several sections the first is shown.
    if hint := did_you_mean(key, {str(path[-1]): dotted(path) for path in reversed(elsewhere)}):
        return f"unknown key{hint}"
    return f"unknown key; expected one of {', '.join(here)}" if here else "unknown key"


def _all_keys(schema: Schema) -> Iterator[KeyPath]:
    for name, field in schema.get("properties", {}).items():
        yield (name,)
        for inner in _resolve(field, schema).get("properties", {}):
            yield (name, inner)
