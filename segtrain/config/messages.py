"""Checks data against a pydantic model; says every mistake with its key, value and repair."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from segtrain.config.mistakes import MAX_SHOWN, KeyPath, Mistake
from segtrain.config.suggest import did_you_mean, nearest
from segtrain.text import printable

Model = TypeVar("Model", bound=BaseModel)

# Pydantic's words for Python's types, and those for YAML's.
_WORDS = (
    (r"^(?:Input|String|Tuple|List) should ", "must "),
    (r"a valid dictionary or instance of \w+", "keys and values"),
    ("a valid tuple", "a list, such as [64, 48]"),
    ("a valid (string|boolean)", r"a \1"),
    ("a valid ", "a "),
    (" after validation, not [0-9]+", ""),
    ("a integer", "an integer"),
    ("a string", "text"),
    ("a boolean", "true or false"),
)


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
            mistakes |= dict.fromkeys(_describe(one, data, model, hints or {}))
    return list(mistakes)


def _tuples(value: Any) -> Any:
    # Strict pydantic takes no list for a tuple, and tuples keep a frozen config frozen.
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    return value


def _describe(
    error: Any, data: Mapping[str, Any], model: type[BaseModel], hints: Mapping[str, str]
) -> Iterator[Mistake]:
    loc, kind = error["loc"], error["type"]
    if kind == "extra_forbidden":
        yield Mistake(loc, _unknown_key(loc, model, hints))
    elif kind == "missing":
        yield Mistake(loc, _missing(loc, model))
    elif kind == "value_error":
        for line in str(error["ctx"]["error"]).splitlines():
            yield _from_validator(line, loc, model)
    else:
        message = error["msg"]
        for pattern, words in _WORDS:
            message = re.sub(pattern, words, message)
        # "deeplabv3+" is the usual name of deeplabv3plus, and another network than deeplabv3.
        choices = re.findall("'([^']*)'", error.get("ctx", {}).get("expected", ""))
        hint = did_you_mean(str(error["input"]).replace("+", "plus"), choices)
        yield Mistake(_written(loc, data), f"{message}, got {show(error['input'])}{hint}")


def _written(loc: KeyPath, data: Any) -> KeyPath:
    """`loc` without the names that pydantic gives to the types of a union."""
    for i, part in enumerate(loc):
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return loc[:i]
    return loc


def _from_validator(line: str, path: KeyPath, model: type[BaseModel]) -> Mistake:
    """The mistake in a validator's `key: message`; the message may name further keys."""
    words = re.findall(r"[a-z_]+(?:\.[a-z_]+)*", line)
    paths = [(*path, *word.split(".")) for word in words]
    keys = [key for key in paths if key[-1] in _fields(model, key[:-1])]
    first, separator, message = line.partition(": ")
    if separator and keys and keys[0] == (*path, *first.split(".")):
        return Mistake(keys[0], message, related=tuple(keys[1:]))
    return Mistake(path, line, related=tuple(keys))


def _fields(model: type[BaseModel] | None, path: KeyPath) -> dict[str, FieldInfo]:
    """The keys of the section, or of the entry of a list, at `path`."""
    for part in path:
        if model is not None and isinstance(part, str):
            field = model.model_fields.get(part)
            model = None if field is None else _model_in(field.annotation)
    return {} if model is None else model.model_fields


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model`, `Model | None`, `tuple[Model, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _missing(loc: KeyPath, model: type[BaseModel]) -> str:
    field = _fields(model, loc[:-1]).get(loc[-1])
    needed = [key for key, inner in _fields(model, loc).items() if inner.is_required()]
    what = f"a section with {', '.join(needed)}" if needed else field and field.description
    return f"is required: {what}" if what else "is required"


def show(value: Any) -> str:
    """`value` as a message quotes it, in YAML's words."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "keys and values"
    if isinstance(value, list | tuple):
        return f"[{printable(', '.join(map(show, value)), MAX_SHOWN)}]"
    if isinstance(value, str):
        return f"'{printable(value, MAX_SHOWN)}'"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _unknown_key(loc: KeyPath, model: type[BaseModel], hints: Mapping[str, str]) -> str:
    """What may be meant: a similar key here, a hint, a similar key elsewhere."""
    key, here = str(loc[-1]), _fields(model, loc[:-1])
    if near := nearest(key, here):
        return f"unknown key; did you mean '{near}'?"
    if key in hints:
        return f"unknown key; {hints[key]}"
    if key in model.model_fields:
        return f"unknown key; did you mean {key}?"
    elsewhere: dict[str, str] = {}
    for name in reversed(model.model_fields):  # of keys in several sections the first is shown
        elsewhere |= {key: f"{name}.{key}" for key in _fields(model, (name,))}
    expected = f"; expected one of {', '.join(here)}" if here else ""
    return f"unknown key{did_you_mean(key, elsewhere) or expected}"
