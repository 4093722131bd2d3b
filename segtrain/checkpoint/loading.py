"""A trained model from a run directory or a checkpoint, ready for inference."""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from segtrain.checkpoint.experiment import parse_data, parse_experiment
from segtrain.checkpoint.format import BEST, LAST, Checkpoint, load
from segtrain.checkpoint.weights import check_fit, load_weights
from segtrain.config import Config, recipes
from segtrain.data.classes import ClassFile
from segtrain.data.fingerprint import DataFingerprint
from segtrain.errors import CheckpointError
from segtrain.files import kind_of
from segtrain.models import SegModel, build_model
from segtrain.norm import make_inference_norm


class LoadedModel(NamedTuple):
    """A trained model in evaluation mode, and what it was trained with."""

    model: SegModel
    config: Config
    classes: ClassFile
    step: int


def load_model(path: str | Path, *, device: torch.device | str = "cpu") -> LoadedModel:
    """The model of a run directory or checkpoint, in evaluation mode.

    Its batch norms are plain nn.BatchNorm2d. If the run averaged its weights, it has the averages.
    Raises CheckpointError if there is no checkpoint, or its weights do not fit its config.
    """
    return load_with_data(path, device=device)[0]


def load_with_data(
    path: str | Path, *, device: torch.device | str = "cpu"
) -> tuple[LoadedModel, DataFingerprint | None]:
    """As `load_model`, and the data it was trained on; None if the checkpoint does not say."""
    file = resolve(path)
    checkpoint = load(file)
    config, classes = parse_experiment(checkpoint, file)
    check_sizes(checkpoint, config, classes, file)
    model = _inference_model(config, classes)
    load_weights(model, inference_weights(checkpoint), file)
    loaded = LoadedModel(model.eval().to(device), config, classes, checkpoint.step)
    return loaded, parse_data(checkpoint, file)


def inference_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The averaged weights if there are any, otherwise those of the last step."""
    return checkpoint.model if checkpoint.average is None else checkpoint.average


def resolve(run_or_file: str | Path) -> Path:
    """The given checkpoint file, or the best (otherwise the last) one of a run directory.

    The name of a config may stand for the weights that come with it.
    """
    path = Path(run_or_file)
    if path.is_file():
        return path
    if not path.exists():
        if (shipped := recipes.weights(str(run_or_file))) is not None:
            return shipped
        raise CheckpointError(f"{path}: no such run or checkpoint")
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a regular file")
    for file in (path / "checkpoints" / name for name in (BEST, LAST)):
        if file.is_file():
            return file
        if os.path.lexists(file):
            found = kind_of(file)
            raise CheckpointError(f"{file}: expected a checkpoint, found {found}; move it away")
    raise CheckpointError(f"{path}: no checkpoints/{BEST} or checkpoints/{LAST} in this directory")


def check_sizes(checkpoint: Checkpoint, config: Config, classes: ClassFile, path: Path) -> None:
    """Refuses a config that describes another model than the weights; allocates no memory.

    A config of a few characters can ask for more memory than any machine has.
    """
    try:
        with torch.device("meta"):
            model = _inference_model(config, classes)
    except (RuntimeError, OverflowError):  # the number of bytes overflows
        what = "its config describes a model that is too large for any machine"
        raise CheckpointError(f"{path}: {what}") from None
    check_fit(model, checkpoint.model, path)
    if checkpoint.average is not None:
        check_fit(model, checkpoint.average, path)


def _inference_model(config: Config, classes: ClassFile) -> SegModel:
    # The checkpoint has every weight: download none.
    model = config.model.model_copy(update={"pretrained": None})
    norm = make_inference_norm(config.norm)
    return build_model(model, num_classes=classes.num_classes, norm=norm)
