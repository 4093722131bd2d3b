"""`segtrain folds`: a training for each part of the images, scored on the part it has not seen."""

import argparse
import hashlib
import json
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from segtrain import files
from segtrain.checkpoint.dataset_guard import DatasetGuard, Resumed
from segtrain.checkpoint.format import BEST, load, parse_experiment
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.commands.config import load_named, show_warnings
from segtrain.config import Config, load_config, override_config
from segtrain.config.loading import given_keys, yaml_value
from segtrain.data import open_dataset
from segtrain.data.check.checks import quick_check
from segtrain.data.read.cut_volumes import CutVolume, join_slices, read_cut_volumes
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.find import Pair, data_root
from segtrain.data.read.find_tiles import boxes_of
from segtrain.data.read.layouts import list_split
from segtrain.data.read.lists import list_pairs, list_text
from segtrain.data.read.protect import check_pictures
from segtrain.data.read.sequences import sequences_of, show_sequences, without_split
from segtrain.data.read.sources import groups_of, sources_of, stems_of
from segtrain.data.read.tiles import TileBox, overlapping, strips
from segtrain.data.read.volumes import nifti_library
from segtrain.desk.commands.programs import (
    check_new,
    check_same,
    in_turn,
    place_of,
    refuse_ranks,
    training_of,
    write_experiment,
)
from segtrain.desk.results.joined_folds import join_folds
from segtrain.desk.results.report import write_report
from segtrain.distributed.process_group import device_for
from segtrain.errors import EXIT_OK, ConfigError, DataError, ExecutionError
from segtrain.metrics import or_none
from segtrain.run.directory import CHECKPOINTS, LOCK, RunLock, config_differences
from segtrain.run.division import (
    EXPERIMENT,
    FOLDS,
    Division,
    Fold,
    read_division,
    unit_of,
    write_record,
)
from segtrain.score.volume_scores import VolumeTable, group_of_slices
from segtrain.task.tasks import task_of
from segtrain.text import counted, first_of, say

NUMBER = 5
# In a fold's run: scores of its volumes, of --save-predictions.
_VOLUMES = "by_volume.json"
# What a process that was killed before folds.json was there may leave.
_LEFT = re.compile(rf"{re.escape(LOCK)}|{re.escape(EXPERIMENT)}|fold_\d+_(train|eval)\.txt")


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code.

    args: config, number (k), by, group, all, output, resume, save_predictions, set, nproc, device.
    """
    refuse_ranks()
    if args.by and args.group:
        raise ConfigError("--by: no effect with --group")
    directory, config, division = _begin_or_resume(args)
    task_of(config.task).check_classes("folds")
    show_warnings(config)
    with RunLock(directory):
        if division is None:
            division = _divide(args, directory, config)
        else:
            _check_trained(directory, config, division)
        write_experiment(directory, config)
        # Last of what begins the folds: a directory that has it is resumed, any other is begun
        # anew.
        write_record(directory / FOLDS, division)
        if code := _train(args, directory, config, division):
            say(f"to go on: segtrain folds {shlex.quote(str(directory))} --resume")
            return code
        _check_trained(directory, config, division)  # labels may have changed meanwhile
        for line in _score(directory, config, division, device_for(args.device)):
            print(line)
    return EXIT_OK


def _begin_or_resume(args: argparse.Namespace) -> tuple[Path, Config, Division | None]:
    """The directory, the config, and the division if there is one to go on with.

    Raises:
        ConfigError: the options do not fit, or are not those that the folds were started with.
        CheckpointError: folds.json is damaged.
    """
    directory = Path(args.config)
    division = read_division(directory) if args.resume else None
    if division is not None:
        config = load_config(directory / EXPERIMENT, args.set)
    else:
        config = _scored_once(load_named(args), args.set)
        directory = place_of(args, "folds")
        # CONFIG may be the directory of the folds, or the config that they were started with.
        division = read_division(directory) if args.resume else None
    # Now, rather than after all trainings.
    if args.save_predictions:
        check_pictures("--save-predictions", args.save_predictions, (), config.data)
        if _volumes(config):
            nifti_library()
    if division is not None:
        _check_same(args, directory, config, division)
        return directory, config, division
    if args.resume:
        say(f"{directory}: nothing to resume; new folds start")
    if config.data.pack is not None:
        raise ConfigError("data.pack: holds the splits, not folds of them; --set data.pack=null")
    if config.train.init_from is not None:
        say(
            "warning: train.init_from: if these weights have been trained on images of the folds, "
            "the scores are too good"
        )
    check_new(directory, config, _LEFT)
    return directory, config, None


def _scored_once(config: Config, given: Sequence[str]) -> Config:
    """`config`, evaluated at the last step only, unless the command line asks for more.

    The best of several evaluations on a fold would be chosen by the images that it is scored on.
    """
    asked = "eval.every_steps" in given_keys(given)
    if config.eval.every_steps is None or config.eval.every_steps >= config.train.steps:
        return config
    if asked:
        say("warning: eval.every_steps: the best of several evaluations flatters a fold's score")
        return config
    say("eval.every_steps: null for folds, so that no score chooses its own checkpoint")
    return override_config(config, ["eval.every_steps=null"], source="segtrain folds")


def _check_same(
    args: argparse.Namespace, directory: Path, config: Config, division: Division
) -> None:
    """Refuses options that are not those of `division`, or would change its weights."""
    there = {"-k": len(division.folds), "--by": division.by, "--all": division.all}
    # None: not given, so not compared; `--resume` alone goes on with what there is.
    now = {"-k": args.number, "--by": args.by, "--all": args.all or None}
    there["--group"], now["--group"] = division.group, args.group and args.group.pattern
    differences = [
        f"{option}: {there[option]} there, {value} now"
        for option, value in now.items()
        if value not in (None, there[option])
    ]
    differences += config_differences(load_config(directory / EXPERIMENT), config)
    check_same("folds", directory, differences)


def _check_trained(directory: Path, config: Config, division: Division) -> None:
    """Refuses folds that were trained by another config or on other data than those to come.

    Raises:
        ConfigError: one was, so no score is of all of them.
        CheckpointError: a checkpoint is damaged.
    """
    for fold in division.folds:
        folder = directory / fold.run / CHECKPOINTS
        newest = CheckpointManager(folder).newest
        path = folder / BEST if fold.finished else newest()[0]
        if path is None:
            continue
        resumed = Resumed(load(path), path)
        now, sets = _opened(directory, fold.run, config)
        differences = config_differences(parse_experiment(*resumed)[0], now)
        # With `accept_changes` the guard tells what has changed; `check_same` below refuses it.
        guard = DatasetGuard(sets, now.data.root, resumed, accept_changes=True)
        with closing(guard):
            guard.start(math.inf)
            lines = guard.pop_log_lines()
        differences += [x.removeprefix("changed").strip() for x in lines if x.startswith("changed")]
        check_same("folds", directory, [f"{fold.run}: {line}" for line in differences])


def _check_labels(directory: Path, config: Config, folds: Sequence[Fold]) -> None:
    """Refuses a fold that could not train, before the others have; DataError."""
    for fold in folds:
        try:
            quick_check(*_opened(directory, fold.run, config)[1])
        except DataError as error:
            repair = "divide otherwise (-k, --by), or leave out images whose labels are all ignored"
            raise DataError(f"{fold.run}: {error}\nno fold has trained: {repair}") from None


def _opened(
    directory: Path, run: str, config: Config
) -> tuple[Config, tuple[SegDataset, SegDataset]]:
    """The config of a fold's run, and its splits."""
    options = _options(directory, run, config.data.labels_dir)
    config = override_config(config, options, source=str(directory / EXPERIMENT))
    train, evaluation = config.data.train_split, config.data.eval_split
    return config, (open_dataset(config.data, train), open_dataset(config.data, evaluation))


def _divide(args: argparse.Namespace, directory: Path, config: Config) -> Division:
    """Divides the images, and writes the two lists of each fold.

    Raises:
        ConfigError: there are fewer groups than folds, or a list cannot name a file.
        DataError: a fold cannot train.
    """
    data, number = config.data, args.number or NUMBER
    splits = [data.train_split, data.eval_split] if args.all else [data.train_split]
    # An image may be in both splits; it counts once.
    pairs = list({p.image: p for split in splits for p in list_split(data, split).pairs}.values())
    root = data_root(data)
    labels_root = root / os.path.expanduser(data.labels_dir or "")
    boxes = boxes_of(pairs)
    # Pairs of tiles that share pixels: no fold may train on one and be scored on the other.
    shared = list(overlapping(boxes))
    in_sequences = not shared and show_sequences([without_split(p.name) for p in pairs])
    by = "group" if args.group else args.by or ("sequence" if in_sequences else "image")
    if by == "image" and in_sequences:
        say("warning: --by image: the names show sequences, and neighbours will be in two folds")
    groups = _groups(by, args.group, pairs, root)
    # Whole strips of a picture go into a fold, so that few tiles overlap those of other folds.
    if shared and by == "image":
        groups = _with_strips(groups, boxes, number)
    fold_of, unit = fold_of_each(groups, number), unit_of(by, groups)
    new_folds = []
    for i in range(number):
        own = [j for j, at in enumerate(fold_of) if at == i]
        # What these images show, tiles of other folds show, too.
        beside = {k for two in shared if i in [fold_of[j] for j in two] for k in two} - {*own}
        others = [j for j, at in enumerate(fold_of) if at != i and j not in beside]
        train, evaluation = _lists(directory, f"fold_{i}")
        _write_list(train, [pairs[j] for j in others], root, labels_root)
        listed = _write_list(evaluation, [pairs[j] for j in own], root, labels_root)
        images = {name: groups[j] for name, j in zip(listed, own, strict=True)}
        new_folds.append(Fold(run=f"fold_{i}", images=images))
        in_groups = counted(len(set(images.values())), unit, f"{unit}s")
        units = "" if unit == "image" else f", {in_groups}"
        left = f"; {counted(len(beside), 'tile', 'tiles')} that overlap them left out of training"
        say(f"fold_{i}: {counted(len(own), 'image', 'images')}{units}{left if beside else ''}")
    if len({name for fold in new_folds for name in fold.images}) < len(pairs):
        raise ConfigError("--all: both splits have images whose names differ in the suffix only")
    _check_labels(directory, config, new_folds)
    group = args.group and args.group.pattern
    return Division(by=by, group=group, all=args.all, folds=new_folds)


def _groups(
    by: str, pattern: re.Pattern[str] | None, pairs: Sequence[Pair], root: Path
) -> list[str]:
    """The group of each image, which stays in one fold."""
    if pattern is not None:
        return groups_of(pattern, [os.path.relpath(pair.image, root) for pair in pairs])
    if by == "sequence":
        return stems_of(sequences_of([without_split(pair.name) for pair in pairs]))
    # The same folds wherever the data lie.
    paths = [os.path.splitext(os.path.relpath(pair.image, root)) for pair in pairs]
    stems, suffixes = zip(*paths, strict=True)
    sources = stems_of(sources_of(stems))  # with their copies, and other scans of a patient
    return [name + suffix for name, suffix in zip(sources, suffixes, strict=True)]


def _with_strips(groups: Sequence[str], boxes: Sequence[TileBox | None], number: int) -> list[str]:
    """The groups; tiles are of a strip of their picture, or of all of it if it fits in a fold."""
    sizes = Counter(box.mosaic for box in boxes if box is not None)
    divided = list(groups)
    for i, (box, strip) in enumerate(zip(boxes, strips(boxes, number), strict=True)):
        if box is not None:
            is_small = number * sizes[box.mosaic] <= len(boxes)
            divided[i] = box.mosaic if is_small else f"{box.mosaic} {strip}"
    return divided


def fold_of_each(groups: Sequence[str], number: int) -> list[int]:
    """The fold, from 0, of each image; images of a group stay together.

    Large groups go first, each into the smallest fold, those of equal size in the order of their
    hashes. So folds are about equally large, and the order of the images does not matter.

    Of seven images in three sequences, the four of `park` fill fold 0, all others fold 1.

    >>> fold_of_each(["lake", "park", "park", "park", "park", "road", "road"], 2)
    [1, 0, 0, 0, 0, 1, 1]

    Raises:
        ConfigError: there are fewer groups than folds.
    """
    sizes = Counter(groups)
    if number > len(sizes):
        what = f"{counted(len(sizes), 'group', 'groups')} of images for {number} folds"
        raise ConfigError(
            f"-k {number}: {what} ({first_of(sizes, 3)}); at most -k {len(sizes)}, or, if "
            "neighbours are not alike, --by image"
        )
    filled, place = [0] * number, {}
    for group in sorted(sizes, key=lambda g: (-sizes[g], hashlib.sha256(g.encode()).digest())):
        place[group] = filled.index(min(filled))
        filled[place[group]] += sizes[group]
    return [place[group] for group in groups]


def _lists(directory: Path, run: str) -> tuple[Path, Path]:
    """The files that list what a fold's run trains on and is scored on."""
    here = directory.absolute()
    return here / f"{run}_train.txt", here / f"{run}_eval.txt"


def _write_list(path: Path, pairs: Sequence[Pair], root: Path, labels_root: Path) -> list[str]:
    """Writes `pairs` as a list, and returns the names they have in it.

    ConfigError: a list cannot name a file.
    """
    try:
        text = list_text(pairs, root, labels_root)
    except ValueError as error:
        raise ConfigError(
            f"data.root: folds list files below it, or labels below data.labels_dir: {error}"
        ) from None
    with files.os_errors_as(ExecutionError, path, "cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(path, text)
    # Read it back as the training will: not every name can stand in a list.
    listing = list_pairs(path, root, labels_root)
    if listing.problems:
        raise ConfigError(f"folds list their images, and {listing.problems[0]}")
    same = [(p.images, p.label) for p in pairs] == [(p.images, p.label) for p in listing.pairs]
    assert same, f"{path} is read otherwise than it was written"
    return [pair.name for pair in listing.pairs]


def _options(directory: Path, run: str, labels_dir: str | None) -> list[str]:
    """The --set of a fold's run."""
    train, evaluation = _lists(directory, run)
    options = {
        "layout": "list",
        "images_dir": "images",  # the default: it has no effect here
        "labels_dir": labels_dir,
        "train_split": str(train),
        "eval_split": str(evaluation),
        "train_exclude": [],
    }
    return [f"data.{key}={yaml_value(value)}" for key, value in options.items()]


def _train(args: argparse.Namespace, directory: Path, config: Config, division: Division) -> int:
    """Trains the folds that are not finished, one after another; the first exit code that is not 0.

    With --save-predictions all of them then predict their own images, and score their volumes.
    """
    volumes = _volumes(config)
    with in_turn(args, config) as run:
        for fold in division.folds:
            if fold.finished:
                continue
            options = _options(directory, fold.run, config.data.labels_dir)
            if code := run(fold.run, training_of(directory, fold.run, options)):
                return code
            # After each fold: a command that is resumed does not train it again.
            fold.finished = True
            write_record(directory / FOLDS, division)
        for fold in division.folds if args.save_predictions else ():
            words = ["eval", directory / fold.run, "--save-predictions", args.save_predictions]
            if volumes:  # by folder, which is that of a volume; `_volume_table` tells the groups
                words += ["--group", ".*/|^", "--json", directory / fold.run / _VOLUMES]
            if code := run(fold.run, list(map(str, words))):
                return code
    if volumes and args.save_predictions:
        with files.os_errors_as(ExecutionError, args.save_predictions, "cannot be written"):
            for line in join_slices(volumes, args.save_predictions):
                say(line)
    return EXIT_OK


def _volumes(config: Config) -> dict[str, CutVolume]:
    return read_cut_volumes(data_root(config.data))


def _volume_table(directory: Path, config: Config, division: Division) -> VolumeTable:
    """The scores of volumes that --save-predictions has left, with the groups of the division."""
    tables, volumes = [], _volumes(config)
    for fold in division.folds:
        if (path := directory / fold.run / _VOLUMES).is_file():
            part = VolumeTable.of(json.loads(path.read_text()).get("by_volume", {}))
            for i, row in enumerate(part.rows):
                own = {fold.images[x] for x in volumes[row.volume].slices if x in fold.images}
                own = {row.volume} if division.by == "image" else own
                part.rows[i] = row._replace(group=group_of_slices(row.volume, own))
            tables.append(part)
    return VolumeTable.joined(tables)


def _score(directory: Path, config: Config, division: Division, device: torch.device) -> list[str]:
    """Joins the scores of all folds, writes what is known about them, and says it."""
    results, joined = join_folds(directory, device)
    classes = joined.records.classes
    division.scores = {
        "interval": [or_none(bound) for bound in joined.interval[1:]],
        "folds": {result.run.name: result.records.scores.to_dict(classes) for result in results},
        **joined.records.scores.to_dict(classes),
    }
    table = _volume_table(directory, config, division)
    division.scores |= {"by_volume": table.to_dict()} if table else {}
    write_record(directory / FOLDS, division)
    lines = [*joined.words, *(table.lines() if table else [])]
    if config.log.charts:
        with files.os_errors_as(ExecutionError, directory, "cannot be written"):
            lines.append(f"report     {write_report(directory, results, device, joined=joined)}")
    predict = f"segtrain predict {shlex.quote(str(directory))} PHOTOS --output DIR"
    return [*lines, f"ensemble   {predict}"]
