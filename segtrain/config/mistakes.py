"""Mistakes in settings, and the file or option where each is written."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from segtrain.text import printable

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


def _place(mistake: Mistake, places: Mapping[KeyPath, Place], source: str) -> Place:
    """Its own line, else its key, else a related key, else a section around it, else the file."""
    if mistake.line is not None:
        return line_of(source, mistake.line)
    parents = (mistake.path[:length] for length in range(len(mistake.path) - 1, 0, -1))
    paths = (mistake.path, *mistake.related, *parents)
    return next((places[path] for path in paths if path in places), Place((0, 0), source))
