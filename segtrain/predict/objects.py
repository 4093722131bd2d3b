"""Objects of a label map: pixels of one class that touch each other, also at corners."""

from typing import NamedTuple

import cv2
import numpy as np

from segtrain.data.read.image import shows
from segtrain.types import IGNORE_INDEX


class Objects(NamedTuple):
    """The objects of a class, from the top down.

    pixels: (n,) int64. boxes: (n, 4) int64, first column and row, width and height. centres: (n, 2)
    float64, x and y; that of the first pixel is (0, 0).
    """

    pixels: np.ndarray
    boxes: np.ndarray
    centres: np.ndarray


class ImageObjects(NamedTuple):
    """What is in an image. No class has `no_value` pixels, whose image has no value there.

    size: (height, width). pixels: (K,) int64. num_ignored: pixels of no class, without a value or
    for another reason. objects: of each class.
    """

    size: tuple[int, int]
    pixels: np.ndarray
    num_ignored: int
    no_value: int
    objects: list[Objects]


def find_objects(label: np.ndarray, missing: np.ndarray, num_classes: int) -> ImageObjects:
    """What a label map shows.

    label: (H, W) uint8 train ids or IGNORE_INDEX; where classes overlap (H, W, K). missing: (H, W),
    not 0 where the image has no value.

    >>> label = np.array([[0, 1, 1, 0], [1, 1, 0, 0]], np.uint8)
    >>> [one.pixels.tolist() for one in find_objects(label, np.zeros((2, 4)), 2).objects]
    [[1, 3], [4]]
    """
    objects = [_objects_of(shows(label, k)) for k in range(num_classes)]
    ignored = label == IGNORE_INDEX
    num_ignored = int((ignored if label.ndim == 2 else ignored.all(2)).sum())
    pixels = np.array([of_class.pixels.sum() for of_class in objects], np.int64)
    return ImageObjects(
        label.shape[:2], pixels, num_ignored, int(np.count_nonzero(missing)), objects
    )


def _objects_of(mask: np.ndarray) -> Objects:
    mask = mask.view(np.uint8)
    x, y, w, h = cv2.boundingRect(mask)
    # Only the rectangle around the class: of many classes, most show little of an image.
    inside = mask[y : y + h, x : x + w]
    stats, centres = np.zeros((0, 5), np.int32), np.zeros((0, 2))
    if w:
        components = cv2.connectedComponentsWithStats(inside, connectivity=8)
        # The first component is the background.
        stats, centres = components[2][1:], components[3][1:] + np.array([x, y])
    boxes, pixels = stats[:, :4] + np.array([x, y, 0, 0]), stats[:, 4].astype(np.int64)
    # `lexsort` sorts by its last key first: by row, then column; the others only decide ties.
    order = np.lexsort([*centres.T[::-1], pixels, boxes[:, 0], boxes[:, 1]])
    return Objects(pixels[order], boxes[order], centres[order])
