"""From YAML text and `--set` options to a checked Config, and back to YAML."""

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from segtrain import __version__, plugins
from segtrain.config.experiment import SECTIONS, Config
from segtrain.config.messages import (
    FOREIGN_KEYS,
    KeyPath,
    KeyPlace,
    Mistake,
    dotted,
    report,
    validate,
)
from segtrain.config.plugin_names import ONLY_LOOKED_AT, TO_BE_TRAINED
from segtrain.config.strict_yaml import Document, parse_value, plain_value, read_text, scan_yaml
from segtrain.errors import ConfigError
from segtrain.text import printable

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*\Z")
_WRITTEN_BY = re.compile(r"# segtrain (\S+)\n")
_OPTION = re.compile(rf"^(?:{'|'.join(SECTIONS)})\.[a-z_]+(?=[: ])", re.MULTILINE)
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*\Z")
# Text without quotes here, but booleans to other YAML readers.
_BOOLEANS = ("yes", "no", "on", "off", "y", "n", "true", "false", "null")


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    imports: bool = True,
) -> Config:
    """The experiment in the YAML file `path`, with `section.key=value` overrides applied.

    imports: whether its plugins are imported; not where its run is only looked at, and then they
        need not be here.

    Raises:
        ConfigError: one line for every mistake, with `file:line` or `--set key`.
    """
    text, source = read_text(path), str(path)
    if imports:
        folder = Path(path).parent
        return parse_config(text, source=source, overrides=overrides, imports_from=folder)
    return _parsed(text, source, overrides, context=ONLY_LOOKED_AT)


def parse_config(
    text: str,
    *,
    source: str,
    overrides: Sequence[str] = (),
    imports_from: Path | None = None,
) -> Config:
    """As `load_config`, from YAML `text`; messages call it `source`.

    imports_from: the folder where paths of its plugins start; None: they are not imported.
    """
    return _parsed(text, source, overrides, imports_from=imports_from)


def _parsed(text: str, source: str, overrides: Sequence[str], **how: Any) -> Config:
    by = _WRITTEN_BY.match(text)
    document = scan_yaml(text, source=source)
    return _checked(document, overrides, version=by and by[1], **how)


def with_places(message: str, source: str, overrides: Sequence[str]) -> str:
    """`message` of a check after loading, with the place of each option that begins a line.

    source: the config, or the run or checkpoint that holds it.
    """
    options = given_keys(overrides)
    try:
        places = scan_yaml(read_text(source), source=source).places
    except ConfigError:
        places = None  # no YAML

    def placed(match: re.Match[str]) -> str:
        key = match[0]
        if key in options:
            return f"--set {key}"
        if places is None:
            return f"{printable(source)}: {key}"
        place = places.get(tuple(key.split(".")))
        return f"{place.text}: {key}" if place else key

    return _OPTION.sub(placed, message)


def override_config(
    config: Config | Mapping[str, Any],
    overrides: Sequence[str],
    *,
    source: str,
    imports_from: Path | None = None,
) -> Config:
    """`config`, or options by section as in a file, with `section.key=value` overrides, checked.

    source: where the config came from, such as a checkpoint, for messages.
    imports_from: as in `parse_config`.
    """
    # A copy: `_set` changes it, and the caller keeps the mapping.
    data = config.model_dump() if isinstance(config, Config) else deepcopy(dict(config))
    return _checked(Document(source, data, {}, ()), overrides, imports_from=imports_from)


def _checked(
    document: Document,
    overrides: Sequence[str],
    *,
    version: str | None = None,
    imports_from: Path | None = None,
    context: Mapping[str, str] | None = None,
) -> Config:
    data, places, mistakes = document.data, document.places, list(document.mistakes)
    unplaced = []
    for i, text in enumerate(overrides):
        try:
            path, value = _parse_override(text)
            _set(data, path, value)
        except ConfigError as error:
            unplaced.append(str(error))
            continue
        # The override replaces what the file says there, even a mistake.
        mistakes = [m for m in mistakes if not _overlap(m.path, path)]
        places = {p: place for p, place in places.items() if p[: len(path)] != path}
        for length in range(len(path), 0, -1):  # the sections too, where the file has none
            places.setdefault(path[:length], KeyPlace((1, i), f"--set {dotted(path)}"))
    # Paths on a command line start in the working directory, not beside the file.
    if "plugins" in given_keys(overrides):
        imports_from = imports_from and Path()
    if imports_from is not None:
        context = TO_BE_TRAINED
    # Before the check, which looks the names of plugins up.
    failed = _import_plugins(data, imports_from)
    checked = failed or validate(Config, data, hints=FOREIGN_KEYS, context=context)
    if isinstance(checked, list):
        if imports_from is None and (left := set(data.get("plugins", ())) - {*plugins.loaded()}):
            ways = " ".join(dict.fromkeys(map(plugins.option_of, sorted(left, key=str))))
            what = "not imported: what is only looked at runs no code; if you trust it, give"
            mistakes.append(Mistake(("plugins",), f"{what} {ways}"))
            # Names and options of theirs are unknown for that reason, which is no second mistake.
            checked = []
        # A value that was refused is missing from the data, which is no second mistake.
        refused = [m.path for m in mistakes if m.path]
        mistakes += [m for m in checked if not any(_overlap(m.path, path) for path in refused)]
    # What segtrain wrote holds no misspelt keys: an unknown one is of another version.
    if version is not None:
        note = f"; segtrain {printable(version, 20)} wrote this file"
        note += "" if version == __version__ else f", and this is {__version__}"
        mistakes = [
            m._replace(message=m.message + note)
            if m.message.startswith("unknown key") and m.path in document.lines
            else m
            for m in mistakes
        ]
    if mistakes or unplaced:
        lines = report(mistakes, places, source=document.source)
        raise ConfigError("\n".join([*lines, *unplaced]))
    assert isinstance(checked, Config)
    return checked


def _import_plugins(data: dict[str, Any], folder: Path | None) -> list[Mistake]:
    """Imports what `plugins` names, by full paths from then on, for the names in the config.

    folder: where their paths start; None: nothing is imported, because somebody else may have
        written the file.
    """
    listed = data.get("plugins")
    if not isinstance(listed, list | tuple) or not all(isinstance(x, str) and x for x in listed):
        return []  # pydantic says what is wrong with it
    sources, mistakes = [], []
    for i, source in enumerate(listed):
        try:
            sources.append(source if folder is None else plugins.load(source, folder))
        except ConfigError as error:
            mistakes.append(Mistake(("plugins", i), str(error)))
    # By full paths: the config of a run is read again from another folder.
    data["plugins"] = sources
    return mistakes


def _overlap(a: KeyPath, b: KeyPath) -> bool:
    """Whether one of the two is the other or a section around it."""
    shared = min(len(a), len(b))
    return a[:shared] == b[:shared]


def _parse_override(text: str) -> tuple[KeyPath, Any]:
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not _KEY.match(key):
        shown = printable(text, 200)
        raise ConfigError(f"--set {shown}: expected section.key=value, such as optim.lr=0.01")
    return tuple(key.split(".")), parse_value(value, source=f"--set {key}")


def _set(data: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Puts `value` at `path` of `data`; adds sections that are missing."""
    if len(path) == 1 and path[0] in SECTIONS:
        raise ConfigError(f"--set {dotted(path)}: is a section; set its keys one by one")
    for i, part in enumerate(path[:-1]):
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {dotted(path)}: {dotted(path[: i + 1])} is no section")
    data[path[-1]] = value


def config_to_yaml(config: Config) -> str:
    """The whole experiment as YAML, every option in order; loads back as an equal config.

    The version is a comment and no option: a config does not become another one by an update.
    """
    lines = [f"# segtrain {__version__}"]
    for key, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            lines += [f"{key}:", *(f"  {name}: {yaml_value(item)}" for name, item in value.items())]
        else:
            lines.append(f"{key}: {yaml_value(value)}")
    return "\n".join(lines) + "\n"


def given_key(override: str) -> str:
    """The option that `--set` names, such as `eval.mode`."""
    return override.partition("=")[0].strip()


def given_keys(overrides: Iterable[str]) -> set[str]:
    """Those of several `--set`."""
    return set(map(given_key, overrides))


def yaml_value(value: Any) -> str:
    """`value` on one line, as `--set` and the config files read it.

    Other YAML readers see floats too: `1.0e-05`, never `1e-05`.
    """
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
    if plain and text.lower() not in _BOOLEANS:
        return text
    quoted = yaml.safe_dump(text, default_style='"', width=float("inf"), allow_unicode=True).strip()
    # Format characters too: YAML and Python escape in the same way.
    return printable(quoted, limit=2 * len(quoted) * len("\\U00000000"))
