"""The plan of a street: its strips of ground, one crossing, and the plots along it."""

from typing import NamedTuple

import numpy as np

from segtrain.data.synthetic.ids import ROAD, SIDEWALK, TERRAIN
from segtrain.data.synthetic.palette import green, material, paving

FAR_M = 64.0
_KERB_M = 0.18


class Plot(NamedTuple):
    """A stretch of one side of the street: a building or, with height 0, a park.

    covered: the building before it hides its end wall.
    """

    side: int
    start: float
    stop: float
    front: float
    height: float
    covered: bool


class Street(NamedTuple):
    """A cross-section that holds along the whole street, one crossing, and the plots on both sides.

    edges: ascending x of the borders between strips; strips: label and colour of each strip, one
    more than edges. left, right: x of the kerbs. sun: side of the shadow-throwing light, -1 or 1.
    """

    edges: np.ndarray
    labels: np.ndarray
    colors: np.ndarray
    left: float
    right: float
    walks: tuple[tuple[float, float], tuple[float, float]]
    crossing: tuple[float, float]
    plots: tuple[Plot, ...]
    sun: int


def draw_street(rng: np.random.Generator) -> Street:
    """A random street."""
    road = paving(rng)
    # Some pavements are made of what the road is: only the kerb and the place differ.
    walk = np.clip(road + rng.normal(0, 4), 20, 220) if rng.random() < 0.1 else material(rng)
    kerb = walk + rng.uniform(24, 50)
    grass = green(rng) * 1.2
    left, right = -rng.uniform(2.8, 3.2), rng.uniform(2.4, 2.8)
    edges, labels, colors, walks, fronts = [left, right], [ROAD], [road], [], []
    for side, edge in ((-1, left), (1, right)):
        strips = [(_KERB_M, SIDEWALK, kerb)]
        wide = rng.uniform(3.0, 5.0)
        if rng.random() < 0.3:
            strips.append((rng.uniform(2.6, 4.0), TERRAIN, grass))
        strips.append((wide, SIDEWALK, walk))
        if rng.random() < 0.2:
            strips.append((rng.uniform(3.0, 6.0), TERRAIN, grass))
        out = edge
        for width, label, color in strips:
            if label == SIDEWALK and width == wide:
                walks.append(tuple(sorted((out, out + side * wide))))
            out += side * width
            edges.insert(0, out) if side < 0 else edges.append(out)
            labels.insert(0, label) if side < 0 else labels.append(label)
            colors.insert(0, color) if side < 0 else colors.append(color)
        fronts.append(out)
    outside = (TERRAIN, grass) if rng.random() < 0.85 else (SIDEWALK, walk)
    start = rng.uniform(12, 60)
    crossing = (start, start + rng.uniform(6, 11)) if rng.random() < 0.3 else (900.0, 901.0)
    plots = (*_plots(rng, -1, fronts[0], crossing), *_plots(rng, 1, fronts[1], crossing))
    return Street(
        np.float32(edges),
        np.uint8([outside[0], *labels, outside[0]]),
        np.float32([outside[1], *colors, outside[1]]),
        left,
        right,
        (walks[0], walks[1]),
        crossing,
        plots,
        int(rng.choice((-1, 1))),
    )


def _plots(
    rng: np.random.Generator, side: int, front: float, crossing: tuple[float, float]
) -> list[Plot]:
    plots: list[Plot] = []
    z = 1.0 + rng.uniform(-6, 0)
    green_share = rng.choice((0.1, 0.3))
    while z < FAR_M:
        stop = z + rng.uniform(7, 26)
        if z < crossing[0] < stop:
            stop = crossing[0]
        elif crossing[0] <= z < crossing[1]:
            z = crossing[1]
            continue
        height = 0.0 if rng.random() < green_share else rng.uniform(4.5, 15)
        setback = rng.choice((0.0, rng.uniform(0, 3)))
        wall = front + side * setback
        covered = (
            bool(plots)
            and plots[-1].stop == z
            and plots[-1].height >= height
            and abs(plots[-1].front) <= abs(wall)
        )
        if stop > 1.5:
            plots.append(Plot(side, max(z, 1.0), stop, wall, height, covered))
        z = stop
    return plots
