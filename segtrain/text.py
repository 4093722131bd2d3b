"""Text on its way out: to a terminal, a log, TensorBoard or a picture.

File names, class names and whatever else stands in a file from elsewhere may hold sequences that
recolour or overwrite a terminal, letters that turn the direction of a line, and any number of both.
"""

from unicodedata import category

# Longer than any path the system takes, so that no real one is cut.
MAX_LINE = 5000
MAX_NAME = 100
_MAX_LINES = 200

# Control and format characters, halves of UTF-16 pairs, separators of lines and of paragraphs.
_UNFIT = ("Cc", "Cf", "Cs", "Zl", "Zp")
# These two join letters or keep them apart, and Persian or Hindi words need them.
_JOINERS = "\u200c\u200d"


def printable(text: object, limit: int = MAX_LINE) -> str:
    """`text` on one line, fit for any terminal, with at most `limit` characters and dots.

    Escaped as in Python: control and format characters (such as U+202E, which turns the direction
    of a line), separators of lines and paragraphs, undecodable bytes and characters of no meaning.
    """
    shown = str(text)
    cut = len(shown) > limit
    shown = shown[:limit]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else _escaped(c) for c in shown)
        cut = cut or len(shown) > limit
    return f"{shown[:limit]}..." if cut else shown


def printable_lines(text: str, limit: int = _MAX_LINES) -> list[str]:
    """The lines of `text`, each `printable`; a last line counts those beyond `limit`."""
    lines = text.removesuffix("\n").split("\n")
    more = [f"and {len(lines) - limit} more lines"] if len(lines) > limit else []
    return [printable(line) for line in lines[:limit]] + more


def name_problem(name: str) -> str:
    """Why `name` cannot name a class; empty if it can.

    Names stand in tables, in the tags of curves and in pictures.
    """
    if len(name) > MAX_NAME:
        return f"a name of {len(name)} characters; at most {MAX_NAME} are allowed"
    bad = next((c for c in name if category(c) in _UNFIT and c not in _JOINERS), "")
    if bad:
        return f"character {_escaped(bad)} is not allowed in a name"
    return "" if name.strip() else "a name of blanks"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
