"""The ground, in strips along the street, and the sky: both are computed pixel by pixel."""

from typing import NamedTuple

import cv2
import numpy as np

from segtrain.desk.synthetic.canvas import Canvas, Rng
from segtrain.desk.synthetic.paint import (
    ASPHALT,
    GREENS,
    ROAD,
    SIDEWALK,
    SKY,
    STONES,
    TERRAIN,
    vary,
)

_TILE_PX_PER_M = 16
_KERB_M = 0.18
_LINE_WHITE = np.float32((214, 212, 204))


class Ground(NamedTuple):
    """The strips of ground along a street.

    edges: ascending x between strips. labels, colors: of each strip, one more than edges.
    left, right: x of the kerbs; the road is between them.
    """

    edges: np.ndarray
    labels: np.ndarray
    colors: np.ndarray
    left: float
    right: float


def plan_ground(rng: Rng) -> Ground:
    """A road, pavements and, for some, grass beside or behind them."""
    road, walk, grass = vary(rng, ASPHALT), vary(rng, STONES), 1.2 * vary(rng, GREENS, 7.0)
    if rng.random() < 0.1:
        walk = road + rng.normal(0, 4)  # only the kerb and the place tell them apart
    kerb = walk + rng.uniform(24, 50)
    left, right = -rng.uniform(2.8, 3.2), rng.uniform(2.4, 2.8)
    edges, strips = [left, right], [(ROAD, road)]
    for side, edge in ((-1, left), (1, right)):
        verge, yard = rng.random(2) < (0.3, 0.2)
        for width, label, color in (
            (_KERB_M, SIDEWALK, kerb),
            (verge * rng.uniform(2.6, 4.0), TERRAIN, grass),
            (rng.uniform(3.0, 5.0), SIDEWALK, walk),
            (yard * rng.uniform(3.0, 6.0), TERRAIN, grass),
        ):
            # Strips stay in the order of x: to the left each is put before the others.
            edge += side * width
            edges.append(edge)
            strips.insert(len(strips) if side > 0 else 0, (label, color))
    outside = (TERRAIN, grass) if rng.random() < 0.85 else (SIDEWALK, walk)
    labels, colors = zip(outside, *strips, outside, strict=True)
    return Ground(np.float32(sorted(edges)), np.uint8(labels), np.float32(colors), left, right)


def paint_ground(canvas: Canvas, rng: Rng, ground: Ground) -> None:
    """The strips with grain, slabs and road markings, and the shadow of houses."""
    top, x, z = canvas.camera.ground()
    strip = np.searchsorted(ground.edges, x)
    label = ground.labels[strip]
    tile = _noise(rng, (256, 256), (2, 5, 12, 40, 90))
    place = np.float32(_TILE_PX_PER_M) * np.stack((x, z), -1)
    # Mirrored at its borders the tile has no seams.
    grain = cv2.remap(tile, place, None, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT)
    rough = np.where(ground.labels == TERRAIN, 0.14, rng.uniform(0.02, 0.08, len(ground.labels)))
    slab = rng.choice((0.5, 1.0, 2.0))
    joints = ((x % slab < 0.06) | (z % slab < 0.06)) & (label == SIDEWALK)
    texture = rough[strip] * grain - rng.choice((0.0, 0.15, 0.25)) * joints
    light = 1 + texture * np.exp(-0.04 * z)  # it blurs with distance
    if rng.random() < 0.45:
        edge, sunny_side = rng.uniform(ground.left, ground.right), rng.choice((-1, 1))
        light[(x - edge) * sunny_side < 0] *= rng.uniform(0.5, 0.8)
    painted = (_markings(rng, ground, x, z) & (label == ROAD))[..., None]
    color = np.where(painted, _LINE_WHITE, ground.colors[strip]) * light[..., None]
    canvas.image[top:] = canvas.faded(color, z).clip(0, 255)
    canvas.label[top:] = label


def paint_sky(canvas: Canvas, rng: Rng, air: np.ndarray) -> None:
    """A clear to overcast sky over the whole image; `air` is its colour at the horizon."""
    height, width = canvas.camera.size
    zenith = np.float32((92, 132, 188)) + rng.random() * np.float32((70, 34, -16))
    down = (np.arange(height) / canvas.camera.horizon_y).clip(0, 1)[:, None]
    clouds = _noise(rng, (height, width), (height / 6, height / 12, height / 28))
    white = np.maximum(down, (clouds + rng.uniform(-0.5, 0.4)).clip(0, 0.8))[..., None]
    canvas.image[:] = zenith + (air - zenith) * white
    canvas.label[:] = SKY


def _markings(rng: Rng, ground: Ground, x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Where the road is painted white: lane line, edge lines and a zebra crossing."""
    middle, half = (ground.left + ground.right) / 2, (ground.right - ground.left) / 2
    dash = rng.uniform(4, 10)
    lane, edge, zebra = rng.random(3) < (0.7, 0.35, 0.35)
    white = lane & (np.abs(x - middle) < 0.09) & (z % dash < 0.55 * dash)
    white |= edge & (np.abs(np.abs(x - middle) - half + 0.4) < 0.08)
    white |= zebra & (np.abs(z - rng.uniform(7, 20)) < 1.5) & (x % 1.0 < 0.5)
    return white & (z < 80)


def _noise(rng: Rng, size: tuple[int, int], cells: tuple[float, ...]) -> np.ndarray:
    """Smooth noise (H, W) float32 in about -1..1: one octave for each cell size in pixels."""
    height, width = size
    total = np.zeros(size, np.float32)
    for cell in cells:
        shape = (max(round(height / cell), 2), max(round(width / cell), 2))
        total += cv2.resize(rng.random(shape, dtype=np.float32) * 2 - 1, (width, height))
    return total / len(cells) ** 0.5
