"""One street scene: what stands where, in metres, and the lens that takes its picture."""

from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np

from segtrain.desk.synthetic import paint
from segtrain.desk.synthetic.canvas import Camera, Canvas, Rng
from segtrain.desk.synthetic.ground import paint_ground, paint_sky, plan_ground

_FAR_M = 70.0
_WITH_INSTANCES = (paint.person, paint.car, paint.bus)


class Thing(NamedTuple):
    """A painter of `segtrain.desk.synthetic.paint`, a place, and what else the painter takes."""

    painter: Callable[..., None]
    x: float
    z: float
    options: tuple[float, ...] = ()


class Scene(NamedTuple):
    """An image (H, W, 3) uint8 RGB, its label ids (H, W) uint8 and its instances (H, W) uint16.

    instances: 1000 * label id + number for people and vehicles, elsewhere the label id.
    """

    image: np.ndarray
    label: np.ndarray
    instances: np.ndarray


def draw_scene(rng: Rng, size: tuple[int, int]) -> Scene:
    """A scene of `size` = (H, W)."""
    height, width = size
    camera = Camera(
        size=size,
        # The shorter of the two, so that tall pictures do not become keyholes.
        focal_px=min(width, 2 * height) * rng.uniform(0.74, 0.86),
        center_x=width * rng.uniform(0.47, 0.53),
        horizon_y=height * rng.uniform(0.41, 0.44),
        height_m=rng.uniform(2.0, 2.2),
    )
    air = np.float32((206, 214, 222)) + rng.uniform(-22, 14)
    canvas = Canvas(camera, air, clear_m=rng.uniform(80, 500))
    ground = plan_ground(rng)
    backdrop, things = [], _on_road(rng, ground.left, ground.right)
    for side, kerb in ((-1, ground.left), (1, ground.right)):
        backdrop += _plots(rng, side, ground.edges[0 if side < 0 else -1])
        things += _on_pavement(rng, side, kerb)
    paint_sky(canvas, rng, air)
    paint_ground(canvas, rng, ground)
    # Far things first: near ones are painted over them. The backdrop is behind all that stands on
    # the street.
    for row in (backdrop, things):
        for number, thing in enumerate(sorted(row, key=lambda thing: -thing.z)):
            canvas.instance = number if thing.painter in _WITH_INSTANCES else None
            thing.painter(canvas, rng, thing.x, thing.z, *thing.options)
    # The ground is painted without polygons, into the label alone; it has no instances.
    single = canvas.instances // 1000 == canvas.label
    instances = np.where(single, canvas.instances, canvas.label)
    return Scene(_lens(rng, canvas.image), canvas.label, instances)


def _plots(rng: Rng, side: int, front: float) -> list[Thing]:
    """Houses and bushes along one side of the street, beyond x = `front`."""
    # One house behind all others closes the street.
    skyline = Thing(paint.building, side * rng.uniform(0, 12), 90.0, (10.0, rng.uniform(6, 22)))
    things = [skyline]
    z, green_share = rng.uniform(-5, 1), rng.choice((0.1, 0.3))
    while z < _FAR_M:
        length = rng.uniform(7, 26)
        if rng.random() < green_share:
            for bush_z in np.arange(max(z, 4.0), z + length, rng.uniform(3, 5)):
                things.append(Thing(paint.bush, front + side * rng.uniform(0.5, 7), bush_z))
        else:
            wall = front + side * rng.choice((0.0, rng.uniform(0, 3)))
            things.append(Thing(paint.building, wall, z, (length, rng.uniform(4.5, 15))))
        z += length
    return things


def _on_pavement(rng: Rng, side: int, kerb: float) -> list[Thing]:
    """Trees, poles, people and a bin on one side of the road."""
    things = []
    for z in _row(rng, 4, 14, 7):
        things.append(Thing(paint.pole, kerb + side * rng.uniform(0.3, 0.9), z))
    for z in _row(rng, 5, 40, 13):
        if rng.random() < 0.28:
            things.append(Thing(paint.tree, kerb + side * rng.uniform(0.8, 1.6), z))
    for z in rng.uniform(2.6, 6.0, rng.poisson(4.5)):
        things.append(Thing(paint.person, kerb + side * rng.uniform(0.4, 4.0), z))
    if rng.random() < 0.25:
        things.append(Thing(paint.litter_bin, kerb + side * rng.uniform(0.8, 3), rng.uniform(5, 9)))
    return things


def _on_road(rng: Rng, left: float, right: float) -> list[Thing]:
    """On each side parked cars or one vehicle that drives; now and then one across, and people."""
    people = rng.uniform((left, 3.2), (right, 6.0), (rng.poisson(0.4), 2))
    things = [Thing(paint.person, x, z) for x, z in people]
    for kerb, inwards, heading in ((left, 1, np.pi), (right, -1, 0.0)):
        kind = rng.random()
        if kind < 0.25:
            for z in _row(rng, 6.5, 14, 6.5):
                things.append(Thing(paint.car, kerb + inwards * 1.05, z, (heading,)))
        elif kind < 0.85:
            painter, near, far = (paint.bus, 11, 28) if kind < 0.45 else (paint.car, 7, 14)
            lane, turned = kerb + inwards * (right - left) / 4, heading + rng.normal(0, 0.05)
            things.append(Thing(painter, lane, rng.uniform(near, far), (turned,)))
    if rng.random() < 0.25:
        painter = paint.bus if rng.random() < 0.5 else paint.car
        turned = rng.choice((-1, 1)) * np.pi / 2 + rng.normal(0, 0.1)
        things.append(Thing(painter, rng.uniform(left, right), rng.uniform(10, 20), (turned,)))
    return things


def _row(rng: Rng, first: float, last: float, step: float) -> np.ndarray:
    """Distances of things that stand `step` apart."""
    return np.arange(first + rng.uniform(0, step), last, step)


def _lens(rng: Rng, image: np.ndarray) -> np.ndarray:
    """Exposure, colour cast, contrast, blur and noise of a cheap camera; uint8."""
    height, width = image.shape[:2]
    cast = rng.uniform(0.85, 1.15) * (1 + rng.normal(0, 0.03, 3)).astype(np.float32)
    contrast = rng.uniform(0.85, 1.15)
    sigma = rng.uniform(0.3, 0.9) * max(height / 256, 0.5)
    image = cv2.GaussianBlur(image.astype(np.float32), (0, 0), sigma)
    image = (118 + (image - 118) * contrast) * cast
    image += rng.standard_normal((height, width, 1), dtype=np.float32) * rng.uniform(1, 4)
    return image.clip(0, 255).astype(np.uint8)
