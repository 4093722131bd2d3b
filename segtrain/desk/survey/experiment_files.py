"""Writes the folder of an experiment: config, class file, lists, labels and the contact sheet."""

import csv
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from segtrain import __version__
from segtrain.config import Config, load_config
from segtrain.config.loading import yaml_value
from segtrain.data import open_dataset
from segtrain.data.check.findings import split_findings
from segtrain.data.check.scan import SplitScan, scan_pair
from segtrain.data.read.dataset import SegDataset
from segtrain.desk.annotations.label_maps import LABELS
from segtrain.desk.survey.contact_sheet import contact_sheet
from segtrain.desk.survey.contents import spread
from segtrain.desk.survey.decisions import Decisions
from segtrain.desk.survey.drawn_labels import draw_labels
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.recipe import Option
from segtrain.errors import DataError, ExecutionError
from segtrain.files import os_errors_as, write_atomic
from segtrain.run.directory import CONFIG
from segtrain.run.pictures import write_png
from segtrain.text import first_of, printable
from segtrain.types import IGNORE_INDEX

CLASSES, TRAIN, VAL, SHEET = "classes.yaml", "train.txt", "val.txt", "samples.png"
_SAMPLE = 32
_ABOUT_VALUES = ("faint", "dropped band", "white", "outside", "stretched")


def write_files(plan: Decisions, output: Path, command: str, *, jobs: int | None) -> list[str]:
    """Writes the folder `output`, and returns warnings about the values of the images.

    output: new, or with the labels of `draw_annotations`. command: the line that made it, for the
    config.

    Raises:
        DataError: an image or a label cannot be read, or has a name that no list can hold.
        ExecutionError: the disk is full, or nothing can be written there.
    """
    _check_names(plan)
    with os_errors_as(ExecutionError, output, "cannot be written"):
        output.mkdir(parents=True, exist_ok=True)
        # First, because drawing takes the palette from it.
        write_atomic(output / CLASSES, _class_file(plan))
        if plan.label_format is None and plan.labels.kind != "annotations":
            draw_labels(plan, output / CLASSES, output / LABELS, jobs)
        for name, images in ((TRAIN, plan.splits.train), (VAL, plan.splits.val)):
            write_atomic(output / name, _pair_list(plan, images))
        write_atomic(output / CONFIG, _config(plan, output.resolve(), command))
    data = load_config(output / CONFIG).data
    training, _ = (open_dataset(data, split) for split in (data.train_split, data.eval_split))
    write_png(output / SHEET, contact_sheet(plan, training))
    return _value_warnings(training)


def _check_names(plan: Decisions) -> None:
    """DataError: a list cannot name an image or a label, or two images have one name."""
    root, images = plan.survey.root, plan.images
    files = [*plan.label_files.values(), *(file for image in images for file in image.files)]
    if unfit := [file for file in files if not file.isprintable() or "#xywh=" in file]:
        what = "names hold control characters, special blanks, other bytes than UTF-8 or #xywh="
        raise DataError(f"{root}: {what}: {first_of(unfit, 3)}; rename these files")
    count = Counter(image.name for image in images)
    if twins := [image.path for image in images if count[image.name] > 1]:
        what = "images with one name but for the suffix"
        raise DataError(f"{root}: {what}: {first_of(twins, 4)}; rename all but one of each name")


def _class_file(plan: Decisions) -> str:
    classes, label_format = plan.classes, plan.label_format
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


def _pair_list(plan: Decisions, images: Sequence[Image]) -> str:
    """Image, further bands and label in columns separated by tabs."""
    text = io.StringIO()
    below = "" if plan.label_format else f"; labels below {LABELS}/ here"
    text.write(f"# Image and label, below {printable(plan.survey.root.resolve())}{below}\n")
    text.write(f"# {printable(plan.labels.pattern)}: {printable(plan.splits.reason)}\n")
    rows = csv.writer(text, delimiter="\t", lineterminator="\n")
    for image in images:
        names = map(_listed, (*image.files, plan.label_files[image.path]))
        fragment = image.window.fragment if image.window else ""
        rows.writerow([next(names) + fragment, *names])
    return text.getvalue()


def _listed(path: str) -> str:
    """The path as a list may name it, which takes # for a comment, and C: for another machine's.

    Blanks at the beginning are cut off.
    """
    return f"./{path}" if path.startswith(("#", " ")) or path[1:2] == ":" else path


def _config(plan: Decisions, here: Path, command: str) -> str:
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
    if plan.label_format is None:
        drawn = "drawn from the labels of the folder"
        options.append(Option("data.labels_dir", str(here / LABELS), drawn))
    elif plan.label_format != "ids":
        held = "labels hold the colours of the classes"
        options.append(Option("data.label_format", plan.label_format, held))
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
