"""`segtrain eval`: a checkpoint scored on a split of its data set.

Every rank runs this and evaluates its share of the images; rank 0 reports. Predictions and overlays
are written by the rank that made them.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segtrain import files
from segtrain.checkpoint.eval_data import EvalData
from segtrain.checkpoint.loading import LoadedModel, load_with_data
from segtrain.config import Config, override_config
from segtrain.config.warnings import changed_normalization
from segtrain.data import open_dataset
from segtrain.data.check.faint import faint_lines
from segtrain.data.classes import ClassFile, ignoring_as
from segtrain.data.dataset import SegDataset
from segtrain.data.loader import default_workers
from segtrain.data.protect import check_pictures
from segtrain.distributed import collectives as dist
from segtrain.distributed.process_group import device_for, process_group
from segtrain.errors import EXIT_OK, CheckpointError, ConfigError, DataError, ExecutionError
from segtrain.evaluation.dataset import Prediction, evaluate_dataset
from segtrain.evaluation.settings import InferenceSettings
from segtrain.metrics import ConfusionMatrix, score_table
from segtrain.models.memory import check_windows
from segtrain.norm import describe_norm
from segtrain.run.console import say
from segtrain.run.pictures import panel, write_png
from segtrain.text import printable

# Everything else was decided when the model was trained.
_SETTABLE = ("data.", "eval.", "train.precision")


def run_eval(args: argparse.Namespace) -> int:
    """Evaluates as the command line says and returns the exit code (collective).

    args: checkpoint (run directory or file), set, split, device, json, save_predictions, overlays,
        num_overlays.
    """
    device = device_for(args.device)
    loaded, known = load_with_data(args.checkpoint, device=device)
    config = _config(loaded.config, args)
    split = args.split or config.data.eval_split
    dataset = open_dataset(config.data, split, hidden=_named_by_checkpoint(args))
    _check_classes(loaded.classes, dataset.classes)
    dataset.classes = ignoring_as(loaded.classes, dataset.classes)
    check_windows(
        config, loaded.classes.num_classes, device, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )
    names = [dataset.name(i) for i in range(len(dataset))]
    for option in ("--save-predictions", "--overlays"):
        if folder := getattr(args, option[2:].replace("-", "_")):
            check_pictures(option, Path(folder), names, config.data, splits=[split])
    callbacks = _receivers(args, dataset, config.data.layout)

    settings = InferenceSettings.from_config(config)
    with ExitStack() as stack:
        if args.json:
            stack.enter_context(_json_place(Path(args.json)))
        stack.enter_context(process_group(device, timeout_s=config.train.timeout_s))
        _check_same_step(args.checkpoint, loaded.step)
        if dist.is_main():
            data = EvalData(loaded, known, config.data, dataset)
            stack.callback(data.close)
            _warn(changed_normalization(loaded.config, config))
            _warn(data.file_lines())
            _warn([f"warning: {line}" for line in faint_lines(dataset)])
        matrix = evaluate_dataset(
            _prepare(loaded, config, device),
            dataset,
            settings,
            device=device,
            num_classes=loaded.classes.num_classes,
            progress=True,
            num_threads=_num_threads(config),
            callbacks=callbacks,
        )
        if dist.is_main():
            for warning in dataset.warnings:
                say(f"warning: {warning}")
            about = {
                "checkpoint": str(args.checkpoint),
                "step": loaded.step,
                "split": split,
                "num_images": len(dataset),
            }
            _report(matrix, about, config, settings, loaded.classes.names)
            _warn(data.label_lines())
            if args.json:
                _write_json(
                    Path(args.json), _record(matrix, about, config, settings, loaded.classes.names)
                )
    return EXIT_OK


def _check_same_step(checkpoint: str | Path, step: int) -> None:
    """Refuses ranks with different models: each has opened the file by itself (collective)."""
    steps = sorted(set(dist.all_gather_object(step)))
    if len(steps) > 1:
        raise CheckpointError(
            f"{checkpoint}: replaced while the ranks were loading it (steps "
            f"{', '.join(map(str, steps))}); start the evaluation again, or name a checkpoint that "
            "stays as it is"
        )


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"segtrain: {printable(line)}", file=sys.stderr)


def _config(trained: Config, args: argparse.Namespace) -> Config:
    foreign = [text for text in args.set if not text.strip().startswith(_SETTABLE)]
    config = override_config(trained, args.set, source=str(args.checkpoint))
    if foreign:
        raise ConfigError(
            "\n".join(
                f"--set {text}: the checkpoint decides this; eval takes data.*, eval.* and "
                "train.precision"
                for text in foreign
            )
        )
    return config


def _named_by_checkpoint(args: argparse.Namespace) -> set[str]:
    """The files whose lines no message may show: a checkpoint from elsewhere can name any file."""
    by_user = {text.partition("=")[0].strip() for text in args.set}
    by_user |= {"data.eval_split"} if args.split else set()
    return {"data.classes", "data.eval_split"} - by_user


def _prepare(loaded: LoadedModel, config: Config, device: torch.device) -> torch.nn.Module:
    if config.train.precision == "float64":
        loaded.model.double()
    if config.train.channels_last and device.type == "cuda":
        loaded.model.to(memory_format=torch.channels_last)
    return loaded.model


def _num_threads(config: Config) -> int:
    if config.data.num_workers is not None:
        return max(1, config.data.num_workers)
    return max(1, default_workers(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _check_classes(trained: ClassFile, data: ClassFile) -> None:
    """Refuses a data set whose train ids mean other classes than the model's."""
    if list(trained.names) == list(data.names):
        return
    pairs = enumerate(zip(trained.names, data.names, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(trained.num_classes, data.num_classes))
    found = [
        names[first] if first < len(names) else "none" for names in (trained.names, data.names)
    ]
    raise DataError(
        f"class file {data.name}: {data.num_classes} classes, the model was trained on "
        f"{trained.num_classes}; class {first} is {found[1]} here and {found[0]} there; "
        "evaluate with the class file of the training, --set data.classes=..."
    )


def _receivers(
    args: argparse.Namespace, dataset: SegDataset, layout: str
) -> list[Callable[[Prediction], None]]:
    callbacks: list[Callable[[Prediction], None]] = []
    if args.save_predictions:
        folder = _make_folder("--save-predictions", Path(args.save_predictions))
        callbacks.append(PredictionWriter(folder, dataset, layout=layout))
    if args.overlays:
        folder = _make_folder("--overlays", Path(args.overlays))
        callbacks.append(OverlayWriter(folder, dataset, num=args.num_overlays))
    return callbacks


def _make_folder(option: str, folder: Path) -> Path:
    """Makes `folder` before any time is spent on predictions that could not be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {folder}: cannot make this folder: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {folder}: this folder cannot be written")
    return folder


@contextmanager
def _json_place(path: Path) -> Iterator[None]:
    """Refuses a place for --json that could not be written after the evaluation."""
    _make_folder("--json", path.parent)
    with ExitStack() as stack:
        try:
            stack.enter_context(files.reserve_output(path))
        except OSError as error:
            raise ConfigError(f"--json {path}: {error.strerror}") from None
        yield


class PredictionWriter:
    """Writes each prediction as a PNG of raw class ids, at the size of the label.

    For the layout `cityscapes` the name is what its evaluation server looks for, a file
    <city>_<sequence>_<frame>*.png anywhere below the folder; for the others it is the image's own.
    """

    def __init__(self, folder: Path, dataset: SegDataset, *, layout: str) -> None:
        self._folder = folder
        self._dataset = dataset
        self._ending = "_pred_labelIds.png" if layout == "cityscapes" else ".png"
        ids = dataset.classes.write_ids
        self._ids = np.array(ids, dtype=np.uint8 if max(ids) < 256 else np.uint16)

    def __call__(self, prediction: Prediction) -> None:
        """Writes one."""
        name = self._dataset.name(prediction.index) + self._ending
        write_png(self._folder / name, self._ids[prediction.pred])


class OverlayWriter:
    """Writes image, label, prediction and errors side by side, for `num` images of the data set.

    They are spread evenly over the data set, so the choice does not depend on the ranks.
    """

    def __init__(self, folder: Path, dataset: SegDataset, *, num: int) -> None:
        self._folder = folder
        self._dataset = dataset
        self._chosen = set(np.linspace(0, len(dataset) - 1, num).round().astype(int).tolist())

    def __call__(self, prediction: Prediction) -> None:
        """Writes one, if it was chosen."""
        if prediction.index not in self._chosen:
            return
        name, classes = self._dataset.name(prediction.index), self._dataset.classes
        picture = panel(
            prediction.image,
            prediction.label,
            prediction.pred,
            palette=classes.palette,
            names=classes.names,
            title=name,
        )
        write_png(self._folder / f"{name}.png", picture)


def _report(
    matrix: ConfusionMatrix,
    about: dict[str, Any],
    config: Config,
    settings: InferenceSettings,
    names: Sequence[str],
) -> None:
    for line in score_table(matrix.scores(), names):
        say(line)
    say("{checkpoint}, step {step}, {num_images} images of split {split}".format(**about))
    say(f"{settings.describe()}; trained with {describe_norm(config.norm)}")


def _record(
    matrix: ConfusionMatrix,
    about: dict[str, Any],
    config: Config,
    settings: InferenceSettings,
    names: Sequence[str],
) -> dict[str, Any]:
    """What --json writes: the same bytes on any number of ranks."""
    return {
        **about,
        **matrix.scores().to_dict(names),
        "confusion_matrix": matrix.counts.tolist(),
        "inference": settings.to_dict(),
        "norm": describe_norm(config.norm),
    }


def _write_json(path: Path, record: dict[str, Any]) -> None:
    """Writes the file whole or not at all."""
    try:
        files.write_output(path, json.dumps(record, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise ExecutionError(f"{path}: cannot write the scores: {error.strerror}") from error
