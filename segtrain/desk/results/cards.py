"""Pictures of chosen images of a split, predicted once more."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import cv2
import numpy as np
import torch

from segtrain.checkpoint.trained import LoadedModel
from segtrain.data.read.dataset import SegDataset
from segtrain.desk.results.scored_maps import LabelMaps
from segtrain.inference.predictor import Predictor, for_scores
from segtrain.inference.settings import InferenceSettings
from segtrain.models.precision import to_eval_precision
from segtrain.run.pictures import Rgb, as_rgb, error_map, overlay

_SIDE_PX = 320
_QUALITY = 80
_OPACITY = 0.6


Predicts = LoadedModel | LabelMaps


class Card(NamedTuple):
    """An image of a split: what it shows, as files of WebP of equal size."""

    image: bytes
    label: bytes
    prediction: bytes
    errors: bytes


class Predicted(NamedTuple):
    """An image of a split and what a model says about it.

    index: in the split. image: (h, w, 3) uint8 RGB, of the label's size. label, pred: (h, w) uint8
    train ids; label may be IGNORE_INDEX. probability: (h, w) float32, that of `pred`; of label maps
    None. Where classes overlap (h, w, K), and (K, h, w).
    """

    index: int
    image: np.ndarray
    label: np.ndarray
    pred: np.ndarray
    probability: np.ndarray | None

    def views(self, palette: Sequence[Rgb]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The image, and under the colours of label and of prediction, (h, w, 3) uint8 RGB."""
        tinted = (overlay(self.image, x, palette, alpha=_OPACITY) for x in (self.label, self.pred))
        return self.image, *tinted


def split_predictor(loaded: LoadedModel, device: torch.device) -> Predictor:
    """Predicts images of a split as the evaluations of its training do, by this process alone."""
    model = to_eval_precision(loaded.model, loaded.config, device)
    usual = InferenceSettings.from_config(loaded.config)
    return for_scores(model, usual, device, loaded.classes.num_classes)


def predict_chosen(
    loaded: Predicts, dataset: SegDataset, indices: Iterable[int], device: torch.device
) -> Iterator[Predicted]:
    """Predicts these images, in the order of the split, by this process alone; or reads them."""
    predictor = None if isinstance(loaded, LabelMaps) else split_predictor(loaded, device)
    for index in sorted(set(indices)):
        image, label = dataset[index]
        if predictor is None:
            maps = loaded.read(index, label), None
        else:
            pixels, place = torch.from_numpy(image), f"image {index} of {dataset.split}"
            (predicted,) = predictor.label_maps(
                [pixels], [label.shape[:2]], place=place, probabilities="highest"
            )
            maps = (x.cpu().numpy() for x in (predicted.label, predicted.probability.float()))
        image = as_rgb(image, dataset.form.value_range)
        # The label decides the size: the pictures of a card lie over each other.
        if image.shape[:2] != label.shape[:2]:
            size = label.shape[1], label.shape[0]
            image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
        yield Predicted(index, image, label, *maps)


def draw_cards(
    loaded: Predicts, dataset: SegDataset, indices: Iterable[int], device: torch.device
) -> dict[int, Card]:
    """A card for each of these images, by this process alone."""
    cards: dict[int, Card] = {}
    for predicted in predict_chosen(loaded, dataset, indices, device):
        errors = webp(error_map(predicted.label, predicted.pred), smooth=False)
        cards[predicted.index] = Card(*map(webp, predicted.views(dataset.classes.palette)), errors)
    return cards


def webp(picture: np.ndarray, *, smooth: bool = True) -> bytes:
    """A small WebP file of an RGB picture; not smooth: in no colours but its own."""
    scale = _SIDE_PX / max(picture.shape[:2])
    size = [max(1, round(side * scale)) for side in picture.shape[1::-1]]
    # Error maps keep their few colours, which a mean of pixels would mix.
    how = cv2.INTER_AREA if smooth and scale < 1 else cv2.INTER_NEAREST
    small = cv2.resize(picture, size, interpolation=how)
    ok, data = cv2.imencode(
        ".webp", cv2.cvtColor(small, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_WEBP_QUALITY, _QUALITY]
    )
    assert ok, "any 8 bit picture can be WebP"
    return data.tobytes()
