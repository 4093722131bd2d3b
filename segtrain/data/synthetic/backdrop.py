"""Paints what stands behind and beside the street: sky, skyline, buildings and parks."""

import cv2
import numpy as np

from segtrain.data.synthetic import surfaces
from segtrain.data.synthetic.camera import Camera, Canvas
from segtrain.data.synthetic.ids import BUILDING, VEGETATION
from segtrain.data.synthetic.palette import green, masonry
from segtrain.data.synthetic.street import FAR_M, Plot, Street


def paint_sky(canvas: Canvas, heaven: np.ndarray) -> None:
    """The sky over the whole image; the ground and all else covers its lower part."""
    top = heaven[: canvas.camera.size[0]]
    canvas.image[: len(top)] = top
    canvas.image[len(top) :] = top[-1:]


def paint_skyline(canvas: Canvas, rng: np.random.Generator, noise: np.ndarray, sky: int) -> None:
    """Distant woods and houses along the horizon."""
    canvas.label[:] = sky
    camera = canvas.camera
    width = camera.size[1]
    unit = camera.px_per_m(FAR_M)
    for _ in range(rng.integers(2, 6)):
        left, wide = rng.uniform(-0.1, 0.95) * width, rng.uniform(0.05, 0.3) * width
        tall = rng.uniform(5, 22) * unit
        if rng.random() < 0.5:
            block = [(left, -tall), (left + wide, -tall), (left + wide, 4), (left, 4)]
            canvas.polygon(np.add(block, (0, camera.horizon_y)), masonry(rng), BUILDING, FAR_M)
        else:
            x = left + np.linspace(0, wide, 8)
            discs = np.stack(
                (x, np.full(8, camera.horizon_y), rng.uniform(0.4, 1, 8) * tall * 0.6), 1
            )
            canvas.foliage(discs, green(rng), noise, FAR_M, VEGETATION)


def paint_plots(
    canvas: Canvas,
    street: Street,
    rng: np.random.Generator,
    *,
    heaven: np.ndarray,
    noise: np.ndarray,
) -> None:
    """Buildings, and hedges and trees where there are none, from far to near."""
    for plot in sorted(street.plots, key=lambda plot: -plot.start):
        if plot.height:
            _building(canvas, plot, street, rng, heaven)
        else:
            _park(canvas, plot, rng, noise)


def _building(
    canvas: Canvas, plot: Plot, street: Street, rng: np.random.Generator, heaven: np.ndarray
) -> None:
    """The wall along the street and the end wall that faces the camera."""
    camera = canvas.camera
    # No finer than the nearest visible part needs: the rest is smoothed away by the mapping anyway.
    texels_per_m = min(camera.px_per_m(max(plot.start, 4.0)) * 0.6, 12.0)
    color = green(rng) if rng.random() < 0.05 else masonry(rng)
    shadow = 0.72 if plot.side == street.sun else 1.0
    ends = ((plot.front, plot.start), (plot.front, plot.stop))
    behind = ((plot.front + plot.side * 14, plot.start), (plot.front, plot.start))
    walls = [(ends, shadow)] if plot.covered else [(behind, 0.88), (ends, shadow)]
    for wall, light in walls:
        left, right = wall if _is_left(camera, wall) else wall[::-1]
        tops = [(left[0], plot.height, left[1]), (right[0], plot.height, right[1])]
        feet = [(right[0], 0, right[1]), (left[0], 0, left[1])]
        quad = camera.project(np.array([*tops, *feet]))
        if quad[1, 0] - quad[0, 0] < 2 or not canvas.sees(quad):
            continue
        length = float(np.hypot(left[0] - right[0], left[1] - right[1]))
        picture = surfaces.facade(
            rng,
            length,
            plot.height,
            texels_per_m=texels_per_m,
            heaven=heaven,
            wall=color,
        )
        picture = cv2.convertScaleAbs(picture, alpha=light)
        z = np.array((left[1], right[1]))
        canvas.texture(quad, picture, BUILDING, z)


def _is_left(camera: Camera, wall: tuple[tuple[float, float], tuple[float, float]]) -> bool:
    """Whether the first of two points (x, z) on the ground appears left of the second."""
    first, second = camera.project(np.array([(x, 0, z) for x, z in wall]))[:, 0]
    return bool(first < second)


def _park(canvas: Canvas, plot: Plot, rng: np.random.Generator, noise: np.ndarray) -> None:
    """A hedge or a row of bushes and trees, from far to near."""
    camera = canvas.camera
    leaves = green(rng)
    for z in np.arange(max(plot.stop, 5.0), max(plot.start, 4.0), -rng.uniform(4, 7)):
        x = plot.front + plot.side * rng.uniform(0.5, 7)
        tall = rng.uniform(0.8, 2.5) if rng.random() < 0.5 else rng.uniform(3, 8)
        count = 9
        spots = np.stack(
            (
                x + rng.normal(0, 0.35 * tall, count),
                rng.uniform(0.15, 0.85, count) * tall,
                np.full(count, z),
            ),
            1,
        )
        radius = rng.uniform(0.2, 0.38, (count, 1)) * tall * camera.px_per_m(z)
        discs = np.concatenate((camera.project(spots), radius), 1)
        canvas.foliage(discs, leaves * rng.uniform(0.85, 1.15), noise, z, VEGETATION)
