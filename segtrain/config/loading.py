"""Settings files: YAML text and `--set` overrides to a checked model, and a model back to YAML."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from segtrain.config.messages import Finding, is_section, report, validate
from segtrain.config.strict_yaml import KeyPath, dotted, parse_value, plain_value, scan_yaml
from segtrain.errors import ConfigError
from segtrain.text import printable

Model = TypeVar("Model", bound=BaseModel)

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*\Z")
# What may be meant as KEY=VALUE: "train.lr 0.1", "train.lr: 0.1".
_SPELLED = re.compile(r"([A-Za-z_]+(?:\.[A-Za-z_]+)+)(?::?[ ]+|:)([^ =]+)\Z")
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*\Z")


def parse_settings(
    model: type[Model],
    text: str,
    *,
    source: str,
    overrides: Sequence[str] = (),
    hints: Mapping[str, str] | None = None,
) -> Model:
    """The YAML `text` with `section.key=value` overrides applied, as a checked `model`.

    Args:
        source: the name of the file, for messages.
        hints: see `validation.validate`.

    Raises:
        ConfigError: one line for every mistake in the file and the overrides.
    """
    document = scan_yaml(text, source=source)
    places = {path: ((0, line), f"{source}:{line}") for path, line in document.lines.items()}
    findings = [Finding(path, text, line=line) for path, line, text in document.problems]
    return _check(model, document.data, overrides, findings, places, source, hints)


def override_settings(
    settings: Model,
    overrides: Sequence[str],
    *,
    source: str,
    hints: Mapping[str, str] | None = None,
) -> Model:
    """`settings` with `section.key=value` overrides applied and checked again.

    Args:
        source: where the settings came from, for messages.
    """
    return _check(type(settings), settings.model_dump(), overrides, [], {}, source, hints)


def _check(
    model: type[Model],
    data: dict[str, Any],
    overrides: Sequence[str],
    findings: list[Finding],
    places: dict[KeyPath, tuple[tuple[int, int], str]],
    source: str,
    hints: Mapping[str, str] | None,
) -> Model:
    unplaced = []
    for i, text in enumerate(overrides):
        try:
            path, value = _parse_override(text)
            _set(data, path, value, model)
        except ConfigError as error:
            unplaced.append(str(error))
            continue
        findings = [f for f in findings if not _overlap(f.path, path)]
        places = {p: place for p, place in places.items() if p[: len(path)] != path}
        for length in range(1, len(path) + 1):  # a section that only the override names
            place = ((1, i), f"--set {dotted(path)}")
            places[path[:length]] = (
                place if length == len(path) else places.get(path[:length], place)
            )
    checked = validate(model, data, hints=hints)
    if isinstance(checked, list):
        # A value that was refused is missing from the data, which is no second mistake.
        refused = [f.path for f in findings]
        findings += [f for f in checked if not any(_overlap(f.path, p) for p in refused if p)]
    if findings or unplaced:

        def place(finding: Finding) -> tuple[tuple[int, int], str]:
            if finding.line is not None:
                return (0, finding.line), f"{source}:{finding.line}"
            for path in (finding.path, *finding.related):
                if path in places:
                    return places[path]
            parents = (finding.path[:n] for n in range(len(finding.path) - 1, 0, -1))
            return next((places[path] for path in parents if path in places), ((0, 0), source))

        lines = [_for_shell(line) for line in report(findings, place)]
        raise ConfigError("\n".join([*lines, *unplaced]))
    assert not isinstance(checked, list)
    return checked


def _for_shell(line: str) -> str:
    """The line about an override, its example in the quotes that a list needs in a shell."""
    if not line.startswith("--set "):
        return line
    return re.sub(r"did you mean (\[[^]]*\])\?\Z", r"did you mean '\1'?", line)


def _overlap(a: KeyPath, b: KeyPath) -> bool:
    shared = min(len(a), len(b))
    return a[:shared] == b[:shared]


def _parse_override(text: str) -> tuple[KeyPath, Any]:
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not _KEY.match(key):
        spelled = _SPELLED.match(text.strip())
        example = "=".join(spelled.groups()) if spelled else "train.lr=0.01"
        raise ConfigError(
            f"--set {printable(text, 200)}: expected section.key=value, such as {example}"
        )
    return tuple(key.split(".")), parse_value(value, source=f"--set {key}")


def _set(data: dict[str, Any], path: KeyPath, value: Any, model: type[BaseModel]) -> None:
    """Puts `value` at `path` of `data`, making sections on the way."""
    if is_section(model, path):
        raise ConfigError(f"--set {dotted(path)}: is a section; set its keys one by one")
    for i, part in enumerate(path[:-1]):
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {dotted(path)}: {dotted(path[: i + 1])} is no section")
    data[path[-1]] = value


def to_yaml(settings: BaseModel) -> str:
    """Every field in order, one line each below its section; reads back as an equal model.

    Floats are written so that other YAML readers see floats too (`1.0e-05`, never `1e-05`).
    """
    blocks = []
    for key, value in settings.model_dump(mode="json").items():
        if isinstance(value, dict) and value:
            lines = [f"  {name}: {yaml_value(item)}" for name, item in value.items()]
            blocks.append("\n".join([f"{key}:", *lines]))
        else:
            blocks.append(f"{key}: {yaml_value(value)}")
    return "\n".join(blocks) + "\n"


def yaml_value(value: Any) -> str:
    """`value` on one line, as `--set` and the files of settings read it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa}{'' if '.' in mantissa else '.0'}{e}{exponent}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(yaml_value(item) for item in value)}]"
    if isinstance(value, dict):
        items = (f"{_text(key)}: {yaml_value(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    return _text(value) if isinstance(value, str) else str(value)


def _text(text: str) -> str:
    try:
        plain = _PLAIN.match(text) is not None and plain_value(text) == text
    except ValueError:
        plain = False
    # yes, no, on and off are text here and booleans elsewhere.
    if plain and text.lower() not in ("yes", "no", "on", "off", "y", "n", "true", "false", "null"):
        return text
    quoted = yaml.safe_dump(text, default_style='"', width=float("inf"), allow_unicode=True).strip()
    # Format characters too: YAML and Python escape in the same way.
    return printable(quoted, limit=2 * len(quoted) * len("\\U00000000"))
