"""The camera and the pixel planes that a scene is painted on, from far to near."""

from typing import NamedTuple

import cv2
import numpy as np

# Polygon corners are passed to OpenCV as fixed-point numbers with this many binary places.
_SHIFT = 4
_FAR_PX = 8000.0
# Nothing is projected from nearer than this; corners behind it would change sign.
NEAR_M = 0.8


class Camera(NamedTuple):
    """A pinhole camera above a flat ground, looking along the street.

    Street coordinates are metres: x to the right of the camera, y above the ground, z ahead. The
    pitch is a shifted horizon, so verticals stay vertical; the street bends by `bend` * z ** 2.
    """

    size: tuple[int, int]
    focal_px: float
    center_x: float
    horizon_y: float
    height_m: float
    bend: float

    def project(self, points: np.ndarray) -> np.ndarray:
        """Pixel positions (N, 2) as x, y of street points (N, 3)."""
        z = np.maximum(points[:, 2], NEAR_M)
        scale = self.focal_px / z
        pixels = np.empty((len(points), 2))
        pixels[:, 0] = self.center_x + scale * (points[:, 0] + self.bend * z**2)
        pixels[:, 1] = self.horizon_y + scale * (self.height_m - points[:, 1])
        return pixels

    def px_per_m(self, z: float) -> float:
        """Pixels that one metre covers at distance `z`."""
        return self.focal_px / z

    def ground(self) -> tuple[int, np.ndarray, np.ndarray]:
        """First row below the horizon, and the ground's x and z (h, W) in all pixels from there."""
        height, width = self.size
        top = int(np.ceil(self.horizon_y + 0.5))
        rows = np.arange(top, height, dtype=np.float32) - self.horizon_y
        z = (self.focal_px * self.height_m / rows)[:, None]  # (h, 1)
        columns = np.arange(width, dtype=np.float32)[None]
        x = (columns - self.center_x) * (z / self.focal_px) - self.bend * z**2
        return top, x.astype(np.float32), np.broadcast_to(z, x.shape).astype(np.float32)


class Canvas:
    """Image, label ids and inverse distance of one scene; every call paints over what is there.

    image: (H, W, 3) uint8 RGB. label: (H, W) uint8. nearness: (H, W) float32, 1 / metre, in the
    sky 0.
    """

    def __init__(self, camera: Camera):
        self.camera = camera
        self.image = np.zeros((*camera.size, 3), np.uint8)
        self.label = np.zeros(camera.size, np.uint8)
        self.nearness = np.zeros(camera.size, np.float32)

    def polygon(self, points: np.ndarray, color: np.ndarray, label: int, z: float) -> None:
        """Fills the polygon (N, 2) of pixel positions with one colour."""
        corners = [_fixed(points)]
        cv2.fillPoly(self.image, corners, _rgb(color), cv2.LINE_AA, _SHIFT)
        cv2.fillPoly(self.label, corners, label, cv2.LINE_8, _SHIFT)
        cv2.fillPoly(self.nearness, corners, 1 / z, cv2.LINE_8, _SHIFT)

    def paint(self, points: np.ndarray, color: np.ndarray) -> None:
        """Fills a polygon on a surface that is there already: its label and distance stay."""
        cv2.fillPoly(self.image, [_fixed(points)], _rgb(color), cv2.LINE_AA, _SHIFT)

    def shade(self, points: np.ndarray, factor: float) -> None:
        """Darkens a polygon, softly at its edge."""
        window = self._window(points, 3)
        if window is None:
            return
        rows, columns = window
        image = self.image[rows, columns]
        mask = np.zeros(image.shape[:2], np.uint8)
        cv2.fillPoly(mask, [_fixed(points - (columns.start, rows.start))], 255, cv2.LINE_AA, _SHIFT)
        light = 1 - cv2.blur(mask, (5, 5)).astype(np.float32) * ((1 - factor) / 255)
        image[:] = (image * light[..., None]).astype(np.uint8)

    def texture(self, quad: np.ndarray, texture: np.ndarray, label: int, z: np.ndarray) -> None:
        """Maps `texture` (h, w, 3) onto a vertical rectangle in perspective.

        quad: (4, 2) pixel positions of its corners: top left, top right, bottom right, bottom left.
        z: distances of the left and the right edge.
        """
        window = self._window(quad, 1)
        if window is None:
            return
        rows, columns = window
        image = self.image[rows, columns]
        height, width = texture.shape[:2]
        source = np.float32([(0, 0), (width, 0), (width, height), (0, height)])
        corners = (quad - (columns.start, rows.start)).astype(np.float32)
        matrix = cv2.getPerspectiveTransform(source, corners)
        size = (image.shape[1], image.shape[0])
        warped = cv2.warpPerspective(texture, matrix, size, borderMode=cv2.BORDER_REPLICATE)
        mask = np.zeros(image.shape[:2], np.uint8)
        cv2.fillPoly(mask, [_fixed(corners)], 255, cv2.LINE_8, _SHIFT)
        cv2.copyTo(warped, mask, image)
        self.label[rows, columns][mask > 0] = label
        # 1 / z is linear in the picture, so on a vertical plane it depends on the column alone.
        ends = np.sort(corners[:2, 0])
        near = 1 / z if corners[0, 0] <= corners[1, 0] else 1 / z[::-1]
        nearness = np.interp(np.arange(size[0]), ends, near).astype(np.float32)
        cv2.copyTo(np.broadcast_to(nearness, mask.shape).copy(), mask, self.nearness[rows, columns])

    def foliage(
        self, discs: np.ndarray, color: np.ndarray, noise: np.ndarray, z: float, label: int
    ) -> None:
        """A ragged heap of leaves: discs (N, 3) of x, y, radius in pixels, lit from above.

        noise: (>= H, >= W) float32 in about -1..1.
        """
        reach = discs[:, 2:3]
        window = self._window(np.concatenate((discs[:, :2] - reach, discs[:, :2] + reach)), 1)
        if window is None:
            return
        rows, columns = window
        image = self.image[rows, columns]
        mask = np.zeros(image.shape[:2], np.uint8)
        for x, y, radius in discs:
            center = _fixed(np.array([[x - columns.start, y - rows.start]]))[0]
            radius_px = max(int(radius * 2**_SHIFT), 1)
            cv2.circle(mask, center.tolist(), radius_px, 255, -1, cv2.LINE_8, _SHIFT)
        grain = noise[: mask.shape[0], : mask.shape[1]]
        fringe = max(int(reach.mean() * 0.4) | 1, 3)
        inside = cv2.blur(mask, (fringe, fringe)) > 128 + 70 * grain
        height = np.linspace(1.12, 0.72, mask.shape[0], dtype=np.float32)[:, None]
        light = (height * (1 + 0.33 * grain))[inside]  # (leaves,)
        image[inside] = np.minimum(light[:, None] * color, 255).astype(np.uint8)
        self.label[rows, columns][inside] = label
        self.nearness[rows, columns][inside] = 1 / z

    def sees(self, points: np.ndarray) -> bool:
        """Whether the bounding box of pixel positions (N, 2) covers some of the image."""
        return self._window(points, 0) is not None

    def _window(self, points: np.ndarray, margin: int) -> tuple[slice, slice] | None:
        """Rows and columns of the image that the points span; None if they miss the image."""
        height, width = self.camera.size
        left, top = np.floor(points.min(0)).astype(int) - margin
        right, bottom = np.ceil(points.max(0)).astype(int) + margin + 1
        left, top, right, bottom = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
        if right - left < 2 or bottom - top < 2:
            return None
        return slice(top, bottom), slice(left, right)


def _fixed(points: np.ndarray) -> np.ndarray:
    inside = np.minimum(np.maximum(points, -_FAR_PX), _FAR_PX)
    return np.rint(inside * 2**_SHIFT).astype(np.int32)


def _rgb(color: np.ndarray) -> tuple[float, float, float]:
    # OpenCV saturates colours above 255; no colour here is negative.
    red, green, blue = color.tolist()
    return red, green, blue
