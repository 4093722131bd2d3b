"""`segtrain suspects`: masks that are probably wrong."""

import argparse
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch

from segtrain.checkpoint.dataset_guard import eval_differences
from segtrain.checkpoint.trained import OF_IMAGES, LoadedModel, load_model, resolve
from segtrain.commands.config import find_config
from segtrain.config import Config, load_config
from segtrain.config.loading import config_to_yaml, yaml_value
from segtrain.data import open_dataset
from segtrain.data.read.classes import ClassFile, class_differences
from segtrain.data.read.dataset import SegDataset
from segtrain.data.sample.loader import num_loader_workers
from segtrain.desk.results.cards import Predicted, predict_chosen, split_predictor, webp
from segtrain.desk.results.on_list import data_on
from segtrain.desk.results.page import render
from segtrain.desk.results.suspects import (
    BY_HEART,
    LEAST_IMAGES,
    OUTLIER,
    SURE,
    Ranking,
    Suspect,
    claims,
    disputed,
    measure,
    rank,
)
from segtrain.distributed.process_group import device_for
from segtrain.errors import EXIT_OK, ConfigError, DataError, ExecutionError
from segtrain.files import check_output, os_errors_as, write_output
from segtrain.inference.predictor import Predictor
from segtrain.inference.settings import set_after_training
from segtrain.run.directory import SUSPECTS, named_run, run_of
from segtrain.task.tasks import task_of
from segtrain.text import printable, say

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


def main(args: argparse.Namespace) -> int:
    """Prints the ranking, writes the page and the list; returns the exit code.

    args: run, number, output (a file; default: suspects.html of the run), exclude (a file), data
        (an experiment or run with other images; None: those of the run), split, set, device.

    Raises:
        UserError: no run, no checkpoint or other classes, or a file that cannot be written.
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
    device = device_for(args.device)
    loaded = load_model(args.run, device=device)
    task_of(loaded.config.task).check_classes(str(args.run))
    if not task_of(loaded.config.task).decoding(None).takes_highest:
        what = "suspects needs classes of which a pixel has one, not several"
        raise ConfigError(f"{args.run}: {what}")
    config = set_after_training(loaded.config, args.set, ("data.root",), source=str(args.run))
    if args.data is not None:
        config = _with_images_of(args, config)
    sets, (beside, lines) = _sets(args, config, loaded), _beside(args, loaded.config)
    of_training = args.data is None and args.split is None
    # Names and sizes are compared at once. The labels are hashed beside the pass over the images.
    differing = eval_differences(loaded, config.data, sets[0]) if of_training else (x for x in ())
    with closing(differing) as differences:
        lines += next(differences, [])
        ranking = _ranked(sets, beside, split_predictor(loaded, device), config)
        findings = _findings(ranking.suspects[: args.number], loaded, sets, device)
        lines += next(differences, [])
    for line in lines:
        print(line)
    for place, card in enumerate(findings[:_LISTED], 1):
        mark = "*" if card.suspect.stands_out else " "
        print(f"{place:3} {mark} {printable(card.name, 80)}  {card.line}")
    _summarize(ranking, len(findings))
    source = f"{resolve(args.run).name}, {loaded.about}"
    print(f"measured by one pass of {source}; {BY_HEART}")
    page = _page(args.run, findings, ranking, source, sets)
    with os_errors_as(ExecutionError, output, "the page cannot be written"):
        write_output(output, page)
    print(printable(output))
    if args.exclude is not None:
        excluded = [card for card in findings if card.suspect.stands_out]
        if excluded:
            with os_errors_as(ExecutionError, args.exclude, "the list cannot be written"):
                write_output(args.exclude, _without(excluded, config, args.exclude))
        what = f"the config without the masks that stand out ({len(excluded)})"
        print(f"{printable(args.exclude)}: {what if excluded else 'not written: none stands out'}")
    return EXIT_OK


def _with_images_of(args: argparse.Namespace, config: Config) -> Config:
    """`config` with the images of --data, which its model takes as those of its own training.

    ConfigError: --exclude would write a config that nobody has made.
    """
    if args.exclude is not None or args.set:
        option = "--set" if args.set else "--exclude"
        raise ConfigError(f"{option}: is about the images of the run; not with --data")
    named = find_config(args.data)
    if named.note:
        say(named.note)
    other = load_config(named.path, imports=run_of(named.path) is None)
    of_model = {key: getattr(config.data, key) for key in OF_IMAGES}
    return config.model_copy(update={"data": other.data.model_copy(update=of_model)})


def _sets(args: argparse.Namespace, config: Config, loaded: LoadedModel) -> list[SegDataset]:
    """The images to judge: of --split; of --data both splits; else those of the training.

    DataError: they have other classes.
    """
    data = config.data if args.split is None else data_on(config.data, args.split)
    splits = [data.train_split, data.eval_split] if args.data is not None else [data.train_split]
    splits = splits if args.split is None else [data.eval_split]
    sets = [open_dataset(data, split) for split in dict.fromkeys(splits)]
    if loaded.classes.names != sets[0].classes.names:
        (difference,), _ = class_differences(loaded.classes, sets[0].classes, "ids")
        raise DataError(f"{difference}; bring the class file of the training back")
    return sets


def _beside(args: argparse.Namespace, config: Config) -> tuple[list[SegDataset], list[str]]:
    """The run's own images where others are judged, most of which may be wrong; and a note."""
    if args.data is None:
        return [], []
    data = config.data
    try:
        splits = dict.fromkeys((data.train_split, data.eval_split))
        return [open_dataset(data, split) for split in splits], []
    except DataError as error:
        why = str(error).partition("\n")[0]
        return [], [f"warning: judged beside each other alone, not beside images of the run: {why}"]


def _ranked(
    sets: Sequence[SegDataset],
    beside: Sequence[SegDataset],
    predictor: Predictor,
    config: Config,
) -> Ranking:
    """The images of `sets` in one row, by their losses among all; DataError: too few images."""
    num_threads = max(1, num_loader_workers(config.data))
    every = [measure(predictor, one, num_threads=num_threads) for one in (*sets, *beside)]
    losses, pixels = (np.concatenate(parts) for parts in zip(*every, strict=True))
    number = sum(map(len, sets))
    suspects = [x for x in rank(losses, pixels).suspects if x.index < number]
    if not suspects:
        what = f"too few images to compare: no class has {LEAST_IMAGES} that show it"
        raise DataError(f"split {sets[0].split}: {what}")
    return Ranking(suspects, number - len(suspects))


def _findings(
    suspects: Sequence[Suspect],
    loaded: LoadedModel,
    sets: Sequence[SegDataset],
    device: torch.device,
) -> list[SuspectCard]:
    """What the model says about the suspects, in their order; their indices go on over `sets`."""
    cards: dict[int, SuspectCard] = {}
    first = 0
    for dataset in sets:
        chosen = {x.index - first: x for x in suspects if 0 <= x.index - first < len(dataset)}
        for image in predict_chosen(loaded, dataset, chosen, device):
            suspect = chosen[image.index]
            name = dataset.name(image.index)
            cards[suspect.index] = _card(suspect, name, image, dataset.classes)
        first += len(dataset)
    return [cards[suspect.index] for suspect in suspects]


def _card(suspect: Suspect, name: str, image: Predicted, classes: ClassFile) -> SuspectCard:
    maps = image.label, image.pred, image.probability
    region = disputed(*maps)
    pictures = [webp(_outlined(view, region)) for view in image.views(classes.palette)]
    said = claims(*maps, classes.names, suspect.class_id)
    words = "; ".join(claim.words for claim in said)
    return SuspectCard(suspect, name, _numbers(suspect, classes.names), words, pictures)


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
    name = printable(names[suspect.class_id], 40)
    loss = f"loss of {name} {suspect.loss:.2f}, usually {suspect.usual:.2f}"
    return f"score {suspect.score:.1f}, {loss}"


def _summarize(ranking: Ranking, shown: int) -> None:
    outliers = [place for place, suspect in enumerate(ranking.suspects) if suspect.stands_out]
    print(
        f"{len(outliers)} of {len(ranking.suspects)} images stand out (*): they score "
        f"{OUTLIER:g} or more; the others are next in rank"
    )
    if left := sum(place >= shown for place in outliers):
        print(f"note: {left} of them not on the page; use a larger --number")
    if ranking.unseen:
        print(f"note: {ranking.unseen} images show too little of every class to be judged")


def _page(
    run: Path,
    findings: Sequence[SuspectCard],
    ranking: Ranking,
    source: str,
    sets: Sequence[SegDataset],
) -> str:
    classes = sets[0].classes
    return render(
        "suspects.html",
        title=run.resolve().name,
        run=str(run),
        cards=findings,
        num_images=sum(map(len, sets)),
        num_outliers=sum(suspect.stands_out for suspect in ranking.suspects),
        outlier=OUTLIER,
        sure=SURE,
        unseen=ranking.unseen,
        source=source,
        by_heart=BY_HEART,
        split=" and ".join(dataset.split for dataset in sets),
        classes=classes.names,
        colors=classes.palette,
    )


def _without(findings: Sequence[SuspectCard], config: Config, file: Path) -> str:
    """The config in YAML, without these images: a line each, the worst first."""
    # Emptied, so that the YAML has one line to replace by lines with comments.
    emptied = config.data.model_copy(update={"train_exclude": ()})
    lines = [
        "  # The masks that stand out. Delete the lines of those that are right; then:",
        f"  # segtrain train {shlex.quote(printable(file))}",
        "  train_exclude:",
        *(f"  - {yaml_value(entry)}" for entry in config.data.train_exclude),
        *(f"  - {yaml_value(card.name)}  # {card.line}" for card in findings),
    ]
    text = config_to_yaml(config.model_copy(update={"data": emptied}))
    return text.replace("  train_exclude: []", "\n".join(lines), 1)
