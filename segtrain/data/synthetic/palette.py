"""Colours. Surfaces of different classes draw from the same few materials.

A patch of wall, road, pavement or bus must not give its class away: what tells them apart is where
they are and what surrounds them.
"""

import numpy as np

_MATERIALS = np.float32(
    [
        (84, 85, 88),  # asphalt
        (112, 113, 114),  # old asphalt
        (126, 131, 138),  # slate
        (140, 138, 133),  # concrete
        (164, 157, 144),  # sandstone
        (148, 104, 86),  # brick
        (178, 176, 172),  # plaster
        (150, 140, 112),  # ochre
    ]
)
# The first ones, which roads are made of.
_NUM_DARK = 3
_GREENS = np.float32([(62, 88, 44), (84, 104, 52), (102, 112, 58), (58, 78, 52), (118, 112, 66)])
_PAINTS = np.float32(
    [(150, 40, 38), (38, 64, 120), (205, 200, 190), (36, 38, 42), (196, 160, 60), (60, 96, 78)]
)


def material(rng: np.random.Generator, spread: float = 9.0) -> np.ndarray:
    """A colour (3,) of stone, shared by roads, pavements, walls and vehicles."""
    return _vary(rng, _MATERIALS[rng.integers(len(_MATERIALS))], spread)


def paving(rng: np.random.Generator) -> np.ndarray:
    """A material that roads are made of, (3,): one of the darker ones."""
    return _vary(rng, _MATERIALS[rng.integers(_NUM_DARK)], 8.0)


def masonry(rng: np.random.Generator) -> np.ndarray:
    """A material of walls, (3,): mostly one of the lighter ones, now and then any."""
    first = _NUM_DARK if rng.random() < 0.9 else 0
    return _vary(rng, _MATERIALS[rng.integers(first, len(_MATERIALS))], 12.0)


def green(rng: np.random.Generator) -> np.ndarray:
    """A colour (3,) of leaves or grass."""
    return _vary(rng, _GREENS[rng.integers(len(_GREENS))], 7.0)


def paint(rng: np.random.Generator, plain: float) -> np.ndarray:
    """A colour (3,) of a car body or clothes; with probability `plain` that of a material."""
    if rng.random() < plain:
        return material(rng)
    return _vary(rng, _PAINTS[rng.integers(len(_PAINTS))], 14.0)


def _vary(rng: np.random.Generator, color: np.ndarray, spread: float) -> np.ndarray:
    lighter = rng.normal(0, spread)
    return np.clip(color + lighter + rng.normal(0, spread / 3, 3), 12, 238).astype(np.float32)
