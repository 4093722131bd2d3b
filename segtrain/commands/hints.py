"""The `--set` to write instead of an option that segtrain does not know."""

import re
import shlex
from collections.abc import Sequence

from segtrain.config import Config
from segtrain.config.loading import yaml_value
from segtrain.config.options import FOREIGN_KEYS, SECTIONS
from segtrain.config.suggest import nearest

# The options that --set may change, by the beginning of their names; other commands: all.
_SETTABLE = {"eval": ("eval.", "data."), "predict": ("eval.",)}


def instead_of(unknown: Sequence[str], argv: Sequence[str]) -> str:
    """The end of a message, from "; " on, about the first word that is similar to an option."""
    settable = _SETTABLE.get(argv[0], ("",))
    for word in unknown:
        name, _, value = word.partition("=")
        key = _meant(name.strip("-").replace("-", "_"))
        if key in FOREIGN_KEYS.values():
            return f"; {key}"
        if key.startswith(settable) and key:
            following = argv[argv.index(word) + 1 :][:1]
            if not value and following and not following[0].startswith("--"):
                value = following[0]
            return f"; write --set {shlex.quote(f'{key}={value or _usual(key)}')}"
    return ""


def _meant(name: str) -> str:
    """The option `section.key` that has this name, or a similar one; else a hint, else ""."""
    # If several sections have an option of the same name, the first of these is meant.
    sections = ("train", *SECTIONS)
    keys = [f"{section}.{key}" for section in sections for key in SECTIONS[section].model_fields]
    if name in keys:
        return name
    choices = FOREIGN_KEYS | {key.rpartition(".")[2]: key for key in reversed(keys)}
    choices["seed"] = "seed"
    meant = choices[near] if (near := nearest(name, choices)) else ""
    named = re.fullmatch(r"did you mean (\S+)\?", meant)
    return named[1] if named else meant


def _usual(key: str) -> str:
    """A value for an example: the default, but true for a switch."""
    settings = Config
    for part in key.split("."):
        field = settings.model_fields[part]
        settings = field.annotation
    return "VALUE" if field.is_required() else yaml_value(field.default or True)
