"""Things that stand in the street: each is placed first, then painted from far to near."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from segtrain.data.synthetic import shapes
from segtrain.data.synthetic.camera import Canvas
from segtrain.data.synthetic.ids import PERSON, POLE, STATIC, TRAFFIC_SIGN, VEGETATION
from segtrain.data.synthetic.palette import green, paint

# Galvanized, tarred and painted masts.
_STEEL = np.float32([(58, 62, 64), (74, 84, 80), (168, 170, 172)])


class Thing(NamedTuple):
    """Something `height` metres tall at distance z; `paint` puts it on the canvas."""

    z: float
    height: float
    paint: Callable[[Canvas], None]


def person(rng: np.random.Generator, x: float, z: float) -> Thing:
    """A pedestrian."""
    figure = shapes.person(rng)
    mirror = np.array((rng.choice((-1, 1)), 1))

    def draw(canvas: Canvas) -> None:
        _shadow(canvas, x, z, 0.35, 0.3)
        _flat(canvas, [(points * mirror, color) for points, color in figure], x, z, PERSON)

    return Thing(z, 1.7, draw)


def pole(rng: np.random.Generator, x: float, z: float, with_sign: bool) -> Thing:
    """A mast as thick as those of trams and big lamps; it may carry traffic signs."""
    half, tall = rng.uniform(0.28, 0.42), rng.uniform(5.0, 9.0)
    color = _STEEL[rng.integers(len(_STEEL))] * rng.uniform(0.85, 1.15)
    mast = [
        (shapes.rectangle(-half, 0, half, tall), color),
        (shapes.rectangle(-half, 0, -0.2 * half, tall), color * 1.25),
    ]
    panels: list[tuple[float, shapes.Figure]] = []
    if with_sign:
        high = rng.uniform(2.4, 3.2)
        for _ in range(1 + (rng.random() < 0.25)):
            side = rng.uniform(1.3, 2.0)
            panels.append((high, shapes.sign(rng, side)))
            high += side + 0.1
    elif rng.random() < 0.5:
        arm = rng.choice((-1, 1)) * rng.uniform(1.0, 2.5)
        beam = shapes.rectangle(min(0, arm), tall - 0.18, max(0, arm), tall + 0.12)
        mast.append((beam, color * 0.9))

    def draw(canvas: Canvas) -> None:
        _shadow(canvas, x, z, half * 1.6, 0.3)
        _flat(canvas, mast, x, z, POLE)
        for high, panel in panels:
            raised = [(points + np.array((0, high)), color) for points, color in panel]
            _flat(canvas, raised, x, z, TRAFFIC_SIGN)

    return Thing(z, tall, draw)


def tree(rng: np.random.Generator, x: float, z: float, noise: np.ndarray) -> Thing:
    """A trunk and a crown; both are vegetation."""
    tall, half = rng.uniform(4.0, 7.0), rng.uniform(0.14, 0.3)
    spread = rng.uniform(1.4, 2.2)
    leaves = green(rng)
    bark = np.float32((78, 66, 56)) * rng.uniform(0.7, 1.3)
    count = 13
    offsets = rng.normal(0, (spread * 0.55, 0.12 * tall), (count, 2))
    radii = rng.uniform(0.5, 0.9, count) * spread

    def draw(canvas: Canvas) -> None:
        _shadow(canvas, x, z, spread * 0.8, 0.35)
        trunk = shapes.rectangle(-half, 0, half, 0.7 * tall)
        _flat(canvas, [(trunk, bark)], x, z, VEGETATION)
        scale = canvas.camera.px_per_m(z)
        center = canvas.camera.project(np.array([(x, 0.72 * tall, z)]))[0]
        discs = np.concatenate((center + offsets * scale, radii[:, None] * scale), 1)
        canvas.foliage(discs, leaves, noise, z, VEGETATION)

    return Thing(z, tall, draw)


def bin_(rng: np.random.Generator, x: float, z: float) -> Thing:
    """A bin or a box, which Cityscapes labels static: ignored in training and scores."""
    half, tall, color = rng.uniform(0.25, 0.5), rng.uniform(0.8, 1.3), paint(rng, 0.5)

    def draw(canvas: Canvas) -> None:
        _shadow(canvas, x, z, half, half)
        _flat(canvas, [(shapes.rectangle(-half, 0, half, tall), color)], x, z, STATIC)

    return Thing(z, tall, draw)


def _flat(canvas: Canvas, figure: shapes.Figure, x: float, z: float, label: int) -> None:
    """A figure that faces the camera, standing at (x, z)."""
    scale = canvas.camera.px_per_m(z)
    foot = canvas.camera.project(np.array([(x, 0, z)]))[0]
    for points, color in figure:
        canvas.polygon(foot + points * (scale, -scale), color, label, z)


def _shadow(canvas: Canvas, x: float, z: float, reach: float, depth: float) -> None:
    turn = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    spots = np.stack((x + reach * np.cos(turn), np.zeros(12), z + depth * np.sin(turn)), 1)
    canvas.shade(canvas.camera.project(spots), 0.6)
