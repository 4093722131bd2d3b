"""Flat figures in metres: coloured polygons with x to the right, y up and the feet at (0, 0)."""

import numpy as np

from segtrain.data.synthetic.palette import paint

# A figure is a list of (corners (N, 2) in metres, colour (3,)), painted in this order.
Figure = list[tuple[np.ndarray, np.ndarray]]

_SKIN = np.float32([(206, 164, 138), (160, 112, 84), (104, 72, 54), (224, 186, 160)])
_CIRCLE = np.linspace(0, 2 * np.pi, 20, endpoint=False)


def ellipse(x: float, y: float, radius_x: float, radius_y: float) -> np.ndarray:
    """The outline (20, 2) of an ellipse."""
    return np.stack((x + radius_x * np.cos(_CIRCLE), y + radius_y * np.sin(_CIRCLE)), 1)


def rectangle(left: float, bottom: float, right: float, top: float) -> np.ndarray:
    """Four corners (4, 2)."""
    return np.array([(left, bottom), (right, bottom), (right, top), (left, top)], dtype=np.float64)


def person(rng: np.random.Generator) -> Figure:
    """Someone standing or walking, 1.55 to 1.95 m tall."""
    tall = rng.uniform(1.55, 1.95)
    broad = rng.uniform(0.28, 0.4)
    stride = rng.uniform(0.0, 0.17)
    trousers, coat = paint(rng, 0.3) * 0.7, paint(rng, 0.1)
    skin, hair = _SKIN[rng.integers(len(_SKIN))], paint(rng, 0.2) * 0.5
    hip, neck = 0.47 * tall, 0.83 * tall
    long_coat = hip * rng.uniform(0.5, 1.0)
    leg = 0.085
    figure: Figure = []
    for side in (-1, 1):
        foot = side * (0.07 + stride)
        knee = side * (0.08 + 0.45 * stride)
        outline = [(knee - leg, hip), (foot - leg, 0), (foot + leg + 0.05, 0), (knee + leg, hip)]
        figure.append((np.array(outline), trousers))
    torso = [(-0.8, long_coat), (0.8, long_coat), (1.0, neck - 0.05), (0.5, neck), (-0.5, neck)]
    torso.append((-1.0, neck - 0.05))
    for side in (-1, 1):
        swing = side * (broad + rng.uniform(0.0, 0.18))
        arm = [(side * broad * 0.8, neck - 0.04), (swing, hip * 1.02), (swing - side * 0.12, hip)]
        figure.append((np.array([*arm, (side * broad * 0.5, neck - 0.2)]), coat * 0.85))
    figure.append((np.array(torso) * (broad, 1), coat))
    figure.append((ellipse(0, 0.92 * tall, 0.105, 0.085 * tall), skin))
    figure.append((ellipse(0, 0.972 * tall, 0.1, 0.035 * tall), hair))
    if rng.random() < 0.3:
        side = rng.choice((-1, 1)) * broad * 1.1
        figure.append((rectangle(side - 0.16, 0.5 * hip, side + 0.16, 1.1 * hip), paint(rng, 0.4)))
    return figure


def car_rear(rng: np.random.Generator) -> Figure:
    """A car seen from behind, flat: for posters."""
    body, glass = paint(rng, 0.5), np.float32((70, 80, 92))
    wide, tall = rng.uniform(0.8, 0.95), rng.uniform(1.4, 1.7)
    cabin = np.array([(-0.95, 0.55), (0.95, 0.55), (0.7, 1.0), (-0.7, 1.0)]) * (wide, tall)
    screen = np.array([(-0.8, 0.62), (0.8, 0.62), (0.62, 0.92), (-0.62, 0.92)]) * (wide, tall)
    figure = [
        (rectangle(-0.85 * wide, 0, -0.5 * wide, 0.35), np.float32((28, 28, 30))),
        (rectangle(0.5 * wide, 0, 0.85 * wide, 0.35), np.float32((28, 28, 30))),
        (rectangle(-wide, 0.25, wide, 0.6 * tall), body),
        (cabin, body * 0.9),
        (screen, glass),
    ]
    for side in (-0.8, 0.8):
        figure.append((ellipse(side * wide, 0.45 * tall, 0.12, 0.1), np.float32((190, 50, 40))))
    return figure


def sign(rng: np.random.Generator, side_m: float) -> Figure:
    """The panel of a traffic sign around (0, 0): round, triangular or rectangular."""
    colors = np.float32(
        [
            (178, 44, 42),
            (36, 78, 150),
            (222, 222, 216),
            (40, 112, 76),
            (206, 172, 60),
            (128, 130, 132),
        ]
    )
    outer, inner = colors[rng.permutation(len(colors))[:2]] * rng.uniform(0.75, 1.05)
    half = side_m / 2
    kind = rng.integers(4)
    if kind == 0:
        outline = ellipse(0, 0, half, half)
    elif kind == 1:
        outline = np.array([(-1.1, -0.9), (1.1, -0.9), (0, 1.05)]) * half
    else:
        wide, tall = (half, half) if kind == 2 else (half * 1.5, half * 0.85)
        outline = rectangle(-wide, -tall, wide, tall)
    figure = [(outline, outer), (outline * 0.78, inner)]
    if rng.random() < 0.6:
        bar = rectangle(-0.4 * half, -0.12 * half, 0.4 * half, 0.12 * half)
        figure.append((bar @ _turn(rng.uniform(0, np.pi)), outer * 0.8))
    return figure


def _turn(angle: float) -> np.ndarray:
    return np.array([(np.cos(angle), np.sin(angle)), (-np.sin(angle), np.cos(angle))])
