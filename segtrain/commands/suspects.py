"""`segtrain suspects`: training masks that are probably wrong."""

import argparse
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch

from segtrain.checkpoint.dataset_guard import eval_differences
from segtrain.checkpoint.format import LAST, Checkpoint, load, parse_experiment
from segtrain.checkpoint.trained import LoadedModel, load_model
from segtrain.config import Config
from segtrain.config.loading import config_to_yaml, yaml_value
from segtrain.data import open_dataset
from segtrain.data.read.classes import class_differences
from segtrain.data.read.dataset import SegDataset
from segtrain.distributed.process_group import device_for
from segtrain.errors import EXIT_OK, CheckpointError, ConfigError, DataError, ExecutionError
from segtrain.evaluation.settings import set_after_training
from segtrain.files import check_output, os_errors_as, write_output
from segtrain.results.cards import predict_chosen, webp
from segtrain.results.page import render
from segtrain.results.suspects import (
    ENOUGH_CROPS,
    OUTLIER,
    SURE,
    Ranking,
    Suspect,
    claims,
    disputed,
    rank,
)
from segtrain.run.directory import CHECKPOINTS, SUSPECTS, named_run
from segtrain.text import printable
from segtrain.training.sample_losses import LOSS, PIXELS, UNITS, names_digest, parse_sums

_LISTED = 20  # in the terminal
_OUTLINE = ((0, 0, 0), 5), ((255, 255, 255), 2)  # colour and width, on a picture of 640 px


class SuspectCard(NamedTuple):
    """A suspect with its numbers and what the model says, and views with the disputed region."""

    suspect: Suspect
    name: str
    numbers: str
    words: str
    pictures: list[bytes]

    @property
    def line(self) -> str:
        """The numbers and words in one line."""
        return f"{self.numbers}: {printable(self.words)}"


class Counted(NamedTuple):
    """The steps that counted, and the crops of an image in them, on average; `warning` or none."""

    first_step: int
    last_step: int
    crops: float
    warning: str


def main(args: argparse.Namespace) -> int:
    """Prints the ranking, writes the page and the list; returns the exit code.

    args: run, number, output (a file; default: suspects.html of the run), exclude (a file), set,
        device.

    Raises:
        UserError: no run, no losses in it, other data now, or a file that cannot be written.
    """
    args.run = named_run(args.run)
    output = args.output or args.run / SUSPECTS
    # A config that is there may have been edited.
    for option, file, *begins in (
        ("--output", output, "<!DOCTYPE html>"),
        ("--exclude", args.exclude),
    ):
        if file is not None:
            with os_errors_as(ConfigError, f"{option} {file}", "cannot be written"):
                check_output(file, *begins)
    checkpoint, config, sums = _losses(args.run)
    config = set_after_training(config, args.set, ("data.root",), source=str(args.run))
    device = device_for(args.device)
    loaded = load_model(args.run, device=device)
    dataset = open_dataset(config.data, config.data.train_split)
    if loaded.classes.names != dataset.classes.names:
        (difference,), _ = class_differences(loaded.classes, dataset.classes, "ids")
        raise DataError(f"{difference}; bring the class file of the training back")
    if names_digest(dataset.names) != checkpoint.sample_losses["names"] or sums.shape[1] != len(
        dataset
    ):
        raise DataError(
            f"{args.run}: the losses are of other images than split {config.data.train_split} has "
            "now; bring these back, or train again"
        )
    ranking = rank(sums[..., LOSS] / UNITS, sums[..., PIXELS])
    if not ranking.suspects:
        raise DataError(
            f"{args.run}: too little was measured to compare images; every class needs 8 images "
            "that show it, and training some epochs"
        )
    counted = _counted(ranking, checkpoint.step, config, len(dataset))
    with closing(eval_differences(loaded, config.data, dataset)) as differences:
        lines = next(differences, [])
        findings = _findings(ranking.suspects[: args.number], loaded, dataset, device)
        lines += next(differences, [])
    for line in lines:
        print(line)
    for place, one in enumerate(findings[:_LISTED], 1):
        mark = "*" if one.suspect.stands_out else " "
        print(f"{place:3} {mark} {printable(one.name, 80)}  {one.line}")
    _summarize(ranking, len(findings), counted.warning)
    page = _page(args.run, findings, ranking, loaded.step, counted, dataset)
    with os_errors_as(ExecutionError, output, "the page cannot be written"):
        write_output(output, page)
    print(printable(output))
    if args.exclude is not None:
        excluded = [one for one in findings if one.suspect.stands_out]
        if excluded:
            with os_errors_as(ExecutionError, args.exclude, "the list cannot be written"):
                write_output(args.exclude, _without(excluded, config, args.exclude))
        what = f"the config without the masks that stand out ({len(excluded)})"
        print(f"{printable(args.exclude)}: {what if excluded else 'not written: none stands out'}")
    return EXIT_OK


def _losses(run: Path) -> tuple[Checkpoint, Config, np.ndarray]:
    """The newest checkpoint of a run, its config, and the sums in it, (P, N, K, 2) int64."""
    path = run / CHECKPOINTS / LAST
    if not path.exists():
        raise CheckpointError(
            f"{path}: missing, and it alone holds the losses of the training images (segtrain runs "
            "--clear removes it); put it back, or train again"
        )
    checkpoint = load(path)
    config, classes = parse_experiment(checkpoint, path)
    if config.is_multilabel:
        raise ConfigError(f"{run}: suspects needs classes of which a pixel has one, not several")
    if checkpoint.sample_losses is None:
        raise CheckpointError(
            f"{path}: holds no losses of the training images: they are kept with "
            "log.sample_losses, but not with train.compile, another train.parallel or MixUp, and "
            "train.log says why; train again"
        )
    try:
        sums = parse_sums(checkpoint.sample_losses)
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
    if sums.shape[2] not in (1, classes.num_classes):
        raise CheckpointError(f"{path}: damaged: sample_losses: sums of {sums.shape[2]} classes")
    return checkpoint, config, sums.numpy()


def _findings(
    suspects: Sequence[Suspect], loaded: LoadedModel, dataset: SegDataset, device: torch.device
) -> list[SuspectCard]:
    """What the best checkpoint says about the suspects, in their order."""
    found: dict[int, SuspectCard] = {}
    classes, suspect_at = dataset.classes, {one.index: one for one in suspects}
    for one in predict_chosen(loaded, dataset, suspect_at, device):
        suspect = suspect_at[one.index]
        maps = one.label, one.pred, one.probability
        region = disputed(*maps)
        pictures = [webp(_outlined(view, region)) for view in one.views(classes.palette)]
        said = claims(*maps, classes.names, suspect.class_id)
        words = "; ".join(claim.words for claim in said)
        numbers = _numbers(suspect, classes.names)
        found[one.index] = SuspectCard(suspect, dataset.name(one.index), numbers, words, pictures)
    return [found[one.index] for one in suspects]


def _outlined(picture: np.ndarray, region: np.ndarray) -> np.ndarray:
    """`picture` (h, w, 3) at 640 px, with the outline of `region` (h, w) bool."""
    scale = 640 / max(region.shape)
    size = [max(1, round(side * scale)) for side in region.shape[::-1]]
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_NEAREST
    drawn = cv2.resize(picture, size, interpolation=how)
    mask = cv2.resize(region.astype(np.uint8), size, interpolation=cv2.INTER_NEAREST)
    lines, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    for color, width in _OUTLINE:
        cv2.drawContours(drawn, lines, -1, color, width)
    return drawn


def _numbers(suspect: Suspect, names: Sequence[str]) -> str:
    """The score of an image, and the loss of its worst class."""
    name = "all classes" if suspect.class_id is None else printable(names[suspect.class_id], 40)
    loss = f"loss of {name} {suspect.loss:.2f}, usually {suspect.usual:.2f}"
    return f"score {suspect.score:.1f}, {loss}"


def _counted(ranking: Ranking, step: int, config: Config, num_images: int) -> Counted:
    """What counted of a training that has come to `step`."""
    steps, batch = config.train.steps, config.train.batch_size
    first, last = ranking.first * steps, min(ranking.last * steps, step)
    crops, warning = max(0.0, last - first) * batch / num_images, ""
    if crops < ENOUGH_CROPS:
        warning = (
            f"only {crops:.1f} crops of each image counted; with fewer than {ENOUGH_CROPS} many "
            "masks that stand out are right: look at each, or train longer (train.steps: "
            f"{math.ceil(step * ENOUGH_CROPS / max(crops, 0.1))})"
        )
    return Counted(round(first) + 1, round(last), crops, warning)


def _summarize(ranking: Ranking, shown: int, warning: str) -> None:
    outliers = [place for place, one in enumerate(ranking.suspects) if one.stands_out]
    print(
        f"{len(outliers)} of {len(ranking.suspects)} images stand out (*): they score "
        f"{OUTLIER:g} or more; the others are next in rank"
    )
    if warning:
        print(f"warning: {warning}")
    if left := sum(place >= shown for place in outliers):
        print(f"note: {left} of them not on the page; use a larger --number")
    if ranking.unseen:
        print(f"note: {ranking.unseen} images were not seen often enough to judge them")


def _page(
    run: Path,
    findings: Sequence[SuspectCard],
    ranking: Ranking,
    step: int,
    counted: Counted,
    dataset: SegDataset,
) -> str:
    return render(
        "suspects.html",
        title=run.resolve().name,
        run=str(run),
        cards=findings,
        num_images=len(dataset),
        num_outliers=sum(one.stands_out for one in ranking.suspects),
        outlier=OUTLIER,
        sure=SURE,
        unseen=ranking.unseen,
        counted=counted,
        step=step,
        split=dataset.split,
        classes=dataset.classes.names,
        colors=dataset.classes.palette,
    )


def _without(findings: Sequence[SuspectCard], config: Config, file: Path) -> str:
    """The config in YAML, without these images: a line each, the worst first."""
    emptied = config.data.model_copy(update={"train_exclude": ()})
    lines = [
        "  # The masks that stand out. Delete the lines of those that are right; then:",
        f"  # segtrain train {printable(file)}",
        "  train_exclude:",
        *(f"  - {yaml_value(entry)}" for entry in config.data.train_exclude),
        *(f"  - {yaml_value(one.name)}  # {one.line}" for one in findings),
    ]
    text = config_to_yaml(config.model_copy(update={"data": emptied}))
    return text.replace("  train_exclude: []", "\n".join(lines), 1)
