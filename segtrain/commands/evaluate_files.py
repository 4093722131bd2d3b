"""What `segtrain eval` writes: pictures of predictions, and the scores as JSON."""

import argparse
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from segtrain import files
from segtrain.config import Config
from segtrain.data.classes import default_palette
from segtrain.data.dataset import SegDataset
from segtrain.data.protect import check_pictures
from segtrain.errors import ConfigError, ExecutionError
from segtrain.evaluation.dataset import Prediction
from segtrain.run.pictures import panel, spread, write_indexed_png, write_png

Writer = Callable[[Prediction], None]


def picture_writers(
    args: argparse.Namespace, dataset: SegDataset, config: Config, split: str
) -> list[Writer]:
    """What writes the pictures of each prediction; their folders are made here."""
    names = [dataset.name(i) for i in range(len(dataset))]
    folders = {"--save-predictions": args.save_predictions, "--overlays": args.overlays}
    folders = {option: Path(folder) for option, folder in folders.items() if folder}
    for option, folder in folders.items():
        check_pictures(option, folder, names, config.data, splits=[split])
    for option, folder in folders.items():
        _make_folder(option, folder)
    writers = []
    if folder := folders.get("--save-predictions"):
        writers.append(_prediction_writer(folder, dataset, layout=config.data.layout))
    if folder := folders.get("--overlays"):
        writers.append(_overlay_writer(folder, dataset, num=args.num_overlays))
    return writers


def reserve_json(path: Path, stack: ExitStack) -> None:
    """Refuses, before the evaluation, a place for --json that could not be written after it."""
    _make_folder("--json", path.parent)
    try:
        stack.enter_context(files.reserve_output(path))
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None


def write_json(path: Path, scores: dict[str, Any]) -> None:
    """Writes the scores for --json."""
    try:
        files.write_output(path, json.dumps(scores, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise ExecutionError(f"{path}: cannot write the scores: {error.strerror}") from error


def _make_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {folder}: cannot make this folder: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {folder}: this folder cannot be written")


def _prediction_writer(folder: Path, dataset: SegDataset, *, layout: str) -> Writer:
    """Writes a PNG of raw class ids, at the size of the label, under the name of the image.

    For the layout `cityscapes` its evaluation server expects <city>_<sequence>_<frame>*.png,
    anywhere below the folder. That of `voc` expects indices into VOC's palette.
    """
    ending = "_pred_labelIds.png" if layout == "cityscapes" else ".png"
    ids = dataset.classes.write_ids
    raw_ids = np.array(ids, dtype=np.uint8 if max(ids) < 256 else np.uint16)

    write_ids: Callable[[Path, np.ndarray], None] = write_png
    if layout == "voc" and raw_ids.dtype == np.uint8:
        write_ids = partial(write_indexed_png, palette=default_palette(256))

    def write(prediction: Prediction) -> None:
        name = dataset.name(prediction.index) + ending
        write_ids(folder / name, raw_ids[prediction.pred])

    return write


def _overlay_writer(folder: Path, dataset: SegDataset, *, num: int) -> Writer:
    """Writes image, label, prediction and errors side by side, for `num` images of the data set.

    The choice does not depend on the ranks.
    """
    chosen = spread(len(dataset), num)

    def write(prediction: Prediction) -> None:
        if prediction.index not in chosen:
            return
        index, *pixels = prediction
        name, classes = dataset.name(index), dataset.classes
        picture = panel(*pixels, palette=classes.palette, names=classes.names, title=name)
        write_png(folder / f"{name}.png", picture)

    return write
