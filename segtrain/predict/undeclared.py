"""Maps with areas of zeros that nothing marks as no data: black borders, which get classes."""

from collections.abc import Iterable

import cv2
import numpy as np

from segtrain.text import counted, first_of

# A dark pixel of a scene may be 0 in all bands; squares of such pixels are outside of it, if they
# are more than this share of all.
_SQUARE_PX, _SHARE = 9, 0.01
_REPAIR = "if 0 means no data there, gdal_translate -a_nodata 0 FILE NEW.tif declares it"


def where_zero(image: np.ndarray) -> np.ndarray:
    """Which pixels (H, W, C) lie in squares that are 0 in all bands, (H, W) uint8; NaN is not 0."""
    zero = (image == 0).all(axis=2).astype(np.uint8)
    return cv2.morphologyEx(zero, cv2.MORPH_OPEN, np.ones((_SQUARE_PX, _SQUARE_PX), np.uint8))


def zero_lines(shares: Iterable[tuple[str, float]]) -> list[str]:
    """A warning of the files whose shares of such pixels are large; empty: there are none."""
    large = [f"{name} ({share:.1%})" for name, share in shares if share > _SHARE]
    which = counted(len(large), "map has", "maps have")
    what = f"{which} areas of 0 in all bands (of so many pixels), which were given classes"
    return [f"warning: {what}: {first_of(large)}; {_REPAIR}"] if large else []
