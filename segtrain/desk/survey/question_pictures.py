"""Pictures of a question: the same image and label for each of its readings."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from segtrain.data.read.classes import default_palette
from segtrain.data.read.decode import to_stored
from segtrain.desk.survey import contents
from segtrain.desk.survey.contact_sheet import cell
from segtrain.desk.survey.contents import Color, Value, packed
from segtrain.desk.survey.image_facts import middle_window, read_bands
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.questions import Reading, UndecidedError
from segtrain.desk.survey.survey import Survey
from segtrain.run.pictures import as_rgb, write_png

_MARK, _LEFT_OUT = (228, 26, 28), (255, 255, 255)


def write_readings(root: Path, undecided: UndecidedError, output: Path) -> list[Path]:
    """A picture for each reading: an image, and its label with the values in question marked.

    They are red as a class, and white where the reading leaves them out. Readings that differ in
    names or channels alone have one picture.
    """
    # The survey and the labels: None where the question was raised before there were any.
    survey, labels = undecided.survey, undecided.labels
    written: dict[bytes, Path] = {}
    for number, reading in enumerate(undecided.readings, start=1):
        shown = reading.labels or labels
        if reading.files:
            picture = _beside(root, reading.files)
        elif shown is None:
            continue
        else:
            picture = _picture(survey, shown, reading)
        output.mkdir(parents=True, exist_ok=True)
        path = written.setdefault(picture.tobytes(), output / f"reading_{number}.png")
        write_png(path, picture)
    return list(written.values())


def _beside(root: Path, files: Sequence[str]) -> np.ndarray:
    """An image and, if there is a second file, its label; (H, W, 3) uint8."""
    cells = [cell(_stretched(root, files[:1]))]
    for file in files[1:]:
        kind = contents.label_facts(root, file).kind
        label = contents.values_of(root / file, kind, middle_window(root / file))
        cells.append(cell(_marked(label, (), _MARK)))
    return np.hstack(cells)


def _picture(survey: Survey, labels: LabelSet, reading: Reading) -> np.ndarray:
    """An image that shows a value in question, and its label beside it; (H, W, 3) uint8."""
    example = next((labels.values[v].example for v in reading.marked if v in labels.values), None)
    owners = (path for path, files in labels.labels.items() if example in files)
    owner = next(owners, next(iter(labels.labels)))
    image = next(candidate for candidate in survey.images if candidate.path == owner)
    cells = [cell(_stretched(survey.root, image.files))]
    if labels.kind != "annotations":  # whose labels are gone
        file = survey.root / labels.labels[owner][0]
        label = contents.values_of(file, labels.kind, middle_window(file), labels.threshold)
        label = to_stored(label, image.orientation) if labels.upright else label
        mark = _LEFT_OUT if reading.leaves_out else _MARK
        cells.append(cell(_marked(label, reading.marked, mark)))
    return np.hstack(cells)


def _stretched(root: Path, files: Sequence[str]) -> np.ndarray:
    """(H, W, 3) uint8: the image as people see most of it; its scale is not decided yet."""
    stored = read_bands([root / file for file in files])
    if stored.dtype == np.uint8:
        return as_rgb(stored, None)
    low, high = np.nanpercentile(stored[..., :3], (1, 99)).tolist()
    return as_rgb(np.nan_to_num(stored), (low, max(high, low + 1e-6)))


def _marked(label: np.ndarray, values: Sequence[Value], mark: Color) -> np.ndarray:
    """The label in colours of its values, or grey with those of `values` in the colour `mark`."""
    present, which = np.unique(label, return_inverse=True)
    colors = np.array(default_palette(256), np.uint8)[np.arange(len(present)) % 256]
    if values:
        colors[:] = colors.mean(axis=1, keepdims=True) // 2 + 64
        colors[np.isin(present, [packed(value) for value in values])] = mark
    return colors[which.reshape(label.shape)]
