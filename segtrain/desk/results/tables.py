"""The table of a comparison for papers: Markdown, and LaTeX with booktabs."""

import re
from collections.abc import Callable, Sequence
from functools import partial

from segtrain.desk.results.compare import CONFIDENCE, Comparison, table_columns
from segtrain.text import MAX_NAME, printable

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


def markdown_table(found: Comparison, titles: Sequence[str]) -> str:
    """The table in Markdown, and below it what the numbers are; titles: of both sides."""
    escape = partial(re.sub, r"([\\`*_{}\[\]<>()#|~$&!])", r"\\\1")
    columns = _columns(found, titles, escape)
    header, *rows = [f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True)]
    return "\n".join([header, "| --- | ---: | ---: | ---: |", *rows, "", _caption(found), ""])


def latex_table(found: Comparison, titles: Sequence[str]) -> str:
    """The table as a `tabular` of LaTeX, which needs the package booktabs."""
    escape = partial(re.sub, r".", lambda matched: _LATEX.get(matched[0], matched[0]))
    names, *numbers = _columns(found, titles, escape)
    numbers = [[title, *map(_mathematics, cells)] for title, *cells in numbers]
    header, *rows = [f"{' & '.join(cells)} \\\\" for cells in zip(names, *numbers, strict=True)]
    lines = [f"% {_caption(found)}", r"% \usepackage{booktabs}", r"\begin{tabular}{lrrr}"]
    lines += [r"\toprule", header, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*lines, ""])


def _columns(
    found: Comparison, titles: Sequence[str], escape: Callable[[str], str]
) -> list[list[str]]:
    """The columns, with all names escaped."""
    names, *numbers = table_columns(found, titles)
    names = [escape(printable(name, MAX_NAME)) for name in names]
    return [names, *([escape(printable(title)), *cells] for title, *cells in numbers)]


def _mathematics(cell: str) -> str:
    """A cell of LaTeX: outside of mathematics a sign would be a hyphen."""
    return re.sub(r"[+-]?\d+\.\d+( ± \d+\.\d+)?", r"$\g<0>$", cell).replace("±", r"\pm")


def _caption(found: Comparison) -> str:
    seeds = " and ".join(str(len(side)) for side in found.scores)
    several = any(len(side) > 1 for side in found.scores)
    spread = f"mean ± standard deviation over {seeds} seeds, " if several else ""
    over = f"{found.unit}{', and over the seeds' if found.recipes else ''}"
    return f"IoU in %: {spread}difference with {CONFIDENCE:.0%} interval over {over}"
