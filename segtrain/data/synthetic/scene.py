"""One street scene, a pure function of (seed, split, index): the order of painting and the lens."""

import cv2
import numpy as np

from segtrain.data.synthetic import backdrop, surfaces, things, vehicles
from segtrain.data.synthetic.camera import Camera, Canvas
from segtrain.data.synthetic.ground import paint_ground
from segtrain.data.synthetic.ids import EGO_VEHICLE, OUT_OF_ROI, SKY
from segtrain.data.synthetic.palette import paint
from segtrain.data.synthetic.street import Street, draw_street

_ASPECT = 2.0
_LEAST_HEIGHT = 0.2


def draw_scene(rng: np.random.Generator, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """An image (H, W, 3) uint8 RGB and its label ids (H, W) uint8, of `size` = (H, W)."""
    camera = _camera(rng, size)
    canvas = Canvas(camera)
    noise = surfaces.noise(rng, size, tuple(size[0] / n for n in (110, 60, 24, 9)))
    sky_rows = int(np.clip(camera.horizon_y + 2, 4, size[0]))
    heaven = surfaces.sky(rng, (sky_rows, size[1]))
    street = draw_street(rng)
    backdrop.paint_sky(canvas, heaven)
    backdrop.paint_skyline(canvas, rng, noise, SKY)
    paint_ground(canvas, street, rng)
    backdrop.paint_plots(canvas, street, rng, heaven=heaven, noise=noise)
    for thing in sorted(_things(rng, street, heaven, noise), key=lambda thing: -thing.z):
        # What is lower than a few pixels is not drawn: nobody could label it.
        if thing.height * camera.px_per_m(thing.z) > _LEAST_HEIGHT * size[0]:
            thing.paint(canvas)
    if rng.random() < 0.25:
        _bonnet(canvas, rng)
    image = _lens(rng, _haze(rng, canvas, heaven))
    if rng.random() < 0.1:
        border = max(size[0] // 64, 1)
        image[-border:] = 0
        canvas.label[-border:] = OUT_OF_ROI
    return image, canvas.label


def _camera(rng: np.random.Generator, size: tuple[int, int]) -> Camera:
    height, width = size
    # The shorter of the two, so that tall crops do not become keyholes.
    span = min(width, height * _ASPECT)
    return Camera(
        size=size,
        focal_px=span * rng.uniform(0.74, 0.86),
        center_x=width * rng.uniform(0.47, 0.53),
        horizon_y=height * rng.uniform(0.41, 0.44),
        height_m=rng.uniform(2.0, 2.2),
        bend=rng.normal(0, 0.0012) if rng.random() < 0.3 else 0.0,
    )


def _things(
    rng: np.random.Generator, street: Street, heaven: np.ndarray, noise: np.ndarray
) -> list[things.Thing]:
    """Everything that stands in the street, in no order."""
    found: list[things.Thing] = []
    for side, (near, far) in zip((-1, 1), street.walks, strict=True):
        kerb = street.left if side < 0 else street.right
        inner = near if side > 0 else far
        for z in _row(rng, 5, 40, 13):
            if rng.random() < 0.28:
                found.append(things.tree(rng, kerb + side * rng.uniform(0.8, 1.6), z, noise))
        for z in _row(rng, 4.0, 11, 7):
            with_sign = rng.random() < 0.55
            found.append(things.pole(rng, kerb + side * rng.uniform(0.3, 0.9), z, with_sign))
        for z in rng.uniform(2.6, 4.2, rng.poisson(4.5)):
            found.append(things.person(rng, inner + side * rng.uniform(0.2, 2.2), z))
        if rng.random() < 0.25:
            found.append(things.bin_(rng, rng.uniform(near, far), rng.uniform(4, 10)))
        if rng.random() < 0.25:
            found += _parked(rng, street, side, heaven)
    for z in rng.uniform(3.2, 4.8, rng.poisson(0.4)):
        found.append(things.person(rng, rng.uniform(street.left, street.right), z))
    return found + _traffic(rng, street, heaven)


def _parked(
    rng: np.random.Generator, street: Street, side: int, heaven: np.ndarray
) -> list[things.Thing]:
    """Cars along one kerb."""
    kerb = street.left if side < 0 else street.right
    heading = 0.0 if side > 0 else np.pi
    return [
        vehicles.car(
            rng, kerb - side * rng.uniform(0.95, 1.15), z, heading + rng.normal(0, 0.03), heaven
        )
        for z in _row(rng, 6.5, 40, 6.5)
        if rng.random() < 0.75
    ]


def _traffic(rng: np.random.Generator, street: Street, heaven: np.ndarray) -> list[things.Thing]:
    """Vehicles on the road: ahead, oncoming and across."""
    found: list[things.Thing] = []
    middle = (street.left + street.right) / 2
    for lane, heading in (((middle + street.right) / 2, 0.0), ((middle + street.left) / 2, np.pi)):
        z = rng.uniform(7, 16)
        while z < 50:
            turn = heading + rng.normal(0, 0.05)
            if rng.random() < 0.28:
                found.append(vehicles.bus(rng, lane, z + 5, turn, heaven))
                z += 16
            else:
                found.append(vehicles.car(rng, lane + rng.normal(0, 0.2), z, turn, heaven))
            z += 6 + rng.exponential(24)
    if rng.random() < 0.3:
        z = street.crossing[0] + 3 if street.crossing[0] < 100 else rng.uniform(9, 26)
        kind = vehicles.bus if rng.random() < 0.45 else vehicles.car
        x = rng.uniform(street.left, street.right)
        found.append(kind(rng, x, z, rng.choice((-1, 1)) * np.pi / 2 + rng.normal(0, 0.1), heaven))
    return found


def _row(rng: np.random.Generator, first: float, last: float, step: float) -> np.ndarray:
    """Distances of a row of things, about `step` apart."""
    places = np.arange(first + rng.uniform(0, step), last, step)
    return places + rng.uniform(-0.15, 0.15, len(places)) * step


def _bonnet(canvas: Canvas, rng: np.random.Generator) -> None:
    """The car that carries the camera, at the bottom of the image."""
    height, width = canvas.camera.size
    turn = np.linspace(np.pi, 2 * np.pi, 24)
    tall = rng.uniform(0.03, 0.09) * height
    x = width * (0.5 + 0.6 * np.cos(turn))
    canvas.polygon(
        np.stack((x, height + tall * np.sin(turn)), 1), paint(rng, 0.5), EGO_VEHICLE, 1.5
    )


def _haze(rng: np.random.Generator, canvas: Canvas, heaven: np.ndarray) -> np.ndarray:
    """The image (H, W, 3) float32 with the colour of the horizon mixed in by distance."""
    reach_m = rng.choice((rng.uniform(80, 200), rng.uniform(200, 900)))
    clear = np.exp(-1 / (reach_m * np.maximum(canvas.nearness, 1e-4)))
    clear[canvas.label == SKY] = 1
    air = heaven[-1].mean(0, dtype=np.float32)
    return air + (canvas.image - air) * clear[..., None].astype(np.float32)


def _lens(rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
    """Exposure, contrast, colour cast, vignette, blur and noise of a cheap camera; uint8."""
    height, width = image.shape[:2]
    cast = rng.uniform(0.85, 1.15) * (1 + rng.normal(0, 0.03, 3)).astype(np.float32)
    contrast = rng.uniform(0.85, 1.15)
    rows = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    columns = np.linspace(-1, 1, width, dtype=np.float32)[None]
    vignette = 1 - rng.uniform(0, 0.2) * (rows**2 + columns**2)
    sigma = rng.uniform(0.3, 0.9) * max(height / 256, 0.5)
    image = cv2.GaussianBlur(image, (0, 0), sigma)
    gain = cast * np.float32(contrast) * vignette[..., None].astype(np.float32)
    offset = cast * np.float32(118 * (1 - contrast))
    grain = rng.standard_normal((height, width), dtype=np.float32) * np.float32(rng.uniform(1, 4))
    shape = (height // 2, width // 2, 3)
    blotch = rng.standard_normal(shape, dtype=np.float32) * np.float32(rng.uniform(0.5, 3))
    image = image * gain + offset + grain[..., None]
    image += cv2.resize(blotch, (width, height), interpolation=cv2.INTER_NEAREST)
    return np.clip(image, 0, 255).astype(np.uint8)
