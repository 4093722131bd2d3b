"""The camera above the street, the image and label map that it takes, and solids for it.

Street coordinates are metres: x to the right of the camera, y above the ground, z ahead.
"""

from collections.abc import Iterator
from typing import NamedTuple

import cv2
import numpy as np

Rng = np.random.Generator
# Nearer corners are moved to this distance: behind the camera a projection would change sign.
_NEAR_M = 0.8
# OpenCV takes polygon corners as fixed-point numbers with this many binary places.
_SHIFT = 4
_FAR_PX = 8000.0


class Camera(NamedTuple):
    """A pinhole camera that looks along the street; `size` is (H, W) in pixels."""

    size: tuple[int, int]
    focal_px: float
    center_x: float
    horizon_y: float
    height_m: float

    def project(self, points: np.ndarray) -> np.ndarray:
        """Pixel positions (..., 2) as x, y of street points (..., 3)."""
        scale = self.focal_px / np.maximum(points[..., 2], _NEAR_M)
        x = self.center_x + scale * points[..., 0]
        y = self.horizon_y + scale * (self.height_m - points[..., 1])
        return np.stack((x, y), -1)

    def ground(self) -> tuple[int, np.ndarray, np.ndarray]:
        """First row below the horizon, and the ground's x and z (h, W) in all pixels from there."""
        height, width = self.size
        top = int(np.ceil(self.horizon_y + 0.5))
        rows, columns = np.mgrid[top:height, :width].astype(np.float32)
        z = self.focal_px * self.height_m / (rows - self.horizon_y)
        return top, (columns - self.center_x) * z / self.focal_px, z


class Canvas:
    """Image (H, W, 3) uint8 RGB and label ids (H, W) uint8; every call paints over what is there.

    `instances` (H, W) uint16 holds 1000 * label id + `instance` where a polygon was filled while
    `instance` was not None, and otherwise less than 1000.

    air: the colour (3,) that distant things fade to. clear_m: distance at which 63% has faded.
    """

    def __init__(self, camera: Camera, air: np.ndarray, clear_m: float):
        self.camera = camera
        self.image = np.zeros((*camera.size, 3), np.uint8)
        self.label = np.zeros(camera.size, np.uint8)
        self.instances = np.zeros(camera.size, np.uint16)
        self.instance: int | None = None
        self._air = air
        self._clear_m = clear_m

    def faded(self, color: np.ndarray, z: np.ndarray) -> np.ndarray:
        """Colours (..., 3) as they look from distance `z` (...)."""
        return self._air + (color - self._air) * np.exp(-z / self._clear_m)[..., None]

    def fill(self, points: np.ndarray, color: np.ndarray, label: int | None = None) -> None:
        """Fills a polygon (N, 3) of street points, or n of them; without `label` the ids stay."""
        rgb = self.faded(color, np.maximum(points[..., 2], _NEAR_M).mean()).tolist()
        # Given all polygons at once, OpenCV would leave holes where they overlap.
        for corners in self._corners(points):
            cv2.fillPoly(self.image, [corners], rgb, cv2.LINE_AA, _SHIFT)
            if label is not None:
                # Edges are smooth in the image alone: ids have no values in between.
                cv2.fillPoly(self.label, [corners], label, cv2.LINE_8, _SHIFT)
                value = label if self.instance is None else 1000 * label + self.instance
                cv2.fillPoly(self.instances, [corners], value, cv2.LINE_8, _SHIFT)

    def shade(self, points: np.ndarray) -> None:
        """Darkens a polygon (N, 3): a shadow."""
        mask = np.zeros(self.label.shape, np.uint8)
        cv2.fillPoly(mask, self._corners(points), 1, cv2.LINE_8, _SHIFT)
        self.image[mask > 0] = self.image[mask > 0] * 0.55

    def sees_front(self, face: np.ndarray) -> bool:
        """Whether the corners (N, 3) run clockwise in the image."""
        # The shoelace formula; y points down, so an area above 0 is clockwise.
        x, y = self.camera.project(face).T
        return float(x[:-1] @ y[1:] - y[:-1] @ x[1:] + x[-1] * y[0] - y[-1] * x[0]) > 0

    def _corners(self, points: np.ndarray) -> list[np.ndarray]:
        pixels = self.camera.project(points).clip(-_FAR_PX, _FAR_PX)
        fixed = np.rint(pixels * 2**_SHIFT).astype(np.int32)
        return list(fixed.reshape(-1, *fixed.shape[-2:]))


_TURN = np.linspace(0, 2 * np.pi, 16, endpoint=False)
CIRCLE = np.stack((np.cos(_TURN), np.sin(_TURN)), 1)
SQUARE = np.array([(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)])
# A side view as fractions of length and height, from the lower front corner over the roof.
BOX = np.array([(0.5, 0.0), (0.5, 1.0), (-0.5, 1.0), (-0.5, 0.0)])

_TO_FRONT = np.array([(1.0, 0.0, 0.0), (0.0, 1.0, 0.0)])
_TO_GROUND = np.array([(1.0, 0.0, 0.0), (0.0, 0.0, 1.0)])
_Fraction = float | np.ndarray


class Block(NamedTuple):
    """An upright prism in metres around (x, z); with heading 0 its front looks away from us."""

    x: float
    z: float
    heading: float
    length: float
    width: float
    height: float

    def place(self, side_view: np.ndarray, across: float) -> np.ndarray:
        """Street points (..., 3) of a side view (..., 2); across: widths right of the middle."""
        along, right = side_view[..., 0] * self.length, across * self.width
        sine, cosine = np.sin(self.heading), np.cos(self.heading)
        x, z = self.x + along * sine + right * cosine, self.z + along * cosine - right * sine
        return np.stack((x, side_view[..., 1] * self.height, z), -1)

    def faces(self, side_view: np.ndarray) -> Iterator[np.ndarray]:
        """A face (4, 3) for each edge, then the left and the right flank (N, 3).

        From outside the corners run clockwise; the lower ones come first.
        """
        left, right = self.place(side_view, -0.5), self.place(side_view, 0.5)
        for i in range(len(side_view) - 1):
            face = np.stack((left[i], right[i], right[i + 1], left[i + 1]))
            yield face if face[0, 1] <= face[2, 1] else np.roll(face, 2, 0)
        yield np.roll(left, 1, 0)
        yield np.roll(right[::-1], 1, 0)


def facing(outline: np.ndarray, x: float, y: float, z: float) -> np.ndarray:
    """An outline (..., 2) around (x, y) that faces the camera at distance `z`."""
    return outline @ _TO_FRONT + (x, y, z)


def spot(x: float, z: float, radius_x: float, radius_z: float) -> np.ndarray:
    """An ellipse on the ground."""
    return (CIRCLE * (radius_x, radius_z)) @ _TO_GROUND + (x, 0, z)


def panels(
    face: np.ndarray, left: _Fraction, bottom: _Fraction, right: _Fraction, top: _Fraction
) -> np.ndarray:
    """Rectangles (..., 4, 3) on a face whose lower corners come first; edges are fractions."""
    left, bottom, right, top = np.broadcast_arrays(left, bottom, right, top)
    u = np.stack((left, right, right, left), -1)[..., None]
    v = np.stack((bottom, bottom, top, top), -1)[..., None]
    return face[0] + u * (face[1] - face[0]) + v * (face[3] - face[0])
