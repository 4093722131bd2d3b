"""Outlines, panels of walls and upright prisms, as street points for `Canvas.fill`."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

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
