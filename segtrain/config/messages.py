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
from segtrain.config.suggest import did_you_mean, nearest
from segtrain.text import printable

Model = TypeVar("Model", bound=BaseModel)
Schema = dict[str, Any]

_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_LIST_ITEMS = {"integer": "integers", "number": "numbers", "string": "texts", "array": "lists"}
_NAMES = {"integer": "an integer", "number": "a number", "boolean": "true or false"}


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
        # "deeplabv3+" is the usual name of deeplabv3plus, and another network than deeplabv3.
        choices = map(str, node.get("enum", ()))
        hint = did_you_mean(str(value).replace("+", "plus"), choices)
        yield Mistake(path, f"expected {_expected(node, schema)}, got {_show(value)}{hint}")


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
    """What the value of a resolved `node` must be, such as `an integer > 0, or null`."""
    kind = node.get("type")
    if "enum" in node:
        text = f"one of {', '.join(map(str, node['enum']))}"
    elif kind == "string":
        text = f"text that matches {node['pattern']}" if "pattern" in node else "text"
        text += ", not empty" if node.get("minLength") else ""
    elif kind == "array":
        text = _expected_list(node, schema)
    else:
        text = _NAMES.get(kind, "keys and values") + _limits(node)
    return f"{text}, or null" if node.get("nullable") else text


def _expected_list(node: Schema, schema: Schema) -> str:
    """With the default as an example, so that brackets and commas are seen."""
    low, high = node.get("minItems"), node.get("maxItems")
    length = f"{low} " if low == high and low is not None else ""
    what = "a list" if low is None or length else "a list, not empty,"
    item = _resolve(node.get("items") or node.get("prefixItems", [{}])[0], schema)
    items = _LIST_ITEMS.get(item.get("type", ""), "groups of keys and values")
    example = f", such as {node['default']}" if node.get("default") else ""
    return f"{what} of {length}{items}{_limits(item)}{example}"


def _limits(node: Schema) -> str:
    # 2**63 is the limit of 64 bits, which nobody reaches.
    limits = [f"{sign} {node[k]}" for k, sign in _LIMITS.items() if node.get(k, 2**63) != 2**63]
    return f" {' and '.join(limits)}" if limits else ""


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "keys and values"
    if isinstance(value, list | tuple):
        return f"[{printable(', '.join(map(_show, value)), MAX_SHOWN)}]"
    if isinstance(value, str):
        return f"'{printable(value, MAX_SHOWN)}'"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _unknown_key(loc: KeyPath, schema: Schema, hints: Mapping[str, str]) -> str:
    """What may be meant: a similar key here, a hint, a similar key elsewhere."""
    key = str(loc[-1])
    here = list(_walk(loc[:-1], schema)[1].get("properties", {}))
    if near := nearest(key, here):
        return f"unknown key; did you mean '{near}'?"
    if key in hints:
        return f"unknown key; {hints[key]}"
    # In reverse: of the same key in several sections the first is shown.
    elsewhere = {str(path[-1]): dotted(path) for path in reversed(list(_all_keys(schema)))}
    expected = f"; expected one of {', '.join(here)}" if here else ""
    return f"unknown key{did_you_mean(key, elsewhere) or expected}"


def _all_keys(schema: Schema) -> Iterator[KeyPath]:
    for name, field in schema.get("properties", {}).items():
        yield (name,)
        for inner in _resolve(field, schema).get("properties", {}):
            yield (name, inner)
