"""YAML without surprises: every value means what it looks like, or it is refused with its line.

PyYAML follows YAML 1.1, where `1e-3` is text, `010` is 8, `12:30` is 750, `yes` is true and a
repeated key silently wins. Here a plain value is one of

    null ~                    nothing
    true false                the only booleans; yes, no, on and off are text
    12 -3                     integers
    0.5 1e-3 .5 2.            floats
    anything else             text

and spellings that YAML readers disagree about (`012`, `0x1f`, `1_000`, `12:30`, `.inf`, `None`) are
refused rather than guessed; in quotes they are text. Anchors, aliases, merge keys, tags, repeated
keys, empty values, several documents and absurd sizes are refused too.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from segtrain.errors import ConfigError
from segtrain.files import open_regular
from segtrain.text import printable

KeyPath = tuple[str | int, ...]

# Far above any experiment or class file (ADE20K's has 6 kB and 600 values), and read in a second.
MAX_BYTES = 100_000
MAX_NODES = 10_000
MAX_DEPTH = 20
_MAX_DIGITS = 40
# What a message quotes of a file: enough to find the place, and no more of what it may hold.
_MAX_SHOWN = 60
# Halves of UTF-16 pairs, which quoted text can spell ("\ud83d") and no file can hold.
_SURROGATE = re.compile("[\ud800-\udfff]")

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\Z")
# What PyYAML or another YAML reader would take for something else than it looks like, and why.
# No two repeats side by side may match the same characters: a long value would take minutes.
_AMBIGUOUS = (
    (re.compile(r"[-+]?0[0-9_]+\Z"), "some readers take the leading 0 for octal"),
    (re.compile(r"[-+]?0[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?\Z"), "a number has no leading 0"),
    (re.compile(r"[-+]?0[xob][0-9a-fA-F_]+\Z"), "write numbers in decimal"),
    (re.compile(r"[-+]?[0-9]+_[0-9_]*(?:\.[0-9_]*)?\Z"), "write numbers without _"),
    (re.compile(r"[-+]?[0-9]+(?::[0-9]{1,2})+(?:\.[0-9]*)?\Z"), "some readers count it in base 60"),
    (re.compile(r"[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"), "numbers must be finite"),
    (re.compile(r"None\Z|Null\Z|NULL\Z"), "write null for nothing"),
)


class Problem(NamedTuple):
    """One mistake: the key it is about (empty: the file), its line from 1, and what is wrong."""

    path: KeyPath
    line: int
    message: str


class Document(NamedTuple):
    """A parsed file.

    source: the name to show in messages, usually the path as given.
    data: the mapping at the top; only dict, list, str, int, float, bool and None inside.
    lines: line (from 1) of every key and list item, by its path, such as ("train", "lr") or
    ("augment", "extra", 0, "name").
    problems: values that were refused; they are not in `data`.
    """

    source: str
    data: dict[str, Any]
    lines: dict[KeyPath, int]
    problems: tuple[Problem, ...] = ()


def read_yaml(path: str | Path) -> Document:
    """The mapping in the file `path`.

    Raises:
        ConfigError: the file cannot be read or is not the YAML described above; all refused values
            are listed.
    """
    return checked(scan_yaml(read_text(path), source=str(path)))


def read_text(path: str | Path) -> str:
    """The text of a settings file: UTF-8 without a byte order mark, at most MAX_BYTES."""
    shown = printable(path)
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{shown}: cannot be read: {reason}") from None
    except ValueError as error:  # a NUL character in the name
        raise ConfigError(f"{shown}: cannot be read: {error}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{shown}: larger than {MAX_BYTES} bytes; this is no file of settings")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{shown}:1: this is UTF-16; save it as UTF-8 without BOM")
    if content.startswith(b"\xef\xbb\xbf"):
        raise ConfigError(f"{shown}:1: starts with a byte order mark; save it as UTF-8 without BOM")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{content[error.start]:02x}"
        raise ConfigError(f"{shown}:{line}: {byte} is not UTF-8; save it as UTF-8") from None


def scan_yaml(text: str, *, source: str, example: str = "") -> Document:
    """The mapping in `text`, with refused values in `problems` for the caller to report.

    Args:
        example: a line of such a file, for the message where there is no mapping.

    Raises:
        ConfigError: the text has no readable structure at all; with `source:line`.
    """
    try:
        root = _compose(text)
    except _StructureError as error:
        raise ConfigError(f"{source}:{error.line}: {error.message}") from None
    expected = "expected keys and values" + (f", such as '{example}'" if example else "")
    if root is None:
        raise ConfigError(f"{source}: is empty; {expected}")
    if not isinstance(root, yaml.MappingNode):
        found = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise ConfigError(f"{source}:{_line(root)}: {found} at the top; {expected}")
    builder = _Builder()
    data = builder.mapping(root, ())
    return Document(source, data, builder.lines, tuple(builder.problems))


def checked(document: Document) -> Document:
    """`document`, if nothing in it was refused; a ConfigError with one line a problem otherwise."""
    if document.problems:
        raise ConfigError("\n".join(describe(document.source, p) for p in document.problems))
    return document


def describe(source: str, problem: Problem) -> str:
    """`file.yaml:12: train.lr: what is wrong`."""
    key = f" {dotted(problem.path)}:" if problem.path else ""
    return f"{source}:{problem.line}:{key} {problem.message}"


def dotted(path: KeyPath) -> str:
    """`path` as people write it: `augment.extra[0].name`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = printable(part, _MAX_SHOWN)
            text += f".{name}" if text else name
    return text


def parse_value(text: str, *, source: str) -> Any:
    """One value from a command line, by the rules of the files.

    Text that starts with a bracket, brace or quote is YAML (`[512, 1024]`, `{p: 0.5}`, `"012"`);
    anything else is one plain value, so paths may hold `#`, `: ` and other signs of YAML.

    Raises:
        ConfigError: with `source`.
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
        raise ConfigError(f"{source}: {error.message}") from None
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    if root is None or (isinstance(root, yaml.MappingNode) and not root.flow_style):
        raise ConfigError(f"{source}: expected one value, got {printable(text, _MAX_SHOWN)}")
    builder = _Builder()
    value = builder.value(root, ())
    for problem in builder.problems:
        key = f" {dotted(problem.path)}:" if problem.path else ""
        raise ConfigError(f"{source}:{key} {problem.message}")
    return value


def plain_value(text: str) -> str | int | float | bool | None:
    """What unquoted `text` means.

    Raises:
        ValueError: it means different things to different YAML readers, or is no finite number.
    """
    if text == "":
        raise ValueError("has no value; remove the key, or write null for nothing")
    if text in ("null", "~"):
        return None
    if text in ("true", "false"):
        return text == "true"
    for pattern, reason in _AMBIGUOUS:
        if pattern.match(text):
            shown = printable(text, _MAX_SHOWN)
            raise ValueError(f"{shown} is refused: {reason}; for text, put it in quotes")
    is_int = _INT.match(text) is not None
    if not is_int and not _FLOAT.match(text):
        return text
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} characters; at most {_MAX_DIGITS} are allowed")
    number = int(text) if is_int else float(text)
    if abs(number) == float("inf"):
        raise ValueError(f"{text} is too large for a number")
    return number


class _StructureError(Exception):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


class _Loader(yaml.SafeLoader):
    """Composes nodes without features that hide what a file says, and without guessing types."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (the name is PyYAML's)
    depth = 0
    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            self._refuse(event, "anchors and aliases (& and *) are not allowed; repeat the value")
        if (tag := getattr(event, "tag", None)) is not None:
            tag = printable(tag.replace("tag:yaml.org,2002:", "!!"), 40)
            self._refuse(event, f"tags such as {tag} are not allowed; put text in quotes")
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            self._refuse(event, f"more than {MAX_NODES} values; this is no file of settings")
        if self.depth == MAX_DEPTH:
            self._refuse(event, f"nested deeper than {MAX_DEPTH} levels")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _refuse(self, event: yaml.Event, problem: str) -> NoReturn:
        raise _StructureError(event.start_mark.line + 1, problem)


def _compose(text: str) -> yaml.Node | None:
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = text[error.position]
        raise _StructureError(line, f"character {character!a} is not allowed") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _StructureError(mark.line + 1, _explain(error, text, mark)) from None
    except (ValueError, OverflowError):  # of int() and chr(), which PyYAML leaves to its callers
        line = loader.line + 1 if loader else 1
        problem = "no such character (\\U in quotes goes up to 0010FFFF), or no such %YAML version"
        raise _StructureError(line, problem) from None


def _explain(error: yaml.MarkedYAMLError, text: str, mark: yaml.Mark) -> str:
    """PyYAML's complaint in the words of someone who did not write a parser."""
    problem = error.problem or "is not YAML"
    before = (text.split("\n")[mark.line : mark.line + 1] or [""])[0][: mark.column]
    if "found character '\\t'" in problem or "\t" in before[len(before.rstrip()) :]:
        return "a tab; use spaces"
    if "that cannot start any token" in problem:
        character = problem.split(" that ")[0].removeprefix("found ")
        return f"{character} cannot start a value; use quotes"
    if "but found another document" in problem:
        return "a second document (---); expected one"
    if "mapping values are not allowed" in problem:
        return "a ':' where none can be; put text with ': ' in quotes and check the indentation"
    if "could not find expected ':'" in problem:
        return "expected 'key: value'"
    if "<stream end>" in problem or "unexpected end of stream" in problem:
        return "the file ends inside a list, mapping or quoted text"
    if "<document start>" in problem:
        return "more text after the end of the first value; check brackets and indentation"
    if "<block end>" in problem or "<block mapping start>" in problem:
        return "the indentation does not fit the lines above"
    return printable(problem.replace("the node content", "a value"), _MAX_SHOWN)


class _Builder:
    """Turns nodes into plain Python values and notes lines and problems on the way."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(child, (*path, i)) for i, child in enumerate(node.value)]
        if node.style is not None:  # quoted or a block of text
            if bad := _SURROGATE.search(node.value):
                self._refuse(node, path, _no_character(bad.group()))
                return None
            return node.value
        try:
            return plain_value(node.value)
        except ValueError as error:
            self._refuse(node, path, str(error))
            return None

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
            num_problems = len(self.problems)
            value = self.value(child, child_path)
            if all(problem.path != child_path for problem in self.problems[num_problems:]):
                mapping[key] = value
        return mapping

    def _item(self, node: yaml.Node, path: KeyPath) -> Any:
        self.lines[path] = _line(node)
        return self.value(node, path)

    def _key(self, node: yaml.Node, path: KeyPath) -> str | None:
        """The key that `node` spells, or None after noting why it is none."""
        if not isinstance(node, yaml.ScalarNode):
            self._refuse(node, path, "a key must be text, got a list or mapping")
            return None
        if node.style is not None:
            if bad := _SURROGATE.search(node.value):
                self._refuse(node, path, _no_character(bad.group()))
                return None
            return node.value
        if node.value == "<<":
            self._refuse(node, path, "merge keys (<<) are not allowed; repeat the values")
            return None
        try:
            key = plain_value(node.value)
        except ValueError:
            key = None
        if not isinstance(key, str):
            got = printable(node.value, _MAX_SHOWN) or "nothing"
            self._refuse(node, path, f"a key must be text, got {got}")
            return None
        return key

    def _refuse(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        self.problems.append(Problem(path, _line(node), message))


def _no_character(half: str) -> str:
    return f"{half!a} is half a character; write the character itself, or \\U and eight digits"


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1
