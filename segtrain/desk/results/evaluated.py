"""Runs with the scores of their best checkpoints, and label maps of other programs with theirs."""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from segtrain.checkpoint.format import load, parse_experiment
from segtrain.checkpoint.trained import LoadedModel, load_model, resolve
from segtrain.config import DataConfig, load_config
from segtrain.data import open_dataset
from segtrain.data.read.classes import class_differences
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.find import Pair
from segtrain.data.read.layouts import list_split
from segtrain.data.read.tiles import TileBox
from segtrain.desk.results.runs import Run, read_run
from segtrain.desk.results.scored_maps import LabelMaps
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError, DataError, UserError
from segtrain.inference.predictor import for_scores
from segtrain.inference.settings import InferenceSettings, set_after_training
from segtrain.models.precision import to_eval_precision
from segtrain.one_vs_rest import CurveCounts
from segtrain.run.division import EXPERIMENT, is_scored
from segtrain.score.records import Records, load_records
from segtrain.score.scoring import evaluate_dataset
from segtrain.task.tasks import task_of
from segtrain.text import first_of, say

_ROOT = ("data.root",)


class Evaluated(NamedTuple):
    """A run with the scores of its best checkpoint, or label maps with theirs.

    model: what predicts, for pictures; None: nothing needs it, as are the data where they cannot be
        read.
    curves: as `CurveCounts.counts`, on the host; None: not counted.
    """

    run: Run
    records: Records
    model: LoadedModel | LabelMaps | None
    dataset: SegDataset | None
    curves: torch.Tensor | None = None


def evaluated(
    directory: Path,
    device: torch.device,
    overrides: Sequence[str] = (),
    *,
    with_curves: bool = False,
    with_pictures: bool = True,
) -> Evaluated:
    """The run in `directory` with its scores, from its own file if this fits its best checkpoint.

    overrides: `data.root=...`, where the data have moved. with_curves: evaluate once more for the
        curves, unless the file has them, as that of a run whose classes overlap.
    with_pictures: with the model and the data, which scores that are kept do without, and so
        without the code of plugins. Label maps have neither.

    Raises:
        UserError: there is no run or checkpoint; or the data it needs cannot be read; or this is a
            rank of several, and there are no scores.
    """
    records = load_records(directory)
    if is_scored(directory):
        run = replace(read_any(directory), predictions=records.about.get("predictions", "unknown"))
        return Evaluated(run, records, None, None)
    run, file = read_run(directory), resolve(directory)
    checkpoint = load(file)
    config, _ = parse_experiment(checkpoint, file, needed=())
    task_of(config.task).check_classes(str(directory))
    data = set_after_training(config, overrides, _ROOT, source=str(directory)).data
    # The file may hold the scores of another checkpoint than the best one.
    split, fits = data.eval_split, records is not None
    fits = fits and records.about.get("step") == checkpoint.step
    # Training keeps the probabilities of all classes only where they overlap.
    fits = fits and not (with_curves and records.calibration.ndim == 2)
    loaded, dataset, curves = None, None, None
    try:
        if with_pictures or not fits:
            loaded = load_model(directory, device=device)
            dataset = open_dataset(data, split)
        if fits and dataset and records.names != tuple(dataset.names):
            raise DataError(f"{data.root}: split {split} has other images than were scored")
    except UserError as error:
        # Without images the page still has scores. Without both there is nothing to show.
        if not fits:
            raise
        say(f"warning: no pictures: {error}")
        dataset = None
    if not fits:
        if dist.world_size() > 1:
            raise ConfigError(f"{directory}: the scores of its best checkpoint are missing")
        say(f"evaluating {directory}, step {loaded.step}, on split {split}")
        counted = CurveCounts(loaded.classes.num_classes, device) if with_curves else None
        records = evaluate(loaded, dataset, device, counted)
        curves = None if counted is None else counted.counts.cpu()
    # Where classes overlap, the calibration counts are those of the curves.
    if records.calibration.ndim == 3:
        curves = torch.from_numpy(records.calibration)
    return Evaluated(run, records, loaded, dataset, curves)


def evaluations_on(
    on: str, directories: Sequence[Path], device: torch.device, overrides: Sequence[str] = ()
) -> dict[Path, Callable[[], Evaluated]]:
    """What evaluates the best checkpoint of each run, or all of folds, on a list or split.

    See `data_on`. Of a list file all have the labels of one run: of that whose list it is, or
    beside whose lists it lies, or else of the last one.

    Raises:
        ConfigError: a run was trained on some of these images, or these are label maps.
        UserError: there is no checkpoint, or the data cannot be read or have other classes.
    """
    models, of_runs = [], []
    for directory in directories:
        if is_scored(directory):
            what = "label maps are scored on other images by segtrain score"
            raise ConfigError(f"{directory}: {what} ... --split {on}")
        models.append(loaded := load_model(directory, device=device))
        task_of(loaded.config.task).check_classes(str(directory))
        given = {"source": str(directory)}
        of_runs.append(set_after_training(loaded.config, overrides, _ROOT, **given).data)
    data = [data_on(own, on) for own in of_runs]
    if Path(on).is_file():
        chosen = _owner(Path(on).resolve(), of_runs)
        labels = _labels(data[chosen])
        if any(_labels(one) != labels for one in data):
            where = f"those of {directories[chosen]}, below {labels['labels_dir']}"
            say(f"labels that count for all: {where}")
        data = [one.model_copy(update=labels) for one in data]
    each = zip(directories, models, data, strict=True)
    return {one: _evaluation(on, one, *read, device, overrides) for one, *read in each}


def _owner(file: Path, of_runs: Sequence[DataConfig]) -> int:
    """Whose list `file` is: that of an evaluation, or beside lists of a run; else the last one."""

    def nearness(number: int) -> tuple[bool, bool, int]:
        data = of_runs[number]
        splits = (data.eval_split, data.train_split) if data.layout == "list" else ()
        lists = [(Path(os.path.expanduser(data.root)) / split).resolve() for split in splits]
        return file in lists[:1], file.parent in {path.parent for path in lists}, number

    return max(range(len(of_runs)), key=nearness)


def _labels(data: DataConfig) -> dict[str, str]:
    """The options of `data`, of layout list, that say what its labels are; with a full path."""
    folder = Path(os.path.expanduser(data.root), os.path.expanduser(data.labels_dir or ""))
    kept = {"label_format": data.label_format, "classes": data.classes}
    return {"labels_dir": str(folder.resolve()), **kept}


def _evaluation(
    on: str,
    directory: Path,
    loaded: LoadedModel,
    data: DataConfig,
    device: torch.device,
    overrides: Sequence[str],
) -> Callable[[], Evaluated]:
    """That of one run, as `evaluations_on`; data: those of `on`."""
    dataset = open_dataset(data, data.eval_split)
    if loaded.classes.names != dataset.classes.names:
        (difference,), _ = class_differences(loaded.classes, dataset.classes, "ids")
        raise DataError(f"{directory}: {difference}")
    images = list_split(data, data.eval_split).pairs
    seen: dict[str, list[str]] = {"train_split": [], "eval_split": []}
    try:
        for config in loaded.configs:
            own = set_after_training(config, overrides, _ROOT, source=str(directory)).data
            for key, names in seen.items():
                places = _places(list_split(own, getattr(own, key)).pairs)
                names += [
                    pair.name
                    for pair, place in zip(images, map(_place, images), strict=True)
                    if any(map(place.overlaps, places.get(place.mosaic, ())))
                ]
    except UserError as error:
        say(f"warning: {directory}: whether it was trained on images of {on} is not known: {error}")
    trained, chosen = ({*names} for names in seen.values())
    if trained:
        what = f"was trained on {len(trained)} of {len(images)} images ({first_of(trained, 3)})"
        raise ConfigError(f"--on {on}: {directory} {what}: leave them out, its score flatters")
    if chosen and any(config.eval.every_steps for config in loaded.configs):
        what = f"chose its best checkpoint by {len(chosen)} of {len(images)} images"
        say(f"warning: {directory} {what}, which flatters its score")

    def begin() -> Evaluated:
        say(f"evaluating {directory}, {loaded.about}, on {len(dataset)} images of {on}")
        return Evaluated(read_any(directory), evaluate(loaded, dataset, device), None, None)

    return begin


def data_on(data: DataConfig, on: str) -> DataConfig:
    """`data` with the evaluation split `on`; or a list file, of images and labels below data.root.

    Lists are read as those of data.layout list, whatever the layout is.

    ConfigError: the folder of the data has another list of this name.
    """
    changes: dict[str, str | None] = {"pack": None, "eval_split": on}
    if Path(on).is_file():
        below = Path(os.path.expanduser(data.root), on)
        if data.layout == "list" and below.is_file() and not below.samefile(on):
            raise ConfigError(f"{on}: may be the file here, or {below}: give the whole path")
        changes |= {"eval_split": str(Path(on).resolve()), "layout": "list"}
        changes |= {"labels_dir": data.labels_dir if data.layout == "list" else None}
    return data.model_copy(update=changes)


def read_any(directory: Path) -> Run:
    """As `read_run`; of folds and of label maps the config alone."""
    if (directory / EXPERIMENT).is_file():
        return Run(directory, load_config(directory / EXPERIMENT, imports=False), {}, {})
    return read_run(directory)


def evaluate(
    loaded: LoadedModel,
    dataset: SegDataset,
    device: torch.device,
    curves: CurveCounts | None = None,
) -> Records:
    """The scores of a model on a split, by this process alone; curves: of `evaluate_dataset`."""
    model = to_eval_precision(loaded.model, loaded.config, device)
    settings = InferenceSettings.from_config(loaded.config)
    predictor = for_scores(model, settings, device, loaded.classes.num_classes)
    outcome = evaluate_dataset(predictor, dataset, progress=True, curves=curves)
    return Records.of(outcome, dataset, settings, loaded.step)


def _places(pairs: Sequence[Pair]) -> dict[str, list[TileBox]]:
    """Where the pixels of images lie, by file."""
    places = defaultdict(list)
    for place in map(_place, pairs):
        places[place.mosaic].append(place)
    return places


def _place(pair: Pair) -> TileBox:
    """The window of an image in its file; all of it reaches over every other one."""
    file = os.path.realpath(pair.image)
    if pair.window is None:
        return TileBox(file, -math.inf, -math.inf, math.inf, math.inf)
    top, left, height, width = pair.window
    return TileBox(file, top, left, top + height, left + width)
