"""What to write instead of words on a command line that segtrain does not know."""

import re
import shlex
from collections.abc import Sequence

from segtrain.config import FOREIGN_KEYS, Config
from segtrain.config_file import yaml_value
from segtrain.validation import nearest

# Of options by one name in several sections the first is meant.
_SECTIONS = ("train", "data", "augment", "model", "loss", "eval", "norm", "log", "checkpoint")
_ALL = {("train",), ("data", "check"), ("config", "show")}
_SOME = {"eval": ("eval.", "data."), "predict": ("eval.",)}


def instead_of(unknown: Sequence[str], argv: Sequence[str]) -> str:
    """An example of what to write instead of the first of `unknown` that is like an option.

    Returns:
        the end of a message, from "; " on; empty if nothing is like it.

    Args:
        unknown: the words of the command line `argv` that no option takes.
    """
    if not ({tuple(argv[:1]), tuple(argv[:2])} & _ALL or argv[0] in _SOME):
        return ""
    for word, value in _candidates(unknown, argv):
        if hint := _hint(word, value):
            allowed = _SOME.get(argv[0], ("",))
            key = re.search(r"--set '?(\S+?)=", hint)
            return hint if key is None or key[1].startswith(allowed) else ""
    return ""


def _candidates(unknown: Sequence[str], argv: Sequence[str]) -> list[tuple[str, str]]:
    """(name, value or "") of what may be meant as an option."""
    found = []
    for i, word in enumerate(argv):
        following = argv[i + 1] if i + 1 < len(argv) else ""
        after = "" if following.startswith("--") else following
        if word == "--set" and "=" not in after and argv[i + 2 : i + 3] in [[u] for u in unknown]:
            found.append((after, argv[i + 2]))  # --set KEY VALUE
        elif word in unknown:
            name, separator, value = word.partition("=")
            found.append((name, value if separator else after))
    return found


def _hint(word: str, value: str) -> str:
    name = word.lstrip("-").rstrip(":").replace("-", "_")
    keys = _keys()
    key = name if name in keys.values() else keys.get(name)
    if key is None and (word.startswith("-") or name in FOREIGN_KEYS):
        near = name if name in FOREIGN_KEYS else nearest(name, [*keys, *FOREIGN_KEYS])
        text = FOREIGN_KEYS.get(near or "", "")
        named = re.fullmatch(r"did you mean (\S+)\?", text)
        key = named[1] if named else keys.get(near or "")
        if key is None:
            example = ", such as --set train.steps=10000" if "train.steps" in text else ""
            return f"; {text}{example}" if text else ""
    if key is None:
        return ""
    return f"; write --set {shlex.quote(f'{key}={value or _usual(key)}')}"


def _keys() -> dict[str, str]:
    """The last word of every option, and its whole name."""
    keys: dict[str, str] = {"seed": "seed"}
    for section in reversed(_SECTIONS):
        fields = Config.model_fields[section].annotation.model_fields
        keys |= {key: f"{section}.{key}" for key in fields}
    return keys


def _usual(key: str) -> str:
    """A value for an example: the default, but true for a switch."""
    settings = Config
    for part in key.split("."):
        field = settings.model_fields[part]
        settings = field.annotation
    return "VALUE" if field.is_required() else yaml_value(field.default or True)
