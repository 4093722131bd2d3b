"""The table of `segtrain compare`: by numpy and scipy, and read back from its files."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experiments import unread

from segtrain.desk.results.compare import compare, comparison_lines
from segtrain.desk.results.runs import Run
from segtrain.desk.results.tables import latex_table, markdown_table, several_lines
from segtrain.score.records import Records

NAMES = ("R&D_50% #1", r"a|b\c", "[x]* <i>^~{$}", "Straße `q`", "never")
IMAGES = 12


def side(seeds, skill, rng):
    """Records of some runs on the same images; class `never` has no pixels."""
    size = np.random.default_rng(0).integers(2000, 8000, (IMAGES, 4))
    found = []
    for _ in range(seeds):
        rate = np.clip(skill + rng.normal(0, 0.03, 4) + rng.normal(0, 0.05, (IMAGES, 4)), 0, 1)
        right = rng.binomial(size, rate)
        counts = np.stack([right, size, right + np.roll(size - right, 1, axis=1)], axis=-1)
        counts = np.concatenate([counts, np.zeros((IMAGES, 1, 3), int)], axis=1)
        zeros = np.zeros((5, 5), int), np.zeros((2, 960), int)
        found.append(Records({"split": "val"}, tuple("abcdefghijkl"), NAMES, counts, *zeros))
    return found


@pytest.fixture(scope="module")
def sides():
    rng = np.random.default_rng(3)
    return side(3, 0.7, rng), side(4, 0.8, rng)


def ious(records):
    """(runs, 4) of the classes that are there, in %."""
    right, labelled, predicted = np.moveaxis([one.images.sum(0)[:4] for one in records], 2, 0)
    return 100 * right / (labelled + predicted - right)


def markdown_cells(text):
    """The rows of the first table, by the rules of GitHub: `\\|` is no border."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    split = [re.findall(r"((?:\\.|[^|\\])*)\|", row)[1:] for row in rows]
    cells = [[re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", cell.strip()) for cell in r] for r in split]
    assert all(re.fullmatch(r"-+:?", cell) for cell in cells[1])
    return [cells[0], *cells[2:]]


def latex_cells(text):
    """The rows of the tabular, its commands put back into characters."""
    body = re.search(r"\\toprule\n(.*)\\bottomrule", text, re.DOTALL)[1].replace("\\midrule\n", "")
    words = {"textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^"}
    words |= {"textless": "<", "textgreater": ">", "textbar": "|"}
    rows = []
    for line in body.splitlines():
        assert line.endswith(r" \\")
        cells = re.split(r"(?<!\\) & ", line.removesuffix(r" \\"))
        assert not re.search(r"(?<!\\)[&%#_$<>|~^]|^\[|^\*", cells[0])
        cells[1:] = [c.replace("$", "").replace(r"\pm", "±") for c in cells[1:]]
        cells = [re.sub(r"\\(text\w+)\{\}", lambda m: words[m[1]], c) for c in cells]
        cells = [re.sub(r"\{([\[*])\}", r"\1", c) for c in cells]
        rows.append([re.sub(r"\\([&%$#_{}])", r"\1", c) for c in cells])
    return rows


def test_the_numbers_are_those_of_numpy_and_scipy(sides):
    from scipy import stats

    found = compare(*sides)
    a, b = map(ious, sides)
    rows = {row.name: row for row in found.table}
    assert list(rows) == ["mIoU", *NAMES[:4]]
    columns = [
        (a.mean(1), b.mean(1), found.models),
        *zip(a.T, b.T, found.classes.values(), strict=True),
    ]
    for row, (one, other, images) in zip(found.table, columns, strict=True):
        np.testing.assert_allclose(100 * np.array(row.scores[0]), one)
        np.testing.assert_allclose(100 * np.array(row.scores[1]), other)
        # SciPy's variance and degrees of freedom of the seeds (Welch), and those of images.
        seeds = stats.ttest_ind(other, one, equal_var=False)
        of_seeds = ((other.mean() - one.mean()) / seeds.statistic) ** 2
        half = 100 * (images.high - images.low) / 2
        of_images = (half / stats.t.ppf(0.975, IMAGES - 1)) ** 2
        total = of_seeds + of_images
        freedom = total**2 / (of_seeds**2 / seeds.df + of_images**2 / (IMAGES - 1))
        wide = stats.t.ppf(0.975, freedom) * total**0.5
        value = other.mean() - one.mean()
        expected = np.array([value, value - wide, value + wide])
        np.testing.assert_allclose(100 * np.array(row.difference), expected)


@pytest.mark.parametrize("seeds", [True, False])
def test_both_tables_are_read_back_as_they_were(sides, seeds):
    sides = sides if seeds else [one[:1] for one in sides]
    found, titles = compare(*sides), ["A: r_1 & 2", "B: 50%"]
    texts = markdown_table([found], titles), latex_table([found], titles)
    tables = markdown_cells(texts[0]), latex_cells(texts[1])
    a, b = map(ious, sides)
    for header, *rows in tables:
        assert header == ["IoU in %", *titles, "B - A"]
        assert [row[0] for row in rows] == ["mIoU", *NAMES[:4]]
        for i, runs in ((1, a), (2, b)):
            scores = np.column_stack([runs.mean(1), runs])
            cells = [f"{x:.2f}" for x in scores.mean(0)]
            if seeds:
                deviations = scores.std(0, ddof=1)
                cells = [f"{x} ± {sd:.2f}" for x, sd in zip(cells, deviations, strict=True)]
            assert [row[i] for row in rows] == cells
        for row, one in zip(rows, found.table, strict=True):
            values = [f"{100 * x:+.2f}" for x in one.difference]
            assert row[3] == "{} ({} to {})".format(*values)
    assert "12 images, paired" in texts[0].splitlines()[-1]
    assert ("3 and 4 seeds" in texts[0]) == ("over the seeds" in texts[1]) == seeds


def test_a_class_that_some_runs_alone_predict_has_no_mean(sides):
    """IoU 0 where it is predicted, none where it is not: a mean of both would say nothing."""
    a, b = sides
    counts = a[0].images.copy()
    counts[0, 4] = [0, 0, 5]
    found = compare([replace(a[0], images=counts), *a[1:]], b)
    assert found.table[-1].name == "never"
    texts = markdown_table([found], "AB"), latex_table([found], "AB")
    for table in markdown_cells(texts[0]), latex_cells(texts[1]):
        assert [cell.replace("--", "-") for cell in table[-1]] == ["never", "-", "-", "-"]


def test_each_of_several_sides_is_compared_with_the_first(sides):
    """A table of three; class `never` has pixels in C alone, and stands where it is first seen."""
    a, b = sides
    c = side(2, 0.5, np.random.default_rng(7))
    for one in c:
        one.images[0, 4] = [0, 0, 5]
    found = [compare(a, b), compare(a, c)]
    titles = ["A: 1", "B: 2", "C: 3"]
    texts = markdown_table(found, titles), latex_table(found, titles)
    for header, *rows in markdown_cells(texts[0]), latex_cells(texts[1]):
        assert header == ["IoU in %", "A: 1", "B: 2", "B - A", "C: 3", "C - A"]
        assert [row[0] for row in rows] == ["mIoU", *NAMES]
        for column, runs in ((1, a), (2, b), (4, c)):
            scores = ious(runs)  # of the classes that are labelled; C's mean has `never`, too
            for k in range(4):
                mean, sd = scores[:, k].mean(), scores[:, k].std(ddof=1)
                assert rows[1 + k][column] == f"{mean:.2f} ± {sd:.2f}"
        means = [ious(runs).mean(1) for runs in (a, b, c)]
        means[2] *= 4 / 5
        assert [rows[0][i].split()[0] for i in (1, 2, 4)] == [f"{x.mean():.2f}" for x in means]
        for column, one in ((3, found[0]), (5, found[1])):
            values = [f"{100 * x:+.2f}" for x in one.recipes]
            assert rows[0][column] == "{} ({} to {})".format(*values)
            assert float(values[0]) == pytest.approx(100 * one.models.value, abs=0.005)
        assert [cell.replace("--", "-") for cell in rows[-1][1:]] == [*"---", "0.00 ± 0.00", "-"]
    assert "{lrrrrr}" in texts[1]
    assert "3 and 4 and 2 seeds" in texts[0]
    assert "not corrected for 2 comparisons" in texts[0]
    lines = several_lines(found, [[read_like(name)] for name in "abc"])
    assert [line[:13] for line in lines[:3]] == [f"{x}           {x.lower()}" for x in "ABC"]
    (of_b, of_c) = (line for line in lines if line.startswith("verdict "))
    assert of_b == "verdict     B: the configs are equal" + of_b.partition("equal")[2]
    assert of_c.startswith("verdict     C: ")


def test_the_terminal_shows_the_table_in_place_of_the_largest_differences(sides):
    lines = comparison_lines(compare(*sides), [read_like("a")], [read_like("b")])
    (start,) = [i for i, line in enumerate(lines) if line.startswith("IoU in %")]
    assert lines[start + 2].startswith(NAMES[0])
    assert re.search(r"\d ± \d.*\d ± \d.*[+-]\d", lines[start + 2])
    assert not [line for line in lines if line.startswith("class ")]


def read_like(name):
    return Run(Path(name), unread(), {}, {})
