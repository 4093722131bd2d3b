"""Noise, skies and facades: pictures that are mapped onto the planes of a scene."""

import cv2
import numpy as np

from segtrain.data.synthetic import shapes
from segtrain.data.synthetic.palette import material, paint

# Coarser walls are too far away for their posters to show.
_POSTER_TEXELS_PER_M = 5.0


def noise(rng: np.random.Generator, size: tuple[int, int], cells: tuple[float, ...]) -> np.ndarray:
    """Smooth noise (H, W) float32 in about -1..1: one octave for each cell size in pixels."""
    height, width = size
    total = np.zeros(size, np.float32)
    for cell in cells:
        shape = (max(round(height / cell), 2), max(round(width / cell), 2))
        grid = rng.random(shape, dtype=np.float32) * 2 - 1
        total += cv2.resize(grid, (width, height), interpolation=cv2.INTER_LINEAR)
    return total / len(cells) ** 0.5


def sky(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """A sky (H, W, 3) uint8, clear to overcast, whose last row is the horizon."""
    height = size[0]
    cloudy = rng.random()
    zenith = np.float32((92, 132, 188)) * (1 - cloudy) + np.float32((158, 162, 168)) * cloudy
    horizon = np.float32((206, 214, 222)) + rng.uniform(-22, 14)
    down = np.linspace(0, 1, height, dtype=np.float32)[:, None, None] ** rng.uniform(0.5, 1.5)
    base = zenith + (horizon - zenith) * down
    clouds = noise(rng, size, (height / 3, height / 6, height / 14))
    cover = np.clip(clouds * 1.3 + rng.uniform(-0.5, 0.4), 0, 1)[..., None] * rng.uniform(0.3, 0.9)
    white = np.float32((226, 228, 230)) + rng.uniform(-40, 12)
    return np.clip(base + (white - base) * cover, 0, 255).astype(np.uint8)


def facade(
    rng: np.random.Generator,
    width_m: float,
    height_m: float,
    *,
    texels_per_m: float,
    heaven: np.ndarray,
    wall: np.ndarray,
) -> np.ndarray:
    """A wall (h, w, 3) uint8 of colour `wall`: bare, with windows, or a mirror of `heaven`."""
    height, width = max(round(height_m * texels_per_m), 6), max(round(width_m * texels_per_m), 6)
    grain = noise(rng, (height, width), (2, 12))[..., None]
    picture = wall * (1 + rng.uniform(0.02, 0.07) * grain)
    style = rng.random()
    if style < 0.12:
        mirror = cv2.resize(heaven, (width, height)).astype(np.float32)
        picture = mirror * rng.uniform(0.72, 0.98)
        _joints(picture, rng, texels_per_m, wall * 0.6)
    elif style < 0.84:
        _windows(picture, rng, texels_per_m, heaven)
    if rng.random() < 0.4:
        _ground_floor(picture, rng, texels_per_m)
    picture = np.clip(picture, 0, 255).astype(np.uint8)
    for _ in range(rng.integers(0, 2) if texels_per_m > _POSTER_TEXELS_PER_M else 0):
        _poster(picture, rng, texels_per_m)
    return picture


def _windows(
    picture: np.ndarray, rng: np.random.Generator, texels_per_m: float, heaven: np.ndarray
) -> None:
    """Rows of windows, dark or reflecting the sky, each a little different."""
    floor, bay = rng.uniform(2.7, 3.6) * texels_per_m, rng.uniform(1.8, 4.5) * texels_per_m
    tall, wide = rng.uniform(0.4, 0.65) * floor, rng.uniform(0.35, 0.8) * bay
    glass = heaven[rng.integers(len(heaven)), rng.integers(heaven.shape[1])] * rng.uniform(
        0.35, 1.0
    )
    if rng.random() < 0.4:
        glass = np.float32((44, 48, 54)) * rng.uniform(0.7, 1.5)
    frame = picture[0, 0] * rng.choice([0.75, 1.2])
    tops = np.arange(0.25 * floor, picture.shape[0] - tall, floor)
    lefts = np.arange(0.2 * bay, picture.shape[1] - wide * 0.5, bay)
    gleam = rng.uniform(0.7, 1.25, (len(tops), len(lefts)))
    rows, row = _bands(tops, tall, picture.shape[0])
    columns, column = _bands(lefts, wide, picture.shape[1])
    picture[np.ix_(rows, columns)] = frame
    inside = np.ix_(rows[1:-1], columns[1:-1])
    # The window that each texel belongs to; where two meet, the frame stays between them.
    keep = (np.diff(row, append=-1)[1:-1] == 0)[:, None] & (np.diff(column, append=-1)[1:-1] == 0)
    panes = glass * gleam[np.ix_(row[1:-1], column[1:-1])][..., None]
    picture[inside] = np.where(keep[..., None], panes, picture[inside])


def _bands(starts: np.ndarray, length: float, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Texels covered by bands of one length, and the number of the band each belongs to."""
    spans = [np.arange(round(start), min(round(start + length), limit)) for start in starts]
    if not spans:
        return np.zeros(0, int), np.zeros(0, int)
    return np.concatenate(spans), np.repeat(np.arange(len(spans)), [len(span) for span in spans])


def _joints(
    picture: np.ndarray, rng: np.random.Generator, texels_per_m: float, color: np.ndarray
) -> None:
    """Thin lines between the panes of a glass front."""
    pane = max(round(rng.uniform(1.5, 4.0) * texels_per_m), 3)
    picture[::pane] = color
    picture[:, ::pane] = color


def _ground_floor(picture: np.ndarray, rng: np.random.Generator, texels_per_m: float) -> None:
    """A band of shop windows or a plinth of the material that pavements have."""
    rows = min(round(rng.uniform(0.8, 3.6) * texels_per_m), picture.shape[0] // 2)
    picture[-rows:] = material(rng) * rng.uniform(0.6, 1.0)
    if rows > 2 * texels_per_m:
        pane = max(round(rng.uniform(2.0, 4.0) * texels_per_m), 4)
        for left in range(pane // 6, picture.shape[1], pane):
            columns = slice(left, left + pane * 2 // 3)
            picture[-rows + 2 : -max(rows // 6, 1), columns] = np.float32(
                (70, 76, 84)
            ) * rng.uniform(0.5, 1.9)


def _poster(picture: np.ndarray, rng: np.random.Generator, texels_per_m: float) -> None:
    """A billboard or mural that shows a person or a car, and is building all the same."""
    height, width = picture.shape[:2]
    tall = rng.uniform(1.7, 3.2) * texels_per_m
    if tall + 2 > height or tall > width:
        return
    figure = shapes.person(rng) if rng.random() < 0.6 else shapes.car_rear(rng)
    left = rng.uniform(0.3 * tall, width - 0.6 * tall)
    foot = height - rng.uniform(0, min(1.5 * texels_per_m, height - tall))
    scale = 0.8 * tall / max(points[:, 1].max() for points, _ in figure)
    if rng.random() < 0.6:
        board = np.array([(-0.5, -0.02), (0.5, -0.02), (0.5, 1.0), (-0.5, 1.0)]) * tall
        _stamp(picture, board, left, foot, paint(rng, 0.5))
    for points, color in figure:
        _stamp(picture, points * scale, left, foot, color)


def _stamp(
    picture: np.ndarray, points: np.ndarray, left: float, foot: float, color: np.ndarray
) -> None:
    corners = np.stack((left + points[:, 0], foot - points[:, 1]), 1)
    fixed = np.round(corners * 16).astype(np.int32)
    cv2.fillPoly(picture, [fixed], np.clip(color, 0, 255).tolist(), cv2.LINE_AA, 4)
