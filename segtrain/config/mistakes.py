"""Mistakes in settings, and the file or option where each is written."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from segtrain.text import printable

KeyPath = tuple[str | int, ...]
"""A key or list item, such as ("train", "lr") or ("augment", "extra", 0, "name")."""

# The most that a message quotes of a key or value.
MAX_SHOWN = 60


class Mistake(NamedTuple):
    """What is wrong with one key.

    path: the key; empty: the whole file.
    line: the line of the mistake, from 1; None: the line of the key.
    related: other keys that take part. Where the key itself is written nowhere, the message shows
        the place of the first of these that is.
    """

    path: KeyPath
    message: str
    line: int | None = None
    related: tuple[KeyPath, ...] = ()


class Place(NamedTuple):
    """Where a key is written. `order` sorts the lines of the file before the options."""

    order: tuple[int, int]
    text: str


def line_of(source: str, line: int) -> Place:
    """The place `source:line` in a file."""
    return Place((0, line), f"{source}:{line}")


def report(
    mistakes: Iterable[Mistake], places: Mapping[KeyPath, Place], *, source: str
) -> list[str]:
    """One line for each mistake, such as `own.yaml:12: train.lr: ...`, in the order of the places.

    places: of every key that is written somewhere.
    source: the name of the file.
    """
    lines = []
    for mistake in mistakes:
        order, where = next(_candidates(mistake, places, source))
        key = dotted(mistake.path)
        label = "" if not key or where.endswith(f" {key}") else f" {key}:"
        lines.append((order, f"{where}:{label} {mistake.message}"))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def dotted(path: KeyPath) -> str:
    """`path` as people write it: `augment.extra[0].name`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f"{'.' if text else ''}{printable(part, MAX_SHOWN)}"
    return text


def _candidates(mistake: Mistake, places: Mapping[KeyPath, Place], source: str) -> Iterator[Place]:
    """Its own line, its key, related keys, the sections around it, the file; the best first."""
    if mistake.line is not None:
        yield line_of(source, mistake.line)
    parents = (mistake.path[:length] for length in range(len(mistake.path) - 1, 0, -1))
    for path in (mistake.path, *mistake.related, *parents):
        if path in places:
            yield places[path]
    yield Place((0, 0), source)
