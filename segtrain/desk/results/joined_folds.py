"""Folds: one score of all images, each by the model that has not seen it."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import torch

from segtrain.checkpoint.trained import members_of
from segtrain.config import Config
from segtrain.desk.results.compare import CONFIDENCE, LEAST_GROUPS, score_interval
from segtrain.desk.results.evaluated import Evaluated, evaluated, read_any
from segtrain.desk.results.report import Joined
from segtrain.errors import CheckpointError
from segtrain.run.division import read_division, unit_of
from segtrain.score.records import Records
from segtrain.text import counted

_WINDOW = re.compile(r"_y\d+_x\d+$")  # of a raster, behind the name of its file


def evaluated_whole(
    directory: Path, device: torch.device, overrides: Sequence[str] = ()
) -> Evaluated:
    """As `evaluated` without pictures; of a directory of folds all images are joined."""
    if read_division(directory) is None:
        return evaluated(directory, device, overrides, with_pictures=False)
    _, joined = join_folds(directory, device, overrides, with_pictures=False)
    return Evaluated(read_any(directory), joined.records, None, None)


def join_folds(
    directory: Path,
    device: torch.device,
    overrides: Sequence[str] = (),
    *,
    with_pictures: bool = True,
) -> tuple[list[Evaluated], Joined]:
    """The runs of a directory of folds, and all their images together.

    Raises:
        CheckpointError: folds are not trained to their ends, or were evaluated on other images.
        UserError: as `evaluated`.
    """
    how = {"with_pictures": with_pictures}
    results = [evaluated(Path(run), device, overrides, **how) for run in members_of(directory)]
    division = read_division(directory)
    groups: dict[str, str] = {}  # of each name in the records
    for fold, result in zip(division.folds, results, strict=True):
        # The division names files, but the records of a raster name its windows.
        files_of = {
            name: name if name in fold.images else _WINDOW.sub("", name)
            for name in result.records.names
        }
        if set(files_of.values()) != fold.images.keys():
            raise CheckpointError(f"{directory / fold.run}: was evaluated on other images")
        groups |= {name: fold.images[file] for name, file in files_of.items()}
    what = f"{len(results)} folds by {division.by}"
    records = Records.joined([result.records for result in results], split=what, folds=what)
    interval = score_interval(records, [groups[name] for name in records.names])
    num_images = sum(len(fold.images) for fold in division.folds)
    unit = unit_of(division.by, [x for fold in division.folds for x in fold.images.values()])
    units = counted(len(set(groups.values())), unit, f"{unit}s")
    value, low, high = (f"{100 * x:.2f}" for x in interval)
    bounds = f"{low} to {high} ({CONFIDENCE:.0%}, over {units})"
    if math.isnan(interval.low):
        bounds = f"none over {units}: at least {LEAST_GROUPS} are needed"
    scores = [100 * result.records.scores.mean_iou for result in results]
    spread = f"mean {mean(scores):.2f}, standard deviation {stdev(scores):.2f}"
    words = [
        f"mIoU       {value} of all {num_images} images, each by the model that has not seen it",
        f"interval   {bounds}",
        f"folds      {', '.join(f'{score:.2f}' for score in scores)}: {spread}",
    ]
    config: Config = results[0].run.config
    if config.eval.every_steps and config.eval.every_steps < config.train.steps:
        words.append("note       each fold chose its best checkpoint by its score, which flatters")
    return results, Joined(directory.resolve().name, records, words, interval)
