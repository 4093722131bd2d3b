"""`segtrain score`: label maps that any program has written, scored on a data set."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from segtrain.commands.config import find_config
from segtrain.config import Config, config_to_yaml, load_config
from segtrain.data import open_dataset
from segtrain.data.read.protect import check_run_directory
from segtrain.desk.results.evaluated import Evaluated
from segtrain.desk.results.on_list import data_on
from segtrain.desk.results.report import write_report
from segtrain.desk.results.runs import Run
from segtrain.desk.results.scored_maps import LabelMaps, seem_to_count_from_one
from segtrain.errors import EXIT_OK, ConfigError, ExecutionError
from segtrain.files import check_output, os_errors_as, write_atomic, write_output
from segtrain.run.directory import REPORT, run_of, word_for
from segtrain.run.division import EXPERIMENT, is_scored
from segtrain.run.pictures import LABELS
from segtrain.score.answers import (
    answers_of,
    groups_by,
    instances_of,
    volumes_of,
    without_classes,
)
from segtrain.score.plugin_metrics import PluginMetric
from segtrain.score.records import PREDICTED, Records, load_records
from segtrain.score.surfaces import SurfaceScores
from segtrain.task.tasks import task_of
from segtrain.text import printable, say

_LEFT_OUT = "left out    calibration error, average precision, curves: need probabilities"


def main(args: argparse.Namespace) -> int:
    """Prints the scores, writes what `compare` reads and a page; returns the exit code.

    args: predictions (a folder), data (a config or run), split (also a list file), set,
        label_format (None: as `segtrain predict` writes), ending, ignore_others, output, json,
        per_image (files), group (a pattern), surface (a tolerance in pixels).

    Raises:
        UserError: the data set cannot be read, has no classes, or the label maps do not fit it.
    """
    config = _config(args)
    task = task_of(config.task)
    task.check_classes("segtrain score")
    directory = _place(args, config)
    dataset = open_dataset(config.data, config.data.eval_split)
    if unknown := config.eval.unknown_classes(dataset.classes.names):
        raise ConfigError("\n".join(unknown))
    how = {"ending": args.ending, "ignore_others": args.ignore_others}
    maps = LabelMaps.find(args.predictions, dataset, args.label_format, **how)
    names, groups = dataset.classes.names, groups_by(args.group, dataset, config)
    instances, why_not = instances_of(dataset, config)
    surfaces = None if args.surface is None else SurfaceScores(names, args.surface)
    metrics = [PluginMetric(metric, names) for metric in config.eval.metrics]
    volumes = volumes_of(dataset, config, groups)
    measured = [x for x in (instances, surfaces, volumes, *metrics) if x is not None]
    outcome = maps.count(task, [x.add for x in measured])
    about = {"predictions": str(maps.folder), "split": dataset.split}
    kept = about | {"inference": f"label maps of {maps.folder}"}
    counts = (x.numpy() for x in outcome.by_image())
    records = Records(kept, tuple(dataset.names), names, *counts)
    if args.label_format is None:
        maps.refuse_two_readings(records.images[..., PREDICTED].sum(0))
    if volumes is not None:
        volumes.sum_over_ranks()
    by_volume = {"by_volume": volumes and volumes.table, "surfaces": surfaces}
    left_out = config.eval.without
    answers = [without_classes(outcome.scores, left_out, names)] if left_out else []
    answers += answers_of(records, groups, by_volume, {x.name: x.scores() for x in metrics})
    layout = config.data.layout
    report = outcome.report(names, dataset.classes, layout=layout, instances=instances)
    lines = [f"warning: {warning}" for warning in dataset.warnings]
    lines += [*report.lines(), *why_not, *outcome.warnings(names, dataset.split)]
    lines += [line for answer in answers for line in answer.lines]
    lines += [] if records.matrix.ndim > 2 else seem_to_count_from_one(records.matrix, names)
    what = f"{len(dataset)} images of split {dataset.split}"
    what += f"; {maps.left_out} files of no image are left out" if maps.left_out else ""
    print(*lines, _LEFT_OUT, f"label maps  {printable(maps.folder)}, {what}", sep="\n")
    table = about | {"num_images": len(dataset), **report.to_dict(), **outcome.table()}
    table |= {answer.key: answer.found for answer in answers}
    run = Run(directory, config, {}, {}, predictions=str(maps.folder))
    _write(args, table, Evaluated(run, records, maps, dataset))
    return EXIT_OK


def _write(args: argparse.Namespace, table: dict[str, Any], found: Evaluated) -> None:
    """Writes the files of options, the folder for `compare`, and the page; says where."""
    directory = found.run.directory
    files = {args.json: json.dumps(table, indent=2, allow_nan=False) + "\n"}
    files[args.per_image] = found.records.table()
    with os_errors_as(ExecutionError, directory, "the scores cannot be written"):
        directory.mkdir(parents=True, exist_ok=True)
        for file in files.keys() - {None}:
            write_output(file, files[file])
        write_atomic(directory / EXPERIMENT, config_to_yaml(found.run.config))
        found.records.save(directory)
        write_report(directory, [found], torch.device("cpu"))
    print(f"report      {printable(directory / REPORT)}")
    print(f"to compare  segtrain compare RUN {word_for(directory)}")


def _config(args: argparse.Namespace) -> Config:
    """That of --data, with the split that is scored; the code that a run names is not imported."""
    named = find_config(args.data)
    if named.note:
        say(named.note)
    config = load_config(named.path, args.set, imports=run_of(named.path) is None)
    if args.split is None:
        return config
    return config.model_copy(update={"data": data_on(config.data, args.split)})


def _place(args: argparse.Namespace, config: Config) -> Path:
    """The folder to write; what must not be written at the end is refused now."""
    folder = args.predictions.resolve()
    # Of predictions/labels, as segtrain predict writes it, labels tells nothing.
    name = folder.parent.name if folder.name == LABELS else folder.name
    directory: Path = args.output or Path("runs") / f"{name}_scored"
    check_run_directory(directory, config.data)
    if args.output is None and is_scored(directory):
        before = load_records(directory).about.get("predictions", "")
        if Path(before).resolve() not in (folder, folder / LABELS):
            what = f"{directory}: holds the scores of {before}; name another --output"
            raise ConfigError(printable(what))
    with os_errors_as(ConfigError, f"--output {directory}", "cannot be written"):
        is_other = directory.exists() and not is_scored(directory) and any(directory.iterdir())
        if is_other or directory.resolve().is_relative_to(args.predictions.resolve()):
            what = "holds other files, or lies among the label maps; choose another folder"
            raise ConfigError(f"--output {directory}: {what}")
    begins = {"--json": '{\n  "predictions": ', "--per-image": "image,IoU,accuracy,"}
    for (option, begin), file in zip(begins.items(), (args.json, args.per_image), strict=True):
        if file:
            with os_errors_as(ConfigError, f"{option} {file}", "cannot be written"):
                check_output(file, begin)
    return directory
