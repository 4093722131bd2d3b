"""A trained model, ready to label images: for `segtrain predict` and the library."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from segtrain.checkpoint.trained import LoadedModel, load_model
from segtrain.config import Config
from segtrain.config.loading import given_keys
from segtrain.data.read.image import ImageForm, form_of
from segtrain.inference.predictor import Predictor, for_photos
from segtrain.inference.settings import set_after_training
from segtrain.models.memory import check_windows
from segtrain.models.precision import to_eval_precision

# Everything else was decided when the model was trained.
_SETTABLE = ("eval.", "data.short_side_px", "data.slice_axis", "train.precision")


class ReadyModel(NamedTuple):
    """What labels images, and what the model was trained with.

    config: with the settings that were given. form: of the images in training.
    """

    predictor: Predictor
    loaded: LoadedModel
    config: Config
    form: ImageForm


def make_ready(*sources: str | Path, settings: Sequence[str], device: torch.device) -> ReadyModel:
    """The model of a run or checkpoint, or the ensemble of several, with these `settings`.

    UserError: no checkpoint, or a setting that cannot be taken.
    """
    loaded = load_model(*sources, device=device)
    config = set_after_training(loaded.config, settings, _SETTABLE, source=str(sources[0]))
    num_classes, is_given = loaded.classes.num_classes, "eval.mode" in given_keys(settings)
    check_windows(config, num_classes, device)
    model = to_eval_precision(loaded.model, config, device)
    predictor = for_photos(model, config, device, num_classes, mode_is_given=is_given)
    form = form_of(config.data)
    if known := loaded.channels:
        form = form._replace(bands=known.bands, dtype=np.dtype(known.dtype or form.dtype))
    return ReadyModel(predictor, loaded, config, form)
