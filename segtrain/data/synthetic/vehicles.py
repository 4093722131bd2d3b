"""Cars and buses: a side view drawn out over the width, of which the faces in view are painted."""

from typing import NamedTuple

import numpy as np

from segtrain.data.synthetic import shapes, surfaces
from segtrain.data.synthetic.camera import Canvas
from segtrain.data.synthetic.ids import BUS, CAR
from segtrain.data.synthetic.palette import paint
from segtrain.data.synthetic.things import Thing

_RUBBER = np.float32((26, 26, 28))
# Side view of a car in units of (length, height): bumper, bonnet, windscreen, roof, rear window.
_CAR_SIDE = np.array(
    [
        *((0.5, 0.18), (0.5, 0.5), (0.46, 0.6), (0.22, 0.66), (0.08, 1.0)),
        *((-0.3, 1.0), (-0.44, 0.66), (-0.5, 0.6), (-0.5, 0.18)),
    ]
)
_CAR_GLASS_EDGES = (3, 5)
_CAR_SIDE_GLASS = np.array([(0.17, 0.69), (0.06, 0.95), (-0.28, 0.95), (-0.39, 0.69)])
_BUS_SIDE = np.array([(0.5, 0.1), (0.5, 1.0), (-0.5, 1.0), (-0.5, 0.1)])
_BUS_GLASS_EDGES = (0, 2)


class Pose(NamedTuple):
    """Where a vehicle stands (centre on the ground), its heading and its size in metres."""

    x: float
    z: float
    heading: float
    length: float
    width: float
    height: float

    def place(self, along: np.ndarray, up: np.ndarray, across: np.ndarray) -> np.ndarray:
        """Street points (N, 3) of points given along, above and across the vehicle."""
        sine, cosine = np.sin(self.heading), np.cos(self.heading)
        points = np.empty((len(along), 3))
        points[:, 0] = self.x + along * sine + across * cosine
        points[:, 1] = up
        points[:, 2] = self.z + along * cosine - across * sine
        return points


def car(rng: np.random.Generator, x: float, z: float, heading: float, heaven: np.ndarray) -> Thing:
    """A car; its glass mirrors the sky and its body may have the colour of the road or of walls."""
    pose = Pose(x, z, heading, rng.uniform(3.8, 4.8), rng.uniform(1.7, 1.9), rng.uniform(1.4, 1.75))
    body, shine = paint(rng, 0.3), _glass(rng, heaven)
    lamp = np.float32((180, 52, 44)) if np.cos(heading) > 0 else np.float32((232, 230, 214))

    def draw(canvas: Canvas) -> None:
        _vehicle_shadow(canvas, pose)
        _underbody(canvas, pose, CAR)
        seen = _prism(canvas, pose, _CAR_SIDE, body, shine, _CAR_GLASS_EDGES, CAR)
        if seen:
            points = pose.place(
                _CAR_SIDE_GLASS[:, 0] * pose.length,
                _CAR_SIDE_GLASS[:, 1] * pose.height,
                np.full(4, seen * pose.width / 2),
            )
            canvas.paint(canvas.camera.project(points), shine * 0.85)
        _wheels(canvas, pose, (-0.3, 0.31), 0.32, CAR, seen)
        _lamps(canvas, pose, lamp)

    return Thing(z, pose.height, draw)


def bus(rng: np.random.Generator, x: float, z: float, heading: float, heaven: np.ndarray) -> Thing:
    """A bus or tram, whose sides are made like the facades behind it."""
    pose = Pose(x, z, heading, rng.uniform(8, 13), rng.uniform(2.4, 2.6), rng.uniform(2.9, 3.9))
    body, shine = paint(rng, 0.25), _glass(rng, heaven)
    flank = surfaces.facade(
        rng, pose.length, pose.height, texels_per_m=9.0, heaven=heaven, wall=body
    )

    def draw(canvas: Canvas) -> None:
        _vehicle_shadow(canvas, pose)
        _underbody(canvas, pose, BUS)
        seen = _prism(canvas, pose, _BUS_SIDE, body, shine, _BUS_GLASS_EDGES, BUS)
        if seen:
            along = np.array((-0.5, 0.5, 0.5, -0.5)) * pose.length
            up = np.array((1.0, 1.0, 0.1, 0.1)) * pose.height
            points = pose.place(along, up, np.full(4, seen * pose.width / 2))
            quad = canvas.camera.project(points)
            if quad[0, 0] > quad[1, 0]:
                quad, points = quad[[1, 0, 3, 2]], points[[1, 0, 3, 2]]
            if abs(quad[0, 0] - quad[1, 0]) > 2 and points[:, 2].min() > 1:
                canvas.texture(quad, flank, BUS, points[:2, 2])
        _wheels(canvas, pose, (-0.32, 0.3), 0.48, BUS, seen)
        _lamps(canvas, pose, np.float32((170, 60, 48)))

    return Thing(z, pose.height, draw)


def _prism(
    canvas: Canvas,
    pose: Pose,
    profile: np.ndarray,
    body: np.ndarray,
    glass: np.ndarray,
    glass_edges: tuple[int, ...],
    label: int,
) -> int:
    """A profile (N, 2) drawn out over the width; returns the flank in view, -1 or 1, 0 for none."""
    camera = canvas.camera
    count = len(profile)
    along, up = profile[:, 0] * pose.length, profile[:, 1] * pose.height
    sides = {
        s: camera.project(pose.place(along, up, np.full(count, s * pose.width / 2)))
        for s in (-1, 1)
    }
    for i in range(count - 1):
        j = i + 1
        quad = np.stack((sides[-1][i], sides[1][i], sides[1][j], sides[-1][j]))
        if _area(quad) <= 0:
            continue
        flat = abs(profile[i, 1] - profile[j, 1]) < 0.1
        canvas.polygon(quad, body * (1.2 if flat else 0.92), label, pose.z)
        if i in glass_edges:
            middle = quad.mean(0)
            pane = middle + (quad - middle) * 0.84
            if label == BUS:
                pane[:, 1] = np.minimum(pane[:, 1], middle[1] + 0.1 * np.ptp(quad[:, 1]))
            canvas.paint(pane, glass)
    for side, outline in sides.items():
        if _area(outline) * side < 0:
            canvas.polygon(outline, body * 0.8, label, pose.z)
            return side
    return 0


def _underbody(canvas: Canvas, pose: Pose, label: int) -> None:
    """The dark between body, wheels and road."""
    inner = pose._replace(length=pose.length * 0.9, width=pose.width * 0.94, height=0.5)
    _prism(canvas, inner, _BUS_SIDE - (0, 0.1), _RUBBER, _RUBBER, (), label)


def _area(points: np.ndarray) -> float:
    """Twice the signed area of a polygon; its sign tells which way its corners run."""
    x, y = points[:, 0], points[:, 1]
    around = x[:-1] @ y[1:] - y[:-1] @ x[1:]
    return float(around + x[-1] * y[0] - y[-1] * x[0])


def _wheels(
    canvas: Canvas, pose: Pose, places: tuple[float, ...], radius: float, label: int, side: int
) -> None:
    """Wheels on the flank that is seen, if one is."""
    if not side:
        return
    turn = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    for place in places:
        along = place * pose.length + radius * np.cos(turn)
        rim = pose.place(along, radius + radius * np.sin(turn), np.full(12, side * pose.width / 2))
        if rim[:, 2].min() > 1:
            rim_px = canvas.camera.project(rim)
            canvas.polygon(rim_px, _RUBBER, label, pose.z)
            middle = rim_px.mean(0)
            canvas.paint(middle + 0.55 * (rim_px - middle), 4 * _RUBBER)


def _lamps(canvas: Canvas, pose: Pose, color: np.ndarray) -> None:
    """Two lamps on the end that faces the camera."""
    end = -0.5 if np.cos(pose.heading) > 0 else 0.5
    if abs(np.cos(pose.heading)) < 0.5:
        return
    for side in (-0.38, 0.38):
        spot = pose.place(
            np.array([end * pose.length]),
            np.array([0.42 * min(pose.height, 2)]),
            np.array([side * pose.width]),
        )
        if spot[0, 2] > 1:
            x, y = canvas.camera.project(spot)[0]
            radius = 0.11 * canvas.camera.px_per_m(spot[0, 2])
            canvas.paint(shapes.ellipse(x, y, radius * 1.3, radius), color)


def _glass(rng: np.random.Generator, heaven: np.ndarray) -> np.ndarray:
    return heaven[rng.integers(len(heaven)), rng.integers(heaven.shape[1])] * rng.uniform(0.3, 0.95)


def _vehicle_shadow(canvas: Canvas, pose: Pose) -> None:
    along = np.array((-0.52, 0.52, 0.52, -0.52)) * pose.length
    across = np.array((-0.58, -0.58, 0.58, 0.58)) * pose.width
    canvas.shade(canvas.camera.project(pose.place(along, np.zeros(4), across)), 0.45)
