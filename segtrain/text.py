"""Text that is safe to show: on a terminal, in a log, TensorBoard or a picture.

File names and class names from strangers may hold sequences that recolor a terminal or overwrite a
line, and characters that reverse its direction.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from unicodedata import category

MAX_LINE = 5000  # longer than any path, so that no real one is cut
MAX_NAME = 100
_MAX_LINES = 200

# Control and format characters, surrogates, separators of lines and of paragraphs.
_UNFIT = ("Cc", "Cf", "Cs", "Zl", "Zp")
# Zero-width joiners, which Persian and Hindi words need.
_JOINERS = "\u200c\u200d"


def printable(text: object, limit: int = MAX_LINE) -> str:
    """`text` on one line, safe for any terminal; at most `limit` characters, then dots.

    Control and format characters, line separators, undecodable bytes and unassigned characters are
    escaped as in Python.
    """
    shown = str(text)
    cut = len(shown) > limit
    # Before escaping, so that a long text costs no more than a short one. What escapes add is cut
    # at the end.
    shown = shown[:limit]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else _escaped(c) for c in shown)
        cut = cut or len(shown) > limit
    return f"{shown[:limit]}..." if cut else shown


def printable_lines(text: str, limit: int = _MAX_LINES) -> list[str]:
    """The lines of `text`, each `printable`; a last line counts those beyond `limit`."""
    lines = text.removesuffix("\n").split("\n")
    left = len(lines) - limit
    more = [f"and {counted(left, 'more line', 'more lines')}"] if left > 0 else []
    return [printable(line) for line in lines[:limit]] + more


def scheme_of(text: str) -> str:
    """`s3://` of an address such as `s3://bucket/run`; empty for the name of a file or folder."""
    match = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text)
    return match[0] if match else ""


def without_password(address: str) -> str:
    """To be shown: an address may hold a name and password."""
    return re.sub(r"//[^/@]*@", "//", address)


def address_problem(url: str) -> str:
    """Why objects are not looked for below `url`; empty: they are. Shows no password."""
    if url.startswith("file:"):
        return f"{url}: expected the path itself"
    shown, host = without_password(url), re.sub(r"^[^:]*://", "", url).partition("/")[0]
    if shown != url or "?" in url:
        what = "an address with a password or a key in it ends up in configs and logs"
        return f"{shown.partition('?')[0]}: {what}; give them as the library of the protocol reads"
    return "" if host else f"{url}: expected the address of a folder, such as s3://bucket/folder"


def install_line(extra: str) -> str:
    """How to install an extra. On the registry, the name of segtrain is another program's."""
    return f"in the checkout of segtrain: pip install '.[{extra}]'"


def distinct(names: Iterable[str], key: Callable[[str], str] = str) -> list[str]:
    """The names with a number behind those that an earlier one has taken.

    key: what must differ; for files `str.casefold`, since some disks know no case.

    >>> distinct(["a", "b", "a", "a_2"])
    ['a', 'b', 'a_3', 'a_2']
    """
    taken: dict[str, str] = {}
    names = list(names)
    given = {key(name) for name in names}
    for name in names:
        number, free = 1, name
        # A number that is made up must not take a name that comes later as it is.
        while key(free) in taken or (number > 1 and key(free) in given):
            number += 1
            free = f"{name}_{number}"
        taken[key(free)] = free
    return list(taken.values())


def counted(number: int, one: str, many: str) -> str:
    """`1 image is`, `2 images are`: the number, and the words for one or for several."""
    return f"{number} {one if number == 1 else many}"


def first_of(items: Iterable[object], limit: int = 10, *, separator: str = ", ") -> str:
    """The first `limit` items, each printable, and how many are left.

    >>> first_of(["road", "sky", "tree", "car"], 2)
    'road, sky and 2 more'
    """
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(printable(item) for item in items[:limit]) + more


def table_lines(columns: Iterable[Sequence[str]]) -> list[str]:
    """A table from its columns, each with its title: names to the left, all others to the right."""
    names, *columns = columns
    names = [printable(name, MAX_NAME) for name in names]
    first, *widths = (max(map(len, column)) for column in (names, *columns))
    return [
        "  ".join([name.ljust(first), *map(str.rjust, cells, widths)])
        for name, *cells in zip(names, *columns, strict=True)
    ]


def name_problem(name: str) -> str:
    """Why `name` cannot be shown as the name of a class; empty if it can."""
    if len(name) > MAX_NAME:
        return f"a name of {len(name)} characters; at most {MAX_NAME} are allowed"
    bad = next((c for c in name if category(c) in _UNFIT and c not in _JOINERS), "")
    if bad:
        return f"character {_escaped(bad)} is not allowed in a name"
    return "" if name.strip() else "a name of blanks"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def say(message: str) -> None:
    """Prints `message`, which may quote anything, to stderr, each line after the program's name."""
    for line in printable_lines(message):
        # Written at once: other threads say something too.
        print(f"segtrain: {line}\n", end="", file=sys.stderr)
