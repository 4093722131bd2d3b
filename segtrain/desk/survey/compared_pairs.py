"""A sample of images and their labels, small and on one grid, to be compared with each other."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from segtrain.data.read.decode import to_stored
from segtrain.data.read.thumbnails import grey_of
from segtrain.desk.survey import contents
from segtrain.desk.survey.class_masks import painted
from segtrain.desk.survey.contents import nearest_pixels, spread
from segtrain.desk.survey.image_facts import middle_window, read_bands
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.errors import DataError

# Runs of neighbours by name show a shift in the order; images of other runs are other scenes.
_RUNS, _RUN = 4, 12
# The longer sides of the grids on which edges, and colours, are compared.
_EDGES_PX, _COLORS_PX = 384, 64
# With the slope four, which is the most that OpenCV averages.
_MOST_CHANNELS = 3


class ComparedPair(NamedTuple):
    """An image and its label on grids that all pairs of a sample share.

    place: in the order of the labelled images. image, label: the paths.
    slope: (h, w) float32, how steep the grey of the image is; its mean is 1.
    colors: (q, C) float32, the channels and the slope, each with mean 0 and deviation 1.
    values, few_values: of the label, on the grid of the slope and on that of the colours.
    zeros, black: pixels of the grid labelled 0, and those of them that are black or NaN.
    """

    place: int
    image: str
    label: str
    slope: np.ndarray
    colors: np.ndarray
    values: np.ndarray
    few_values: np.ndarray
    zeros: int
    black: int

    @property
    def rim_share(self) -> float | None:
        """How much of the rim of the label has the larger of its two values; None: it has not two.

        About 0 where objects that are 1 lie inside, and 1 where those are 0.
        """
        values = np.unique(self.values)
        if len(values) != 2:
            return None
        rim = (self.values[0], self.values[-1], self.values[1:-1, 0], self.values[1:-1, -1])
        return float((np.concatenate(rim) == values[1]).mean())


def read_pairs(folder: Path, images: Sequence[Image], labels: LabelSet) -> list[ComparedPair]:
    """Some of the images that have labels, in runs of neighbours; without what cannot be read."""
    labelled = [image for image in images if labels.labels.get(image.path)]
    if not labelled:
        return []
    starts = spread(range(max(1, len(labelled) - _RUN + 1)), _RUNS)
    runs = (range(start, min(start + _RUN, len(labelled))) for start in starts)
    is_small = len(labelled) <= _RUNS * _RUN
    places = range(len(labelled)) if is_small else sorted(set(chain.from_iterable(runs)))
    usual = tuple(np.median([labelled[i].size for i in places], axis=0).tolist())
    pairs: list[ComparedPair] = []
    for i in places:
        with suppress(DataError):
            image = labelled[i]
            stored = read_bands([folder / file for file in image.files])
            # Of a raster one window is read, but files of several classes are painted whole.
            if labels.classes and stored.shape[:2] != image.size:
                continue
            label = _read_label(folder, image, labels)
            if stored.shape[:2] == label.shape:
                pairs.append(_pair(i, image, labels, stored, label, usual))
    return pairs


def _read_label(folder: Path, image: Image, labels: LabelSet) -> np.ndarray:
    """The values (H, W) of the label, of a raster in its middle window."""
    files = labels.labels[image.path]
    if labels.classes:
        how = labels.void, labels.threshold
        label = painted(labels.class_files(folder, image.path), image.size, *how)[0]
    else:
        path = folder / files[0]
        window = None if labels.resized else middle_window(path)
        label = contents.values_of(path, labels.kind, window, labels.threshold)
    label = to_stored(label, image.orientation) if labels.upright else label
    return nearest_pixels(label, image.size) if labels.resized else label


def _pair(
    place: int,
    image: Image,
    labels: LabelSet,
    stored: np.ndarray,
    label: np.ndarray,
    usual: tuple[float, float],
) -> ComparedPair:
    """The pair on the grids; stored: (H, W, C). label: (H, W). usual: the size of most images."""
    size, few = _grid(_EDGES_PX, usual), _grid(_COLORS_PX, usual)
    stored = np.nan_to_num(stored)
    small = _small(stored[..., :_MOST_CHANNELS].astype(np.float32), size)
    # Outlines are drawn a pixel or more beside the edge.
    grey = cv2.GaussianBlur(grey_of(small), (0, 0), 1)
    slope = np.hypot(cv2.Sobel(grey, cv2.CV_32F, 1, 0), cv2.Sobel(grey, cv2.CV_32F, 0, 1))
    slope /= max(float(slope.mean()), 1e-6)
    colors = _small(np.dstack([small, slope]), few).reshape(few[0] * few[1], -1)
    colors = (colors - colors.mean(axis=0)) / np.maximum(colors.std(axis=0), 1e-6)
    values = nearest_pixels(label, size)
    # Files of several classes are painted: 0 is where none of them shows anything.
    is_zero = (values == 0) & (not labels.classes)
    black = np.count_nonzero(~nearest_pixels(stored, size)[is_zero].any(axis=1))
    files = image.path, labels.labels[image.path][0]
    grids = slope, colors, values, nearest_pixels(label, few)
    return ComparedPair(place, *files, *grids, np.count_nonzero(is_zero), black)


def _small(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The picture (H, W, C) float32 at this size."""
    return cv2.resize(picture, size[::-1], interpolation=cv2.INTER_AREA).reshape(*size, -1)


def _grid(side: int, usual: tuple[float, float]) -> tuple[int, int]:
    """Height and width of a grid whose longer side is at most so long."""
    scale = min(1.0, side / max(usual))
    height, width = (max(8, round(x * scale)) for x in usual)
    return height, width
