"""Paints the ground: every pixel below the horizon is looked up in the plan of the street."""

import cv2
import numpy as np

from segtrain.data.synthetic import surfaces
from segtrain.data.synthetic.camera import Canvas
from segtrain.data.synthetic.ids import ROAD, SIDEWALK, TERRAIN
from segtrain.data.synthetic.street import Street

_TILE_PX_PER_M = 16
_TILE_PX = 256


def paint_ground(canvas: Canvas, street: Street, rng: np.random.Generator) -> None:
    """Every strip of the ground with its texture and markings, and shadows of houses and trees."""
    top, x, z = canvas.camera.ground()
    strip = np.searchsorted(street.edges, x.ravel()).reshape(x.shape)
    road = int(np.flatnonzero(street.labels == ROAD)[0])
    strip[(z > street.crossing[0]) & (z < street.crossing[1])] = road
    label = street.labels[strip]
    tile = surfaces.noise(rng, (_TILE_PX, _TILE_PX), (2, 5, 12, 40, 90))
    grain = _on_ground(tile, x, z)
    fade = np.exp(z * -0.04)
    amount = np.float32(
        [0.14 if one == TERRAIN else rng.uniform(0.02, 0.08) for one in street.labels]
    )
    light = 1 + amount[strip] * grain * (0.35 + 0.65 * fade)
    joints = np.where(street.labels == SIDEWALK, rng.choice((0, 0, 0.1, 0.2)), 0).astype(np.float32)
    joints[road] = rng.choice((0, 0, 0, 0.12))
    if joints.any():
        light -= joints[strip] * _on_ground(_slabs(rng), x, z) * fade
    light *= _shadows(street, rng, x, grain)
    color = street.colors[strip] * light[..., None]
    marks = _markings(street, rng, x, z) * (label == ROAD) * (0.75 + 0.25 * grain)
    color += (np.float32((214, 212, 204)) * light[..., None] - color) * marks[..., None]
    canvas.image[top:] = np.clip(color, 0, 255).astype(np.uint8)
    canvas.label[top:] = label
    canvas.nearness[top:] = 1 / z


def _on_ground(tile: np.ndarray, x: np.ndarray, z: np.ndarray) -> np.ndarray:
    # Mirrored at its borders the tile has no seams; the camera looks along its middle.
    mode = cv2.BORDER_REFLECT
    scale = np.float32(_TILE_PX_PER_M)
    return cv2.remap(tile, x * scale + _TILE_PX / 2, z * scale, cv2.INTER_LINEAR, borderMode=mode)


def _slabs(rng: np.random.Generator) -> np.ndarray:
    slabs = np.zeros((_TILE_PX, _TILE_PX), np.float32)
    pitch = int(rng.choice((8, 16, 32)))
    slabs[::pitch] = slabs[:, ::pitch] = 1
    return cv2.blur(slabs, (2, 2)) * 2


def _shadows(
    street: Street, rng: np.random.Generator, x: np.ndarray, grain: np.ndarray
) -> np.ndarray:
    """Factor of light on the ground: a row of houses and, in blots, trees take it away."""
    light = np.ones_like(x)
    if rng.random() < 0.45:
        reach = rng.uniform(street.left, street.right)
        light[(x - reach) * street.sun > 0] *= rng.uniform(0.5, 0.8)
    if rng.random() < 0.2:
        light[grain > rng.uniform(0.15, 0.6)] *= rng.uniform(0.6, 0.85)
    return light


def _markings(street: Street, rng: np.random.Generator, x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """How white the road is painted, 0 to 1: lane lines, edge lines and a zebra crossing."""
    white = np.zeros_like(x)
    middle = street.left + (street.right - street.left) * rng.choice((0.33, 0.5, 0.67))
    dash = rng.uniform(4, 10)
    if rng.random() < 0.7:
        white[(np.abs(x - middle) < 0.09) & (z % dash < 0.55 * dash)] = 0.9
    if rng.random() < 0.35:
        white[np.abs(x - street.left - 0.4) < 0.08] = 0.8
        white[np.abs(x - street.right + 0.4) < 0.08] = 0.8
    zebra = street.crossing[0] - 3.5 if rng.random() < 0.6 else rng.uniform(5, 20)
    if rng.random() < 0.35:
        across = (x > street.left) & (x < street.right) & (x % 1.0 < 0.5)
        white[across & (z > zebra) & (z < zebra + 3)] = 0.9
    white[z > 80] = 0
    return white * rng.uniform(0.4, 1.0)
