"""Checks data against a pydantic model; says every mistake with its key, value and repair."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from segtrain.text import printable

_FOREIGN_KEYS = {
    "the class file in data.classes decides it": "num_classes class_names ignore_index",
    "the length is train.steps; an epoch is images / train.batch_size steps": "epochs num_epochs",
    "did you mean train.steps?": "max_iters iters",
    "did you mean optim.lr?": "learning_rate base_lr",
    "train.batch_size counts over all ranks": "batch_size_per_gpu samples_per_gpu",
    "did you mean data.num_workers?": "workers",
    "did you mean train.precision?": "amp fp16",
    "did you mean norm.kind?": "sync_bn",
    "did you mean train.init_from?": "load_from",
    "did you mean eval.flip?": "tta",
    "the number of processes is an option of the command: --nproc": "gpus",
    "the run directory is an option of the command: --output": "output_dir work_dir",
    "resuming is an option of the command: --resume": "resume",
    "did you mean model.backbone?": "layers encoder",
    "did you mean schedule.min_lr?": "eta_min",
    "it is 0.3 with schedule.kind one_cycle": "pct_start",
    "did you mean optim.layers?": "paramwise_cfg custom_keys frozen_stages",
    "there is no inheritance; a file says what differs from the defaults": "_base_ defaults",
}
FOREIGN_KEYS = {key: text for text, keys in _FOREIGN_KEYS.items() for key in keys.split()}


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` may be a misspelling or a part of; None if no choice is similar."""
    choices = list(choices)
    # At difflib's usual cutoff of 0.6 "unet" is similar to "pspnet".
    similar = difflib.get_close_matches(word, choices, n=1, cutoff=0.75)
    if not similar:
        parts = [choice for choice in choices if _is_part(word, choice) or _is_part(choice, word)]
        similar = difflib.get_close_matches(word, parts, n=1, cutoff=0)
    return similar[0] if similar else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean ...?` or ""; a mapping gives what to show for each choice."""
    near = nearest(word, choices)
    if near is None:
        return ""
    return f"; did you mean {choices[near] if isinstance(choices, Mapping) else near}?"


def _is_part(short: str, long: str) -> bool:
    """Whether all words of `short` are words of `long`: "crop" and "crop_size"."""
    words = set(re.findall(r"[a-z]{3,}", short.lower()))
    return bool(words) and words <= set(re.findall(r"[a-z]{3,}", long.lower()))


KeyPath = tuple[str | int, ...]
"""A key or list item, such as ("augment", "extra", 0, "name")."""

# The most that a message quotes of a key or value.
MAX_SHOWN = 60


class Mistake(NamedTuple):
    """What is wrong with one key."""

    path: KeyPath  # empty: the whole file
    message: str
    line: int | None = None  # of the mistake, from 1; None: that of the key
    related: tuple[KeyPath, ...] = ()  # other keys, whose place is shown if the key has none


class KeyPlace(NamedTuple):
    """Where a key is written. `order` sorts the lines of the file before the options."""

    order: tuple[int, int]
    text: str


def line_of(source: str, line: int) -> KeyPlace:
    """The place `source:line` in a file."""
    return KeyPlace((0, line), f"{source}:{line}")


def report(
    mistakes: Iterable[Mistake], places: Mapping[KeyPath, KeyPlace], *, source: str
) -> list[str]:
    """One line for each mistake, such as `own.yaml:12: optim.lr: ...`, in the order of the places.

    places: of every key that is written in the file `source` or in an option.
    """
    lines = []
    for mistake in mistakes:
        order, where = _place(mistake, places, source)
        key = dotted(mistake.path)
        label = "" if not key or where.endswith(f" {key}") else f" {key}:"
        lines.append((order, f"{where}:{label} {mistake.message}"))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def dotted(path: KeyPath) -> str:
    """`path` as people write it: `augment.extra[0].name`."""
    parts = (f"[{p}]" if isinstance(p, int) else f".{printable(p, MAX_SHOWN)}" for p in path)
    return "".join(parts).removeprefix(".")


def _place(mistake: Mistake, places: Mapping[KeyPath, KeyPlace], source: str) -> KeyPlace:
    """Its own line, else its key, else a related key, else a section around it, else the file."""
    if mistake.line is not None:
        return line_of(source, mistake.line)
    # The innermost section first.
    parents = (mistake.path[:length] for length in range(len(mistake.path) - 1, 0, -1))
    paths = (mistake.path, *mistake.related, *parents)
    return next((places[path] for path in paths if path in places), KeyPlace((0, 0), source))


Model = TypeVar("Model", bound=BaseModel)

# The type of an error of pydantic whose message says all that there is to say.
TOLD = "told"

# Pydantic's words for Python's types, and those for YAML's.
_WORDS = (
    (r"^(?:Input|String|Tuple|List) should ", "must "),
    (r"a valid dictionary or instance of \w+", "keys and values"),
    ("a valid tuple", "a list in brackets"),
    ("a valid (string|boolean)", r"a \1"),
    ("a valid ", "a "),
    (" after validation, not [0-9]+", ""),
    ("a integer", "an integer"),
    ("a string", "text"),
    ("a boolean", "true or false"),
    (r"match pattern '\^\[\^/\]\+/\.'", "be METRIC/SCORE"),  # eval.best
)


def validate(
    model: type[Model],
    data: Mapping[str, Any],
    *,
    hints: Mapping[str, str] | None = None,
    context: Mapping[str, str] | None = None,
) -> Model | list[Mistake]:
    """`data` as a `model`, or all that is wrong with it.

    Lists are accepted for tuples and integers for floats; nothing else is converted.

    Args:
        hints: what to write instead of keys that other tools use.
        context: what validators are told.
    """
    try:
        return model.model_validate(_tuples(data), context=context)
    except ValidationError as error:
        errors = error.errors()
    mistakes: dict[Mistake, None] = {}  # in order, each once
    paths = [_written(details["loc"], data) for details in errors]
    for path, details in zip(paths, errors, strict=True):
        inside = [e for p, e in zip(paths, errors, strict=True) if p[: len(path)] == path]
        has_items = any(len(e["loc"]) > len(details["loc"]) for e in inside)
        # A list whose items are wrong counts as empty too, and as no word of a union.
        if details["type"] not in ("too_short", "literal_error", "string_type") or not has_items:
            same = [e for e in inside if e["input"] is details["input"]]
            mistakes |= dict.fromkeys(_describe(details, same, path, model, hints or {}))
    return list(mistakes)


def _tuples(value: Any) -> Any:
    # Strict pydantic takes no list for a tuple, and tuples keep a frozen config frozen.
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    return value


def _describe(
    error: Any, same: list[Any], path: KeyPath, model: type[BaseModel], hints: Mapping[str, str]
) -> Iterator[Mistake]:
    """The mistakes of an error; `same`: all errors of its value, one for each type of a union."""
    loc, kind = error["loc"], error["type"]
    if kind == "extra_forbidden":
        yield Mistake(loc, _unknown_key(loc, model, hints))
    elif kind == "missing":
        yield Mistake(loc, _missing(loc, model))
    elif kind == "value_error":
        for line in str(error["ctx"]["error"]).splitlines():
            yield _from_validator(line, loc, model)
    elif kind == TOLD:
        yield Mistake(loc, error["msg"])
    else:
        messages = [details["msg"] for details in same]
        for pattern, words in _WORDS:
            messages = [re.sub(pattern, words, message) for message in messages]
        # "deeplabv3+" is the usual name of deeplabv3plus, and another network than deeplabv3.
        expected = " ".join(details.get("ctx", {}).get("expected", "") for details in same)
        choices = re.findall("'([^']*)'", expected)
        hint = did_you_mean(str(error["input"]).replace("+", "plus"), choices)
        message = " or ".join(dict.fromkeys(messages)).replace(" or must be ", " or ")
        yield Mistake(path, f"{message}, got {show(error['input'])}{hint}")


def _written(loc: KeyPath, data: Any) -> KeyPath:
    """`loc` without the names that pydantic gives to the types of a union."""
    written = []
    for part in loc:
        with suppress(KeyError, IndexError, TypeError):
            data = data[part]
            written.append(part)
    return tuple(written)


def _from_validator(line: str, path: KeyPath, model: type[BaseModel]) -> Mistake:
    """The mistake in a validator's `key: message`; the message may name further keys."""
    # Words of the message that are keys: if its own key is written nowhere, the line of one of
    # these is shown.
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
    # Nothing similar in this section: perhaps the key belongs to another one.
    elsewhere: dict[str, str] = {}
    for name in reversed(model.model_fields):  # of keys in several sections the first is shown
        elsewhere |= {key: f"{name}.{key}" for key in _fields(model, (name,))}
    expected = f"; expected one of {', '.join(here)}" if here else ""
    return f"unknown key{did_you_mean(key, elsewhere) or expected}"
