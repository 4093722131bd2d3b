"""Runs on one list of images, whatever data each of them has: `compare --on`."""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from segtrain.checkpoint.trained import LoadedModel, load_model, rows_by_name
from segtrain.config import DataConfig
from segtrain.data import open_dataset
from segtrain.data.read.classes import class_differences
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.find import Pair
from segtrain.data.read.layouts import list_split
from segtrain.data.read.tiles import TileBox
from segtrain.desk.results.evaluated import Evaluated, evaluate, read_any
from segtrain.errors import ConfigError, DataError, UserError
from segtrain.files.manifest import sha256_of
from segtrain.inference.settings import set_after_training
from segtrain.run.division import is_scored
from segtrain.task.tasks import task_of
from segtrain.text import first_of, say
from segtrain.types import SegLogits

_ROOT = ("data.root",)
# The logit of a class that a model does not have; finite, as scores are interpolated.
_NEVER = -1e4


def evaluations_on(
    on: str, directories: Sequence[Path], device: torch.device, overrides: Sequence[str] = ()
) -> dict[Path, Callable[[], Evaluated]]:
    """What evaluates the best checkpoint of each run, or all of folds, on a list or split.

    See `data_on`. Of a list file all have the labels of one run: of that whose list it is, or
    beside whose lists it lies, or else of the last one. They have its images too where their own
    data lack some. Classes are compared by name.

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
        for number, one in enumerate(data):
            if one.root != data[chosen].root and not _has_all(one):
                said = f"{directories[number]}: {on} names images that {one.root} does not have"
                say(f"{said}; all are read below {data[chosen].root}")
                data[number] = one.model_copy(update={"root": data[chosen].root})
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


def _has_all(data: DataConfig) -> bool:
    try:
        return bool(list_split(data, data.eval_split).pairs)
    except UserError:
        return False


def _predict_classes_of(dataset: SegDataset, loaded: LoadedModel, directory: Path) -> None:
    """Lets a model give logits of the classes of `dataset`, by name; those it lacks never.

    DataError: it has classes that `dataset` lacks, whose pixels would be anything.
    """
    there, here = loaded.classes.names, dataset.classes.names
    rows = rows_by_name(there, here, directory)
    if lost := [name for row, name in enumerate(there) if row not in rows]:
        (difference,), _ = class_differences(loaded.classes, dataset.classes, "ids")
        way = f"its labels lack {first_of(lost)}: choose a list whose data have them"
        raise DataError(f"{directory}: {difference}; {way}")
    index = torch.tensor([len(there) if row is None else row for row in rows])

    def by_name(_: nn.Module, __: object, found: SegLogits) -> SegLogits:
        never: Tensor = torch.full_like(found.out[:, :1], _NEVER)
        out = torch.cat([found.out, never], 1)
        return SegLogits(out.index_select(1, index.to(out.device)))

    loaded.model.register_forward_hook(by_name)
    without = [name for name, row in zip(here, rows, strict=True) if row is None]
    what = (
        f"has no {first_of(without)} and never predicts it"
        if without
        else "has another order or spelling"
    )
    say(f"{directory}: classes are compared by name; it {what}")


def _of_equal_files(images: Sequence[Pair], others: Sequence[Pair]) -> list[str]:
    """Names of the images that are among others too, under another path, by their bytes."""
    sizes = {os.path.getsize(pair.image) for pair in images}
    hashes = set()
    for pair in others:
        with suppress(OSError):  # it may be gone by now
            if os.path.getsize(pair.image) in sizes:
                hashes.add(sha256_of(pair.image))
    return [pair.name for pair in images if sha256_of(pair.image) in hashes]


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
        _predict_classes_of(dataset, loaded, directory)
    images = list_split(data, data.eval_split).pairs
    seen: dict[str, list[str]] = {"train_split": [], "eval_split": []}
    try:
        for config in loaded.configs:
            own = set_after_training(config, overrides, _ROOT, source=str(directory)).data
            for key, names in seen.items():
                own_pairs = list_split(own, getattr(own, key)).pairs
                places = _places(own_pairs)
                names += [
                    pair.name
                    for pair, place in zip(images, map(_place, images), strict=True)
                    if any(map(place.overlaps, places.get(place.mosaic, ())))
                ]
                if own.root != data.root:
                    names += _of_equal_files(images, own_pairs)
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
