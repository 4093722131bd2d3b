"""What the things of a street look like.

Surfaces of different classes draw from the same few colours. A patch of wall, road, pavement or
bus must not give its class away: its place and its surroundings tell the class.
"""

import numpy as np

from segtrain.desk.synthetic.canvas import (
    BOX,
    CIRCLE,
    SQUARE,
    Block,
    Canvas,
    Rng,
    facing,
    panels,
    spot,
)

# Label ids as Cityscapes defines them (cityscapesscripts/helpers/labels.py).
ROAD, SIDEWALK, BUILDING, POLE, TRAFFIC_SIGN, VEGETATION = 7, 8, 11, 17, 20, 21
TERRAIN, SKY, PERSON, CAR, BUS = 22, 23, 24, 26, 28
STATIC = 4  # ignored in training and scores

ASPHALT = np.float32([(84, 85, 88), (112, 113, 114), (126, 131, 138)])
_BRICK = np.float32([(140, 138, 133), (164, 157, 144), (148, 104, 86), (178, 176, 172)])
STONES = np.concatenate((ASPHALT, _BRICK))  # of pavements, some walls and some vehicles
GREENS = np.float32([(62, 88, 44), (84, 104, 52), (102, 112, 58), (58, 78, 52), (118, 112, 66)])
_PAINTS = np.float32([(150, 40, 38), (38, 64, 120), (205, 200, 190), (60, 96, 78), (196, 160, 60)])
_GLASS = np.float32([(54, 60, 68), (120, 140, 165), (160, 174, 188)])
_SKIN = np.float32([(206, 164, 138), (160, 112, 84), (104, 72, 54), (224, 186, 160)])
_STEEL = np.float32([(58, 62, 64), (74, 84, 80), (168, 170, 172)])
_RUBBER, _BARK = np.float32([(26, 26, 28), (78, 66, 56)])
_WHITE_LAMP, _RED_LAMP = np.float32([(232, 230, 214), (180, 52, 44)])


def vary(rng: Rng, colors: np.ndarray, spread: float = 9.0) -> np.ndarray:
    """One of `colors` (n, 3), a little lighter or darker."""
    color = colors[rng.integers(len(colors))] + rng.normal(0, spread) + rng.normal(0, spread / 3, 3)
    return color.clip(12, 238).astype(np.float32)


def car(canvas: Canvas, rng: Rng, x: float, z: float, heading: float) -> None:
    """A car; with heading 0 it drives away from the camera."""
    block = Block(x, z, heading, *rng.uniform((3.8, 1.7, 1.4), (4.8, 1.9, 1.75)))
    front = [(0.5, 0.16), (0.5, 0.56), (0.22, 0.65), (0.08, 1.0)]
    rear = [(-0.3, 1.0), (-0.44, 0.65), (-0.5, 0.58), (-0.5, 0.16)]
    window = np.array([(0.16, 0.68), (0.06, 0.94), (-0.28, 0.94), (-0.39, 0.68)])
    _vehicle(canvas, rng, CAR, block, np.array(front + rear), (2, 4), window)


def bus(canvas: Canvas, rng: Rng, x: float, z: float, heading: float) -> None:
    """A bus, with windows like those of the walls behind it."""
    block = Block(x, z, heading, *rng.uniform((8.0, 2.4, 2.9), (12.0, 2.6, 3.8)))
    outline = np.array([(0.5, 0.1), (0.5, 0.4), (0.5, 1), (-0.5, 1), (-0.5, 0.4), (-0.5, 0.1)])
    windows = SQUARE * (0.065, 0.2) + [[(x, 0.65)] for x in np.linspace(-0.41, 0.41, 6)]
    _vehicle(canvas, rng, BUS, block, outline, (1, 3), windows)


def building(canvas: Canvas, rng: Rng, x: float, z: float, length: float, height: float) -> None:
    """A house that begins at `z`; x: its edge towards the street."""
    width = 14.0
    block = Block(x + np.sign(x) * width / 2, z + length / 2, 0.0, length, width, height)
    wall = vary(rng, _BRICK if rng.random() < 0.9 else STONES, 12.0)
    base = vary(rng, STONES) if rng.random() < 0.5 else wall
    glass = vary(rng, _GLASS, 12.0)
    floor, bay = rng.uniform(2.8, 3.6) / height, rng.uniform(1.8, 4.0)
    tall, wide = rng.uniform(0.4, 0.65) * floor, rng.uniform(0.35, 0.8)
    for i, face in _solid(canvas, block, BOX, wall, BUILDING).items():
        # BOX has three edges: faces 3 and 4 are the flanks.
        flank = i > 2
        canvas.fill(panels(face, 0, 0, 1, 0.9 * floor), base * (0.8 if flank else 0.95))
        count = int((length if flank else width) / bay)
        # Windows of few pixels would melt into a wall of glass.
        if np.ptp(canvas.camera.project(face)[:, 0]) > 3 * count:
            left, bottom = np.meshgrid(np.arange(count) / count, np.arange(0, 1 - floor, floor))
            left, bottom = left + (1 - wide) / 2 / count, bottom + 0.3 * floor
            canvas.fill(panels(face, left, bottom, left + wide / count, bottom + tall), glass)


def bush(canvas: Canvas, rng: Rng, x: float, z: float) -> None:
    """A bush, or a tree whose trunk is hidden."""
    tall = rng.choice((rng.uniform(0.8, 2.5), rng.uniform(3.0, 8.0)))
    _leaves(canvas, rng, (x, 0.5 * tall, z), (0.6 * tall, 0.5 * tall))


def tree(canvas: Canvas, rng: Rng, x: float, z: float) -> None:
    """A trunk and a crown; both are vegetation."""
    tall, spread, half = rng.uniform(4.5, 7.0), rng.uniform(1.6, 2.6), rng.uniform(0.14, 0.3)
    canvas.shade(spot(x, z, spread, 0.5))
    trunk = facing(SQUARE * (half, 0.35 * tall), x, 0.35 * tall, z)
    canvas.fill(trunk, _BARK * rng.uniform(0.7, 1.3), VEGETATION)
    _leaves(canvas, rng, (x, 0.75 * tall, z), (spread, 0.32 * tall))


def pole(canvas: Canvas, rng: Rng, x: float, z: float) -> None:
    """A mast as thick as those of trams; some carry a traffic sign."""
    half, up, steel = rng.uniform(0.28, 0.42), rng.uniform(2.5, 4.5), vary(rng, _STEEL)
    canvas.shade(spot(x, z, 1.6 * half, 0.3))
    canvas.fill(facing(SQUARE * (half, up), x, up, z), steel, POLE)
    canvas.fill(facing(SQUARE * (0.4 * half, up), x - 0.6 * half, up, z), steel * 1.25)
    if rng.random() < 0.55:
        rim, inner = _PAINTS[rng.permutation(len(_PAINTS))[:2]] * rng.uniform(0.8, 1.1)
        triangle = np.array([(-1.1, -0.9), (1.1, -0.9), (0, 1.05)])
        shape = (CIRCLE, triangle, SQUARE, SQUARE * (1.5, 0.9))[rng.integers(4)]
        outline, y = shape * rng.uniform(0.65, 0.95), rng.uniform(2.7, 3.6)
        for part, color in ((1, rim), (0.78, inner), ((0.4, 0.15), rim)):
            canvas.fill(facing(outline * part, x, y, z), color, TRAFFIC_SIGN)


def person(canvas: Canvas, rng: Rng, x: float, z: float) -> None:
    """A pedestrian who faces the camera."""
    tall, broad, stride = rng.uniform(1.55, 1.95), rng.uniform(0.28, 0.4), rng.uniform(0.1, 0.27)
    trousers, coat = vary(rng, _PAINTS) * 0.7, vary(rng, _PAINTS, 14.0)
    hip, neck, hem = 0.47 * tall, 0.83 * tall, rng.uniform(0.25, 0.47) * tall
    canvas.shade(spot(x, z, 0.35, 0.3))
    for side in (-1, 1):
        foot, hand, shoulder = side * stride, side * (broad + 0.1), side * 0.7 * broad
        leg = [(side * 0.01, hip), (foot - 0.09, 0), (foot + 0.09, 0), (side * 0.19, hip)]
        arm = [(shoulder, neck), (hand, hip), (hand - side * 0.13, hip), (shoulder, neck - 0.2)]
        canvas.fill(facing(np.array(leg), x, 0, z), trousers, PERSON)
        canvas.fill(facing(np.array(arm), x, 0, z), coat * 0.85, PERSON)
    # After the limbs, whose ends it covers.
    shoulders = [(1, neck - 0.05), (0.5, neck), (-0.5, neck), (-1, neck - 0.05)]
    torso = np.array([(-0.8, hem), (0.8, hem), *shoulders]) * (broad, 1)
    canvas.fill(facing(torso, x, 0, z), coat, PERSON)
    for high, radius, colors in ((0.95, 0.06, _PAINTS * 0.5), (0.91, 0.075, _SKIN)):
        head = CIRCLE * (0.11, radius * tall)
        canvas.fill(facing(head, x, high * tall, z), vary(rng, colors, 4.0), PERSON)


def litter_bin(canvas: Canvas, rng: Rng, x: float, z: float) -> None:
    """A bin, which Cityscapes labels static."""
    block = Block(x, z, 0.0, 0.6, rng.uniform(0.5, 1.0), rng.uniform(0.8, 1.3))
    _solid(canvas, block, BOX, vary(rng, _PAINTS), STATIC)


def _vehicle(
    canvas: Canvas,
    rng: Rng,
    label: int,
    block: Block,
    outline: np.ndarray,
    panes: tuple[int, ...],
    windows: np.ndarray,
) -> None:
    """outline: side view. panes: its edges that are glass. windows: side views, for the flanks."""
    floor = np.array([(0.53, 0.0), (-0.53, 0.0)])
    canvas.shade(np.concatenate((block.place(floor, -0.58), block.place(floor[::-1], 0.58))))
    chassis = block._replace(length=0.9 * block.length, width=0.94 * block.width, height=0.45)
    _solid(canvas, chassis, BOX, _RUBBER, label)
    coat = vary(rng, STONES if rng.random() < 0.3 else _PAINTS, 14.0)
    glass, last = vary(rng, _GLASS), len(outline) - 2
    wheel = CIRCLE * (0.28 + 0.05 * (block.height - 1)) / (block.length, block.height)
    for i, face in _solid(canvas, block, outline, coat, label).items():
        if i in panes:
            canvas.fill(panels(face, 0.08, 0.1, 0.92, 0.9), glass)
        elif i in (0, last):
            # Edge 0 is the front, with white lamps; the last one is the rear.
            left = np.array((0.04, 0.76))
            canvas.fill(panels(face, left, 0.5, left + 0.2, 0.8), _RED_LAMP if i else _WHITE_LAMP)
        elif i > last:
            across = i - last - 1.5  # -0.5 on the left flank, 0.5 on the right
            canvas.fill(block.place(windows, across), glass * 0.85)
            for along in (-0.3, 0.31):
                center = (along, wheel[:, 1].max())
                canvas.fill(block.place(center + wheel, across), _RUBBER, label)
                canvas.fill(block.place(center + 0.55 * wheel, across), 4 * _RUBBER)


def _solid(
    canvas: Canvas, block: Block, side_view: np.ndarray, color: np.ndarray, label: int
) -> dict[int, np.ndarray]:
    """Paints the faces in view; returns them by their place in `Block.faces`."""
    faces = enumerate(block.faces(side_view))
    seen = {i: face for i, face in faces if canvas.sees_front(face)}
    for i, face in seen.items():
        # A bonnet slopes a little and still counts as flat.
        flank, flat = i >= len(side_view) - 1, np.ptp(face[:, 1]) < 0.12 * block.height
        canvas.fill(face, color * (0.8 if flank else 1.2 if flat else 0.95), label)
    return seen


def _leaves(
    canvas: Canvas, rng: Rng, center: tuple[float, float, float], reach: tuple[float, float]
) -> None:
    """A heap of leafy discs, dark below and light above."""
    green = vary(rng, GREENS, 7.0)
    for up in (-0.5, -0.2, 0.1, 0.4):
        spots = rng.uniform(-1, 1, (9, 1, 2)) * (0.6, 0.35) + (0, up)
        discs = CIRCLE * rng.uniform(0.2, 0.38, (9, 1, 1)) * min(reach) + spots * reach
        canvas.fill(facing(discs, *center), green * (1 + 0.35 * up), VEGETATION)
