"""What `segtrain predict` says of what it has done."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from segtrain.checkpoint.ready import ReadyModel
from segtrain.data.check.channels import channel_findings
from segtrain.data.check.image_findings import photo_findings
from segtrain.data.check.values import ImageValues
from segtrain.data.read.find import first_lines
from segtrain.errors import DataError
from segtrain.models.precision import evaluation_warnings
from segtrain.predict.undeclared import zero_lines
from segtrain.text import counted, first_of, printable

NOT_FINITE = (
    "warning: the scores of {} are not finite, and predictions from them mean nothing; if they "
    "were computed in float16, use bfloat16"
)


class Notes(NamedTuple):
    """What the command says about an image at the end."""

    problem: str = ""  # why it cannot be read
    turned: bool = False  # EXIF asks for a rotation
    in_parts: bool = False  # too large for the mode `whole` of the settings
    values: ImageValues | None = None
    is_finite: bool = True  # whether its scores are; else its prediction means nothing
    zeros: float = 0.0  # of a map, the share of pixels in areas that are 0 and no "no data"
    cut_short: str = ""  # a video whose last frames are missing
    class_pixels: np.ndarray | None = None  # as of the function; None: not counted


def class_pixels(label: np.ndarray, num_valid: int, num_classes: int) -> np.ndarray:
    """Pixels of each class, and last `num_valid`, those that have a value: (K + 1,) int64.

    label: (H, W) uint8 train ids or IGNORE_INDEX; where classes overlap (H, W, K).
    """
    if label.ndim == 3:
        return np.append(np.count_nonzero(label == 1, (0, 1)), num_valid)
    # Row by row, since bincount copies what it counts to eight bytes each.
    counts = sum(np.bincount(row, minlength=256) for row in label)
    return np.append(counts[:num_classes], num_valid)


def shares_line(
    counts: Iterable[np.ndarray], names: Sequence[str], *, some_unknown: bool = False
) -> str:
    """The largest classes in percent of what has a value, as in --table; empty: nothing has."""
    *of_class, valid = np.sum([np.zeros(len(names) + 1, np.int64), *counts], 0).tolist()
    pairs = sorted(zip(of_class, names, strict=True), key=lambda pair: -pair[0])
    found = [f"{name} {100 * pixels / valid:.3g} %" for pixels, name in pairs if pixels]
    unknown = valid - sum(of_class) if some_unknown else 0
    rest = f"; {100 * unknown / valid:.3g} % of no class" if unknown else ""
    return f"classes: {first_of(found, 6) or 'none'}{rest}" if valid else ""


def print_about(ready: ReadyModel) -> None:
    """Says which weights predict, how and where, before they do."""
    predictor = ready.predictor
    print(f"{ready.loaded.about}; {predictor.settings.describe()}; {predictor.device}")
    for line in evaluation_warnings(ready.config, predictor.device):
        print(f"warning: {line}")


def summarize(
    ready: ReadyModel, done: Sequence[tuple[str, str, Sequence[Notes]]], output: Path, hint: str
) -> None:
    """Prints what was done; raises DataError for files that cannot be read.

    done: of each kind of input its name, the folder below `output`, and the notes. hint: ends
        the line of the classes.
    """
    notes = [note for _, _, of_kind in done for note in of_kind]
    values = [note.values for note in notes if note.values is not None]
    for what, where, of_kind in done:
        num_done = sum(not note.problem for note in of_kind)
        print(f"{num_done} of {len(of_kind)} {what}: {printable(output)}/{where}")
        counts = [note.class_pixels for note in of_kind if note.class_pixels is not None]
        rule, names = ready.predictor.rule, ready.loaded.classes.names
        some_unknown = rule is not None and rule.unknown_below > 0
        if line := shares_line(counts, names, some_unknown=some_unknown):
            print(line + hint)
    if num_in_parts := sum(note.in_parts for note in notes):
        print(f"{num_in_parts} of them too large to be predicted as a whole: in parts")
    if turned := sum(note.turned for note in notes):
        asks = counted(turned, "of them asks", "of them ask")
        print(f"{asks} for a rotation by EXIF; it was ignored, as in training")
    for note in notes:
        if note.cut_short:
            print(f"warning: {note.cut_short}")
    for line in zero_lines((x.values.name, x.zeros) for x in notes if x.values is not None):
        print(line)
    known = ready.loaded.channels
    strange = channel_findings(values, known) if known else ()
    for finding in (*photo_findings(values), *strange):
        print(f"warning: {finding.lines()[0]}")
    if infinite := sum(not note.is_finite for note in notes):
        print(NOT_FINITE.format(counted(infinite, "file", "files")))
    if problems := [note.problem for note in notes if note.problem]:
        raise DataError(
            first_lines(f"{len(problems)} of {len(notes)} files cannot be read", problems)
        )
