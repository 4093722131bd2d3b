"""Checks parsed YAML against a pydantic model and lists every mistake in plain words.

What a value should have been is read from the model's JSON schema, so one description serves all of
pydantic's kinds of error and stays true when a field changes.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from segtrain.config.strict_yaml import KeyPath, dotted, plain_value
from segtrain.text import printable

Model = TypeVar("Model", bound=BaseModel)

_MAX_SHOWN = 60
_PLAUSIBLE = 1e6  # no larger number is meant for each of several sides


class Finding(NamedTuple):
    """One mistake: the key it is about (empty: the whole file) and what is wrong with it.

    related: other keys that take part, whose place is shown when the first is written nowhere.
    line: where it is in the file, if that is not simply the line of the key.
    """

    path: KeyPath
    message: str
    related: tuple[KeyPath, ...] = ()
    line: int | None = None


def validate(
    model: type[Model], data: Mapping[str, Any], *, hints: Mapping[str, str] | None = None
) -> Model | list[Finding]:
    """`data` as a `model`, or all that is wrong with it.

    Lists are accepted for tuples and integers for floats; nothing else is converted.

    Args:
        hints: for keys that people bring from other tools, what to write instead.
    """
    try:
        return model.model_validate(_tuples(data))
    except ValidationError as error:
        schema = _schema_of(model)
        errors = error.errors()
        # A list whose items are all wrong counts as empty too, which is no second mistake.
        errors = [e for e in errors if e["type"] != "too_short" or not _has_inner(e, errors)]
        described = (_describe(e, data, schema, hints or {}) for e in errors)
        findings: dict[Finding, None] = {f: None for group in described for f in group}
        return list(findings)


def _has_inner(error: Any, errors: Sequence[Any]) -> bool:
    depth = len(error["loc"])
    return any(e["loc"][:depth] == error["loc"] and len(e["loc"]) > depth for e in errors)


def is_section(model: type[BaseModel], path: KeyPath) -> bool:
    """Whether `path` names a group of keys rather than a value."""
    schema = _schema_of(model)
    found, node = _walk(path, schema)
    return found == path and "properties" in node


@cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _tuples(value: Any) -> Any:
    # Strict pydantic takes no list for a tuple, and tuples keep a frozen config frozen.
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    return value


def _describe(
    error: Any, data: Mapping[str, Any], schema: dict[str, Any], hints: Mapping[str, str]
) -> Iterator[Finding]:
    path, node = _walk(error["loc"], schema)
    if error["type"] == "extra_forbidden":
        yield Finding(error["loc"], _unknown_key(error["loc"], schema, hints))
    elif error["type"] == "missing" and path == error["loc"]:
        if "properties" in node:
            what = f"a section with {', '.join(node.get('required', []))}"
        else:
            meaning = f" ({node['description']})" if "description" in node else ""
            what = f"{expected(node, schema)}{meaning}"
        yield Finding(path, f"is required: {what}")
    elif error["type"] == "value_error":
        for line in str(error["ctx"]["error"]).splitlines():
            yield _named_finding(line, path, schema)
    else:
        value = _value_at(data, path)
        out_of_range = error["type"] in ("greater_than", "greater_than_equal", "less_than")
        got = _show(value, with_kind=not (out_of_range or error["type"] == "less_than_equal"))
        hint = _value_hint(value, node, schema)
        yield Finding(path, f"expected {expected(node, schema)}, got {got}{hint}")


def _named_finding(line: str, path: KeyPath, schema: dict[str, Any]) -> Finding:
    """The finding in a validator's `key: message`, where the message may name further keys."""
    words = [tuple(word.split(".")) for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", line)]
    keys = [(*path, *word) for word in words if _walk((*path, *word), schema)[0] == (*path, *word)]
    first, separator, message = line.partition(": ")
    if separator and keys and dotted(keys[0]) == dotted((*path, *first.split("."))):
        return Finding(keys[0], message, tuple(keys[1:]))
    return Finding(path, line, tuple(keys))


def _walk(loc: KeyPath, schema: dict[str, Any]) -> tuple[KeyPath, dict[str, Any]]:
    """The part of `loc` that has a meaning of its own, and its schema.

    An item of a list of plain values belongs to the list: `crop_size[1]` is shown as `crop_size`.
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


def _resolve(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """`node` with a reference or an `X | null` opened, keeping its own description."""
    if "anyOf" in node:
        options = [_resolve(option, schema) for option in node["anyOf"]]
        others = [option for option in options if option.get("type") != "null"]
        if len(others) == 1:
            return {**others[0], **node, "nullable": len(others) < len(options)}
    if "$ref" in node:
        target = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        return {**target, **{key: node[key] for key in node if key != "$ref"}}
    return node


def _value_at(data: Any, path: KeyPath) -> Any:
    for part in path:
        data = data[part]
    return data


def expected(node: dict[str, Any], schema: dict[str, Any]) -> str:
    """What a value of the JSON schema `node` is, in words: `an integer above 0, or null`."""
    node = _resolve(node, schema)
    text = _expected_one(node, schema)
    return f"{text}, or null" if node.get("nullable") else text


def _expected_one(node: dict[str, Any], schema: dict[str, Any]) -> str:
    if "enum" in node:
        return f"one of {', '.join(str(value) for value in node['enum'])}"
    match node.get("type"):
        case "integer":
            return f"an integer{_limits(node)}"
        case "number":
            return f"a number{_limits(node)}"
        case "boolean":
            return "true or false"
        case "string" if "pattern" in node:
            return f"text that matches {node['pattern']}"
        case "string":
            return "text that is not empty" if node.get("minLength") else "text"
        case "array":
            return _expected_list(node, schema)
        case _:
            return "keys and values"


def _expected_list(node: dict[str, Any], schema: dict[str, Any]) -> str:
    low, high = node.get("minItems"), node.get("maxItems")
    length = f"{low} " if low == high and low is not None else ""
    what = "a list" if low is None or length else "a list, not empty,"
    item = _resolve(node.get("items") or node.get("prefixItems", [{}])[0], schema)
    kinds = {"integer": "integers", "number": "numbers", "string": "texts", "array": "lists"}
    kind = kinds.get(item.get("type", ""), "groups of keys and values")
    return f"{what} of {length}{kind}{_limits(item)}"


def _limits(node: dict[str, Any]) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    if below is not None and below > 2**53:  # a limit of the representation: not worth a word
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
        return f"[{_cut(', '.join(_show(item, with_kind=False) for item in value))}]"
    if isinstance(value, bool):
        text, kind = str(value).lower(), "boolean"
    elif isinstance(value, str):
        text, kind = f"'{_cut(value)}'", "text"
    else:
        text, kind = repr(value), "integer" if isinstance(value, int) else "float"
    return f"{text} ({kind})" if with_kind else text


def _cut(text: str) -> str:
    return printable(text, _MAX_SHOWN)


def _value_hint(value: Any, node: dict[str, Any], schema: dict[str, Any]) -> str:
    """The likely repair, or nothing."""
    kind = node.get("type")
    if "enum" in node and kind == "string":
        # "deeplabv3+" is the usual name of deeplabv3plus, and another network than deeplabv3.
        near = nearest(str(value).replace("+", "plus"), node["enum"])
        return f"; did you mean {near}?" if near else ""
    if kind == "boolean" and isinstance(value, str | int) and not isinstance(value, bool):
        meant = {"yes": "true", "on": "true", "1": "true", "true": "true"}
        meant |= {"no": "false", "off": "false", "0": "false", "false": "false"}
        near = meant.get(str(value).lower())
        return f"; did you mean {near}?" if near else ""
    if kind == "string" and isinstance(value, int | float):
        return "; for text, put it in quotes"
    if kind in ("integer", "number") and isinstance(value, str):
        try:
            number = plain_value(value)
        except ValueError:
            return ""
        return "" if number is None or isinstance(number, str | bool) else "; remove the quotes"
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return f"; write {value:.0f}"
    if kind == "array" and isinstance(value, str):
        return _list_hint(value, node)
    if kind == "array" and isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value <= _PLAUSIBLE:
            return ""
        count = node.get("minItems", 1)
        return f"; did you mean [{', '.join([str(value)] * count)}]?"
    return ""


def _list_hint(text: str, node: dict[str, Any]) -> str:
    """`64,64`, `(64, 64)` and `64x64` as the list that is meant; empty for other text."""
    words = [word for word in re.split(r"[\s,;x*()\[\]]+", text.strip().lower()) if word]
    low, high = node.get("minItems", 1), node.get("maxItems", len(words))
    if not low <= len(words) <= high or not all(re.fullmatch(r"[0-9.e+-]{1,20}", w) for w in words):
        return ""
    return f"; did you mean [{', '.join(words)}]?"


def _unknown_key(loc: KeyPath, schema: dict[str, Any], hints: Mapping[str, str]) -> str:
    """Nearest valid keys: here, the same word in another section, or anything close."""
    key = str(loc[-1])
    _, node = _walk(loc[:-1], schema)
    siblings = list(node.get("properties", {}))
    elsewhere = [path for path in _all_keys(schema) if path[:-1] != loc[:-1]]
    exact = [path for path in elsewhere if path[-1] == key]
    if near := nearest(key, siblings):
        return f"unknown key; did you mean '{near}'?"
    if exact:
        return f"unknown key; did you mean {' or '.join(dotted(path) for path in exact)}?"
    if key in hints:
        return f"unknown key; {hints[key]}"
    if near := nearest(key, [str(path[-1]) for path in elsewhere]):
        return f"unknown key; did you mean {dotted(next(p for p in elsewhere if p[-1] == near))}?"
    return f"unknown key; expected one of {', '.join(siblings)}" if siblings else "unknown key"


def _all_keys(schema: dict[str, Any]) -> Iterator[KeyPath]:
    for name, field in schema.get("properties", {}).items():
        yield (name,)
        for inner in _resolve(field, schema).get("properties", {}):
            yield (name, inner)


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` may be a misspelling or a part of, or None if none is like it.

    At difflib's usual cutoff of 0.6 "unet" is like "pspnet".
    """
    candidates = list(candidates)
    near = difflib.get_close_matches(word, candidates, n=1, cutoff=0.75)
    parts = [one for one in candidates if _is_part(word, one) or _is_part(one, word)]
    return next(iter([*near, *difflib.get_close_matches(word, parts, n=1, cutoff=0)]), None)


def _is_part(short: str, long: str) -> bool:
    """Whether all words of `short` are words of `long`: "crop" and "crop_size"."""
    words = re.findall(r"[a-z]{3,}", short.lower())
    return bool(words) and set(words) <= set(re.findall(r"[a-z]{3,}", long.lower()))


def report(
    findings: list[Finding], place: Callable[[Finding], tuple[tuple[int, int], str]]
) -> list[str]:
    """One line a finding, in the order of the places.

    Args:
        place: how to sort a finding and what to show before it, such as `file.yaml:12` or
            `--set train.lr`.
    """
    lines = []
    for finding in findings:
        order, where = place(finding)
        key = dotted(finding.path)
        label = "" if not key or where.endswith(f" {key}") else f" {key}:"
        lines.append((order, f"{where}:{label} {finding.message}"))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]
