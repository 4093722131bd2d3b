"""Charts, drawn by matplotlib: as SVG for a page, or as a picture for TensorBoard."""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from segtrain.metrics import calibration_error, reliability
from segtrain.run.pictures import class_labels

# Okabe and Ito: told apart by people who see colours differently, on white and on black.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# What a page replaces by the colour of its own text.
_INK = "#010203"
_MOST_WITH_TEXT, _LABEL = 40, 28  # classes; letters of a name
_NOTED = ("Creator", "Date", "Format", "Type")  # what matplotlib would write about a file
_CURVE_INCHES, _SQUARE_INCHES = (5.2, 2.6), (3.4, 3.0)

Curve = tuple[Sequence[float], Sequence[float]]


def curves(title: str, found: Mapping[str, Curve]) -> str:
    """SVG: values over steps, a line for each name."""
    figure, axes = _axes(_CURVE_INCHES)
    for (name, (steps, values)), color in zip(found.items(), _colors(len(found)), strict=True):
        marker = "o" if len(steps) < 30 else None
        axes.plot(steps, values, label=name, color=color, lw=1.4, marker=marker, ms=2.5)
    axes.set(title=title, xlabel="step")
    if len(found) > 1:
        axes.legend(frameon=False, labelcolor=_INK, fontsize=8)
    return _svg(figure)


def reliability_diagram(counts: Mapping[str, Tensor]) -> str:
    """SVG: how often predictions are right over the probability that they were given.

    counts: `Calibration.counts` by name.
    """
    figure, axes = _axes(_SQUARE_INCHES)
    axes.plot([0, 1], [0, 1], color=_INK, lw=0.8, ls=":")
    for (name, tally), color in zip(counts.items(), _colors(len(counts)), strict=True):
        bins = reliability(tally)
        x, y = [b.confidence for b in bins], [b.accuracy for b in bins]
        sizes = [4 + 60 * b.share for b in bins]
        axes.plot(x, y, color=color, lw=1.2, label=f"{name}: error {calibration_error(tally):.3f}")
        axes.scatter(x, y, s=sizes, color=color)
    axes.set(title="reliability", xlabel="probability of the prediction", ylabel="part right")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.legend(frameon=False, labelcolor=_INK, fontsize=8, loc="upper left")
    return _svg(figure)


def precision_recall(found: Mapping[str, Curve]) -> str:
    """SVG: precision over recall, a line for each name; what is NaN is left out."""
    figure, axes = _axes(_CURVE_INCHES)
    for (name, (recall, precision)), color in zip(found.items(), _colors(len(found)), strict=True):
        axes.plot(recall, precision, label=name.replace("$", r"\$"), color=color, lw=1.4)
    axes.set(title="precision and recall", xlabel="recall", ylabel="precision")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(frameon=False, labelcolor=_INK, fontsize=8)
    return _svg(figure)


def confusion_svg(counts: np.ndarray, names: Sequence[str]) -> str:
    """SVG of `confusion_figure`."""
    return _svg(_confusion(counts, names))


def confusion_picture(counts: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """(H, W, 3) uint8 RGB: the confusion matrix, each row divided by its sum.

    counts: (K, K) integers, rows label, columns prediction. The row of a class without pixels is
    blank. With at most 40 classes cells of at least 0.5 % show their percentage.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _confusion(counts, names)
    figure.set_facecolor("white")
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # as in `_svg`; numbers tell classes apart
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _confusion(counts: np.ndarray, names: Sequence[str]) -> Any:
    counts = np.asarray(counts, dtype=np.float64)
    totals = counts.sum(axis=1, keepdims=True)
    parts = np.divide(counts, totals, out=np.full_like(counts, np.nan), where=totals > 0)
    size, has_text = len(names), len(names) <= _MOST_WITH_TEXT
    # A dollar sign would begin a formula.
    labels = [x[:_LABEL].replace("$", r"\$") if has_text else "" for x in class_labels(names)]
    side = 1.0 + 0.07 * max(map(len, labels)) + (0.32 if has_text else 0.08) * size
    figure, axes = _axes((side, side))
    axes.imshow(parts, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="prediction", ylabel="label")
    axes.xaxis.set_label_position("top")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.set_xticks(range(size), labels, rotation=90, fontsize=8)
    axes.set_yticks(range(size), labels, fontsize=8)
    for row, column in zip(*np.nonzero(parts >= 0.005), strict=True) if has_text else ():
        color = "white" if parts[row, column] > 0.5 else "black"
        text = f"{100 * parts[row, column]:.0f}"
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=7)
    return figure


def _axes(inches: tuple[float, float]) -> tuple[Any, Any]:
    # Slow to import, and only rank 0 needs it. No pyplot: it keeps figures and looks for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_INK)
    axes.tick_params(colors=_INK, labelsize=8)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set(color=_INK, fontsize=9)
    return figure, axes


def _colors(number: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(number)]


def _svg(figure: Any) -> str:
    """An <svg> element in the colour of the text around it."""
    import matplotlib

    text = io.StringIO()
    # Text stays text: it can be searched, and is smaller. Without a date: equal bytes.
    with (
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "segtrain"}),
        warnings.catch_warnings(),
    ):
        # About characters that the font it measures by does not have, and space that it lacks.
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(text, format="svg", metadata=dict.fromkeys(_NOTED))
    found = re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL)
    found = re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", found)
    return found.replace(_INK, "currentColor")
