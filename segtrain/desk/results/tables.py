"""The table of a comparison of two or more sides: Markdown, and LaTeX with booktabs."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from string import ascii_uppercase

from segtrain.desk.results.compare import (
    CONFIDENCE,
    Comparison,
    judged,
    side_line,
    table_columns,
)
from segtrain.desk.results.runs import Run
from segtrain.text import MAX_NAME, printable, table_lines

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    # Other characters in the old encoding of fonts, which is still the default.
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # At the beginning of a row they would be options of the end of the row before.
    "[": "{[}",
    "*": "{*}",
}


def several_lines(found: Sequence[Comparison], sides: Sequence[Sequence[Run]]) -> list[str]:
    """Several sides, each compared with the first, in words: a table, and a verdict each."""
    letters = ascii_uppercase[: len(sides)]
    lines = [side_line(*side) for side in zip(letters, sides, _scores(found), strict=True)]
    lines += [*table_lines(table_columns(found, letters)), f"table       {_caption(found)}"]
    notes = dict.fromkeys(note for one in found for note in one.notes)
    lines += [f"note        {note}" for note in notes]
    for letter, one, side in zip(letters[1:], found, sides[1:], strict=True):
        lines += judged(one, sides[0], side, letter)
        lines[-1] = lines[-1].replace("verdict     ", f"verdict     {letter}: ", 1)
    return lines


def markdown_table(found: Sequence[Comparison], titles: Sequence[str]) -> str:
    """The table in Markdown, and below it what the numbers are; titles: of all sides."""
    escape = partial(re.sub, r"([\\`*_{}\[\]<>()#|~$&!])", r"\\\1")
    columns = _columns(found, titles, escape)
    header, *rows = [f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True)]
    border = f"| --- |{' ---: |' * (len(columns) - 1)}"
    return "\n".join([header, border, *rows, "", _caption(found), ""])


def latex_table(found: Sequence[Comparison], titles: Sequence[str]) -> str:
    """The table as a `tabular` of LaTeX, which needs the package booktabs."""
    escape = partial(re.sub, r".", lambda matched: _LATEX.get(matched[0], matched[0]))
    names, *numbers = _columns(found, titles, escape)
    numbers = [[title, *map(_mathematics, cells)] for title, *cells in numbers]
    header, *rows = [f"{' & '.join(cells)} \\\\" for cells in zip(names, *numbers, strict=True)]
    lines = [f"% {_caption(found)}", r"% \usepackage{booktabs}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * len(numbers)}}}"]
    lines += [r"\toprule", header, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*lines, ""])


def _columns(
    found: Sequence[Comparison], titles: Sequence[str], escape: Callable[[str], str]
) -> list[list[str]]:
    """The columns, with all names escaped."""
    names, *numbers = table_columns(found, titles)
    names = [escape(printable(name, MAX_NAME)) for name in names]
    return [names, *([escape(printable(title)), *cells] for title, *cells in numbers)]


def _mathematics(cell: str) -> str:
    """A cell of LaTeX: outside of mathematics a sign would be a hyphen."""
    return re.sub(r"[+-]?\d+\.\d+( ± \d+\.\d+)?", r"$\g<0>$", cell).replace("±", r"\pm")


def _scores(found: Sequence[Comparison]) -> list[tuple[float, ...]]:
    """The mIoU of the runs of each side."""
    return [found[0].scores[0], *(one.scores[1] for one in found)]


def _caption(found: Sequence[Comparison]) -> str:
    numbers = [len(side) for side in _scores(found)]
    seeds = " and ".join(map(str, numbers))
    spread = f"mean ± standard deviation over {seeds} seeds, " if max(numbers) > 1 else ""
    over = f"{found[0].unit}{', and over the seeds' if any(x.recipes for x in found) else ''}"
    # Each of 95 % by itself: with ten of them, four times in ten one excludes zero by chance.
    over += f", not corrected for {len(found)} comparisons" if len(found) > 1 else ""
    return f"IoU in %: {spread}difference with {CONFIDENCE:.0%} interval over {over}"
