"""The report of one or several runs: one HTML page.

It needs what training has kept. Where that is missing, as in a run of another version, the model is
evaluated once more, on this machine (`evaluated`).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from segtrain.desk.results.cards import Card, draw_cards
from segtrain.desk.results.compare import Interval
from segtrain.desk.results.evaluated import Evaluated, evaluated
from segtrain.desk.results.page import render
from segtrain.desk.results.runs import Run, departures, differing
from segtrain.files import write_atomic
from segtrain.metrics import calibration_error
from segtrain.one_vs_rest import average_precision
from segtrain.run import charts
from segtrain.run.directory import REPORT, RESULTS
from segtrain.score.curves import ClassCurve
from segtrain.score.records import LABELLED, Records, scores_csv
from segtrain.text import MAX_NAME, printable

__all__ = ["Evaluated", "evaluated", "report_page", "write_figures", "write_report"]

_WORST, _BEST, _OF_CLASS = 8, 4, 2
_CLASSES = 20  # with pictures of their own: those of all 150 of ADE20K would be tens of MB


class Joined(NamedTuple):
    """All images of several folds, each scored by the model that has not seen it.

    words: of the scores. interval: of the mIoU.
    """

    title: str
    records: Records
    words: Sequence[str]
    interval: Interval


def report_page(
    found: Sequence[Evaluated], device: torch.device, *, joined: Joined | None = None
) -> str:
    """The HTML of these runs; of one of them, or of folds that are `joined`, with pictures."""
    runs, names = [result.run for result in found], _names(found)
    scores = [result.records.scores for result in found]
    classes = found[0].records.classes
    same_classes = all(result.records.classes == classes for result in found)
    records = _single(found, joined)
    figures = draw_figures(found, joined=joined)
    pictures = {}
    if records and all(result.dataset and result.model for result in found):
        pictures = _pictures(records, partial(_cards, found, records, device))
    return render(
        "report.html",
        title=joined.title if joined else ", ".join(names),
        joined=joined,
        runs=list(zip(names, runs, found, scores, strict=True)),
        errors=[
            calibration_error(torch.from_numpy(result.records.calibration)) for result in found
        ],
        classes=classes if same_classes else (),
        colors=found[0].model.classes.palette if found[0].model else (),
        confusion=figures.pop("confusion", ""),
        reliability=figures.pop("reliability", ""),
        charts=list(figures.values()),
        options=departures(runs[0].config) if records and not runs[0].predictions else {},
        differing={
            key: values
            for key, values in _differing(runs).items()
            if not (joined and key.startswith("data."))  # the lists of the folds
        },
        # The template refuses a name that is missing, so a page without pictures names them too.
        **{"cards": {}, "worst": [], "best": [], "of_class": {}, "left_out": False} | pictures,
    )


def draw_figures(found: Sequence[Evaluated], *, joined: Joined | None = None) -> dict[str, str]:
    """The charts of the page, SVG by name; the confusion matrix is that of one run, or of folds."""
    names, records = _names(found), _single(found, joined)
    figures = _curves({name: result.run for name, result in zip(names, found, strict=True)})
    if records and records.matrix.ndim == 2:
        figures |= _precision_recall(found[0]) if len(found) == 1 else {}
        figures["confusion"] = charts.confusion_svg(records.matrix, records.classes)
    counts = {
        name: torch.from_numpy(result.records.calibration)
        for name, result in zip(names, found, strict=True)
        if not result.run.predictions  # label maps have no probabilities
    }
    return figures | ({"reliability": charts.reliability_diagram(counts)} if counts else {})


# Lines of different colours in a chart.
_LINES = len(charts.COLORS)


def _precision_recall(one: Evaluated) -> dict[str, str]:
    """Charts of the labelled classes of a run whose curves were counted, some in each."""
    if one.curves is None:
        return {}
    lines = {}
    precisions = average_precision(one.curves)
    for name, counts, ap in zip(one.records.classes, one.curves, precisions, strict=True):
        if not math.isnan(ap):
            curve = ClassCurve.of(counts)
            lines[f"{printable(name, MAX_NAME)}: AP {ap:.3f}"] = curve.recall, curve.precision
    parts = (dict(list(lines.items())[i : i + _LINES]) for i in range(0, len(lines), _LINES))
    return {
        f"precision and recall {i}": charts.precision_recall(part)
        for i, part in enumerate(parts, 1)
    }


def write_figures(
    folder: Path, found: Sequence[Evaluated], *, joined: Joined | None = None
) -> None:
    """Writes each chart as NAME.svg, and the confusion matrix as confusion.csv; raises OSError."""
    for name, figure in draw_figures(found, joined=joined).items():
        black = figure.replace("currentColor", "black")  # not all programs know the former
        write_atomic(folder / f"{name.replace(' ', '_')}.svg", black, durable=False)
    records = _single(found, joined)
    if records and records.matrix.ndim == 2:
        write_atomic(folder / "confusion.csv", records.confusion_csv(), durable=False)


def write_report(
    directory: Path,
    found: Sequence[Evaluated],
    device: torch.device,
    *,
    joined: Joined | None = None,
) -> Path:
    """Writes report.html and results.csv of a run or of folds; the path of the first.

    OSError: it cannot be written.
    """
    page, records = report_page(found, device, joined=joined), _single(found, joined)
    write_atomic(directory / REPORT, page, durable=False)
    scores = scores_csv(records.scores, records.classes)
    write_atomic(directory / RESULTS, scores, durable=False)
    return directory / REPORT


def _pictures(records: Records, draw: Callable[[set[int]], dict[int, Card]]) -> dict[str, Any]:
    """The cards to show, and which of them are the worst and best, of all and of each class."""
    worst, best = records.worst(_WORST), records.worst(_BEST, best=True)
    # In a small split an image may be among the best and the worst.
    best = [i for i in best if i not in worst]
    of_class, class_iou = {}, records.scores.iou
    labelled = np.flatnonzero(records.images[..., LABELLED].any(0)).tolist()
    # If not all classes can have pictures, those of lowest IoU have them.
    for k in sorted(labelled, key=class_iou.__getitem__)[:_CLASSES]:
        low, high = (records.worst(_OF_CLASS, by_class=k, best=best) for best in (False, True))
        of_class[records.classes[k]] = low, [i for i in high if i not in low]
    shown = {*worst, *best, *(i for lists in of_class.values() for some in lists for i in some)}
    cards = draw(shown)
    iou = records.image_iou
    named = {i: (records.names[i], float(iou[i]), card) for i, card in sorted(cards.items())}
    left_out = len(labelled) > _CLASSES
    lists = {"worst": worst, "best": best, "of_class": of_class}
    return {"cards": named, "left_out": left_out, **lists}


def _cards(
    found: Sequence[Evaluated], records: Records, device: torch.device, shown: set[int]
) -> dict[int, Card]:
    """A card for each of these images of `records`, drawn with the run that has evaluated it."""
    cards = {}
    for result in found:
        # Each image is in one fold; `here` has its place in that fold's split.
        here = {name: i for i, name in enumerate(result.records.names)}
        wanted = {here[name]: i for i in shown if (name := records.names[i]) in here}
        drawn = draw_cards(result.model, result.dataset, wanted, device)
        cards |= {wanted[i]: card for i, card in drawn.items()}
    return cards


def _names(found: Sequence[Evaluated]) -> list[str]:
    """Different names of the runs."""
    names = [one.run.name for one in found]
    return names if len(set(names)) == len(names) else [str(one.run.directory) for one in found]


def _single(found: Sequence[Evaluated], joined: Joined | None) -> Records | None:
    """What can be shown image by image: a single run, or joined folds."""
    return joined.records if joined else found[0].records if len(found) == 1 else None


def _curves(runs: dict[str, Run]) -> dict[str, str]:
    """Charts of what was logged, by their titles, each with a line for every run."""

    def of(tag: str) -> dict[str, charts.Curve]:
        return {name: run.curves[tag] for name, run in runs.items() if tag in run.curves}

    wanted = {"train/loss": "loss", "eval/mIoU": "mIoU", "train/lr": "learning rate"}
    by_title = {title: of(tag) for tag, title in wanted.items()}
    return {title: charts.curves(title, lines) for title, lines in by_title.items() if lines}


def _differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    # The config of label maps is not that of their model.
    if any(run.predictions for run in runs):
        return {}
    found = differing([run.config for run in runs])
    places = [str(run.environment.get("segtrain", "unknown")) for run in runs]
    if len(set(places)) > 1:
        found["segtrain"] = places
    return found
