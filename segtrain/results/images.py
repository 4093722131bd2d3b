"""Pictures of chosen images of a split, predicted once more."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
import torch

from segtrain.checkpoint.loading import LoadedModel
from segtrain.data.read.dataset import SegDataset
from segtrain.evaluation.dataset import Prediction, settings_by_size
from segtrain.evaluation.inference import predict_label
from segtrain.evaluation.settings import InferenceSettings
from segtrain.models.precision import float32_products, for_evaluation, to_eval_precision
from segtrain.run.pictures import as_rgb, error_map, overlay

_SIDE_PX = 320
_QUALITY = 80
_OPACITY = 0.6


class Card(NamedTuple):
    """An image of a split: what it shows, as files of WebP of equal size."""

    image: bytes
    label: bytes
    prediction: bytes
    errors: bytes


@dataclass(frozen=True)
class Chosen(Sequence[tuple[np.ndarray, np.ndarray]]):
    """Some images of a data set."""

    dataset: SegDataset
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        return self.dataset[self.indices[position]]

    def original(self, prediction: Prediction) -> Prediction:
        """A prediction with the index that its image has in the data set."""
        return prediction._replace(index=self.indices[prediction.index])


def draw_cards(
    loaded: LoadedModel, dataset: SegDataset, indices: Iterable[int], device: torch.device
) -> dict[int, Card]:
    """A card for each of these images, by this process alone."""
    config, palette = loaded.config, dataset.classes.palette
    model = to_eval_precision(loaded.model, config, device).eval()
    num_classes, usual = loaded.classes.num_classes, InferenceSettings.from_config(config)
    settings = settings_by_size(model, usual, device, num_classes)
    found: dict[int, Card] = {}
    for index in sorted(set(indices)):
        image, label = dataset[index]
        pixels = torch.from_numpy(image).to(device).permute(2, 0, 1).unsqueeze(0)
        with float32_products(for_evaluation(config)):
            how = settings.of(image.shape[:2])
            pred = predict_label(model, pixels, how, label.shape).cpu().numpy()
        image = as_rgb(image, dataset.form.value_range)
        if image.shape[:2] != label.shape:
            image = cv2.resize(image, label.shape[::-1], interpolation=cv2.INTER_AREA)
        found[index] = Card(
            _webp(image),
            _webp(overlay(image, label, palette, alpha=_OPACITY)),
            _webp(overlay(image, pred, palette, alpha=_OPACITY)),
            _webp(error_map(label, pred), smooth=False),
        )
    return found


def _webp(picture: np.ndarray, *, smooth: bool = True) -> bytes:
    scale = _SIDE_PX / max(picture.shape[:2])
    size = [max(1, round(side * scale)) for side in picture.shape[1::-1]]
    how = cv2.INTER_AREA if smooth and scale < 1 else cv2.INTER_NEAREST
    small = cv2.resize(picture, size, interpolation=how)
    ok, data = cv2.imencode(
        ".webp", cv2.cvtColor(small, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_WEBP_QUALITY, _QUALITY]
    )
    assert ok, "any 8 bit picture can be WebP"
    return data.tobytes()
