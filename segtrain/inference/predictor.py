"""Any image to a label map, in one place: for eval, predict, reports, the library and trainings."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.inference.class_scores import predict_labels
from segtrain.inference.forward import Forward
from segtrain.inference.settings import (
    InferenceSettings,
    SettingsBySize,
    Size,
    batch_limits,
    fitting_pixels,
)
from segtrain.inference.transfer import Transfer
from segtrain.models.memory import memory_failures
from segtrain.models.precision import tf32_products
from segtrain.task.decision_rule import DecisionRule
from segtrain.task.prediction import LabelMap


class Predictor:
    """A model on its device, in the precision of evaluation, and how images go through it.

    An image of 360x480 goes through as a whole, one of 6000x8000 by windows of 1024x1024, each as
    `settings` say for its size; `limits` say how many go together. rule: as of `predict_labels`.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: SettingsBySize,
        device: torch.device,
        num_classes: int,
        rule: DecisionRule | None = None,
    ) -> None:
        thresholds = settings.usual.thresholds or ()
        if len(thresholds) > 1 and len(thresholds) != num_classes:
            what = f"{len(thresholds)} numbers for {num_classes} classes"
            raise ConfigError(f"eval.thresholds: {what}; give one for all, or one a class")
        self.model, self.settings, self.device = model, settings, device
        self.rule = rule
        self.num_classes = num_classes
        self.limits = batch_limits(settings.usual, device, num_classes)
        self.transfer = Transfer(device)
        self._forward = Forward(model)

    def by(self, rule: DecisionRule | None) -> "Predictor":
        """The same with this rule."""
        return Predictor(self.model, self.settings, self.device, self.num_classes, rule)

    def label_maps(
        self,
        images: Sequence[Tensor],
        out_sizes: Sequence[Size] | None = None,
        *,
        place: object,
        **how: Any,
    ) -> list[LabelMap]:
        """The predictions for `images`, in their order; on CUDA they are only asked for.

        images: (H, W, C) each, as stored, of one dtype, on the host; on CUDA best pinned.
        out_sizes: (h, w) of each result; None: of its image.
        place: of the images, in messages. how: further options of `predict_labels`.

        Raises:
            MemoryLimitError: the memory of the device does not suffice.
        """
        sizes = [(image.shape[0], image.shape[1]) for image in images]
        each = zip(map(self.settings.of, sizes), images, out_sizes or sizes, strict=True)
        maps: list[LabelMap] = []
        # Only neighbours go together, so that the results stay in the order of the images.
        for settings, alike in groupby(each, lambda item: item[0]):
            _, chosen, outs = zip(*alike, strict=True)
            maps += self._alike(settings, chosen, outs, place, **how)
        return maps

    def _alike(
        self,
        settings: InferenceSettings,
        images: Sequence[Tensor],
        out_sizes: Sequence[Size],
        place: object,
        **how: Any,
    ) -> list[LabelMap]:
        def message() -> str:
            height, width = max((image.shape[:2] for image in images), key=math.prod)
            how = settings.describe().partition(";")[0]
            return (
                f"{place}: an image of {height}x{width} px ({how}) does not fit into the memory of "
                f"{self.device}; set eval.batch_size=1, eval.mode=slide, or a smaller "
                "eval.crop_size"
            )

        with tf32_products(settings.tf32), memory_failures(message):
            moved = [self.transfer.to_device(image) for image in images]
            batch = [image.permute(2, 0, 1).unsqueeze(0) for image in moved]
            how |= {"rule": self.rule}
            return predict_labels(self._forward, batch, settings, out_sizes, self.limits, **how)


def for_photos(
    model: nn.Module, config: Config, device: torch.device, num_classes: int, *, mode_is_given: bool
) -> Predictor:
    """For images that nobody has labelled: large ones go by windows.

    model: `to_eval_precision` has changed it.
    mode_is_given: the user has set `eval.mode`, which then holds for all images.
    """
    most = fitting_pixels(model, device, num_classes, ranks=1)
    by_size = SettingsBySize.from_config(config, mode_is_given=mode_is_given, fitting_pixels=most)
    return Predictor(model, by_size, device, num_classes)


def for_scores(
    model: nn.Module,
    usual: InferenceSettings,
    device: torch.device,
    num_classes: int,
    *,
    mode_is_given: bool = False,
    at_once: int = 1,
) -> Predictor:
    """For images of a split: by the usual settings wherever the memory suffices, as papers do.

    model: of a training, or `to_eval_precision` has changed it. mode_is_given: as of `for_photos`.
    at_once: images that this rank works on at the same time.
    """
    # A mode that the user has set holds for all images, whether they fit or not.
    most = math.inf
    if not mode_is_given:
        # What all ranks of this machine work on at the same time shares its memory.
        ranks = dist.local_world_size() * at_once
        most = fitting_pixels(model, device, num_classes, ranks)
    by_size = SettingsBySize.that_fit(usual, most)
    return Predictor(model, by_size, device, num_classes)
