"""The camera above the street, and the image and label map that it takes.

Street coordinates are metres: x to the right of the camera, y above the ground, z ahead.
"""

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
        x, y = self.camera.project(face).T
        return float(x[:-1] @ y[1:] - y[:-1] @ x[1:] + x[-1] * y[0] - y[-1] * x[0]) > 0

    def _corners(self, points: np.ndarray) -> list[np.ndarray]:
        pixels = self.camera.project(points).clip(-_FAR_PX, _FAR_PX)
        fixed = np.rint(pixels * 2**_SHIFT).astype(np.int32)
        return list(fixed.reshape(-1, *fixed.shape[-2:]))
