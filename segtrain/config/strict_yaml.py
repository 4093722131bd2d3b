"""YAML without surprises: a value means what it looks like, or it is refused with its line.

PyYAML follows YAML 1.1: `1e-3` is text, `010` is 8, `12:30` is 750, `yes` is true, and of a
repeated key the last wins silently. Here `null` and `~` are nothing, `true` and `false` the only
booleans, `12`, `0.5`, `1e-3`, `.5` and `2.` numbers, and other values text. Spellings that YAML
readers disagree about, anchors, aliases, merge keys, tags, repeated keys, empty values, several
documents and files beyond any settings are refused.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from segtrain.config.messages import MAX_SHOWN, KeyPath, KeyPlace, Mistake, dotted, line_of
from segtrain.errors import ConfigError
from segtrain.files import open_regular
from segtrain.text import printable

# Far above any experiment or class file (ADE20K's has 6 kB), and read in two seconds.
MAX_BYTES = 100_000
_MAX_DEPTH = 20

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\Z")
# Values that YAML readers disagree about.
# No two repeats side by side may match the same characters: a long value would take minutes.
_AMBIGUOUS = re.compile(
    r"[-+]?(?:0[0-9_]+"  # octal
    r"|0[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?"  # leading 0
    r"|0[xob][0-9a-fA-F_]+"  # not decimal
    r"|[0-9]+_[0-9_]*(?:\.[0-9_]*)?"
    r"|[0-9]+(?::[0-9]{1,2})+(?:\.[0-9]*)?"  # base 60
    r"|\.(?:inf|Inf|INF))\Z"
    r"|(?:\.nan|\.NaN|\.NAN|None|Null|NULL)\Z"
)


class Document(NamedTuple):
    """A parsed file."""

    source: str  # its name in messages
    data: dict[str, Any]  # without the values that were refused
    lines: dict[KeyPath, int]  # from 1, of every key and list item
    mistakes: tuple[Mistake, ...]  # the values that were refused

    @property
    def places(self) -> dict[KeyPath, KeyPlace]:
        """`lines` for `messages.report`."""
        return {path: line_of(self.source, line) for path, line in self.lines.items()}


def read_text(path: str | Path) -> str:
    """The text of a settings file: UTF-8 without a byte order mark, at most MAX_BYTES."""
    shown = printable(path)
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ConfigError(f"{shown}: cannot be read: {reason}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{shown}: larger than {MAX_BYTES} bytes; this is no file of settings")
    if content.startswith(b"\xef\xbb\xbf"):
        raise ConfigError(f"{shown}:1: starts with a byte order mark; save it as UTF-8 without BOM")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{shown}:{content[: error.start].count(10) + 1}"
        byte = f"byte 0x{content[error.start]:02x}"
        raise ConfigError(f"{where}: {byte} is not UTF-8; save it as UTF-8") from None


def scan_yaml(text: str, *, source: str, example: str = "") -> Document:
    """The mapping in `text`; values that were refused are left out and listed in `mistakes`.

    example: a line of such a file, for the ConfigError if there is no mapping.
    """
    try:
        root = _compose(text)
    except _StructureError as error:
        line, message = error.args
        raise ConfigError(f"{source}:{line}: {message}") from None
    expected = "expected keys and values" + (f", such as '{example}'" if example else "")
    if root is None:
        raise ConfigError(f"{source}: is empty; {expected}")
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise ConfigError(f"{source}:{_line(root)}: {kind} at the top; {expected}")
    builder = _Builder()
    data = builder.mapping(root, ())
    return Document(source, data, builder.lines, tuple(builder.mistakes))


def parse_value(text: str, *, source: str) -> Any:
    """One value from a command line, called `source`, by the rules of the files.

    Text that starts with a bracket, brace or quote is YAML (`[512, 1024]`, `{p: 0.5}`, `"012"`).
    Other text is one value as it stands, so a path may contain `#` or `: `.
    """
    text = text.strip()
    if not text:
        raise ConfigError(f"{source}: has no value; write null for nothing, '' for no text")
    if bad := yaml.reader.Reader.NON_PRINTABLE.search(text):
        raise ConfigError(f"{source}: character {bad.group()!a} is not allowed")
    try:
        if text[0] not in "[{'\"":
            return plain_value(text)
        root = _compose(text)
    except _StructureError as error:
        raise ConfigError(f"{source}: {error.args[1]}") from None
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    # Text such as `"a": 1` begins with a quote too, and is a mapping.
    if root is None or (isinstance(root, yaml.MappingNode) and not root.flow_style):
        raise ConfigError(f"{source}: expected one value, got {printable(text, MAX_SHOWN)}")
    builder = _Builder()
    value = builder.value(root, ())
    for mistake in builder.mistakes:
        key = f" {dotted(mistake.path)}:" if mistake.path else ""
        raise ConfigError(f"{source}:{key} {mistake.message}")
    return value


def foreign_yaml(text: str, *, as_text: bool = False) -> Any:
    """What another program, or another version of this one, wrote; by fewer rules than our files.

    Keys are text. Values are what `plain_value` makes of them, or text where it refuses, or all
    text. Of a repeated key the last counts. Anchors, aliases and tags are refused here too: a few
    hundred bytes of nested merge keys would take hours.

    Raises:
        ValueError: it is not YAML, or has those, or is nested too deeply.
    """
    # libyaml is ten times as fast, and `segtrain runs` reads the configs of hundreds of runs.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    open_nodes: list[Any] = [[]]  # lists; of a mapping, its keys and values in turn
    try:
        for event in yaml.parse(text, Loader=loader):
            if getattr(event, "anchor", None) or getattr(event, "tag", None):
                raise ValueError("anchors, aliases and tags are not allowed")
            if isinstance(event, yaml.ScalarEvent):
                # In a mapping, keys and values take turns.
                is_key = isinstance(open_nodes[-1], _Pairs) and len(open_nodes[-1]) % 2 == 0
                is_text = as_text or is_key or bool(event.style)  # quotes or a block
                open_nodes[-1].append(event.value if is_text else _lenient(event.value))
            elif isinstance(event, yaml.CollectionStartEvent):
                if len(open_nodes) > _MAX_DEPTH:
                    raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                open_nodes.append(_Pairs() if is_mapping else [])
            elif isinstance(event, yaml.CollectionEndEvent):
                node = open_nodes.pop()
                if isinstance(node, _Pairs):
                    node = dict(zip(node[::2], node[1::2], strict=True))
                open_nodes[-1].append(node)
            elif isinstance(event, yaml.DocumentEndEvent):
                break
    except (yaml.YAMLError, TypeError) as error:  # TypeError: a list or mapping as a key
        raise ValueError(f"not YAML: {printable(error, MAX_SHOWN)}") from None
    return open_nodes[0][0] if open_nodes[0] else None


class _Pairs(list[Any]):
    """Keys and values of a mapping that is not complete yet."""


def _lenient(text: str) -> str | int | float | bool | None:
    try:
        return plain_value(text)
    except ValueError:
        return text or None


def plain_value(text: str) -> str | int | float | bool | None:
    """What `text` without quotes means; ValueError: it is refused."""
    if text == "":
        raise ValueError("has no value; remove the key, or write null for nothing")
    if text in ("null", "~"):
        return None
    if text in ("true", "false"):
        return text == "true"
    if _AMBIGUOUS.match(text):
        shown = printable(text, MAX_SHOWN)
        raise ValueError(
            f"{shown} is refused, YAML readers disagree about it; write a plain decimal number or "
            "null; for text, put it in quotes"
        )
    is_int = _INT.match(text) is not None
    if not is_int and not _FLOAT.match(text):
        return text
    number = int(text) if is_int else float(text)
    # float() makes infinity of 1e999.
    if abs(number) == float("inf"):
        raise ValueError(f"{text} is too large for a number")
    return number


class _StructureError(Exception):
    """Its arguments are the line and the message."""


class _Loader(yaml.SafeLoader):
    """Composes nodes; refuses features that hide what a file says, and guesses no types."""

    # Emptied: `plain_value` alone decides what text without quotes means.
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (the name is PyYAML's)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            self._refuse(event, "anchors and aliases (& and *) are not allowed; repeat the value")
        if (tag := getattr(event, "tag", None)) is not None:
            tag = printable(tag.replace("tag:yaml.org,2002:", "!!"), 40)
            self._refuse(event, f"tags such as {tag} are not allowed; put text in quotes")
        # PyYAML composes by recursion, which a file of brackets would drive beyond Python's stack.
        if self.depth == _MAX_DEPTH:
            self._refuse(event, f"nested deeper than {_MAX_DEPTH} levels")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _refuse(self, event: yaml.Event, message: str) -> NoReturn:
        raise _StructureError(event.start_mark.line + 1, message)


def _compose(text: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"character {text[error.position]!a} is not allowed"
        raise _StructureError(line, message) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _StructureError(mark.line + 1, _explain(error, text, mark)) from None
    except (ValueError, OverflowError):  # of int() and chr(), which PyYAML leaves to its callers
        message = "no such character (\\U in quotes goes up to 0010FFFF), or no such %YAML version"
        raise _StructureError(loader.line + 1, message) from None


def _explain(error: yaml.MarkedYAMLError, text: str, mark: yaml.Mark) -> str:
    problem = error.problem or "is not YAML"
    before = (text.split("\n")[mark.line : mark.line + 1] or [""])[0][: mark.column]
    if "found character '\\t'" in problem or "\t" in before[len(before.rstrip()) :]:
        return "a tab; use spaces"
    if "but found another document" in problem:
        return "a second document (---); expected one"
    if "<stream end>" in problem or "unexpected end of stream" in problem:
        return "the file ends inside a list, mapping or quoted text"
    shown = printable(problem, MAX_SHOWN)
    return f"{shown}; check quotes, brackets and the indentation"


class _Builder:
    """Turns nodes into Python values; collects the lines of keys and the values it refuses."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.mistakes: list[Mistake] = []

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            self.lines |= {(*path, i): _line(child) for i, child in enumerate(node.value)}
            return [self.value(child, (*path, i)) for i, child in enumerate(node.value)]
        try:
            return _scalar(node)
        except ValueError as error:
            return self._refuse(node, path, str(error))

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, child in node.value:
            key = self._key(key_node, path)
            if key is None:
                continue
            child_path = (*path, key)
            if child_path in self.lines:
                first = self.lines[child_path]
                self._refuse(key_node, child_path, f"is given twice, first on line {first}")
                continue
            self.lines[child_path] = _line(key_node)
            num_mistakes = len(self.mistakes)
            value = self.value(child, child_path)
            # A refused value is left out, so that no later check tells of it again.
            if all(mistake.path != child_path for mistake in self.mistakes[num_mistakes:]):
                mapping[key] = value
        return mapping

    def _key(self, node: yaml.Node, path: KeyPath) -> str | None:
        """The key that `node` spells; None if it is refused."""
        if not isinstance(node, yaml.ScalarNode):
            return self._refuse(node, path, "a key must be text, got a list or mapping")
        if node.style is None and node.value == "<<":
            return self._refuse(node, path, "merge keys (<<) are not allowed; repeat the values")
        with suppress(ValueError):
            if isinstance(key := _scalar(node), str):
                return key
        got = printable(node.value, MAX_SHOWN) or "nothing"
        return self._refuse(node, path, f"a key must be text, got {got}")

    def _refuse(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        self.mistakes.append(Mistake(path, message, _line(node)))


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    return plain_value(node.value) if node.style is None else node.value


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1
