"""Writes the folder of an experiment: config, class file, lists, contact sheet, drawn labels."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cv2
import numpy as np

from segtrain import __version__
from segtrain.annotations import read_annotations
from segtrain.annotations.write import PAIRS, claim, write_labels
from segtrain.config.loading import yaml_value
from segtrain.data.read import formats
from segtrain.data.read.classes import ClassFile, default_palette, load_class_file
from segtrain.data.read.concurrent import for_each_pair, num_processes
from segtrain.data.read.labels import read_label
from segtrain.distributed.machine import process_pool
from segtrain.errors import ConfigError, DataError, ExecutionError
from segtrain.files import os_errors_as, write_atomic
from segtrain.run.pictures import class_labels, legend, overlay, write_indexed_png, write_png
from segtrain.survey import contents
from segtrain.survey.classes import Class, Classes
from segtrain.survey.contents import Value
from segtrain.survey.decide import Answers, Reading, Splits
from segtrain.survey.images import Image
from segtrain.survey.label_sets import LabelSet, ValueFacts
from segtrain.survey.recipe import Option
from segtrain.survey.survey import Survey
from segtrain.text import first_of, printable
from segtrain.types import IGNORE_INDEX

CONFIG, CLASSES, TRAIN, VAL, SHEET = (
    "config.yaml",
    "classes.yaml",
    "train.txt",
    "val.txt",
    "samples.png",
)
LABELS = "labels"
_SIDE_PX, _SHOWN = 256, 6
_DRAWN_KINDS = ("two", "onehot")


@dataclass(frozen=True)
class Plan:
    """All that was decided about a folder."""

    survey: Survey
    labels: LabelSet
    classes: Classes
    splits: Splits
    options: Sequence[Option]


def write(plan: Plan, output: Path, command: str, *, jobs: int | None) -> None:
    """Writes the folder `output`, which is new; the config last.

    command: the line that made it, for the config.

    Raises:
        DataError: a label cannot be read.
        ExecutionError: the disk is full, or nothing can be written there.
    """
    with os_errors_as(ExecutionError, output, "cannot be written"):
        output.mkdir(parents=True, exist_ok=True)
        there = plan.labels.kind == "annotations"  # labels lie in `output` already
        drawn = (
            plan.labels.kind in _DRAWN_KINDS or bool(plan.labels.classes) or _needs_drawing(plan)
        )
        text = _class_file(plan.classes, drawn, plan.labels.kind == "colors")
        write_atomic(output / CLASSES, text)
        label_format = "colors" if plan.labels.kind == "colors" and not drawn else "ids"
        class_file = load_class_file(str(output / CLASSES), label_format=label_format)
        if not (drawn or there or _reads(plan, class_file, label_format)):
            drawn, label_format = True, "ids"
            write_atomic(output / CLASSES, _class_file(plan.classes, True, False))
            class_file = load_class_file(str(output / CLASSES))
        if drawn:
            _draw(plan, output / LABELS, class_file, jobs)
        drawn = drawn or there
        for name, images in ((TRAIN, plan.splits.train), (VAL, plan.splits.val)):
            write_atomic(output / name, _pair_list(plan, images, drawn))
        sheet = _contact_sheet(plan, output, class_file, label_format, drawn)
        write_png(output / SHEET, sheet)
        write_atomic(output / CONFIG, _config(plan, output, label_format, drawn, command))


def draw_annotations(
    survey: Survey, output: Path, answers: Answers, jobs: int | None
) -> tuple[LabelSet, Classes]:
    """Draws the labels of the annotation files into `output`; the set, and its classes.

    Raises:
        DataError: annotations that are wrong, or do not fit the images.
        ConfigError: two formats, or --names and --ignore, which the files decide.
    """
    kinds = [answers.labels] if answers.labels else list(survey.annotations)
    if len(kinds) > 1:
        raise ConfigError(
            f"{survey.root}: annotations of {first_of(kinds)}; --labels {kinds[0]} chooses one"
        )
    if answers.names is not None or answers.ignore is not None:
        raise ConfigError(
            "--names, --ignore: the annotation file names the classes; change it there"
        )
    found = read_annotations(survey.annotations[kinds[0]], survey.root)
    claim(output, survey.root, overwrite=True)
    pixels, images = write_labels(found, output, overlap=found.overlap, jobs=jobs)
    (output / PAIRS).unlink()
    shown = {i: name for i, name in enumerate(found.classes) if i or pixels[0]}
    labels = {image.name: (str(Path(image.name).with_suffix(".png")),) for image in found.images}
    values = {
        i: ValueFacts(int(pixels[i]), int(images[i]), 0.0, "") for i in (*shown, IGNORE_INDEX)
    }
    source = first_of((path.relative_to(survey.root) for path in survey.annotations[kinds[0]]), 2)
    made = LabelSet(f"{source} ({found.format})", "annotations", labels, values)
    classes = tuple(Class(name, (i,), None, int(pixels[i])) for i, name in shown.items())
    reason = f"drawn from {made.pattern}, overlaps by {found.overlap}"
    return made, Classes(classes, (IGNORE_INDEX,), (reason,), tuple(found.notes))


def _needs_drawing(plan: Plan) -> bool:
    """Whether a class file cannot say it: only one colour can be ignored there."""
    return plan.labels.kind == "colors" and len(plan.classes.ignored) > 1


def _reads(plan: Plan, class_file: ClassFile, label_format: str) -> bool:
    """Whether training can read the labels as they are."""
    for files in list(plan.labels.labels.values())[:_SHOWN]:
        try:
            read_label(plan.survey.root / files[0], class_file, label_format)
        except DataError:
            return False
    return True


def _class_file(classes: Classes, drawn: bool, in_colors: bool) -> str:
    lines = [f"# {printable(line)}" for line in classes.reasons]
    total = sum(one.pixels for one in classes.classes)
    lines.append("classes:")
    for one in classes.classes:
        entry: dict[str, object] = {"name": one.name}
        if one.color is not None:
            entry["color"] = list(one.color)
        if in_colors and not drawn:
            if len(one.values) > 1:
                entry["more_colors"] = [list(value) for value in one.values[1:]]
        elif not drawn:
            entry["ids"] = list(one.values)
        share = f"  # {one.pixels / total:.2%} of the pixels" if total else ""
        lines.append(f"  - {yaml_value(entry)}{share}")
    if drawn:
        lines.append("ignore_ids: [255]")
    elif in_colors and classes.ignored:
        lines.append(f"ignore_color: {list(classes.ignored[0])}")
    elif not in_colors:
        lines.append(f"ignore_ids: {list(classes.ignored)}")
    return "\n".join([*lines, ""])


def _pair_list(plan: Plan, images: Sequence[Image], drawn: bool) -> str:
    """Image, further bands and label in columns separated by tabs."""
    text = io.StringIO()
    root = printable(plan.survey.root.resolve())
    text.write(
        f"# Image and label, below {root}" + ("; labels below labels/ here" if drawn else "")
    )
    text.write(f"\n# {plan.labels.pattern}: {printable(plan.splits.reason)}\n")
    is_comment = any(image.files[0].startswith("#") for image in images)  # unless it is quoted
    quoting = csv.QUOTE_ALL if is_comment else csv.QUOTE_MINIMAL
    rows = csv.writer(text, delimiter="\t", lineterminator="\n", quoting=quoting)
    for image in images:
        rows.writerow([*image.files, _label_of(plan, image, drawn)])
    return text.getvalue()


def _label_of(plan: Plan, image: Image, drawn: bool) -> str:
    return f"{image.name}.png" if drawn else plan.labels.labels[image.files[0]][0]


def _config(plan: Plan, output: Path, label_format: str, drawn: bool, command: str) -> str:
    here = output.resolve()
    lines = [f"# Written by segtrain {__version__}: {printable(command)}"]
    lines += [
        f"# warning: {printable(line)}" for line in (*plan.classes.warnings, *plan.splits.warnings)
    ]
    data = [
        Option("data.layout", "list", f"{plan.labels.pattern}, pairs by name"),
        Option("data.root", str(plan.survey.root.resolve()), "only read"),
        Option("data.classes", str(here / CLASSES), "; ".join(plan.classes.reasons[:1])),
        Option("data.train_split", str(here / TRAIN), f"{len(plan.splits.train)} images"),
        Option("data.eval_split", str(here / VAL), plan.splits.reason),
    ]
    if drawn:
        data.append(
            Option("data.labels_dir", str(here / LABELS), "drawn from the labels of the folder")
        )
    if label_format != "ids":
        data.append(
            Option("data.label_format", label_format, "labels hold the colours of the classes")
        )
    section = ""
    for option in sorted([*data, *plan.options], key=lambda o: _ORDER.index(o.key.split(".")[0])):
        part, _, key = option.key.partition(".")
        if part != section:
            lines.append(f"{part}:")
            section = part
        line = f"  {key}: {yaml_value(option.value)}"
        lines.append(f"{line:<48}  # {printable(option.reason)}" if option.reason else line)
    return "\n".join([*lines, ""])


_ORDER = (
    "data",
    "augment",
    "model",
    "loss",
    "train",
    "optim",
    "schedule",
    "eval",
    "checkpoint",
    "log",
)


# Labels that are drawn anew


def _draw(plan: Plan, folder: Path, class_file: ClassFile, jobs: int | None) -> None:
    """Writes a label of train ids for each image, 255 where there is no class."""
    images = [*plan.splits.train, *plan.splits.val]
    work = partial(
        _draw_one, plan.survey.root, plan.labels, plan.classes, folder, class_file.palette
    )
    tasks = [(image, plan.labels.labels[image.files[0]]) for image in images]
    with process_pool(num_processes(len(tasks), jobs)) as pool:
        for _ in for_each_pair(work, tasks, pool, "drawing labels"):
            pass


def _draw_one(
    root: Path,
    labels: LabelSet,
    classes: Classes,
    folder: Path,
    palette: Sequence[tuple[int, int, int]],
    task: tuple[Image, Sequence[str]],
) -> None:
    image, files = task
    drawn = label_of(root, labels, classes, files, image.size)
    path = folder / f"{image.name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    colors = [*palette, *[(0, 0, 0)] * (256 - len(palette))]
    write_indexed_png(path, drawn, colors)


def label_of(
    root: Path, labels: LabelSet, classes: Classes, files: Sequence[str], size: tuple[int, int]
) -> np.ndarray:
    """(H, W) uint8: the position of the class of each pixel, 255 where there is none."""
    if labels.classes:
        drawn = np.zeros(size, np.uint8)
        for file in files:
            number = 1
            if len(labels.classes) > 1:
                number = 1 + class_of_file(labels, file)
            stored = formats.read_stored(root / file)
            if stored.shape[:2] != size:
                raise DataError(
                    f"{file}: {stored.shape[0]}x{stored.shape[1]}, image {size[0]}x{size[1]}"
                )
            channel = contents.single(stored)
            shown = stored[..., :3].any(axis=2) if channel is None else channel > 0
            if Path(file).suffix.lower() in contents.LOSSY:
                shown = stored[..., 0] >= contents.THRESHOLD
            drawn[shown] = number
        return drawn
    stored = formats.read_stored(root / files[0])
    if labels.kind == "two":
        value = (stored[..., 0] >= contents.THRESHOLD).astype(np.int32) * 255
    elif labels.kind == "onehot":
        value = stored.argmax(axis=2).astype(np.int32)
    elif labels.kind == "colors":
        value = stored[..., :3].astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32)
    else:
        value = stored[..., 0].astype(np.int32)
    drawn = np.full(value.shape, IGNORE_INDEX, np.uint8)
    known = np.zeros(value.shape, bool)
    for number, one in enumerate(classes.classes):
        for wanted in one.values:
            drawn[value == _packed(wanted)] = number
            known |= value == _packed(wanted)
    for wanted in classes.ignored:
        known |= value == _packed(wanted)
    if not known.all():
        raise DataError(
            f"{files[0]}: values that were not there before: {np.unique(value[~known])[:5]}"
        )
    return drawn


def class_of_file(labels: LabelSet, file: str) -> int:
    """The position in `labels.classes` of the class that `file` shows, by its name."""
    words = [word.lower() for word in re.split(r"[/_\-. ]+", file)]
    found = [i for i, name in enumerate(labels.classes) if name.lower() in words]
    if len(found) != 1:
        raise DataError(f"{file}: its name has {len(found)} of {', '.join(labels.classes)}")
    return found[0]


def _packed(value: Value) -> int:
    return value if isinstance(value, int) else value[0] << 16 | value[1] << 8 | value[2]


# Pictures


def _contact_sheet(
    plan: Plan, output: Path, class_file: ClassFile, label_format: str, drawn: bool
) -> np.ndarray:
    """Images above the same under their labels, the rarest class among them, and the legend."""
    images = _shown_images(plan)
    columns = []
    for image in images:
        pixels = picture_of(plan.survey.root, image)
        place = output / LABELS if drawn else plan.survey.root
        label = read_label(place / _label_of(plan, image, drawn), class_file, label_format)
        columns.append(_column(pixels, overlay(pixels, label, class_file.palette, 0.6)))
    row = np.hstack(columns)
    return np.vstack(
        [row, legend(class_labels(class_file.names), class_file.palette, row.shape[1])]
    )


def _column(*parts: np.ndarray) -> np.ndarray:
    """Pictures one below another, on squares of white."""
    cells = []
    for part in parts:
        scale = _SIDE_PX / max(part.shape[:2])
        size = [max(1, round(side * scale)) for side in part.shape[1::-1]]
        small = cv2.resize(
            part, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_NEAREST
        )
        cell = np.full((_SIDE_PX + 4, _SIDE_PX + 4, 3), 255, np.uint8)
        cell[: small.shape[0], : small.shape[1]] = small
        cells.append(cell)
    return np.vstack(cells)


def _shown_images(plan: Plan) -> list[Image]:
    """Some images, spread over the training split, the first one with the rarest class."""
    images = list(plan.splits.train)
    step = max(1, len(images) // _SHOWN)
    shown = images[::step][:_SHOWN]
    present = [one for one in plan.classes.classes if one.pixels]
    if present:
        rarest = min(present, key=lambda one: one.pixels)
        example = (
            plan.labels.values[rarest.values[0]].example
            if rarest.values[0] in plan.labels.values
            else None
        )
        owner = next((i for i in images if example in plan.labels.labels[i.files[0]]), None)
        if owner is not None and owner not in shown:
            shown = [owner, *shown[:-1]]
    return shown


def picture_of(root: Path, image: Image) -> np.ndarray:
    """(H, W, 3) uint8 for people: RGB, or the first three bands, each stretched."""
    stored = contents.read_bands(tuple(root / file for file in image.files))
    if stored.shape[2] < 3:
        stored = stored[..., :1].repeat(3, axis=2)
    stored = stored[..., :3]
    if stored.dtype == np.uint8:
        return np.ascontiguousarray(stored)
    values = np.nan_to_num(stored.astype(np.float32))
    low, high = np.percentile(values, (1, 99))
    return ((values - low) * (255 / max(high - low, 1e-6))).clip(0, 255).astype(np.uint8)


def write_readings(
    survey: Survey, labels: LabelSet | None, readings: Sequence[Reading], output: Path
) -> list[Path]:
    """A picture for each reading: an image, and its label with the values in question marked.

    They are red as a class, and white where the reading leaves them out.
    """
    written = []
    for number, reading in enumerate(readings, start=1):
        shown = reading.labels or labels
        if shown is None or not shown.labels:
            continue
        example = next((shown.values[v].example for v in reading.marked if v in shown.values), None)
        chosen = next(
            (name for name, files in shown.labels.items() if example in files),
            next(iter(shown.labels)),
        )
        image = next(one for one in survey.images if one.files[0] == chosen)
        pixels = picture_of(survey.root, image)
        stored = formats.read_stored(survey.root / shown.labels[chosen][0])
        is_left_out = reading.option.startswith("--ignore ") and "none" not in reading.option
        marked = _marked(stored, reading.marked, (255, 255, 255) if is_left_out else (228, 26, 28))
        if marked.shape[:2] != pixels.shape[:2]:
            marked = cv2.resize(marked, pixels.shape[1::-1], interpolation=cv2.INTER_NEAREST)
        path = output / f"reading_{number}.png"
        write_png(path, np.hstack([_column(pixels), _column(marked)]))
        written.append(path)
    return written


def _marked(stored: np.ndarray, values: Sequence[Value], mark: tuple[int, int, int]) -> np.ndarray:
    """The label in colours of its values, or grey with those of `values` in the colour `mark`."""
    flat = stored.reshape(-1, stored.shape[2])
    found, inverse = np.unique(flat, axis=0, return_inverse=True)
    colors = np.array(default_palette(256), np.uint8)[np.arange(len(found)) % 256]
    if values:
        colors = np.repeat(colors.mean(axis=1, keepdims=True).astype(np.uint8) // 2 + 64, 3, axis=1)
        for value in values:
            wanted = [value] if isinstance(value, int) else list(value)
            colors[(found[:, : len(wanted)] == wanted).all(axis=1)] = mark
    return colors[inverse.reshape(-1)].reshape(*stored.shape[:2], 3)
