"""Runs with the scores of their best checkpoints, and label maps of other programs with theirs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from segtrain.checkpoint.format import load, parse_experiment
from segtrain.checkpoint.trained import LoadedModel, load_model, resolve
from segtrain.config import load_config
from segtrain.data import open_dataset
from segtrain.data.read.dataset import SegDataset
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
from segtrain.text import say

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
    predictor = for_scores(model, settings, device, dataset.classes.num_classes)
    outcome = evaluate_dataset(predictor, dataset, progress=True, curves=curves)
    return Records.of(outcome, dataset, settings, loaded.step)
