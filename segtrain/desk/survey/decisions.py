"""Writes the folder of an experiment: config, class file, lists, contact sheet, drawn labels."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cv2
import numpy as np

from segtrain import __version__
from segtrain.config import Config, load_config
from segtrain.config.loading import yaml_value
from segtrain.data import open_dataset
from segtrain.data.check.findings import split_findings
from segtrain.data.check.scan import SplitScan, scan_pair
from segtrain.data.read import image_formats
from segtrain.data.read.classes import default_palette, load_class_file
from segtrain.data.read.concurrent import for_each_pair, num_processes
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.decode import to_stored
from segtrain.data.read.label_formats import label_format_of
from segtrain.data.read.raster import is_tiff
from segtrain.desk.annotations import read_annotations
from segtrain.desk.annotations.label_maps import PAIRS, claim, label_files, write_labels
from segtrain.desk.survey import contents
from segtrain.desk.survey.class_ids import class_ids
from segtrain.desk.survey.class_table import Class, Classes
from segtrain.desk.survey.contents import Color, Value, packed, spread, word
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.questions import Answers, Reading
from segtrain.desk.survey.recipe import Option
from segtrain.desk.survey.splits import Splits
from segtrain.desk.survey.survey import Survey
from segtrain.distributed.machine import process_pool
from segtrain.errors import ConfigError, ExecutionError, refuse_unused
from segtrain.files import os_errors_as, write_atomic
from segtrain.run.pictures import (
    as_rgb,
    legend,
    overlay,
    write_bands,
    write_indexed_png,
    write_png,
)
from segtrain.text import MAX_NAME, first_of, printable
from segtrain.types import IGNORE_INDEX

CONFIG, CLASSES, TRAIN, VAL = "config.yaml", "classes.yaml", "train.txt", "val.txt"
LABELS, SHEET = "labels", "samples.png"
_SIDE_PX, _SHOWN, _SAMPLE = 256, 10, 32
_ABOUT_VALUES = ("faint", "dropped band", "white", "outside", "stretched")
_MARK, _LEFT_OUT = (228, 26, 28), (255, 255, 255)


@dataclass(frozen=True)
class Decisions:
    """All that was decided about a folder."""

    survey: Survey
    labels: LabelSet
    classes: Classes
    splits: Splits
    options: Sequence[Option]


def write(plan: Decisions, output: Path, command: str, *, jobs: int | None) -> list[str]:
    """Writes the folder `output`, and returns warnings about the values of the images.

    output: new, or with the labels of `draw_annotations`. command: the line that made it, for the
    config.

    Raises:
        DataError: an image or a label cannot be read.
        ExecutionError: the disk is full, or nothing can be written there.
    """
    label_format = _label_format(plan)
    with os_errors_as(ExecutionError, output, "cannot be written"):
        output.mkdir(parents=True, exist_ok=True)
        # First, because drawing takes the palette from it.
        write_atomic(output / CLASSES, _class_file(plan, label_format))
        if label_format is None and plan.labels.kind != "annotations":
            _draw(plan, output, jobs)
        for name, images in ((TRAIN, plan.splits.train), (VAL, plan.splits.val)):
            write_atomic(output / name, _pair_list(plan, images, is_drawn=label_format is None))
        write_atomic(output / CONFIG, _config(plan, output.resolve(), label_format, command))
    data = load_config(output / CONFIG).data
    training = open_dataset(data, data.train_split)
    write_png(output / SHEET, _contact_sheet(plan, training))
    return _value_warnings(training)


def _label_format(plan: Decisions) -> str | None:
    """`data.label_format`; None: training cannot read the labels as they are, so they are drawn."""
    labels = plan.labels
    # (): an image without a file shows background alone, so its label is drawn.
    if labels.classes or labels.kind not in ("ids", "colors") or () in labels.labels.values():
        return None
    # They lie on the picture as viewers turn it; training reads pixels as stored.
    if labels.upright:
        return None
    if labels.kind == "colors" and len(plan.classes.ignored) > 1:
        return None  # a class file can ignore one colour
    file = plan.survey.root / next(iter(labels.labels.values()))[0]
    # Of a PNG training cannot read a window alone.
    if plan.splits.train[0].window and not is_tiff(file):
        return None
    info = image_formats.read_info(file)
    # Training refuses transparent pixels, which may be in any of the files.
    problem = label_format_of(labels.kind).problem(info, 0)
    return None if info.alpha or problem else labels.kind


def _class_file(plan: Decisions, label_format: str | None) -> str:
    classes = plan.classes
    lines = [*(f"# {printable(line)}" for line in classes.reasons), "classes:"]
    total, overlapping = classes.total, plan.labels.overlapping
    for class_info in classes.classes:
        entry: dict[str, object] = {"name": class_info.name}
        if class_info.color is not None:
            entry["color"] = list(class_info.color)
        if label_format == "ids" or (plan.labels.kind == "annotations" and not overlapping):
            entry["ids"] = list(class_info.values)
        elif label_format == "colors" and len(class_info.values) > 1:
            entry["more_colors"] = [list(value) for value in class_info.values[1:]]
        share = f"  # {class_info.pixels / total:.2%} of the pixels" if total else ""
        lines.append(f"  - {yaml_value(entry)}{share}")
    if label_format == "colors":
        lines += [f"ignore_color: {list(color)}" for color in classes.ignored]
    else:
        ignored = [IGNORE_INDEX] if label_format is None else list(classes.ignored)
        lines.append(f"ignore_ids: {ignored}")
    return "\n".join([*lines, ""])


def _pair_list(plan: Decisions, images: Sequence[Image], *, is_drawn: bool) -> str:
    """Image, further bands and label in columns separated by tabs."""
    text = io.StringIO()
    below = "; labels below labels/ here" if is_drawn else ""
    text.write(f"# Image and label, below {printable(plan.survey.root.resolve())}{below}\n")
    text.write(f"# {plan.labels.pattern}: {printable(plan.splits.reason)}\n")
    rows = csv.writer(text, delimiter="\t", lineterminator="\n")
    for image in images:
        if plan.labels.kind == "annotations":
            # Labels are named relative to data.labels_dir.
            label = plan.labels.labels[image.path][0].removeprefix(f"{LABELS}/")
        else:
            label = (
                _drawn_name(image, plan.labels) if is_drawn else plan.labels.labels[image.path][0]
            )
        start = "./" if image.path.startswith("#") else ""  # or the line would be a comment
        path = start + image.path + (image.window.fragment if image.window else "")
        rows.writerow([path, *image.files[1:], label])
    return text.getvalue()


def _config(plan: Decisions, here: Path, label_format: str | None, command: str) -> str:
    lines = [f"# Written by segtrain {__version__}: {printable(command)}"]
    warnings = (*plan.classes.warnings, *plan.splits.warnings)
    lines += [f"# warning: {printable(line)}" for line in warnings]
    pairs = plan.survey.pair_source or "name"
    options = [
        Option("data.layout", "list", f"{plan.labels.pattern}, pairs by {pairs}"),
        Option("data.root", str(plan.survey.root.resolve()), "only read"),
        Option("data.classes", str(here / CLASSES), plan.classes.reasons[0]),
        Option("data.train_split", str(here / TRAIN), f"{len(plan.splits.train)} images"),
        Option("data.eval_split", str(here / VAL), plan.splits.reason),
    ]
    if label_format is None:
        drawn = "drawn from the labels of the folder"
        options.append(Option("data.labels_dir", str(here / LABELS), drawn))
    elif label_format != "ids":
        held = "labels hold the colours of the classes"
        options.append(Option("data.label_format", label_format, held))
    if plan.labels.overlapping:
        lines.append(f"{'task: multilabel':<48}  # a pixel may have several classes")
        options.append(Option("data.label_format", "bands", "a band a class"))
    options += plan.options
    for section in Config.model_fields:
        of_section = [entry for entry in options if entry.key.startswith(f"{section}.")]
        lines += [f"{section}:"] if of_section else []
        for option in of_section:
            line = f"  {option.key.removeprefix(f'{section}.')}: {yaml_value(option.value)}"
            reason = printable(option.reason)
            lines.append(f"{line:<48}  # {reason}" if reason else line)
    return "\n".join([*lines, ""])


# Labels that are drawn


def draw_annotations(
    survey: Survey, output: Path, answers: Answers, jobs: int | None
) -> tuple[LabelSet, Classes]:
    """Draws the labels of the annotation files into `output`; the set, and its classes.

    Raises:
        DataError: annotations that are wrong, or do not fit the images.
        ConfigError: two formats, or an option that annotation files leave no choice for.
    """
    kinds = [answers.labels] if answers.labels else list(survey.annotations)
    if len(kinds) > 1:
        raise ConfigError(
            f"{survey.root}: annotations of {first_of(kinds)}; --labels {kinds[0]} chooses one"
        )
    if kinds[0] not in survey.annotations:
        there = first_of(survey.annotations)
        raise ConfigError(f"--labels {kinds[0]}: no such labels; found annotations of {there}")
    refuse_unused(vars(answers), "exif ignore instances pairs threshold", "annotation files")
    files = survey.annotations[kinds[0]]
    how = {"attribute": answers.attribute, "names": answers.names}
    how["others_are_empty"] = answers.missing is not None
    annotations = read_annotations(files, survey.root, **how)
    claim(output, survey.root, overwrite=True)
    overlap = annotations.overlap if answers.task is None else "keep"
    pixels, _ = write_labels(annotations, output, overlap=overlap, jobs=jobs)
    # The lists of this folder, train.txt and val.txt, take its place.
    (output / PAIRS).unlink()
    classes = [
        Class(name, (i,), None, int(pixels[i]))
        for i, name in enumerate(annotations.classes)
        if i or (pixels[0] and overlap != "keep")
    ]
    pattern = (
        f"{first_of((file.relative_to(survey.root) for file in files), 2)} ({annotations.format})"
    )
    keeps = overlap == "keep"
    files = label_files(annotations, keeps=keeps)
    labels = {image.name: (file,) for image, file in zip(annotations.images, files, strict=True)}
    reason = f"drawn from {pattern}, overlaps by {overlap}"
    made = LabelSet(pattern, "annotations", labels, {}, overlapping=keeps)
    total = 0
    if keeps:
        reason = f"drawn from {pattern}, each class by itself"
        total = sum(math.prod(image.size) for image in annotations.images)
    reasons, notes = (reason,), tuple(annotations.notes)
    return made, Classes(tuple(classes), (IGNORE_INDEX,), reasons, notes, all_pixels=total)


def _draw(plan: Decisions, output: Path, jobs: int | None) -> None:
    """Writes a label of train ids for each image, 255 where there is no class."""
    palette = load_class_file(str(output / CLASSES)).palette
    work = partial(_draw_one, plan.survey.root, plan.labels, plan.classes, output / LABELS, palette)
    # Windows share the label of their file.
    images = list({image.path: image for image in (*plan.splits.train, *plan.splits.val)}.values())
    with process_pool(num_processes(len(images), jobs)) as pool:
        for _ in for_each_pair(work, images, pool, "drawing labels"):
            pass


def _draw_one(
    root: Path,
    labels: LabelSet,
    classes: Classes,
    folder: Path,
    palette: Sequence[Color],
    image: Image,
) -> None:
    files = labels.labels[image.path]
    if labels.overlapping:
        number = len(labels.classes)
        class_files = labels.class_files(root, image.path)
        bands = contents.presence(class_files, image.size, number, labels.void, labels.threshold)
        # The bands of the classes that are kept, in their order; files may show more.
        chosen = [class_info.values[0] - 1 for class_info in classes.classes]
        write_bands(folder / _drawn_name(image, labels), bands[..., chosen])
        return
    if not files and not labels.classes:  # --missing background
        drawn = np.full(image.size, _train_id_of(classes, 0), np.uint8)
    elif labels.classes:
        class_files = labels.class_files(root, image.path)
        numbers, _ = contents.painted(class_files, image.size, labels.void, labels.threshold)
        train_ids = np.full(len(labels.classes) + 1, IGNORE_INDEX, np.uint8)
        for i, class_info in enumerate(classes.classes):
            train_ids[[*class_info.values]] = i
        drawn = train_ids[numbers]
    else:
        drawn = class_ids(root / files[0], labels, classes)
        drawn = to_stored(drawn, image.orientation) if labels.upright else drawn
    if image.window:
        from segtrain.predict.georaster import write_label  # imports torch, and is rare

        path = folder / _drawn_name(image, labels)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_label(path, drawn, IGNORE_INDEX, root / image.path)
        return
    colors = [*palette, *[(0, 0, 0)] * (256 - len(palette))]
    write_indexed_png(folder / _drawn_name(image, labels), drawn, colors)


def _drawn_name(image: Image, labels: LabelSet) -> str:
    """A label, relative to the folder of drawn labels; TIFFs have windows, and bands."""
    return f"{image.name}.{'tif' if image.window or labels.overlapping else 'png'}"


def _train_id_of(classes: Classes, value: Value) -> int:
    train_ids = (i for i, class_info in enumerate(classes.classes) if value in class_info.values)
    return next(train_ids, IGNORE_INDEX)


# What training will see


def _contact_sheet(plan: Decisions, training: SegDataset) -> np.ndarray:
    """Images above the same under their labels, the rarest class among them, and the legend."""
    labels, palette = plan.labels, training.classes.palette
    shown = spread(range(len(training)), _SHOWN)
    shown_in = {value for value, facts in labels.values.items() if facts.example}
    rare = [
        class_info
        for class_info in plan.classes.classes
        if class_info.pixels and class_info.values[0] in shown_in
    ]
    if rare:
        example = labels.values[
            min(rare, key=lambda class_info: class_info.pixels).values[0]
        ].example
        owner = next(path for path, files in labels.labels.items() if example in files)
        image = plan.survey.root.resolve() / owner
        at = next((i for i, pair in enumerate(training.pairs) if pair.image == image), None)
        # An image that shows the rarest class takes the place of the last one.
        shown = shown if at in (None, *shown) else [at, *shown[:-1]]
    columns = []
    for i in shown:
        image, label = training[i]
        pixels = as_rgb(image, training.form.value_range)
        columns.append(np.vstack([_cell(pixels), _cell(overlay(pixels, label, palette, 0.6))]))
    row = np.hstack(columns)
    names = [printable(class_info.name, MAX_NAME) for class_info in plan.classes.classes]
    if not (labels.classes or labels.kind == "annotations"):
        values = [first_of(map(word, class_info.values), 1) for class_info in plan.classes.classes]
        names = [f"{name} ({value})" for name, value in zip(names, values, strict=True)]
    return np.vstack([row, legend(names, palette, row.shape[1])])


def _cell(picture: np.ndarray) -> np.ndarray:
    """The picture on a white square."""
    scale = _SIDE_PX / max(picture.shape[:2])
    size = [max(1, round(side * scale)) for side in picture.shape[1::-1]]
    kind = cv2.INTER_AREA if scale < 1 else cv2.INTER_NEAREST
    cell = np.full((_SIDE_PX + 4, _SIDE_PX + 4, 3), 255, np.uint8)
    cell[: size[1], : size[0]] = cv2.resize(picture, size, interpolation=kind)
    return cell


def _value_warnings(training: SegDataset) -> list[str]:
    """What is odd about the values of some images, as `segtrain data check` says it."""
    classes = training.labels.meant(training.classes)
    scan = SplitScan("", len(training), classes.num_classes)
    # A sample: `segtrain data check` reads all images.
    for pair in spread(training.pairs, _SAMPLE):
        scan.add(scan_pair(pair, training.classes, training.form, training.labels))
    return [
        finding.text for finding in split_findings(scan, classes) if finding.kind in _ABOUT_VALUES
    ]


# Pictures of a question


def write_readings(
    survey: Survey, labels: LabelSet | None, readings: Sequence[Reading], output: Path
) -> list[Path]:
    """A picture for each reading: an image, and its label with the values in question marked.

    They are red as a class, and white where the reading leaves them out. Readings that differ in
    names or channels alone have one picture.
    """
    written: dict[bytes, Path] = {}
    for number, reading in enumerate(readings, start=1):
        shown = reading.labels or labels
        if shown is None:
            continue
        example = next((shown.values[v].example for v in reading.marked if v in shown.values), None)
        owners = (path for path, files in shown.labels.items() if example in files)
        owner = next(owners, next(iter(shown.labels)))
        image = next(candidate for candidate in survey.images if candidate.path == owner)
        cells = [_cell(_stretched(survey.root, image))]
        if shown.kind != "annotations":  # whose labels are gone
            file = survey.root / shown.labels[owner][0]
            window = contents.middle_window(file)
            label = contents.values_of(file, shown.kind, window, shown.threshold)
            label = to_stored(label, image.orientation) if shown.upright else label
            mark = _LEFT_OUT if reading.leaves_out else _MARK
            cells.append(_cell(_marked(label, reading.marked, mark)))
        picture = np.hstack(cells)
        path = written.setdefault(picture.tobytes(), output / f"reading_{number}.png")
        write_png(path, picture)
    return list(written.values())


def _stretched(root: Path, image: Image) -> np.ndarray:
    """(H, W, 3) uint8: the image as people see most of it; its scale is not decided yet."""
    stored = contents.read_bands([root / file for file in image.files])
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
