"""Where GeoTIFFs lie on the map, and whether a label lies where its image does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from segtrain.files import read_bytes

# https://docs.ogc.org/is/19-008r4/19-008r4.html: tags of GeoTIFF, and keys of coordinate systems.
_SCALE, _TIEPOINT, _TRANSFORMATION, _KEYS = PLACE_TAGS = 33550, 33922, 34264, 34735
_SYSTEMS = (2048, 3072)
_USER_DEFINED = 32767
SAME_EXTENT = "cut both to the same extent and pixels, as gdalwarp -te and -tr do"
# Pixels as points or as areas differ by half of one.
_NEAR_PX, _SAME_SCALE = 0.75, 1e-3


class MapPlace(NamedTuple):
    """The upper left corner of an image on the map, and the step of a pixel to the right and down.

    system: EPSG codes of the coordinate system; empty: the file does not say.
    """

    x: float
    y: float
    right: tuple[float, float]
    down: tuple[float, float]
    system: tuple[int, ...] = ()


def place_of(tags: Mapping[int, Any]) -> MapPlace | None:
    """The place that the tags of a TIFF give, by their numbers; None: there is none.

    >>> place_of({33550: (2.0, 2.0, 0.0), 33922: (0.0, 0.0, 0.0, 500.0, 80.0, 0.0)})
    MapPlace(x=500.0, y=80.0, right=(2.0, 0.0), down=(0.0, -2.0), system=())
    """
    keys = tags.get(_KEYS) or ()
    entries = zip(keys[4::4], keys[7::4], strict=False)
    system = tuple(v for k, v in entries if k in _SYSTEMS and v != _USER_DEFINED)
    try:
        if matrix := tags.get(_TRANSFORMATION):
            a, b, _, x, d, e, _, y = map(float, matrix[:8])
            return MapPlace(x, y, (a, d), (b, e), system)
        column, row, _, x, y, _ = map(float, tags[_TIEPOINT][:6])
        width, height = map(float, tags[_SCALE][:2])
    except (KeyError, TypeError, ValueError):
        return None
    return MapPlace(x - column * width, y + row * height, (width, 0.0), (0.0, -height), system)


def place_beside(path: str | Path) -> MapPlace | None:
    """The place that a world file beside an image gives: `a.tfw`, `a.pgw`, `a.jgw`; None: no such.

    Its six lines are the steps of a pixel, and the middle of the first one
    (https://en.wikipedia.org/wiki/World_file).
    """
    path = Path(path)
    suffix = path.suffix.lower()
    try:
        content = read_bytes(path.with_suffix(f"{suffix[:2]}{suffix[-1]}w"))
        a, d, b, e, x, y = map(float, content.decode("ascii").split())
    except (OSError, ValueError):
        return None
    return MapPlace(x - (a + b) / 2, y - (d + e) / 2, (a, d), (b, e))


def other_place(image: MapPlace | None, label: MapPlace | None) -> str:
    """How a label lies elsewhere than its image, in words; empty: it does not, or nothing is known.

    >>> image = MapPlace(500.0, 80.0, (2.0, 0.0), (0.0, -2.0))
    >>> other_place(image, image._replace(x=516.0))
    '8 pixels to the right and 0 down'
    """
    if image is None or label is None:
        return ""
    if image.system and label.system and image.system != label.system:
        return f"coordinate system {label.system} instead of {image.system}"
    (a, d), (b, e) = image.right, image.down
    steps = zip((a, d, b, e), (*label.right, *label.down), strict=True)
    size = max(map(abs, (a, d, b, e)))
    if any(abs(one - other) > _SAME_SCALE * size for one, other in steps):
        return "pixels of another size or direction"
    area = a * e - b * d
    if area == 0:
        return ""
    x, y = label.x - image.x, label.y - image.y
    right, down = (x * e - y * b) / area, (y * a - x * d) / area
    if max(abs(right), abs(down)) <= _NEAR_PX:
        return ""
    right, down = round(right, 2) + 0.0, round(down, 2) + 0.0  # no -0
    return f"{right:g} pixels to the right and {down:g} down"
