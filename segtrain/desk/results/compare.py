"""Is one model better than another? The same images under both, resampled together.

The interval is that of a paired bootstrap (Efron and Tibshirani, 1993): images are drawn with
replacement, or whole sequences, whose images are alike; both models get the same ones, and the
difference of their mIoU is taken anew. For few units the percentiles are widened as Hesterberg
(2015, doi:10.1080/00031305.2015.1089789, section 4.3) does it: without that the interval of ten
images would miss one time in eight instead of one in twenty.

It says how the models differ on images like these. How far the seed moves a score is another
question: it needs several runs of a recipe. Their variance then joins that of the images.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from string import ascii_uppercase
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, stdtrit

from segtrain.config.loading import yaml_value
from segtrain.data.read.sequences import sequences_of, show_sequences
from segtrain.desk.results.runs import Run, differing_recipes
from segtrain.errors import ConfigError
from segtrain.score.records import LABELLED, RIGHT, Records
from segtrain.text import counted, first_of, printable, table_lines

CONFIDENCE = 0.95
LEAST_GROUPS = 5
_RESAMPLES = 2000
_SHOWN = 5
# Of a bootstrap; a result that another seed would change is none.
_SEED = 0


class Interval(NamedTuple):
    """A value, such as a difference B minus A, with its interval of 95 %; NaN: none can be had."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the difference is more than chance, as far as the interval knows it."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        if math.isnan(self.low):
            return _points(self.value)
        return f"{_points(self.value)} ({_points(self.low)} to {_points(self.high)})"


@dataclass(frozen=True)
class TableRow:
    """A line of the table: the mIoU or a class, the scores of each side's runs, and B minus A.

    difference: NaN where a run has no score of the class. With several seeds a side its interval
        is of seeds and images together, otherwise of the images.
    """

    name: str
    scores: tuple[tuple[float, ...], tuple[float, ...]]
    difference: Interval


@dataclass(frozen=True)
class Comparison:
    """Two sides, A and B, of one or several runs each.

    models: of the mean mIoU of the runs, over the images. recipes: with the variance of the seeds;
    None: one run a side, which cannot tell it. seed_std: of the mIoU of runs of one side.
    classes: by name. images: by name, how much the difference changes without it.
    unit: what was resampled, in words. table: the mIoU, and the classes with pixels in any run.
    """

    scores: tuple[tuple[float, ...], tuple[float, ...]]
    models: Interval
    recipes: Interval | None
    seed_std: float | None
    classes: dict[str, Interval]
    images: dict[str, float]
    unit: str
    notes: tuple[str, ...]
    table: tuple[TableRow, ...]


def compare(a: Sequence[Records], b: Sequence[Records], *, by: str | None = None) -> Comparison:
    """Compares two sides; each has a run or several that differ in their seed only.

    by: `image` or `sequence`; None: sequences where the names show at least 5, frame by frame.

    Six images have 10 pixels of one class each. A has 5 of them right in every image, and B 6. A
    second B has 9 right in three images and 3 in the others: the same score, and no certainty.

    >>> def records(*right):
    ...     counts = np.array([[[n, 10, n]] for n in right])  # right, labelled, predicted
    ...     return Records({}, tuple("abcdef"), ("road",), counts, counts[0], counts[0])
    >>> str(compare([records(5, 5, 5, 5, 5, 5)], [records(6, 6, 6, 6, 6, 6)]).models)
    '+10.00 (+10.00 to +10.00)'
    >>> unsure = compare([records(5, 5, 5, 5, 5, 5)], [records(9, 3, 9, 3, 9, 3)]).models
    >>> unsure.value > 0, unsure.excludes_zero
    (True, False)

    Raises:
        ConfigError: they were evaluated on other images, labels or classes, or there are fewer
            than 5 sequences.
    """
    for other in (*a, *b):
        _check_same(a[0], other)
    units, unit, notes = _units(a[0].names, by)
    sides = [np.stack([run.images for run in side]) for side in (a, b)]  # (runs, N, K, 3)
    scores = tuple(tuple(_miou(run.sum(0)).item() for run in side) for side in sides)

    # (runs, U, K, 3), and the totals of each resample (R, runs, K, 3).
    grouped = [_sums_by(units, side) for side in sides]
    number = grouped[0].shape[1]
    # Both sides get the same draws: the bootstrap is paired, and what makes an image hard for both
    # models cancels.
    weights = _resamples(number)
    drawn = [np.einsum("ru,sukc->rskc", weights, side, optimize=True) for side in grouped]
    means = [_miou(totals).mean(1) for totals in drawn]
    value = float(np.mean(scores[1]) - np.mean(scores[0]))
    models = _interval(value, means[1] - means[0], number)
    by_class = [_iou(totals).mean(1) for totals in drawn]  # (R, K)
    runs = [_iou(side.sum(1)) for side in sides]  # (runs, K)
    now = [side.mean(0) for side in runs]
    classes = {
        name: _interval(float(now[1][k] - now[0][k]), by_class[1][:, k] - by_class[0][:, k], number)
        for k, name in enumerate(a[0].classes)
        if not math.isnan(now[1][k] - now[0][k])
    }
    seed_std, recipes = _with_seeds(value, models, scores, number)
    if recipes and 1 in map(len, scores):
        notes += ("seeds are taken to move the side of one run as far as those of the other",)
    # With several seeds a row has the interval of seeds and images, else that of the images.
    table = [TableRow("mIoU", scores, recipes or models)]
    for k, name in enumerate(a[0].classes):
        of_class = tuple(tuple(side[:, k].tolist()) for side in runs)
        if np.isfinite(np.concatenate(of_class)).any():
            # Where a run has no pixels of a class, its row has scores and no difference.
            over_images = classes.get(name, Interval(math.nan, math.nan, math.nan))
            both = _with_seeds(over_images.value, over_images, of_class, number)[1]
            table.append(TableRow(name, of_class, both or over_images))
    # The score of each side without one image, (N,). A large change is an image that decides.
    without = [_miou(side.sum(1, keepdims=True) - side).mean(0) for side in sides]
    influence = value - (without[1] - without[0])
    images = dict(zip(a[0].names, influence.tolist(), strict=True))
    return Comparison(scores, models, recipes, seed_std, classes, images, unit, notes, (*table,))


def score_interval(records: Records, groups: Sequence[str]) -> Interval:
    """The mIoU of all images with its interval, over images like these under these models.

    groups: of each image what it is drawn together with, such as its sequence; or its own name.
        Fewer than 5 have no interval: simulated, it held the truth in 89 % of cases with 4 groups,
        76 % with 3, and 91 to 95 % with 5 to 24.
    """
    _, units = np.unique(groups, return_inverse=True)
    (sums,) = _sums_by(units, records.images[np.newaxis])  # (U, K, 3)
    drawn = _miou(np.einsum("ru,ukc->rkc", _resamples(len(sums)), sums, optimize=True))
    value = _miou(sums.sum(0)).item()
    if len(sums) < LEAST_GROUPS:
        return Interval(value, math.nan, math.nan)
    return _interval(value, drawn, len(sums))


def comparison_lines(found: Comparison, a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """The comparison in words; the last line is the verdict."""
    lines = [side_line(*side) for side in zip("AB", (a, b), found.scores, strict=True)]
    lines.append(f"B - A       {found.models} points of mIoU, {CONFIDENCE:.0%} interval over")
    lines[-1] += f" {found.unit}"
    if found.seed_std is not None:
        spread = _points(found.seed_std)[1:]
        lines.append(f"seeds       move the mIoU of a recipe by {spread} (standard deviation)")
    if found.recipes is not None:
        lines.append(f"recipes     {found.recipes} points, seeds and images together")
    lines += [f"note        {note}" for note in found.notes]
    ranked = sorted(found.classes.items(), key=lambda one: -abs(one[1].value))
    if found.recipes is not None:  # the table of the classes has their seeds, too
        lines += table_lines(table_columns([found], ("A", "B")))
    # With several seeds the table above shows all classes.
    for name, interval in ranked[:_SHOWN] if found.recipes is None else ():
        lines.append(f"class       {printable(name, 40)}: {interval}")
    most = sorted(found.images.items(), key=lambda one: -abs(one[1]))[:_SHOWN]
    for name, change in most:
        if change:
            lines.append(f"image       {printable(name, 80)}: {_points(change, 3)} points of B - A")
    return lines + judged(found, a, b, "B")


def side_line(letter: str, runs: Sequence[Run], scores: Sequence[float]) -> str:
    """The runs of a side, and their mIoU."""
    each = ", ".join(f"{100 * score:.2f}" for score in scores)
    by = runs[0].config.eval
    is_usual = by.best == "miou" or runs[0].predictions
    chosen = "" if is_usual else f"; best.pt chosen by {printable(by.best_name, 80)}"
    return f"{letter}           {first_of((r.directory for r in runs), 3)}: mIoU {each}{chosen}"


def judged(found: Comparison, a: Sequence[Run], b: Sequence[Run], letter: str) -> list[str]:
    """What differs between A and the side of this letter, and the verdict."""
    # Runs of one side differ in their seed only, so the first one stands for its side.
    read = [runs[0].predictions for runs in (a, b) if runs[0].predictions]
    different = {} if read else differing_recipes([runs[0].config for runs in (a, b)])
    lines = [f"note        label maps of {name}: their recipe is not known" for name in read]
    for key, (before, after) in different.items():
        here, there = yaml_value(before), yaml_value(after)
        lines.append(f"config      {key}: {here} in A, {there} in {letter}")
    return [*lines, f"verdict     {verdict(found, different or read, letter)}"]


def table_columns(found: Sequence[Comparison], titles: Sequence[str]) -> list[list[str]]:
    """The columns of the table in plain text: names, side A, and each other beside its distance.

    Scores in %, of several runs as their mean and the standard deviation of a sample.
    """
    # A class may have pixels in some sides only; it may be called as the first row is.
    by_name = [{row.name: row for row in one.table[1:]} for one in found]
    names = [*dict.fromkeys(name for rows in by_name for name in rows)]
    table = [
        [one.table[0], *map(rows.get, names)] for one, rows in zip(found, by_name, strict=True)
    ]
    first = [next(row for row in rows if row).scores[0] for rows in zip(*table, strict=True)]
    columns = [["IoU in %", "mIoU", *names], [titles[0], *map(_spread, first)]]
    for letter, title, rows in zip(ascii_uppercase[1:], titles[1:], table, strict=False):
        columns.append([title, *(_spread(row.scores[1]) if row else "-" for row in rows)])
        known = [row if row and not math.isnan(row.difference.value) else None for row in rows]
        columns.append([f"{letter} - A", *(str(row.difference) if row else "-" for row in known)])
    return columns


def verdict(found: Comparison, different: Collection[str], letter: str = "B") -> str:
    """One sentence. different: the options in which the configs differ. letter: of the other."""
    # The interval as well: no resample tells the two apart.
    if found.recipes is None and tuple(found.models) == (0, 0, 0):
        return "there is no difference: the scores are equal, whichever images are drawn"
    better = letter if found.models.value > 0 else "A"
    if not different and found.models.value != 0:
        return (
            "the configs are equal, so it is no recipe that differs, but data, starting weights, "
            f"length or rounding: segtrain compare A {letter} --steps says which"
        )
    if set(different) == {"seed"} and found.models.value != 0:
        return (
            f"the runs differ only in their seed, which alone moves mIoU by "
            f"{_points(abs(found.models.value))[1:]} points here: what changes less is no finding"
        )
    if math.isnan(found.models.low):
        return "no interval can be had, so no verdict"
    if found.recipes is not None:
        if found.recipes.excludes_zero:
            return f"{better} is better, beyond what images and seeds explain"
        return "images and seeds together explain the difference"
    if not found.models.excludes_zero:
        return "the choice of images explains the difference"
    return (
        f"this model {better} is better on images like these; whether its recipe is, one seed a "
        "side cannot tell: train both with further seeds and name all runs"
    )


def _spread(scores: Sequence[float]) -> str:
    """The mean, and the deviation if there are several; a dash if one has no number."""
    if any(map(math.isnan, scores)):
        return "-"
    deviation = f" ± {100 * stdev(scores):.2f}" if len(scores) > 1 else ""
    return f"{100 * mean(scores):.2f}{deviation}"


def _units(names: Sequence[str], by: str | None) -> tuple[np.ndarray, str, tuple[str, ...]]:
    """The unit of each image, (N,), what they are in words, and what to note."""
    sequences = sequences_of(names)
    _, numbers = np.unique(sequences, return_inverse=True)
    number, images = int(numbers.max()) + 1, len(names)
    what = counted(number, "sequence", "sequences")
    if by == "sequence" and number < LEAST_GROUPS:
        raise ConfigError(
            f"--by sequence: the names of the images show {what} only ({first_of(sequences, 2)}): "
            f"no interval can be had over fewer than {LEAST_GROUPS}"
        )
    if by == "sequence" or (by is None and number >= LEAST_GROUPS and show_sequences(names)):
        return numbers, f"{what} of {images} images, paired", ()
    notes: tuple[str, ...] = ()
    # With at least two images a sequence on average, these may be frames of videos.
    if number <= images / 2:
        notes = (
            f"the names show {what}: if the images are frames of a video, they are alike, and the "
            "interval is too narrow",
        )
    return np.arange(images), f"{images} images, paired", notes


def _check_same(one: Records, other: Records) -> None:
    """Refuses records of other images, labels or classes."""
    splits = f"{one.about.get('split')} against {other.about.get('split')}"
    if one.classes != other.classes:
        raise ConfigError(
            "the runs have different classes: compare them --on LIST of the data that have all"
        )
    if one.about.get("folds") != other.about.get("folds"):
        raise ConfigError(f"the scores are not of folds made alike ({splits})")
    if one.names != other.names:
        what = f"the runs were evaluated on different images ({splits})"
        raise ConfigError(f"{what}; --on LIST evaluates all of them on one list")
    if not np.array_equal(one.images[..., LABELLED], other.images[..., LABELLED]):
        differ = (one.images[..., LABELLED] != other.images[..., LABELLED]).any(1)
        names = [one.names[i] for i in np.flatnonzero(differ)]
        raise ConfigError(f"the runs were evaluated on different labels: {first_of(names, 3)}")


def _with_seeds(
    value: float, models: Interval, scores: Sequence[Sequence[float]], number: int
) -> tuple[float | None, Interval | None]:
    """The standard deviation of seeds, and the interval with it.

    The variances of the seeds of each side and of the images add up, with the degrees of freedom of
    Welch and Satterthwaite. A side of one run has the variance of the other.
    """
    freedom = [len(side) - 1 for side in scores]
    # With one run a side nothing tells how far a seed moves a score.
    if sum(freedom) == 0 or math.isnan(models.low):
        return None, None
    squares = [float(np.var(side)) * len(side) for side in scores]
    pooled = sum(squares) / sum(freedom)
    # Variances of the mean of a side, or of both, with their degrees of freedom.
    if 0 in freedom:
        parts = [(pooled * sum(1 / len(side) for side in scores), sum(freedom))]
    else:
        parts = [(x / n / (n + 1), n) for x, n in zip(squares, freedom, strict=True)]
    half = (models.high - models.low) / 2
    # Read as an interval of Student's t, which gives back the variance.
    parts.append(((half / stdtrit(number - 1, 0.5 + CONFIDENCE / 2)) ** 2, number - 1))
    total = sum(variance for variance, _ in parts)
    # Without any variance the degrees of freedom would be 0 / 0.
    if total == 0:
        return 0.0, Interval(value, value, value)
    degrees = total**2 / sum(variance**2 / n for variance, n in parts)
    wide = stdtrit(degrees, 0.5 + CONFIDENCE / 2) * math.sqrt(total)
    return math.sqrt(pooled), Interval(value, value - wide, value + wide)


def _interval(value: float, drawn: np.ndarray, number: int) -> Interval:
    """The widened percentile interval of resamples `drawn`, (R,), of `number` units."""
    # A resample may hold no pixel of the class; it has no score then.
    drawn = drawn[np.isfinite(drawn)]
    if number < 2 or not len(drawn):
        return Interval(value, math.nan, math.nan)
    # Quantiles of t for those of the normal distribution, and the root because a bootstrap's
    # variance is too small by (n - 1) / n.
    quantile = stdtrit(number - 1, 0.5 - CONFIDENCE / 2) * math.sqrt(number / (number - 1))
    tail = ndtr(quantile)
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def _resamples(number: int) -> np.ndarray:
    """(R, units) float64: how often each of `number` units is in each resample."""
    rng = np.random.default_rng(_SEED)
    return rng.multinomial(number, np.full(number, 1 / number), _RESAMPLES).astype(np.float64)


def _sums_by(units: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(runs, U, K, 3) float64: the sums of `counts`, (runs, N, K, 3), of each unit."""
    sums = np.zeros((len(counts), int(units.max()) + 1, *counts.shape[2:]))
    for run, per_image in zip(sums, counts, strict=True):
        # Unlike `+=`, `add.at` adds a unit as often as its number occurs.
        np.add.at(run, units, per_image)
    return sums


def _iou(counts: np.ndarray) -> np.ndarray:
    """(..., K) of counts (..., K, 3); NaN without pixels."""
    right = counts[..., RIGHT]
    with np.errstate(invalid="ignore"):
        return right / (counts[..., LABELLED:].sum(-1) - right)


def _miou(counts: np.ndarray) -> np.ndarray:
    """(...) of counts (..., K, 3): the mean over the classes that are there."""
    iou = _iou(counts)
    there = np.isfinite(iou)
    with np.errstate(invalid="ignore"):
        return np.where(there, iou, 0).sum(-1) / there.sum(-1)


def _points(value: float, digits: int = 2) -> str:
    return f"{100 * value:+.{digits}f}"
