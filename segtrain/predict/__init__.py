"""`segtrain predict`: label maps of whatever was photographed, filmed, flown over or scanned.

As in training, pixels count as they are stored: a rotation in the file's EXIF is ignored, and the
command says so.
"""

import argparse
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

from segtrain.checkpoint.ready import ReadyModel, make_ready
from segtrain.config.loading import given_keys
from segtrain.data.read.photos import find_images
from segtrain.data.read.protect import check_pictures
from segtrain.distributed.process_group import device_for
from segtrain.errors import EXIT_OK, ConfigError
from segtrain.predict.kind import Job, Kind
from segtrain.predict.object_table import TableOptions
from segtrain.predict.record import add_record
from segtrain.predict.summary import print_about, summarize
from segtrain.run import pictures
from segtrain.task.decision_rule import rule_of
from segtrain.task.tasks import task_of
from segtrain.text import first_of

# In the order in which they are asked whether a file is theirs: photos take what is left.
_KINDS = "video", "raster", "photo"
# What they honour is refused where one input does not: it would lack in the midst of others.
_OF_ALL = "--table", "--objects", "--probabilities", "--probabilities nii", "data.neighbours"
_SEES_SLICES = "the model sees the slices before and after each; predict the volumes"

_Found = Mapping[Kind, Sequence[Any]]


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code.

    args: source (run directory or checkpoint), others (of an ensemble), inputs (files and folders),
        output (a directory), device ("auto", "cpu" or "cuda"), set (a list of
        `section.key=value`), overwrite, probabilities (None, "npz", "tif" or "nii"), opacity (of
        overlays), clear (names of classes), thresholds (names of classes and numbers),
        unknown_below (a probability), frames (label maps of videos too), and those of
        TableOptions.

    Raises:
        DataError: nothing to predict; or, after all others are done, images that cannot be read.
        ConfigError: an option that the inputs cannot honour.
    """
    # The user names the images, and read_photo has a bound of its own.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    output, overwrite = Path(args.output), args.overwrite
    by_kind, lines = _by_kind(args.inputs, output)
    names = [source.name for sources in by_kind.values() for source in sources]
    pictures.check_output(output, names, overwrite=overwrite)
    tables = TableOptions(args.table, args.objects, args.pixel_size, args.min_area)
    tables.check()
    _refuse_unhonoured(_given(args), by_kind)
    if args.table and len(by_kind) > 1:
        kinds = " and ".join(kind.several for kind in by_kind)
        raise ConfigError(f"--table: {kinds} have tables with other columns: predict one kind")
    ready = _ready(args)
    if ready.config.data.neighbours:
        _refuse_unhonoured(["data.neighbours"], by_kind)
    classes = ready.loaded.classes
    task = task_of(ready.config.task)
    names_shown, palette = task.key(classes)
    opacity = 0.5 if args.opacity is None else args.opacity
    for option in ("probabilities", "table", "objects"):
        if getattr(args, option):
            task.check_classes(f"--{option}")
    tint = pictures.make_tint(names_shown, palette, opacity, args.clear)
    job = Job(ready, output, names, tint, overwrite, args.probabilities, args.frames, tables)
    _check_data(job)
    # All are checked before the first is predicted.
    for kind, sources in by_kind.items():
        kind.check(job, sources)
    lines += add_record(output, ready.loaded, _asked(args, ready), overwrite=overwrite)
    print_about(ready)
    for line in lines:
        print(line)
    pictures.write_legend(output, names_shown, palette, task.ids(classes))
    done = [
        (kind.several, kind.written(job), kind.predict(job, sources))
        for kind, sources in by_kind.items()
    ]
    summarize(ready, done, output, "" if args.table else "; by image: --table FILE")
    return EXIT_OK


def _asked(args: argparse.Namespace, ready: ReadyModel) -> dict[str, Any]:
    """What else decides about the predictions, for the record beside them."""
    return {
        "inputs": [str(path) for path in args.inputs],
        "settings": ready.predictor.settings.describe(),
        "set": args.set,
        "thresholds": dict(args.thresholds),
        "unknown_below": args.unknown_below,
        "tables": [str(path) for path in (args.table, args.objects) if path],
    }


def _by_kind(inputs: Sequence[Path], output: Path) -> tuple[_Found, list[str]]:
    """The sources of each kind that is there, photos first, and lines about other files."""
    by_kind: dict[Kind, list[Any]] = {}
    lines: list[str] = []
    if volumes := _kind("volume"):
        by_kind[volumes], inputs, lines = volumes.take(inputs, output)
    sources, skipped = find_images(inputs, output) if inputs else ([], "")
    kinds = [*filter(None, map(_kind, _KINDS))]
    by_kind |= {kind: [] for kind in kinds}
    for source in sources:
        by_kind[next(kind for kind in kinds if kind.is_own(source))].append(source)
    there = {kind: by_kind[kind] for kind in reversed(by_kind) if by_kind[kind]}
    return there, [*lines, *filter(None, [skipped])]


def _kind(name: str) -> Any:
    """The kind of a module of this folder; None: it is not there."""
    module = f"{__package__}.{name}_inputs"
    return import_module(module).KIND if find_spec(module) else None


def _given(args: argparse.Namespace) -> list[str]:
    """The options of the command line that not every kind honours."""
    said = {
        "--table": args.table,
        "--objects": args.objects,
        "--probabilities": args.probabilities in pictures.PROBABILITY_ENDINGS,
        "--probabilities nii": args.probabilities == "nii",
        "--pixel-size": args.pixel_size,
        "--min-area": args.min_area,
        "--frames": args.frames,
        "--opacity": args.opacity is not None,
        "--clear": args.clear,
        "--set data.slice_axis": "data.slice_axis" in given_keys(args.set),
    }
    return [option for option, value in said.items() if value]


def _refuse_unhonoured(options: Iterable[str], by_kind: _Found) -> None:
    """ConfigError for an option without an effect on the sources, or on some where it must."""
    for option in options:
        without = [kind for kind in by_kind if option not in kind.honours]
        # Most options may serve some inputs only; those of _OF_ALL must serve each.
        if not without or (option not in _OF_ALL and len(without) < len(by_kind)):
            continue
        paths = first_of(source.path for kind in without for source in by_kind[kind])
        such = " and ".join(kind.such for kind in without)
        ways = [kind.instead[option] for kind in without if option in kind.instead]
        ways += [_SEES_SLICES] if option == "data.neighbours" else []
        raise ConfigError("; ".join([f"{option}: not for {such}: {paths}", *ways]))


def _ready(args: argparse.Namespace) -> ReadyModel:
    """The model, which predicts by --threshold and --unknown-below."""
    device = device_for(args.device)
    ready = make_ready(args.source, *args.others, settings=args.set, device=device)
    classes = ready.loaded.classes
    asks = args.thresholds or args.unknown_below is not None
    if asks:
        task = task_of(ready.config.task)
        task.check_classes("--threshold, --unknown-below")
        if task.refuses_rules:
            raise ConfigError(f"--threshold, --unknown-below: {task.refuses_rules}")
    rule = rule_of(args.thresholds, classes.names, args.unknown_below)
    return ready._replace(predictor=ready.predictor.by(rule))


def _check_data(job: Job) -> None:
    """ConfigError: pictures would be written over the images or labels of the training."""
    folders = job.folders
    paths = [f"{folder}/{name}.png" for name in job.names for folder in folders]
    if job.frames:
        paths += [f"{pictures.LABELS}/{name}/0.png" for name in job.names]
    check_pictures("--output", job.output, paths, job.ready.config.data)
