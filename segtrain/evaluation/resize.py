"""Bilinear resizing of a map of scores, some rows at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from segtrain.evaluation.settings import Size
from segtrain.evaluation.windows import Tile

# Numbers of a tile, (K, rows, W): 64 MiB in float32.
TILE_ELEMENTS = 2**24


def resized_tiles(scores: Tensor, out_size: Size, *, align_corners: bool) -> Iterator[Tile]:
    """`functional.interpolate(scores, out_size)` of (K, H, W), as tiles from the top down.

    A tile holds at most TILE_ELEMENTS numbers: K * h * w of many classes would not fit into memory.
    """
    num_classes, height, width = scores.shape
    low, high, weight = _source_rows(height, out_size[0], scores, align_corners=align_corners)
    num_rows = max(1, TILE_ELEMENTS // (num_classes * max(width, out_size[1])))
    for start in range(0, out_size[0], num_rows):
        rows = slice(start, min(start + num_rows, out_size[0]))
        if height == out_size[0]:
            tile = scores[:, rows]
        else:
            tile = torch.lerp(scores[:, low[rows]], scores[:, high[rows]], weight[:, rows])
        if width != out_size[1]:
            # The number of rows stays, so this only resizes along the columns.
            size = (tile.shape[1], out_size[1])
            tile = functional.interpolate(
                tile.unsqueeze(0), size=size, mode="bilinear", align_corners=align_corners
            ).squeeze(0)
        yield rows, tile


def _source_rows(
    height: int, out_height: int, like: Tensor, *, align_corners: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The two source rows of each output row, (h,) each, and the weight of the second, (1, h, 1).

    The rule is that of functional.interpolate.
    """
    position = torch.arange(out_height, dtype=torch.float64, device=like.device)
    if align_corners:
        position *= (height - 1) / max(out_height - 1, 1)
    else:
        position = ((position + 0.5) * (height / out_height) - 0.5).clamp(min=0)
    low = position.floor().clamp(max=height - 1)
    weight = (position - low).to(like.dtype).view(1, -1, 1)
    high = (low + 1).clamp(max=height - 1)
    return low.long(), high.long(), weight
