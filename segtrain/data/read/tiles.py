"""Tiles of one larger picture: which of them overlap, and strips of them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class TileBox(NamedTuple):
    """What a tile shows of a picture, in its pixels; bottom and right are outside."""

    mosaic: str
    top: float
    left: float
    bottom: float
    right: float

    def overlaps(self, other: "TileBox") -> bool:
        """Whether both show more of the picture than a rim of half a pixel.

        >>> TileBox("a", 0, 0, 64, 64).overlaps(TileBox("a", 0, 48, 64, 112))
        True
        """
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        right = min(self.right, other.right) - max(self.left, other.left)
        return self.mosaic == other.mosaic and min(down, right) > 0.5


def overlapping(boxes: Sequence[TileBox | None]) -> Iterator[tuple[int, int]]:
    """The pairs of tiles that overlap, by their indices, the smaller one first."""
    sides = [max(b.bottom - b.top, b.right - b.left) for b in boxes if b is not None]
    side = max(sides, default=1.0)
    cells: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for i, box in enumerate(boxes):
        if box is None:
            continue
        # Cells as large as the largest tile: what overlaps a box is in its cell or in one beside
        # it.
        row, column = int(box.top // side), int(box.left // side)
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                for other in cells.get((box.mosaic, row + down, column + right), ()):
                    if box.overlaps(boxes[other]):
                        yield other, i
        cells[box.mosaic, row, column].append(i)


def strips(
    boxes: Sequence[TileBox | None], number: int, side: int | None = None
) -> list[int | None]:
    """The strip of its picture that each tile is in, from 0; None: it is no tile.

    Of `number` strips with about equally many tiles, from the top (side 1) or from the left (2), so
    that few tiles overlap those of another strip. Tiles that begin at one place are in one strip.

    side: None: along the longer side of the picture.

    >>> strips([TileBox("a", 0, x, 64, x + 64) for x in (0, 48, 96, 144)] + [None], 2)
    [0, 0, 1, 1, None]
    """
    strip_of: list[int | None] = [None] * len(boxes)
    by_mosaic: dict[str, list[int]] = defaultdict(list)
    for i, box in enumerate(boxes):
        if box is not None:
            by_mosaic[box.mosaic].append(i)
    for tiles in by_mosaic.values():
        height, width = (
            max(boxes[i][end] for i in tiles) - min(boxes[i][start] for i in tiles)
            for start, end in ((1, 3), (2, 4))
        )
        start = side or (1 if height >= width else 2)
        # Of starts, not of tiles: tiles that begin at one place stay together.
        places = sorted({boxes[i][start] for i in tiles})
        for i in tiles:
            strip_of[i] = places.index(boxes[i][start]) * number // len(places)
    return strip_of
